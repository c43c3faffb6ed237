// LayerNorm and RMSNorm on the GPU: backward, with deterministic weight gradients.
//
// Bytes per element (bf16): 2 + 2 + 2 read, 2 written. Arithmetic is about 25 instructions per element where the
// multiprocessor has time for 50: bound by memory.
//
// kNormGroups blocks, a constant, walk over the rows (row groups by stride); every thread keeps the sums of d_weight and
// d_bias of its own columns in registers. The sums leave no registers for the rows to come, so those wait in shared
// memory: every thread copies the pieces of the next rows that it will need itself with cp.async, 6 accesses of each of
// the three inputs at any time (144 KiB per multiprocessor in flight or in use). Without that, with the next row in
// registers where they allowed it, the kernel reached 81 to 83 % of the copy bandwidth (H200, 2026-11-30).
// A block adds its row slots in order and writes one partial row; a second kernel adds the partial rows in order. No
// atomics: the bits depend on the shape alone.
//
// Rows that are not made of whole 16-byte accesses, or wider than the table at the end reaches, or than shared memory
// allows, take plain loops.
#include "kernels/norm.h"

#include <algorithm>

#include "kernels/common/arguments.h"
#include "kernels/common/cuda_util.cuh"

namespace kinoe::cuda {
namespace {

template <class T>
struct BackwardPointers {
  T* d_residual;
  const T* d_residual_in;  // or null
  const T* d_out;
  const T* residual;
  const T* weight;
  const float* mean;  // null: RMSNorm
  const float* rstd;
  float* partials;  // [groups, 2, C]: d_weight, d_bias
};

template <class T>
BackwardPointers<T> pointers(const NormBackward& a) {
  return {a.d_residual.as<T>(), a.d_residual_in ? a.d_residual_in.as<T>() : nullptr,
          a.d_out.as<T>(),      a.residual.as<T>(),
          a.weight.as<T>(),     a.mean ? a.mean.as<float>() : nullptr,
          a.rstd.as<float>(),   reinterpret_cast<float*>(a.scratch.as<int32_t>())};
}

/// Sums of a and b over the threads of a row. Rows of several warps meet at the named barrier of their row slot;
/// `shared` alternates between two halves from row to row, so one barrier suffices.
template <int kRowThreads>
__device__ __forceinline__ float2 row_sums(float a, float b, float2* shared) {
  constexpr int kWidth = kRowThreads < 32 ? kRowThreads : 32;
  a = warp_sum<kWidth>(a);
  b = warp_sum<kWidth>(b);
  if constexpr (kRowThreads > 32) {
    constexpr int kRowWarps = kRowThreads / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32, slot = static_cast<int>(threadIdx.x) / kRowThreads;
    const int warp = static_cast<int>(threadIdx.x) % kRowThreads / 32;
    float2* row = shared + slot * kRowWarps;
    if (lane == 0) row[warp] = make_float2(a, b);
    asm volatile("bar.sync %0, %1;" : : "r"(slot + 1), "n"(kRowThreads) : "memory");
    const float2 all = lane < kRowWarps ? row[lane] : make_float2(0, 0);
    a = warp_sum(all.x);
    b = warp_sum(all.y);
  }
  return make_float2(a, b);
}

/// Adds a thread's columns onto a row of sums, or stores them when they are the first. All loads stand before the first
/// store: the slots of a block wait for each other, and one load after the other would make this a tenth of the kernel.
template <int kRowThreads, int kAccesses, int W>
__device__ __forceinline__ void add_columns(float* row, const float (&own)[kAccesses][W], int accesses,
                                            bool first) {
  constexpr int kParts = W / 4;
  const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
  float sum[kAccesses][kParts][4];
#pragma unroll
  for (int i = 0; i < kAccesses; ++i)
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      const int a = thread + i * kRowThreads;
      Raw<float, 4> raw = zero_raw<float, 4>();
      if (!first && a < accesses) raw = load_plain<float, 4>(row + a * W + k * 4);
      to_floats<float, 4>(raw, sum[i][k]);
    }
#pragma unroll
  for (int i = 0; i < kAccesses; ++i)
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      const int a = thread + i * kRowThreads;
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i][k][j] += own[i][k * 4 + j];
      if (a < accesses) store<float, 4>(row + a * W + k * 4, from_floats<float, 4>(sum[i][k]));
    }
}

template <int kRowThreads>
inline constexpr int kBackwardThreads = kRowThreads <= 256 ? 256 : kRowThreads;

/// Rows that a thread has in shared memory: the current one, the others on their way.
template <int kAccesses>
inline constexpr int kStages = 6 / kAccesses;

template <int kThreads>
inline constexpr size_t kStageBytes = size_t{6} * 3 * kThreads * sizeof(uint4);

/// A thread's pieces of the three inputs, [stages, inputs, accesses, threads] so that lanes stand side by side.
template <class T, int kRowThreads, int kAccesses>
struct Stages {
  static constexpr int kThreads = kBackwardThreads<kRowThreads>;
  uint4* memory;

  __device__ __forceinline__ uint4* piece(int stage, int input, int i) const {
    return memory + ((stage * 3 + input) * kAccesses + i) * kThreads + threadIdx.x;
  }
  __device__ __forceinline__ void copy_row(const BackwardPointers<T>& p, int stage, int64_t start,
                                           int accesses) const {
    const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      const int a = thread + i * kRowThreads;
      if (a >= accesses) continue;
      const int64_t at = start + a * kVector<T>;
      copy16_async(piece(stage, 0, i), p.d_out + at);
      copy16_async(piece(stage, 1, i), p.residual + at);
      if (p.d_residual_in != nullptr) copy16_async(piece(stage, 2, i), p.d_residual_in + at);
    }
    commit_copies();
  }
};

template <class T, int kRowThreads, int kAccesses>
__global__ void __launch_bounds__(kBackwardThreads<kRowThreads>, 512 / kBackwardThreads<kRowThreads>)
    norm_backward_kernel(BackwardPointers<T> p, int64_t rows, int columns) {
  constexpr int W = kVector<T>;
  constexpr int kThreads = kBackwardThreads<kRowThreads>;
  constexpr int kSlots = kThreads / kRowThreads;  // rows of the block in flight
  constexpr int kAhead = kStages<kAccesses> - 1;
  __shared__ float2 shared[2][32];
  extern __shared__ uint4 dynamic[];
  const Stages<T, kRowThreads, kAccesses> stages{dynamic};

  const int thread = static_cast<int>(threadIdx.x) % kRowThreads,
            slot = static_cast<int>(threadIdx.x) / kRowThreads;
  const int all = columns / W;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kSlots;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSlots;
  const auto accesses_of = [&](int64_t row) { return row < rows ? all : 0; };
  const auto rstd_of = [&](int64_t row) { return row < rows ? p.rstd[row] : 0.0F; };
  const auto mean_of = [&](int64_t row) { return row < rows && p.mean != nullptr ? p.mean[row] : 0.0F; };
  const float inverse = 1.0F / static_cast<float>(columns);

  Raw<T, W> weight[kAccesses];
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) {
    const int a = thread + i * kRowThreads;
    weight[i] = a < all ? load_shared_input<T, W>(p.weight + a * W) : zero_raw<T, W>();
  }
#pragma unroll
  for (int s = 0; s < kAhead; ++s) {
    const int64_t row = first + slot + s * stride;
    stages.copy_row(p, s, row * columns, accesses_of(row));
  }

  float d_weight[kAccesses][W] = {}, d_bias[kAccesses][W] = {};
  float next_mean = mean_of(first + slot), next_rstd = rstd_of(first + slot);
  int parity = 0, stage = 0;
  for (int64_t base = first; base < rows; base += stride, parity ^= 1) {
    const int64_t row = base + slot;
    const int accesses = accesses_of(row);
    const int64_t ahead = row + kAhead * stride;
    stages.copy_row(p, stage == 0 ? kAhead : stage - 1, ahead * columns, accesses_of(ahead));
    const float mean = next_mean, rstd = next_rstd;
    next_mean = mean_of(row + stride);
    next_rstd = rstd_of(row + stride);
    wait_copies<kAhead>();

    float sum = 0, dot = 0;  // of w dy, and of w dy xhat
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      if (thread + i * kRowThreads >= accesses) continue;
      float dy[W], x[W], w[W];
      to_floats<T, W>(*stages.piece(stage, 0, i), dy);
      to_floats<T, W>(*stages.piece(stage, 1, i), x);
      to_floats<T, W>(weight[i], w);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const float xhat = (x[j] - mean) * rstd;
        d_weight[i][j] += dy[j] * xhat;
        d_bias[i][j] += dy[j];
        sum += w[j] * dy[j];
        dot += w[j] * dy[j] * xhat;
      }
    }
    const float2 total = row_sums<kRowThreads>(sum, dot, shared[parity]);
    const float mean_sum = p.mean != nullptr ? total.x * inverse : 0.0F, mean_dot = total.y * inverse;
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      const int a = thread + i * kRowThreads;
      if (a >= accesses) continue;
      float dy[W], x[W], w[W], d[W] = {};
      to_floats<T, W>(*stages.piece(stage, 0, i), dy);
      to_floats<T, W>(*stages.piece(stage, 1, i), x);
      if (p.d_residual_in != nullptr) to_floats<T, W>(*stages.piece(stage, 2, i), d);
      to_floats<T, W>(weight[i], w);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const float xhat = (x[j] - mean) * rstd;
        d[j] += rstd * (w[j] * dy[j] - mean_sum - xhat * mean_dot);
      }
      store<T, W>(p.d_residual + row * columns + a * W, from_floats<T, W>(d));
    }
    stage = stage == kAhead ? 0 : stage + 1;
  }

  // The stages' memory becomes that of the sums, [2, C]: d_weight, d_bias.
  float* sums = reinterpret_cast<float*>(dynamic);
  wait_copies<0>();
  __syncthreads();

  // The row slots of the block, one after the other.
  float* partial = p.partials + static_cast<int64_t>(blockIdx.x) * 2 * columns;
  float* to = kSlots == 1 ? partial : sums;
  for (int s = 0; s < kSlots; ++s) {
    if (slot == s) {
      add_columns<kRowThreads>(to, d_weight, all, s == 0);
      add_columns<kRowThreads>(to + columns, d_bias, all, s == 0);
    }
    if constexpr (kSlots > 1) __syncthreads();
  }
  if constexpr (kSlots > 1)
    for (int c = static_cast<int>(threadIdx.x) * 4; c < 2 * columns; c += kThreads * 4)
      store<float, 4>(partial + c, load_plain<float, 4>(sums + c));
}

/// d_residual, one block per row: any width and alignment.
template <class T>
__global__ void __launch_bounds__(256) norm_backward_any_kernel(BackwardPointers<T> p, int columns) {
  __shared__ float shared[2][32];
  const int64_t start = static_cast<int64_t>(blockIdx.x) * columns;
  const float mean = p.mean != nullptr ? p.mean[blockIdx.x] : 0.0F, rstd = p.rstd[blockIdx.x];
  float sum = 0, dot = 0;
  const auto element = [&](const T* from) {
    float x[1];
    to_floats<T, 1>(load_plain<T, 1>(from), x);
    return x[0];
  };
  for (int c = threadIdx.x; c < columns; c += 256) {
    const float wdy = element(p.weight + c) * element(p.d_out + start + c);
    sum += wdy;
    dot += wdy * (element(p.residual + start + c) - mean) * rstd;
  }
  const float inverse = 1.0F / static_cast<float>(columns);
  const float mean_sum = p.mean != nullptr ? block_sum<256>(sum, shared[0]) * inverse : 0.0F;
  const float mean_dot = block_sum<256>(dot, shared[1]) * inverse;
  for (int c = threadIdx.x; c < columns; c += 256) {
    const float wdy = element(p.weight + c) * element(p.d_out + start + c);
    const float xhat = (element(p.residual + start + c) - mean) * rstd;
    const float d_in = p.d_residual_in != nullptr ? element(p.d_residual_in + start + c) : 0.0F;
    const float d[1] = {d_in + rstd * (wdy - mean_sum - xhat * mean_dot)};
    store<T, 1>(p.d_residual + start + c, from_floats<T, 1>(d));
  }
}

/// The partial rows of the weight gradients for the kernel above: one thread per column, groups by stride.
template <class T>
__global__ void __launch_bounds__(256)
    norm_weight_partials_any_kernel(BackwardPointers<T> p, int64_t rows, int columns) {
  const int c = static_cast<int>(blockIdx.x) * 256 + static_cast<int>(threadIdx.x);
  if (c >= columns) return;
  float d_weight = 0, d_bias = 0;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    float dy[1], x[1];
    to_floats<T, 1>(load_plain<T, 1>(p.d_out + row * columns + c), dy);
    to_floats<T, 1>(load_plain<T, 1>(p.residual + row * columns + c), x);
    const float mean = p.mean != nullptr ? p.mean[row] : 0.0F;
    d_weight += dy[0] * (x[0] - mean) * p.rstd[row];
    d_bias += dy[0];
  }
  float* partial = p.partials + static_cast<int64_t>(blockIdx.y) * 2 * columns + c;
  partial[0] = d_weight;
  partial[columns] = d_bias;
}

/// Adds the groups' partial rows: 32 columns per block, 32 threads per column take every 32nd group each, and their
/// sums are added in order. blockIdx.y: 0 the weight, 1 the bias.
__global__ void __launch_bounds__(1024)
    norm_weight_finish_kernel(const float* partials, int groups, int columns, float* d_weight, float* d_bias,
                              bool accumulate) {
  __shared__ float shared[32][33];
  float* to = blockIdx.y == 0 ? d_weight : d_bias;
  const int c = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
  const float* from = partials + static_cast<int64_t>(blockIdx.y) * columns + c;
  float sum = 0;
  if (c < columns) {
#pragma unroll 8
    for (int g = static_cast<int>(threadIdx.y); g < groups; g += 32)
      sum += from[static_cast<int64_t>(g) * 2 * columns];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= columns) return;
  float total = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) total += shared[i][threadIdx.x];
  to[c] = accumulate ? to[c] + total : total;
}

template <class T>
struct BackwardLaunch {
  cudaStream_t stream;
  BackwardPointers<T> p;
  int64_t rows;
  int columns;
  int groups;

  template <int kRowThreads, int kAccesses>
  void run() const {
    constexpr int kThreads = kBackwardThreads<kRowThreads>;
    static_assert(kThreads == kRowThreads || 2 * kRowThreads * kAccesses * 16 * 2 <= kStageBytes<kThreads>,
                  "sums fit");
    const auto kernel = norm_backward_kernel<T, kRowThreads, kAccesses>;
    constexpr int kShared = static_cast<int>(kStageBytes<kThreads>);
    // 72 KiB, or 144 for the widest rows: more than GPUs of compute capability 8.6 and 8.9 have.
    if (kThreads > 256 && kShared > device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin))
      return run_any();
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
    kernel<<<static_cast<unsigned>(groups), kThreads, kShared, stream>>>(p, rows, columns);
    CUDA_CHECK_LAUNCH(norm_backward);
  }
  void run_any() const {
    norm_backward_any_kernel<T><<<grid_of(rows), 256, 0, stream>>>(p, columns);
    CUDA_CHECK_LAUNCH(norm_backward_any);
    const dim3 grid(static_cast<unsigned>(ceil_div(columns, 256)), static_cast<unsigned>(groups));
    norm_weight_partials_any_kernel<T><<<grid, 256, 0, stream>>>(p, rows, columns);
    CUDA_CHECK_LAUNCH(norm_weight_partials_any);
  }
  void pick() const {
    const int a = columns / kVector<T>;
    if (a <= 8) return run<8, 1>();
    if (a <= 16) return run<16, 1>();
    if (a <= 32) return run<32, 1>();
    if (a <= 64) return run<32, 2>();
    if (a <= 96) return run<32, 3>();
    if (a <= 128) return run<64, 2>();
    if (a <= 192) return run<64, 3>();
    if (a <= 256) return run<128, 2>();
    if (a <= 384) return run<128, 3>();
    if (a <= 512) return run<256, 2>();
    if (a <= 768) return run<256, 3>();
    if (a <= 1024) return run<512, 2>();
    if (a <= 1536) return run<512, 3>();
    return run_any();
  }
};

int columns_of(const Tensor& x) {
  CHECK(x.columns() < int64_t{1} << 30, "a normalised row has fewer than 2^30 columns, here ", x.columns());
  return static_cast<int>(x.columns());
}

}  // namespace

void norm_backward(const Context& ctx, const NormBackward& args) {
  check(args);
  const int64_t rows = args.residual.rows();
  const int columns = columns_of(args.residual);
  const int groups = static_cast<int>(std::min(rows, kNormGroups));
  require_scratch({"norm_backward", "scratch", args.scratch}, norm_backward_scratch_bytes(rows, columns));
  with_element(args.d_residual.dtype, [&](auto element) {
    using T = decltype(element);
    const BackwardPointers<T> p = pointers<T>(args);
    const BackwardLaunch<T> launch{stream_of(ctx), p, rows, columns, groups};
    if (rows > 0) {
      const bool vectors = columns % kVector<T> == 0 && aligned_to(16, p.d_residual, p.d_residual_in, p.d_out,
                                                                   p.residual, p.weight, p.partials);
      if (vectors)
        launch.pick();
      else
        launch.run_any();
    }
    const dim3 grid(static_cast<unsigned>(ceil_div(columns, 32)), args.d_bias ? 2 : 1);
    norm_weight_finish_kernel<<<grid, dim3(32, 32), 0, stream_of(ctx)>>>(
        p.partials, groups, columns, args.d_weight.as<float>(),
        args.d_bias ? args.d_bias.as<float>() : nullptr, args.accumulate);
    CUDA_CHECK_LAUNCH(norm_weight_finish);
  });
}

}  // namespace kinoe::cuda
