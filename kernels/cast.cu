// Conversions between fp32 and bf16 on the GPU.
//
// 4 + 2 bytes per element, either way. A thread takes 4 elements at a time, 16 bytes on the wide side and 8 on the
// narrow, four such groups in flight: then the lanes of a warp stand side by side in both. (With 8 elements the wide
// side would be two accesses with holes between the lanes; written that way, bf16 to fp32 reached 70 % of the copy
// bandwidth on an H200, 2026-11-30.) Addresses that do not allow this, and the last elements of a range that is no
// multiple of 4, go one by one.
#include "kernels/cast.h"

#include <type_traits>

#include "kernels/common/cuda_util.cuh"

namespace kinoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 4;  // of a group
constexpr int kGroups = 4;    // of a thread

/// Whole groups first; the last block takes the n mod kElements elements that remain.
template <class To, class From>
__global__ void __launch_bounds__(kThreads) cast_kernel(To* to, const From* from, int64_t n) {
  const int64_t groups = n / kElements;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kGroups) + threadIdx.x;
  Raw<From, kElements> in[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i)
    if (first + i * kThreads < groups)
      in[i] = load_once<From, kElements>(from + (first + i * kThreads) * kElements);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    if (first + i * kThreads >= groups) break;
    float x[kElements];
    to_floats<From, kElements>(in[i], x);
    store<To, kElements>(to + (first + i * kThreads) * kElements, from_floats<To, kElements>(x));
  }

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
