// RMSNorm of query and key heads on the GPU, in place, with deterministic weight gradients.
//
// Bytes per element (bf16): forward 2 read, 2 + 2 written (the head as it came is kept); backward 2 + 2 read, 2 written. About 15
// instructions per element where the multiprocessor has time for 50: bound by memory. Expected: 85 % of the copy bandwidth
// at D = 128 with 16,384 tokens.
//
// A head is one access of 16 bytes for each of 8, 16 or 32 lanes (two for fp32 heads beyond 128): it is read once, and its sum
// of squares needs shuffles only. Backward computes rstd again from the kept head, in the same order. There kQkNormGroups blocks,
// a constant, walk over the heads; every thread keeps the sums of its own columns for both weights in registers, a block adds its
// rows of threads in order, and a second kernel adds the blocks in order. No atomics: the bits depend on the shape alone.
//
// Heads that are not made of whole 16-byte accesses, or larger than the table at the end reaches, take a warp and plain loops.
#include "kernels/qk_norm.h"

#include <algorithm>

#include "kernels/common/arguments.h"
#include "kernels/common/cuda_util.cuh"

namespace kinoe::cuda {
namespace {

constexpr int kThreads = 256;

struct Shape {
  unsigned rows;    // tokens * normed: heads to norm
  unsigned heads;   // H: the first of a token's
  unsigned normed;  // H + Hkv
  int head_dim;
  int64_t pitch;  // elements from token to token
  float eps;

  /// First element of a head in the packed projections, and in `raw`.
  __device__ __forceinline__ int64_t in_qkv(unsigned row) const {
    return static_cast<int64_t>(row / normed) * pitch + static_cast<int64_t>(row % normed) * head_dim;
  }
  __device__ __forceinline__ int64_t in_raw(unsigned row) const {
    return static_cast<int64_t>(row) * head_dim;
  }
  __device__ __forceinline__ bool is_query(unsigned row) const { return row % normed < heads; }
};

template <class T>
struct ForwardPointers {
  T* qkv;
  T* raw;  // or null
  const T* q_weight;
  const T* k_weight;
};

template <class T>
struct BackwardPointers {
  T* d_qkv;
  const T* raw;
  const T* q_weight;
  const T* k_weight;
  float* partials;  // [kQkNormGroups, 2, D]: d_q_weight, d_k_weight
};

template <class T>
__device__ __forceinline__ float element(const T* from) {
  float x[1];
  to_floats<T, 1>(load_plain<T, 1>(from), x);
  return x[0];
}

template <class T>
__device__ __forceinline__ void put(T* to, float value) {
  const float x[1] = {value};
  store<T, 1>(to, from_floats<T, 1>(x));
}

__device__ __forceinline__ float rstd_of(float squares, const Shape& s) {
  return 1.0F / sqrtf(squares / static_cast<float>(s.head_dim) + s.eps);
}

// ---- Heads of whole accesses --------------------------------------------------------------------------------------

template <class T, int kRowThreads, int kAccesses>
__global__ void __launch_bounds__(kThreads) qk_norm_forward_kernel(ForwardPointers<T> p, Shape s) {
  constexpr int W = kVector<T>;
  const unsigned row = blockIdx.x * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
  const int accesses =
      row < s.rows ? s.head_dim / W : 0;  // a row past the end takes part in the shuffles only
  T* x = p.qkv + s.in_qkv(row);

  Raw<T, W> r[kAccesses];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) {
    const int a = thread + i * kRowThreads;
    r[i] = a < accesses ? load_once<T, W>(x + a * W) : zero_raw<T, W>();
    float v[W];
    to_floats<T, W>(r[i], v);
#pragma unroll
    for (int j = 0; j < W; ++j) squares += v[j] * v[j];
  }
  const float rstd = rstd_of(warp_sum<kRowThreads>(squares), s);
  const T* weight = s.is_query(row) ? p.q_weight : p.k_weight;
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) {
    const int a = thread + i * kRowThreads;
    if (a >= accesses) continue;
    if (p.raw != nullptr) store<T, W>(p.raw + s.in_raw(row) + a * W, r[i]);
    float v[W], w[W];
    to_floats<T, W>(r[i], v);
    to_floats<T, W>(load_shared_input<T, W>(weight + a * W), w);
#pragma unroll
    for (int j = 0; j < W; ++j) v[j] = v[j] * rstd * w[j];
    store<T, W>(x + a * W, from_floats<T, W>(v));
  }
}

/// What a thread holds of one head.
template <class T, int kAccesses>
struct HeadPart {
  Raw<T, kVector<T>> x[kAccesses], dy[kAccesses];
};

template <class T, int kRowThreads, int kAccesses>
__global__ void __launch_bounds__(kThreads, 3) qk_norm_backward_kernel(BackwardPointers<T> p, Shape s) {
  constexpr int W = kVector<T>;
  constexpr int kSlots = kThreads / kRowThreads;  // heads of the block at a time
  constexpr int kAtOnce = 2;                      // heads of a thread in flight
  constexpr int kColumns = kRowThreads * kAccesses * W;
  __shared__ __align__(16) float shared[kSlots][2][kColumns];

  const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
  const unsigned slot = threadIdx.x / kRowThreads;
  const int all = s.head_dim / W;
  float d_q[kAccesses][W] = {}, d_k[kAccesses][W] = {};
  // 64 bits: the last step may pass 2^32.
  for (uint64_t base = blockIdx.x * kSlots; base < s.rows; base += uint64_t{kAtOnce} * gridDim.x * kSlots) {
    HeadPart<T, kAccesses> part[kAtOnce];
    unsigned row[kAtOnce];
    int accesses[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const uint64_t at = base + static_cast<uint64_t>(k) * gridDim.x * kSlots + slot;
      accesses[k] = at < s.rows ? all : 0;
      row[k] = at < s.rows ? static_cast<unsigned>(at) : 0;
#pragma unroll
      for (int i = 0; i < kAccesses; ++i) {
        const int a = thread + i * kRowThreads;
        const bool in = a < accesses[k];
        part[k].x[i] = in ? load_once<T, W>(p.raw + s.in_raw(row[k]) + a * W) : zero_raw<T, W>();
        part[k].dy[i] = in ? load_once<T, W>(p.d_qkv + s.in_qkv(row[k]) + a * W) : zero_raw<T, W>();
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const bool query = s.is_query(row[k]);
      const T* weight = query ? p.q_weight : p.k_weight;
      float squares = 0, dot = 0;  // dot: sum of dy weight x
#pragma unroll
      for (int i = 0; i < kAccesses; ++i) {
        const int a = thread + i * kRowThreads;
        float x[W], dy[W], w[W];
        to_floats<T, W>(part[k].x[i], x);
        to_floats<T, W>(part[k].dy[i], dy);
        to_floats<T, W>(a < accesses[k] ? load_shared_input<T, W>(weight + a * W) : zero_raw<T, W>(), w);
#pragma unroll
        for (int j = 0; j < W; ++j) {
          squares += x[j] * x[j];
          dot += dy[j] * w[j] * x[j];
        }
      }
      const float rstd = rstd_of(warp_sum<kRowThreads>(squares), s);
      const float mean = warp_sum<kRowThreads>(dot) * rstd / static_cast<float>(s.head_dim);
#pragma unroll
      for (int i = 0; i < kAccesses; ++i) {
        const int a = thread + i * kRowThreads;
        if (a >= accesses[k]) continue;
        float x[W], dy[W], w[W];
        to_floats<T, W>(part[k].x[i], x);
        to_floats<T, W>(part[k].dy[i], dy);
        to_floats<T, W>(load_shared_input<T, W>(weight + a * W), w);
#pragma unroll
        for (int j = 0; j < W; ++j) {
          const float xhat = x[j] * rstd, d_weight = dy[j] * xhat;
          // Not "+= query ? d_weight : 0": a NaN of one kind must not depend on the other's path.
          if (query)
            d_q[i][j] += d_weight;
          else
            d_k[i][j] += d_weight;
          dy[j] = rstd * (dy[j] * w[j] - xhat * mean);
        }
        store<T, W>(p.d_qkv + s.in_qkv(row[k]) + a * W, from_floats<T, W>(dy));
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kAccesses; ++i)
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const int c = (thread + i * kRowThreads) * W + j;
      shared[slot][0][c] = d_q[i][j];
      shared[slot][1][c] = d_k[i][j];
    }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < 2 * s.head_dim; c += kThreads) {
    const int which = c / s.head_dim, column = c % s.head_dim;
    float sum = 0;
    for (int i = 0; i < kSlots; ++i) sum += shared[i][which][column];
    p.partials[static_cast<int64_t>(blockIdx.x) * 2 * s.head_dim + c] = sum;
  }
}

// ---- Any head: a warp each ----------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ float warp_rstd(const T* x, const Shape& s, int lane) {
  float squares = 0;
  for (int i = lane; i < s.head_dim; i += 32) {
    const float v = element(x + i);
    squares += v * v;
  }
  return rstd_of(warp_sum(squares), s);
}

template <class T>
__global__ void __launch_bounds__(kThreads) qk_norm_forward_any_kernel(ForwardPointers<T> p, Shape s) {
  const unsigned row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= s.rows) return;  // the whole warp
  T* x = p.qkv + s.in_qkv(row);
  const float rstd = warp_rstd(x, s, lane);
  const T* weight = s.is_query(row) ? p.q_weight : p.k_weight;
  for (int i = lane; i < s.head_dim; i += 32) {
    const float v = element(x + i);
    if (p.raw != nullptr) put(p.raw + s.in_raw(row) + i, v);
    put(x + i, v * rstd * element(weight + i));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) qk_norm_backward_any_kernel(BackwardPointers<T> p, Shape s) {
  extern __shared__ float sums[];  // [warps, 2, D]
  const unsigned warps = blockDim.x / 32, warp = threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* own = sums + static_cast<int64_t>(warp) * 2 * s.head_dim;
  for (int i = lane; i < 2 * s.head_dim; i += 32) own[i] = 0;
  __syncwarp();
  for (uint64_t at = uint64_t{blockIdx.x} * warps + warp; at < s.rows; at += uint64_t{gridDim.x} * warps) {
    const auto row = static_cast<unsigned>(at);
    const bool query = s.is_query(row);
    const T* x = p.raw + s.in_raw(row);
    const T* weight = query ? p.q_weight : p.k_weight;
    T* dy = p.d_qkv + s.in_qkv(row);
    float* d_weight = own + (query ? 0 : s.head_dim);
    const float rstd = warp_rstd(x, s, lane);
    float dot = 0;
    for (int i = lane; i < s.head_dim; i += 32) dot += element(dy + i) * element(weight + i) * element(x + i);
    const float mean = warp_sum(dot) * rstd / static_cast<float>(s.head_dim);
    __syncwarp();  // the lanes that zeroed or added to a column in another row
    for (int i = lane; i < s.head_dim; i += 32) {
      const float xhat = element(x + i) * rstd, d = element(dy + i);
      d_weight[i] += d * xhat;
      put(dy + i, rstd * (d * element(weight + i) - xhat * mean));
    }
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < 2 * s.head_dim; c += static_cast<int>(blockDim.x)) {
    float sum = 0;
    for (unsigned i = 0; i < warps; ++i) sum += sums[static_cast<int64_t>(i) * 2 * s.head_dim + c];
    p.partials[static_cast<int64_t>(blockIdx.x) * 2 * s.head_dim + c] = sum;
  }
}

// ---- The weights' gradients from the partial rows -----------------------------------------------------------------

/// 32 columns per block, 32 threads per column take every 32nd group each, and their sums are added in order.
__global__ void __launch_bounds__(1024)
    qk_norm_finish_kernel(const float* partials, int head_dim, float* d_q, float* d_k, bool accumulate) {
  __shared__ float shared[32][33];
  const int c = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
  float sum = 0;
  if (c < 2 * head_dim) {
#pragma unroll 8
    for (int g = static_cast<int>(threadIdx.y); g < static_cast<int>(kQkNormGroups); g += 32)
      sum += partials[static_cast<int64_t>(g) * 2 * head_dim + c];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= 2 * head_dim) return;
  float total = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) total += shared[i][threadIdx.x];
  float* to = c < head_dim ? d_q + c : d_k + (c - head_dim);
  *to = accumulate ? *to + total : total;
}

// ---- Launches -----------------------------------------------------------------------------------------------------

template <class T>
struct ForwardLaunch {
  cudaStream_t stream;
  ForwardPointers<T> p;
  Shape s;

  template <int kRowThreads, int kAccesses>
  void run() const {
    const unsigned grid = ceil_div<unsigned>(s.rows, kThreads / kRowThreads);
    qk_norm_forward_kernel<T, kRowThreads, kAccesses><<<grid, kThreads, 0, stream>>>(p, s);
    CUDA_CHECK_LAUNCH(qk_norm_forward);
  }
  void run_any() const {
    const unsigned grid = ceil_div<unsigned>(s.rows, kThreads / 32);
    qk_norm_forward_any_kernel<T><<<grid, kThreads, 0, stream>>>(p, s);
    CUDA_CHECK_LAUNCH(qk_norm_forward_any);
  }
};

template <class T>
struct BackwardLaunch {
  cudaStream_t stream;
  BackwardPointers<T> p;
  Shape s;

  template <int kRowThreads, int kAccesses>
  void run() const {
    qk_norm_backward_kernel<T, kRowThreads, kAccesses>
        <<<static_cast<unsigned>(kQkNormGroups), kThreads, 0, stream>>>(p, s);
    CUDA_CHECK_LAUNCH(qk_norm_backward);
  }
  void run_any() const {
    constexpr int64_t kShared = 48 << 10;  // bytes a block has without asking
    const int64_t per_warp = int64_t{2} * s.head_dim * static_cast<int64_t>(sizeof(float));
    CHECK(per_warp <= kShared, "qk_norm_backward: heads of at most 6144 elements, here ", s.head_dim);
    const int64_t warps = std::min<int64_t>(kThreads / 32, kShared / per_warp);
    qk_norm_backward_any_kernel<T><<<static_cast<unsigned>(kQkNormGroups), static_cast<unsigned>(warps * 32),
                                     static_cast<size_t>(warps * per_warp), stream>>>(p, s);
    CUDA_CHECK_LAUNCH(qk_norm_backward_any);
  }
};

template <class T, class Launch>
void pick(const Launch& launch, int head_dim, bool vectors) {
  const int a = head_dim / kVector<T>;
  if (!vectors) return launch.run_any();
  if (a <= 8) return launch.template run<8, 1>();
  if (a <= 16) return launch.template run<16, 1>();
  if (a <= 32) return launch.template run<32, 1>();
  if constexpr (sizeof(T) == 4)
    if (a <= 64) return launch.template run<32, 2>();
  launch.run_any();
}

Shape shape_of(const Tensor& qkv, int64_t heads, int64_t kv_heads, int64_t head_dim, float eps) {
  const int64_t normed = heads + kv_heads, rows = qkv.rows() * normed;
  CHECK(rows < int64_t{1} << 31 && head_dim < int64_t{1} << 30, "qk_norm: fewer than 2^31 heads, here ", rows,
        " of ", head_dim, " elements");
  return {.rows = static_cast<unsigned>(rows),
          .heads = static_cast<unsigned>(heads),
          .normed = static_cast<unsigned>(normed),
          .head_dim = static_cast<int>(head_dim),
          .pitch = qkv.columns(),
          .eps = eps};
}

}  // namespace

void qk_norm_forward(const Context& ctx, const QkNormForward& args) {
  check(args);
  const Shape shape = shape_of(args.qkv, args.heads, args.kv_heads, args.q_weight.size(), args.eps);
  if (shape.rows == 0) return;
  with_element(args.qkv.dtype, [&](auto element_of) {
    using T = decltype(element_of);
    const ForwardPointers<T> p{args.qkv.as<T>(), args.raw ? args.raw.as<T>() : nullptr, args.q_weight.as<T>(),
                               args.k_weight.as<T>()};
    pick<T>(ForwardLaunch<T>{stream_of(ctx), p, shape}, shape.head_dim,
            shape.head_dim % kVector<T> == 0 && aligned_to(16, p.qkv, p.raw, p.q_weight, p.k_weight));
  });
}

void qk_norm_backward(const Context& ctx, const QkNormBackward& args) {
  check(args);
  const Shape shape = shape_of(args.d_qkv, args.heads, args.kv_heads, args.q_weight.size(), args.eps);
  require_scratch({"qk_norm_backward", "scratch", args.scratch},
                  qk_norm_backward_scratch_bytes(args.d_qkv.rows(), shape.head_dim));
  with_element(args.d_qkv.dtype, [&](auto element_of) {
    using T = decltype(element_of);
    const BackwardPointers<T> p{args.d_qkv.as<T>(), args.raw.as<T>(), args.q_weight.as<T>(),
                                args.k_weight.as<T>(), reinterpret_cast<float*>(args.scratch.as<int32_t>())};
    // Every block writes its partial row, also one without a head.
    pick<T>(BackwardLaunch<T>{stream_of(ctx), p, shape}, shape.head_dim,
            shape.head_dim % kVector<T> == 0 && aligned_to(16, p.d_qkv, p.raw, p.q_weight, p.k_weight));
    const unsigned grid = grid_of(ceil_div<int64_t>(int64_t{2} * shape.head_dim, 32));
    qk_norm_finish_kernel<<<grid, dim3(32, 32), 0, stream_of(ctx)>>>(
        p.partials, shape.head_dim, args.d_q_weight.as<float>(), args.d_k_weight.as<float>(),
        args.accumulate);
    CUDA_CHECK_LAUNCH(qk_norm_finish);
  });
}

}  // namespace kinoe::cuda
