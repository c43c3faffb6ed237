// The shape of a model, as Hugging Face's config.json states it.
//
// One decoder covers every supported family; a family is a choice of norm, position, MLP, biases and tying. A key of
// config.json that would change the mathematics and that is not implemented is an error that names it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kinoe {

enum class NormKind : uint8_t { layernorm, rmsnorm };
enum class PositionKind : uint8_t { learned, rope };
enum class MlpKind : uint8_t { gelu_tanh, swiglu };
/// What config.json calls model_type. Mistral without a window computes what Llama computes, and is read as such.
enum class Family : uint8_t { gpt2, llama, qwen2, qwen3 };

struct ModelConfig {
  Family family = Family::gpt2;
  int64_t vocab_size = 0;  // true rows; memory holds padded_vocab()
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t ffn = 0;  // width of the MLP
  int64_t max_positions = 0;
  NormKind norm = NormKind::layernorm;
  PositionKind position = PositionKind::learned;
  MlpKind mlp = MlpKind::gelu_tanh;
  double norm_eps = 1e-5;
  double rope_theta = 10000.0;
  double rope_factor = 1.0;  // Llama 3's stretching of slow rotations (rope_scaling); 1: none
  double rope_low_freq_factor = 1.0;
  double rope_high_freq_factor = 4.0;
  int64_t rope_original_positions = 0;
  bool qkv_bias = false;
  bool output_bias = false;  // of the attention's output projection
  bool mlp_bias = false;
  bool qk_norm = false;         // RMSNorm over each query and key head (Qwen3)
  bool tied = false;            // lm_head shares the token embedding
  bool conv1d_weights = false;  // matrices stored [in, out] (GPT-2) instead of [out, in]
  double init_std = 0.02;
  int64_t bos_token = -1;  // -1: none
  int64_t eos_token = -1;

  [[nodiscard]] int64_t padded_vocab() const { return (vocab_size + 127) / 128 * 128; }
  [[nodiscard]] int64_t qkv_rows() const { return (heads + 2 * kv_heads) * head_dim; }
  /// Parameters as Hugging Face counts them: tied tensors once, no padding.
  [[nodiscard]] int64_t parameter_count() const;

  bool operator==(const ModelConfig&) const = default;
};

/// RoPE's angle per position of each pair of head dimensions (i, i + head_dim / 2): head_dim / 2 values,
/// theta^(-2i / head_dim), stretched as rope_scaling's type "llama3" says where rope_factor is not 1.
std::vector<double> rope_inverse_frequencies(const ModelConfig& config);

/// Throws Error(usage) for a shape that can not work: heads not divisible by kv heads, an odd head size with RoPE, ...
void validate(const ModelConfig& config);

/// `model` is a preset ("gpt2-124m", "llama3-1b", ...), a directory holding config.json, or a JSON file.
ModelConfig load_model_config(const std::string& model);
std::vector<std::string> preset_names();

/// Hugging Face's config.json, from text and to text. `torch_dtype` is "float32" or "bfloat16".
ModelConfig model_config_from_json(const std::string& text, const std::string& source);
std::string model_config_to_json(const ModelConfig& config, const std::string& torch_dtype);

/// generation_config.json beside it: the tokens a text begins and ends with.
std::string generation_config_json(const ModelConfig& config);

/// The fields that differ, in one line: "hidden_size: 768 here, 1024 there; ...". Empty when equal.
std::string describe_difference(const ModelConfig& a, const ModelConfig& b);

}  // namespace kinoe
