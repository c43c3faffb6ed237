// The model in memory: what a forward pass leaves for the backward pass, and what both work in.
#pragma once

#include <array>
#include <vector>

#include "kernels/common/arena.h"
#include "kernels/common/device.h"
#include "kernels/common/graphs.h"
#include "kernels/matmul.h"
#include "trainer/model_config.h"
#include "trainer/parameters.h"

namespace kinoe {

/// What the backward pass computes again instead of keeping. All three give the same bits.
enum class Recompute : uint8_t {
  none,
  light,  // norm outputs and the activation's output
  block,  // everything but the residual stream at the entry of each layer
};

struct Model {
  Model(const ModelConfig& model_config, Backend on, DType compute)
      : config(model_config), table(model_config), backend(on), dtype(compute) {}

  ModelConfig config;
  ParameterTable table;
  Backend backend;
  DType dtype;        // of weights and activations: fp32, bf16 on the GPU, fp64 in tests
  Tensor rope_table;  // [max_positions, D]; absent with learned positions

  /// Statistics, losses and gradients: fp32, or fp64 when everything is.
  [[nodiscard]] DType accumulator() const { return dtype == DType::f64 ? DType::f64 : DType::f32; }
  [[nodiscard]] WeightLayout layout() const {
    return config.conv1d_weights ? WeightLayout::in_out : WeightLayout::out_in;
  }
};

/// Takes the model's constant tables from the arena; upload_constants() fills them.
void take_constants(Arena& arena, Model& model);
void upload_constants(const Context& ctx, const Model& model);

/// A micro-batch in the device's memory.
struct DeviceBatch {
  Tensor tokens;   // [B, T] int32
  Tensor targets;  // [B, T] int32, -1: ignored
  // With a document mask, else absent; attention_forward and attention_backward say what they hold.
  Tensor doc_start;  // [B, T] int32
  Tensor doc_end;    // [B, T] int32, training only
};

struct WorkShape {
  int64_t batch = 0;   // sequences B of a micro-batch
  int64_t length = 0;  // tokens T of a sequence
  Recompute recompute = Recompute::none;
  bool document_mask = false;  // attention stops at the ends of documents
  bool training = true;        // false: forward only, layers share their buffers
  int64_t head_rows = 0;  // rows of logits in memory at a time; 0: a default that depends on the shapes alone
};

/// Kept from forward to backward, per layer. N = B * T.
struct LayerActivations {
  Tensor residual1;     // [N, C] the stream that enters the layer
  Tensor mean1, rstd1;  // [N]
  Tensor normed1;       // [N, C]
  Tensor qkv;           // [B, T, (H + 2 Hkv) D] after QK-norm and RoPE
  Tensor qk_raw;        // [N, (H + Hkv) D] q and k before QK-norm; absent without one
  Tensor attention;     // [B, T, H D]
  Tensor lse;           // [B, H, T]
  Tensor residual2;     // [N, C] the stream between attention and MLP
  Tensor mean2, rstd2;
  Tensor normed2;    // [N, C]
  Tensor fc;         // [N, F], or [N, 2 F] gate | up
  Tensor activated;  // [N, F]
};

struct Activations {
  WorkShape shape;
  DeviceBatch batch;
  std::vector<LayerActivations> layers;
  Tensor branch;      // [N, C] what a half-layer adds to the stream; read by the next norm
  Tensor residual;    // [N, C] after the last layer
  Tensor mean, rstd;  // [N] of the final norm
  Tensor normed;      // [N, C] input of the head
  Tensor logits;      // [head_rows, padded vocabulary]
  Tensor losses;      // [N] fp32

  // Gradients, training only.
  Tensor d_residual;   // [N, C]
  Tensor d_normed;     // [N, C]
  Tensor d_attention;  // [B, T, H D]
  Tensor d_qkv;        // [B, T, (H + 2 Hkv) D]
  Tensor d_activated;  // [N, F], SwiGLU only
  Tensor d_fc;         // [N, F] or [N, 2 F]

  Tensor scratch;  // the largest any operation needs

  Tensor state;  // one StepState (kernels/adamw.h): sums over the micro-batches of a step and what the device
                 // decides from them
  Tensor sums;   // [kStepSums] int64, in state: those four below, which ranks add up
  Tensor loss_sum, target_tokens, bad_token, overflow;  // [1] int64
  Tensor weights_hash;                                  // [1] uint64, in state
};

Activations take_activations(Arena& arena, const Model& model, const WorkShape& shape);

/// Clears the sums of acts.state for a new step or evaluation; `halted` stays.
void begin_step(const Context& ctx, const Activations& acts);

/// A part of a pass that is queued as one where ctx has graphs, and everything in which two calls of it may differ beside the
/// activations they work in. The hooks are called around a piece, never in one: under sharding they communicate.
struct Piece {
  enum Kind : uint8_t { forward_layer, head_loss, backward_head, backward_layer, backward_embedding };
  Kind kind = forward_layer;
  int64_t layer = 0;
  std::array<const void*, 4> buckets{};  // of weights and gradients
  bool accumulate = false;
  bool accumulate_embedding = false;
  double nominal_tokens = 0;
};

GraphKey graph_key(const Activations& acts, const Piece& piece);

/// Queues `work`, the launches of `piece`.
template <class Work>
void queue(const Context& ctx, const Activations& acts, const Piece& piece, const Work& work) {
  if (ctx.graphs == nullptr)
    work();
  else
    ctx.graphs->run(graph_key(acts, piece), work);
}

}  // namespace kinoe
