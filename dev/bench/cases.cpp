// The models whose shapes are measured, and their rows in the order of a training step.
#include "dev/bench/cases.h"

#include <algorithm>
#include <utility>

namespace kinoe::bench {
namespace {

using optest::kBench;

/// GPT-2: LayerNorm, biases, learned positions, GELU, weights [C, O], tied head. Llama: RMSNorm, RoPE, SwiGLU.
struct ModelShape {
  std::string name;
  bool llama;
  int64_t batch, length;
  int64_t heads, kv_heads, head_dim;
  int64_t hidden;         // F
  int64_t vocab, padded;  // V, and the columns of the logits
  int64_t head_rows;      // rows of logits at a time
  int64_t flat;           // elements of the optimizer's range
  std::string flat_name;  // what that range is
};

std::vector<ModelShape> models(Backend backend) {
  if (backend == Backend::cuda)
    return {{"124M", false, 64, 1024, 12, 12, 64, 3072, 50257, 50304, 16384, 124475904, "all"},
            {"8B", true, 4, 4096, 32, 8, 128, 14336, 128256, 128256, 4096, 218112000, "layer"}};
  return {{"small-gpt", false, 4, 256, 4, 4, 64, 1024, 8000, 8064, 256, 4000000, "all"},
          {"small-llama", true, 2, 512, 4, 2, 64, 704, 8000, 8064, 256, 4000000, "all"}};
}

void add_products(Cases& cases, DType type, const ModelShape& m) {
  const int64_t n = m.batch * m.length, c = m.heads * m.head_dim;
  const WeightLayout layout = m.llama ? WeightLayout::out_in : WeightLayout::in_out;
  const auto add = [&](const char* name, int64_t outputs, int64_t inputs) {
    add_matmul(cases, m.name + " " + name, type, {kBench, n, outputs, inputs, !m.llama, layout});
  };
  add("qkv", c + 2 * m.kv_heads * m.head_dim, c);
  add("proj", c, c);
  if (m.llama)
    add("gate-up", 2 * m.hidden, c);
  else
    add("up", m.hidden, c);
  add("down", c, m.hidden);
  if (!m.llama) add_matmul_dgrad_gelu(cases, m.name + " down", type, {kBench, n, c, m.hidden, true, layout});
  add_matmul(cases, m.name + " head", type, {kBench, m.head_rows, m.padded, c, false, WeightLayout::out_in});
}

void add_model(Cases& cases, DType type, bool bf16_weights, const ModelShape& m) {
  const int64_t n = m.batch * m.length, c = m.heads * m.head_dim;
  add_embedding(cases, m.name, type, {kBench, m.batch, m.length, c, m.vocab, !m.llama});
  for (const bool rms : {false, true}) add_norm(cases, m.name, type, {kBench, n, c, rms, true, !rms});
  add_products(cases, type, m);
  if (m.llama) add_rope(cases, m.name, type, {kBench, m.batch, m.length, m.heads, m.kv_heads, m.head_dim});
  add_attention(cases, m.name, type, {kBench, m.batch, m.length, m.heads, m.kv_heads, m.head_dim, false});
  if (m.llama)
    add_swiglu(cases, m.name, type, {kBench, n, m.hidden});
  else
    add_gelu(cases, m.name, type, {kBench, n, m.hidden});
  add_cross_entropy(cases, m.name, type, {kBench, m.head_rows, m.vocab, m.padded, optest::Targets::all});
  const std::string flat = m.name + " " + m.flat_name;
  for (const bool bf16_moments : {false, true})
    add_adamw(cases, flat, {kBench, m.flat, bf16_moments, bf16_weights});
  add_norm_partials(cases, flat, m.flat);
  add_casts(cases, flat, m.flat);
  add_fixed_point(cases, flat, m.flat);
}

}  // namespace

std::string without_first_word(const std::string& label) { return label.substr(label.find(' ') + 1); }

Cases model_cases(Backend backend) {
  const bool gpu = backend == Backend::cuda;
  Cases cases;
  for (const ModelShape& model : models(backend))
    add_model(cases, gpu ? DType::bf16 : DType::f32, gpu, model);
  if (gpu)
    add_qk_norm(cases, "Qwen3-0.6B", DType::bf16, {kBench, 16384, 16, 8, 128});
  else
    add_qk_norm(cases, "small-qwen3", DType::f32, {kBench, 1024, 4, 2, 64});
  return cases;
}

void add_listed_cases(Cases& cases) {
  constexpr DType kType = DType::bf16;
  Cases listed;
  for (const auto& c : cases_for(optest::embedding_cases(), kBench)) add_embedding(listed, "", kType, c);
  for (const auto& c : cases_for(optest::norm_cases(), kBench)) add_norm(listed, "", kType, c);
  for (const auto& c : cases_for(optest::matmul_cases(), kBench)) add_matmul(listed, "", kType, c);
  for (const auto& c : cases_for(optest::rope_cases(), kBench)) add_rope(listed, "", kType, c);
  for (const auto& c : cases_for(optest::qk_norm_cases(), kBench)) add_qk_norm(listed, "", kType, c);
  for (const auto& c : cases_for(optest::attention_cases(), kBench)) add_attention(listed, "", kType, c);
  for (const auto& c : cases_for(optest::activation_cases(), kBench)) {
    add_gelu(listed, "", kType, c);
    add_swiglu(listed, "", kType, c);
  }
  for (const auto& c : cases_for(optest::cross_entropy_cases(), kBench))
    add_cross_entropy(listed, "", kType, c);
  for (const auto& c : cases_for(optest::adamw_cases(), kBench)) add_adamw(listed, "", c);

  for (Case& c : listed) {
    const bool known = std::any_of(cases.begin(), cases.end(), [&](const Case& other) {
      return other.operation == c.operation && other.shape == c.shape;
    });
    if (!known) cases.push_back(std::move(c));
  }
}

}  // namespace kinoe::bench
