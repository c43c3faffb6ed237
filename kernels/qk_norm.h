// RMSNorm over each query and each key head, in place on the packed projections, before RoPE.
//
//   y = x * rstd * weight,   rstd = 1 / sqrt(mean(x^2) + eps)       over the D elements of one head
//
// All query heads share one weight, all key heads another; values are left alone. As in Qwen3 (Yang et al., "Qwen3 technical
// report", 2025, section 2; M. Dehghani et al., "Scaling vision transformers to 22 billion parameters", 2023, section 2.1).
//
// Saved for backward: the heads as they came (`raw`), nothing else. x could not be had from y, since a weight may be zero; rstd is
// computed again from x, in the same order and so to the same bits, which costs no traffic: a head fits into registers.
#pragma once

#include "kernels/common/cost.h"
#include "kernels/common/dispatch.h"

namespace kinoe {

struct QkNormForward {
  Tensor qkv;       // [N, (H + 2 Hkv) * D], rows q | k | v; q and k are changed in place
  Tensor raw;       // [N, (H + Hkv) * D] out: q and k as they came; absent: inference
  Tensor q_weight;  // [D] weight type
  Tensor k_weight;  // [D]
  int64_t heads = 0;
  int64_t kv_heads = 0;
  float eps = 1e-6F;
};

struct QkNormBackward {
  /// [N, (H + 2 Hkv) * D]: the gradient of the normalised q and k becomes that of the raw ones, in place.
  Tensor d_qkv;
  Tensor d_q_weight;        // [D] fp32 (fp64 in fp64)
  Tensor d_k_weight;        // [D]
  bool accumulate = false;  // add to the weights' gradients instead of overwriting
  Tensor raw;               // [N, (H + Hkv) * D] of the forward pass
  Tensor q_weight;          // [D]
  Tensor k_weight;          // [D]
  int64_t heads = 0;
  int64_t kv_heads = 0;
  float eps = 1e-6F;
  Tensor scratch;  // qk_norm_backward_scratch_bytes() bytes as int32
};

namespace cpu {
size_t qk_norm_backward_scratch_bytes(int64_t rows, int64_t head_dim);
}
namespace cuda {
/// Groups of heads of the weight gradients: a constant, so that the bits do not depend on the number of multiprocessors.
inline constexpr int64_t kQkNormGroups = 396;

inline constexpr size_t qk_norm_backward_scratch_bytes(int64_t /*rows*/, int64_t head_dim) {
  return static_cast<size_t>(kQkNormGroups * 2 * head_dim * 4);
}
}  // namespace cuda

/// Partial sums of d_q_weight and d_k_weight: a fixed number of groups, added in a fixed order. `rows`: N.
inline size_t qk_norm_backward_scratch_bytes(Backend backend, int64_t rows, int64_t head_dim) {
  return backend == Backend::cuda ? cuda::qk_norm_backward_scratch_bytes(rows, head_dim)
                                  : cpu::qk_norm_backward_scratch_bytes(rows, head_dim);
}

/// Throws unless types and shapes are as stated above; both backends call it first.
void check(const QkNormForward& args);
void check(const QkNormBackward& args);

KINOE_OPERATION(qk_norm_forward, QkNormForward)
KINOE_OPERATION(qk_norm_backward, QkNormBackward)

/// n: tokens; heads: H + Hkv.
inline Cost qk_norm_forward_cost(int64_t n, int64_t heads, int64_t d, size_t element, bool save) {
  const double size = static_cast<double>(n * heads * d);
  return {size * static_cast<double>(element) * (save ? 3.0 : 2.0), size * 4.0};
}
inline Cost qk_norm_backward_cost(int64_t n, int64_t heads, int64_t d, size_t element) {
  const double size = static_cast<double>(n * heads * d);
  return {size * static_cast<double>(element) * 3.0, size * 12.0};
}

}  // namespace kinoe
