// Runs on every kind of data, as a user starts them: Megatron names, mixtures, document masks, tokenizers that do not match.
#include <cmath>

#include "dataloader/fingerprint.h"
#include "test/program.h"

namespace kinoe {
namespace {

constexpr int32_t kMagic16 = 20240520;
constexpr uint16_t kEnd = 299;

class DataProgram : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    if (IsSkipped()) return;
    write("model.json", model(R"("eos_token_id": 299,)"));
    write("no_end.json", model(""));
  }
  static std::string model(const std::string& more) {
    return "{" + more +
           R"("model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24,
      "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
      "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true})";
  }
  /// Documents of 5 to 11 tokens, each ended by kEnd.
  static std::vector<uint16_t> documents(uint32_t seed) {
    std::vector<uint16_t> tokens;
    uint32_t x = seed;
    for (int d = 0; d < 200; ++d) {
      for (int t = 0; t < 4 + d % 7; ++t) {
        x = x * 1664525U + 1013904223U;
        tokens.push_back(static_cast<uint16_t>((x >> 16) % 200));
      }
      tokens.push_back(kEnd);
    }
    return tokens;
  }
  void write_megatron(const std::string& name, const std::vector<uint16_t>& tokens) const {
    std::string idx("MMIDIDX\0\0\1\0\0\0\0\0\0\0\x08", 18);
    std::vector<int32_t> sizes;
    std::vector<int64_t> pointers, bounds{0};
    int64_t begin = 0;
    for (size_t i = 0; i < tokens.size(); ++i)
      if (tokens[i] == kEnd) {
        const auto end = static_cast<int64_t>(i) + 1;
        sizes.push_back(static_cast<int32_t>(end - begin));
        pointers.push_back(2 * begin);
        bounds.push_back(static_cast<int64_t>(sizes.size()));
        begin = end;
      }
    const auto append = [&](const auto* data, size_t n) {
      idx.append(reinterpret_cast<const char*>(data), n * sizeof(*data));
    };
    const int64_t counts[2] = {static_cast<int64_t>(sizes.size()), static_cast<int64_t>(bounds.size())};
    append(counts, 2);
    append(sizes.data(), sizes.size());
    append(pointers.data(), pointers.size());
    append(bounds.data(), bounds.size());
    write(name + ".idx", idx);
    write(name + ".bin", {reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2});
  }
  static std::string manifest(const std::string& tokenizer, const std::vector<uint16_t>& tokens) {
    ContentHash hash;
    hash.add(tokenizer.data(), static_cast<int64_t>(tokenizer.size()));
    return R"({"format": "kinoe-data-1", "tokenizer": {"file": "tokenizer.json", "xxh3_128": ")" +
           hash.hex() +
           R"(", "vocab_size": 300, "eot_id": 299}, "files": [{"name": "a.bin", "split": "train", "bytes": )" +
           std::to_string(1024 + tokens.size() * 2) + R"(, "tokens": )" + std::to_string(tokens.size()) +
           R"(, "documents": 200, "xxh3_128": "00000000000000000000000000000000"}]})";
  }
  static std::vector<std::string> train(const std::vector<std::string>& more) {
    std::vector<std::string> all = more;
    for (const char* word : {"--device", "cpu", "--seq-len", "16", "--global-batch", "2", "--steps", "3",
                             "--sample-every", "0", "--warmup-steps", "0", "--log-format", "json"})
      all.emplace_back(word);
    return all;
  }
  /// The losses of a run, as text.
  [[nodiscard]] std::string losses(const std::vector<std::string>& arguments) const {
    const Outcome got = run(train(arguments));
    EXPECT_EQ(got.code, 0) << got.output;
    std::string all;
    for (size_t at = 0; (at = got.output.find("\"loss\":", at)) != std::string::npos; ++at)
      all += got.output.substr(at, got.output.find(',', at) - at) + "\n";
    EXPECT_NE(all, "");
    return all;
  }
};

TEST_F(DataProgram, AMegatronNameIsReadAsItsTokensInAShardAre) {
  const auto tokens = documents(1);
  write_shard("a.bin", tokens, kMagic16, 1);
  write_megatron("m", tokens);
  const std::string shard = losses({"--model", "model.json", "--data", "a.bin", "--out", "r1"});
  EXPECT_EQ(shard, losses({"--model", "model.json", "--data", "m", "--out", "r2"}));
  EXPECT_EQ(shard, losses({"--model", "model.json", "--data", "m.idx", "--out", "r3"}));
  // With a mask too: the index's bounds are where the end tokens are.
  const std::string masked =
      losses({"--model", "model.json", "--data", "a.bin", "--document-mask", "--out", "r4"});
  EXPECT_NE(shard, masked);
  EXPECT_EQ(masked, losses({"--model", "no_end.json", "--data", "m", "--document-mask", "--out", "r5"}));
}

TEST_F(DataProgram, MixturesOfEveryKind) {
  write_shard("a1.bin", documents(1), kMagic16, 1);
  write_shard("a2.bin", documents(2), kMagic16, 1);
  write_megatron("m", documents(3));
  const std::string mixed = losses({"--model", "model.json", "--data", "a?.bin:0.7", "m:0.3", "--out", "r1"});
  EXPECT_EQ(mixed, losses({"--model", "model.json", "--data", "a?.bin:0.7", "m.bin:0.3", "--out", "r2"}));
  EXPECT_NE(mixed, losses({"--model", "model.json", "--data", "a?.bin:0.3", "m:0.7", "--out", "r3"}));
}

TEST_F(DataProgram, TheMaskAlsoHoldsInEvaluation) {
  write_shard("a.bin", documents(1), kMagic16, 1);
  write_shard("v.bin", documents(2), kMagic16, 1);
  const Outcome trained = run(train({"--model", "model.json", "--data", "a.bin", "--val-data", "v.bin",
                                     "--document-mask", "--eval-batches", "0", "--out", "r"}));
  ASSERT_EQ(trained.code, 0) << trained.output;
  const auto loss_of = [&](const std::string& text, const std::string& before) {
    const size_t at = text.rfind(before);  // the last evaluation
    EXPECT_NE(at, std::string::npos) << text;
    return std::stod(text.substr(at + before.size()));
  };
  const double in_run = loss_of(trained.output, "\"val_loss\":");
  const std::vector<std::string> eval = {"eval",      "r",  "--val-data", "v.bin",
                                         "--seq-len", "16", "--device",   "cpu"};
  std::vector<std::string> masked = eval;
  masked.emplace_back("--document-mask");
  EXPECT_NEAR(loss_of(run(masked).output, "validation loss "), in_run, 2e-6);
  EXPECT_GT(std::abs(loss_of(run(eval).output, "validation loss ") - in_run), 1e-4);
  // Without --val-data: as in the run.
  const Outcome own = run({"eval", "r", "--seq-len", "16", "--device", "cpu"});
  EXPECT_NEAR(loss_of(own.output, "validation loss "), in_run, 2e-6);
  EXPECT_NE(own.output.find("tokens of the run's validation data, v.bin ("), std::string::npos) << own.output;
}

TEST_F(DataProgram, AnEvaluationSaysOnWhat) {
  write_shard("a.bin", documents(1), kMagic16, 1);
  (void)losses({"--model", "model.json", "--data", "a.bin", "--out", "r"});
  const auto says = [&](const std::string& words, std::vector<std::string> more) {
    more.insert(more.begin(), {"eval", "r", "--device", "cpu"});
    const Outcome got = run(more);
    EXPECT_EQ(got.code, 0) << got.output;
    EXPECT_NE(got.output.find(words), std::string::npos) << got.output;
  };
  says("tokens of what it was trained on, a.bin (", {});
  says("tokens of a.bin (", {"--val-data", "a.bin"});
  std::filesystem::remove_all(path("r/checkpoints/step_00000003/trainer"));
  expect_error(2, {"r/checkpoints/step_00000003", "--val-data"},
               {"eval", "r/checkpoints/step_00000003", "--device", "cpu"});
}

TEST_F(DataProgram, AMaskNeedsToKnowWhereDocumentsEnd) {
  write_shard("a.bin", documents(1), kMagic16, 1);
  write("a.txt", std::string(5000, 'x'));
  expect_error(2, {"--document-mask", "a.bin", "eos_token_id"},
               train({"--model", "no_end.json", "--data", "a.bin", "--document-mask"}));
  expect_error(2, {"--document-mask", "a.txt", "leave --document-mask out"},
               train({"--data", "a.txt", "--document-mask"}));
  expect_error(2, {"--document-mask", "built-in stories"}, train({"--document-mask"}));
  write("manifest.json", manifest("any", documents(1)));
  (void)losses({"--model", "no_end.json", "--data", "a.bin", "--document-mask", "--out", "r"});
}

TEST_F(DataProgram, Row15TokenizerOfTheDataIsNotTheModels) {
  const auto tokens = documents(1);
  write_shard("a.bin", tokens, kMagic16, 1);
  write("manifest.json", manifest("the data's", tokens));
  std::filesystem::create_directory(path("theirs"));
  std::filesystem::create_directory(path("ours"));
  write("theirs/tokenizer.json", "another");
  write("ours/tokenizer.json", "the data's");
  expect_error(3, {"theirs", "manifest.json", "--tokenizer"},
               train({"--model", "model.json", "--data", "a.bin", "--tokenizer", "theirs", "--dry-run"}));
  (void)losses({"--model", "model.json", "--data", "a.bin", "--tokenizer", "ours", "--out", "r"});
  const std::string checkpoint = "r/checkpoints/step_00000003";
  const std::vector<std::string> eval = {"eval",      "r",  "--val-data", "a.bin",
                                         "--seq-len", "16", "--device",   "cpu"};
  EXPECT_EQ(run(eval).code, 0);
  write(checkpoint + "/tokenizer.json", "another");
  expect_error(3, {"step_00000003", "manifest.json"}, eval);
}

}  // namespace
}  // namespace kinoe
