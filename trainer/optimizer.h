// AdamW over the flat range of parameters: memory, gate, clipping, update.
#pragma once

#include "trainer/model.h"

namespace kinoe {

struct OptimizerSettings {
  float beta1 = 0.9F;
  float beta2 = 0.95F;
  float eps = 1e-8F;
  float weight_decay = 0.1F;
  double grad_clip = 1.0;      // 0: none
  DType moments = DType::f32;  // or bf16, rounded stochastically
  uint64_t seed = 0;
};

/// The flat ranges of a run. Where the compute type is fp32 (or fp64) the masters are the weights.
struct ParameterMemory {
  Tensor masters;    // [flat] fp32 (fp64 in fp64)
  Tensor weights;    // [flat] compute type
  Tensor gradients;  // [flat] fp32 (fp64 in fp64); absent without training
  Tensor m, v;       // [flat]; absent without training
  Tensor segments;   // AdamWSegment[]
  Tensor partials;   // of the gradient norm
  Tensor raw_norm;   // [1] fp64
  int64_t segment_count = 0;
};

/// `settings` absent: for inference, weights only (masters are the weights then, in the compute type).
ParameterMemory take_parameters(Arena& arena, const Model& model, const OptimizerSettings* settings);

class Optimizer {
 public:
  Optimizer(const Model& model, const ParameterMemory& memory, const OptimizerSettings& settings)
      : model_(model), memory_(memory), settings_(settings) {}

  /// Zero moments and gradients (their padding stays zero for ever), the table of tensors.
  void prepare(const Context& ctx) const;
  /// prepare(), then initial values from `seed`.
  void initialize(const Context& ctx, uint64_t seed) const;

  /// The update of one step from the gradients of all its micro-batches; `acts.state` holds the reduced loss. Decides on the device
  /// whether the step is applied. `update` counts from 1.
  void update(const Context& ctx, const Activations& acts, double lr, int64_t update,
              double nominal_tokens) const;

  /// Adds the masters' hash to acts.state, whose gate must be closed (halted): nothing is updated.
  void hash(const Context& ctx, const Activations& acts) const;

 private:
  void apply(const Context& ctx, const Activations& acts, double lr, int64_t update) const;
  void initialize_masters(const Context& ctx, uint64_t seed) const;

  const Model& model_;
  const ParameterMemory& memory_;
  OptimizerSettings settings_;
};

/// Uploads host masters (fp32) and derives the weights of the compute type from them.
void set_parameters(const Context& ctx, const ParameterMemory& memory, const float* flat);

}  // namespace kinoe
