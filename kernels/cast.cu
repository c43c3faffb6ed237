// Conversions between fp32 and bf16 on the GPU.
//
// fp32 to bf16 moves 4 + 2 bytes per element. A thread takes 8 elements at a time: two 16-byte accesses on the wide
// side, one on the narrow, two such groups in flight. Expected: 92 % of the copy bandwidth. Addresses that do not allow
// this, and the last elements of a range that is no multiple of 8, go one by one.
#include "kernels/cast.h"

#include <type_traits>

#include "kernels/common/cuda_util.cuh"

namespace kinoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGroups = 2;    // groups of one thread
constexpr int kElements = 8;  // elements of a group

/// kElements elements of T as 16-byte accesses.
template <class T>
struct Group {
  static constexpr int kAccesses = kElements / kVector<T>;
  Raw<T, kVector<T>> raw[kAccesses];

  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) raw[i] = load_once<T, kVector<T>>(from + i * kVector<T>);
  }
  __device__ __forceinline__ void store_to(T* to) const {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) store<T, kVector<T>>(to + i * kVector<T>, raw[i]);
  }
};

template <class To, class From>
__device__ __forceinline__ Group<To> convert(const Group<From>& from) {
  Group<To> to;
  float x[kElements];
#pragma unroll
  for (int i = 0; i < Group<From>::kAccesses; ++i) {
    float part[kVector<From>];
    to_floats<From, kVector<From>>(from.raw[i], part);
#pragma unroll
    for (int j = 0; j < kVector<From>; ++j) x[i * kVector<From> + j] = part[j];
  }
#pragma unroll
  for (int i = 0; i < Group<To>::kAccesses; ++i) {
    float part[kVector<To>];
#pragma unroll
    for (int j = 0; j < kVector<To>; ++j) part[j] = x[i * kVector<To> + j];
    to.raw[i] = from_floats<To, kVector<To>>(part);
  }
  return to;
}

/// Whole groups first; the last block takes the n mod kElements elements that remain.
template <class To, class From>
__global__ void __launch_bounds__(kThreads) cast_kernel(To* to, const From* from, int64_t n) {
  const int64_t groups = n / kElements;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kGroups) + threadIdx.x;
  Group<From> in[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i)
    if (first + i * kThreads < groups) in[i].load(from + (first + i * kThreads) * kElements);
#pragma unroll
  for (int i = 0; i < kGroups; ++i)
    if (first + i * kThreads < groups) convert<To>(in[i]).store_to(to + (first + i * kThreads) * kElements);

  const int64_t rest = groups * kElements + threadIdx.x;
  if (blockIdx.x == gridDim.x - 1 && rest < n) {
    float x[1];
    to_floats<From, 1>(load_plain<From, 1>(from + rest), x);
    store<To, 1>(to + rest, from_floats<To, 1>(x));
  }
}

template <class To, class From>
__global__ void __launch_bounds__(kThreads) cast_any_kernel(To* to, const From* from, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  float x[1];
  to_floats<From, 1>(load_plain<From, 1>(from + i), x);
  store<To, 1>(to + i, from_floats<To, 1>(x));
}

}  // namespace

void cast(const Context& ctx, const Cast& args) {
  check(args);
  const int64_t n = args.from.size();
  if (n == 0) return;
  if (args.to.dtype == args.from.dtype) return copy(ctx, args.to.data, args.from.data, args.from.bytes());
  const auto run = [&](auto to_type, auto from_type) {
    using To = decltype(to_type);
    using From = decltype(from_type);
    To* to = args.to.as<To>();
    const From* from = args.from.as<From>();
    if (aligned_to(16, to, from)) {
      const int64_t groups = ceil_div<int64_t>(n, kElements);
      const unsigned grid = grid_of(ceil_div<int64_t>(groups, kThreads * kGroups));
      cast_kernel<To, From><<<grid, kThreads, 0, stream_of(ctx)>>>(to, from, n);
    } else {
      cast_any_kernel<To, From>
          <<<grid_of(ceil_div<int64_t>(n, kThreads)), kThreads, 0, stream_of(ctx)>>>(to, from, n);
    }
    CUDA_CHECK_LAUNCH(cast);
  };
  with_element(args.from.dtype, [&](auto from) {
    with_element(args.to.dtype, [&](auto to) {
      if constexpr (!std::is_same_v<decltype(from), decltype(to)>) run(to, from);
    });
  });
}

}  // namespace kinoe::cuda
