// Sums in fixed point on the CPU: blocks of the range in parallel.
//
// One rounding each way. To fixed point: fp32 to fp64 and the product with 2^50 are exact, so llrint() rounds what was
// given. Back: the conversion of an int64 rounds; the product with 2^-50 is exact, because the result is 0 or at least
// 2^-50 and so far from the subnormal numbers.
#include "kernels/fixed_point.h"

#include <algorithm>
#include <cmath>

#include "kernels/common/arguments.h"
#include "kernels/common/cpu.h"
#include "kernels/common/simd.h"

namespace kinoe {

void check(const FixedPointAdd& a) {
  const char* op = "fixed_point_add";
  require_type({op, "values", a.values}, accumulator_of(a.values.dtype));
  require_size({op, "sums", a.sums}, DType::i64, a.values.size());
  require_size({op, "overflow", a.overflow}, DType::i64, 1);
  CHECK(a.limit > 0 && a.limit <= gradient_limit(1), op, ": limit is ", a.limit, ", not in (0, 4096]");
}

void check(const FixedPointToFloat& a) {
  const char* op = "fixed_point_to_float";
  require_type({op, "values", a.values}, accumulator_of(a.values.dtype));
  require_size({op, "sums", a.sums}, DType::i64, a.values.size());
}

namespace {

constexpr int64_t kBlock = 16384;

/// Returns whether all values were within the limit.
template <bool kStore, class T>
KINOE_SIMD bool add(int64_t* sums, const T* values, double limit, int64_t n) {
  int64_t beyond = 0;
#pragma omp simd reduction(| : beyond)
  for (int64_t i = 0; i < n; ++i) {
    const double value = static_cast<double>(values[i]);
    const bool within = std::abs(value) < limit;  // not of NaN
    beyond |= within ? 0 : 1;
    const int64_t x = std::llrint((within ? value : 0.0) / kGradientUnit);
    sums[i] = kStore ? x : sums[i] + x;
  }
  return beyond == 0;
}

template <class T>
KINOE_SIMD void to_float(T* values, const int64_t* sums, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) values[i] = static_cast<T>(sums[i]) * static_cast<T>(kGradientUnit);
}

template <class T>
void run(const FixedPointAdd& a) {
  const int64_t n = a.values.size();
  int64_t* sums = a.sums.as<int64_t>();
  const T* values = a.values.as<T>();
  bool within = true;
#pragma omp parallel for reduction(&& : within) if (n > 2 * kBlock)
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t length = std::min(kBlock, n - begin);
    const bool block_within = a.store ? add<true>(sums + begin, values + begin, a.limit, length)
                                      : add<false>(sums + begin, values + begin, a.limit, length);
    within = within && block_within;
  }
  if (!within) *a.overflow.as<int64_t>() = 1;
}

template <class T>
void run(const FixedPointToFloat& a) {
  const int64_t n = a.values.size();
  T* values = a.values.as<T>();
  const int64_t* sums = a.sums.as<int64_t>();
#pragma omp parallel for if (n > 2 * kBlock)
  for (int64_t begin = 0; begin < n; begin += kBlock)
    to_float(values + begin, sums + begin, std::min(kBlock, n - begin));
}

}  // namespace

void cpu::fixed_point_add(const Context& /*ctx*/, const FixedPointAdd& args) {
  check(args);
  with_scalar("fixed_point_add", args.values.dtype, [&](auto scalar) { run<decltype(scalar)>(args); });
}

void cpu::fixed_point_to_float(const Context& /*ctx*/, const FixedPointToFloat& args) {
  check(args);
  with_scalar("fixed_point_to_float", args.values.dtype, [&](auto scalar) { run<decltype(scalar)>(args); });
}

}  // namespace kinoe
