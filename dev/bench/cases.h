// The rows of the benchmark: what is called, at which shape, what it costs at least.
//
// Shapes are those of the operations' own case lists (test/op_cases.h). A function adds the rows of one operation at one
// shape: forward and backward, with `model` in front of the shape, in the type in which the backend trains.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "dev/bench/workspace.h"
#include "kernels/common/cost.h"
#include "test/op_cases.h"

namespace kinoe::bench {

/// A case whose tensors exist.
struct Prepared {
  std::function<void()> run;
  /// Calls run once and compares a part of its result with the CPU twin.
  std::function<double()> error;
  /// Gives run back an input that it overwrites; not part of the time. Empty where that does not matter.
  std::function<void()> restore = {};
};

struct Case {
  std::string operation;
  std::string model;  // which model's shape it is, and where in it
  std::string shape;
  Cost cost;
  std::function<Prepared(Workspace&)> prepare;

  [[nodiscard]] std::string where() const { return model.empty() ? shape : model + " " + shape; }
  [[nodiscard]] std::string name() const { return operation + " " + where(); }
};
using Cases = std::vector<Case>;

/// The training shapes of the backend's two models: GPT-2 124M and Llama 8B on a GPU, two small ones on a CPU.
Cases model_cases(Backend backend);
/// The shapes of training steps in test/op_cases.h that `cases` lacks, added to it. For a GPU.
void add_listed_cases(Cases& cases);

void add_embedding(Cases& cases, const std::string& model, DType type, const optest::EmbeddingCase& c);
void add_norm(Cases& cases, const std::string& model, DType type, const optest::NormCase& c);
void add_matmul(Cases& cases, const std::string& model, DType type, const optest::MatmulCase& c);
/// dgrad of the layer behind a GELU, down to what GELU was given.
void add_matmul_dgrad_gelu(Cases& cases, const std::string& model, DType type, const optest::MatmulCase& c);
void add_rope(Cases& cases, const std::string& model, DType type, const optest::RopeCase& c);
void add_qk_norm(Cases& cases, const std::string& model, DType type, const optest::QkNormCase& c);
void add_attention(Cases& cases, const std::string& model, DType type, const optest::AttentionCase& c);
void add_gelu(Cases& cases, const std::string& model, DType type, const optest::ActivationCase& c);
void add_swiglu(Cases& cases, const std::string& model, DType type, const optest::ActivationCase& c);
void add_cross_entropy(Cases& cases, const std::string& model, DType type, const optest::CrossEntropyCase& c);
void add_adamw(Cases& cases, const std::string& model, const optest::AdamWCase& c);
void add_norm_partials(Cases& cases, const std::string& model, int64_t n);
void add_casts(Cases& cases, const std::string& model, int64_t n);
void add_fixed_point(Cases& cases, const std::string& model, int64_t n);

/// "norm N=8 C=4" without its first word, which the row's operation already says.
std::string without_first_word(const std::string& label);

}  // namespace kinoe::bench
