// forward.cpp mirrored, last line first.
#include "trainer/backward.h"

#include <algorithm>

#include "kernels/activation.h"
#include "kernels/attention.h"
#include "kernels/crossentropy.h"
#include "kernels/embedding.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/qk_norm.h"
#include "kernels/rope.h"
#include "trainer/forward.h"

namespace kinoe {
namespace {

/// One linear layer backwards: dx, dW and db from dy. Where x = gelu(gelu_input), dx is the gradient of gelu_input.
struct LinearBackward {
  const Context& ctx;
  const Model& model;
  Activations& acts;
  bool accumulate;

  void operator()(Tensor dx, Tensor dy, Tensor x, Tensor weight, Tensor d_weight, Tensor d_bias,
                  Tensor gelu_input = {}) const {
    matmul_dgrad(ctx, {dx, dy, weight, model.layout(), gelu_input});
    matmul_wgrad(ctx, {d_weight, d_bias, accumulate, dy, x, model.layout(), acts.scratch});
  }
};

/// The head, some rows of logits at a time: losses, gradient of its input, gradient of its matrix.
void head_backward(const Context& ctx, const Model& model, Activations& acts, Tensor matrix, Tensor d_matrix,
                   bool accumulate, double nominal_tokens) {
  const int64_t n = acts.normed.rows();
  const Tensor targets = acts.batch.targets.view({n});
  for (int64_t first = 0; first < n; first += acts.shape.head_rows) {
    const int64_t rows = std::min(acts.shape.head_rows, n - first);
    const Tensor logits = acts.logits.slice(0, rows), input = acts.normed.slice(first, rows);
    matmul_forward(ctx, {logits, input, matrix, {}, WeightLayout::out_in});
    cross_entropy(ctx, {.logits = logits,
                        .targets = targets.slice(first, rows),
                        .losses = acts.losses.slice(first, rows),
                        .vocab_size = model.config.vocab_size,
                        .d_loss = static_cast<float>(1.0 / nominal_tokens),
                        .with_gradient = true,
                        .bad_target = acts.bad_token});
    matmul_dgrad(ctx, {acts.d_normed.slice(first, rows), logits, matrix, WeightLayout::out_in});
    matmul_wgrad(ctx,
                 {d_matrix, {}, accumulate || first > 0, logits, input, WeightLayout::out_in, acts.scratch});
  }
  loss_sum(ctx, {acts.loss_sum, acts.target_tokens, acts.overflow, acts.losses, targets});
}

/// What --recompute did not keep, from what it did.
void recompute(const LayerPass& layer) {
  const Recompute mode = layer.acts.shape.recompute;
  if (mode == Recompute::none) return;
  layer.norm1(layer.x.residual1, {});
  if (mode == Recompute::block) {
    layer.attention();
    layer.attention_output();
    layer.norm2(layer.acts.branch);
    layer.mlp_input();
  } else {
    layer.norm2({});
  }
  layer.activate();
}

/// One layer, from the gradient of what leaves it to that of what enters it, both in acts.d_residual: the gradient of the
/// stream is also that of the branch that was added to it.
void layer_backward(const Context& ctx, const Model& model, Activations& acts, LayerActivations& x,
                    const LayerTensors& w, const LayerTensors& d, bool accumulate) {
  const ModelConfig& m = model.config;
  const LinearBackward linear{ctx, model, acts, accumulate};
  recompute(LayerPass{ctx, model, w, x, acts});

  if (m.mlp == MlpKind::swiglu) {
    linear(acts.d_activated, acts.d_residual, x.activated, w.proj_weight, d.proj_weight, d.proj_bias);
    swiglu_backward(ctx, {acts.d_fc, acts.d_activated, x.fc});
  } else {
    linear(acts.d_fc, acts.d_residual, x.activated, w.proj_weight, d.proj_weight, d.proj_bias, x.fc);
  }
  linear(acts.d_normed, acts.d_fc, x.normed2, w.fc_weight, d.fc_weight, d.fc_bias);
  norm_backward(ctx, {.d_residual = acts.d_residual,
                      .d_residual_in = acts.d_residual,
                      .d_weight = d.norm2_weight,
                      .d_bias = d.norm2_bias,
                      .accumulate = accumulate,
                      .d_out = acts.d_normed,
                      .residual = x.residual2,
                      .weight = w.norm2_weight,
                      .mean = x.mean2,
                      .rstd = x.rstd2,
                      .scratch = acts.scratch});

  linear(acts.d_attention, acts.d_residual, x.attention, w.out_weight, d.out_weight, d.out_bias);
  attention_backward(ctx, {.d_qkv = acts.d_qkv,
                           .d_out = acts.d_attention,
                           .out = x.attention,
                           .lse = x.lse,
                           .qkv = x.qkv,
                           .doc_start = acts.batch.doc_start,
                           .doc_end = acts.batch.doc_end,
                           .heads = m.heads,
                           .kv_heads = m.kv_heads,
                           .scale = attention_scale(m),
                           .scratch = acts.scratch});
  if (model.rope_table) rope(ctx, {acts.d_qkv, model.rope_table, m.heads, m.kv_heads, true});
  if (m.qk_norm)
    qk_norm_backward(ctx, {.d_qkv = acts.d_qkv,
                           .d_q_weight = d.q_norm_weight,
                           .d_k_weight = d.k_norm_weight,
                           .accumulate = accumulate,
                           .raw = x.qk_raw,
                           .q_weight = w.q_norm_weight,
                           .k_weight = w.k_norm_weight,
                           .heads = m.heads,
                           .kv_heads = m.kv_heads,
                           .eps = static_cast<float>(m.norm_eps),
                           .scratch = acts.scratch});
  linear(acts.d_normed, acts.d_qkv, x.normed1, w.qkv_weight, d.qkv_weight, d.qkv_bias);
  norm_backward(ctx, {.d_residual = acts.d_residual,
                      .d_residual_in = acts.d_residual,
                      .d_weight = d.norm1_weight,
                      .d_bias = d.norm1_bias,
                      .accumulate = accumulate,
                      .d_out = acts.d_normed,
                      .residual = x.residual1,
                      .weight = w.norm1_weight,
                      .mean = x.mean1,
                      .rstd = x.rstd1,
                      .scratch = acts.scratch});
}

}  // namespace

void backward(const Context& ctx, const Model& model, Activations& acts, LayerHooks hooks,
              double nominal_tokens) {
  const ModelConfig& m = model.config;
  const ParameterTable& table = model.table;
  const int embedding_bucket = ParameterTable::embedding_bucket(), head_bucket = table.head_bucket();

  // Head and final norm. A tied head is the first to add to the embedding's gradient.
  const Tensor head_memory = hooks.weights.acquire(head_bucket);
  const HeadTensors head = table.head(head_memory);
  const GradientTarget head_target = hooks.grads.begin(head_bucket);
  const HeadTensors d_head = table.head(head_target.bucket);
  GradientTarget embedding_target;
  Tensor matrix = head.lm_head, d_matrix = d_head.lm_head;
  bool accumulate_matrix = head_target.accumulate;
  if (m.tied) {
    embedding_target = hooks.grads.begin(embedding_bucket);
    matrix = table.embedding(hooks.weights.acquire(embedding_bucket)).token;
    d_matrix = table.embedding(embedding_target.bucket).token;
    accumulate_matrix = embedding_target.accumulate;
  }
  queue(ctx, acts,
        {.kind = Piece::backward_head,
         .buckets = {head_memory.data, head_target.bucket.data, matrix.data, d_matrix.data},
         .accumulate = head_target.accumulate,
         .accumulate_embedding = accumulate_matrix,
         .nominal_tokens = nominal_tokens},
        [&] {
          head_backward(ctx, model, acts, matrix, d_matrix, accumulate_matrix, nominal_tokens);
          norm_backward(ctx, {.d_residual = acts.d_residual,
                              .d_residual_in = {},
                              .d_weight = d_head.norm_weight,
                              .d_bias = d_head.norm_bias,
                              .accumulate = head_target.accumulate,
                              .d_out = acts.d_normed,
                              .residual = acts.residual,
                              .weight = head.norm_weight,
                              .mean = acts.mean,
                              .rstd = acts.rstd,
                              .scratch = acts.scratch});
        });
  if (m.tied) hooks.weights.release(embedding_bucket);
  hooks.weights.release(head_bucket);
  hooks.grads.ready(head_bucket);

  for (int64_t l = m.layers - 1; l >= 0; --l) {
    const int bucket = ParameterTable::layer_bucket(l);
    const Tensor memory = hooks.weights.acquire(bucket);
    const GradientTarget target = hooks.grads.begin(bucket);
    const LayerTensors w = table.layer(memory), d = table.layer(target.bucket);
    queue(ctx, acts,
          {.kind = Piece::backward_layer,
           .layer = l,
           .buckets = {memory.data, target.bucket.data},
           .accumulate = target.accumulate},
          [&] {
            layer_backward(ctx, model, acts, acts.layers[static_cast<size_t>(l)], w, d, target.accumulate);
          });
    hooks.weights.release(bucket);
    hooks.grads.ready(bucket);
  }

  if (!m.tied) embedding_target = hooks.grads.begin(embedding_bucket);
  const EmbeddingTensors d_embedding = table.embedding(embedding_target.bucket);
  queue(ctx, acts,
        {.kind = Piece::backward_embedding,
         .buckets = {embedding_target.bucket.data},
         .accumulate = embedding_target.accumulate},
        [&] {
          embedding_backward(ctx,
                             {.d_token_table = d_embedding.token,
                              .d_position_table = d_embedding.position,
                              .d_out = acts.d_residual.view({acts.shape.batch, acts.shape.length, m.hidden}),
                              .tokens = acts.batch.tokens,
                              .vocab_size = m.vocab_size,
                              .accumulate_tokens = m.tied || embedding_target.accumulate,
                              .accumulate_positions = embedding_target.accumulate,
                              .scratch = acts.scratch});
        });
  hooks.grads.ready(embedding_bucket);
}

}  // namespace kinoe
