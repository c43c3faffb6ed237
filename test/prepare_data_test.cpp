// scripts/prepare_data.py: its own tests (test/prepare_data_test.py), and what it writes read by the program.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "dataloader/manifest.h"
#include "dataloader/shard.h"
#include "kernels/common/check.h"
#include "test/program.h"

namespace kinoe {
namespace {

std::string repository() { return std::filesystem::absolute(__FILE__).parent_path().parent_path().string(); }

class PrepareDataTest : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    if (IsSkipped()) return;
    const char* named = std::getenv("KINOE_PYTHON");
    const std::string own = repository() + "/build/python/bin/python";
    python = named != nullptr ? named : std::filesystem::exists(own) ? own : "python3";
    if (run_shell(kinoe::quoted(python) +
                  " -c 'import tokenizers; tokenizers.Tokenizer.encode_special_tokens'")
            .code != 0)
      GTEST_SKIP() << python << " has no package tokenizers (0.19 or newer); KINOE_PYTHON may name another";
    python = kinoe::quoted(python);
  }
  std::string python;
};

TEST_F(PrepareDataTest, ItsOwnTests) {
  const Outcome got = run_shell(python + " " + kinoe::quoted(repository() + "/test/prepare_data_test.py"));
  EXPECT_EQ(got.code, 0) << got.output;
  EXPECT_NE(got.output.find("\nRan 8 tests in "), std::string::npos) << got.output;
}

TEST_F(PrepareDataTest, TheProgramTrainsOnItsShards) {
  std::string lines;
  for (int i = 0; i < 400; ++i)
    lines += cat("{\"text\": \"Story ", i, " of ", i * i, " kings who walked to the sea.\"}\n");
  write("in.jsonl", lines);
  write("config.json",
        R"({"model_type":"gpt2","vocab_size":300,"n_layer":1,"n_embd":32,"n_head":2,"n_positions":64})");
  const Outcome made =
      run_shell(python + " " + kinoe::quoted(repository() + "/scripts/prepare_data.py") + " --out " +
                kinoe::quoted(path("data")) + " --train-tokenizer 300 --val-fraction 0.2 --shard-tokens 2k " +
                kinoe::quoted(path("in.jsonl")));
  ASSERT_EQ(made.code, 0) << made.output;

  const auto manifest = read_manifest(path("data/manifest.json"));
  ASSERT_TRUE(manifest.has_value());
  EXPECT_EQ(manifest->vocab_size, 300);
  int64_t documents = 0;
  for (const auto& [name, file] : manifest->files) {
    const Shard shard = Shard::open(path("data/" + name));
    EXPECT_EQ(shard.tokens(), file.tokens);
    EXPECT_EQ(shard.file_bytes(), file.bytes);
    EXPECT_EQ(shard.find_bad_token(0, shard.tokens(), manifest->vocab_size), std::nullopt);
    documents += file.documents;
  }
  EXPECT_EQ(documents, 400);
  EXPECT_GT(manifest->files.size(), 2U);

  const Outcome trained = run({"--device", "cpu", "--data", "data/train*.bin", "--val-data", "data/val*.bin",
                               "--model", "config.json", "--seq-len", "64", "--global-batch", "2", "--steps",
                               "2", "--document-mask", "--out", "run"});
  EXPECT_EQ(trained.code, 0) << trained.output;
  // What the manifest says of a file is compared when the file is opened.
  std::string text = read("data/manifest.json");
  const size_t at = text.find("\"tokens\": ") + 10;
  text[at] = text[at] == '9' ? '8' : '9';
  write("data/manifest.json", text);
  EXPECT_EQ(run({"--data", "data/train*.bin", "--model", "config.json", "--seq-len", "64", "--dry-run"}).code,
            3);
}

using SampleIdsTest = ProgramTest;

TEST_F(SampleIdsTest, AnyVocabularyAsIds) {
  std::vector<uint16_t> tokens;
  for (int i = 0; i < 500; ++i) tokens.push_back(static_cast<uint16_t>(i * 7 % 300));
  write_shard("train.bin", tokens, 20240520, 1);
  write("config.json",
        R"({"model_type":"gpt2","vocab_size":300,"n_layer":1,"n_embd":32,"n_head":2,"n_positions":64})");
  const Outcome trained = run({"--device", "cpu", "--data", "train.bin", "--model", "config.json",
                               "--seq-len", "32", "--global-batch", "2", "--steps", "1", "--out", "run"});
  ASSERT_EQ(trained.code, 0) << trained.output;
  const auto ids_of = [&](const std::string& prompt) {
    const Outcome got =
        run({"sample", "run", "--device", "cpu", "--prompt-ids", prompt, "--max-tokens", "9"});
    EXPECT_EQ(got.code, 0) << got.output;
    std::istringstream in(got.output);
    std::vector<int> ids{std::istream_iterator<int>(in), {}};
    EXPECT_TRUE(in.eof()) << got.output;
    for (const int id : ids) EXPECT_TRUE(id >= 0 && id < 300) << got.output;
    return ids;
  };
  EXPECT_EQ(ids_of("7,299").size(), 9U);
  EXPECT_EQ(ids_of("7,299"), ids_of("7,299"));
  expect_error(2, {"--prompt-ids", "below the vocabulary of 300", "300"},
               {"sample", "run", "--prompt-ids", "1,300"});
  expect_error(2, {"--prompt-ids", "'x'"}, {"sample", "run", "--prompt-ids", "1,x"});
  expect_error(2, {"--prompt-ids"}, {"sample", "run"});
  expect_error(2, {"--prompt-ids", "--prompt"}, {"sample", "run", "--prompt", "a", "--prompt-ids", "1"});
}

}  // namespace
}  // namespace kinoe
