// scripts/run_mpi.sh: what a user sees of a team that mpirun starts, and with which code it ends, whatever ends it.
#include <algorithm>

#include "test/launch_program.h"
#include "test/mpi_program.h"

namespace kinoe {
namespace {

/// The same teams started by scripts/run_mpi.sh, whose output and exit code are what a user sees.
class LaunchMpi : public LaunchProgram {
 protected:
  void SetUp() override {
    LaunchProgram::SetUp();
    if (IsSkipped()) return;
    if (!std::filesystem::exists(kScript)) GTEST_SKIP() << "not run in the repository: no " << kScript;
    std::ofstream program(directory_ + "/rank");
    program << "#!/bin/sh\nexec";
    for (const std::string& word : scenario_command()) program << " '" << word << "'";
    program << " >/dev/null\n";
    program.close();
    std::filesystem::permissions(directory_ + "/rank", std::filesystem::perms::owner_all);
    static const std::string why = [this] {
      RankProcess& tried = start_mpi("nothing", 2);
      const int code = tried.wait(60);
      return code == 0 ? std::string() : cat("code ", code, ": ", tried.said());
    }();
    // A machine without Open MPI, or a build without it. Anything else that goes wrong is a failure.
    if (why.find("scripts/setup.sh") != std::string::npos) GTEST_SKIP() << "no MPI here: " << why;
    ASSERT_EQ(why, "");
    ranks_.clear();
  }
  void TearDown() override {
    // After a failure: the script ends its mpirun when it is asked to, not when it is killed.
    for (RankProcess& run : ranks_)
      if (run.wait(0) < 0) {
        run.send(SIGTERM);
        run.wait(10);
      }
    LaunchProgram::TearDown();
  }
  RankProcess& start_mpi(const std::string& scenario, int ranks, RankProcess::Variables variables = {},
                         const std::vector<std::string>& arguments = {}) {
    variables["KINOE_BINARY"] = directory_ + "/rank";
    variables["OMP_NUM_THREADS"] = "1";
    variables["ASAN_OPTIONS"] = sanitizer_of_ranks();
    std::vector<std::string> command = {"/bin/bash", kScript, std::to_string(ranks)};
    command.insert(command.end(), arguments.begin(), arguments.end());
    ranks_.emplace_back(command, scenario, variables, directory_ + "/mpi" + std::to_string(ranks_.size()));
    return ranks_.back();
  }
  /// A program in mpirun's place.
  std::string instead_of_mpirun(const std::string& commands) const {
    const std::string path = directory_ + "/mpirun";
    std::ofstream(path) << "#!/bin/bash\n" << commands << "\n";
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  }
  /// The last line, which is the script's own.
  [[nodiscard]] std::string last_line() const {
    const std::string text = said();
    return text.empty() ? "" : text.substr(text.find_last_of('\n', text.size() - 2) + 1);
  }
  static constexpr const char* kScript = "scripts/run_mpi.sh";
};

TEST_F(LaunchMpi, RanksExchangeTexts) {
  start_mpi("texts", 3);
  expect_codes(0, 60);
  EXPECT_EQ(said(), "local ranks 0 1 2 \n");
}

TEST_F(LaunchMpi, AnErrorOfOneRankIsTheRuns) {
  start_mpi("fail_waiting", 3, {{"KINOE_WHO", "2"}});
  expect_codes(6, 60);
  expect_one_line({"error: rank 2 (", "): a GPU fault\n"});
}

TEST_F(LaunchMpi, AKilledRankIsNamed) {
  RankProcess& run = start_mpi("steps", 3);
  ASSERT_TRUE(run.says("running 1 as ", 60) && run.says("running 0 as ", 60) && run.says("running 2 as ", 60))
      << said();
  const std::string before = said();
  const std::string at = "running 1 as ";
  ASSERT_EQ(kill(std::stoi(before.substr(before.find(at) + at.size())), SIGKILL), 0);
  expect_codes(5, 60);
  const std::string text = said().substr(before.size());
  EXPECT_EQ(text.find("train_gpt: error: rank 1 ("), 0U) << text;
  EXPECT_NE(text.find("is lost: it ended without a word"), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
}

TEST_F(LaunchMpi, TooFewPlacesAreAMistakeOfTheUser) {
  start_mpi("nothing", 4, {{"HOSTS", "localhost:2,localhost"}});
  expect_codes(2, 60);
  EXPECT_EQ(said().find("run_mpi.sh: error: HOSTS offers 3 places for 4 ranks"), 0U) << said();
}

TEST_F(LaunchMpi, WhatMpirunRefusesItWouldRefuseAgain) {
  start_mpi("nothing", 2, {{"MPIRUN_OPTIONS", "--no-such-option"}});
  expect_codes(2, 60);
  EXPECT_EQ(last_line().find("run_mpi.sh: error: mpirun did not start the ranks"), 0U) << said();
}

TEST_F(LaunchMpi, AHostThatIsNotReachedIsALostRank) {
  start_mpi("nothing", 2,
            {{"HOSTS", "elsewhere.invalid:2"}, {"MPIRUN_OPTIONS", "--mca plm_rsh_agent false"}});
  expect_codes(5, 60);
  EXPECT_EQ(last_line().find("run_mpi.sh: error: mpirun does not reach every host"), 0U) << said();
}

TEST_F(LaunchMpi, ALostMpirunIsALostRank) {
  start_mpi("nothing", 2, {{"MPIRUN", instead_of_mpirun("kill -KILL $$")}});
  expect_codes(5, 60);
  EXPECT_EQ(said().find("run_mpi.sh: error: mpirun ended (exit code 137"), 0U) << said();
}

TEST_F(LaunchMpi, AnMpirunThatWaitsForAFrozenHostIsKilled) {
  start_mpi("nothing", 2,
            {{"MPIRUN", instead_of_mpirun("trap '' TERM; echo 'kinoe-rank 0 5' >&2\n"
                                          "while :; do read -rt 1 <> <(:); done")}});
  expect_codes(5, 60);
  EXPECT_EQ(last_line().find("run_mpi.sh: mpirun waits for hosts that do not answer and is killed"), 0U)
      << said();
}

TEST_F(LaunchMpi, AnMpirunThatDoesNotNoticeTheEndIsEnded) {
  start_mpi("nothing", 2,
            {{"MPIRUN", instead_of_mpirun("echo 'kinoe-rank 0 75' >&2; echo 'kinoe-rank 1 75' >&2\n"
                                          "while :; do read -rt 1 <> <(:); done")}});
  expect_codes(75, 30);
  EXPECT_EQ(said(), "");
}

TEST_F(LaunchMpi, OpenMpisWordsToItselfAreNotPassedOn) {
  start_mpi(
      "nothing", 1,
      {{"MPIRUN", instead_of_mpirun("echo '[n1:7] PMIX ERROR: x in file pmix_event_notification.c' >&2\n"
                                    "echo 'Read -1, expected 131072, errno = 3' >&2\n"
                                    "echo 'Read -1, expected 131072, errno = 1' >&2\n"
                                    "echo 'kinoe-rank 0 0' >&2")}});
  expect_codes(0, 60);
  EXPECT_EQ(said(), "Read -1, expected 131072, errno = 1\n");  // EPERM: a rank may not read another's memory
}

TEST_F(LaunchMpi, ASignalToTheScriptEndsTheRunAndIsTold) {
  const std::string run = directory_ + "/run";
  std::filesystem::create_directories(run + "/checkpoints/step_00000010.tmp");
  const auto stop = [&](int signal, const std::vector<std::string>& arguments) {
    ranks_.clear();
    RankProcess& script = start_mpi("steps", 2, {}, arguments);
    ASSERT_TRUE(script.says("running 1 as ", 60)) << said();
    script.send(signal);
    expect_codes(128 + signal, 20);
  };
  stop(SIGINT, {"--out", run});
  EXPECT_EQ(last_line(),
            "run_mpi.sh: stopped by SIGINT, nothing was saved by that; there is no checkpoint yet\n");
  std::filesystem::create_directories(run + "/checkpoints/step_00000009");
  stop(SIGTERM, {"--out=" + run});
  EXPECT_EQ(last_line(),
            cat("run_mpi.sh: stopped by SIGTERM, nothing was saved by that; the newest checkpoint is ", run,
                "/checkpoints/step_00000009: go on with --resume auto\n"));
}

}  // namespace
}  // namespace kinoe
