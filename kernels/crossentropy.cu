// Softmax and cross-entropy on the GPU, the gradient written over the logits: a row is read once and written once.
//
// Bytes per logit (bf16): 2 read, 2 written; two exponentials of the special function unit, 60 % of its rate at
// 4.2 TB/s. Measured on an H200 (2026-11-30): 96 % of the copy bandwidth at V = 50,304.
//
// Resident kernel: the row waits on the multiprocessor between the two passes. A block of 512 threads holds up to 112 KiB
// of it in shared memory, so that two blocks share a multiprocessor and one computes while the other's loads are in
// flight, and up to 5 more accesses per thread in registers: 152 KiB. Longer rows are cut into slices over a thread block
// cluster of 2, 4 or 8 (sm_90), whose blocks exchange maximum and sum through distributed shared memory. The fewer the
// better: without the registers V = 128,256 took a cluster of 4 and reached 81 %.
// Every thread copies with cp.async exactly the 16-byte pieces that it reads again, so the copies need no barrier; they
// are waited for in four stages, computing begins with the first.
//
// Streaming kernel: reads the row twice, from global memory. For rows that do not begin at multiples of 16 bytes, and
// for those that do not fit (sm_80 has no clusters).
//
// Both: every thread keeps a running maximum m and s = sum exp(x - m), rescaling s when m grows (Milakov and
// Gimelshein, 2018); the threads' pairs are merged in one fixed order. m starts at the lowest finite number, so that
// -Inf logits have weight 0; NaN reaches s, and through it the loss and the whole row.
#include "kernels/crossentropy.h"

#include <algorithm>
#include <cfloat>

#include "kernels/common/cuda_util.cuh"

namespace kinoe::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kStages = 4;
constexpr int kHeld = 5;                         // accesses in registers
constexpr size_t kTwoPerProcessor = 112 * 1024;  // of the 227 KiB of sm_90

template <class T>
struct Pointers {
  T* logits;
  const int32_t* targets;
  float* losses;
  int64_t* bad_target;
  int64_t pitch;
  int vocab;
  float d_loss;
  bool with_gradient;
};

/// sum exp(x - m) over some elements, relative to their largest.
struct Softmax {
  float m = -FLT_MAX;
  float s = 0;

  template <int W>
  __device__ __forceinline__ void add(const float (&x)[W], int count) {
    float largest = -FLT_MAX;
#pragma unroll
    for (int j = 0; j < W; ++j)
      if (j < count) largest = fmaxf(largest, x[j]);
    if (largest > m) {
      s *= exp2_fast((m - largest) * kLog2E);
      m = largest;
    }
#pragma unroll
    for (int j = 0; j < W; ++j)
      if (j < count) s += exp2_fast((x[j] - m) * kLog2E);
  }
  /// Only the elements below the end of the vocabulary, `left` elements away.
  template <int W>
  __device__ __forceinline__ void add_below(const float (&x)[W], int64_t left) {
    if (left >= W)
      add<W>(x, W);
    else if (left > 0)
      add<W>(x, static_cast<int>(left));
  }
  /// Both relative to the warp's largest, the same bits in all lanes.
  __device__ __forceinline__ void merge_warp() {
    const float largest = warp_max(m);
    s = warp_sum(s * exp2_fast((m - largest) * kLog2E));
    m = largest;
  }
  /// Merges the first `count` of an array, the same bits in all threads.
  __device__ __forceinline__ void merge_array(const Softmax* parts, int count) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    m = lane < count ? parts[lane].m : -FLT_MAX;
    s = lane < count ? parts[lane].s : 0.0F;
    merge_warp();
  }
};

__device__ __forceinline__ Softmax merge_block(Softmax own, Softmax* shared, int warps) {
  own.merge_warp();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = own;
  __syncthreads();
  own.merge_array(shared, warps);
  return own;
}

/// The row's target, or -1 where it is ignored; a bad one is reported by one thread.
template <class T>
__device__ __forceinline__ int target_of(const Pointers<T>& p, int64_t row, bool reporter) {
  const int target = p.targets[row];
  if (target >= 0 && target < p.vocab) return target;
  if (target != -1 && reporter && threadIdx.x == 0)
    atomicMax(reinterpret_cast<long long*>(p.bad_target), static_cast<long long>(row + 1));
  return -1;
}

/// The gradient of W logits from column `column` on; columns from V on get 0.
template <class T, int W>
__device__ __forceinline__ Raw<T, W> gradient(const Raw<T, W>& logits, int64_t column, const Pointers<T>& p,
                                              int target, float m, float scale) {
  float x[W];
  to_floats<T, W>(logits, x);
#pragma unroll
  for (int j = 0; j < W; ++j) x[j] = exp2_fast((x[j] - m) * kLog2E) * scale;
  if (target >= column && target < column + W) {
#pragma unroll
    for (int j = 0; j < W; ++j)
      if (column + j == target) x[j] -= p.d_loss;
  }
  if (column + W > p.vocab) {
#pragma unroll
    for (int j = 0; j < W; ++j)
      if (column + j >= p.vocab) x[j] = 0;
  }
  return from_floats<T, W>(x);
}

// ---- The row in shared memory -----------------------------------------------------------------------------------------

/// Merges the blocks of a cluster in the order of their ranks. The caller must meet the cluster once more before it
/// ends: others read its shared memory.
__device__ __forceinline__ Softmax merge_cluster(Softmax own, Softmax* shared, int blocks) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) *shared = own;
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;"
               :
               :
               : "memory");
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Softmax part;
  if (lane < blocks) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "r"(lane));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(part.m), "=f"(part.s)
                 : "r"(address)
                 : "memory");
  }
  part.merge_warp();
  asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
  return part;
#else
  (void)shared;
  (void)blocks;
  return own;  // clusters are launched from sm_90 on
#endif
}
__device__ __forceinline__ void leave_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
#endif
}

/// blockIdx.x / kBlocks is the row, the remainder the slice of `slice` accesses, the first `in_shared` of which are held
/// in shared memory and the others, at most kRegisters per thread, in registers.
template <class T, int kBlocks, int kRegisters>
__global__ void __launch_bounds__(kThreads, 2)
    cross_entropy_resident_kernel(Pointers<T> p, int slice, int in_shared) {
  constexpr int W = kVector<T>;
  extern __shared__ uint4 resident[];
  __shared__ Softmax warp_parts[kThreads / 32];
  __shared__ alignas(8) Softmax block_part;

  const int64_t row = blockIdx.x / kBlocks;
  const int rank = static_cast<int>(blockIdx.x % kBlocks), thread = static_cast<int>(threadIdx.x);
  const int all = static_cast<int>(p.pitch / W);
  const int begin = rank * slice, end = min(begin + slice, all);
  const int shared_end = min(begin + in_shared, end);
  T* logits = p.logits + row * p.pitch;

  const int target = target_of(p, row, rank == 0);
  if (target < 0) {  // the same in the whole cluster
    if (rank == 0 && thread == 0) p.losses[row] = 0;
    if (p.with_gradient)
      for (int a = begin + thread; a < end; a += kThreads)
        store_once<T, W>(logits + int64_t{a} * W, zero_raw<T, W>());
    return;
  }

  const int per_stage = ceil_div(ceil_div(in_shared, kThreads), kStages) * kThreads;
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    const int stop = min(begin + (stage + 1) * per_stage, shared_end);
    for (int a = begin + stage * per_stage + thread; a < stop; a += kThreads)
      copy16_async(&resident[a - begin], logits + int64_t{a} * W);
    commit_copies();
  }
  // The register part of the thread's pieces: f(held, access).
  Raw<T, W> held[kRegisters + 1];
  const auto each_held = [&](const auto& f) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      const int a = begin + in_shared + i * kThreads + thread;
      if (a < end) f(held[i], a);
    }
  };
  each_held([&](Raw<T, W>& piece, int a) { piece = load_once<T, W>(logits + int64_t{a} * W); });
  float at_target[1] = {0};
  if (rank == 0 && thread == 0) to_floats<T, 1>(load_once<T, 1>(logits + target), at_target);

  Softmax own;
  const auto add = [&](const Raw<T, W>& piece, int a) {
    float x[W];
    to_floats<T, W>(piece, x);
    own.add_below<W>(x, p.vocab - int64_t{a} * W);
  };
  const auto add_stage = [&](int stage) {
    const int stop = min(begin + (stage + 1) * per_stage, shared_end);
    for (int a = begin + stage * per_stage + thread; a < stop; a += kThreads) add(resident[a - begin], a);
  };
  wait_copies<3>();
  add_stage(0);
  wait_copies<2>();
  add_stage(1);
  wait_copies<1>();
  add_stage(2);
  wait_copies<0>();
  add_stage(3);
  each_held(add);

  own = merge_block(own, warp_parts, kThreads / 32);
  if constexpr (kBlocks > 1) own = merge_cluster(own, &block_part, kBlocks);
  if (rank == 0 && thread == 0) p.losses[row] = logf(own.s) + (own.m - at_target[0]);
  if (p.with_gradient) {
    const float scale = p.d_loss / own.s;
    const auto write = [&](const Raw<T, W>& piece, int a) {
      store_once<T, W>(logits + int64_t{a} * W,
                       gradient<T, W>(piece, int64_t{a} * W, p, target, own.m, scale));
    };
    for (int a = begin + thread; a < shared_end; a += kThreads) write(resident[a - begin], a);
    each_held(write);
  }
  if constexpr (kBlocks > 1) leave_cluster();
}

// ---- The row read twice -------------------------------------------------------------------------------------------------

constexpr int kStreamThreads = 1024;
constexpr int kStreamAccesses = 4;  // in flight

template <class T, int W>
__global__ void __launch_bounds__(kStreamThreads) cross_entropy_streaming_kernel(Pointers<T> p) {
  __shared__ Softmax warp_parts[kStreamThreads / 32];
  const int64_t row = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t all = p.pitch / W;
  T* logits = p.logits + row * p.pitch;

  const int target = target_of(p, row, true);
  if (target < 0) {
    if (thread == 0) p.losses[row] = 0;
    if (p.with_gradient)
      for (int64_t a = thread; a < all; a += kStreamThreads) store<T, W>(logits + a * W, zero_raw<T, W>());
    return;
  }
  float at_target[1] = {0};
  if (thread == 0) to_floats<T, 1>(load_plain<T, 1>(logits + target), at_target);

  Softmax own;
  const int64_t used = ceil_div<int64_t>(p.vocab, W);
  for (int64_t first = thread; first < used; first += kStreamThreads * kStreamAccesses) {
    Raw<T, W> raw[kStreamAccesses];
#pragma unroll
    for (int i = 0; i < kStreamAccesses; ++i) {
      const int64_t a = first + i * kStreamThreads;
      if (a < used) raw[i] = load_plain<T, W>(logits + a * W);
    }
#pragma unroll
    for (int i = 0; i < kStreamAccesses; ++i) {
      const int64_t a = first + i * kStreamThreads;
      if (a >= used) break;
      float x[W];
      to_floats<T, W>(raw[i], x);
      own.add_below<W>(x, p.vocab - a * W);
    }
  }
  own = merge_block(own, warp_parts, kStreamThreads / 32);
  if (thread == 0) p.losses[row] = logf(own.s) + (own.m - at_target[0]);
  if (!p.with_gradient) return;

  const float scale = p.d_loss / own.s;
  for (int64_t first = thread; first < all; first += kStreamThreads * kStreamAccesses) {
    Raw<T, W> raw[kStreamAccesses];
#pragma unroll
    for (int i = 0; i < kStreamAccesses; ++i) {
      const int64_t a = first + i * kStreamThreads;
      if (a < all) raw[i] = load_plain<T, W>(logits + a * W);
    }
#pragma unroll
    for (int i = 0; i < kStreamAccesses; ++i) {
      const int64_t a = first + i * kStreamThreads;
      if (a >= all) break;
      store_once<T, W>(logits + a * W, gradient<T, W>(raw[i], a * W, p, target, own.m, scale));
    }
  }
}

// ---- The losses' sum ----------------------------------------------------------------------------------------------------

constexpr int kSumThreads = 1024;

__global__ void __launch_bounds__(kSumThreads)
    loss_sum_kernel(int64_t* sum, int64_t* count, int64_t* overflow, const float* losses,
                    const int32_t* targets, int64_t n) {
  __shared__ double shared_sum[kSumThreads / 32];
  __shared__ long long shared_count[kSumThreads / 32];
  double own = 0;
  long long own_count = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < n; i += kSumThreads) {
    const float loss = losses[i];
    if (targets[i] >= 0) {
      own += static_cast<double>(loss);
      ++own_count;
    }
  }
  own = block_sum<kSumThreads>(own, shared_sum);
  own_count = block_sum<kSumThreads>(own_count, shared_count);
  if (threadIdx.x == 0) {
    if (fabs(own) <= static_cast<double>(n) * kLossLimit)
      *sum += __double2ll_rn(own / kLossUnit);
    else
      *overflow = 1;
    *count += own_count;
  }
}

// ---- Launches -----------------------------------------------------------------------------------------------------------

template <class T, int kBlocks, int kRegisters>
void launch_resident(const Context& ctx, const Pointers<T>& p, int64_t rows, size_t most_shared) {
  const int slice = static_cast<int>(ceil_div<int64_t>(p.pitch / kVector<T>, kBlocks));
  const int room = static_cast<int>(most_shared / 16) / kThreads * kThreads;
  const int in_shared = kRegisters == 0 ? slice : std::min(slice, room);
  const size_t shared = static_cast<size_t>(in_shared) * 16;
  const auto kernel = cross_entropy_resident_kernel<T, kBlocks, kRegisters>;
  CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = kBlocks;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid_of(rows * kBlocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream_of(ctx);
  config.attrs = &cluster;
  config.numAttrs = kBlocks > 1 ? 1 : 0;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, p, slice, in_shared));
}

/// Takes the row if kBlocks blocks can hold it.
template <class T, int kBlocks>
bool try_resident(const Context& ctx, const Pointers<T>& p, int64_t rows, size_t most_shared) {
  const size_t bytes = static_cast<size_t>(ceil_div<int64_t>(p.pitch / kVector<T>, kBlocks)) * 16;
  const size_t whole_rounds = most_shared / (kThreads * 16) * (kThreads * 16);
  if (bytes <= most_shared)
    launch_resident<T, kBlocks, 0>(ctx, p, rows, most_shared);
  else if (bytes <= whole_rounds + kHeld * kThreads * 16)
    launch_resident<T, kBlocks, kHeld>(ctx, p, rows, most_shared);
  else
    return false;
  return true;
}

template <class T, int W>
void launch_streaming(const Context& ctx, const Pointers<T>& p, int64_t rows) {
  cross_entropy_streaming_kernel<T, W><<<grid_of(rows), kStreamThreads, 0, stream_of(ctx)>>>(p);
  CUDA_CHECK_LAUNCH(cross_entropy_streaming);
}

template <class T>
void launch(const Context& ctx, const Pointers<T>& p, int64_t rows) {
  if (p.pitch % kVector<T> != 0 || !aligned_to(16, p.logits)) return launch_streaming<T, 1>(ctx, p, rows);
  constexpr size_t kStatic = 1024;  // the kernel's own shared memory and what the system reserves
  const auto most = static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)) - kStatic;
  const bool clusters = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  if (!clusters) {
    if (!try_resident<T, 1>(ctx, p, rows, most)) launch_streaming<T, kVector<T>>(ctx, p, rows);
    return;
  }
  const size_t half = std::min(most, kTwoPerProcessor);
  if (try_resident<T, 1>(ctx, p, rows, half) || try_resident<T, 2>(ctx, p, rows, half) ||
      try_resident<T, 4>(ctx, p, rows, half) || try_resident<T, 8>(ctx, p, rows, half))
    return;
  launch_streaming<T, kVector<T>>(ctx, p, rows);
}

}  // namespace

void cross_entropy(const Context& ctx, const CrossEntropy& args) {
  check(args);
  CHECK(args.logits.columns() < int64_t{1} << 30, "cross_entropy: rows of less than 2^30 logits, here ",
        args.logits.columns());
  const int64_t rows = args.logits.rows();
  if (rows == 0) return;
  with_element(args.logits.dtype, [&](auto element) {
    using T = decltype(element);
    const Pointers<T> p{.logits = args.logits.as<T>(),
                        .targets = args.targets.as<int32_t>(),
                        .losses = args.losses.as<float>(),
                        .bad_target = args.bad_target.as<int64_t>(),
                        .pitch = args.logits.columns(),
                        .vocab = static_cast<int>(args.vocab_size),
                        .d_loss = args.d_loss,
                        .with_gradient = args.with_gradient};
    launch(ctx, p, rows);
  });
}

void loss_sum(const Context& ctx, const LossSum& args) {
  check(args);
  loss_sum_kernel<<<1, kSumThreads, 0, stream_of(ctx)>>>(args.sum.as<int64_t>(), args.count.as<int64_t>(),
                                                         args.overflow.as<int64_t>(), args.losses.as<float>(),
                                                         args.targets.as<int32_t>(), args.losses.size());
  CUDA_CHECK_LAUNCH(loss_sum);
}

}  // namespace kinoe::cuda
