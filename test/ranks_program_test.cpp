// The program on several ranks, over MPI on this machine's CPUs: what must not depend on how many there are.
#include "test/mpi_program.h"
#include "test/resume_program.h"

namespace kinoe {
namespace {

class RanksProgramTest : public ResumeProgramTest {
 protected:
  void SetUp() override {
    ResumeProgramTest::SetUp();
    if (IsSkipped()) return;
    if (!why_no_mpi().empty()) GTEST_SKIP() << why_no_mpi();
    // Buckets of several chunks, which no number of ranks here divides.
    write("wide.json",
          R"({"model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 170,
      "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
      "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true})");
    std::vector<uint16_t> held_out(11 * 8 + 1);
    for (size_t i = 0; i < held_out.size(); ++i) held_out[i] = static_cast<uint16_t>(i * 7 % 300);
    write_shard("held_out.bin", held_out, 20240520, 1);
  }
  [[nodiscard]] Outcome run_ranks(int ranks, const std::vector<std::string>& arguments,
                                  int threads = 1) const {
    std::vector<std::string> command = {std::getenv("KINOE_BINARY")};
    command.insert(command.end(), arguments.begin(), arguments.end());
    const std::map<std::string, std::string> environment = {{"OMP_NUM_THREADS", std::to_string(threads)},
                                                            {"OMP_WAIT_POLICY", "passive"}};
    return run_shell("cd " + quoted(directory) + " && " + mpi_command(ranks, command, environment, 120));
  }
  /// 20 steps whose global batch no number of ranks divides; `more` goes before what it replaces.
  static std::vector<std::string> twenty(const std::string& out, const std::vector<std::string>& more = {}) {
    std::vector<std::string> all = {"--steps",       "20",       "--global-batch", "7", "--micro-batch", "1",
                                    "--determinism", "topology", "--sample-every", "0"};
    for (size_t i = 0; i < more.size(); i += 2) {
      const auto at = std::find(all.begin(), all.end(), more[i]);
      if (at != all.end()) all.erase(at, at + 2);
    }
    all.insert(all.end(), more.begin(), more.end());
    return start(out, "wide.json", all);
  }
  void expect_same_file(const std::string& a, const std::string& b) const {
    const std::string left = read(a);
    EXPECT_FALSE(left.empty()) << a;
    EXPECT_TRUE(left == read(b)) << a << " and " << b << " differ";
  }
};

TEST_F(RanksProgramTest, TheSameBitsAndTheSameFilesOnAnyRanks) {
  expect_code(0, run_on(2, twenty("one", {"--val-data", "held_out.bin", "--eval-every", "7"})));
  const std::vector<Json> straight = steps_of("one");
  ASSERT_EQ(straight.size(), 20U);
  for (const auto& [ranks, zero, threads] : std::vector<std::array<int, 3>>{
           {2, 0, 1}, {2, 1, 2}, {3, 1, 1}, {4, 0, 1}, {5, 1, 1}, {7, 0, 1}, {8, 1, 1}}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks, ZeRO " + std::to_string(zero));
    const std::string out = "r" + std::to_string(ranks) + "z" + std::to_string(zero);
    const Outcome got = run_ranks(
        ranks,
        twenty(out, {"--val-data", "held_out.bin", "--eval-every", "7", "--zero", std::to_string(zero)}),
        threads);
    expect_code(0, got);
    for (const std::string& row : {"  ranks                  " + std::to_string(ranks) + " on 1 host, ZeRO " +
                                       std::to_string(zero) + ", determinism topology\n",
                                   std::string("\nmemory (each rank)\n")})
      EXPECT_NE(got.output.find(row), std::string::npos) << "no '" << row << "' in\n" << got.output;
    expect_same(out, straight);
    EXPECT_EQ(evaluations(out), evaluations("one"));
    // What set-up and evaluations send is no step's.
    const std::vector<Json> steps = steps_of(out);
    EXPECT_GT(steps[0]["comm_bytes"].get<int64_t>(), 0);
    for (const Json& step : steps) EXPECT_EQ(step["comm_bytes"], steps[0]["comm_bytes"]) << step["step"];
    for (const char* file :
         {"model.safetensors", "trainer/optimizer-m.safetensors", "trainer/optimizer-v.safetensors"})
      expect_same_file("one/checkpoints/step_00000020/" + std::string(file),
                       out + "/checkpoints/step_00000020/" + file);
  }
}

TEST_F(RanksProgramTest, TenStepsOnTwoRanksAndTenOnThreeAreTwentyOnOne) {
  expect_code(0, run_on(1, twenty("one")));
  expect_code(kStopped, run_ranks(2, twenty("many", {"--stop-after", "10"})));
  expect_code(0, run_ranks(3, go_on("many")));
  expect_same("many", steps_of("one"));
  expect_code(kStopped, run_ranks(3, twenty("less", {"--stop-after", "13", "--zero", "0"})));
  expect_code(0, run_on(2, go_on("less")));
  expect_same("less", steps_of("one"));
}

TEST_F(RanksProgramTest, Row41WhatAnotherNumberOfRanksMeansIsSaid) {
  expect_code(kStopped, run_ranks(2, twenty("run", {"--stop-after", "4"})));
  EXPECT_EQ(state("run", "step_00000004")["ranks"], 2);
  const Outcome more = run_ranks(3, go_on("run", {"--stop-after", "6", "--zero", "0"}));
  expect_code(kStopped, more);
  EXPECT_NE(more.output.find("saved by 2 ranks, going on with 3: the same numbers"), std::string::npos)
      << more.output;
  EXPECT_NE(more.output.find("zero is "), std::string::npos) << more.output;
  const Outcome other = run_ranks(2, go_on("run", {"--micro-batch", "2"}));
  EXPECT_EQ(other.code, kCheckpoint) << other.output;
  EXPECT_NE(other.output.find("micro-batch: 1 in the checkpoint, 2 here"), std::string::npos) << other.output;
  expect_code(
      kStopped,
      run_ranks(2, go_on("run", {"--micro-batch", "2", "--override", "micro-batch", "--stop-after", "8"})));
  EXPECT_EQ(state("run", "step_00000008")["changes"][0]["name"], "micro-batch");
}

TEST_F(RanksProgramTest, Row10And25OtherContentsUnderTheSameNameOnAnotherHost) {
  const std::string model = read("wide.json");
  for (const char* host : {"host0", "host1"}) {
    fs::create_directories(fs::path(directory) / host);
    for (const char* file : {"a.bin", "held_out.bin", "wide.json"})
      fs::copy_file(fs::path(directory) / file, fs::path(directory) / host / file);
  }
  const auto run_on_hosts = [&] {
    std::vector<std::string> command = {"sh", "-c", "cd host$OMPI_COMM_WORLD_RANK && exec \"$0\" \"$@\"",
                                        std::getenv("KINOE_BINARY")};
    const std::vector<std::string> arguments = twenty("../run", {"--val-data", "held_out.bin"});
    command.insert(command.end(), arguments.begin(), arguments.end());
    return run_shell("cd " + kinoe::quoted(directory) + " && " + mpi_command(2, command, {}, 120));
  };
  std::vector<uint16_t> other(11 * 8 + 1, 7);
  write_shard("host1/held_out.bin", other, 20240520, 1);
  const Outcome data = run_on_hosts();
  EXPECT_EQ(data.code, 3) << data.output;
  EXPECT_NE(data.output.find("the ranks do not see the same data: held_out.bin"), std::string::npos)
      << data.output;
  fs::copy_file(fs::path(directory) / "held_out.bin", fs::path(directory) / "host1/held_out.bin",
                fs::copy_options::overwrite_existing);
  std::string wider = model;
  wider.replace(wider.find("1e-5"), 4, "1e-6");
  write("host1/wide.json", wider);
  const Outcome config = run_on_hosts();
  EXPECT_EQ(config.code, 5) << config.output;
  EXPECT_NE(config.output.find("hash of config.json"), std::string::npos) << config.output;
  EXPECT_FALSE(fs::exists(fs::path(directory) / "run"));
}

TEST_F(RanksProgramTest, Row34AFullDiskOnOneRankIsOneFailedSaveOfAll) {
  // Files of rank 1 cannot grow beyond 16 KiB: its part of the weights lies behind that.
  const auto limited = [&](const std::vector<std::string>& arguments) {
    std::string script = "[ \"$OMPI_COMM_WORLD_RANK\" = 1 ] && ulimit -S -f 16; exec \"$0\" \"$@\"";
    std::vector<std::string> command = {"sh", "-c", script, std::getenv("KINOE_BINARY")};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return run_shell("cd " + kinoe::quoted(directory) + " && " + mpi_command(3, command, {}, 120));
  };
  const Outcome failed = limited(twenty("run", {"--save-every", "3"}));
  EXPECT_EQ(failed.code, kCheckpoint) << failed.output;
  const size_t said = failed.output.find("3 checkpoints in a row could not be written: rank 1 (");
  ASSERT_NE(said, std::string::npos) << failed.output;
  EXPECT_EQ(failed.output.find("3 checkpoints in a row", said + 1), std::string::npos) << failed.output;
  EXPECT_TRUE(checkpoints("run").empty());
  // Room again.
  expect_code(0, run_ranks(3, twenty("again", {"--save-every", "3"})));
  EXPECT_FALSE(checkpoints("again").empty());
}

TEST_F(RanksProgramTest, SixteenRanksThenTwentyFourThatDoNotDivideTheBatch) {
  const std::vector<std::string> batch = {"--global-batch", "28", "--steps", "6", "--save-every", "0"};
  expect_code(0, run_on(2, twenty("one", batch)));
  std::vector<std::string> first = batch;
  first.insert(first.end(), {"--stop-after", "3"});
  expect_code(kStopped, run_ranks(16, twenty("many", first)));
  expect_code(0, run_ranks(24, go_on("many")));
  expect_same("many", steps_of("one"));
}

TEST_F(RanksProgramTest, InRunModeTheSameRanksGiveTheSameBitsAndOthersNearlyTheSame) {
  expect_code(0, run_on(2, twenty("one", {"--determinism", "run"})));
  for (const char* zero : {"0", "1"}) {
    const std::string out = std::string("three") + zero;
    expect_code(0, run_ranks(3, twenty(out, {"--determinism", "run", "--zero", zero})));
    expect_code(0, run_ranks(3, twenty(out + "again", {"--determinism", "run", "--zero", zero})));
    expect_same(out + "again", steps_of(out));
    const std::vector<Json> one = steps_of("one"), three = steps_of(out);
    ASSERT_EQ(one.size(), three.size());
    for (size_t i = 0; i < one.size(); ++i)
      EXPECT_NEAR(one[i]["loss"].get<double>(), three[i]["loss"].get<double>(), 1e-4) << "step " << i + 1;
  }
}

}  // namespace
}  // namespace kinoe
