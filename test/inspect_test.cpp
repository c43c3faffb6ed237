// `train_gpt inspect`: what it says of sound files, and that it finds every kind of damage.
#include "dataloader/inspect.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "dataloader/fingerprint.h"
#include "test/faulty_files.h"
#include "test/program.h"
#include "trainer/model_config.h"
#include "trainer/safetensors.h"

namespace kinoe {
namespace {

std::string shard_of(const std::vector<uint16_t>& tokens) {
  std::vector<int32_t> header(256);
  header[0] = 20240520;
  header[1] = 1;
  header[2] = static_cast<int32_t>(tokens.size());
  std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
  return bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2);
}

std::string manifest_of(const std::string& name, const std::string& bytes, int64_t documents) {
  ContentHash hash;
  hash.add(bytes.data(), static_cast<int64_t>(bytes.size()));
  return cat(R"({"format": "kinoe-data-1", "tokenizer": {"file": "tokenizer.json", "xxh3_128": ")",
             std::string(32, 'a'), R"(", "vocab_size": 100, "eot_id": 99}, "files": [{"name": ")", name,
             R"(", "split": "val", "bytes": )", bytes.size(), R"(, "tokens": )", (bytes.size() - 1024) / 2,
             R"(, "documents": )", documents, R"(, "xxh3_128": ")", hash.hex(), "\"}]}");
}

bool says(const std::vector<std::string>& lines, const std::string& part) {
  return std::any_of(lines.begin(), lines.end(),
                     [&](const std::string& line) { return line.find(part) != std::string::npos; });
}

TEST(HistogramTest, CountsWhatItIsGiven) {
  Histogram h;
  h.add({5, 5, 7, 0, 5, 7, -1, 1 << 22, (1 << 22) - 1});
  EXPECT_EQ(h.total(), 9);
  EXPECT_EQ(h.count(5), 3);
  EXPECT_EQ(h.count(6), 0);
  EXPECT_EQ(h.count(1 << 23), 0);
  EXPECT_EQ(h.different(), 4);
  EXPECT_EQ(h.lowest(), 0);
  EXPECT_EQ(h.highest(), (1 << 22) - 1);
  EXPECT_EQ(h.at_least(7), 5) << "two sevens, one large, one beyond the table, one negative";
  EXPECT_EQ(h.at_least(Histogram::kTable), 2);
  EXPECT_EQ(h.most_frequent(2), (std::vector<std::pair<int64_t, int64_t>>{{5, 3}, {7, 2}}));
  EXPECT_EQ(h.most_frequent(9).size(), 4U);
  EXPECT_EQ(h.most_frequent(9)[2].first, 0) << "of equal counts the smaller id first";
  Histogram sum;
  sum.add({5, 8});
  sum.add(h);
  EXPECT_EQ(sum.count(5), 4);
  EXPECT_EQ(sum.total(), 11);
  EXPECT_EQ(sum.at_least(Histogram::kTable), 2);
  EXPECT_EQ(Histogram().lowest(), -1);
  EXPECT_EQ(Histogram().highest(), -1);
}

TEST(InspectData, AgreesWithTheManifest) {
  const FreshDirectory directory;
  std::vector<uint16_t> tokens(5000);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>(i % 50 == 49 ? 99 : i % 49);
  const std::string bytes = shard_of(tokens), path = directory / "a.bin",
                    manifest = directory / "manifest.json";
  put_file(path, bytes);
  put_file(manifest, manifest_of("a.bin", bytes, 100));
  const DataReport report = inspect_data(path, {.full = true, .offset = 4998});
  EXPECT_TRUE(report.problems.empty()) << testing::PrintToString(report.problems);
  EXPECT_EQ(report.tokens, 5000);
  EXPECT_EQ(report.vocab, 100);
  EXPECT_EQ(report.documents, 100);
  EXPECT_TRUE(report.hash_compared);
  EXPECT_EQ(report.histogram.count(99), 100);
  EXPECT_EQ(report.shown, (std::vector<int32_t>{4998 % 49, 99}));
  EXPECT_FALSE(inspect_data(path, {}).hash_compared);
  expect_error(ExitCode::usage, {"--offset 5000", "last is 4999"},
               [&] { inspect_data(path, {.offset = 5000}); });

  put_file(manifest, manifest_of("a.bin", bytes, 101));
  EXPECT_TRUE(says(inspect_data(path, {.full = true}).problems, "number of documents 100"));
  put_file(manifest, manifest_of("a.bin", bytes + "xx", 100));
  const auto problems = inspect_data(path, {.full = true}).problems;
  EXPECT_TRUE(says(problems, "size in bytes 11024"));
  EXPECT_TRUE(says(problems, "number of tokens 5000"));
  EXPECT_TRUE(says(problems, "has hash"));

  // One bit, far from what a fingerprint looks at in larger files; the id stays a good one.
  std::string changed = bytes;
  changed[5000] = static_cast<char>(changed[5000] ^ 1);
  put_file(path, changed);
  put_file(manifest, manifest_of("a.bin", bytes, 100));
  EXPECT_TRUE(inspect_data(path, {}).problems.empty());
  EXPECT_TRUE(says(inspect_data(path, {.full = true}).problems, "has hash"));
}

TEST(InspectData, FullFindsTheOneBadTokenOfMany) {
  const FreshDirectory directory;
  std::vector<uint16_t> tokens((size_t{1} << 24) + 300'000, 7);
  tokens[200'001] = 50257;  // between the windows that a short look has
  const std::string path = directory / "a.bin";
  put_file(path, shard_of(tokens));
  const DataReport quick = inspect_data(path, {.vocab = 50257});
  EXPECT_LT(quick.histogram.total(), quick.tokens);
  EXPECT_GT(quick.histogram.total(), (int64_t{1} << 24) - 1);
  const DataReport full = inspect_data(path, {.full = true, .vocab = 50257});
  EXPECT_EQ(full.histogram.total(), full.tokens);
  EXPECT_TRUE(
      says(full.problems,
           "1 token ids that are not below 50257, the vocabulary; the first is 50257 at token 200001"))
      << testing::PrintToString(full.problems);
  EXPECT_TRUE(inspect_data(path, {.full = true, .vocab = 50258}).problems.empty());
}

class InspectProgram : public ProgramTest {
 protected:
  [[nodiscard]] std::string output_of(const std::vector<std::string>& arguments) const {
    const Outcome got = run(arguments);
    EXPECT_EQ(got.code, 0) << got.output;
    return got.output;
  }
  /// The two files of a small model, its weights 0.5.
  void write_model(const std::string& name, bool with_nan, bool without_norm) const {
    std::filesystem::create_directory(path(name));
    const std::string config =
        R"({"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24,
      "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
      "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true})";
    write(name + "/config.json", config);
    std::vector<TensorInfo> tensors;
    const std::string layer = "model.layers.0.";
    const auto add = [&](const std::string& tensor, std::vector<int64_t> shape) {
      tensors.push_back({tensor, FileDType::f32, std::move(shape)});
    };
    add("model.embed_tokens.weight", {300, 16});
    add(layer + "input_layernorm.weight", {16});
    add(layer + "self_attn.q_proj.weight", {16, 16});
    add(layer + "self_attn.k_proj.weight", {8, 16});
    add(layer + "self_attn.v_proj.weight", {8, 16});
    add(layer + "self_attn.o_proj.weight", {16, 16});
    add(layer + "post_attention_layernorm.weight", {16});
    add(layer + "mlp.gate_proj.weight", {24, 16});
    add(layer + "mlp.up_proj.weight", {24, 16});
    add(layer + "mlp.down_proj.weight", {16, 24});
    if (!without_norm) add("model.norm.weight", {16});
    const auto files = posix_files();
    write_safetensors(*files, path(name), plan_safetensors(tensors),
                      [&](size_t tensor, uint64_t offset, void* to, size_t bytes) {
                        std::vector<float> values(bytes / 4, 0.5F);
                        if (with_nan && tensor == 3 && offset == 0) values[7] = NAN;
                        std::memcpy(to, values.data(), bytes);
                      });
  }
};

TEST_F(InspectProgram, Shards) {
  write("a.bin", shard_of({1, 2, 3, 3, 3, 50256}));
  write("b.bin", shard_of({4, 4}));
  const std::string one = output_of({"inspect", "a.bin", "--offset", "3"});
  for (const char* part :
       {"llm.c uint16", "1,036 bytes", "tokens                 6", "1 to 50,256, 4 different, of 6 tokens",
        "3: 3, 50.00 %", "tokens at 3            3 3 50256"})
    EXPECT_NE(one.find(part), std::string::npos) << part << " in\n" << one;
  const std::string both = output_of({"inspect", "*.bin", "--full", "--vocab", "50257"});
  for (const char* part : {"files                  2", "tokens                 8", "50,257, kept"})
    EXPECT_NE(both.find(part), std::string::npos) << part << " in\n" << both;

  write("c.bin", shard_of({4, 4}) + "x");
  const Outcome bad = run({"inspect", "*.bin", "--vocab", "50256"});
  EXPECT_EQ(bad.code, 3);
  EXPECT_NE(bad.output.find("train_gpt: error: 'a.bin' has 1 token ids"), std::string::npos) << bad.output;
  EXPECT_NE(bad.output.find("(and 1 more problem, listed above)"), std::string::npos) << bad.output;
  EXPECT_NE(bad.output.find("'c.bin' should have 1028 bytes"), std::string::npos) << bad.output;
}

TEST_F(InspectProgram, MegatronAndText) {
  std::string idx("MMIDIDX\0\0\1\0\0\0\0\0\0\0\x08", 18);
  const auto put = [&](auto value) { idx.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  put(int64_t{2});
  put(int64_t{3});
  put(int32_t{3});
  put(int32_t{1});
  for (const int64_t number : {0, 6, 0, 1, 2}) put(number);
  write("m.idx", idx);
  write("m.bin", std::string("\1\0\2\0\3\0\4\0", 8));
  const std::string text = output_of({"inspect", "m", "--full", "--offset", "1"});
  for (const char* part : {"m.bin", "Megatron uint16", "sequences              2", "documents              2",
                           "tokens at 1            2 3 4"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  write("a.txt", "Once upon\x1B a time\n");
  const std::string plain = output_of({"inspect", "a.txt", "--offset", "5"});
  EXPECT_NE(plain.find("text at 5:\nupon? a time\n"), std::string::npos) << plain;
}

TEST_F(InspectProgram, ModelDirectories) {
  write_model("good", false, false);
  const std::string text = output_of({"inspect", "good", "--full"});
  for (const char* part : {"layers                 1", "2 of 8, 1 key/value", "11 tensors (11 of F32)",
                           "RoPE", "model.layers.0.self_attn.k_proj.weight", "[8, 16]"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  write_model("nan", true, false);
  EXPECT_EQ(run({"inspect", "nan"}).code, 0) << "only --full reads the elements";
  const Outcome nan = run({"inspect", "nan", "--full"});
  EXPECT_EQ(nan.code, 4);
  EXPECT_NE(nan.output.find("train_gpt: error: tensor model.layers.0.self_attn.k_proj.weight in 'nan' has 1 "
                            "elements that are NaN"),
            std::string::npos)
      << nan.output;
  write_model("short", false, true);
  const Outcome lacking = run({"inspect", "short"});
  EXPECT_EQ(lacking.code, 4);
  EXPECT_NE(lacking.output.find("lacks the tensor model.norm.weight"), std::string::npos) << lacking.output;
  std::filesystem::resize_file(path("good/model.safetensors"), 1000);
  const Outcome cut = run({"inspect", "good"});
  EXPECT_EQ(cut.code, 4);
  EXPECT_NE(cut.output.find("train_gpt: error: good/model.safetensors"), std::string::npos) << cut.output;
  expect_error(2, {"--vocab", "model directory"}, {"inspect", "nan", "--vocab", "5"});
}

TEST_F(InspectProgram, Mistakes) {
  expect_error(2, {"inspect", "PATH"}, {"inspect"});
  expect_error(3, {"nothing.bin"}, {"inspect", "nothing.bin"});
  expect_error(3, {"is a directory"}, {"inspect", "."});
  expect_error(2, {"--fll", "--full"}, {"inspect", "x", "--fll"});
  write("a.bin", shard_of({1, 2}));
  write("b.bin", shard_of({1, 2}));
  expect_error(2, {"--offset", "2"}, {"inspect", "*.bin", "--offset", "0"});
}

}  // namespace
}  // namespace kinoe
