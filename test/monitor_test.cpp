// The monitor's streams when they fail, its counters, the bar on a terminal.
#include "trainer/monitor.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "test/faulty_files.h"
#include "test/monitor_harness.h"

namespace kinoe {
namespace {

/// A file that a Monitor prints to, and what it holds.
class Capture {
 public:
  explicit Capture(const std::string& path)
      : path_(path), fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND, 0600)) {}
  ~Capture() { ::close(fd_); }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] std::string text() const { return contents(path_); }

 private:
  std::string path_;
  int fd_;
};

struct Fixture {
  explicit Fixture(LogFormat format = LogFormat::line) {
    options.metrics_path = dir / "metrics.jsonl";
    options.format = format;
    options.total_steps = 100;
    options.out = out.fd();
    options.warnings = warnings.fd();
  }
  FreshDirectory dir;
  Capture out{dir / "out"}, warnings{dir / "warnings"};
  Monitor::Options options;
};

TEST(Monitor, WritesEachStepAtOnceAndNoBarWithoutATerminal) {
  Fixture run;
  Monitor monitor(run.options);
  monitor.record(example(1));
  EXPECT_EQ(contents(run.options.metrics_path), to_json(example(1)) + "\n") << "before the monitor ends";
  monitor.note("a sample");
  monitor.record(EvalRecord{1, 2, 3, 4, 5, 6});
  monitor.finish();
  EXPECT_EQ(run.out.text(),
            to_line(example(1), 100) + "\na sample\n" + to_line(EvalRecord{1, 2, 3, 4, 5, 6}, 100) + "\n");
  EXPECT_EQ(lines_of(contents(run.options.metrics_path)).size(), 2U);
  EXPECT_EQ(run.warnings.text(), "");
}

TEST(Monitor, JsonFormatPrintsRecordsOnly) {
  Fixture run(LogFormat::json);
  Monitor monitor(run.options);
  monitor.record(example(1));
  monitor.record(EvalRecord{1, 2, 3, 4, 5, 6});
  monitor.note("a sample");
  EXPECT_EQ(run.out.text(), contents(run.options.metrics_path));
  EXPECT_EQ(run.warnings.text(), "a sample\n");
}

TEST(Monitor, MegatronFormat) {
  Fixture run(LogFormat::megatron);
  Monitor monitor(run.options);
  monitor.record(example(1));
  EXPECT_EQ(run.out.text(), to_megatron(example(1), 100) + "\n");
}

TEST(Monitor, CountersAreTheTruth) {
  Fixture run;
  run.options.skipped = 5;
  run.options.nan = 2;
  Monitor monitor(run.options);
  StepRecord record = example(1);
  EXPECT_EQ(monitor.record(record).skipped, 5);
  record.loss = kNaN;
  EXPECT_EQ(monitor.record(record).nan, 3);
  record = example(2);
  record.grad_norm = kInfinity;
  EXPECT_FALSE(monitor.record(record).applied) << "a step that is not finite is never applied";
  record = example(3);
  record.applied = false;
  monitor.record(record);
  EXPECT_EQ(monitor.nan(), 4);
  EXPECT_EQ(monitor.skipped(), 8);
  const std::vector<std::string> lines = lines_of(contents(run.options.metrics_path));
  EXPECT_EQ(nlohmann::json::parse(lines.back())["skipped"], 8);
  EXPECT_EQ(nlohmann::json::parse(lines.back())["nan"], 4);
}

TEST(Monitor, AppendsAfterCuttingATornLine) {
  for (const size_t torn : {size_t{0}, size_t{5}, size_t{4095}, size_t{4096}, size_t{9000}}) {
    Fixture run;
    put_file(run.options.metrics_path, "{\"step\":1}\n" + std::string(torn, '{'));
    Monitor(run.options).record(example(2));
    EXPECT_EQ(contents(run.options.metrics_path), "{\"step\":1}\n" + to_json(example(2)) + "\n") << torn;
  }
  Fixture run;
  put_file(run.options.metrics_path, std::string(5000, 'x'));
  Monitor(run.options).record(example(1));
  EXPECT_EQ(contents(run.options.metrics_path), to_json(example(1)) + "\n")
      << "one torn line and nothing else";
}

TEST(Monitor, MetricsThatCannotBeOpenedAreAUsageError) {
  Fixture run;
  run.options.metrics_path = run.dir / "none/metrics.jsonl";
  expect_error(ExitCode::usage, {run.options.metrics_path, "No such file", "--out"},
               [&] { const Monitor monitor(run.options); });
}

TEST(Monitor, FullDiskIsSaidOnceAndTrainingGoesOn) {
  Fixture run;
  run.options.metrics_path = "/dev/full";
  Monitor monitor(run.options);
  for (int step = 1; step <= 3; ++step) monitor.record(example(step));
  EXPECT_EQ(lines_of(run.out.text()).size(), 3U);
  ASSERT_EQ(lines_of(run.warnings.text()).size(), 1U);
  EXPECT_NE(
      run.warnings.text().find("/dev/full: cannot be written: No space left on device; training goes on"),
      std::string::npos);
  monitor.finish();
  monitor.finish();
  ASSERT_EQ(lines_of(run.warnings.text()).size(), 2U) << run.warnings.text();
  size_t lost = 0;
  for (int step = 1; step <= 3; ++step) lost += to_json(example(step)).size() + 1;
  EXPECT_NE(run.warnings.text().find(cat("the last ", lost, " bytes")), std::string::npos)
      << run.warnings.text();
}

TEST(Monitor, RecordsHeldBackByAFullDiskAreWrittenWhenItHasRoom) {
  Fixture run;
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  {
    Monitor monitor(run.options);
    monitor.record(example(1));
    rlimit small = old;
    small.rlim_cur = to_json(example(1)).size() + 100;  // the second record is cut in two
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
    monitor.record(example(2));
    monitor.record(example(3));
    ::setrlimit(RLIMIT_FSIZE, &old);
    std::signal(SIGXFSZ, old_handler);
    EXPECT_EQ(contents(run.options.metrics_path).size(), small.rlim_cur);
    monitor.record(example(4));
  }
  std::string expected;
  for (int step = 1; step <= 4; ++step) expected += to_json(example(step)) + "\n";
  EXPECT_EQ(contents(run.options.metrics_path), expected);
}

TEST(Monitor, ClosedStandardOutputIsNoSignalAndSaidOnce) {
  Fixture run;
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  ::close(pipe[0]);
  run.options.out = pipe[1];
  const auto old_handler = std::signal(SIGPIPE, SIG_DFL);  // would end this process
  Monitor monitor(run.options);
  for (int step = 1; step <= 3; ++step) monitor.record(example(step));
  std::signal(SIGPIPE, old_handler);
  EXPECT_EQ(lines_of(contents(run.options.metrics_path)).size(), 3U);
  ASSERT_EQ(lines_of(run.warnings.text()).size(), 1U);
  EXPECT_NE(run.warnings.text().find("standard output: cannot be written: Broken pipe; training goes on"),
            std::string::npos);
  sigset_t pending;
  sigpending(&pending);
  EXPECT_EQ(sigismember(&pending, SIGPIPE), 0) << "nothing is left for later";
  ::close(pipe[1]);
}

TEST(Monitor, EveryStreamMayBeDeadAtOnce) {
  const int full = ::open("/dev/full", O_WRONLY);
  Monitor::Options options;
  options.metrics_path = "/dev/full";
  options.out = full;
  options.warnings = full;
  options.bar = full;
  {
    Monitor monitor(options);
    for (int step = 1; step <= 3; ++step) monitor.record(example(step));
    monitor.note("unheard");
  }
  ::close(full);
  options.out = options.warnings = options.bar = full;  // closed descriptors
  Monitor monitor(options);
  EXPECT_EQ(monitor.record(example(1)).step, 1);
}

TEST(Monitor, MetricsStayClearOfStandardStreams) {
  Fixture run;
  const int saved = ::dup(0);
  ::close(0);
  const Monitor monitor(run.options);
  const bool free = ::fcntl(0, F_GETFD) == -1;
  ::dup2(saved, 0);
  ::close(saved);
  EXPECT_TRUE(free);
}

TEST(Monitor, NonBlockingPipeThatIsFullDropsLinesAndGoesOn) {
  Fixture run;
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  ::fcntl(pipe[1], F_SETFL, O_NONBLOCK);
  const std::string block(4096, 'x');
  while (::write(pipe[1], block.data(), block.size()) > 0) {
  }
  run.options.out = pipe[1];
  Monitor monitor(run.options);
  monitor.record(example(1));
  EXPECT_EQ(lines_of(contents(run.options.metrics_path)).size(), 1U);
  EXPECT_NE(run.warnings.text().find("standard output: cannot be written"), std::string::npos);
  ::close(pipe[0]);
  ::close(pipe[1]);
}

/// A terminal without a screen: what is written to `slave` is read from `master`.
struct Terminal {
  Terminal() {
    master = ::posix_openpt(O_RDWR | O_NOCTTY);
    if (master < 0 || ::grantpt(master) != 0 || ::unlockpt(master) != 0) return;
    slave = ::open(::ptsname(master), O_RDWR | O_NOCTTY);
    ::fcntl(master, F_SETFL, O_NONBLOCK);
  }
  ~Terminal() {
    ::close(slave);
    ::close(master);
  }
  void resize(int columns) const {
    winsize size{};
    size.ws_col = static_cast<unsigned short>(columns);
    size.ws_row = 24;
    ::ioctl(slave, TIOCSWINSZ, &size);
  }
  [[nodiscard]] std::string read() const {
    std::string text;
    char block[4096];
    for (ssize_t n = 0; (n = ::read(master, block, sizeof block)) > 0;)
      text.append(block, static_cast<size_t>(n));
    return text;
  }
  int master = -1, slave = -1;
};

TEST(MonitorTerminal, OneRewrittenLineThatFollowsTheWidth) {
  const Terminal terminal;
  if (terminal.slave < 0) GTEST_SKIP() << "no pseudo-terminal here";
  ::setenv("TERM", "xterm", 1);
  Fixture run;
  run.options.warnings = terminal.slave;
  Monitor monitor(run.options);
  for (const int columns : {80, 40, 12, 200}) {
    terminal.resize(columns);
    static_cast<void>(terminal.read());
    monitor.record(example(50));
    const std::string drawn = terminal.read();
    EXPECT_EQ(drawn.find('\n'), std::string::npos) << "lines go to the other stream";
    const size_t begin = drawn.rfind('\r') + 1, end = drawn.rfind("\x1b[K");
    ASSERT_LT(begin, end);
    EXPECT_LT(static_cast<int>(end - begin), columns) << drawn.substr(begin, end - begin);
    EXPECT_NE(drawn.find("50%"), std::string::npos);
  }
  monitor.finish();
  EXPECT_EQ(terminal.read(), "\r\x1b[K") << "the bar is removed at the end";
  EXPECT_EQ(run.out.text().find('\r'), std::string::npos) << "a log file holds no bar";
}

TEST(MonitorTerminal, LinesAndBarShareATerminal) {
  const Terminal terminal;
  if (terminal.slave < 0) GTEST_SKIP() << "no pseudo-terminal here";
  ::setenv("TERM", "xterm", 1);
  terminal.resize(80);
  Fixture run;
  run.options.out = run.options.warnings = terminal.slave;
  Monitor monitor(run.options);
  monitor.record(example(1));
  const std::string first = terminal.read();
  EXPECT_EQ(first.substr(0, 6), "step  ");
  EXPECT_NE(first.find("\r\n\r"), std::string::npos) << "the bar begins below the line";
  EXPECT_EQ(first.find("left"), std::string::npos) << "no time is known after the first step";
  monitor.record(example(2));
  const std::string second = terminal.read();
  EXPECT_EQ(second.substr(0, 9), "\r\x1b[Kstep ") << "the bar makes way for the line";
  EXPECT_NE(second.find(" left\x1b[K"), std::string::npos) << second;
}

TEST(MonitorTerminal, DumbTerminalHasNoBar) {
  const Terminal terminal;
  if (terminal.slave < 0) GTEST_SKIP() << "no pseudo-terminal here";
  ::setenv("TERM", "dumb", 1);
  Fixture run;
  run.options.warnings = terminal.slave;
  Monitor(run.options).record(example(1));
  EXPECT_EQ(terminal.read(), "");
  ::setenv("TERM", "xterm", 1);
}

}  // namespace
}  // namespace kinoe
