// What the CUDA kernels share: checked calls, accesses of 16 bytes, reductions in a fixed order.
//
// Memory-bound kernels live from bytes in flight: 4 TB/s at about 0.8 us of latency is 25 KB per multiprocessor at all
// times. So every thread moves 16 bytes per access and issues several before it uses the first. Streams that are read
// once do not allocate in L1, so that tables and weights stay there.
// Reductions use shuffles and shared memory in one order that depends on the block's shape alone: same bits each run.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/device.h"

// GCC reports the bound of every array whose length is an int template argument.
#pragma GCC diagnostic ignored "-Wsign-conversion"

namespace kinoe::cuda {

inline void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status != cudaSuccess) [[unlikely]]
    call_failed(ExitCode::gpu, "CUDA", call,
                cat(cudaGetErrorName(status), " (", cudaGetErrorString(status), ")"), file, line);
}

/// An attribute of the current GPU.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice", __FILE__, __LINE__);
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute", __FILE__, __LINE__);
  return value;
}

inline cudaStream_t stream_of(const Context& ctx) { return static_cast<cudaStream_t>(ctx.stream); }

template <class T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

/// Blocks of a one-dimensional grid; CHECKs that the hardware's limit holds.
inline unsigned grid_of(int64_t blocks) {
  CHECK(blocks >= 0 && blocks < int64_t{1} << 31, "a grid has at most 2^31 - 1 blocks, here ", blocks);
  return static_cast<unsigned>(blocks);
}

/// Calls f(T{}) with the element type of `type`. fp64 lives on the CPU only.
template <class F>
void with_element(DType type, const F& f) {
  CHECK(type == DType::f32 || type == DType::bf16, "the GPU computes in fp32 or bf16, not ", name_of(type));
  if (type == DType::f32)
    f(float{});
  else
    f(bf16{});
}

/// True when all addresses (null included: an absent tensor) allow accesses of `bytes`.
template <class... Pointers>
bool aligned_to(size_t bytes, const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % bytes == 0) && ...);
}

// ---- Accesses -----------------------------------------------------------------------------------------------------

template <int kBytes>
struct RawBytes;
template <>
struct RawBytes<2> {
  using type = unsigned short;
};
template <>
struct RawBytes<4> {
  using type = unsigned int;
};
template <>
struct RawBytes<8> {
  using type = uint2;
};
template <>
struct RawBytes<16> {
  using type = uint4;
};
/// W elements of T as one access of the hardware.
template <class T, int W>
using Raw = typename RawBytes<W* static_cast<int>(sizeof(T))>::type;

/// Elements of T in 16 bytes.
template <class T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

/// Read once: not kept in L1. Not for memory that the same thread wrote before.
template <class T, int W>
__device__ __forceinline__ Raw<T, W> load_once(const T* from) {
  Raw<T, W> r;
  if constexpr (sizeof(r) == 16)
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(from)
                 : "memory");
  else if constexpr (sizeof(r) == 8)
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(r.x), "=r"(r.y)
                 : "l"(from)
                 : "memory");
  else if constexpr (sizeof(r) == 4)
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(r) : "l"(from) : "memory");
  else
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(r) : "l"(from) : "memory");
  return r;
}

/// Read by many: through L1. For memory that no thread of the kernel writes.
template <class T, int W>
__device__ __forceinline__ Raw<T, W> load_shared_input(const T* from) {
  return __ldg(reinterpret_cast<const Raw<T, W>*>(from));
}

/// Coherent within the thread: may follow its own store.
template <class T, int W>
__device__ __forceinline__ Raw<T, W> load_plain(const T* from) {
  return *reinterpret_cast<const Raw<T, W>*>(from);
}

template <class T, int W>
__device__ __forceinline__ void store(T* to, Raw<T, W> value) {
  *reinterpret_cast<Raw<T, W>*>(to) = value;
}

/// Written for a reader far away: first to leave L2.
template <class T, int W>
__device__ __forceinline__ void store_once(T* to, Raw<T, W> value) {
  __stcs(reinterpret_cast<Raw<T, W>*>(to), value);
}

// ---- Copies from global to shared memory that the thread does not wait for (sm_80) -----------------------------------

/// 16 bytes, past L1 and the registers. A thread that reads only what it copied itself needs no barrier, only to wait.
__device__ __forceinline__ void copy16_async(void* to_shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to_shared))), "l"(from)
               : "memory");
}
/// Closes a group of copies; it may be empty.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
/// Waits until at most the last kPending groups are on their way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

// ---- Conversions --------------------------------------------------------------------------------------------------

/// Two floats as packed bf16, `low` in the low half: round to nearest even, NaN becomes 0x7fff.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000U); }

namespace detail {
template <class R>
__device__ __forceinline__ uint32_t word(const R& r, int i) {
  if constexpr (sizeof(R) == 16)
    return i == 0 ? r.x : i == 1 ? r.y : i == 2 ? r.z : r.w;
  else if constexpr (sizeof(R) == 8)
    return i == 0 ? r.x : r.y;
  else
    return static_cast<uint32_t>(r);
}
template <class R>
__device__ __forceinline__ void set_word(R& r, int i, uint32_t value) {
  if constexpr (sizeof(R) == 16)
    (i == 0 ? r.x : i == 1 ? r.y : i == 2 ? r.z : r.w) = value;
  else if constexpr (sizeof(R) == 8)
    (i == 0 ? r.x : r.y) = value;
  else
    r = static_cast<R>(value);
}
}  // namespace detail

template <class T, int W>
__device__ __forceinline__ void to_floats(const Raw<T, W>& raw, float (&x)[W]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < W; ++i) x[i] = __uint_as_float(detail::word(raw, i));
  } else if constexpr (W == 1) {
    x[0] = low_bf16(raw);
  } else {
#pragma unroll
    for (int i = 0; i < W / 2; ++i) {
      x[2 * i] = low_bf16(detail::word(raw, i));
      x[2 * i + 1] = high_bf16(detail::word(raw, i));
    }
  }
}

template <class T, int W>
__device__ __forceinline__ Raw<T, W> from_floats(const float (&x)[W]) {
  Raw<T, W> raw;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < W; ++i) detail::set_word(raw, i, __float_as_uint(x[i]));
  } else if constexpr (W == 1) {
    raw = static_cast<unsigned short>(pack_bf16(x[0], 0.0F));
  } else {
#pragma unroll
    for (int i = 0; i < W / 2; ++i) detail::set_word(raw, i, pack_bf16(x[2 * i], x[2 * i + 1]));
  }
  return raw;
}

template <class T, int W>
__device__ __forceinline__ Raw<T, W> zero_raw() {
  if constexpr (W * sizeof(T) == 16)
    return make_uint4(0, 0, 0, 0);
  else if constexpr (W * sizeof(T) == 8)
    return make_uint2(0, 0);
  else
    return 0;
}

// ---- Arithmetic ---------------------------------------------------------------------------------------------------

inline constexpr float kLog2E = 1.4426950408889634F;

/// 2^x by the special function unit: 2 ulp, denormal results become 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
/// 1/x by the special function unit: 1 ulp; 1/inf = 0.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

/// The square root by the special function unit: 1 ulp; of subnormal numbers 0.
__device__ __forceinline__ float sqrt_fast(float x) {
  float r;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// ---- Reductions ---------------------------------------------------------------------------------------------------

inline constexpr unsigned kAllLanes = 0xffffffffU;

/// Sum over groups of kWidth neighbouring lanes, the same bits in all of them (a + b = b + a at every level).
template <int kWidth = 32, class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

/// Sum over the block, the same bits in all threads. `shared` has one element per warp and must not be in use by
/// another reduction still being read.
template <int kThreads, class T>
__device__ __forceinline__ T block_sum(T x, T* shared) {
  constexpr int kWarps = kThreads / 32;
  x = warp_sum(x);
  if constexpr (kWarps == 1) return x;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  return warp_sum(lane < kWarps ? shared[lane] : T{0});
}

}  // namespace kinoe::cuda

#define CUDA_CHECK(call) ::kinoe::cuda::check_cuda((call), #call, __FILE__, __LINE__)
/// After every <<<>>>: a launch that the driver refused is reported with the kernel's name.
#define CUDA_CHECK_LAUNCH(kernel) \
  ::kinoe::cuda::check_cuda(cudaGetLastError(), "launch of " #kernel, __FILE__, __LINE__)
