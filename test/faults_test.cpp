// What goes wrong before training starts, as a user meets it: exit code by class, one line that says which file, what was
// expected, what was there and what to do, and nothing written. A test is named by the fault.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "test/program.h"

namespace kinoe {
namespace {

constexpr int kUsage = 2, kData = 3, kCheckpoint = 4;
constexpr int32_t kMagic16 = 20240520, kMagic32 = 20240801;

class Faults : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    if (IsSkipped()) return;
    // A model that makes a step in milliseconds; its vocabulary is not that of bytes.
    write("model.json",
          R"({"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24,
      "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
      "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true})");
  }
  /// A short run of the small model on the CPU, with these options instead or besides.
  static std::vector<std::string> tiny(const std::vector<std::string>& more) {
    std::vector<std::string> all = more;
    for (const auto& [option, value] :
         std::vector<std::pair<std::string, std::string>>{{"--device", "cpu"},
                                                          {"--model", "model.json"},
                                                          {"--seq-len", "8"},
                                                          {"--steps", "2"},
                                                          {"--global-batch", "2"},
                                                          {"--micro-batch", "2"},
                                                          {"--sample-every", "0"},
                                                          {"--out", "run"}})
      if (std::find(more.begin(), more.end(), option) == more.end()) {
        all.push_back(option);
        all.push_back(value);
      }
    return all;
  }
  template <class Token = uint16_t>
  static std::vector<Token> tokens(size_t count, Token largest = 299) {
    std::vector<Token> ids(count);
    for (size_t i = 0; i < count; ++i)
      ids[i] = static_cast<Token>(i * 7919 % (static_cast<size_t>(largest) + 1));
    return ids;
  }
  void expect_nothing_written() const { EXPECT_FALSE(std::filesystem::exists(path("run"))); }
};

// ---- Token data ------------------------------------------------------------------------------------------------------

TEST_F(Faults, Row01ShardShorterThanItsHeaderSays) {
  write_shard("a.bin", tokens(500), kMagic16, 1, 600);
  expect_error(kData, {"a.bin", "2224", "2024"}, tiny({"--data", "a.bin"}));
  expect_nothing_written();
}

TEST_F(Faults, Row02TrailingBytes) {
  write_shard("a.bin", tokens(500), kMagic16, 1, 400);
  expect_error(kData, {"a.bin", "1824", "2024"}, tiny({"--data", "a.bin"}));
}

TEST_F(Faults, Row03WrongMagicSaysWhatTheFileLooksLike) {
  write("numpy.bin", std::string("\x93NUMPY\x01\x00v\x00", 10) + std::string(500, 'x'));
  expect_error(kData, {"numpy.bin", ".npy"}, tiny({"--data", "numpy.bin"}));
  write("gzip.bin", std::string("\x1f\x8b\x08\x00", 4) + std::string(500, '\0'));
  expect_error(kData, {"gzip.bin", "gzip"}, tiny({"--data", "gzip.bin"}));
  write("text.bin", std::string(500, 'a'));
  expect_error(kData, {"text.bin", "text"}, tiny({"--data", "text.bin"}));
  write_shard("swapped.bin", tokens(500), static_cast<int32_t>(__builtin_bswap32(kMagic16)),
              static_cast<int32_t>(__builtin_bswap32(1)));
  expect_error(kData, {"swapped.bin", "byte"}, tiny({"--data", "swapped.bin"}));
  write_shard("version.bin", tokens(500), kMagic16, 9);
  expect_error(kData, {"version.bin", "version 9"}, tiny({"--data", "version.bin"}));
}

TEST_F(Faults, Row04Uint16FileReadAsUint32) {
  // The payload of a uint16 shard under the header of a uint32 shard.
  const auto narrow = tokens(2000);
  std::vector<uint32_t> wide(1000);
  std::memcpy(wide.data(), narrow.data(), 4000);
  write_shard("a.bin", wide, kMagic32, 7);
  expect_error(kData, {"a.bin", "16"}, tiny({"--data", "a.bin"}));
}

TEST_F(Faults, Row04TokenWidthTooSmallForTheVocabulary) {
  std::string model = read("model.json");
  model.replace(model.find("300"), 3, "70000");
  write("model.json", model);
  write_shard("a.bin", tokens(500), kMagic16, 1);
  expect_error(kData, {"a.bin", "uint16", "70000"}, tiny({"--data", "a.bin"}));
}

TEST_F(Faults, Row05TokenIdNotBelowTheVocabulary) {
  auto ids = tokens(500);
  ids[437] = 300;
  write_shard("a.bin", ids, kMagic16, 1);
  expect_error(kData, {"a.bin", "300", "437"}, tiny({"--data", "a.bin"}));
}

TEST_F(Faults, Row06EmptyShardNoMatchAndADirectory) {
  write("empty.bin", "");
  expect_error(kData, {"empty.bin", "empty"}, tiny({"--data", "empty.bin"}));
  write_shard("none.bin", tokens(0), kMagic16, 1);
  expect_error(kData, {"none.bin", "0 tokens"}, tiny({"--data", "none.bin"}));
  expect_error(kData, {"nothing*.bin"}, tiny({"--data", "nothing*.bin"}));
  expect_error(kData, {"missing.bin"}, tiny({"--data", "missing.bin"}));
  std::filesystem::create_directory(path("shards"));
  expect_error(kData, {"shards", "directory"}, tiny({"--data", "shards"}));
}

TEST_F(Faults, Row07ShardShorterThanOneSequenceIsSkippedWithACountedWarning) {
  write_shard("long.bin", tokens(500), kMagic16, 1);
  write_shard("short.bin", tokens(8), kMagic16, 1);  // one less than seq_len + 1
  const Outcome got = run(tiny({"--data", "long.bin", "short.bin"}));
  EXPECT_EQ(got.code, 0) << got.output;
  EXPECT_NE(got.output.find("warning: "), std::string::npos) << got.output;
  EXPECT_NE(got.output.find("1 "), std::string::npos);
}

TEST_F(Faults, Row08CorpusShorterThanOneGlobalBatch) {
  write_shard("a.bin", tokens(20), kMagic16, 1);
  expect_error(kData, {"81 tokens", "20 tokens"}, tiny({"--data", "a.bin", "--global-batch", "10"}));
}

TEST_F(Faults, Row09MoreThan2To31TokensInAFileBeyond4GiB) {
  constexpr int64_t kTokens = (int64_t{1} << 31) + 5000;
  write_shard("huge.bin", std::vector<uint16_t>{}, kMagic16, 1, 0);
  const int fd = open(path("huge.bin").c_str(), O_RDWR);
  ASSERT_GE(fd, 0);
  // llm.c's count is an int32: this many tokens do not fit in it, so the file says the largest it can.
  const auto claimed = static_cast<int32_t>(2147483647);
  ASSERT_EQ(pwrite(fd, &claimed, 4, 8), 4);
  if (ftruncate(fd, 1024 + int64_t{2} * claimed) != 0) {
    close(fd);
    GTEST_SKIP() << "this file system has no files beyond 4 GiB";
  }
  static_assert(kTokens > claimed);
  close(fd);
  const Outcome got = run(tiny({"--data", "huge.bin"}));
  EXPECT_EQ(got.code, 0) << got.output;
  EXPECT_NE(got.output.find("2,147,483,647 tokens"), std::string::npos) << got.output;
}

TEST_F(Faults, Row12DuplicateShardAndValidationInTraining) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  std::filesystem::create_symlink("a.bin", path("b.bin"));
  expect_error(kUsage, {"a.bin", "twice"}, tiny({"--data", "a.bin", "a.bin"}));
  expect_error(kUsage, {"a.bin", "b.bin", "same file"}, tiny({"--data", "a.bin", "b.bin"}));
  expect_error(kUsage, {"a.bin", "validation"}, tiny({"--data", "a.bin", "--val-data", "a.bin"}));
  expect_nothing_written();
}

TEST_F(Faults, Row13MixtureWeights) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  for (const char* weight : {"0", "-1", "nan", "inf", "1e999"})
    expect_error(kUsage, {"weight", "a.bin"}, tiny({"--data", std::string("a.bin:") + weight}));
  expect_error(kUsage, {"weight", "x"}, tiny({"--data", "a.bin:x"}));
  write_shard("b.bin", tokens(500), kMagic16, 1);
  expect_error(kUsage, {"weight"}, tiny({"--data", "a.bin:0.5", "b.bin"}));
  EXPECT_EQ(run(tiny({"--data", "a.bin:0.5", "b.bin:1.5"})).code, 0);
}

TEST_F(Faults, Row13WeightsFarApart) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  write_shard("b.bin", tokens(500), kMagic16, 1);
  const std::string nothing = "nothing of 'a.bin' is trained on";
  const Outcome equal =
      run(tiny({"--data", "a.bin:1.7e308", "b.bin:1.7e308"}));  // their sum is no finite double
  EXPECT_EQ(equal.code, 0) << equal.output;
  EXPECT_EQ(equal.output.find("nothing of"), std::string::npos) << equal.output;
  const Outcome apart = run(tiny({"--data", "a.bin:1e-300", "b.bin:1", "--out", "apart"}));
  EXPECT_EQ(apart.code, 0) << apart.output;
  EXPECT_NE(apart.output.find(nothing), std::string::npos) << apart.output;
  expect_error(kUsage, {"weight", "v.bin"}, [&] {
    write_shard("v.bin", tokens(100), kMagic16, 1);
    return tiny({"--data", "a.bin", "--val-data", "v.bin:2", "--out", "other"});
  }());
}

TEST_F(Faults, ANameWithAColonAndANumberIsAFile) {
  write_shard("notes:2024", tokens(500), kMagic16, 1);
  EXPECT_EQ(run(tiny({"--data", "notes:2024"})).code, 0);
}

TEST_F(Faults, AnErrorIsOneLineWhateverTheNamesHold) {
  expect_error(kData, {"a\\nb?[31m"}, tiny({"--data", "a\nb\x1B[31m"}));
}

TEST_F(Faults, Row16ValidationSetShorterThanOneBatchIsEvaluated) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  write_shard("v.bin", tokens(10), kMagic16, 1);  // one sequence, micro-batch 2
  const Outcome got = run(tiny({"--data", "a.bin", "--val-data", "v.bin"}));
  EXPECT_EQ(got.code, 0) << got.output;
  EXPECT_NE(read("run/metrics.jsonl").find("\"val_tokens\":8"), std::string::npos)
      << read("run/metrics.jsonl");
  EXPECT_NE(got.output.find("validation data has 1 sequence, fewer than one batch"), std::string::npos)
      << got.output;
}

// ---- Configuration and launch ----------------------------------------------------------------------------------------

TEST_F(Faults, Row17UnknownOptionOrKeyNamesTheNearest) {
  expect_error(kUsage, {"--stepz", "--steps"}, tiny({"--stepz", "3"}));
  write("c.toml", "learning_rat = 1\n");
  expect_error(kUsage, {"learning_rat"}, tiny({"--config", "c.toml"}));
  write("c.toml", "warmup-step = 1\n");
  expect_error(kUsage, {"warmup-step", "warmup-steps"}, tiny({"--config", "c.toml"}));
  std::string model = read("model.json");
  model.insert(1, "\"sliding_window\": 128, ");
  write("model.json", model);
  expect_error(kUsage, {"model.json", "sliding_window"}, tiny({}));
  expect_nothing_written();
}

TEST_F(Faults, Row18RatesBetasAndWarmUp) {
  for (const char* value : {"nan", "-1", "0", "inf", "x"})
    expect_error(kUsage, {"--lr", value}, tiny({"--lr", value}));
  for (const char* option : {"--beta1", "--beta2"})
    for (const char* value : {"1", "1.5", "-0.1", "nan"})
      expect_error(kUsage, {option, value}, tiny({option, value}));
  expect_error(kUsage, {"warm", "3", "2"}, tiny({"--warmup-steps", "3"}));
  expect_error(kUsage, {"warm"}, tiny({"--warmup-tokens", "1M"}));
}

TEST_F(Faults, Row19HeadsAndPositions) {
  const std::string model = read("model.json");
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = model;
    changed.replace(changed.find(from), from.size(), to);
    write("model.json", changed);
  };
  with("\"num_key_value_heads\": 1", "\"num_key_value_heads\": 3");
  expect_error(kUsage, {"heads", "3"}, tiny({}));
  with("\"num_attention_heads\": 2", "\"head_dim\": 7, \"num_attention_heads\": 2");
  expect_error(kUsage, {"7"}, tiny({}));
  write("model.json", model);
  expect_error(kUsage, {"--seq-len", "33", "32"}, tiny({"--seq-len", "33"}));
}

TEST_F(Faults, BatchesBeyondAllMemory) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  // 2^57 and 2^60: the bytes of the tensors wrap around 2^64.
  for (const char* batch : {"268435456", "144115188075855872", "1152921504606846976"})
    expect_error(kUsage, {"--micro-batch", batch, "268435455"},
                 tiny({"--data", "a.bin", "--micro-batch", batch}));
  expect_error(kUsage, {"512000000000 tokens", "--global-batch"},
               {"--out", "run", "--device", "cpu", "--global-batch", "1e9"});
  expect_nothing_written();
}

TEST_F(Faults, Row20AnyGlobalBatchWorks) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  const Outcome got = run(tiny({"--data", "a.bin", "--global-batch", "7", "--micro-batch", "3"}));
  EXPECT_EQ(got.code, 0) << got.output;
  EXPECT_NE(read("run/metrics.jsonl").find("\"global_batch\":7"), std::string::npos);
}

TEST_F(Faults, Row24NoGpuWithDeviceCuda) {
  const Outcome got = run_shell("export CUDA_VISIBLE_DEVICES=; " +
                                command({"--device", "cuda", "--steps", "1", "--out", "run"}));
  EXPECT_EQ(got.code, kUsage) << got.output;
  EXPECT_NE(got.output.find("--device cuda"), std::string::npos) << got.output;
  expect_nothing_written();
}

TEST_F(Faults, Row30RunDirectoryExists) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  std::filesystem::create_directory(path("run"));
  write("run/precious", "data");
  expect_error(kUsage, {"run", "not empty"}, tiny({"--data", "a.bin"}));
  EXPECT_EQ(read("run/precious"), "data");
  EXPECT_FALSE(std::filesystem::exists(path("run/metrics.jsonl")));
}

TEST_F(Faults, Row31RunDirectoryNotWritable) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  write("file", "x");
  expect_error(kUsage, {"file", "directory"}, tiny({"--data", "a.bin", "--out", "file/run"}));
  expect_error(kUsage, {"/proc/kinoe-run"}, tiny({"--data", "a.bin", "--out", "/proc/kinoe-run"}));
}

TEST_F(Faults, ALimitOfTheFileSizeIsAnErrorNotASignal) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  const Outcome got = run_shell("ulimit -f 8; " + command(tiny({"--data", "a.bin"})));
  EXPECT_EQ(got.code, kCheckpoint) << got.output;
  EXPECT_NE(got.output.find("ulimit -f"), std::string::npos) << got.output;
}

TEST_F(Faults, ALimitOfThreadsIsNamed) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  // Every thread would get a stack of 128 TiB, which no address space has: the same EAGAIN as beyond ulimit -u, which
  // does not hold for root. In KiB.
  const Outcome got = run_shell("ulimit -s 137438953472 && export OMP_NUM_THREADS=1 && " +
                                command(tiny({"--data", "a.bin"})));
  EXPECT_EQ(got.code, kUsage) << got.output;
  EXPECT_NE(got.output.find("error: no more threads or processes may be started here (ulimit -u"),
            std::string::npos)
      << got.output;
}

TEST_F(Faults, AResultThatCannotBePrintedIsAnError) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  ASSERT_EQ(run(tiny({"--data", "a.bin"})).code, 0);
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--help"}, {"eval", "run", "--val-data", "a.bin", "--device", "cpu"}}) {
    const Outcome got = run_shell(command(arguments) + " >/dev/full");
    EXPECT_EQ(got.code, kUsage) << got.output;
    EXPECT_NE(got.output.find("standard output cannot be written"), std::string::npos) << got.output;
  }
}

TEST_F(Faults, InJsonStandardOutputHoldsRecordsAlone) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  write_shard("v.bin", tokens(100), kMagic16, 1);
  const Outcome got = run_shell(
      command(tiny({"--data", "a.bin", "--val-data", "v.bin", "--log-format", "json"})) + " 2>/dev/null");
  EXPECT_EQ(got.code, 0);
  EXPECT_EQ(got.output, read("run/metrics.jsonl"));
}

TEST_F(Faults, CheckpointsWithOtherFiles) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  ASSERT_EQ(run(tiny({"--data", "a.bin"})).code, 0);
  // A checkpoint under the name of a preset is still itself.
  std::filesystem::copy(path("run/checkpoints/step_00000002"), path("tiny"));
  const auto eval = [](const std::string& checkpoint) {
    return std::vector<std::string>{"eval", checkpoint, "--val-data", "a.bin", "--device", "cpu"};
  };
  const Outcome got = run(eval("tiny"));
  EXPECT_EQ(got.code, 0) << got.output;
  const std::string config = read("tiny/config.json");
  write("tiny/config.json", config.substr(0, 40));
  expect_error(kCheckpoint, {"tiny/config.json", "JSON"}, eval("tiny"));
  write("tiny/config.json", config);
  std::filesystem::remove(path("tiny/model.safetensors"));
  ASSERT_EQ(mkfifo(path("tiny/model.safetensors").c_str(), 0600), 0);
  expect_error(kCheckpoint, {"tiny/model.safetensors", "pipe"}, eval("tiny"));  // and no waiting for a writer
}

TEST_F(Faults, ARunLeavesWhatItPromises) {
  write_shard("a.bin", tokens<uint32_t>(500), kMagic32, 7);
  const Outcome got = run(tiny({"--data", "a.bin", "--save-every", "1"}));
  ASSERT_EQ(got.code, 0) << got.output;
  for (const char* name :
       {"metrics.jsonl", "config.toml", "run.json", "loss.svg", "checkpoints/step_00000001/config.json",
        "checkpoints/step_00000002/model.safetensors"})
    EXPECT_TRUE(std::filesystem::exists(path(std::string("run/") + name))) << name;
  EXPECT_NE(read("run/run.json").find("\"seq-len\": \"8\""), std::string::npos) << read("run/run.json");
  // The recorded configuration starts the same run again.
  auto metrics = [&](const std::string& run_directory) {
    const std::string text = read(run_directory + "/metrics.jsonl");
    std::string hashes;
    for (size_t at = 0; (at = text.find("\"weights_hash\":", at)) != std::string::npos; ++at)
      hashes += text.substr(at, 36);
    return hashes;
  };
  const Outcome again = run({"--config", "run/config.toml", "--out", "again"});
  ASSERT_EQ(again.code, 0) << again.output;
  EXPECT_FALSE(metrics("run").empty());
  EXPECT_EQ(metrics("run"), metrics("again"));
}

TEST_F(Faults, ALossCurveThatCannotBeDrawnIsAWarning) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  ASSERT_EQ(run(tiny({"--data", "a.bin", "--stop-after", "1"})).code, 75);
  std::filesystem::create_directories(path("run/loss.svg"));
  const Outcome got = run({"--resume", "auto", "--out", "run"});
  EXPECT_EQ(got.code, 0) << got.output;
  EXPECT_NE(got.output.find("warning: the loss curve is not drawn: "), std::string::npos) << got.output;
  EXPECT_NE(got.output.find("\ncheckpoint run/checkpoints/step_00000002\n"), std::string::npos) << got.output;
  EXPECT_EQ(got.output.find("\nloss curve "), std::string::npos) << got.output;
}

TEST_F(Faults, ADryRunWritesNothing) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  const Outcome got = run(tiny({"--data", "a.bin", "--dry-run"}));
  EXPECT_EQ(got.code, 0) << got.output;
  EXPECT_NE(got.output.find("memory"), std::string::npos);
  expect_nothing_written();
}

TEST_F(Faults, Row52ALossThatIsNotFiniteIsNeverApplied) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  const Outcome got = run(
      tiny({"--data", "a.bin", "--steps", "8", "--lr", "1e30", "--warmup-steps", "0", "--save-every", "1"}));
  EXPECT_EQ(got.code, 7) << got.output;
  EXPECT_NE(got.output.find("not finite"), std::string::npos) << got.output;
  // The last record has the weights of the one before it, and no checkpoint is of that step.
  std::istringstream lines(read("run/metrics.jsonl"));
  std::vector<nlohmann::json> steps;
  for (std::string line; std::getline(lines, line);)
    if (const auto json = nlohmann::json::parse(line); json.contains("weights_hash")) steps.push_back(json);
  ASSERT_GE(steps.size(), 2U);
  const nlohmann::json &last = steps.back(), &before = steps[steps.size() - 2];
  EXPECT_EQ(last["nan"], 1);
  EXPECT_EQ(last["skipped"], 1);
  EXPECT_EQ(before["nan"], 0);
  EXPECT_EQ(last["weights_hash"], before["weights_hash"]);
  char name[40];
  std::snprintf(name, sizeof name, "run/checkpoints/step_%08d", last["step"].get<int>());
  EXPECT_FALSE(std::filesystem::exists(path(name)));
}

TEST_F(Faults, WithoutCheckpointsNoneIsWritten) {
  write_shard("a.bin", tokens(500), kMagic16, 1);
  const Outcome got = run(tiny({"--data", "a.bin", "--save-every", "1", "--no-checkpoints"}));
  EXPECT_EQ(got.code, 0) << got.output;
  EXPECT_FALSE(std::filesystem::exists(path("run/checkpoints")));
  EXPECT_TRUE(std::filesystem::exists(path("run/metrics.jsonl")));
  EXPECT_NE(got.output.find("no checkpoint, as asked"), std::string::npos) << got.output;
}

}  // namespace
}  // namespace kinoe
