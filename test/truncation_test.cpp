// A data file cut off while it is mapped (FAULTS.md row 11): a message and exit code 3, never a bare SIGBUS.
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "dataloader/mapped_file.h"
#include "dataloader/shard.h"
#include "test/faulty_files.h"
#include "test/program.h"

namespace kinoe {
namespace {

TEST(Truncation, IsNoticedBeforeARead) {
  const FreshDirectory directory;
  const std::string path = directory / "a.txt";
  put_file(path, std::string(100'000, 'x'));
  const Shard shard = Shard::open(path);
  std::vector<int32_t> ids(10);
  shard.read(99'990, 10, ids.data());
  ASSERT_EQ(::truncate(path.c_str(), 50'000), 0);
  const std::vector<std::string> parts = {path, "had 100000 bytes", "has 50000 now", "restore"};
  expect_error(ExitCode::data, parts, [&] { shard.read(0, 10, ids.data()); });
  expect_error(ExitCode::data, parts, [&] { (void)shard.find_bad_token(0, 10, 5); });
  expect_error(ExitCode::data, parts, [&] { (void)shard.scan(256, 1000); });
  expect_error(ExitCode::data, parts, [&] { (void)shard.fingerprint(); });
}

TEST(Truncation, ARemovedOrReplacedFileIsReadAsItWas) {
  const FreshDirectory directory;
  const std::string path = directory / "a.txt";
  put_file(path, std::string(100'000, 'x'));
  const Shard shard = Shard::open(path);
  std::filesystem::remove(path);
  int32_t id = 0;
  shard.read(99'999, 1, &id);
  EXPECT_EQ(id, 'x');
  put_file(path, "short");
  shard.read(99'999, 1, &id);
  EXPECT_EQ(id, 'x');
  put_file(directory / "longer", "a");
  const Shard growing = Shard::open(directory / "longer");
  put_file(directory / "longer", "ab");
  growing.read(0, 1, &id);
  EXPECT_EQ(id, 'a');
}

// The file shrinks between the look at its size and the read.
TEST(TruncationDeathTest, WithinAReadEndsWithTheName) {
  const FreshDirectory directory;
  const std::string path = directory / "a.txt", outer = directory / "outer.txt";
  const auto cut_off_while_reading = [&] {
    put_file(path, std::string(100'000, 'x'));
    put_file(outer, "other");
    end_on_truncation();
    const MappedFile file(path), other(outer);
    const MappedRead reading_other(other);
    const MappedRead reading(file);
    if (::truncate(path.c_str(), 0) != 0) ::_exit(1);
    ::_exit(static_cast<const volatile unsigned char*>(file.data())[99'999]);
  };
  EXPECT_EXIT(cut_off_while_reading(), testing::ExitedWithCode(3), "train_gpt: error: '.*a.txt' was cut off");
}

TEST(TruncationDeathTest, OutsideOfAReadIsNoneOfItsBusiness) {
  const FreshDirectory directory;
  const std::string path = directory / "a.txt";
  const auto fault = [&] {
    put_file(path, std::string(100'000, 'x'));
    end_on_truncation();
    const MappedFile file(path);
    { const MappedRead reading(file); }
    if (::truncate(path.c_str(), 0) != 0) ::_exit(1);
    ::_exit(static_cast<const volatile unsigned char*>(file.data())[99'999]);
  };
  EXPECT_EXIT(fault(), testing::KilledBySignal(SIGBUS), "");
}

class TruncationFaults : public ProgramTest {};

TEST_F(TruncationFaults, Row11ShardCutOffInMidRun) {
  write("model.json",
        R"({"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24,
      "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
      "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true})");
  std::vector<uint16_t> tokens(50'000);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>(i % 300);
  write_shard("a.bin", tokens, 20240520, 1);
  const std::string train = command({"--device", "cpu", "--model", "model.json", "--data", "a.bin",
                                     "--seq-len", "16", "--global-batch", "4", "--steps", "1000000",
                                     "--save-every", "0", "--sample-every", "0", "--out", "run"});
  // A minute at most, should it not end by itself.
  const Outcome got =
      run_shell(train + " >log 2>&1 & pid=$!; cd " + kinoe::quoted(directory) +
                "; for i in $(seq 600); do [ -s run/metrics.jsonl ] && break; sleep 0.1; done; "
                "truncate -s 2000 a.bin; "
                "( sleep 60; kill $pid ) >/dev/null 2>&1 & killer=$!; "
                "wait $pid; code=$?; kill $killer; tail -1 log; exit $code");
  EXPECT_EQ(got.code, 3) << got.output;
  // Nearly always the look before a read finds it; within the read, the handler does.
  const bool before =
      got.output.find("train_gpt: error: 'a.bin' had 101024 bytes when it was opened and has 2000 now") !=
      std::string::npos;
  const bool within = got.output.find("train_gpt: error: 'a.bin' was cut off") != std::string::npos;
  EXPECT_TRUE(before || within) << got.output;
}

}  // namespace
}  // namespace kinoe
