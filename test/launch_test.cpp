// The parts of trainer/launch that need one process: places, names, verdicts, comparisons. Teams of several processes are in
// launch_program_test.cpp.
#include "trainer/launch.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <thread>

#include "test/local_channel.h"
#include "trainer/launch_judge.h"
#include "trainer/launch_limits.h"
#include "trainer/launch_place.h"
#include "trainer/launch_rendezvous.h"

namespace kinoe {
namespace {

using Variables = std::map<std::string, std::string>;

Environment lookup(const Variables& variables) {
  return [&variables](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}

/// "rank/ranks local launcher", or "code: text" of the error.
std::string place_of(const Variables& variables) {
  try {
    const Place place = find_place(lookup(variables));
    EXPECT_FALSE(place.host.empty());
    return cat(place.rank, "/", place.ranks, " ", place.local_rank, " ", place.launcher);
  } catch (const Error& error) {
    return cat(static_cast<int>(error.code), ": ", error.what());
  }
}

void expect_error_of(const Variables& variables, const std::vector<std::string>& parts) {
  const std::string text = place_of(variables);
  EXPECT_TRUE(text.starts_with("5: ")) << text;
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

const Variables kMpi{
    {"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}};
const Variables kGiven{
    {"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "n1"}, {"MASTER_PORT", "29500"}};
const Variables kSlurm{{"SLURM_JOB_ID", "77"}, {"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "5"},
                       {"SLURM_NTASKS", "6"},  {"SLURM_LOCALID", "2"}, {"SLURM_STEP_NODELIST", "n[3-4]"}};

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}
Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

TEST(LaunchPlace, EachLauncherSaysIt) {
  EXPECT_EQ(place_of({}), "0/1 0 ");
  EXPECT_EQ(place_of(kMpi), "2/8 1 Open MPI");
  EXPECT_EQ(place_of(kGiven), "3/4 1 RANK and WORLD_SIZE");
  EXPECT_EQ(place_of(without(kGiven, "LOCAL_RANK")), "3/4 -1 RANK and WORLD_SIZE");
  EXPECT_EQ(place_of(kSlurm), "5/6 2 Slurm");
  // One of one is a single process, whoever started it.
  EXPECT_EQ(place_of({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}), "0/1 0 ");
  EXPECT_EQ(place_of({{"RANK", "0"}, {"WORLD_SIZE", "1"}}), "0/1 0 ");
  EXPECT_EQ(place_of({{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}), "0/1 0 ");
  // A step may have fewer tasks than the job.
  EXPECT_EQ(place_of(with(kSlurm, {{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PROCID", "0"}})), "0/1 0 ");
}

TEST(LaunchPlace, TheInnermostLauncherCounts) {
  EXPECT_EQ(place_of(with(kMpi, kSlurm)), "2/8 1 Open MPI");
  EXPECT_EQ(place_of(with(with(kSlurm, kGiven), {{"WORLD_SIZE", "12"}})), "3/12 1 RANK and WORLD_SIZE");
  // RANK and WORLD_SIZE copied from Slurm's variables, with and without a place to meet.
  const Variables copied = with(kSlurm, {{"RANK", "5"}, {"WORLD_SIZE", "6"}});
  EXPECT_EQ(place_of(copied), "5/6 2 Slurm");
  EXPECT_EQ(place_of(with(copied, {{"MASTER_ADDR", "n3"}, {"MASTER_PORT", "29500"}})),
            "5/6 -1 RANK and WORLD_SIZE");
  EXPECT_EQ(place_of(with(kMpi, {{"RANK", "2"}, {"WORLD_SIZE", "8"}})), "2/8 1 Open MPI");
  // What Slurm's PMI says besides.
  EXPECT_EQ(place_of(with(kSlurm, {{"PMI_RANK", "5"}, {"PMI_SIZE", "6"}})), "5/6 2 Slurm");
}

TEST(LaunchPlace, ContradictionsAndMissingPiecesAreErrors) {
  expect_error_of(without(kMpi, "OMPI_COMM_WORLD_SIZE"),
                  {"OMPI_COMM_WORLD_RANK is set and OMPI_COMM_WORLD_SIZE is not"});
  expect_error_of(without(kGiven, "RANK"), {"WORLD_SIZE is set and RANK is not"});
  expect_error_of(without(kGiven, "MASTER_ADDR"), {"MASTER_ADDR", "rank 0"});
  expect_error_of(without(kGiven, "MASTER_PORT"), {"not MASTER_PORT"});
  expect_error_of(with(kGiven, {{"RANK", "4"}}), {"RANK=4", "WORLD_SIZE=4"});
  expect_error_of(with(kGiven, {{"RANK", "-1"}}), {"RANK is '-1'"});
  expect_error_of(with(kGiven, {{"WORLD_SIZE", "four"}}), {"WORLD_SIZE is 'four'"});
  expect_error_of(with(kGiven, {{"WORLD_SIZE", "99999999999999999999"}}), {"WORLD_SIZE is '9"});
  expect_error_of(with(kMpi, kGiven), {"rank 2 of 8", "RANK=3", "WORLD_SIZE=4", "unset"});
  expect_error_of(with(kSlurm, {{"RANK", "0"}, {"WORLD_SIZE", "1"}}),
                  {"srun started 6 tasks", "WORLD_SIZE=1"});
  expect_error_of(without(kSlurm, "SLURM_PROCID"), {"SLURM_PROCID is not"});
}

TEST(LaunchPlace, RanksThatCannotFindEachOtherAreNoSingleProcesses) {
  expect_error_of({{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}}, {"PMI_SIZE=4", "not Open MPI", "MASTER_ADDR"});
  expect_error_of({{"MV2_COMM_WORLD_SIZE", "2"}}, {"MV2_COMM_WORLD_SIZE=2"});
  // The batch script, or the shell of salloc, of a job of several tasks.
  for (const char* step : {"", "4294967291", "4294967290"})
    expect_error_of(with(kSlurm, {{"SLURM_STEP_ID", step}, {"SLURM_PROCID", "0"}}), {"6 tasks", "srun"});
  EXPECT_EQ(place_of({{"SLURM_JOB_ID", "77"}, {"SLURM_NTASKS", "1"}, {"SLURM_PROCID", "0"}}), "0/1 0 ");
  EXPECT_EQ(place_of({{"PMI_SIZE", "1"}}), "0/1 0 ");
}

TEST(LaunchPlace, WhereToMeetIsTheSameForAllRanksOfAJobAndNoOther) {
  const auto meet = [](const Variables& variables) {
    const Environment env = lookup(variables);
    return find_meeting_point(env);
  };
  const MeetingPoint given = meet(kGiven);
  EXPECT_EQ(given.host, "n1");
  EXPECT_EQ(given.port, 29500);
  EXPECT_EQ(meet(with(kGiven, {{"RANK", "0"}, {"LOCAL_RANK", "0"}})).key, given.key);
  EXPECT_EQ(meet(with(kGiven, {{"WORLD_SIZE", "5"}})).key, given.key) << "or it could not be told";
  EXPECT_NE(meet(with(kGiven, {{"TORCHELASTIC_RUN_ID", "x"}})).key, given.key);
  EXPECT_NE(meet(with(kGiven, {{"MASTER_PORT", "29501"}})).key, given.key);
  // torchrun keeps MASTER_PORT for itself.
  EXPECT_EQ(meet(with(kGiven, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).port, 29501);
  EXPECT_THROW(meet(with(kGiven, {{"MASTER_PORT", "0"}})), Error);
  EXPECT_THROW(meet(with(kGiven, {{"MASTER_PORT", "65536"}})), Error);

  const MeetingPoint slurm = meet(kSlurm);
  EXPECT_EQ(slurm.host, "n3");
  EXPECT_GE(slurm.port, 1024);
  EXPECT_LT(slurm.port, 32768);
  EXPECT_EQ(meet(with(kSlurm, {{"SLURM_PROCID", "0"}})).port, slurm.port);
  EXPECT_NE(meet(with(kSlurm, {{"SLURM_STEP_ID", "1"}})).key, slurm.key);
  EXPECT_NE(meet(with(kSlurm, {{"SLURM_STEP_ID", "1"}})).port, slurm.port);
  EXPECT_EQ(meet(with(kSlurm, {{"SLURM_STEP_NODELIST", "n7"}})).host, "127.0.0.1");
  EXPECT_EQ(meet(with(kSlurm, {{"MASTER_ADDR", "n9"}, {"MASTER_PORT", "1234"}})).host, "n9");
  EXPECT_THROW(meet(with(kSlurm, {{"SLURM_STEP_NODELIST", "n[3-"}})), Error);
}

TEST(LaunchPlace, SlurmsListsOfHostsAreReadInOrder) {
  using List = std::vector<std::string>;
  EXPECT_EQ(expand_hosts("n1"), List{"n1"});
  EXPECT_EQ(expand_hosts("n[01-03,7],m1"), (List{"n01", "n02", "n03", "n7", "m1"}));
  EXPECT_EQ(expand_hosts("a,b-2,c"), (List{"a", "b-2", "c"}));
  EXPECT_EQ(expand_hosts("r[1-2]n[08-10]x"),
            (List{"r1n08x", "r1n09x", "r1n10x", "r2n08x", "r2n09x", "r2n10x"}));
  EXPECT_EQ(expand_hosts("n[9-11]"), (List{"n9", "n10", "n11"}));
  for (const char* bad : {"", "n[1", "n[a-b]", "n[3-1]", "n[]x[", "n[0-9999][0-9999]"})
    EXPECT_TRUE(expand_hosts(bad).empty()) << bad;
}

TEST(LaunchPlace, RangesOfRanks) {
  EXPECT_EQ(rank_ranges({}), "");
  EXPECT_EQ(rank_ranges({4}), "4");
  EXPECT_EQ(rank_ranges({0, 2, 3, 5, 6, 7, 11}), "0, 2, 3, 5-7, 11");
}

// ------------------------------------------------------------------------------------------ interfaces, limits

TEST(LaunchInterfaces, NamesFollowNcclsSyntax) {
  const std::vector<Interface> all{{"lo", "127.0.0.1", true},
                                   {"eth0", "10.0.0.1", false},
                                   {"eth1", "10.1.0.1", false},
                                   {"ib0", "10.2.0.1", false},
                                   {"docker0", "172.17.0.1", false}};
  const auto names = [&](const std::string& filter) {
    std::string text;
    for (const Interface& one : choose_interfaces(all, filter)) text += one.name + " ";
    return text;
  };
  EXPECT_EQ(names(""), "eth0 eth1 ib0 ");
  EXPECT_EQ(names("eth"), "eth0 eth1 ");
  EXPECT_EQ(names("ib,eth1"), "eth1 ib0 ");
  EXPECT_EQ(names("=eth1"), "eth1 ");
  EXPECT_EQ(names("=eth1,ib0"), "eth1 ib0 ");
  EXPECT_EQ(names("^docker,lo"), "eth0 eth1 ib0 ");
  EXPECT_EQ(names("^=eth0"), "lo eth1 ib0 docker0 ");
  EXPECT_EQ(names("lo"), "lo ");
  for (const char* wrong : {"=eth", "wlan", "^lo,eth,ib,docker", "=", ","}) try {
      const std::string found = names(wrong);
      ADD_FAILURE() << wrong << " names " << found;
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_EQ(error.code, ExitCode::rank_lost);
      EXPECT_NE(text.find(cat("NCCL_SOCKET_IFNAME=", wrong, " names no")), std::string::npos) << text;
      EXPECT_NE(text.find("lo (127.0.0.1), eth0 (10.0.0.1), eth1"), std::string::npos) << text;
    }
}

TEST(LaunchLimits, WarningsNameTheNumberNeeded) {
  EXPECT_TRUE(limit_warnings(8, 100'000, int64_t{8} << 30).empty());
  EXPECT_TRUE(limit_warnings(8, 100'000, -1).empty());
  const std::vector<std::string> both = limit_warnings(8, 256, 64 << 20);
  ASSERT_EQ(both.size(), 2U);
  EXPECT_NE(both[0].find("only 256 files may be open (ulimit -n); 8 ranks may need 576"), std::string::npos)
      << both[0];
  EXPECT_NE(both[1].find("/dev/shm has 64 MiB free; NCCL may need 512 MiB"), std::string::npos) << both[1];
  EXPECT_GT(raise_open_files(), 0);
  EXPECT_NO_THROW(require_open_files(8, 100'000));
  EXPECT_THROW(require_open_files(8, 24), Error) << "21 connections";
}

// ------------------------------------------------------------------------------------------ verdicts

Standing standing(uint64_t operations, double idle_s, double limit_s, const std::string& what) {
  Standing one;
  one.progress = {operations, operations, idle_s, limit_s, what, 0, ""};
  return one;
}
const std::vector<std::string> kHosts{"n0", "n1", "n2"};

TEST(LaunchJudge, NothingIsWrongWithRanksThatWaitForASlowOne) {
  // Rank 1 may take 100 s; the others have long waited for it, beyond what they themselves may take.
  EXPECT_EQ(
      judge({standing(9, 50, 40, "a"), standing(8, 60, 100, "saving"), standing(9, 50, 40, "a")}, kHosts, 40),
      "");
  // Without a limit nothing is a hang.
  EXPECT_EQ(judge({standing(9, 1e6, 0, "a"), standing(9, 1e6, 0, "a"), standing(9, 1e6, 0, "a")}, kHosts, 40),
            "");
}

TEST(LaunchJudge, WhoIsBehindAndBeyondItsLimitHangs) {
  const std::string text = judge({standing(9, 50, 40, "all-gather 9"), standing(8, 41, 40, "step 3"),
                                  standing(9, 50, 40, "all-gather 9")},
                                 kHosts, 40);
  EXPECT_EQ(text.find("rank 1 (n1) hangs: no progress for 41 s; the last thing it reached: step 3; others "
                      "are at: all-gather 9"),
            0U)
      << text;
  EXPECT_EQ(text.find("rank 0"), std::string::npos) << text;
  // Equal collectives: the phase decides.
  std::vector<Standing> equal(3, standing(9, 50, 40, "x"));
  --equal[2].progress.phases;
  EXPECT_EQ(judge(equal, kHosts, 40).find("rank 2 (n2) hangs"), 0U);
  // All in the same place: nobody can be singled out.
  const std::string all = judge(std::vector<Standing>(3, standing(9, 41, 40, "all-reduce 9")), kHosts, 40);
  EXPECT_EQ(all.find("no rank goes on (all 3 are equally far): rank 0 (n0) hangs"), 0U) << all;
  // Unless it is a checkpoint thread for which the others wait.
  std::vector<Standing> saving(3, standing(9, 41, 40, "saving step 6"));
  for (Standing& one : saving) one.progress.saves = 5;
  EXPECT_EQ(judge(saving, kHosts, 40).find("no rank goes on"), 0U);
  saving[0].progress.saves = saving[2].progress.saves = 6;
  saving[0].progress.saving = saving[2].progress.saving = "written";
  saving[1].progress.saving = "begun";
  EXPECT_EQ(judge(saving, kHosts, 40)
                .find("the checkpoint thread of rank 1 (n1) hangs: the last thing it reached: "
                      "begun; others are at: written; see that host's disk"),
            0U)
      << judge(saving, kHosts, 40);
  --saving[2].progress.operations;  // its main thread is behind: that comes first
  EXPECT_EQ(judge(saving, kHosts, 40).find("rank 2 (n2) hangs"), 0U);
  saving[2].progress.idle_s = 1;
  EXPECT_EQ(judge(saving, kHosts, 40), "") << "within its limit";
  // A debugger: no judgement by time.
  EXPECT_EQ(judge(equal, kHosts, 0), "");
}

TEST(LaunchJudge, SilenceAndClosedConnectionsAreLosses) {
  std::vector<Standing> ranks(3, standing(9, 1, 40, "step 12"));
  ranks[1].silent_s = 19;
  EXPECT_EQ(judge(ranks, kHosts, 40), "");
  ranks[1].silent_s = 21;
  EXPECT_EQ(judge(ranks, kHosts, 40).find("rank 1 (n1) is lost: no heartbeat for 21 s"), 0U);
  EXPECT_EQ(judge(ranks, kHosts, 0), "");
  ranks[2].closed = true;
  const std::string both = judge(ranks, kHosts, 40);
  EXPECT_NE(both.find("rank 2 (n2) is lost: it ended without a word"), std::string::npos) << both;
  EXPECT_NE(both.find("the last thing it reached: step 12"), std::string::npos) << both;
  EXPECT_EQ(judge(ranks, kHosts, 0).find("rank 2"), 0U);
  for (Standing& rank : ranks) rank.departed = true;
  EXPECT_EQ(judge(ranks, kHosts, 40), "");
}

// ------------------------------------------------------------------------------------------ comparisons

/// What compare_ranks says on every rank: its table, or "code: text"; all ranks must say the same.
std::string compared(const std::vector<Place>& places, const std::vector<RankFacts>& facts) {
  std::vector<std::unique_ptr<Channel>> channels = make_local_channels(static_cast<int>(places.size()));
  std::vector<std::string> said(places.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < places.size(); ++rank)
    threads.emplace_back([&, rank] {
      try {
        said[rank] = compare_ranks(*channels[rank], places[rank], facts[rank]);
      } catch (const Error& error) {
        said[rank] = cat(static_cast<int>(error.code), ": ", error.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::count(said.begin(), said.end(), said[0]), static_cast<std::ptrdiff_t>(said.size()));
  return said[0];
}

class LaunchCompare : public testing::Test {
 protected:
  LaunchCompare() {
    for (int rank = 0; rank < 4; ++rank) {
      places.push_back({rank, 4, rank % 2, rank < 2 ? "n1" : "n2", "Open MPI", 2});
      facts.push_back({rank % 2 == 0 ? "0000:1b:00.0" : "0000:43:00.0",
                       {{"GPU", "H100"}, {"driver", "570.1"}, {"NCCL", "2.28.3"}, {"--lr", "3e-4"}},
                       {{"a.bin", "11aa"}, {"b.bin", "22bb"}}});
    }
  }
  std::vector<Place> places;
  std::vector<RankFacts> facts;
};

TEST_F(LaunchCompare, EqualRanksAreFine) {
  EXPECT_EQ(compared(places, facts).find("rank  host"), 0U) << compared(places, facts);
  for (RankFacts& one : facts) one.pci = "";  // CPUs
  EXPECT_EQ(compared(places, facts).find("rank  host"), 0U) << compared(places, facts);
}

TEST_F(LaunchCompare, TwoRanksOnOneGpuAreBothNamed) {
  facts[3].pci = facts[2].pci;
  const std::string text = compared(places, facts);
  EXPECT_EQ(text.find("5: rank 2 and rank 3 use the same GPU (n2, PCI 0000:1b:00.0)"), 0U) << text;
}

TEST_F(LaunchCompare, EveryDifferenceIsShownWithWhoHasIt) {
  facts[3].same[0].second = "A100";
  facts[1].same[3].second = "1e-3";
  facts[2].same.emplace_back("KINOE_SIMD", "0");
  const std::string text = compared(places, facts);
  EXPECT_EQ(text.find("5: the ranks are not alike: "), 0U) << text;
  for (const char* part : {"GPU: H100 on ranks 0, 1 (n1), rank 2 (n2), A100 on rank 3 (n2)",
                           "--lr: 3e-4 on rank 0 (n1), ranks 2, 3 (n2), 1e-3 on rank 1 (n1)",
                           "KINOE_SIMD: missing on ranks 0, 1 (n1), rank 3 (n2), 0 on rank 2 (n2)"})
    EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
  EXPECT_EQ(text.find("driver"), std::string::npos) << text;
}

/// First and alone: other settings follow from another checkpoint, and machines of another kind are not to blame.
TEST_F(LaunchCompare, OtherCheckpointsAreNamedBeforeWhatFollowsFromThem) {
  for (RankFacts& one : facts) {
    one.checkpoints = "run/checkpoints";
    one.checkpoint = "step 16, hash 5";
  }
  facts[3].checkpoint = "step 8, hash 6";
  facts[3].checkpoints = "elsewhere/checkpoints";
  facts[3].same[3].second = "1e-3";
  const std::string start = "4: run/checkpoints is not the same everywhere: ",
                    end = "; RUN must be on a file system that all hosts see";
  EXPECT_EQ(compared(places, facts),
            start + "step 16 on ranks 0, 1 (n1), rank 2 (n2), step 8 on rank 3 (n2)" + end);
  facts[3].passed_over = "passed over: step 16 is damaged";
  EXPECT_TRUE(compared(places, facts).ends_with(end + "; rank 3 (n2): passed over: step 16 is damaged"));
  facts[3].passed_over = "";
  facts[3].checkpoint = "step 16, hash 6";
  EXPECT_EQ(compared(places, facts),
            start + "step 16, hash 5 on ranks 0, 1 (n1), rank 2 (n2), step 16, hash 6 on rank 3 (n2)" + end);
  facts[3].same.emplace_back("--resume", "never");  // then this is why
  EXPECT_EQ(compared(places, facts).find("5: the ranks are not alike: --lr: "), 0U);
}

TEST_F(LaunchCompare, OtherDataNamesSourceAndHost) {
  facts[2].data[1].second = facts[3].data[1].second = "ffff";
  const std::string other = compared(places, facts);
  EXPECT_EQ(
      other.find(
          "3: the ranks do not see the same data: b.bin: 22bb on ranks 0, 1 (n1), ffff on ranks 2, 3 (n2)"),
      0U)
      << other;
  facts[2].data.pop_back();
  facts[3].data.pop_back();
  const std::string missing = compared(places, facts);
  EXPECT_NE(missing.find("b.bin: 22bb on ranks 0, 1 (n1), missing on ranks 2, 3 (n2)"), std::string::npos)
      << missing;
}

TEST_F(LaunchCompare, TheTableHasARowPerRank) {
  facts[1].pci = "";
  const std::string table = compared(places, facts);
  EXPECT_EQ(table,
            "rank  host  GPU   driver  NCCL    PCI\n"
            "0     n1    H100  570.1   2.28.3  0000:1b:00.0\n"
            "1     n1    H100  570.1   2.28.3  -\n"
            "2     n2    H100  570.1   2.28.3  0000:1b:00.0\n"
            "3     n2    H100  570.1   2.28.3  0000:43:00.0\n");
  for (RankFacts& one : facts) one = {"", {{"GPU", ""}, {"driver", ""}, {"NCCL", ""}}, {}};  // CPUs
  EXPECT_EQ(compared(places, facts), "rank  host\n0     n1\n1     n1\n2     n2\n3     n2\n");
}

TEST(LaunchHash, IsOfTheProgramsFile) {
  EXPECT_EQ(program_hash().size(), 16U);
  EXPECT_EQ(program_hash(), program_hash());
  EXPECT_NE(program_hash(), "2d06800538d394c2");  // XXH3 of nothing
}

// ------------------------------------------------------------------------------------------ a single process

TEST(LaunchSolo, HasNoSocketAndNoThread) {
  // The tests may be run by a launcher; then this is not a single process.
  if (find_place([](const char* name) { return std::getenv(name); }).ranks > 1)
    GTEST_SKIP() << "started as one of several ranks";
  const auto entries = [](const char* directory) {
    return std::distance(std::filesystem::directory_iterator(directory),
                         std::filesystem::directory_iterator());
  };
  const auto files = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  const std::unique_ptr<Team> team = Team::join({});
  EXPECT_EQ(entries("/proc/self/fd"), files);
  EXPECT_EQ(entries("/proc/self/task"), threads);
  EXPECT_EQ(team->ranks(), 1);
  EXPECT_TRUE(team->first());
  EXPECT_FALSE(team->has_mpi());
  EXPECT_EQ(team->control().exchange("x", "y"), std::vector<std::string>{"y"});
  team->at("step 1", 1);
  team->reached("x", 1);
  team->alive();
  testing::internal::CaptureStderr();
  EXPECT_EQ(team->leave(Error(ExitCode::data, "no data")), 3);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "train_gpt: error: no data\n");
  team->finish();
  LaunchOptions two;
  two.expect_ranks = 2;
  EXPECT_THROW(Team::join(two), Error);
}

}  // namespace
}  // namespace kinoe
