// The program on several ranks, started as a user does (scripts/run_mpi.sh), where a single rank can be made different, and
// signalled, and asked how it ended: mpirun tells of one rank at most.
#pragma once

#include <sys/stat.h>

#include <map>
#include <optional>

#include "test/launch_program.h"
#include "test/mpi_program.h"
#include "test/resume_program.h"

namespace kinoe {

class RanksFaultsTest : public ResumeProgramTest {
 protected:
  void SetUp() override {
    ResumeProgramTest::SetUp();
    if (IsSkipped()) return;
    if (!why_no_mpi().empty()) GTEST_SKIP() << why_no_mpi();
    if (!fs::exists(kScript)) GTEST_SKIP() << "not run in the repository: no " << kScript;
    // Steps of a tenth of a second and more: a signal finds the one it is meant for.
    write("m.json",
          R"({"model_type": "llama", "vocab_size": 300, "hidden_size": 128, "intermediate_size": 320,
      "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
      "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true})");
    std::vector<uint16_t> ids(40 * 32 + 1);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint16_t>(i * i * 31 % 300);
    write_shard("text.bin", ids, 20240520, 1);
    // What each rank runs. `rank1.sh`, where a test wrote one, makes rank 1 another one than the others.
    write("rank", R"(#!/bin/sh
rank=$OMPI_COMM_WORLD_RANK
here=$KINOE_DIRECTORY
program=$KINOE_PROGRAM
cd "$here" || exit 99
if [ -e "rank$rank.sh" ]; then . "$here/rank$rank.sh"; fi
"$program" "$@" &
echo "$! $$" >"$here/new_pids.$rank" && mv "$here/new_pids.$rank" "$here/pids.$rank"
exec 2>/dev/null  # or it would say how the program ended
wait $!
code=$?
echo $code >"$here/new_code.$rank" && mv "$here/new_code.$rank" "$here/code.$rank"
exit $code
)");
    fs::permissions(path("rank"), fs::perms::owner_all);
  }
  void TearDown() override {
    // Where a test failed, ranks may be left.
    if (run_) {
      run_->send(SIGTERM);
      for (int rank = 0; rank < ranks_; ++rank)
        for (const int pid : pids(rank)) kill(pid, SIGKILL);
      run_->wait(15);
      run_.reset();
    }
    ResumeProgramTest::TearDown();
  }

  /// A run of 9 steps, of which no number of ranks divides the batch, that saves after 3, 6 and 9.
  static std::vector<std::string> nine(const std::string& out, const std::vector<std::string>& more = {}) {
    std::vector<std::string> all = {
        "--device",         "cpu",      "--data",        "text.bin", "--out",          out,
        "--model",          "m.json",   "--seq-len",     "32",       "--steps",        "9",
        "--global-batch",   "13",       "--micro-batch", "1",        "--warmup-steps", "2",
        "--determinism",    "topology", "--save-every",  "3",        "--sample-every", "0",
        "--launch-timeout", "30"};
    for (size_t i = 0; i < more.size(); i += 2) {
      const auto at = std::find(all.begin(), all.end(), more[i]);
      if (at != all.end()) all.erase(at, at + 2);
    }
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  /// Starts the run in the background.
  RankProcess& start_ranks(int ranks, const std::vector<std::string>& arguments) {
    for (int rank = 0; rank < 16; ++rank)
      for (const char* kind : {"pids.", "code."}) fs::remove(path(kind + std::to_string(rank)));
    ranks_ = ranks;
    std::vector<std::string> command = {"/bin/bash", kScript, std::to_string(ranks)};
    command.insert(command.end(), arguments.begin(), arguments.end());
    run_.reset();
    run_ = std::make_unique<RankProcess>(
        command, "",
        RankProcess::Variables{{"KINOE_DIRECTORY", directory},
                               {"KINOE_PROGRAM", std::getenv("KINOE_BINARY")},
                               {"KINOE_BINARY", path("rank")},
                               {"OMP_NUM_THREADS", "1"},
                               {"OMP_WAIT_POLICY", "passive"},
                               {"OMPI_MCA_mpi_yield_when_idle", "1"},
                               {"OMPI_MCA_btl_vader_single_copy_mechanism", "none"},
                               {"ASAN_OPTIONS", sanitizer_of_ranks()}},
        path("log"));
    return *run_;
  }
  /// Runs to the end and expects this code of the script and of every rank that got as far as the program.
  void expect_ranks(int code, int ranks, const std::vector<std::string>& arguments, double seconds = 180) {
    start_ranks(ranks, arguments);
    ASSERT_EQ(run_->wait(seconds), code) << run_->said();
    for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(code_of(rank), code) << "rank " << rank << said();
    expect_nothing_left();
  }
  void expect_one_line(const std::vector<std::string>& parts) const { expect_one_error(said(), parts); }
  void expect_error(int code, int ranks, const std::vector<std::string>& parts,
                    const std::vector<std::string>& arguments) {
    expect_ranks(code, ranks, arguments);
    expect_one_line(parts);
  }

  [[nodiscard]] std::string said() const { return run_ ? run_->said() : ""; }
  [[nodiscard]] RankProcess& process() { return *run_; }
  /// The exit code of a rank (128 + signal); -1 while it runs.
  [[nodiscard]] int code_of(int rank) const {
    const std::string text = read("code." + std::to_string(rank));
    return text.empty() ? -1 : std::stoi(text);
  }
  /// The program's process and that of the shell around it.
  [[nodiscard]] std::vector<int> pids(int rank) const {
    std::istringstream text(read("pids." + std::to_string(rank)));
    std::vector<int> all;
    for (int pid = 0; text >> pid;) all.push_back(pid);
    return all;
  }
  void signal_rank(int rank, int signal) const {
    const std::vector<int> all = pids(rank);
    ASSERT_EQ(all.size(), 2U) << "rank " << rank << " was never started: " << said();
    ASSERT_EQ(kill(all[0], signal), 0) << "rank " << rank << " has ended: " << said();
  }
  /// No process of any rank is there any more.
  void expect_nothing_left() const {
    for (int rank = 0; rank < ranks_; ++rank)
      for (const int pid : pids(rank)) {
        const Clock::time_point deadline = in_seconds(5);
        while (kill(pid, 0) == 0 && seconds_until(deadline) > 0)
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        EXPECT_NE(kill(pid, 0), 0) << "process " << pid << " of rank " << rank << " is still there";
      }
  }
  /// Until `met` is true, and false when it is not in time.
  template <class Met>
  [[nodiscard]] static bool wait_until(const Met& met, double seconds = 90) {
    for (const Clock::time_point deadline = in_seconds(seconds); !met();) {
      if (seconds_until(deadline) <= 0) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return true;
  }
  /// Every file below a directory and what it holds.
  [[nodiscard]] std::map<std::string, std::string> files_of(const std::string& name) const {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(path(name)))
      if (entry.is_regular_file()) {
        const std::string file = fs::relative(entry.path(), directory).string();
        files[file] = read(file);
      }
    return files;
  }
  /// The records of the run of nine() that nothing has happened to.
  const std::vector<Json>& undisturbed() const {
    static std::vector<Json> steps;  // it is the same for all tests of a process
    if (steps.empty()) {
      const Outcome got = run_on(2, nine("undisturbed"));
      EXPECT_EQ(got.code, 0) << got.output;
      steps = steps_of("undisturbed");
    }
    return steps;
  }

  static constexpr const char* kScript = "scripts/run_mpi.sh";

 private:
  std::unique_ptr<RankProcess> run_;
  int ranks_ = 0;
};

}  // namespace kinoe
