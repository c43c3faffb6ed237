// Causal grouped-query attention over packed projections.
//
//   s[i, j] = scale * q_i . k_j        for first(i) <= j <= i, else -inf
//   out_i   = sum_j softmax_j(s[i, :]) v_j
//
// Query head h reads key/value head h / (H / Hkv). first(i) is 0, or doc_start[i] when documents bound attention.
// The backward pass recomputes the probabilities from the stored log-sum-exp (Dao et al., FlashAttention, 2022):
//   p = exp(s - lse),  delta_i = dout_i . out_i,  ds = p * (dout_i . v_j - delta_i),
//   dq_i = scale sum_j ds k_j,  dk_j = scale sum_i ds q_i,  dv_j = sum_i p dout_i
// Every output element is summed in one fixed order: no atomics.
#pragma once

#include "kernels/common/cost.h"
#include "kernels/common/dispatch.h"

namespace kinoe {

struct AttentionForward {
  Tensor out;        // [B, T, H * D] activation type
  Tensor lse;        // [B, H, T] fp32 (fp64 in fp64): natural log of sum_j exp(s[i, j])
  Tensor qkv;        // [B, T, (H + 2 Hkv) * D], rows q | k | v (after RoPE)
  Tensor doc_start;  // [B, T] int32: first position of t's document, <= t, non-decreasing in t; or absent
  int64_t heads = 0;
  int64_t kv_heads = 0;
  float scale = 0;  // normally 1 / sqrt(D)
};

struct AttentionBackward {
  Tensor d_qkv;  // [B, T, (H + 2 Hkv) * D], all of it overwritten
  Tensor d_out;  // [B, T, H * D]
  Tensor out;    // [B, T, H * D]
  Tensor lse;    // [B, H, T]
  Tensor qkv;
  Tensor doc_start;  // [B, T] int32, or absent
  Tensor doc_end;    // [B, T] int32: one past the last position of t's document; present with doc_start
  int64_t heads = 0;
  int64_t kv_heads = 0;
  float scale = 0;
  Tensor scratch;  // attention_backward_scratch_bytes() bytes as int32; absent when that is 0
};

namespace cpu {
/// delta [B, H, T].
inline constexpr size_t attention_backward_scratch_bytes(DType type, int64_t batch, int64_t length,
                                                         int64_t heads) {
  return static_cast<size_t>(batch * heads * length) * size_of(type);
}
}  // namespace cpu
namespace cuda {
/// {log-sum-exp, delta} in fp32 of every query, positions rounded up to whole tiles.
inline constexpr int64_t kAttentionStatsRows = 128;
inline constexpr int64_t attention_stats_rows(int64_t length) {
  return (length + kAttentionStatsRows - 1) / kAttentionStatsRows * kAttentionStatsRows;
}
inline constexpr size_t attention_backward_scratch_bytes(int64_t batch, int64_t length, int64_t heads,
                                                         int64_t /*kv_heads*/, int64_t /*head_dim*/) {
  return static_cast<size_t>(batch * heads * attention_stats_rows(length)) * 8;
}
}  // namespace cuda

/// Bytes of AttentionBackward::scratch.
inline size_t attention_backward_scratch_bytes(Backend backend, DType type, int64_t batch, int64_t length,
                                               int64_t heads, int64_t kv_heads, int64_t head_dim) {
  return backend == Backend::cuda
             ? cuda::attention_backward_scratch_bytes(batch, length, heads, kv_heads, head_dim)
             : cpu::attention_backward_scratch_bytes(type, batch, length, heads);
}

/// Throws unless types and shapes are as stated above; both backends call it first.
void check(const AttentionForward& args);
void check(const AttentionBackward& args);

KINOE_OPERATION(attention_forward, AttentionForward)
KINOE_OPERATION(attention_backward, AttentionBackward)

/// Causal: T (T + 1) / 2 pairs per head, two products forward, five backward.
inline Cost attention_forward_cost(int64_t b, int64_t t, int64_t heads, int64_t kv_heads, int64_t d,
                                   size_t element) {
  const double pairs =
      static_cast<double>(b * heads) * static_cast<double>(t) * static_cast<double>(t + 1) / 2;
  return {static_cast<double>(b * t * d * (2 * heads + 2 * kv_heads)) * static_cast<double>(element),
          4.0 * pairs * static_cast<double>(d)};
}
inline Cost attention_backward_cost(int64_t b, int64_t t, int64_t heads, int64_t kv_heads, int64_t d,
                                    size_t element) {
  const Cost forward = attention_forward_cost(b, t, heads, kv_heads, d, element);
  return {static_cast<double>(b * t * d * (4 * heads + 4 * kv_heads)) * static_cast<double>(element),
          2.5 * forward.flops};
}

}  // namespace kinoe
