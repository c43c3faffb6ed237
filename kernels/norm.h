// LayerNorm and RMSNorm, with the residual addition in front of them fused in.
//
//   r = residual + branch                       (r = residual when there is no branch)
//   LayerNorm:  out = (r - mean(r)) * rstd * weight + bias     rstd = 1 / sqrt(var(r) + eps), var biased
//   RMSNorm:    out = r * rstd * weight                        rstd = 1 / sqrt(mean(r^2) + eps)
//
// Statistics are computed in fp32 (fp64 in fp64) from r as it is stored, so that a recomputation from the stored r
// gives the same bits.
#pragma once

#include "kernels/common/cost.h"
#include "kernels/common/dispatch.h"

namespace kinoe {

struct NormForward {
  Tensor out;           // [N, C] activation type
  Tensor residual_out;  // [N, C] r; absent when there is no branch. May be the same memory as `residual`
  Tensor residual;      // [N, C]
  Tensor branch;        // [N, C], or absent
  Tensor weight;        // [C] weight type
  Tensor bias;          // [C], or absent. Its presence does not choose the kind: `mean` does
  Tensor mean;          // [N] fp32: LayerNorm. Absent: RMSNorm
  Tensor rstd;          // [N] fp32 (fp64 in fp64)
  float eps = 1e-5F;
};

struct NormBackward {
  Tensor d_residual;        // [N, C] activation type, out: d_residual_in + the gradient through the norm
  Tensor d_residual_in;     // [N, C] the gradient that arrived at r from later layers, or absent (zero).
                            // May be the same memory as d_residual
  Tensor d_weight;          // [C] fp32 (fp64 in fp64)
  Tensor d_bias;            // [C], or absent
  bool accumulate = false;  // add to d_weight and d_bias instead of overwriting
  Tensor d_out;             // [N, C]
  Tensor residual;          // [N, C] r of the forward pass
  Tensor weight;            // [C]
  Tensor mean;              // [N], or absent for RMSNorm
  Tensor rstd;              // [N]
  Tensor scratch;           // norm_backward_scratch_bytes() bytes as int32; absent when that is 0
};

namespace cpu {
size_t norm_backward_scratch_bytes(int64_t rows, int64_t columns);
}
namespace cuda {
/// Row groups of the weight gradient: a constant, so that the bits do not depend on the number of multiprocessors; a
/// power of two, because numbers of rows are.
inline constexpr int64_t kNormGroups = 256;

inline constexpr size_t norm_backward_scratch_bytes(int64_t rows, int64_t columns) {
  return static_cast<size_t>((rows < kNormGroups ? rows : kNormGroups) * 2 * columns * 4);
}
}  // namespace cuda

/// Partial sums of d_weight and d_bias: a fixed number of row groups, added in a fixed order.
inline size_t norm_backward_scratch_bytes(Backend backend, int64_t rows, int64_t columns) {
  return backend == Backend::cuda ? cuda::norm_backward_scratch_bytes(rows, columns)
                                  : cpu::norm_backward_scratch_bytes(rows, columns);
}

/// Throws unless types and shapes are as stated above; both backends call it first.
void check(const NormForward& args);
void check(const NormBackward& args);

KINOE_OPERATION(norm_forward, NormForward)
KINOE_OPERATION(norm_backward, NormBackward)

inline Cost norm_forward_cost(int64_t n, int64_t c, size_t element, bool with_branch) {
  return {static_cast<double>(n * c) * static_cast<double>(element) * (with_branch ? 4.0 : 2.0),
          static_cast<double>(n * c) * 8.0};
}
inline Cost norm_backward_cost(int64_t n, int64_t c, size_t element) {
  return {static_cast<double>(n * c) * static_cast<double>(element) * 4.0, static_cast<double>(n * c) * 14.0};
}

}  // namespace kinoe
