// What goes wrong before and during a run of several ranks, shown on the real program: one line, one exit code of all ranks,
// nothing left running.
#include "test/ranks_faults.h"

#include <cmath>

namespace kinoe {
namespace {

class RanksFaults : public RanksFaultsTest {
 protected:
  void make_rank(int rank, const std::string& shell) const {
    write("rank" + std::to_string(rank) + ".sh", shell + "\n");
  }
  /// The program alone, with these variables of some launcher.
  [[nodiscard]] Outcome run_with(const std::string& variables,
                                 const std::vector<std::string>& arguments) const {
    std::string text = "cd " + kinoe::quoted(directory) + " && env OMPI_ALLOW_RUN_AS_ROOT=1 " +
                       "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 " + variables + " " +
                       kinoe::quoted(std::getenv("KINOE_BINARY"));
    for (const std::string& argument : arguments) text += " " + kinoe::quoted(argument);
    return run_shell(text);
  }
};

// ------------------------------------------------------------------------------------------ before a run

TEST_F(RanksFaults, Row10DataMissingOrDifferentOnOneRank) {
  fs::create_directories(path("elsewhere"));
  fs::copy_file(path("m.json"), path("elsewhere/m.json"));
  make_rank(1, "cd elsewhere");
  expect_error(3, 3, {"error: rank 1 (", "cannot open data file 'text.bin': No such file"}, nine("run"));
  const std::string all = read("text.bin");
  write("elsewhere/text.bin", all.substr(0, all.size() - 2));
  expect_error(3, 3, {"error: rank 1 (", "'text.bin' should have"}, nine("run"));
  // The same name and size, other tokens.
  std::string other = all;
  other[1100] = static_cast<char>(other[1100] ^ 1);
  write("elsewhere/text.bin", other);
  expect_error(3, 3, {"the ranks do not see the same data: text.bin: ", " on ranks 0, 2 (", " on rank 1 ("},
               nine("run"));
  EXPECT_FALSE(fs::exists(path("run"))) << "a run directory was made before the data had been compared";
}

TEST_F(RanksFaults, Row20FewerSequencesThanRanksStillGiveTheSameNumbers) {
  const std::vector<std::string> more = {"--global-batch", "2", "--save-every", "0"};
  expect_code(0, run_on(1, nine("one", more)));
  expect_ranks(0, 3, nine("three", more));
  expect_same("three", steps_of("one"));
}

TEST_F(RanksFaults, Row21TheRanksOfAHostShareItsMemory) {
  // One rank of this size would fit, two do not: a fraction of what is free, from what the program says it needs.
  write_shard("long.bin", std::vector<uint16_t>(400'001, 7), 20240520, 1);
  const auto sized = [](int64_t sequences) {
    const std::string count = std::to_string(sequences);
    return nine("run",
                {"--data", "long.bin", "--seq-len", "1", "--global-batch", count, "--micro-batch", count});
  };
  // MiB after `what` in the program's message.
  const auto mib = [&](const std::string& text, const std::string& what) {
    const size_t at = text.find(what);
    return at == std::string::npos ? 0.0 : std::stod(text.substr(at + what.size()));
  };
  const auto needed = [&](int64_t sequences) {
    std::vector<std::string> arguments = sized(sequences);
    arguments.emplace_back("--dry-run");
    const Outcome got = run(arguments);
    return std::pair(mib(got.output, "  total "), got.output);
  };
  const double few = needed(1000).first, many = needed(11000).first;
  ASSERT_GT(many, few + 1) << needed(11000).second;
  std::ifstream meminfo("/proc/meminfo");
  double available = 0;
  for (std::string key, rest; meminfo >> key && std::getline(meminfo, rest);)
    if (key == "MemAvailable:") available = std::stod(rest) / 1024;
  ASSERT_GT(available, 0);
  const auto sequences = static_cast<int64_t>(1000 + (0.6 * available - few) / (many - few) * 10000);
  if (sequences > 400'000) GTEST_SKIP() << "more memory than this test's data can fill";
  const auto [alone, output] = needed(sequences);
  if (alone > 0.9 * available || output.find("error: ") != std::string::npos)
    GTEST_SKIP() << "a container's limit: " << output;
  expect_ranks(2, 2, sized(sequences));
  EXPECT_NE(said().find("this run needs "), std::string::npos) << said();
  EXPECT_NE(said().find(" free for each of the 2 ranks on this host; "), std::string::npos) << said();
  EXPECT_EQ(said().find("error: "), said().rfind("error: ")) << said();
  EXPECT_FALSE(fs::exists(path("run")));
}

TEST_F(RanksFaults, Row22RanksThatTheLauncherDoesNotReallyStart) {
  expect_error(5, 3, {"--expect-ranks 4, but the launcher started 3"}, nine("run", {"--expect-ranks", "4"}));
  const auto expect_refused = [&](const std::string& variables, const std::string& part) {
    const Outcome got = run_with(variables, nine("run"));
    EXPECT_EQ(got.code, 5) << got.output;
    EXPECT_TRUE(got.output.starts_with("train_gpt: error: ")) << got.output;
    EXPECT_EQ(std::count(got.output.begin(), got.output.end(), '\n'), 1) << got.output;
    EXPECT_NE(got.output.find(part), std::string::npos) << got.output;
  };
  expect_refused("PMI_RANK=0 PMI_SIZE=3",
                 "PMI_SIZE=3 announces 3 ranks started by an MPI that is not Open MPI");
  expect_refused("RANK=0 WORLD_SIZE=2", "but not MASTER_ADDR and MASTER_PORT");
  expect_refused(
      "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=3",
      "mpirun announced 3 ranks (OMPI_COMM_WORLD_SIZE), but the MPI library of this program sees rank 0 "
      "of 1");
  EXPECT_FALSE(fs::exists(path("run")));
}

TEST_F(RanksFaults, Row25AnotherOptionOrProgramOnOneRank) {
  make_rank(1, "set -- \"$@\" --beta2 0.5 --seed 7");
  expect_error(5, 3,
               {"the ranks are not alike: ", "--seed: 1 on ranks 0, 2 (", ", 7 on rank 1 (",
                "--beta2: 0.95 on ranks 0, 2 (", ", 0.5 on rank 1 ("},
               nine("run"));
  make_rank(1, R"(cp "$program" other && echo >>other && program=./other)");
  expect_error(5, 3, {"the ranks are not alike: program: ", " on ranks 0, 2 (", " on rank 1 ("}, nine("run"));
  EXPECT_FALSE(fs::exists(path("run")));
}

/// They decide what a start does and are no settings of the run: ranks that disagree would wait for each other.
TEST_F(RanksFaults, Row25AnotherOptionOfOneStartOnOneRank) {
  for (const auto& [more, part] : std::vector<std::pair<std::string, std::string>>{
           {"--stop-after 4", "--stop-after: missing on ranks 0, 2 ("},
           {"--dry-run", "--dry-run: missing on ranks 0, 2 ("},
           {"--resume auto --override lr", "--override: missing on ranks 0, 2 ("}}) {
    make_rank(1, "set -- \"$@\" " + more);
    expect_error(5, 3, {"the ranks are not alike: ", part, " on rank 1 ("}, nine("run"));
    EXPECT_FALSE(fs::exists(path("run")));
  }
}

TEST_F(RanksFaults, Row26AnInterfaceThatIsNotThereAndARankThatNeverComes) {
  make_rank(0, "export NCCL_SOCKET_IFNAME==nosuch0");
  make_rank(1, "export NCCL_SOCKET_IFNAME==nosuch0");
  expect_error(5, 2, {"error: NCCL_SOCKET_IFNAME==nosuch0 names no network interface", "lo (127.0.0.1)"},
               nine("run"));
  fs::remove(path("rank0.sh"));
  make_rank(1, "exit 9");
  start_ranks(2, nine("run", {"--launch-timeout", "2"}));
  EXPECT_EQ(process().wait(30), 5) << said();
  EXPECT_EQ(code_of(0), 5);
  expect_one_line({"MPI_Init did not return within 2 s (--launch-timeout): not all ranks have come"});
  expect_nothing_left();
  EXPECT_FALSE(fs::exists(path("run")));
}

TEST_F(RanksFaults, Row27FewOpenFilesOnAnyHostAreSaidOnce) {
  for (const int rank : {1, 2}) make_rank(rank, "ulimit -n 40");
  std::vector<std::string> dry = nine("run");
  dry.emplace_back("--dry-run");
  expect_ranks(0, 3, dry);
  const std::string text = said();
  const size_t at = text.find(": only 40 files may be open (ulimit -n); 3 ranks may need ");
  ASSERT_NE(at, std::string::npos) << text;
  EXPECT_EQ(text.find("only 40 files", at + 3), std::string::npos) << text;
}

TEST_F(RanksFaults, Row11AFileThatIsCutOffWhileARankReadsItEndsAllWith3) {
  for (const int who : {1, 0}) {
    fs::create_directories(path("elsewhere"));
    for (const char* name : {"text.bin", "m.json"})
      fs::copy(path(name), path(std::string("elsewhere/") + name));
    make_rank(who, "cd elsewhere");
    std::vector<std::string> more = nine(path("run"), {"--steps", "4000", "--save-every", "0"});
    start_ranks(3, more);
    ASSERT_TRUE(wait_until([&] { return steps_of("run").size() > 3; })) << said();
    // Another file of that name: the look at its size before each read is content, and then there is no page.
    fs::rename(path("elsewhere/text.bin"), path("elsewhere/old.bin"));
    fs::copy(path("text.bin"), path("elsewhere/text.bin"));
    fs::resize_file(path("elsewhere/old.bin"), 0);
    EXPECT_EQ(process().wait(60), 3) << said();
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(code_of(rank), 3) << "rank " << rank;
    expect_one_line({who == 0 ? "error: 'text.bin' was cut off" : "error: rank 1 (",
                     "'text.bin' was cut off, or its disk failed, while it was read"});
    expect_nothing_left();
    fs::remove(path(cat("rank", who, ".sh")));
    fs::remove_all(path("run"));
    fs::remove_all(path("elsewhere"));
  }
}

TEST_F(RanksFaults, TooFewOpenFilesEndTheRunAtOnce) {
  make_rank(0, "ulimit -n 40");
  expect_error(2, 8, {"error: only 40 files may be open (ulimit -n), and rank 0 of 8 needs "}, nine("run"));
  EXPECT_FALSE(fs::exists(path("run")));
}

TEST_F(RanksFaults, AMistakeInTheCommandLineIsSaidOnce) {
  expect_error(2, 3, {"train_gpt: error: unknown option --stepz; nearest known: --steps"},
               nine("run", {"--stepz", "3"}));
  for (const int rank : {0, 2}) {
    make_rank(rank, "set -- \"$@\" --stepz 3");
    const std::string who = rank == 0 ? "error: " : "error: rank 2 (";
    expect_error(2, 3, {who, "unknown option --stepz"}, nine("run"));
    fs::remove(path("rank" + std::to_string(rank) + ".sh"));
  }
  EXPECT_FALSE(fs::exists(path("run")));
}

TEST_F(RanksFaults, WithoutMpiRanksOnCpusAreToldToUseIt) {
  // Started by hand: they find each other by TCP, but have nothing to add gradients with.
  const int port = free_port();
  const auto one = [&](int rank) {
    std::string text = cat("env RANK=", rank, " WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=", port, " ",
                           kinoe::quoted(std::getenv("KINOE_BINARY")));
    for (const std::string& argument : nine("run")) text += " " + kinoe::quoted(argument);
    return text;
  };
  const Outcome got =
      run_shell("cd " + kinoe::quoted(directory) + " && { " + one(1) + " >/dev/null & }; pid=$!; " + one(0) +
                " >/dev/null; a=$?; wait $pid; echo codes $a $?");
  EXPECT_NE(got.output.find("codes 5 5"), std::string::npos) << got.output;
  EXPECT_NE(got.output.find("error: ranks on CPUs add their gradients over MPI"), std::string::npos)
      << got.output;
  EXPECT_EQ(std::count(got.output.begin(), got.output.end(), '\n'), 2) << got.output;
}

TEST_F(RanksFaults, WhatIsNoTrainingIsDoneByOneRank) {
  expect_code(kStopped, run_on(1, nine("run", {"--stop-after", "3"})));
  const auto output_of_all = [&](const std::vector<std::string>& arguments) {
    make_rank(0, "exec >>\"$here/out\"");
    make_rank(1, "exec >>\"$here/out\"");
    fs::remove(path("out"));
    expect_ranks(0, 2, arguments);
    return read("out");
  };
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"--help"},
           {"sample", "run", "--prompt-ids", "1,2", "--max-tokens", "3", "--device", "cpu"},
           {"eval", "run", "--val-data", "text.bin", "--device", "cpu"},
           {"inspect", "run"}}) {
    const std::string said = output_of_all(arguments);
    EXPECT_FALSE(said.empty());
    EXPECT_EQ(said, run(arguments).output) << arguments[0];
  }
  for (const int rank : {0, 1}) fs::remove(path("rank" + std::to_string(rank) + ".sh"));
  start_ranks(2, {"sample", "nowhere", "--device", "cpu"});
  EXPECT_EQ(process().wait(30), 4);
  expect_one_line({"'nowhere' is not a directory"});
  // A run that is only looked at leaves nothing behind.
  std::vector<std::string> dry = nine("dry");
  dry.emplace_back("--dry-run");
  const std::string plan = output_of_all(dry);
  EXPECT_NE(plan.find("  total "), std::string::npos) << plan;
  EXPECT_EQ(plan.find("  total "), plan.rfind("  total ")) << plan;
  EXPECT_FALSE(fs::exists(path("dry")));
}

// ------------------------------------------------------------------------------------------ during a run

TEST_F(RanksFaults, ALossThatIsNotFiniteEndsAllRanksWith7) {
  expect_error(7, 3, {"error: step ", "not finite, so the update was not applied and the run ends"},
               nine("run", {"--lr", "1e30", "--grad-clip", "0"}));
}

TEST_F(RanksFaults, AStopOnRequestIs75OfAllRanks) {
  expect_ranks(kStopped, 3, nine("run", {"--stop-after", "2"}));
  EXPECT_EQ(said(), "");
  EXPECT_EQ(checkpoints("run"), std::vector<std::string>{"step_00000002"});
}

/// Rank 0 reads them; another one need not even see the run where nothing is saved.
TEST_F(RanksFaults, ABegunRunWithoutACheckpointHasTheSameSettingsOnAllRanks) {
  std::vector<std::string> arguments = nine("run", {"--stop-after", "2"});
  arguments.emplace_back("--no-checkpoints");
  expect_ranks(kStopped, 2, arguments);
  fs::create_directories(path("elsewhere"));
  for (const char* file : {"m.json", "text.bin"}) fs::copy_file(path(file), path("elsewhere") + "/" + file);
  make_rank(1, "cd elsewhere");
  expect_ranks(0, 2, go_on("run"));
  EXPECT_NE(said().find("no checkpoint yet in run: begins at step 0 with the settings of run/config.toml\n"),
            std::string::npos)
      << said();
  expect_same("run", undisturbed());
  EXPECT_FALSE(fs::exists(path("elsewhere/run")));
}

TEST_F(RanksFaults, ALogHasNoProgressBar) {
  std::string text =
      "cd " + kinoe::quoted(fs::current_path()) + " && KINOE_DIRECTORY=" + kinoe::quoted(directory) +
      " KINOE_PROGRAM=" + kinoe::quoted(std::getenv("KINOE_BINARY")) +
      " KINOE_BINARY=" + kinoe::quoted(path("rank")) + " OMP_NUM_THREADS=1 bash " + kScript + " 2";
  for (const std::string& argument : nine("run", {"--model", "llama.json"}))
    text += " " + kinoe::quoted(argument);
  const Outcome got = run_shell(text);
  EXPECT_EQ(got.code, 0) << got.output;
  EXPECT_NE(got.output.find("step 9/9 "), std::string::npos) << got.output;
  EXPECT_EQ(got.output.find('\x1b'), std::string::npos) << got.output;
}

TEST_F(RanksFaults, CheckpointsThatAreNotTheSameEverywhere) {
  expect_code(kStopped, run_on(2, nine("run", {"--stop-after", "6"})));
  fs::create_directories(path("elsewhere"));
  for (const char* file : {"m.json", "text.bin"}) fs::copy_file(path(file), path("elsewhere") + "/" + file);
  fs::copy(path("run"), path("elsewhere/run"), fs::copy_options::recursive);
  flip("elsewhere/run/checkpoints/step_00000006/model.safetensors");
  make_rank(1, "cd elsewhere");
  expect_error(
      4, 3,
      {"error: run/checkpoints is not the same everywhere: step 6 on ranks 0, 2 (", "), step 3 on rank 1 (",
       "); RUN must be on a file system that all hosts see; rank 1 (", "): passed over: run/checkpoints/"},
      {"--resume", "latest-valid", "--out", "run"});
  EXPECT_EQ(said().find("latest-valid"), std::string::npos) << "advice to do what is being done: " << said();
  fs::remove_all(path("elsewhere/run"));
  expect_error(4, 3, {"not the same everywhere: step 6 on ranks 0, 2 (", "), none on rank 1 ("},
               nine("run", {"--resume", "auto"}));
}

/// Not when the first checkpoints cannot be written.
TEST_F(RanksFaults, ARunDirectoryThatAnotherRankDoesNotSee) {
  fs::create_directories(path("elsewhere"));
  for (const char* file : {"m.json", "text.bin"}) fs::copy_file(path(file), path("elsewhere") + "/" + file);
  make_rank(1, "cd elsewhere");
  const std::vector<std::string> parts = {"error: rank 1 (",
                                          "run directory run is not here what it is for rank 0 (",
                                          "the working directory is ", "/elsewhere, rank 0's is "};
  expect_error(2, 3, parts, nine("run"));
  EXPECT_FALSE(fs::exists(path("run"))) << "a run that never began left a directory";
  // Nor one of the same name.
  fs::create_directories(path("elsewhere/run"));
  expect_error(2, 3, parts, nine("run"));
  EXPECT_FALSE(fs::exists(path("run")));
  EXPECT_TRUE(fs::is_empty(path("elsewhere/run")));
}

TEST_F(RanksFaults, AnEndBySignalLeavesNothingRunningAndNoHalfCheckpoint) {
  start_ranks(3, nine("run", {"--steps", "2000", "--save-every", "2", "--global-batch", "2"}));
  ASSERT_TRUE(wait_until([&] { return fs::exists(path("run/checkpoints/step_00000004")); })) << said();
  process().send(SIGTERM);
  const int code = process().wait(30);
  EXPECT_TRUE(code > 0 && code != kStopped) << code << ": " << said();  // no checkpoint was asked for
  expect_nothing_left();
  const Outcome on = run_on(1, go_on("run", {"--stop-after", next_step("run"), "--save-every", "0"}));
  EXPECT_TRUE(on.code == kStopped) << on.output;
  EXPECT_NE(on.output.find("going on from "), std::string::npos) << on.output;
}

// ------------------------------------------------------------------------------------------ public reports

// EleutherAI/gpt-neox 880: what is exported depends on the number of ranks. A checkpoint is the export.
TEST_F(RanksFaults, Report12ExportsOfOneAndOfThreeRanksAreTheSameFiles) {
  write(
      "gpt2_biases.json",
      R"({"model_type": "gpt2", "vocab_size": 300, "n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 3})");
  for (const char* model : {"gpt2_biases.json", "llama.json"}) {
    const std::vector<std::string> short_run = {"--steps",      "3", "--global-batch", "5",
                                                "--save-every", "0", "--model",        model};
    const std::string one = std::string("one_") + model, three = std::string("three_") + model;
    expect_code(0, run_on(2, nine(one, short_run)));
    expect_ranks(0, 3, nine(three, short_run));
    for (const char* file : {"model.safetensors", "config.json", "generation_config.json"}) {
      const std::string exported = read(one + "/checkpoints/step_00000003/" + file);
      EXPECT_FALSE(exported.empty()) << file;
      EXPECT_TRUE(exported == read(three + "/checkpoints/step_00000003/" + file)) << model << " " << file;
    }
  }
}

// pytorch/torchtitan 811, karpathy/nanoGPT 467: sequences seen twice or never after a resume on other ranks. Each step's loss
// is that of its sequences and of no others: the weights never change here (a learning rate of next to nothing).
TEST_F(RanksFaults, Reports6And7TheSameSequencesOnTwoAndThreeRanksAcrossAResume) {
  const std::vector<std::string> still = {"--lr",           "1e-30", "--weight-decay", "0",
                                          "--global-batch", "5",     "--steps",        "8"};
  expect_code(0, run_on(2, nine("one", still)));
  std::vector<std::string> first = still;
  first.insert(first.end(), {"--stop-after", "3"});
  expect_ranks(kStopped, 2, nine("many", first));
  expect_ranks(0, 3, go_on("many"));
  expect_same("many", steps_of("one"));
  const std::vector<Json> steps = steps_of("many");  // 40 sequences: an epoch
  for (size_t a = 0; a < steps.size(); ++a)
    for (size_t b = 0; b < a; ++b)
      EXPECT_NE(steps[a]["loss"], steps[b]["loss"]) << "steps " << b + 1 << " and " << a + 1;
}

// karpathy/nanoGPT 145, deepspeedai/DeepSpeed 5583: equal global batches, different losses.
TEST_F(RanksFaults, Report16TheSame24SequencesInEveryShape) {
  const auto shape = [&](const std::string& out, const char* micro, const char* determinism) {
    return nine(
        out, {"--global-batch", "24", "--micro-batch", micro, "--steps", "2", "--determinism", determinism});
  };
  for (const char* determinism : {"run", "topology"}) {
    const std::string in = std::string("_") + determinism;
    expect_code(0, run_on(2, shape("one" + in, "24", determinism)));
    const std::vector<Json> one = steps_of("one" + in);
    std::vector<std::pair<int, const char*>> shapes = {{3, "8"}, {1, "1"}};
    if (in == "_run") shapes.emplace_back(2, "12");
    for (const auto& [ranks, micro] : shapes) {
      const std::string out = cat(ranks, "x", micro, in);
      if (ranks == 1)
        expect_code(0, run_on(1, shape(out, micro, determinism)));
      else
        expect_ranks(0, ranks, shape(out, micro, determinism));
      const std::vector<Json> steps = steps_of(out);
      ASSERT_EQ(steps.size(), 2U);
      for (size_t i = 0; i < steps.size(); ++i)
        for (const char* key : {"loss", "grad_norm"})
          EXPECT_NEAR(steps[i][key].get<double>(), one[i][key].get<double>(),
                      1e-5 * one[i][key].get<double>())
              << key << " of step " << i + 1 << " in " << out;
    }
  }
}

}  // namespace
}  // namespace kinoe
