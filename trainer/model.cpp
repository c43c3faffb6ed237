// Which tensors exist, once or per layer, for each mode of recomputation.
#include "trainer/model.h"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "kernels/attention.h"
#include "kernels/embedding.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/qk_norm.h"
#include "kernels/rope.h"

namespace kinoe {
namespace {

// Logits of 16 Ki rows keep the head's GEMMs at full rate; on the CPU a chunk should stay near the caches.
int64_t default_head_rows(Backend backend) { return backend == Backend::cuda ? 16384 : 1024; }

size_t largest_scratch(const Model& model, const WorkShape& shape) {
  const ModelConfig& m = model.config;
  const Backend on = model.backend;
  const int64_t n = shape.batch * shape.length;
  const int64_t widest = std::max({m.qkv_rows(), m.hidden, m.mlp == MlpKind::swiglu ? 2 * m.ffn : m.ffn});
  return std::max({norm_backward_scratch_bytes(on, n, m.hidden),
                   m.qk_norm ? qk_norm_backward_scratch_bytes(on, n, m.head_dim) : 0,
                   embedding_backward_scratch_bytes(on, n, m.hidden, m.vocab_size),
                   matmul_wgrad_scratch_bytes(on, n, widest, true),
                   attention_backward_scratch_bytes(on, model.dtype, shape.batch, shape.length, m.heads,
                                                    m.kv_heads, m.head_dim)});
}

}  // namespace

void take_constants(Arena& arena, Model& model) {
  if (model.config.position == PositionKind::rope)
    model.rope_table =
        arena.take("constants", model.accumulator(), {model.config.max_positions, model.config.head_dim});
}

void upload_constants(const Context& ctx, const Model& model) {
  if (!model.rope_table) return;
  const std::vector<double> frequencies = rope_inverse_frequencies(model.config);
  const auto send = [&](const auto& table) {
    upload(ctx, model.rope_table.data, table.data(), model.rope_table.bytes());
    synchronize(ctx);
  };
  if (model.accumulator() == DType::f64)
    send(make_rope_table<double>(model.config.max_positions, frequencies));
  else
    send(make_rope_table<float>(model.config.max_positions, frequencies));
}

Activations take_activations(Arena& arena, const Model& model, const WorkShape& shape) {
  const ModelConfig& m = model.config;
  const DType type = model.dtype, stat = model.accumulator();
  const int64_t b = shape.batch, t = shape.length, n = b * t, c = m.hidden, f = m.ffn;
  const int64_t fc_width = m.mlp == MlpKind::swiglu ? 2 * f : f;
  const bool layernorm = m.norm == NormKind::layernorm;
  const char* kept_group = shape.training ? "activations" : "evaluation";
  const char* logits_group = shape.training ? "logits" : kept_group;
  const char* scratch_group = shape.training ? "scratch" : kept_group;
  Activations a;
  a.shape = shape;
  if (a.shape.head_rows == 0) a.shape.head_rows = std::min(n, default_head_rows(model.backend));

  a.batch.tokens = arena.take(kept_group, DType::i32, {b, t});
  a.batch.targets = arena.take(kept_group, DType::i32, {b, t});
  if (shape.document_mask) {
    a.batch.doc_start = arena.take(kept_group, DType::i32, {b, t});
    if (shape.training) a.batch.doc_end = arena.take(kept_group, DType::i32, {b, t});
  }

  // Tensors that are recomputed, or that only a forward pass passes through, exist once for all layers.
  const bool keep_light = shape.training && shape.recompute == Recompute::none;
  const bool keep_block = shape.training && shape.recompute != Recompute::block;
  const bool keep_entry = shape.training;
  LayerActivations shared;
  for (int64_t l = 0; l < m.layers; ++l) {
    LayerActivations x;
    const auto take = [&](bool kept, Tensor LayerActivations::*member, DType dtype,
                          std::initializer_list<int64_t> dims) {
      if (!kept && l > 0) {
        x.*member = shared.*member;
      } else {
        x.*member = arena.take(kept_group, dtype, dims);
        shared.*member = x.*member;
      }
    };
    using L = LayerActivations;
    take(keep_entry, &L::residual1, type, {n, c});
    if (layernorm) take(keep_block, &L::mean1, stat, {n});
    take(keep_block, &L::rstd1, stat, {n});
    take(keep_light, &L::normed1, type, {n, c});
    take(keep_block, &L::qkv, type, {b, t, m.qkv_rows()});
    if (m.qk_norm && shape.training)
      take(keep_block, &L::qk_raw, type, {n, (m.heads + m.kv_heads) * m.head_dim});
    take(keep_block, &L::attention, type, {b, t, m.heads * m.head_dim});
    take(keep_block, &L::lse, stat, {b, m.heads, t});
    take(keep_block, &L::residual2, type, {n, c});
    if (layernorm) take(keep_block, &L::mean2, stat, {n});
    take(keep_block, &L::rstd2, stat, {n});
    take(keep_light, &L::normed2, type, {n, c});
    take(keep_block, &L::fc, type, {n, fc_width});
    take(keep_light, &L::activated, type, {n, f});
    a.layers.push_back(x);
  }
  a.branch = arena.take(kept_group, type, {n, c});
  a.residual = arena.take(kept_group, type, {n, c});
  if (layernorm) a.mean = arena.take(kept_group, stat, {n});
  a.rstd = arena.take(kept_group, stat, {n});
  a.normed = arena.take(kept_group, type, {n, c});
  a.logits = arena.take(logits_group, type, {a.shape.head_rows, m.padded_vocab()});
  a.losses = arena.take(kept_group, stat, {n});

  if (shape.training) {
    a.d_residual = arena.take("activation gradients", type, {n, c});
    a.d_normed = arena.take("activation gradients", type, {n, c});
    a.d_attention = arena.take("activation gradients", type, {b, t, m.heads * m.head_dim});
    a.d_qkv = arena.take("activation gradients", type, {b, t, m.qkv_rows()});
    if (m.mlp == MlpKind::swiglu) a.d_activated = arena.take("activation gradients", type, {n, f});
    a.d_fc = arena.take("activation gradients", type, {n, fc_width});
  }
  const size_t scratch = shape.training ? largest_scratch(model, shape) : 0;
  if (scratch > 0)
    a.scratch = arena.take(scratch_group, DType::i32, {static_cast<int64_t>((scratch + 3) / 4)});

  a.state = arena.take(scratch_group, DType::i32, {sizeof(StepState) / 4});
  a.sums = Tensor(a.state.data, DType::i64, {kStepSums});
  const auto field = [&](size_t offset) {
    return Tensor(a.state ? static_cast<char*>(a.state.data) + offset : nullptr, DType::i64, {1});
  };
  a.loss_sum = field(offsetof(StepState, loss_sum));
  a.target_tokens = field(offsetof(StepState, target_tokens));
  a.bad_token = field(offsetof(StepState, bad_token));
  a.overflow = field(offsetof(StepState, overflow));
  a.weights_hash = field(offsetof(StepState, weights_hash));
  a.weights_hash.dtype = DType::u64;
  return a;
}

void begin_step(const Context& ctx, const Activations& acts) {
  fill_zero(ctx, acts.state.data, offsetof(StepState, halted));
}

GraphKey graph_key(const Activations& acts, const Piece& piece) {
  const auto word = [](const auto value) { return static_cast<uint64_t>(value); };
  const auto address = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  const WorkShape& s = acts.shape;
  // Where the activations begin and their shape give the address of every tensor in them: see take_activations.
  return {word(piece.kind),
          word(piece.layer),
          word(piece.accumulate) | word(piece.accumulate_embedding) << 1 | word(s.training) << 2 |
              word(s.document_mask) << 3 | word(s.recompute) << 4,
          std::bit_cast<uint64_t>(piece.nominal_tokens),
          address(acts.batch.tokens.data),
          address(acts.state.data),
          word(s.batch),
          word(s.length),
          word(s.head_rows),
          address(piece.buckets[0]),
          address(piece.buckets[1]),
          address(piece.buckets[2]),
          address(piece.buckets[3])};
}

}  // namespace kinoe
