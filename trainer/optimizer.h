// AdamW over the flat range of parameters: memory, gate, clipping, update.
#pragma once

#include "trainer/model.h"
#include "trainer/sharding.h"

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

/// The flat ranges of a run, laid out as a ShardLayout says. Where the compute type is fp32 (or fp64) and nothing is sharded the
/// masters are the weights.
struct ParameterMemory {
  Tensor masters;  // [layout.size()] fp32 (fp64 in fp64)
  WeightMemory weights;
  GradientMemory gradients;  // absent without training, as all that follows
  Tensor m, v;               // [layout.size()]
  Tensor segments;           // AdamWSegment[]
  Tensor partials;           // of the gradient norm: of every chunk of this rank's memory
  Tensor gathered;           // of all ranks' memory, where sharded
  Tensor order;              // where the partial of each chunk of the flat range is in `gathered`
  Tensor raw_norm;           // [1] fp64
  int64_t segment_count = 0;
};

ParameterMemory take_parameters(Arena& arena, const Model& model, const OptimizerSettings& settings,
                                const ShardLayout& layout, GradientSum sum);
/// For inference: weights only, which are the masters then, in the compute type.
ParameterMemory take_weights(Arena& arena, const Model& model);

class Optimizer {
 public:
  /// All references must outlive the object.
  Optimizer(const Model& model, const ParameterMemory& memory, const OptimizerSettings& settings,
            const ShardLayout& layout, Sharding& sharding)
      : model_(model), memory_(memory), settings_(settings), layout_(layout), sharding_(sharding) {}

  /// Zero moments and gradients (their padding stays zero for ever), the tables.
  void prepare(const Context& ctx) const;
  /// After prepare(): masters from `seed`, and the weights this rank's masters give.
  void initialize(const Context& ctx, uint64_t seed) const;
  /// After prepare(): masters from the flat range in host memory, fp32, and the weights they give.
  void set_masters(const Context& ctx, const float* flat) const;
  /// The weights this rank's masters give, where they are memory of their own.
  void derive_weights(const Context& ctx) const;

  /// The update of one step from the summed gradients; `acts.state` holds the summed loss. Decides on the device whether the step is
  /// applied, for all ranks alike. `update` counts from 1.
  void update(const Context& ctx, const Activations& acts, double lr, int64_t update,
              double nominal_tokens) const;

  /// Adds the hash of all ranks' masters to acts.state, whose gate must be closed (halted): nothing is updated.
  void hash(const Context& ctx, const Activations& acts) const;

 private:
  void apply(const Context& ctx, const Activations& acts, double lr, int64_t update) const;
  void gradient_norm(const Context& ctx) const;

  const Model& model_;
  const ParameterMemory& memory_;
  OptimizerSettings settings_;
  const ShardLayout& layout_;
  Sharding& sharding_;
};

/// Uploads weights for inference from host memory, rounded to their type.
void set_weights(const Context& ctx, const ParameterMemory& memory, const float* flat);

}  // namespace kinoe
