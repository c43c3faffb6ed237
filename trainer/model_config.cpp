// Presets, checks and derived numbers of a model's shape.
#include "trainer/model_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numbers>
#include <type_traits>
#include <utility>

#include "kernels/common/check.h"
#include "kernels/common/nearest.h"

namespace kinoe {
namespace {

namespace fs = std::filesystem;

// ---------------------------------------------------------------------------------------------- presets

/// A. Radford et al., "Language models are unsupervised multitask learners", 2019, table 2; the sizes as released.
ModelConfig gpt2(int64_t layers, int64_t hidden, int64_t heads) {
  ModelConfig c;
  c.family = Family::gpt2;
  c.vocab_size = 50257;
  c.layers = layers;
  c.hidden = hidden;
  c.heads = c.kv_heads = heads;
  c.head_dim = hidden / heads;
  c.ffn = 4 * hidden;
  c.max_positions = 1024;
  c.norm = NormKind::layernorm;
  c.position = PositionKind::learned;
  c.mlp = MlpKind::gelu_tanh;
  c.norm_eps = 1e-5;
  c.qkv_bias = c.output_bias = c.mlp_bias = c.conv1d_weights = c.tied = true;
  c.bos_token = c.eos_token = 50256;
  return c;
}

ModelConfig llama(int64_t layers, int64_t hidden, int64_t heads, int64_t kv_heads, int64_t ffn) {
  ModelConfig c;
  c.family = Family::llama;
  c.layers = layers;
  c.hidden = hidden;
  c.heads = heads;
  c.kv_heads = kv_heads;
  c.head_dim = hidden / heads;
  c.ffn = ffn;
  c.norm = NormKind::rmsnorm;
  c.position = PositionKind::rope;
  c.mlp = MlpKind::swiglu;
  c.norm_eps = 1e-5;
  return c;
}

/// A. Dubey et al., "The Llama 3 herd of models", 2024, table 3 (8B as of version 3.1), and the model cards of 3.2 (1B and 3B,
/// which tie their embeddings).
ModelConfig llama3(ModelConfig c, bool tied, double rope_factor) {
  c.vocab_size = 128256;
  c.max_positions = 131072;
  c.rope_theta = 500000.0;
  c.rope_factor = rope_factor;
  c.rope_low_freq_factor = 1.0;
  c.rope_high_freq_factor = 4.0;
  c.rope_original_positions = 8192;
  c.tied = tied;
  c.bos_token = 128000;
  c.eos_token = 128001;
  return c;
}

/// The family's config.json files: Qwen2.5 (A. Yang et al., 2024) has biases on q, k, v.
ModelConfig qwen25(ModelConfig c, int64_t max_positions, bool tied) {
  c.family = Family::qwen2;
  c.vocab_size = tied ? 151936 : 152064;
  c.max_positions = max_positions;
  c.rope_theta = 1e6;
  c.norm_eps = 1e-6;
  c.qkv_bias = true;
  c.tied = tied;
  c.bos_token = c.eos_token = 151643;
  return c;
}

/// Qwen3 (A. Yang et al., 2025) has heads of 128 whatever its width, and norms them. The base models' sizes and tokens.
ModelConfig qwen3(ModelConfig c, bool tied) {
  c.family = Family::qwen3;
  c.head_dim = 128;
  c.vocab_size = 151936;
  c.max_positions = 32768;
  c.rope_theta = 1e6;
  c.norm_eps = 1e-6;
  c.qk_norm = true;
  c.tied = tied;
  c.bos_token = c.eos_token = 151643;
  return c;
}

/// Mistral 7B v0.3: its config.json has no sliding window.
ModelConfig mistral_7b() {
  ModelConfig c = llama(32, 4096, 32, 8, 14336);
  c.vocab_size = 32768;
  c.max_positions = 32768;
  c.rope_theta = 1e6;
  c.bos_token = 1;
  c.eos_token = 2;
  return c;
}

/// Bytes as tokens, short sequences: a first run on a laptop.
ModelConfig of_bytes(ModelConfig c) {
  c.vocab_size = 256;
  c.max_positions = 256;
  c.bos_token = c.eos_token = -1;
  return c;
}

/// What learns the built-in stories best in half a minute on two cores: small and shallow, so that many steps are made, with initial
/// weights large enough for its width.
ModelConfig tiny() {
  ModelConfig c = of_bytes(llama(2, 64, 2, 1, 192));
  c.head_dim = 64;
  c.max_positions = 512;
  c.tied = true;
  c.init_std = 0.08;
  return c;
}

std::vector<std::pair<std::string, ModelConfig>> presets() {
  return {
      {"tiny", tiny()},
      {"small", of_bytes(gpt2(4, 128, 2))},
      {"small-llama", of_bytes(llama(4, 128, 2, 1, 352))},
      {"gpt2-124m", gpt2(12, 768, 12)},
      {"gpt2-355m", gpt2(24, 1024, 16)},
      {"gpt2-774m", gpt2(36, 1280, 20)},
      {"gpt2-1558m", gpt2(48, 1600, 25)},
      {"llama3-1b", llama3(llama(16, 2048, 32, 8, 8192), true, 32.0)},
      {"llama3-3b", llama3(llama(28, 3072, 24, 8, 8192), true, 32.0)},
      {"llama3-8b", llama3(llama(32, 4096, 32, 8, 14336), false, 8.0)},
      {"qwen2.5-0.5b", qwen25(llama(24, 896, 14, 2, 4864), 32768, true)},
      {"qwen2.5-1.5b", qwen25(llama(28, 1536, 12, 2, 8960), 131072, true)},
      {"qwen2.5-7b", qwen25(llama(28, 3584, 28, 4, 18944), 131072, false)},
      {"qwen3-0.6b", qwen3(llama(28, 1024, 16, 8, 3072), true)},
      {"qwen3-1.7b", qwen3(llama(28, 2048, 16, 8, 6144), true)},
      {"qwen3-4b", qwen3(llama(36, 2560, 32, 8, 9728), true)},
      {"qwen3-8b", qwen3(llama(36, 4096, 32, 8, 12288), false)},
      {"mistral-7b-v0.3", mistral_7b()},
  };
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file) fail(ExitCode::usage, "--model: cannot read ", path.string(), "; check its permissions");
  return text;
}

void check_size(const char* name, int64_t value, int64_t largest) {
  if (value < 1 || value > largest)
    fail(ExitCode::usage, "model: expected ", name, " from 1 to ", largest, ", got ", value);
}

}  // namespace

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const auto& [name, config] : presets()) names.push_back(name);
  return names;
}

ModelConfig load_model_config(const std::string& model) {
  for (const auto& [name, config] : presets())
    if (name == model) return config;
  std::error_code ignored;
  fs::path path = model;
  if (fs::is_directory(path, ignored)) path /= "config.json";
  if (!fs::is_regular_file(path, ignored)) {
    if (path != fs::path(model))
      fail(ExitCode::usage, "--model: the directory ", model,
           " has no config.json; expected a Hugging Face model directory");
    fail(ExitCode::usage, "--model: '", model,
         "' is no preset, directory or file; nearest preset: ", nearest_name(model, preset_names()));
  }
  return model_config_from_json(read_file(path), path.string());
}

int64_t ModelConfig::parameter_count() const {
  const int64_t norm_rows = norm == NormKind::layernorm ? 2 * hidden : hidden;  // weight and bias, or weight
  const int64_t attention_columns = heads * head_dim;
  const int64_t head_norms = qk_norm ? 2 * head_dim : 0;
  const int64_t attention = head_norms + qkv_rows() * (hidden + (qkv_bias ? 1 : 0)) +
                            hidden * (attention_columns + (output_bias ? 1 : 0));
  const int64_t up_rows = mlp == MlpKind::swiglu ? 2 * ffn : ffn;  // gate and up, or up
  const int64_t mlp_count = up_rows * (hidden + (mlp_bias ? 1 : 0)) + hidden * (ffn + (mlp_bias ? 1 : 0));
  const int64_t positions = position == PositionKind::learned ? max_positions * hidden : 0;
  return vocab_size * hidden * (tied ? 1 : 2) + positions + layers * (2 * norm_rows + attention + mlp_count) +
         norm_rows;
}

// Stretching: wavelengths 2 pi / f up to P / high_freq_factor stay, those from P / low_freq_factor on are divided by
// the factor, those between are blended; P = rope_original_positions. From the code released with Llama 3.1.
std::vector<double> rope_inverse_frequencies(const ModelConfig& c) {
  std::vector<double> result;
  const auto original = static_cast<double>(c.rope_original_positions);
  for (int64_t i = 0; i < c.head_dim / 2; ++i) {
    double f = std::pow(c.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(c.head_dim));
    if (c.rope_factor != 1.0) {
      const double turns = original * f / (2.0 * std::numbers::pi);  // within the original context
      const double keep =
          (turns - c.rope_low_freq_factor) / (c.rope_high_freq_factor - c.rope_low_freq_factor);
      const double blend = std::clamp(keep, 0.0, 1.0);
      f = blend * f + (1.0 - blend) * f / c.rope_factor;
    }
    result.push_back(f);
  }
  return result;
}

void validate(const ModelConfig& c) {
  // Bounds that keep every product of sizes below 2^63.
  check_size("vocab_size", c.vocab_size, INT32_MAX - 127);
  check_size("layers", c.layers, 1 << 14);
  check_size("hidden size", c.hidden, 1 << 20);
  check_size("attention heads", c.heads, 1 << 14);
  check_size("key-value heads", c.kv_heads, 1 << 14);
  check_size("head size", c.head_dim, 1 << 14);
  check_size("MLP width", c.ffn, 1 << 22);
  check_size("positions", c.max_positions, INT32_MAX);
  if (c.heads % c.kv_heads != 0)
    fail(ExitCode::usage, "model: ", c.heads, " attention heads are not a multiple of ", c.kv_heads,
         " key-value heads");
  if (c.position == PositionKind::rope && c.head_dim % 2 != 0)
    fail(ExitCode::usage, "model: RoPE turns pairs of dimensions; the head size must be even, got ",
         c.head_dim);
  const auto positive = [](const char* name, double value) {
    if (!(std::isfinite(value) && value > 0))
      fail(ExitCode::usage, "model: expected ", name, " to be finite and above 0, got ", value);
  };
  positive("the norm's epsilon", c.norm_eps);
  positive("rope_theta", c.rope_theta);
  if (!std::isfinite(c.init_std) || c.init_std < 0)
    fail(ExitCode::usage, "model: expected initializer_range to be finite and not negative, got ",
         c.init_std);
  if (!(std::isfinite(c.rope_factor) && c.rope_factor >= 1.0))
    fail(ExitCode::usage, "model: expected rope_scaling's factor to be 1 or more, got ", c.rope_factor);
  if (c.rope_factor != 1.0) {
    positive("rope_scaling's low_freq_factor", c.rope_low_freq_factor);
    if (!(std::isfinite(c.rope_high_freq_factor) && c.rope_high_freq_factor > c.rope_low_freq_factor))
      fail(ExitCode::usage, "model: expected rope_scaling's high_freq_factor above low_freq_factor ",
           c.rope_low_freq_factor, ", got ", c.rope_high_freq_factor);
    check_size("rope_scaling's original_max_position_embeddings", c.rope_original_positions, INT32_MAX);
  }
  for (const int64_t token : {c.bos_token, c.eos_token})
    if (token < -1 || token >= c.vocab_size)
      fail(ExitCode::usage, "model: the token id ", token, " of bos or eos is not in the vocabulary of ",
           c.vocab_size);
  if (c.family == Family::gpt2) {
    if (c.kv_heads != c.heads || c.heads * c.head_dim != c.hidden)
      fail(ExitCode::usage, "model: GPT-2 needs a hidden size that its heads divide evenly, got ", c.hidden,
           " and ", c.heads, " heads");
  } else if (c.family == Family::qwen2) {
    if (!c.qkv_bias || c.output_bias || c.mlp_bias)
      fail(ExitCode::usage, "model: Qwen2 has biases on q, k and v, and no others");
  } else if (c.qkv_bias != c.output_bias) {
    fail(ExitCode::usage, "model: attention_bias is that of all four projections or of none");
  }
  if (c.qk_norm != (c.family == Family::qwen3))
    fail(ExitCode::usage, "model: norms of query and key heads are what Qwen3 has, and no other family");
}

std::string describe_difference(const ModelConfig& a, const ModelConfig& b) {
  std::string text;
  const auto show = [](const auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, bool>)
      return std::string(value ? "true" : "false");
    return cat(value);
  };
  const auto compare = [&](const char* name, const auto& here, const auto& there) {
    if (here != there)
      text += cat(text.empty() ? "" : "; ", name, ": ", show(here), " here, ", show(there), " there");
  };
  const auto named = [&](const char* name, auto here, auto there, std::initializer_list<const char*> names) {
    compare(name, std::string(names.begin()[static_cast<size_t>(here)]),
            std::string(names.begin()[static_cast<size_t>(there)]));
  };
  named("model_type", a.family, b.family, {"gpt2", "llama", "qwen2", "qwen3"});
  compare("vocab_size", a.vocab_size, b.vocab_size);
  compare("num_hidden_layers", a.layers, b.layers);
  compare("hidden_size", a.hidden, b.hidden);
  compare("num_attention_heads", a.heads, b.heads);
  compare("num_key_value_heads", a.kv_heads, b.kv_heads);
  compare("head_dim", a.head_dim, b.head_dim);
  compare("intermediate_size", a.ffn, b.ffn);
  compare("max_position_embeddings", a.max_positions, b.max_positions);
  named("norm", a.norm, b.norm, {"LayerNorm", "RMSNorm"});
  named("positions", a.position, b.position, {"learned", "RoPE"});
  named("MLP", a.mlp, b.mlp, {"GELU-tanh", "SwiGLU"});
  compare("norm_eps", a.norm_eps, b.norm_eps);
  compare("rope_theta", a.rope_theta, b.rope_theta);
  compare("rope_scaling factor", a.rope_factor, b.rope_factor);
  compare("rope_scaling low_freq_factor", a.rope_low_freq_factor, b.rope_low_freq_factor);
  compare("rope_scaling high_freq_factor", a.rope_high_freq_factor, b.rope_high_freq_factor);
  compare("rope_scaling original_max_position_embeddings", a.rope_original_positions,
          b.rope_original_positions);
  compare("attention_bias (q, k, v)", a.qkv_bias, b.qkv_bias);
  compare("attention_bias (output)", a.output_bias, b.output_bias);
  compare("mlp_bias", a.mlp_bias, b.mlp_bias);
  compare("norms of query and key heads", a.qk_norm, b.qk_norm);
  compare("tie_word_embeddings", a.tied, b.tied);
  compare("weights stored [in, out]", a.conv1d_weights, b.conv1d_weights);
  compare("initializer_range", a.init_std, b.init_std);
  compare("bos_token_id", a.bos_token, b.bos_token);
  compare("eos_token_id", a.eos_token, b.eos_token);
  return text;
}

}  // namespace kinoe
