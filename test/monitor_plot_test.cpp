// The loss curve and what it is drawn from, the record of a run.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <regex>

#include "test/faulty_files.h"
#include "test/monitor_harness.h"

namespace kinoe {
namespace {

TEST(LossHistory, LastWriteOfAStepWinsAndTornLinesAreLeftOut) {
  const FreshDirectory dir;
  put_file(dir / "m", R"({"step":1,"loss":5.5}
{"step":2,"loss":4.0}
{"step":3,"loss":3.5}
{"step":3,"val_loss":3.25}
not json
{"step":2,"loss":4.25}
{"step":3,"loss":null}
{"loss":1.0}
[1]
{"step":4,"loss":3)");
  const LossHistory history = read_loss_history(dir / "m");
  ASSERT_EQ(history.train.size(), 2U);
  EXPECT_EQ(history.train[0].loss, 5.5);
  EXPECT_EQ(history.train[1].step, 2);
  EXPECT_EQ(history.train[1].loss, 4.25);
  ASSERT_EQ(history.validation.size(), 1U);
  EXPECT_EQ(history.validation[0].loss, 3.25);
  expect_error(ExitCode::usage, {dir / "none"}, [&] { read_loss_history(dir / "none"); });
}

LossHistory falling(int steps) {
  LossHistory history;
  for (int i = 1; i <= steps; ++i)
    history.train.push_back({i, 1.05 + 4.5 * std::exp(-i / 20.0) + 0.02 * (i % 2)});
  for (int i = 50; i <= steps; i += 50) history.validation.push_back({i, 1.06});
  return history;
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

/// The y coordinates (pixels, downwards) of the last path drawn in this colour.
std::vector<double> path_heights(const std::string& svg, const std::string& color) {
  const size_t stroke = svg.rfind("stroke=\"" + color + "\" stroke-width=\"2.4\" d=");
  if (stroke == std::string::npos) return {};
  const std::string path = svg.substr(stroke, svg.find("\"/>", stroke) - stroke);
  std::vector<double> heights;
  const std::regex point(R"([ML]([-0-9.]+) ([-0-9.]+))");
  for (std::sregex_iterator it(path.begin(), path.end(), point); it != std::sregex_iterator(); ++it)
    heights.push_back(std::stod((*it)[2]));
  return heights;
}

TEST(LossCurve, ShowsCurvesReferenceAndLabels) {
  const std::string svg =
      loss_curve_svg(falling(600), {"A <title> & more", "loss (nats per byte)", 1.03, "entropy 1.03"});
  EXPECT_EQ(svg.substr(0, 5), "<svg ");
  EXPECT_NE(svg.find("A &lt;title&gt; &amp; more"), std::string::npos);
  EXPECT_NE(svg.find(">entropy 1.03<"), std::string::npos);
  EXPECT_NE(svg.find("stroke-dasharray"), std::string::npos);
  EXPECT_NE(svg.find(">validation 1.0600<"), std::string::npos);
  EXPECT_NE(svg.find(">step<"), std::string::npos);
  EXPECT_NE(svg.find(">600<"), std::string::npos) << "the last mark of the axis";
  EXPECT_EQ(count(svg, "<circle"), 12U + 1) << "one a validation, one in the legend";
  EXPECT_EQ(count(svg, "<path"), 3U);
  const std::vector<double> heights = path_heights(svg, "#2463ae");
  ASSERT_EQ(heights.size(), 600U);
  EXPECT_LT(heights.front() + 200, heights.back()) << "the loss falls from the top to the bottom";
  for (const double height : heights) EXPECT_TRUE(height > 84 && height < 478) << height;
}

TEST(LossCurve, IsReadableForEveryHistory) {
  LossHistory odd = falling(100);
  odd.train[50].loss = kNaN;
  odd.train[60].loss = kInfinity;
  odd.train[70].loss = 1e12;
  const LossHistory constant{{{1, 2.0}, {2, 2.0}}, {}}, negative{{{1, -1.0}, {9, -30.0}}, {}},
      one{{{1, 5.5}}, {}}, only_validation{{}, {{10, 2.0}}}, huge{{{1, 1e9}, {1000000000, 1e-9}}, {}};
  for (const LossHistory& history :
       {falling(3), odd, constant, negative, one, only_validation, huge, LossHistory{}}) {
    const std::string svg = loss_curve_svg(history, {});
    EXPECT_EQ(svg.find("nan"), std::string::npos) << svg;
    EXPECT_EQ(svg.find("inf"), std::string::npos) << svg;
    EXPECT_GE(count(svg, "<text"), 4U);
    EXPECT_EQ(count(svg, "<g "), count(svg, "</g>"));
    EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
  }
  EXPECT_NE(loss_curve_svg({}, {}).find("no losses were recorded"), std::string::npos);
}

TEST(LossCurve, AMillionStepsAreASmallFile) {
  EXPECT_LT(loss_curve_svg(falling(1000000), {}).size(), 400000U);
}

TEST(LossCurve, IsWrittenWholeOrNotAtAll) {
  const FreshDirectory dir;
  write_loss_curve(dir / "loss.svg", falling(10), {});
  EXPECT_EQ(contents(dir / "loss.svg"), loss_curve_svg(falling(10), {}));
  expect_error(ExitCode::usage, {"loss.png", ".svg"},
               [&] { write_loss_curve(dir / "loss.png", falling(10), {}); });
  expect_error(ExitCode::usage, {"none/loss.svg"},
               [&] { write_loss_curve(dir / "none/loss.svg", falling(10), {}); });
  EXPECT_EQ(posix_files()->list(dir.path()), std::vector<std::string>{"loss.svg"});
}

// ---- Record of the run ---------------------------------------------------------------------------------------------

TEST(RunRecord, KnowsTheBuildAndTheHost) {
  const char* argv[] = {"train_gpt", "--data", "a b.txt"};
  RunRecord record = make_run_record(3, argv);
  record.device = "CPU";
  record.config = {{"steps", "100"}, {"lr", "0.0003"}, {"out", "bad \xff utf-8"}};
  const nlohmann::ordered_json json = nlohmann::ordered_json::parse(to_json(record));
  EXPECT_EQ(json["command"], nlohmann::ordered_json::parse(R"(["train_gpt","--data","a b.txt"])"));
  EXPECT_EQ(json["config"]["lr"], "0.0003");
  EXPECT_EQ(json["config"].begin().key(), "steps") << "options keep their order";
  EXPECT_FALSE(json["commit"].get<std::string>().empty());
  EXPECT_NE(json["compiler"].get<std::string>().find_first_of("0123456789"), std::string::npos);
  EXPECT_TRUE(
      std::regex_match(json["started"].get<std::string>(), std::regex(R"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)")));
  char host[256] = "";
  ::gethostname(host, sizeof host);
  EXPECT_EQ(json["hosts"][0], host);
  EXPECT_TRUE(json["libraries"].contains("glibc"));
}

}  // namespace
}  // namespace kinoe
