// LayerNorm and RMSNorm on the GPU: forward, with the residual addition fused in. Backward: norm_backward.cu.
//
// Bytes per element (bf16): 2 + 2 read, 2 + 2 written with a branch. Arithmetic is about 12 instructions per element
// where the multiprocessor has time for 50: bound by memory. Measured on an H200 (2026-11-30): 90 to 92 % of the
// copy bandwidth at C = 768 with 65,536 rows and at C = 4096 with 16,384.
//
// A row is read once and kept in registers, so that the two passes of the variance cost no traffic. Up to 8 accesses of
// 16 bytes per thread a warp owns a row (or a part of a warp for narrow rows); wider rows take a block. Rows that are not
// made of whole 16-byte accesses, or wider than the table at the end reaches, take plain loops.
#include "kernels/norm.h"

#include "kernels/common/cuda_util.cuh"

namespace kinoe::cuda {
namespace {

template <class T>
struct ForwardPointers {
  T* out;
  T* residual_out;  // null without a branch
  const T* residual;
  const T* branch;  // null without a branch
  const T* weight;
  const T* bias;  // or null
  float* mean;    // null: RMSNorm
  float* rstd;
};

template <class T>
ForwardPointers<T> pointers(const NormForward& a) {
  return {a.out.as<T>(),
          a.residual_out ? a.residual_out.as<T>() : nullptr,
          a.residual.as<T>(),
          a.branch ? a.branch.as<T>() : nullptr,
          a.weight.as<T>(),
          a.bias ? a.bias.as<T>() : nullptr,
          a.mean ? a.mean.as<float>() : nullptr,
          a.rstd.as<float>()};
}

/// Sum over the threads of one row: a part of a warp, a warp, or the whole block.
template <int kRowThreads>
__device__ __forceinline__ float row_sum(float x, float* shared) {
  if constexpr (kRowThreads <= 32)
    return warp_sum<kRowThreads>(x);
  else
    return block_sum<kRowThreads>(x, shared);
}

template <class T, int kRowThreads, int kAccesses>
__global__ void __launch_bounds__(kRowThreads < 128 ? 128 : kRowThreads)
    norm_forward_kernel(ForwardPointers<T> p, int64_t rows, int columns, float eps) {
  constexpr int W = kVector<T>;
  constexpr int kThreads = kRowThreads < 128 ? 128 : kRowThreads;
  __shared__ float shared[2][32];

  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
  const int accesses = row < rows ? columns / W : 0;  // a row past the end takes part in the shuffles only
  const int64_t start = row * columns;

  Raw<T, W> r[kAccesses];
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) {
    const int a = thread + i * kRowThreads;
    r[i] = a < accesses ? load_once<T, W>(p.residual + start + a * W) : zero_raw<T, W>();
  }
  if (p.branch != nullptr) {
    Raw<T, W> branch[kAccesses];
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      const int a = thread + i * kRowThreads;
      branch[i] = a < accesses ? load_once<T, W>(p.branch + start + a * W) : zero_raw<T, W>();
    }
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      const int a = thread + i * kRowThreads;
      float x[W], y[W];
      to_floats<T, W>(r[i], x);
      to_floats<T, W>(branch[i], y);
#pragma unroll
      for (int j = 0; j < W; ++j) x[j] += y[j];
      r[i] = from_floats<T, W>(x);
      if (a < accesses) store<T, W>(p.residual_out + start + a * W, r[i]);
    }
  }

  float mean = 0;
  if (p.mean != nullptr) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      float x[W];
      to_floats<T, W>(r[i], x);
#pragma unroll
      for (int j = 0; j < W; ++j) sum += x[j];
    }
    mean = row_sum<kRowThreads>(sum, shared[0]) / static_cast<float>(columns);
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) {
    if (thread + i * kRowThreads >= accesses) continue;
    float x[W];
    to_floats<T, W>(r[i], x);
#pragma unroll
    for (int j = 0; j < W; ++j) squares += (x[j] - mean) * (x[j] - mean);
  }
  squares = row_sum<kRowThreads>(squares, shared[1]);
  const float rstd = 1.0F / sqrtf(squares / static_cast<float>(columns) + eps);
  if (thread == 0 && row < rows) {
    if (p.mean != nullptr) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }

#pragma unroll
  for (int i = 0; i < kAccesses; ++i) {
    const int a = thread + i * kRowThreads;
    if (a >= accesses) continue;
    float x[W], w[W], b[W] = {};
    to_floats<T, W>(r[i], x);
    to_floats<T, W>(load_shared_input<T, W>(p.weight + a * W), w);
    if (p.bias != nullptr) to_floats<T, W>(load_shared_input<T, W>(p.bias + a * W), b);
#pragma unroll
    for (int j = 0; j < W; ++j) x[j] = (x[j] - mean) * rstd * w[j] + b[j];
    store<T, W>(p.out + start + a * W, from_floats<T, W>(x));
  }
}

/// One block per row, any width and alignment; a thread meets again only what it wrote itself.
template <class T>
__global__ void __launch_bounds__(256) norm_forward_any_kernel(ForwardPointers<T> p, int columns, float eps) {
  __shared__ float shared[2][32];
  const int64_t start = static_cast<int64_t>(blockIdx.x) * columns;
  const T* r = p.branch != nullptr ? p.residual_out : p.residual;
  float sum = 0;
  for (int c = threadIdx.x; c < columns; c += 256) {
    float x[1], y[1];
    to_floats<T, 1>(load_plain<T, 1>(p.residual + start + c), x);
    if (p.branch != nullptr) {
      to_floats<T, 1>(load_plain<T, 1>(p.branch + start + c), y);
      x[0] += y[0];
      const Raw<T, 1> stored = from_floats<T, 1>(x);
      store<T, 1>(p.residual_out + start + c, stored);
      to_floats<T, 1>(stored, x);
    }
    sum += x[0];
  }
  const float mean = p.mean != nullptr ? block_sum<256>(sum, shared[0]) / static_cast<float>(columns) : 0.0F;
  float squares = 0;
  for (int c = threadIdx.x; c < columns; c += 256) {
    float x[1];
    to_floats<T, 1>(load_plain<T, 1>(r + start + c), x);
    squares += (x[0] - mean) * (x[0] - mean);
  }
  const float rstd = 1.0F / sqrtf(block_sum<256>(squares, shared[1]) / static_cast<float>(columns) + eps);
  if (threadIdx.x == 0) {
    if (p.mean != nullptr) p.mean[blockIdx.x] = mean;
    p.rstd[blockIdx.x] = rstd;
  }
  for (int c = threadIdx.x; c < columns; c += 256) {
    float x[1], w[1], b[1] = {0};
    to_floats<T, 1>(load_plain<T, 1>(r + start + c), x);
    to_floats<T, 1>(load_plain<T, 1>(p.weight + c), w);
    if (p.bias != nullptr) to_floats<T, 1>(load_plain<T, 1>(p.bias + c), b);
    x[0] = (x[0] - mean) * rstd * w[0] + b[0];
    store<T, 1>(p.out + start + c, from_floats<T, 1>(x));
  }
}

template <class T>
struct ForwardLaunch {
  cudaStream_t stream;
  ForwardPointers<T> p;
  int64_t rows;
  int columns;
  float eps;

  template <int kRowThreads, int kAccesses>
  void run() const {
    constexpr int kThreads = kRowThreads < 128 ? 128 : kRowThreads;
    const unsigned grid = grid_of(ceil_div<int64_t>(rows, kThreads / kRowThreads));
    norm_forward_kernel<T, kRowThreads, kAccesses><<<grid, kThreads, 0, stream>>>(p, rows, columns, eps);
    CUDA_CHECK_LAUNCH(norm_forward);
  }
  void run_any() const {
    norm_forward_any_kernel<T><<<grid_of(rows), 256, 0, stream>>>(p, columns, eps);
    CUDA_CHECK_LAUNCH(norm_forward_any);
  }
  void pick() const {
    const int a = columns / kVector<T>;
    if (a <= 8) return run<8, 1>();
    if (a <= 16) return run<16, 1>();
    if (a <= 32) return run<32, 1>();
    if (a <= 64) return run<32, 2>();
    if (a <= 96) return run<32, 3>();
    if (a <= 128) return run<32, 4>();
    if (a <= 160) return run<32, 5>();
    if (a <= 224) return run<32, 7>();
    if (a <= 256) return run<32, 8>();
    if (a <= 384) return run<128, 3>();
    if (a <= 512) return run<128, 4>();
    if (a <= 768) return run<256, 3>();
    if (a <= 1024) return run<256, 4>();
    if (a <= 2048) return run<512, 4>();
    if (a <= 4096) return run<1024, 4>();
    return run_any();
  }
};

int columns_of(const Tensor& x) {
  CHECK(x.columns() < int64_t{1} << 30, "a normalised row has fewer than 2^30 columns, here ", x.columns());
  return static_cast<int>(x.columns());
}

}  // namespace

void norm_forward(const Context& ctx, const NormForward& args) {
  check(args);
  const int64_t rows = args.residual.rows();
  if (rows == 0) return;
  with_element(args.out.dtype, [&](auto element) {
    using T = decltype(element);
    const ForwardPointers<T> p = pointers<T>(args);
    const ForwardLaunch<T> launch{stream_of(ctx), p, rows, columns_of(args.residual), args.eps};
    const bool vectors = launch.columns % kVector<T> == 0 &&
                         aligned_to(16, p.out, p.residual_out, p.residual, p.branch, p.weight, p.bias);
    if (vectors)
      launch.pick();
    else
      launch.run_any();
  });
}

}  // namespace kinoe::cuda
