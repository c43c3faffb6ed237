// A decoder layer by layer; backward.cpp mirrors it.
#include "trainer/forward.h"

#include <algorithm>
#include <cmath>

#include "kernels/activation.h"
#include "kernels/attention.h"
#include "kernels/crossentropy.h"
#include "kernels/embedding.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/qk_norm.h"
#include "kernels/rope.h"

namespace kinoe {

float attention_scale(const ModelConfig& config) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim)));
}

// A norm of the stream as it is stored: with `branch` absent only the norm is computed, from the same bits.
void LayerPass::norm1(Tensor stream, Tensor branch) const {
  norm_forward(ctx, {.out = x.normed1,
                     .residual_out = branch ? x.residual1 : Tensor{},
                     .residual = stream,
                     .branch = branch,
                     .weight = weights.norm1_weight,
                     .bias = weights.norm1_bias,
                     .mean = x.mean1,
                     .rstd = x.rstd1,
                     .eps = static_cast<float>(model.config.norm_eps)});
}

void LayerPass::attention() const {
  const ModelConfig& m = model.config;
  matmul_forward(ctx, {x.qkv, x.normed1, weights.qkv_weight, weights.qkv_bias, model.layout()});
  if (m.qk_norm)
    qk_norm_forward(ctx, {.qkv = x.qkv,
                          .raw = x.qk_raw,
                          .q_weight = weights.q_norm_weight,
                          .k_weight = weights.k_norm_weight,
                          .heads = m.heads,
                          .kv_heads = m.kv_heads,
                          .eps = static_cast<float>(m.norm_eps)});
  if (model.rope_table) rope(ctx, {x.qkv, model.rope_table, m.heads, m.kv_heads, false});
  attention_forward(ctx, {.out = x.attention,
                          .lse = x.lse,
                          .qkv = x.qkv,
                          .doc_start = acts.batch.doc_start,
                          .heads = m.heads,
                          .kv_heads = m.kv_heads,
                          .scale = attention_scale(m)});
}

void LayerPass::attention_output() const {
  matmul_forward(ctx, {acts.branch, x.attention, weights.out_weight, weights.out_bias, model.layout()});
}

void LayerPass::norm2(Tensor branch) const {
  norm_forward(ctx, {.out = x.normed2,
                     .residual_out = branch ? x.residual2 : Tensor{},
                     .residual = branch ? x.residual1 : x.residual2,
                     .branch = branch,
                     .weight = weights.norm2_weight,
                     .bias = weights.norm2_bias,
                     .mean = x.mean2,
                     .rstd = x.rstd2,
                     .eps = static_cast<float>(model.config.norm_eps)});
}

void LayerPass::mlp_input() const {
  matmul_forward(ctx, {x.fc, x.normed2, weights.fc_weight, weights.fc_bias, model.layout()});
}

void LayerPass::activate() const {
  if (model.config.mlp == MlpKind::swiglu)
    swiglu_forward(ctx, {x.activated, x.fc});
  else
    gelu_forward(ctx, {x.activated, x.fc});
}

void LayerPass::mlp_output() const {
  matmul_forward(ctx, {acts.branch, x.activated, weights.proj_weight, weights.proj_bias, model.layout()});
}

void forward(const Context& ctx, const Model& model, Activations& acts, LayerHooks hooks) {
  const ParameterTable& table = model.table;

  const int embedding_bucket = ParameterTable::embedding_bucket();
  const EmbeddingTensors embedding = table.embedding(hooks.weights.acquire(embedding_bucket));
  embedding_forward(
      ctx, {.out = acts.layers[0].residual1.view({acts.shape.batch, acts.shape.length, model.config.hidden}),
            .tokens = acts.batch.tokens,
            .token_table = embedding.token,
            .position_table = embedding.position,
            .vocab_size = model.config.vocab_size,
            .bad_token = acts.bad_token});
  hooks.weights.release(embedding_bucket);

  Tensor stream = acts.layers[0].residual1;
  Tensor branch;  // the MLP output of the layer before, not yet added to the stream
  for (int64_t l = 0; l < model.config.layers; ++l) {
    const int bucket = ParameterTable::layer_bucket(l);
    const Tensor memory = hooks.weights.acquire(bucket);
    const LayerTensors weights = table.layer(memory);
    const LayerPass layer{ctx, model, weights, acts.layers[static_cast<size_t>(l)], acts};
    queue(ctx, acts, {.kind = Piece::forward_layer, .layer = l, .buckets = {memory.data}}, [&] {
      layer.norm1(stream, branch);
      layer.attention();
      layer.attention_output();
      layer.norm2(acts.branch);
      layer.mlp_input();
      layer.activate();
      layer.mlp_output();
    });
    hooks.weights.release(bucket);
    stream = layer.x.residual2;
    branch = acts.branch;
  }

  const HeadTensors head = table.head(hooks.weights.acquire(table.head_bucket()));
  norm_forward(ctx, {.out = acts.normed,
                     .residual_out = acts.residual,
                     .residual = stream,
                     .branch = branch,
                     .weight = head.norm_weight,
                     .bias = head.norm_bias,
                     .mean = acts.mean,
                     .rstd = acts.rstd,
                     .eps = static_cast<float>(model.config.norm_eps)});
  hooks.weights.release(table.head_bucket());
}

namespace {

/// The head's matrix [padded vocabulary, C]: its own, or the token embedding when tied.
struct HeadMatrix {
  HeadMatrix(const Model& model, LayerHooks layer_hooks)
      : hooks(layer_hooks),
        bucket(model.config.tied ? ParameterTable::embedding_bucket() : model.table.head_bucket()) {
    const Tensor weights = hooks.weights.acquire(bucket);
    tensor = model.config.tied ? model.table.embedding(weights).token : model.table.head(weights).lm_head;
  }
  ~HeadMatrix() { hooks.weights.release(bucket); }
  HeadMatrix(const HeadMatrix&) = delete;
  HeadMatrix& operator=(const HeadMatrix&) = delete;

  LayerHooks hooks;
  int bucket;
  Tensor tensor;
};

}  // namespace

void head_loss(const Context& ctx, const Model& model, Activations& acts, LayerHooks hooks) {
  const HeadMatrix matrix(model, hooks);
  const int64_t n = acts.normed.rows();
  const Tensor targets = acts.batch.targets.view({n});
  queue(ctx, acts, {.kind = Piece::head_loss, .buckets = {matrix.tensor.data}}, [&] {
    for (int64_t first = 0; first < n; first += acts.shape.head_rows) {
      const int64_t rows = std::min(acts.shape.head_rows, n - first);
      const Tensor logits = acts.logits.slice(0, rows);
      matmul_forward(ctx, {logits, acts.normed.slice(first, rows), matrix.tensor, {}, WeightLayout::out_in});
      cross_entropy(ctx, {.logits = logits,
                          .targets = targets.slice(first, rows),
                          .losses = acts.losses.slice(first, rows),
                          .vocab_size = model.config.vocab_size,
                          .d_loss = 0,
                          .with_gradient = false,
                          .bad_target = acts.bad_token});
    }
    loss_sum(ctx, {acts.loss_sum, acts.target_tokens, acts.overflow, acts.losses, targets});
  });
}

Tensor head_logits(const Context& ctx, const Model& model, Activations& acts, LayerHooks hooks,
                   const std::vector<int64_t>& rows) {
  const auto count = static_cast<int64_t>(rows.size());
  CHECK(count <= acts.shape.head_rows && count <= acts.branch.rows(), count,
        " rows of logits asked for, room for ", acts.shape.head_rows);
  for (int64_t i = 0; i < count; ++i) {
    const Tensor to = acts.branch.slice(i, 1), from = acts.normed.slice(rows[static_cast<size_t>(i)], 1);
    copy(ctx, to.data, from.data, to.bytes());
  }
  const HeadMatrix matrix(model, hooks);
  const Tensor logits = acts.logits.slice(0, count);
  matmul_forward(ctx, {logits, acts.branch.slice(0, count), matrix.tensor, {}, WeightLayout::out_in});
  return logits;
}

}  // namespace kinoe
