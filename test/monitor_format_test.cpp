// Records as JSON, as lines for people and for Megatron's parsers; the progress bar's text.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>

#include "test/monitor_harness.h"

namespace kinoe {
namespace {

TEST(MonitorJson, HasTheKeysOfAStepInOrder) {
  const std::string text = to_json(example());
  EXPECT_EQ(text.find('\n'), std::string::npos);
  const nlohmann::ordered_json json = nlohmann::ordered_json::parse(text);
  std::string keys;
  for (const auto& [key, value] : json.items()) keys += (keys.empty() ? "" : " ") + key;
  EXPECT_EQ(
      keys,
      "step samples tokens loss grad_norm lr global_batch seq_len step_ms compute_ms data_wait_ms "
      "comm_wait_ms comm_bytes "
      "tokens_per_s tokens_per_s_per_gpu tflops_per_gpu mfu mfu_full mem_bytes mem_peak_bytes skipped nan "
      "weights_hash");
  EXPECT_EQ(json["step"], 10);
  EXPECT_EQ(json["tokens"], 5242880);
  EXPECT_EQ(json["mfu"], 0.3963);
  EXPECT_TRUE(json["mfu_full"].is_null()) << "an unknown peak is not a number";
  EXPECT_EQ(json["weights_hash"], "00fedcba98765432");
}

TEST(MonitorJson, HasTheKeysOfAnEvaluation) {
  const nlohmann::json json = nlohmann::json::parse(to_json(EvalRecord{100, 200, 300, 1.5, 4096, 12.5}));
  EXPECT_EQ(
      json,
      nlohmann::json::parse(
          R"({"step":100,"samples":200,"tokens":300,"val_loss":1.5,"val_tokens":4096,"eval_ms":12.5})"));
}

TEST(MonitorJson, FloatsReadBackToTheSameBits) {
  std::mt19937_64 random(7);
  std::vector<double> values = {0.0,
                                -0.0,
                                1.0,
                                -3.0,
                                1e22,
                                1e300,
                                5e-324,
                                0.1,
                                1.0 / 3,
                                std::numeric_limits<double>::max(),
                                static_cast<double>(0.1F),
                                1e21,
                                1e-7,
                                123456789012345680.0};
  while (values.size() < 2000) {
    const double value = std::bit_cast<double>(random());
    if (std::isfinite(value)) values.push_back(value);
  }
  StepRecord record;
  for (const double value : values) {
    record.loss = value;
    const std::string text = to_json(record);
    const double read = nlohmann::json::parse(text)["loss"].get<double>();
    ASSERT_EQ(std::bit_cast<uint64_t>(read), std::bit_cast<uint64_t>(value)) << text;
    const size_t at = text.find("\"loss\":") + 7;
    const double by_strtod = std::strtod(text.c_str() + at, nullptr);
    ASSERT_EQ(std::bit_cast<uint64_t>(by_strtod), std::bit_cast<uint64_t>(value)) << text;
  }
}

TEST(MonitorJson, WhatIsNotFiniteIsNull) {
  for (const double value : {kNaN, -kNaN, kInfinity, -kInfinity}) {
    StepRecord record = example();
    record.loss = value;
    record.grad_norm = value;
    record.mfu = value;
    const nlohmann::json json = nlohmann::json::parse(to_json(record));
    EXPECT_TRUE(json["loss"].is_null());
    EXPECT_TRUE(json["grad_norm"].is_null());
    EXPECT_TRUE(json["mfu"].is_null());
  }
}

TEST(MonitorMegatron, EveryFieldInOrder) {
  EXPECT_EQ(
      to_megatron(example(), 50000),
      " iteration       10/   50000 | consumed samples:         2560 | consumed tokens:      5242880 | "
      "elapsed time per iteration (ms): 4117.0 | learning rate: 4.688E-08 | global batch size:   256 | "
      "lm loss: 1.098235E+01 | loss scale: 1.0 | curriculum seqlen:  2048 | actual seqlen:  2048 | "
      "number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 62.181 | "
      "tokens per gpu per second (tgs): 7903.250 | TFLOPs: 391.94 |");
}

TEST(MonitorMegatron, ParsersOfItsLogsReadIt) {
  const std::string line = to_megatron(example(1234567), 200000000);
  std::smatch match;
  // As log readers do it: the iteration, then "name: number |" wherever it stands.
  ASSERT_TRUE(std::regex_search(line, match, std::regex(R"(iteration\s+(\d+)/\s*(\d+) \|)")));
  EXPECT_EQ(match[1], "1234567");
  EXPECT_EQ(match[2], "200000000");
  const auto value = [&](const std::string& name) {
    std::smatch found;
    const std::regex field(name + R"(:\s+([-+0-9.E]+) \|)");
    return std::regex_search(line, found, field) ? std::stod(found[1]) : -1;
  };
  EXPECT_EQ(value("consumed samples"), 256 * 1234567);
  EXPECT_EQ(value("consumed tokens"), 524288.0 * 1234567);
  EXPECT_EQ(value("elapsed time per iteration \\(ms\\)"), 4117.0);
  EXPECT_NEAR(value("lm loss"), 10.9823456, 1e-5);
  EXPECT_EQ(value("tokens per gpu per second \\(tgs\\)"), 7903.25);
  EXPECT_EQ(value("TFLOPs"), 391.94);
  EXPECT_NEAR(value("samples per second"), 256 / 4.11704, 1e-3);
}

TEST(MonitorMegatron, NotANumberIsCountedOnItsLine) {
  StepRecord record = example();
  record.loss = kNaN;
  const std::string line = to_megatron(record, 100);
  EXPECT_NE(line.find("lm loss: NAN |"), std::string::npos) << line;
  EXPECT_NE(line.find("number of skipped iterations:   1 | number of nan iterations:   1 |"),
            std::string::npos)
      << line;
  record = example();
  record.applied = false;  // no target token in the batch
  EXPECT_NE(to_megatron(record, 100).find("skipped iterations:   1 | number of nan iterations:   0 |"),
            std::string::npos);
}

TEST(MonitorLine, SaysWhatMatters) {
  EXPECT_EQ(to_line(example(), 50000),
            "step    10/50000 | loss 10.9823 | norm  1.250 | lr 4.69e-08 |  4117.0 ms | 127k tok/s | 392 "
            "TFLOP/s | MFU 39.6%");
  StepRecord record = example();
  record.mfu.reset();
  record.tflops_per_gpu = 0.0512;
  record.loss = kNaN;
  record.applied = false;
  EXPECT_EQ(to_line(record, 0),
            "step     10 | loss     nan | norm  1.250 | lr 4.69e-08 |  4117.0 ms | 127k tok/s | 0.051 "
            "TFLOP/s | NOT APPLIED");
  EXPECT_EQ(to_line(EvalRecord{100, 0, 0, 1.23456, 20480, 1250}, 1000),
            "step  100/1000 | validation loss 1.2346 | 20.5k tokens | 1.2s");
}

TEST(MonitorLine, Durations) {
  EXPECT_EQ(duration_text(0.04), "0.0s");
  EXPECT_EQ(duration_text(9.96), "10s");
  EXPECT_EQ(duration_text(59.6), "1m00s");
  EXPECT_EQ(duration_text(185), "3m05s");
  EXPECT_EQ(duration_text(3599.7), "1h00m");
  EXPECT_EQ(duration_text(7620), "2h07m");
  EXPECT_EQ(duration_text(86400 * 3 + 4 * 3600), "3d04h");
  EXPECT_EQ(duration_text(kNaN), "?");
  EXPECT_EQ(duration_text(-1), "?");
}

TEST(MonitorBar, FitsEveryWidth) {
  EXPECT_EQ(progress_bar(79, 450, 1000, 2.31, 62),
            "[================>                   ]  45% 450/1000 | loss 2.3100 | 1m02s left");
  EXPECT_EQ(progress_bar(40, 450, 1000, 2.31, 62), " 45% 450/1000 | loss 2.3100 | 1m02s left");
  EXPECT_EQ(progress_bar(30, 450, 1000, 2.31, 62), " 45% 450/1000 | 1m02s left");
  EXPECT_EQ(progress_bar(200, 1000, 1000, 2.31, 0).substr(0, 56), "[" + std::string(48, '=') + "] 100% ");
  EXPECT_EQ(progress_bar(79, 999, 1000, 1, -1).find("100%"), std::string::npos) << "100% only at the end";
  EXPECT_EQ(progress_bar(79, 1, 1000, 1, -1).find("left"), std::string::npos);
  EXPECT_EQ(progress_bar(79, 12, 0, 1, 5), "step 12 | loss 1.0000");
  for (int width = -1; width < 220; ++width)
    for (const double loss : {2.3, kNaN, 1e300})
      ASSERT_LE(static_cast<int>(progress_bar(width, 123456789, 987654321, loss, 1e9).size()),
                std::max(0, width));
}

TEST(MonitorFormat, Names) {
  EXPECT_EQ(parse_log_format("line"), LogFormat::line);
  EXPECT_EQ(parse_log_format("megatron"), LogFormat::megatron);
  EXPECT_EQ(parse_log_format("json"), LogFormat::json);
  EXPECT_EQ(parse_log_format("Line"), std::nullopt);
}

}  // namespace
}  // namespace kinoe
