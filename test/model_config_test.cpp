// config.json in and out: families, presets, refusals.
#include "trainer/model_config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numbers>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

/// The message of a usage error; "" if nothing was thrown.
template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ExitCode::usage);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "";
}

std::string refusal_of(const Json& json) {
  return refusal([&] { model_config_from_json(json.dump(), "config.json"); });
}

#define EXPECT_CONTAINS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << (text)

/// A config.json as transformers 4 writes it for GPT2LMHeadModel.
Json gpt2_json() {
  return Json::parse(R"({
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
    "n_inner": null, "n_layer": 12, "n_positions": 1024, "reorder_and_upcast_attn": false, "resid_pdrop": 0.1,
    "scale_attn_by_inverse_layer_idx": false, "scale_attn_weights": true, "summary_activation": null,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
    "summary_use_proj": true, "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
    "torch_dtype": "float32", "transformers_version": "4.57.6", "use_cache": true, "vocab_size": 50257})");
}

/// As Llama-3.2-1B has it.
Json llama_json() {
  return Json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256})");
}

TEST(ModelConfig, ParameterCountsArePublishedOnes) {
  const std::vector<std::pair<std::string, int64_t>> published = {
      {"gpt2-124m", 124'439'808},    {"gpt2-355m", 354'823'168},    {"gpt2-774m", 774'030'080},
      {"gpt2-1558m", 1'557'611'200}, {"llama3-1b", 1'235'814'400},  {"llama3-3b", 3'212'749'824},
      {"llama3-8b", 8'030'261'248},  {"qwen2.5-0.5b", 494'032'768}, {"qwen2.5-1.5b", 1'543'714'304},
      {"qwen2.5-7b", 7'615'616'512}, {"qwen3-0.6b", 596'049'920},   {"qwen3-1.7b", 1'720'574'976},
      {"qwen3-4b", 4'022'468'096},   {"qwen3-8b", 8'190'735'360},   {"mistral-7b-v0.3", 7'248'023'552}};
  for (const auto& [name, count] : published)
    EXPECT_EQ(load_model_config(name).parameter_count(), count) << name;
}

TEST(ModelConfig, ParameterCountOfEveryKindOfTensor) {
  ModelConfig c = load_model_config("small");
  // 256x128 + 256x128 + 4 (2 x 256 + 384x129 + 128x129 + 512x129 + 128x513) + 256, head tied
  EXPECT_EQ(c.parameter_count(), 858'880);
  c.tied = false;
  EXPECT_EQ(c.parameter_count(), 858'880 + 256 * 128);
  ModelConfig l = load_model_config("small-llama");
  // 2 x 256x128 + 4 (2 x 128 + 256x128 + 128x128 + 3 x 352x128) + 128, head not tied
  EXPECT_EQ(l.parameter_count(), 803'968);
  l.qkv_bias = l.output_bias = l.mlp_bias = true;
  EXPECT_EQ(l.parameter_count(), 803'968 + 4 * (256 + 128 + 2 * 352 + 128));
}

TEST(ModelConfig, PresetsAreValidAndSurviveTheirOwnConfigJson) {
  ASSERT_GE(preset_names().size(), 9U);
  for (const std::string& name : preset_names()) {
    const ModelConfig c = load_model_config(name);
    EXPECT_EQ(refusal([&] { validate(c); }), "") << name;
    for (const char* dtype : {"float32", "bfloat16"}) {
      const std::string text = model_config_to_json(c, dtype);
      EXPECT_EQ(describe_difference(model_config_from_json(text, name), c), "") << name;
      EXPECT_EQ(model_config_from_json(text, name), c) << name;
      EXPECT_EQ(Json::parse(text).at("torch_dtype"), dtype);
    }
  }
}

TEST(ModelConfig, ReadsWhatTransformersWrites) {
  EXPECT_EQ(
      describe_difference(model_config_from_json(gpt2_json().dump(), ""), load_model_config("gpt2-124m")),
      "");
  EXPECT_EQ(
      describe_difference(model_config_from_json(llama_json().dump(), ""), load_model_config("llama3-1b")),
      "");
}

TEST(ModelConfig, WritesWhatTransformersExpects) {
  const Json gpt2 = Json::parse(model_config_to_json(load_model_config("gpt2-124m"), "float32"));
  EXPECT_EQ(gpt2.at("architectures"), Json::parse(R"(["GPT2LMHeadModel"])"));
  EXPECT_EQ(gpt2.at("model_type"), "gpt2");
  EXPECT_EQ(gpt2.at("n_inner"), 3072);
  EXPECT_EQ(gpt2.at("tie_word_embeddings"), true);
  EXPECT_EQ(gpt2.at("attn_pdrop"), 0.0);
  const Json llama = Json::parse(model_config_to_json(load_model_config("llama3-1b"), "bfloat16"));
  EXPECT_EQ(llama.at("architectures"), Json::parse(R"(["LlamaForCausalLM"])"));
  EXPECT_EQ(llama.at("rope_scaling"), llama_json().at("rope_scaling"));
  EXPECT_EQ(llama.at("num_key_value_heads"), 8);
  const Json tiny = Json::parse(model_config_to_json(load_model_config("small-llama"), "float32"));
  EXPECT_TRUE(tiny.at("rope_scaling").is_null());
  EXPECT_TRUE(tiny.at("bos_token_id").is_null());
}

TEST(ModelConfig, OptionalKeysHaveTransformersDefaults) {
  const ModelConfig l = model_config_from_json(
      R"({"model_type": "llama", "vocab_size": 100, "hidden_size": 96, "intermediate_size": 200,
          "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 64})",
      "");
  EXPECT_EQ(l.kv_heads, 6);
  EXPECT_EQ(l.head_dim, 16);
  EXPECT_EQ(l.norm_eps, 1e-6);
  EXPECT_EQ(l.rope_theta, 10000.0);
  EXPECT_FALSE(l.tied || l.qkv_bias || l.output_bias || l.mlp_bias || l.conv1d_weights);
  EXPECT_EQ(l.bos_token, -1);
  const ModelConfig g = model_config_from_json(
      R"({"model_type": "gpt2", "vocab_size": 100, "n_embd": 96, "n_layer": 2, "n_head": 6, "n_positions": 64})",
      "");
  EXPECT_EQ(g.ffn, 384);
  EXPECT_TRUE(g.tied && g.qkv_bias && g.output_bias && g.mlp_bias && g.conv1d_weights);
}

TEST(ModelConfig, VariantsAreRead) {
  Json j = llama_json();
  j["attention_bias"] = true;
  j["mlp_bias"] = true;
  j["head_dim"] = 128;
  j["num_key_value_heads"] = nullptr;
  j["tie_word_embeddings"] = false;
  j["eos_token_id"] = {128001, 128008, 128009};
  ModelConfig c = model_config_from_json(j.dump(), "");
  EXPECT_TRUE(c.qkv_bias && c.output_bias && c.mlp_bias && !c.tied);
  EXPECT_EQ(c.head_dim, 128);
  EXPECT_EQ(c.kv_heads, 32);
  EXPECT_EQ(c.eos_token, 128001);
  EXPECT_EQ(c.qkv_rows(), (32 + 2 * 32) * 128);

  Json g = gpt2_json();
  g["activation_function"] = "gelu_pytorch_tanh";
  g["tie_word_embeddings"] = false;
  g["n_inner"] = 1000;
  g["vocab_size"] = 256;  // bos_token_id 50256 is outside now, and none
  c = model_config_from_json(g.dump(), "");
  EXPECT_EQ(c.ffn, 1000);
  EXPECT_FALSE(c.tied);
  EXPECT_EQ(c.bos_token, -1);
}

TEST(ModelConfig, RopeParametersOfTransformers5) {
  Json j = llama_json();
  j["rope_parameters"] = j["rope_scaling"];
  j["rope_parameters"]["rope_theta"] = j["rope_theta"];
  j.erase("rope_scaling");
  j.erase("rope_theta");
  EXPECT_EQ(model_config_from_json(j.dump(), ""), load_model_config("llama3-1b"));
  j["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1234.5}};
  const ModelConfig c = model_config_from_json(j.dump(), "");
  EXPECT_EQ(c.rope_theta, 1234.5);
  EXPECT_EQ(c.rope_factor, 1.0);
}

TEST(ModelConfig, KeysThatChangeTheModelAreRefusedByName) {
  const auto gpt2_with = [](const char* key, const Json& value) {
    Json j = gpt2_json();
    j[key] = value;
    return refusal_of(j);
  };
  const auto llama_with = [](const char* key, const Json& value) {
    Json j = llama_json();
    j[key] = value;
    return refusal_of(j);
  };
  EXPECT_EQ(refusal_of(gpt2_json()), "");
  EXPECT_EQ(refusal_of(llama_json()), "");
  for (const auto& [key, value] :
       std::vector<std::pair<const char*, Json>>{{"activation_function", "relu"},
                                                 {"activation_function", "gelu"},
                                                 {"scale_attn_weights", false},
                                                 {"scale_attn_by_inverse_layer_idx", true},
                                                 {"add_cross_attention", true},
                                                 {"is_encoder_decoder", true},
                                                 {"pruned_heads", {{"0", {1, 2}}}},
                                                 {"quantization_config", {{"bits", 4}}},
                                                 {"parallel_residual", true},
                                                 {"architectures", {"GPT2Model"}},
                                                 {"n_head", "twelve"},
                                                 {"n_layer", 12.5},
                                                 {"n_embd", nullptr},
                                                 {"tie_word_embeddings", 1}})
    EXPECT_CONTAINS(gpt2_with(key, value), cat("'", key, "'"));
  for (const auto& [key, value] :
       std::vector<std::pair<const char*, Json>>{{"hidden_act", "gelu"},
                                                 {"attention_dropout", 0.1},
                                                 {"partial_rotary_factor", 0.5},
                                                 {"sliding_window", 4096},
                                                 {"qk_norm", true},
                                                 {"quantization_config", {{"bits", 4}}},
                                                 {"architectures", {"LlamaForSequenceClassification"}},
                                                 {"model_type", "falcon"},
                                                 {"layer_types", {"full_attention", "sliding_attention"}},
                                                 {"use_mrope", true}})
    EXPECT_CONTAINS(llama_with(key, value), cat("'", key, "'"));
  for (const char* type : {"linear", "dynamic", "yarn", "longrope"}) {
    EXPECT_CONTAINS(llama_with("rope_scaling", {{"type", type}, {"factor", 2.0}}), type);
    EXPECT_CONTAINS(llama_with("rope_scaling", {{"rope_type", type}, {"factor", 2.0}}), type);
  }
  Json scaling = llama_json()["rope_scaling"];
  scaling["attention_factor"] = 1.5;
  EXPECT_CONTAINS(llama_with("rope_scaling", scaling), "attention_factor");
  EXPECT_CONTAINS(llama_with("rope_scaling", 5), "rope_scaling");
}

/// As Qwen2.5-1.5B has it.
Json qwen2_json() {
  return Json::parse(R"({
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02,
    "intermediate_size": 8960, "max_position_embeddings": 131072, "max_window_layers": 28,
    "model_type": "qwen2", "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false,
    "use_sliding_window": false, "vocab_size": 151936})");
}

/// As Qwen3-0.6B-Base has it.
Json qwen3_json() {
  return Json::parse(R"({
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151643, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
    "use_sliding_window": false, "vocab_size": 151936})");
}

/// As Mistral-7B-v0.3 has it.
Json mistral_json() {
  return Json::parse(R"({
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
    "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0", "use_cache": true, "vocab_size": 32768})");
}

TEST(ModelConfig, ReadsTheOtherFamilies) {
  for (const auto& [json, preset] : std::vector<std::pair<Json, const char*>>{
           {qwen2_json(), "qwen2.5-1.5b"}, {qwen3_json(), "qwen3-0.6b"}, {mistral_json(), "mistral-7b-v0.3"}})
    EXPECT_EQ(describe_difference(model_config_from_json(json.dump(), ""), load_model_config(preset)), "")
        << preset;
  const ModelConfig qwen2 = load_model_config("qwen2.5-1.5b"), qwen3 = load_model_config("qwen3-0.6b");
  EXPECT_TRUE(qwen2.qkv_bias && !qwen2.output_bias && !qwen2.qk_norm);
  EXPECT_TRUE(!qwen3.qkv_bias && !qwen3.output_bias && qwen3.qk_norm);
  EXPECT_EQ(qwen3.head_dim, 128);
  EXPECT_EQ(load_model_config("mistral-7b-v0.3").family, Family::llama);
  Json j = qwen3_json();
  j["attention_bias"] = true;
  EXPECT_TRUE(model_config_from_json(j.dump(), "").output_bias);
}

TEST(ModelConfig, WritesTheOtherFamilies) {
  const Json qwen2 = Json::parse(model_config_to_json(load_model_config("qwen2.5-7b"), "bfloat16"));
  EXPECT_EQ(qwen2.at("architectures"), Json::parse(R"(["Qwen2ForCausalLM"])"));
  EXPECT_FALSE(qwen2.contains("attention_bias"));
  EXPECT_EQ(qwen2.at("use_sliding_window"), false);
  EXPECT_EQ(qwen2.at("head_dim"), 128);
  const Json qwen3 = Json::parse(model_config_to_json(load_model_config("qwen3-4b"), "bfloat16"));
  EXPECT_EQ(qwen3.at("architectures"), Json::parse(R"(["Qwen3ForCausalLM"])"));
  EXPECT_EQ(qwen3.at("model_type"), "qwen3");
  EXPECT_EQ(qwen3.at("attention_bias"), false);
  // Without a window Mistral is Llama, under whose name transformers knows an explicit head size.
  const Json mistral = Json::parse(model_config_to_json(load_model_config("mistral-7b-v0.3"), "bfloat16"));
  EXPECT_EQ(mistral.at("model_type"), "llama");
}

TEST(ModelConfig, AttentionWindowsAreRefusedByName) {
  const auto with = [](Json j, const char* key, const Json& value) {
    j[key] = value;
    return refusal_of(j);
  };
  EXPECT_CONTAINS(with(mistral_json(), "sliding_window", 4096), "'sliding_window' must be null");
  EXPECT_EQ(with(mistral_json(), "sliding_window", 0), "");
  Json unsaid = mistral_json();
  unsaid.erase("sliding_window");
  EXPECT_CONTAINS(refusal_of(unsaid), "'sliding_window' is missing");
  EXPECT_CONTAINS(with(qwen2_json(), "use_sliding_window", true), "'use_sliding_window' must be false");
  EXPECT_CONTAINS(with(qwen3_json(), "use_sliding_window", true), "'use_sliding_window' must be false");
  EXPECT_EQ(with(qwen3_json(), "layer_types", {"full_attention", "full_attention"}), "");
  EXPECT_CONTAINS(with(qwen3_json(), "layer_types", {"sliding_attention"}), "'layer_types'");
}

TEST(ModelConfig, KeysThatTransformersWouldDefaultOtherwiseMustBeThere) {
  for (const Json& json : {qwen2_json(), qwen3_json(), mistral_json()}) {
    Json j = json;
    j.erase("num_key_value_heads");
    EXPECT_CONTAINS(refusal_of(j), "'num_key_value_heads' is missing");
    j = json;
    j["mlp_bias"] = true;
    EXPECT_CONTAINS(refusal_of(j), "'mlp_bias' must be false");
  }
  Json j = qwen3_json();
  j.erase("head_dim");
  EXPECT_CONTAINS(refusal_of(j), "'head_dim' is missing");
  for (Json json : {qwen2_json(), mistral_json()}) {
    json["attention_bias"] = true;
    EXPECT_CONTAINS(refusal_of(json), "'attention_bias' must be false");
  }
}

TEST(ModelConfig, BrokenFilesAreRefused) {
  const auto read = [](const std::string& text) {
    return refusal([&] { model_config_from_json(text, "dir/config.json"); });
  };
  EXPECT_CONTAINS(read("{\"model_type\": "), "dir/config.json: expected JSON");
  EXPECT_CONTAINS(read("{\"vocab_size\": 1e400}"),
                  "dir/config.json: the JSON holds a number that is too large");
  EXPECT_CONTAINS(read("[1, 2]"), "expected a JSON object");
  EXPECT_CONTAINS(read("{}"), "model_type");
  EXPECT_CONTAINS(read(R"({"model_type": "gpt2"})"), "'n_layer' is missing");
}

TEST(ModelConfig, ShapesThatCannotWorkAreRefused) {
  const auto with = [](const char* preset, auto change) {
    ModelConfig c = load_model_config(preset);
    change(c);
    return refusal([&] { validate(c); });
  };
  EXPECT_CONTAINS(with("llama3-1b", [](ModelConfig& c) { c.kv_heads = 5; }), "32 attention heads");
  EXPECT_CONTAINS(with("llama3-1b", [](ModelConfig& c) { c.kv_heads = 64; }), "32 attention heads");
  EXPECT_CONTAINS(with("llama3-1b", [](ModelConfig& c) { c.head_dim = 63; }), "even, got 63");
  EXPECT_CONTAINS(with("llama3-1b", [](ModelConfig& c) { c.layers = 0; }), "layers");
  EXPECT_CONTAINS(with("llama3-1b", [](ModelConfig& c) { c.hidden = -4; }), "hidden size");
  EXPECT_CONTAINS(with("llama3-1b", [](ModelConfig& c) { c.hidden = int64_t{1} << 40; }), "hidden size");
  EXPECT_CONTAINS(with("llama3-1b", [](ModelConfig& c) { c.norm_eps = 0; }), "epsilon");
  EXPECT_CONTAINS(with("llama3-1b", [](ModelConfig& c) { c.rope_theta = std::nan(""); }), "rope_theta");
  EXPECT_CONTAINS(with("llama3-1b", [](ModelConfig& c) { c.rope_factor = 0.5; }), "factor");
  EXPECT_CONTAINS(with("llama3-1b", [](ModelConfig& c) { c.rope_high_freq_factor = 1.0; }),
                  "high_freq_factor");
  EXPECT_CONTAINS(with("llama3-1b", [](ModelConfig& c) { c.rope_original_positions = 0; }), "original");
  EXPECT_CONTAINS(with("llama3-1b", [](ModelConfig& c) { c.qkv_bias = true; }), "attention_bias");
  EXPECT_CONTAINS(with("llama3-1b", [](ModelConfig& c) { c.eos_token = 128256; }), "vocabulary");
  EXPECT_CONTAINS(with("llama3-1b", [](ModelConfig& c) { c.init_std = -1; }), "initializer_range");
  EXPECT_CONTAINS(with("gpt2-124m", [](ModelConfig& c) { c.hidden = 770; }), "divide");
  EXPECT_CONTAINS(with("gpt2-124m", [](ModelConfig& c) { c.kv_heads = 4; }), "divide");
  Json j = llama_json();
  j["num_key_value_heads"] = 5;
  EXPECT_CONTAINS(refusal_of(j), "config.json: model: 32 attention heads");
  j = llama_json();
  j.erase("head_dim");
  j["hidden_size"] = 2050;
  EXPECT_CONTAINS(refusal_of(j), "head_dim");
}

TEST(ModelConfig, RopeFrequencies) {
  ModelConfig c = load_model_config("small-llama");  // head size 64, theta 10000, no stretching
  const std::vector<double> plain = rope_inverse_frequencies(c);
  ASSERT_EQ(plain.size(), 32U);
  EXPECT_EQ(plain[0], 1.0);
  EXPECT_NEAR(plain[16], 0.01, 1e-15);
  EXPECT_NEAR(plain[8], 0.1, 1e-15);
}

// The definition in terms of wavelengths, as Llama 3.1's release states it.
TEST(ModelConfig, RopeFrequenciesOfLlama3) {
  const ModelConfig c = load_model_config("llama3-8b");
  const std::vector<double> f = rope_inverse_frequencies(c);
  ASSERT_EQ(f.size(), 64U);
  int kept = 0, blended = 0, stretched = 0;
  for (size_t i = 0; i < f.size(); ++i) {
    const double plain = std::pow(500000.0, -static_cast<double>(i) / 64.0);
    const double wavelength = 2 * std::numbers::pi / plain;
    if (wavelength < 8192 / 4.0) {
      EXPECT_NEAR(f[i], plain, plain * 1e-14);
      ++kept;
    } else if (wavelength > 8192 / 1.0) {
      EXPECT_NEAR(f[i], plain / 8.0, plain * 1e-14);
      ++stretched;
    } else {
      const double smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0);
      EXPECT_NEAR(f[i], (1 - smooth) * plain / 8.0 + smooth * plain, plain * 1e-14);
      ++blended;
    }
  }
  EXPECT_EQ(kept, 29);
  EXPECT_EQ(blended, 6);
  EXPECT_EQ(stretched, 29);
}

TEST(ModelConfig, LoadsPresetsDirectoriesAndFiles) {
  const fs::path dir = fs::path(testing::TempDir()) / "model_config_load";
  fs::remove_all(dir);
  fs::create_directories(dir / "empty");
  std::ofstream(dir / "config.json") << gpt2_json().dump();
  EXPECT_EQ(load_model_config(dir.string()), load_model_config("gpt2-124m"));
  EXPECT_EQ(load_model_config((dir / "config.json").string()), load_model_config("gpt2-124m"));
  EXPECT_CONTAINS(refusal([&] { load_model_config((dir / "empty").string()); }), "has no config.json");
  EXPECT_CONTAINS(refusal([&] { load_model_config("gpt2-124"); }), "nearest preset: gpt2-124m");
  EXPECT_CONTAINS(refusal([&] { load_model_config((dir / "nothing.json").string()); }), "is no preset");
  EXPECT_CONTAINS(refusal([&] { load_model_config(""); }), "is no preset");
}

TEST(ModelConfig, DifferencesAreNamedInOneLine) {
  const ModelConfig a = load_model_config("gpt2-124m");
  EXPECT_EQ(describe_difference(a, a), "");
  ModelConfig b = a;
  b.hidden = 1024;
  b.tied = false;
  EXPECT_EQ(describe_difference(a, b),
            "hidden_size: 768 here, 1024 there; tie_word_embeddings: true here, false there");
}

TEST(ModelConfig, EveryFieldCountsAsADifference) {
  const std::vector<void (*)(ModelConfig&)> changes = {
      [](ModelConfig& c) { c.family = Family::llama; },
      [](ModelConfig& c) { ++c.vocab_size; },
      [](ModelConfig& c) { ++c.layers; },
      [](ModelConfig& c) { ++c.hidden; },
      [](ModelConfig& c) { ++c.heads; },
      [](ModelConfig& c) { ++c.kv_heads; },
      [](ModelConfig& c) { ++c.head_dim; },
      [](ModelConfig& c) { ++c.ffn; },
      [](ModelConfig& c) { ++c.max_positions; },
      [](ModelConfig& c) { c.norm = NormKind::rmsnorm; },
      [](ModelConfig& c) { c.position = PositionKind::rope; },
      [](ModelConfig& c) { c.mlp = MlpKind::swiglu; },
      [](ModelConfig& c) { c.norm_eps *= 2; },
      [](ModelConfig& c) { c.rope_theta *= 2; },
      [](ModelConfig& c) { c.rope_factor *= 2; },
      [](ModelConfig& c) { c.rope_low_freq_factor *= 2; },
      [](ModelConfig& c) { c.rope_high_freq_factor *= 2; },
      [](ModelConfig& c) { ++c.rope_original_positions; },
      [](ModelConfig& c) { c.qkv_bias = !c.qkv_bias; },
      [](ModelConfig& c) { c.output_bias = !c.output_bias; },
      [](ModelConfig& c) { c.mlp_bias = !c.mlp_bias; },
      [](ModelConfig& c) { c.qk_norm = !c.qk_norm; },
      [](ModelConfig& c) { c.tied = !c.tied; },
      [](ModelConfig& c) { c.conv1d_weights = !c.conv1d_weights; },
      [](ModelConfig& c) { c.init_std *= 2; },
      [](ModelConfig& c) { c.bos_token = 1; },
      [](ModelConfig& c) { c.eos_token = 1; },
  };
  const ModelConfig a = load_model_config("gpt2-124m");
  for (size_t i = 0; i < changes.size(); ++i) {
    ModelConfig b = a;
    changes[i](b);
    const std::string text = describe_difference(a, b);
    EXPECT_FALSE(text.empty()) << "field " << i;
    EXPECT_EQ(text.find(';'), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace kinoe
