// The linear layer and its gradients.
//
//   forward:   y[N, O]  = x[N, C] . W^T + bias[O]
//   dgrad:     dx[N, C] = dy[N, O] . W,   times gelu'(gelu_input[N, C]) where x = gelu(gelu_input) (kernels/activation.h)
//   wgrad:     dW (+)= dy^T . x,   dbias[o] (+)= sum_n dy[n, o]
//
// W is stored [O, C] (`WeightLayout::out_in`, torch.nn.Linear) or [C, O] (`in_out`, GPT-2's Conv1D); nothing is ever
// transposed in memory. Sums are in fp32 (fp64 in fp64), in an order that does not depend on the number of threads.
#pragma once

#include "kernels/common/cost.h"
#include "kernels/common/dispatch.h"

namespace kinoe {

enum class WeightLayout : uint8_t { out_in, in_out };

struct MatmulForward {
  Tensor y;       // [N, O] activation type
  Tensor x;       // [N, C]
  Tensor weight;  // [O, C] or [C, O] weight type
  Tensor bias;    // [O], or absent
  WeightLayout layout = WeightLayout::out_in;
};

struct MatmulDgrad {
  Tensor dx;  // [N, C]; overwritten
  Tensor dy;  // [N, O]
  Tensor weight;
  WeightLayout layout = WeightLayout::out_in;
  Tensor gelu_input = {};  // [N, C], other memory than dx; or absent
};

struct MatmulWgrad {
  Tensor d_weight;  // fp32 (fp64 in fp64), in the layout of the weight
  Tensor d_bias;    // [O] fp32, or absent
  bool accumulate = false;
  Tensor dy;  // [N, O]
  Tensor x;   // [N, C]
  WeightLayout layout = WeightLayout::out_in;
  Tensor scratch;  // matmul_wgrad_scratch_bytes() bytes as int32; absent when that is 0
};

namespace cpu {
/// None: a thread sums whole columns.
inline constexpr size_t matmul_wgrad_scratch_bytes(int64_t /*rows*/, int64_t /*outputs*/,
                                                   bool /*with_bias*/) {
  return 0;
}
}  // namespace cpu
namespace cuda {
/// Row groups of the bias gradient: a constant, so that the bits do not depend on the number of multiprocessors.
inline constexpr int64_t kBiasGroups = 264;

inline constexpr size_t matmul_wgrad_scratch_bytes(int64_t rows, int64_t outputs, bool with_bias) {
  return with_bias ? static_cast<size_t>((rows < kBiasGroups ? rows : kBiasGroups) * outputs * 4) : 0;
}
}  // namespace cuda

/// For the bias gradient's partial sums; 0 where there is no bias.
inline size_t matmul_wgrad_scratch_bytes(Backend backend, int64_t rows, int64_t outputs, bool with_bias) {
  return backend == Backend::cuda ? cuda::matmul_wgrad_scratch_bytes(rows, outputs, with_bias)
                                  : cpu::matmul_wgrad_scratch_bytes(rows, outputs, with_bias);
}

/// Throws unless types and shapes are as stated above; both backends call it first.
void check(const MatmulForward& args);
void check(const MatmulDgrad& args);
void check(const MatmulWgrad& args);

KINOE_OPERATION(matmul_forward, MatmulForward)
KINOE_OPERATION(matmul_dgrad, MatmulDgrad)
KINOE_OPERATION(matmul_wgrad, MatmulWgrad)

/// One of the three products (they cost the same).
inline Cost matmul_cost(int64_t n, int64_t o, int64_t c, size_t element) {
  const double dn = static_cast<double>(n), dout = static_cast<double>(o), dc = static_cast<double>(c);
  return {(dn * dout + dn * dc + dout * dc) * static_cast<double>(element), 2.0 * dn * dout * dc};
}

/// The gradient's product with gelu' at its end: GELU's input is read, and nothing else is added to the memory traffic.
inline Cost matmul_dgrad_gelu_cost(int64_t n, int64_t o, int64_t c, size_t element) {
  const double elements = static_cast<double>(n) * static_cast<double>(c);
  return matmul_cost(n, o, c, element) + Cost{elements * static_cast<double>(element), elements * 14.0};
}

}  // namespace kinoe
