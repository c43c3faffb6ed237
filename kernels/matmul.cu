// The linear layer on the GPU: cuBLASLt for the products, our own kernel for the bias gradient.
//
// Row-major tensors are column-major matrices read the other way round, so nothing is transposed:
//   forward  y^T  = W . x^T        W as stored is W^T [C, O] (out_in) or W [O, C] (in_out)
//   dgrad    dx^T = W^T . dy^T
//   wgrad    dW^T = x^T . dy       out_in: D is [C, O];   in_out: D is dW itself seen as [O, C] = dy^T . x
// The bias is the forward product's epilogue. Its gradient reads dy once more: 2 N O bytes in bf16, the partial sums of
// kBiasGroups row groups to scratch, then one sum over groups in order.
//
// gelu' is the epilogue of dgrad's product where the library offers that: the product's result then is not written, read and
// written again (4 N C bytes less in bf16) and is rounded once instead of twice. Elsewhere, and in fp32, the kernel of
// kernels/activation.cu follows in place. dev/PERFORMANCE.md says why no other epilogue is used.
#include "kernels/matmul.h"

#include "kernels/activation.h"
#include "kernels/common/arguments.h"
#include "kernels/common/cublaslt.h"
#include "kernels/common/cuda_util.cuh"

namespace kinoe::cuda {
namespace {

constexpr int kColumnThreads = 32;  // each with one vector of columns
constexpr int kRowThreads = 8;

/// partial[group, o] = sum of dy[n, o] over the group's rows n = group, group + groups, ...
template <class T, int W>
__global__ void bias_partials(float* partial, const T* dy, int64_t rows, int64_t outputs) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kColumnThreads + threadIdx.x) * W;
  const int64_t group = blockIdx.y, groups = gridDim.y;
  float sum[W] = {};
  if (first < outputs) {
    const int64_t stride = groups * kRowThreads;
#pragma unroll 4
    for (int64_t n = group * kRowThreads + threadIdx.y; n < rows; n += stride) {
      const Raw<T, W> raw = load_once<T, W>(dy + n * outputs + first);
      T values[W];
      memcpy(values, &raw, sizeof(raw));
#pragma unroll
      for (int i = 0; i < W; ++i) {
        if constexpr (sizeof(T) == 2)
          sum[i] += to_float(values[i]);
        else
          sum[i] += values[i];
      }
    }
  }
  __shared__ float shared[kRowThreads][kColumnThreads * W];
#pragma unroll
  for (int i = 0; i < W; ++i) shared[threadIdx.y][static_cast<int>(threadIdx.x) * W + i] = sum[i];
  __syncthreads();
  if (threadIdx.y != 0 || first >= outputs) return;
#pragma unroll
  for (int i = 0; i < W; ++i) {
    float total = 0;
    for (int y = 0; y < kRowThreads; ++y) total += shared[y][static_cast<int>(threadIdx.x) * W + i];
    partial[group * outputs + first + i] = total;
  }
}

__global__ void bias_finish(float* d_bias, const float* partial, int64_t groups, int64_t outputs,
                            bool accumulate) {
  const int64_t o = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (o >= outputs) return;
  float sum = 0;
  for (int64_t g = 0; g < groups; ++g) sum += partial[g * outputs + o];
  d_bias[o] = accumulate ? d_bias[o] + sum : sum;
}

template <class T>
void bias_gradient(const Context& ctx, const MatmulWgrad& a) {
  const int64_t rows = a.dy.rows(), outputs = a.dy.columns();
  require_scratch({"matmul_wgrad", "scratch", a.scratch}, matmul_wgrad_scratch_bytes(rows, outputs, true));
  const int64_t groups = std::min(kBiasGroups, rows);
  auto* partial = static_cast<float*>(a.scratch.data);
  const auto launch = [&](auto width) {
    constexpr int W = decltype(width)::value;
    const dim3 grid(grid_of(ceil_div(outputs, int64_t{kColumnThreads} * W)), static_cast<unsigned>(groups));
    bias_partials<T, W><<<grid, dim3(kColumnThreads, kRowThreads), 0, stream_of(ctx)>>>(partial, a.dy.as<T>(),
                                                                                        rows, outputs);
    CUDA_CHECK_LAUNCH(bias_partials);
  };
  constexpr int kWide = 16 / static_cast<int>(sizeof(T));
  if (outputs % kWide == 0 && aligned_to(16, a.dy.data))
    launch(std::integral_constant<int, kWide>{});
  else
    launch(std::integral_constant<int, 1>{});
  bias_finish<<<grid_of(ceil_div(outputs, int64_t{256})), 256, 0, stream_of(ctx)>>>(
      a.d_bias.as<float>(), partial, groups, outputs, a.accumulate);
  CUDA_CHECK_LAUNCH(bias_finish);
}

}  // namespace

void matmul_forward(const Context& ctx, const MatmulForward& a) {
  check(a);
  const int64_t n = a.x.rows(), c = a.x.columns(), o = a.y.columns();
  const bool transposed = a.layout == WeightLayout::out_in;
  ctx.blas->run({.m = o,
                 .n = n,
                 .k = c,
                 .a = a.weight,
                 .b = a.x,
                 .d = a.y,
                 .lda = transposed ? c : o,
                 .ldb = c,
                 .ldd = o,
                 .transpose_a = transposed,
                 .transpose_b = false,
                 .accumulate = false,
                 .bias = a.bias});
}

void matmul_dgrad(const Context& ctx, const MatmulDgrad& a) {
  check(a);
  const int64_t n = a.dy.rows(), c = a.dx.columns(), o = a.dy.columns();
  const bool transposed = a.layout == WeightLayout::in_out;
  Gemm product{.m = c,
               .n = n,
               .k = o,
               .a = a.weight,
               .b = a.dy,
               .d = a.dx,
               .lda = transposed ? o : c,
               .ldb = o,
               .ldd = c,
               .transpose_a = transposed,
               .transpose_b = false,
               .accumulate = false,
               .bias = {}};
  // What the library asks of an epilogue's own matrix: whole 16-byte accesses.
  if (a.gelu_input && a.dx.dtype == DType::bf16 && c % 8 == 0 && aligned_to(16, a.gelu_input.data)) {
    product.gelu_input = a.gelu_input;
    if (ctx.blas->try_run(product)) return;
    product.gelu_input = {};
  }
  ctx.blas->run(product);
  if (a.gelu_input) cuda::gelu_backward(ctx, {.dx = a.dx, .d_out = a.dx, .x = a.gelu_input});
}

void matmul_wgrad(const Context& ctx, const MatmulWgrad& a) {
  check(a);
  const int64_t n = a.dy.rows(), c = a.x.columns(), o = a.dy.columns();
  if (a.layout == WeightLayout::out_in)
    ctx.blas->run({.m = c,
                   .n = o,
                   .k = n,
                   .a = a.x,
                   .b = a.dy,
                   .d = a.d_weight,
                   .lda = c,
                   .ldb = o,
                   .ldd = c,
                   .transpose_a = false,
                   .transpose_b = true,
                   .accumulate = a.accumulate,
                   .bias = {}});
  else
    ctx.blas->run({.m = o,
                   .n = c,
                   .k = n,
                   .a = a.dy,
                   .b = a.x,
                   .d = a.d_weight,
                   .lda = o,
                   .ldb = c,
                   .ldd = o,
                   .transpose_a = false,
                   .transpose_b = true,
                   .accumulate = a.accumulate,
                   .bias = {}});
  if (a.d_bias) with_element(a.dy.dtype, [&](auto element) { bias_gradient<decltype(element)>(ctx, a); });
}

}  // namespace kinoe::cuda
