// A rank of the real program is killed, or stopped so that it hangs, wherever a run may be: the others end within seconds
// and name it, nothing is left running, and the run goes on from its last checkpoint with a rank fewer and the same bits.
#include <fcntl.h>
#include <unistd.h>

#include <regex>

#include "test/ranks_faults.h"

namespace kinoe {
namespace {

enum class Phase { set_up, step, evaluation, save };
struct Case {
  Phase phase;
  int signal;
  int rank;
};
constexpr int kRanks = 3;
constexpr const char* kHangTimeout = "4";

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const char* const phases[] = {"SetUp", "Step", "Evaluation", "Save"};
  return std::string(info.param.signal == SIGKILL ? "Kill" : "Stop") +
         phases[static_cast<size_t>(info.param.phase)] + "Rank" + std::to_string(info.param.rank);
}

/// Keeps a file from being opened: who tries waits (fcntl F_SETLEASE; the kernel lets it through after 45 s).
class Held {
 public:
  explicit Held(const std::string& path) : fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    std::signal(SIGIO, SIG_IGN);  // says that somebody waits
    held_ = fcntl(fd_, F_SETLEASE, F_WRLCK) == 0;
  }
  ~Held() { close(fd_); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  [[nodiscard]] bool works() const { return held_; }
  [[nodiscard]] bool somebody_waits() const { return fcntl(fd_, F_GETLEASE) != F_WRLCK; }

 private:
  int fd_;
  bool held_ = false;
};

class RanksLost : public RanksFaultsTest, public testing::WithParamInterface<Case> {
 protected:
  /// A run of one rank up to its first checkpoint, after step 3. It is the same for many tests of a process.
  void begin() const {
    static std::map<bool, std::map<std::string, std::string>> begun;
    auto& files = begun[GetParam().phase == Phase::evaluation];
    fs::remove_all(path("run"));
    std::vector<std::string> more = {"--stop-after", "3"};
    if (GetParam().phase == Phase::evaluation) {
      std::vector<uint16_t> held_out(1000 * 32 + 1);  // an evaluation of about a second
      for (size_t i = 0; i < held_out.size(); ++i) held_out[i] = static_cast<uint16_t>(i * 7 % 300);
      write_shard("held_out.bin", held_out, 20240520, 1);
      more.insert(more.end(), {"--val-data", "held_out.bin", "--eval-every", "4", "--eval-batches", "0"});
    }
    if (files.empty()) {
      expect_code(kStopped, run_on(1, nine("run", more)));
      files = files_of("run");
      return;
    }
    for (const auto& [file, contents] : files) {
      fs::create_directories(fs::path(path(file)).parent_path());
      write(file, contents);
    }
  }

  /// Starts the ranks and signals one where it is meant to be; false when it was too late.
  bool strike() {
    const auto [phase, signal, rank] = GetParam();
    std::optional<Held> held;
    if (phase == Phase::set_up) held.emplace(path("text.bin"));
    if (held && !held->works()) {
      skipped_ = "files cannot be held here (fcntl F_SETLEASE)";
      return true;
    }
    start_ranks(kRanks, go_on("run", {"--hang-timeout", kHangTimeout, "--launch-timeout", "30"}));
    const std::string unfinished = path("run/checkpoints/step_00000006.tmp");
    const auto done = [&](int step) { return steps_of("run").size() >= static_cast<size_t>(step); };
    const bool there = wait_until([&] {
      switch (phase) {
        case Phase::set_up: return held->somebody_waits();
        case Phase::step:
        case Phase::evaluation: return done(4);
        case Phase::save: return fs::exists(unfinished);
      }
      return false;
    });
    EXPECT_TRUE(there) << said();
    if (phase == Phase::set_up || phase == Phase::evaluation)  // all ranks are to be in it
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
    signal_rank(rank, phase == Phase::save ? SIGSTOP : signal);
    struck_ = Clock::now();
    if (phase == Phase::save) {
      // A save is one of all ranks: if it is not over by now, this one did not get through it.
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      if (!fs::exists(unfinished)) return false;
      if (signal != SIGSTOP) signal_rank(rank, signal);
    }
    const bool gone = wait_until(
        [&] {
          for (int other = 0; other < kRanks; ++other)
            if (other != rank && code_of(other) < 0) return false;
          return true;
        },
        60);
    EXPECT_TRUE(gone) << "ranks are still there after a minute: " << said();
    seconds_ = -seconds_until(struck_);
    return true;
  }

  /// What the others say: one line, of rank 0 or, where that is the lost one, of each of them.
  void expect_named() const {
    const auto [phase, signal, rank] = GetParam();
    std::istringstream text(said());
    std::vector<std::string> errors;
    for (std::string line; std::getline(text, line);) {
      EXPECT_TRUE(line.starts_with("train_gpt: ") || line.starts_with("run_mpi.sh: ")) << line;
      if (line.find("error: ") != std::string::npos && line.find(" did not run for ") == std::string::npos)
        errors.push_back(line);
    }
    EXPECT_EQ(errors.size(), rank == 0 ? 2U : 1U) << said();
    char host[256] = {};
    gethostname(host, sizeof host - 1);
    const char* const reached[] = {"reading the configuration and opening the data", "step [4-7]",
                                   "evaluation after step 4", "(saving )?step [4-7]"};
    const std::regex last("; the last thing it reached: " + std::string(reached[static_cast<size_t>(phase)]));
    for (const std::string& line : errors) {
      EXPECT_NE(line.find(cat("rank ", rank, " (", host, ") is lost: ")), std::string::npos) << line;
      EXPECT_NE(line.find(signal == SIGKILL ? "it ended without a word" : "no heartbeat for 2 s"),
                std::string::npos)
          << line;
      EXPECT_TRUE(std::regex_search(line, last)) << line;
    }
  }

  std::string skipped_;
  Clock::time_point struck_;
  double seconds_ = 0;
};

TEST_P(RanksLost, OthersEndAndTheRunGoesOnWithoutIt) {
  const auto [phase, signal, rank] = GetParam();
  std::map<std::string, std::string> good;
  for (int attempt = 0;; ++attempt) {
    begin();
    good = files_of("run/checkpoints");
    if (strike() || HasFatalFailure()) break;
    ASSERT_LT(attempt, 5) << "a save never lasted long enough";
  }
  if (!skipped_.empty()) GTEST_SKIP() << skipped_;
  // Who stopped is stopped still; one time it is left to the script.
  const bool by_the_script = signal == SIGSTOP && phase == Phase::step && rank == 1;
  const bool wakes = signal == SIGSTOP && phase == Phase::evaluation;
  if (wakes) {  // to find that the run is over
    signal_rank(rank, SIGCONT);
    EXPECT_TRUE(wait_until([&] { return code_of(rank) == 5; }, 10)) << code_of(rank);
    EXPECT_EQ(said().find("rank 0 (") != std::string::npos &&
                  said().find(") did not run for ") != std::string::npos,
              rank == 0)
        << said();
  } else if (signal == SIGSTOP && !by_the_script) {
    signal_rank(rank, SIGKILL);
  }
  EXPECT_EQ(process().wait(30), 5) << said();
  for (int other = 0; other < kRanks; ++other) {
    if (other == rank) continue;
    EXPECT_EQ(code_of(other), 5) << "rank " << other << ": " << said();
  }
  expect_named();
  expect_nothing_left();
  EXPECT_LT(seconds_, 30);
  std::printf("    %s: the others were gone after %.1f s\n",
              testing::UnitTest::GetInstance()->current_test_info()->name(), seconds_);

  std::map<std::string, std::string> now = files_of("run/checkpoints");
  for (const auto& [file, contents] : good) EXPECT_TRUE(now[file] == contents) << file;
  EXPECT_FALSE(fs::exists(path("run/checkpoints/step_00000006"))) << "a save that was not over";
  EXPECT_EQ(said().find("run_mpi.sh: ended: rank ") != std::string::npos, by_the_script) << said();
  if (signal == SIGSTOP || phase == Phase::set_up || phase == Phase::evaluation) return;  // as in a step
  expect_ranks(0, kRanks - 1, go_on("run", {"--eval-every", "0"}));
  expect_same("run", undisturbed());
}

INSTANTIATE_TEST_SUITE_P(
    Everywhere, RanksLost, testing::ValuesIn([] {
      std::vector<Case> cases;
      for (const Phase phase : {Phase::set_up, Phase::step, Phase::evaluation, Phase::save})
        for (const int signal : {SIGKILL, SIGSTOP})
          for (const int rank : {0, 1}) cases.push_back({phase, signal, rank});
      return cases;
    }()),
    name_of);

}  // namespace
}  // namespace kinoe
