// Sums in fixed point on the GPU.
//
// Bytes per element: 4 read, 8 read and 8 written (8 written alone where the sum is stored); 8 + 4 on the way back. A
// thread takes 2 elements at a time, 8 bytes of fp32 and 16 of int64, so that the lanes of a warp stand side by side in
// both (kernels/cast.cu says what happens otherwise), four such groups in flight. Addresses that do not allow this go
// one by one.
//
// No fp64: in fp32 the product with 2^50 is exact as well (|value| < 2^12, and subnormal numbers become normal ones),
// so the one conversion to int64 rounds what was given, as on the CPU. The multiprocessor converts 16 a clock, where
// 4.2 TB/s bring it less than 2. Back: the conversion to fp32 rounds, the product with 2^-50 is exact, because the result is 0 or
// at least 2^-50.
#include "kernels/fixed_point.h"

#include <cmath>
#include <limits>

#include "kernels/common/cuda_util.cuh"

namespace kinoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGroups = 4;  // of a thread

/// The x of one value; sets `beyond` where it is not within the limit.
__device__ __forceinline__ uint64_t fixed_of(float value, float limit, bool& beyond) {
  const bool within = fabsf(value) < limit;  // not of NaN
  beyond |= !within;
  return static_cast<uint64_t>(__float2ll_rn(within ? value * 0x1p50F : 0.0F));
}

__device__ __forceinline__ float float_of(int64_t sum) { return __ll2float_rn(sum) * 0x1p-50F; }

template <int W>
__device__ __forceinline__ void to_words(const Raw<int64_t, W>& raw, uint64_t (&x)[W]) {
  if constexpr (W == 1) {
    x[0] = static_cast<uint64_t>(raw.y) << 32 | raw.x;
  } else {
    x[0] = static_cast<uint64_t>(raw.y) << 32 | raw.x;
    x[1] = static_cast<uint64_t>(raw.w) << 32 | raw.z;
  }
}

template <int W>
__device__ __forceinline__ Raw<int64_t, W> from_words(const uint64_t (&x)[W]) {
  const auto low = [](uint64_t word) { return static_cast<uint32_t>(word); };
  const auto high = [](uint64_t word) { return static_cast<uint32_t>(word >> 32); };
  if constexpr (W == 1)
    return make_uint2(low(x[0]), high(x[0]));
  else
    return make_uint4(low(x[0]), high(x[0]), low(x[1]), high(x[1]));
}

template <int W, bool kStore>
__device__ __forceinline__ void finish(int64_t* sums, const Raw<float, W>& values, const Raw<int64_t, W>& old,
                                       float limit, bool& beyond) {
  float value[W];
  to_floats<float, W>(values, value);
  uint64_t sum[W];
  if constexpr (kStore) {
#pragma unroll
    for (int j = 0; j < W; ++j) sum[j] = 0;
  } else {
    to_words<W>(old, sum);
  }
#pragma unroll
  for (int j = 0; j < W; ++j) sum[j] += fixed_of(value[j], limit, beyond);
  store_once<int64_t, W>(sums, from_words<W>(sum));
}

/// Groups of W elements; with W = 2 the last block takes the element that remains of an odd n.
template <int W, bool kStore>
__global__ void __launch_bounds__(kThreads)
    fixed_point_add_kernel(int64_t* sums, const float* values, float limit, int64_t* overflow, int64_t n) {
  const int64_t groups = n / W;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kGroups) + threadIdx.x;
  Raw<float, W> in[kGroups];
  Raw<int64_t, W> old[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int64_t at = (first + i * kThreads) * W;
    if (first + i * kThreads < groups) {
      in[i] = load_once<float, W>(values + at);
      if constexpr (!kStore) old[i] = load_once<int64_t, W>(sums + at);
    }
  }
  bool beyond = false;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    if (first + i * kThreads >= groups) break;
    finish<W, kStore>(sums + (first + i * kThreads) * W, in[i], old[i], limit, beyond);
  }
  if (W == 2 && n % 2 != 0 && blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
    Raw<int64_t, 1> last{};
    if constexpr (!kStore) last = load_plain<int64_t, 1>(sums + n - 1);
    finish<1, kStore>(sums + n - 1, load_plain<float, 1>(values + n - 1), last, limit, beyond);
  }
  if (beyond) *overflow = 1;  // all that write it write the same
}

template <int W>
__global__ void __launch_bounds__(kThreads)
    fixed_point_to_float_kernel(float* values, const int64_t* sums, int64_t n) {
  const int64_t groups = n / W;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kGroups) + threadIdx.x;
  Raw<int64_t, W> in[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i)
    if (first + i * kThreads < groups) in[i] = load_once<int64_t, W>(sums + (first + i * kThreads) * W);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    if (first + i * kThreads >= groups) break;
    uint64_t sum[W];
    to_words<W>(in[i], sum);
    float value[W];
#pragma unroll
    for (int j = 0; j < W; ++j) value[j] = float_of(static_cast<int64_t>(sum[j]));
    store<float, W>(values + (first + i * kThreads) * W, from_floats<float, W>(value));
  }
  if (W == 2 && n % 2 != 0 && blockIdx.x == gridDim.x - 1 && threadIdx.x == 0)
    values[n - 1] = float_of(sums[n - 1]);
}

/// The smallest float that is not below `limit`: a float is below one exactly when it is below the other.
float limit_of(double limit) {
  const auto nearest = static_cast<float>(limit);
  return static_cast<double>(nearest) < limit
             ? std::nextafter(nearest, std::numeric_limits<float>::infinity())
             : nearest;
}

/// Blocks for n elements in groups of W, one at least: the last takes what remains.
unsigned blocks_of(int64_t n, int w) {
  return grid_of(ceil_div<int64_t>(n, int64_t{kThreads} * kGroups * w));
}

template <int W>
void launch_add(const Context& ctx, const FixedPointAdd& a) {
  const int64_t n = a.values.size();
  const auto run = [&](auto kernel) {
    kernel<<<blocks_of(n, W), kThreads, 0, stream_of(ctx)>>>(a.sums.as<int64_t>(), a.values.as<float>(),
                                                             limit_of(a.limit), a.overflow.as<int64_t>(), n);
  };
  if (a.store)
    run(fixed_point_add_kernel<W, true>);
  else
    run(fixed_point_add_kernel<W, false>);
  CUDA_CHECK_LAUNCH(fixed_point_add);
}

/// Addresses that allow accesses of two elements.
bool pairs(const float* values, const int64_t* sums) {
  return aligned_to(2 * sizeof(float), values) && aligned_to(2 * sizeof(int64_t), sums);
}

}  // namespace

void fixed_point_add(const Context& ctx, const FixedPointAdd& args) {
  check(args);
  CHECK(args.values.dtype == DType::f32, "fixed_point_add: the GPU's values are fp32, not ",
        name_of(args.values.dtype));
  if (args.values.size() == 0) return;
  if (pairs(args.values.as<float>(), args.sums.as<int64_t>()))
    launch_add<2>(ctx, args);
  else
    launch_add<1>(ctx, args);
}

void fixed_point_to_float(const Context& ctx, const FixedPointToFloat& args) {
  check(args);
  CHECK(args.values.dtype == DType::f32, "fixed_point_to_float: the GPU's values are fp32, not ",
        name_of(args.values.dtype));
  const int64_t n = args.values.size();
  if (n == 0) return;
  auto* values = args.values.as<float>();
  const auto* sums = args.sums.as<int64_t>();
  if (pairs(values, sums))
    fixed_point_to_float_kernel<2><<<blocks_of(n, 2), kThreads, 0, stream_of(ctx)>>>(values, sums, n);
  else
    fixed_point_to_float_kernel<1><<<blocks_of(n, 1), kThreads, 0, stream_of(ctx)>>>(values, sums, n);
  CUDA_CHECK_LAUNCH(fixed_point_to_float);
}

}  // namespace kinoe::cuda
