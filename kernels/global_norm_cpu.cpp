// The norm of all gradients on the CPU: chunks in parallel, each summed in fp64 in a fixed order, then the partial
// sums from left to right. Squares of fp32 numbers and their sums neither overflow nor vanish in fp64.
#include "kernels/global_norm.h"

#include <algorithm>
#include <cmath>

#include "kernels/common/arguments.h"
#include "kernels/common/cpu.h"
#include "kernels/common/simd.h"

namespace kinoe {

void check(const NormPartials& a) {
  const char* op = "norm_partials";
  require_type({op, "gradients", a.gradients}, accumulator_of(a.gradients.dtype));
  require_size({op, "partials", a.partials}, DType::f64, (a.gradients.size() + kChunk - 1) / kChunk);
}

void check(const NormFinish& a) {
  require_size({"norm_finish", "norm", a.norm}, DType::f64, 1);
  require_type({"norm_finish", "partials", a.partials}, DType::f64);
  if (a.order) require_type({"norm_finish", "order", a.order}, DType::i64);
}

namespace {

template <class T>
KINOE_SIMD double sum_of_squares(const T* x, int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

template <class T>
void run(const NormPartials& a) {
  const int64_t n = a.gradients.size(), chunks = a.partials.size();
  const T* gradients = a.gradients.as<T>();
  double* partials = a.partials.as<double>();
#pragma omp parallel for if (n > 2 * kChunk)
  for (int64_t i = 0; i < chunks; ++i)
    partials[i] = sum_of_squares(gradients + i * kChunk, std::min(kChunk, n - i * kChunk));
}

}  // namespace

void cpu::norm_partials(const Context& /*ctx*/, const NormPartials& args) {
  check(args);
  with_scalar("norm_partials", args.gradients.dtype, [&](auto scalar) { run<decltype(scalar)>(args); });
}

void cpu::norm_finish(const Context& /*ctx*/, const NormFinish& args) {
  check(args);
  const double* partials = args.partials.as<double>();
  const int64_t count = args.partials.size(), m = args.order ? args.order.size() : count;
  const int64_t* order = args.order ? args.order.as<int64_t>() : nullptr;
  double sum = 0;
  for (int64_t i = 0; i < m; ++i) {
    const int64_t at = order == nullptr ? i : order[i];
    CHECK(at >= 0 && at < count, "norm_finish: order[", i, "] is ", at, ", there are ", count, " partials");
    sum += partials[at];
  }
  *args.norm.as<double>() = std::sqrt(sum);
}

}  // namespace kinoe
