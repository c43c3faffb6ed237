// The forward pass of a micro-batch, and the pieces of it that the backward pass may run again.
#pragma once

#include "trainer/layer_hooks.h"
#include "trainer/model.h"

namespace kinoe {

/// From acts.batch.tokens to acts.normed, the input of the head. Reads one bucket of weights after the other.
void forward(const Context& ctx, const Model& model, Activations& acts, LayerHooks hooks);

/// The head without gradients: adds the losses of acts.batch.targets to acts.loss_sum and acts.target_tokens.
void head_loss(const Context& ctx, const Model& model, Activations& acts, LayerHooks hooks);

/// Logits of chosen positions, for sampling: acts.logits[i] = head of row rows[i] of acts.normed. At most
/// acts.shape.head_rows rows; uses acts.branch to gather them.
Tensor head_logits(const Context& ctx, const Model& model, Activations& acts, LayerHooks hooks,
                   const std::vector<int64_t>& rows);

/// The parts of a layer, in order; forward runs all of them, backward those that --recompute dropped.
struct LayerPass {
  const Context& ctx;
  const Model& model;
  const LayerTensors& weights;
  LayerActivations& x;  // of this layer
  Activations& acts;

  void norm1(Tensor stream, Tensor branch) const;  // residual1 (= stream + branch), normed1
  void attention() const;                          // qkv, attention
  void attention_output() const;                   // branch
  void norm2(Tensor branch) const;                 // residual2 (= residual1 + branch), normed2
  void mlp_input() const;                          // fc
  void activate() const;                           // activated
  void mlp_output() const;                         // branch
};

/// 1 / sqrt(head size).
float attention_scale(const ModelConfig& config);

}  // namespace kinoe
