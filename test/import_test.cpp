// Weights from elsewhere: Hugging Face directories as other programs write them, llm.c's model files, and what is no such thing.
#include "trainer/import.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "test/model_harness.h"
#include "test/program.h"
#include "trainer/safetensors.h"

namespace kinoe {
namespace {

namespace fs = std::filesystem;

/// Multiples of 1/64 in (-2, 2): exact in fp32, bf16 and fp16.
std::vector<float> exact_values(const ParameterTable& table) {
  std::vector<float> flat(static_cast<size_t>(table.flat_size()), 0.0F);
  for (const Parameter& p : table.parameters())
    for (int64_t i = 0; i < p.size; ++i)
      flat[static_cast<size_t>(p.offset + i)] =
          static_cast<float>(static_cast<int>(philox(3, p.key, static_cast<uint64_t>(i)).v[0] % 255) - 127) /
          64;
  return flat;
}

uint16_t half_bits(float x) {  // of a value that binary16 holds exactly as a normal number, or 0
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffU) == 0) return static_cast<uint16_t>(bits >> 16);
  const uint32_t exponent = (bits >> 23 & 0xffU) - 127 + 15;
  return static_cast<uint16_t>((bits >> 16 & 0x8000U) | exponent << 10 | (bits >> 13 & 0x3ffU));
}

void append(std::string& to, FileDType type, float value) {
  char bytes[8] = {};
  const double wide = static_cast<double>(value);
  const uint16_t half = half_bits(value);
  const bf16 narrow = to_bf16(value);
  const void* from = type == FileDType::f64    ? static_cast<const void*>(&wide)
                     : type == FileDType::f16  ? static_cast<const void*>(&half)
                     : type == FileDType::bf16 ? static_cast<const void*>(&narrow)
                                               : static_cast<const void*>(&value);
  std::memcpy(bytes, from, size_of(type));
  to.append(bytes, size_of(type));
}

/// A tensor as a file holds it.
struct Stored {
  TensorInfo info;
  std::string bytes;
};

class ImportTest : public testing::Test {
 protected:
  ImportTest()
      : files(posix_files()), directory(testing::TempDir() + "import_test_" + std::to_string(getpid())) {
    fs::remove_all(directory);
    fs::create_directories(directory);
  }
  ~ImportTest() override { fs::remove_all(directory); }

  /// All parameters of a model in its own names.
  static std::vector<Stored> stored(const ModelConfig& config, FileDType type = FileDType::f32) {
    const ParameterTable table(config);
    const std::vector<float> flat = exact_values(table);
    std::vector<Stored> result;
    for (const Parameter& p : table.parameters()) {
      Stored s{{p.name, type, p.shape}, ""};
      for (int64_t i = 0; i < p.size; ++i) append(s.bytes, type, flat[static_cast<size_t>(p.offset + i)]);
      result.push_back(std::move(s));
    }
    return result;
  }
  static Stored constant(const std::string& name) { return {{name, FileDType::u8, {3}}, "abc"}; }

  void write(const std::vector<Stored>& tensors, uint64_t shard_bytes = kShardBytes) const {
    fs::remove_all(directory);
    fs::create_directories(directory);
    std::vector<TensorInfo> infos;
    for (const Stored& s : tensors) infos.push_back(s.info);
    write_safetensors(*files, directory, plan_safetensors(infos, "model", shard_bytes),
                      [&](size_t t, uint64_t offset, void* to, size_t bytes) {
                        std::memcpy(to, tensors[t].bytes.data() + offset, bytes);
                      });
  }

  std::vector<float> read(const ModelConfig& config, const std::string& source) const {
    const ParameterTable table(config);
    std::vector<float> flat(static_cast<size_t>(table.flat_size()), NAN);
    read_weights(*files, source, table, flat.data());
    return flat;
  }
  void expect_read(const ModelConfig& config, const std::string& what) const {
    const std::vector<float> got = read(config, directory), expected = exact_values(ParameterTable(config));
    EXPECT_EQ(0, std::memcmp(got.data(), expected.data(), got.size() * sizeof(float))) << what;
  }
  static void expect_refused(const std::vector<std::string>& parts, const std::function<void()>& work) {
    try {
      work();
      ADD_FAILURE() << "accepted; expected a message about: " << parts[0];
    } catch (const Error& error) {
      EXPECT_EQ(error.code, ExitCode::checkpoint) << error.what();
      for (const std::string& part : parts)
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
            << part << " not in " << error.what();
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    }
  }

  std::unique_ptr<Files> files;
  std::string directory;
};

TEST_F(ImportTest, EveryFamilyTypeAndNumberOfFilesGivesTheSameWeights) {
  for (const ModelConfig& config :
       {small_gpt2(), small_llama(false), small_llama(true), small_qwen2(), small_qwen3()})
    for (const FileDType type : {FileDType::f32, FileDType::bf16, FileDType::f16})
      for (const uint64_t shard : {kShardBytes, uint64_t{3000}}) {
        write(stored(config, type), shard);
        EXPECT_EQ(fs::exists(directory + "/model.safetensors.index.json"), shard == 3000);
        expect_read(config, name_of(type));
      }
}

TEST_F(ImportTest, NamesMayLackThePrefixOfTheModelWithItsHead) {
  for (const ModelConfig& config : {small_gpt2(), small_llama(true), small_llama(false)}) {
    std::vector<Stored> tensors = stored(config);
    for (Stored& s : tensors)
      for (const std::string prefix : {"transformer.", "model."})
        if (s.info.name.starts_with(prefix)) s.info.name.erase(0, prefix.size());
    write(tensors);
    expect_read(config, "without prefix");
  }
}

TEST_F(ImportTest, StoredConstantsAreNoWeightsAndNothingElseIsOverlooked) {
  std::vector<Stored> gpt2 = stored(small_gpt2());
  for (const char* name : {"h.0.attn.bias", "transformer.h.1.attn.bias", "h.1.attn.masked_bias"})
    gpt2.push_back(constant(name));
  write(gpt2);
  expect_read(small_gpt2(), "with masks");
  gpt2.push_back(constant("h.0.attn.scale"));
  write(gpt2);
  expect_refused({"1 not known to the model: h.0.attn.scale"}, [&] { read(small_gpt2(), directory); });

  std::vector<Stored> llama = stored(small_llama(false));
  llama.push_back(constant("model.layers.0.self_attn.rotary_emb.inv_freq"));
  write(llama);
  expect_read(small_llama(false), "with frequencies");
  llama.push_back(constant("model.layers.0.self_attn.bias"));
  write(llama);
  expect_refused({"model.layers.0.self_attn.bias"}, [&] { read(small_llama(false), directory); });
}

TEST_F(ImportTest, ATiedHeadMayBeStoredIfItIsTheEmbedding) {
  for (const ModelConfig& config : {small_gpt2(), small_llama(true)}) {
    std::vector<Stored> tensors = stored(config);
    const auto embedding = std::find_if(tensors.begin(), tensors.end(), [](const Stored& s) {
      return s.info.name.ends_with("wte.weight") || s.info.name.ends_with("embed_tokens.weight");
    });
    Stored head = *embedding;
    head.info.name = "lm_head.weight";
    tensors.push_back(head);
    write(tensors);
    expect_read(config, "equal");
    tensors.back().bytes.back() = static_cast<char>(tensors.back().bytes.back() ^ 1);
    write(tensors);
    expect_refused({"lm_head.weight", "unequal", "tie_word_embeddings"}, [&] { read(config, directory); });
  }
}

TEST_F(ImportTest, WhatDoesNotFitIsListedTogether) {
  std::vector<Stored> tensors = stored(small_qwen3());
  tensors.erase(tensors.begin() + 2);
  const std::string gone = stored(small_qwen3())[2].info.name;
  tensors.push_back(constant("model.layers.0.extra"));
  std::vector<Stored> wide = stored(small_qwen3(), FileDType::f64);
  tensors.back() = constant("model.layers.0.extra");
  tensors[0] = wide[0];
  for (Stored& s : tensors)
    if (s.info.name == "model.layers.1.self_attn.k_norm.weight") s.info.shape = {2, 3};
  write(tensors);
  expect_refused({"1 missing: " + gone, "1 not known to the model: model.layers.0.extra",
                  "1 of another shape: model.layers.1.self_attn.k_norm.weight [2, 3] instead of [6]",
                  "1 not F32, BF16 or F16: model.embed_tokens.weight F64"},
                 [&] { read(small_qwen3(), directory); });
}

// ---- llm.c -----------------------------------------------------------------------------------------------------------

/// Written from the format's description, not from the reader: 256 integers, then tensor by tensor, layers together.
class LlmcTest : public ImportTest {
 protected:
  LlmcTest() {
    config = small_gpt2();
    config.ffn = 4 * config.hidden;
    config.init_std = 0.02;
    config.bos_token = config.eos_token = -1;
  }

  [[nodiscard]] std::string bytes(int32_t version, int32_t padded = 128) const {
    std::vector<int32_t> header(256, 0);
    header[0] = 20240326;
    header[1] = version;
    header[2] = static_cast<int32_t>(config.max_positions);
    header[3] = static_cast<int32_t>(config.vocab_size);
    header[4] = static_cast<int32_t>(config.layers);
    header[5] = static_cast<int32_t>(config.heads);
    header[6] = static_cast<int32_t>(config.hidden);
    header[7] = padded;
    std::string file(reinterpret_cast<const char*>(header.data()), 1024);
    const FileDType type = version == 5 ? FileDType::bf16 : FileDType::f32;
    const ParameterTable table(config);
    const std::vector<float> flat = exact_values(table);
    const auto put = [&](const std::string& name, bool transposed) {
      for (const Parameter& p : table.parameters()) {
        if (p.name != name) continue;
        for (int64_t i = 0; i < p.size; ++i) {
          // Element (o, i) of llm.c's [out, in] is element (i, o) of [in, out].
          const int64_t at = transposed ? i % p.shape[0] * p.shape[1] + i / p.shape[0] : i;
          append(file, type, flat[static_cast<size_t>(p.offset + at)]);
        }
      }
    };
    put("transformer.wte.weight", false);
    for (int64_t i = 0; i < (padded - config.vocab_size) * config.hidden; ++i) append(file, type, 7.5F);
    put("transformer.wpe.weight", false);
    for (const char* kind : {"ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias",
                             "attn.c_proj.weight", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias",
                             "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"})
      for (int64_t l = 0; l < config.layers; ++l) {
        const std::string name = kind;
        put(cat("transformer.h.", l, ".", name),
            name.find("c_") != std::string::npos && name.ends_with("weight"));
      }
    put("transformer.ln_f.weight", false);
    put("transformer.ln_f.bias", false);
    return file;
  }
  std::string store(const std::string& contents) const {
    std::ofstream(directory + "/model.bin", std::ios::binary) << contents;
    return directory + "/model.bin";
  }

  ModelConfig config;
};

TEST_F(LlmcTest, BothVersionsAreRead) {
  for (const int32_t version : {3, 5})
    for (const int32_t padded : {29, 128}) {
      const std::string file = store(bytes(version, padded));
      EXPECT_TRUE(is_llmc_model(*files, file));
      EXPECT_EQ(describe_difference(source_config(*files, file), config), "");
      const std::vector<float> got = read(config, file), expected = exact_values(ParameterTable(config));
      EXPECT_EQ(0, std::memcmp(got.data(), expected.data(), got.size() * sizeof(float))) << version;
    }
}

TEST_F(LlmcTest, FilesThatCannotBeAreRefused) {
  const std::string whole = bytes(3);
  const auto refuse = [&](const std::string& contents, const std::vector<std::string>& parts) {
    const std::string file = store(contents);
    expect_refused(parts, [&] {
      source_config(*files, file);
      read(config, file);
    });
  };
  refuse(whole.substr(0, 1000), {"model.bin", "truncated"});
  refuse(whole.substr(0, whole.size() - 1), {"model.bin", "truncated"});
  refuse(whole + "x", {"more than the model"});
  const auto with = [&](size_t index, int32_t value) {
    std::string changed = whole;
    std::memcpy(changed.data() + index * 4, &value, 4);
    return changed;
  };
  refuse(with(1, 1), {"version 1", "3 (fp32) and 5 (bf16)"});
  for (size_t index = 2; index <= 6; ++index)
    for (const int32_t value : {0, -1}) refuse(with(index, value), {"its header describes no model"});
  refuse(with(5, 4), {"its header describes no model"});  // 18 channels, 4 heads
  refuse(with(7, 28), {"28 padded rows for a vocabulary of 29"});
  EXPECT_FALSE(is_llmc_model(*files, store("not a model")));
  EXPECT_FALSE(is_llmc_model(*files, directory));
}

// ---- The program -----------------------------------------------------------------------------------------------------

class InitFrom : public ProgramTest {
 protected:
  /// A Llama of bytes, trained for two steps: DIR/run.
  void train_once() const {
    std::string text;
    for (int i = 0; text.size() < 2000; ++i) text += cat("line ", i, " of a text\n");
    write("a.txt", text);
    write("b.txt", text.substr(1000));
    write(
        "config.json",
        R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 32,
              "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": true})");
    const Outcome trained =
        run({"--device", "cpu", "--model", "config.json", "--seq-len", "64", "--steps", "2", "--lr", "1e-2",
             "--eval-every", "0", "--out", "run", "--data", "a.txt"});
    ASSERT_EQ(trained.code, 0) << trained.output;
  }
  [[nodiscard]] static std::string loss_of(const std::string& output) {
    const std::string words = "validation loss ";
    const size_t at = output.rfind(words);
    return at == std::string::npos ? "" : output.substr(at + words.size(), 6);
  }
};

TEST_F(InitFrom, WeightsOfARunAreWhereTrainingBegins) {
  train_once();
  const std::vector<std::string> frozen = {"--device", "cpu",   "--seq-len",  "64",           "--steps",
                                           "1",        "--lr",  "1e-12",      "--eval-every", "0",
                                           "--data",   "a.txt", "--val-data", "b.txt"};
  const auto from = [&](const std::string& source, const std::string& out) {
    std::vector<std::string> arguments = frozen;
    arguments.insert(arguments.end(), {"--init-from", source, "--out", out});
    return run(arguments);
  };
  const Outcome eval = run({"eval", "run", "--device", "cpu", "--seq-len", "64", "--val-data", "b.txt"});
  ASSERT_EQ(eval.code, 0) << eval.output;
  for (const std::string source : {"run", "run/checkpoints/step_00000002"}) {
    const Outcome again = from(source, "again_" + source.substr(0, 3) + std::to_string(source.size()));
    ASSERT_EQ(again.code, 0) << again.output;
    EXPECT_EQ(loss_of(again.output), loss_of(eval.output)) << again.output;
  }
}

TEST_F(InitFrom, WhatIsWrongEndsBeforeAnythingIsWritten) {
  train_once();
  const std::string checkpoint = path("run/checkpoints/step_00000002");
  const auto refused = [&](const std::vector<std::string>& parts, std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--device", "cpu", "--seq-len", "64", "--steps", "1", "--out", "out",
                                       "--data", "a.txt"});
    const Outcome got = run(arguments);
    EXPECT_EQ(got.code, 4) << got.output;
    for (const std::string& part : parts) EXPECT_NE(got.output.find(part), std::string::npos) << got.output;
    EXPECT_FALSE(std::filesystem::exists(path("out")));
  };
  refused({"typo"}, {"--init-from", "typo"});
  refused({"--model small", "num_hidden_layers: 4 here, 2 there", "hidden_size: 128 here, 32 there"},
          {"--init-from", "run", "--model", "small"});
  const std::string weights = read("run/checkpoints/step_00000002/model.safetensors");
  write("run/checkpoints/step_00000002/model.safetensors", weights.substr(0, weights.size() - 1));
  refused({"model.safetensors", "truncated"}, {"--init-from", "run"});
  std::string absurd = weights;  // a header of 2^63 bytes
  absurd[7] = static_cast<char>(0x80);
  write("run/checkpoints/step_00000002/model.safetensors", absurd);
  refused({"the header is said to be"}, {"--init-from", "run"});
  write("run/checkpoints/step_00000002/model.safetensors", weights);
  std::string config = read("run/checkpoints/step_00000002/config.json");
  config.replace(config.find("\"num_hidden_layers\": 2"), 22, "\"num_hidden_layers\": 3");
  write("run/checkpoints/step_00000002/config.json", config);
  refused({"do not fit its config.json", "missing: model.layers.2.input_layernorm.weight"},
          {"--init-from", "run"});
}

}  // namespace
}  // namespace kinoe
