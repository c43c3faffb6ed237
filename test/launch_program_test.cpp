// Teams of several processes: that they find each other, and that they end together, saying why.
#include "test/launch_program.h"

#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <future>

#include "trainer/launch.h"

namespace kinoe {
namespace {

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

void say(const std::string& text) {
  const std::string line = text + "\n";
  ASSERT_EQ(write(STDERR_FILENO, line.data(), line.size()), static_cast<ssize_t>(line.size()));
}

[[noreturn]] void sleep_for_ever() {
  for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
}

void exchange_texts(Team& team) {
  const auto text = [](int rank, int round, size_t size) {
    std::string made(size, static_cast<char>('a' + rank));
    return made + std::to_string(round);
  };
  // Also sizes beyond what a connection takes in without anybody reading.
  const std::vector<size_t> sizes{0, 1, 100, 70'000, team.ranks() > 3 ? 100'000U : 3'000'000U};
  for (Channel* channel : {&team.control(), &team.saving()})
    for (int round = 0; round < 20; ++round) {
      const size_t size = sizes[static_cast<size_t>(round) % sizes.size()];
      const std::vector<std::string> got = channel->exchange(
          cat("round ", round), text(team.rank(), round, size * static_cast<size_t>(1 + team.rank() % 3)));
      if (got.size() != static_cast<size_t>(team.ranks()))
        fail(ExitCode::internal, "texts of ", got.size(), " ranks");
      for (int rank = 0; rank < team.ranks(); ++rank)
        if (got[static_cast<size_t>(rank)] != text(rank, round, size * static_cast<size_t>(1 + rank % 3)))
          fail(ExitCode::internal, "round ", round, ": another text of rank ", rank);
    }
  std::string order;
  for (const std::string& local : team.control().exchange("local ranks", cat(team.place().local_rank, " ")))
    order += local;
  if (team.first()) say("local ranks " + order);
}

/// What a rank of each scenario does; `who` is the rank of which the test wants something.
void play(const std::string& scenario, Team& team, bool who) {
  const double limit = std::stod(variable("KINOE_LIMIT", "100"));
  team.at("set-up", limit);
  if (scenario == "texts") {
    exchange_texts(team);
  } else if (scenario == "nothing") {
  } else if (scenario == "fail") {
    team.control().barrier("the beginning");
    if (who) fail(ExitCode::checkpoint, "a file is not there");
    sleep_for_ever();
  } else if (scenario == "fail_all") {
    team.control().barrier("the beginning");
    fail(ExitCode::usage, "the same mistake everywhere");
  } else if (scenario == "fail_waiting") {
    if (who) fail(ExitCode::gpu, "a GPU fault");
    team.control().barrier("what never comes");
  } else if (scenario == "steps") {  // until something happens
    const int end = std::stoi(variable("KINOE_STEPS", "1000000"));
    for (int step = 0; step < end; ++step) {
      team.at(cat("step ", step), limit);
      if (step == 3) say(cat("running ", team.rank(), " as ", getpid(), "."));
      team.reached("all-reduce", step);
      team.control().barrier(cat("step ", step));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  } else if (scenario == "stuck") {  // the main thread of one rank never comes to the third barrier
    for (int step = 0; step < 3; ++step) {
      team.at(cat("step ", step), limit);
      if (who && step == 2) {
        team.reached("the thing that hangs", 7);
        sleep_for_ever();
      }
      team.reached("all-reduce", step);
      team.control().barrier(cat("barrier ", step));
    }
  } else if (scenario ==
             "stuck_save") {  // one rank's disk does not answer: its main thread waits as all others do
    std::future<void> saver = std::async(std::launch::async, [&] {
      team.saving().barrier("checkpoint begun");
      if (who) sleep_for_ever();
      team.saving().barrier("checkpoint written");
    });
    team.control().barrier("the step before");
    team.at("saving step 6", limit);
    saver.get();
  } else if (scenario == "slow") {  // one rank has work for much longer than its limit, piece by piece
    for (int i = 0; who && i < std::stoi(variable("KINOE_STEPS", "0")); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      team.alive();
    }
    if (who && variable("KINOE_THEN", "") == std::string("hang")) sleep_for_ever();
    team.control().barrier("the end of the work");
  } else {
    fail(ExitCode::internal, "no scenario '", scenario, "'");
  }
}

/// The inner process; the outer tests start it.
TEST(LaunchScenario, DISABLED_OfARank) {
  const std::string scenario = variable("KINOE_SCENARIO", "");
  if (scenario.empty()) GTEST_SKIP() << "run by the tests of LaunchProgram";
  LaunchOptions options;
  options.launch_timeout_s = std::stod(variable("KINOE_LAUNCH_TIMEOUT", "20"));
  options.hang_timeout_s = std::stod(variable("KINOE_HANG_TIMEOUT", "40"));
  options.expect_ranks = std::atoi(variable("KINOE_EXPECT_RANKS", "0").c_str());
  if (const auto files = static_cast<rlim_t>(std::stoi(variable("KINOE_FILES", "0"))); files > 0) {
    for (int inherited = 3; inherited < 100; ++inherited) close(inherited);
    const rlimit limit{files, files};
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  std::unique_ptr<Team> team;
  int code = 0;
  try {
    team = Team::join(options);
    play(scenario, *team, team->rank() == std::stoi(variable("KINOE_WHO", "-1")));
    team->finish();
  } catch (const Error& error) {
    code = team ? team->leave(error) : Team::report(error);
  }
  team.reset();
  std::exit(code);
}

// ------------------------------------------------------------------------------------------ finding each other

TEST_F(LaunchProgram, EveryNumberOfProcessesExchangesTexts) {
  for (const int ranks : {1, 2, 3, 8}) {
    ranks_.clear();
    port_ = free_port();
    start_all("texts", ranks);
    expect_codes(0, 60);
    std::string order;
    for (int rank = 0; rank < ranks; ++rank) order += cat(rank, " ");
    EXPECT_EQ(said(), "local ranks " + order + "\n");
  }
}

TEST_F(LaunchProgram, WhoNeverArrivesIsListed) {
  const Clock::time_point begin = Clock::now();
  for (const int rank : {0, 1, 3, 7}) start("nothing", rank, 8, {{"KINOE_LAUNCH_TIMEOUT", "1"}});
  expect_codes(5, 10);
  expect_one_line({"4 of 8 ranks arrived at 127.0.0.1:" + std::to_string(port_) + " ",
                   "within 1 s (--launch-timeout)", "missing: ranks 2, 4-6;"});
  EXPECT_LT(-seconds_until(begin), 5);
}

TEST_F(LaunchProgram, ALostRankZeroIsNamedByTheOthers) {
  start("nothing", 1, 2, {{"KINOE_LAUNCH_TIMEOUT", "0.5"}});
  expect_codes(5, 10);
  expect_one_line(
      {"rank 1 (", "did not reach rank 0 at 127.0.0.1:" + std::to_string(port_), "--launch-timeout"});
}

TEST_F(LaunchProgram, ATakenPortIsNamed) {
  const Socket taken = listen_on(port_);
  start("nothing", 0, 2);
  expect_codes(5, 10);
  expect_one_line({"port " + std::to_string(port_), "MASTER_PORT"});
}

TEST_F(LaunchProgram, StrangersOnThePortHarmNobody) {
  start("texts", 0, 2);
  std::vector<Socket> strangers;
  const std::vector<std::string> words{"", "GET / HTTP/1.0\r\n\r\n", std::string(5000, '\0'),
                                       "KOETTAM1 and no more"};
  for (const std::string& word : words) {
    std::string reason;
    Socket stranger;
    while (!stranger.is_open()) stranger = connect_to("127.0.0.1", port_, in_seconds(5), reason);
    send_all(stranger, word.data(), word.size(), in_seconds(1));
    strangers.push_back(std::move(stranger));
  }
  // Another job's rank, by its key.
  RankProcess& other = start("texts", 1, 2, {{"KINOE_LAUNCH_TIMEOUT", "0.5"}, {"TORCHELASTIC_RUN_ID", "x"}});
  EXPECT_EQ(other.wait(10), 5);
  EXPECT_NE(other.said().find("closed the connection"), std::string::npos) << other.said();
  start("texts", 1, 2);
  expect_codes(0, 10, 1);
}

TEST_F(LaunchProgram, ALimitOfOpenFilesIsNamedAtOnce) {
  // Rank 0 runs out of them while the others come; and another rank, before it has come.
  start("nothing", 0, 6, {{"KINOE_FILES", "12"}});
  for (int rank = 1; rank < 6; ++rank) start("nothing", rank, 6, {{"KINOE_LAUNCH_TIMEOUT", "0.5"}});
  EXPECT_EQ(ranks_[0].wait(10), 2) << said();
  expect_one_error(ranks_[0].said(), {"only 12 files may be open (ulimit -n), and all are"});
  // Enough to come, but not for what a rank needs then.
  for (const int who : {0, 1}) {
    ranks_.clear();
    port_ = free_port();
    for (const int rank : {0, 1}) start("nothing", rank, 2, {{"KINOE_FILES", rank == who ? "7" : "50"}});
    expect_codes(2, 10);
    if (who == 0)
      expect_one_line({"train_gpt: error: only 7 files may be open"});
    else
      expect_one_line({"train_gpt: error: rank 1 (", "): only 7 files may be open"});
  }
  ranks_.clear();
  RankProcess& alone = start("nothing", 1, 2, {{"KINOE_FILES", "3"}});
  EXPECT_EQ(alone.wait(10), 2) << said();
  expect_one_error(alone.said(), {"only 3 files may be open (ulimit -n), and all are"});
}

TEST_F(LaunchProgram, TwoProcessesWithOneNumberAreBothNamed) {
  start("nothing", 0, 3);
  const int first = start("nothing", 1, 3).pid();
  const int second = start("nothing", 1, 3).pid();
  expect_codes(5, 10);
  expect_one_line({"two processes say they are rank 1", "process " + std::to_string(first),
                   "process " + std::to_string(second)});
}

TEST_F(LaunchProgram, AnInterfaceThatIsNotThereIsNamedOnce) {
  for (int rank = 0; rank < 2; ++rank)
    start("nothing", rank, 2, {{"NCCL_SOCKET_IFNAME", "=nosuch0"}, {"LOCAL_RANK", std::to_string(rank)}});
  expect_codes(5, 10);
  expect_one_line({"NCCL_SOCKET_IFNAME==nosuch0", "lo (127.0.0.1)"});
}

TEST_F(LaunchProgram, TheNumberOfRanksIsAsExpected) {
  start_all("nothing", 2, {{"KINOE_EXPECT_RANKS", "4"}});
  expect_codes(5, 10);
  expect_one_line({"--expect-ranks 4", "started 2"});
}

TEST_F(LaunchProgram, WhatIsWrongWithOneRankAloneIsSaid) {
  for (const int who : {1, 2}) {
    ranks_.clear();
    port_ = free_port();
    for (int rank = 0; rank < 3; ++rank)
      start("nothing", rank, 3,
            {{"LOCAL_RANK", std::to_string(rank)},
             {who == 1 ? "NCCL_SOCKET_IFNAME" : "KINOE_EXPECT_RANKS", rank != who ? ""
                                                                      : who == 1  ? "=nosuch0"
                                                                                  : "4"}});
    expect_codes(5, 10);
    expect_one_line(
        {cat("train_gpt: error: rank ", who, " ("),
         who == 1 ? "NCCL_SOCKET_IFNAME==nosuch0" : "--expect-ranks 4, but the launcher started 3"});
  }
}

TEST_F(LaunchProgram, AnotherNumberOfRanksIsNamed) {
  start("nothing", 0, 3);
  start("nothing", 1, 2);
  expect_codes(5, 10);
  expect_one_line({"rank 1 (", "says there are 2 ranks, rank 0 (", "was told 3"});
}

// ------------------------------------------------------------------------------------------ ending together

TEST_F(LaunchProgram, AnErrorOfOneRankEndsAllWithItsCode) {
  for (const int who : {0, 2}) {
    ranks_.clear();
    port_ = free_port();
    start_all("fail", 3, {{"KINOE_WHO", std::to_string(who)}});
    expect_codes(4, 10);
    if (who == 0)
      expect_one_line({"train_gpt: error: a file is not there\n"});
    else
      expect_one_line({"error: rank 2 (", "): a file is not there\n"});
  }
}

TEST_F(LaunchProgram, AnErrorEndsRanksThatWaitForIt) {
  start_all("fail_waiting", 3, {{"KINOE_WHO", "1"}});
  expect_codes(6, 10);
  expect_one_line({"error: rank 1 (", "): a GPU fault\n"});
}

TEST_F(LaunchProgram, TheSameMistakeOfAllIsSaidOnce) {
  start_all("fail_all", 4);
  expect_codes(2, 10);
  expect_one_line({"train_gpt: error: the same mistake everywhere\n"});
}

TEST_F(LaunchProgram, AKilledRankIsNamedAndTheOthersEnd) {
  start_all("steps", 3);
  for (RankProcess& rank : ranks_) ASSERT_TRUE(rank.says("running", 30)) << said();
  const std::string before = said();
  ranks_[1].send(SIGKILL);
  expect_codes(5, 10, 1);
  const std::string text = said();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), std::count(before.begin(), before.end(), '\n') + 1)
      << text;
  EXPECT_NE(text.find("error: rank 1 ("), std::string::npos) << text;
  EXPECT_NE(text.find("is lost: it ended without a word"), std::string::npos) << text;
  EXPECT_NE(text.find("the last thing it reached: "), std::string::npos) << text;
}

TEST_F(LaunchProgram, AKilledRankZeroIsNamedByEachOther) {
  start_all("steps", 3);
  for (RankProcess& rank : ranks_) ASSERT_TRUE(rank.says("running", 30)) << said();
  ranks_[0].send(SIGKILL);
  expect_codes(5, 10, 0);
  for (const int rank : {1, 2}) {
    const std::string text = ranks_[static_cast<size_t>(rank)].said();
    EXPECT_NE(text.find(cat("error: rank ", rank, " (")), std::string::npos) << text;
    EXPECT_NE(text.find("rank 0 ("), std::string::npos) << text;
    EXPECT_NE(text.find("is lost: it ended without a word"), std::string::npos) << text;
  }
}

TEST_F(LaunchProgram, AStoppedRankIsNamedWithWhatItReached) {
  start_all("steps", 3, {{"KINOE_HANG_TIMEOUT", "4"}});
  for (RankProcess& rank : ranks_) ASSERT_TRUE(rank.says("running", 30)) << said();
  ranks_[2].send(SIGSTOP);
  expect_codes(5, 10, 2);
  const std::string text = said();
  EXPECT_NE(text.find("error: rank 2 ("), std::string::npos) << text;
  EXPECT_NE(text.find("is lost: no heartbeat for 2 s"), std::string::npos) << text;
  // A phase, and the collective or exchange that it was in or had been in.
  EXPECT_NE(text.find("the last thing it reached: step "), std::string::npos) << text;
  EXPECT_NE(text.find("exchange of 'step "), std::string::npos) << text;
}

TEST_F(LaunchProgram, AStoppedRankZeroIsNamedByEachOther) {
  start_all("steps", 3, {{"KINOE_HANG_TIMEOUT", "4"}});
  for (RankProcess& rank : ranks_) ASSERT_TRUE(rank.says("running", 30)) << said();
  ranks_[0].send(SIGSTOP);
  expect_codes(5, 10, 0);
  for (const size_t rank : {1U, 2U}) {
    const std::string text = ranks_[rank].said();
    EXPECT_NE(text.find("rank 0 ("), std::string::npos) << text;
    EXPECT_NE(text.find("no heartbeat for 2 s"), std::string::npos) << text;
  }
}

TEST_F(LaunchProgram, AStuckMainThreadIsNamedThoughItsHeartbeatsGoOn) {
  for (const int who : {0, 2}) {
    ranks_.clear();
    port_ = free_port();
    start_all("stuck", 3,
              {{"KINOE_WHO", std::to_string(who)}, {"KINOE_HANG_TIMEOUT", "4"}, {"KINOE_LIMIT", "1"}});
    expect_codes(5, 10);
    expect_one_line({cat("error: rank ", who, " ("), "hangs: no progress for",
                     "the last thing it reached: step 2: the thing that hangs 7",
                     "others are at: step 2: exchange of 'barrier 2'"});
  }
}

TEST_F(LaunchProgram, ASaveThatHangsIsTheHangingDisks) {
  for (const int who : {0, 2}) {
    ranks_.clear();
    port_ = free_port();
    start_all("stuck_save", 3,
              {{"KINOE_WHO", std::to_string(who)}, {"KINOE_HANG_TIMEOUT", "4"}, {"KINOE_LIMIT", "1"}});
    expect_codes(5, 10);
    expect_one_line(
        {cat("error: the checkpoint thread of rank ", who, " ("),
         ") hangs: the last thing it reached: exchange of 'checkpoint begun'; others are at: exchange "
         "of 'checkpoint written'; see that host's disk"});
  }
}

TEST_F(LaunchProgram, WhoIsAliveIsNotHungHoweverLongItTakes) {
  start_all("slow", 3,
            {{"KINOE_WHO", "1"}, {"KINOE_STEPS", "30"}, {"KINOE_HANG_TIMEOUT", "4"}, {"KINOE_LIMIT", "1.2"}});
  expect_codes(0, 20);
  EXPECT_EQ(said(), "");
}

TEST_F(LaunchProgram, SignsOfLifeDoNotPutARankAhead) {
  start_all("slow", 3,
            {{"KINOE_WHO", "1"},
             {"KINOE_STEPS", "5"},
             {"KINOE_THEN", "hang"},
             {"KINOE_HANG_TIMEOUT", "4"},
             {"KINOE_LIMIT", "1"}});
  expect_codes(5, 20);
  expect_one_line({"error: rank 1 (", "hangs: no progress for ", "s; the last thing it reached: set-up;",
                   "others are at: set-up: exchange of 'the end of the work'"});
}

TEST_F(LaunchProgram, AWholeRunThatWasStoppedGoesOn) {
  start_all("steps", 3, {{"KINOE_HANG_TIMEOUT", "2"}, {"KINOE_LIMIT", "1"}, {"KINOE_STEPS", "60"}});
  for (RankProcess& rank : ranks_) ASSERT_TRUE(rank.says("running", 30)) << said();
  for (const RankProcess& rank : ranks_) rank.send(SIGSTOP);
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  for (const RankProcess& rank : ranks_) rank.send(SIGCONT);
  expect_codes(0, 10);
  EXPECT_EQ(said().find("error"), std::string::npos) << said();
}

TEST_F(LaunchProgram, ARegularEndSaysNothing) {
  for (int round = 0; round < 3; ++round) {
    ranks_.clear();
    port_ = free_port();
    start_all("nothing", 4, {{"KINOE_HANG_TIMEOUT", "1"}});
    expect_codes(0, 10);
    EXPECT_EQ(said(), "");
  }
}

}  // namespace
}  // namespace kinoe
