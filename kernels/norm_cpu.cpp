// LayerNorm and RMSNorm on the CPU: one row at a time, rows in parallel.
//
// With x = (r - mean) rstd (mean = 0 for RMSNorm), g = d_out * weight and <.> the average over a row:
//   dr       = rstd (g - <g> - x <g x>)          (<g> is dropped for RMSNorm, whose statistics have no mean)
//   d_weight = sum_n d_out x,   d_bias = sum_n d_out
// The variance is summed in a second pass over the row, around the mean: one pass over r^2 would cancel.
// The sums over n go into a fixed number of row groups, added in order: the bits do not depend on the threads.
#include "kernels/norm.h"

#include <algorithm>
#include <cmath>

#include "kernels/common/arguments.h"
#include "kernels/common/cpu.h"
#include "kernels/common/simd.h"

namespace kinoe {

void check(const NormForward& a) {
  const char* op = "norm_forward";
  const DType type = a.out.dtype, statistics = accumulator_of(type);
  const int64_t n = a.out.rows(), c = a.out.columns();
  require_matrix({op, "out", a.out}, type, n, c);
  require_matrix({op, "residual", a.residual}, type, n, c);
  CHECK(static_cast<bool>(a.branch) == static_cast<bool>(a.residual_out), op,
        ": branch and residual_out come together");
  if (a.branch) {
    require_matrix({op, "branch", a.branch}, type, n, c);
    require_matrix({op, "residual_out", a.residual_out}, type, n, c);
  }
  require_size({op, "weight", a.weight}, type, c);
  if (a.bias) require_size({op, "bias", a.bias}, type, c);
  if (a.mean) require_size({op, "mean", a.mean}, statistics, n);
  require_size({op, "rstd", a.rstd}, statistics, n);
}

void check(const NormBackward& a) {
  const char* op = "norm_backward";
  const DType type = a.d_residual.dtype, accumulator = accumulator_of(type);
  const int64_t n = a.d_residual.rows(), c = a.d_residual.columns();
  require_matrix({op, "d_residual", a.d_residual}, type, n, c);
  if (a.d_residual_in) require_matrix({op, "d_residual_in", a.d_residual_in}, type, n, c);
  require_size({op, "d_weight", a.d_weight}, accumulator, c);
  if (a.d_bias) require_size({op, "d_bias", a.d_bias}, accumulator, c);
  require_matrix({op, "d_out", a.d_out}, type, n, c);
  require_matrix({op, "residual", a.residual}, type, n, c);
  require_size({op, "weight", a.weight}, type, c);
  if (a.mean) require_size({op, "mean", a.mean}, accumulator, n);
  require_size({op, "rstd", a.rstd}, accumulator, n);
}

namespace {

/// Row groups of the weight gradient.
constexpr int64_t kGroups = 32;

template <class T>
KINOE_SIMD void add_row(T* r, const T* residual, const T* branch, int64_t c) {
#pragma omp simd
  for (int64_t i = 0; i < c; ++i) r[i] = residual[i] + branch[i];
}

/// Writes out, *mean (where there is one) and *rstd from r.
template <class T>
KINOE_SIMD void norm_row(T* out, T* mean, T* rstd, const T* r, const T* weight, const T* bias, T eps,
                         int64_t c) {
  T centre = 0;
  if (mean) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < c; ++i) sum += r[i];
    centre = sum / static_cast<T>(c);
    *mean = centre;
  }
  T squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < c; ++i) squares += (r[i] - centre) * (r[i] - centre);
  const T scale = T{1} / std::sqrt(squares / static_cast<T>(c) + eps);
  *rstd = scale;
  if (bias) {
#pragma omp simd
    for (int64_t i = 0; i < c; ++i) out[i] = (r[i] - centre) * scale * weight[i] + bias[i];
  } else {
#pragma omp simd
    for (int64_t i = 0; i < c; ++i) out[i] = (r[i] - centre) * scale * weight[i];
  }
}

/// Writes d_residual and adds the row's part to d_weight and d_bias.
template <class T>
KINOE_SIMD void backward_row(T* d_residual, T* d_weight, T* d_bias, const T* d_residual_in, const T* d_out,
                             const T* r, const T* weight, const T* mean, T rstd, int64_t c) {
  const T centre = mean ? *mean : T{0};
  T sum_g = 0, sum_gx = 0;
#pragma omp simd reduction(+ : sum_g, sum_gx)
  for (int64_t i = 0; i < c; ++i) {
    const T x = (r[i] - centre) * rstd, g = d_out[i] * weight[i];
    sum_g += g;
    sum_gx += g * x;
    d_weight[i] += d_out[i] * x;
    d_bias[i] += d_out[i];
  }
  const T mean_g = mean ? sum_g / static_cast<T>(c) : T{0};
  const T mean_gx = sum_gx / static_cast<T>(c);
  const auto through = [&](int64_t i) {
    const T x = (r[i] - centre) * rstd, g = d_out[i] * weight[i];
    return rstd * (g - mean_g - x * mean_gx);
  };
  if (d_residual_in) {
#pragma omp simd
    for (int64_t i = 0; i < c; ++i) d_residual[i] = d_residual_in[i] + through(i);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < c; ++i) d_residual[i] = through(i);
  }
}

template <class T>
KINOE_SIMD void add_groups(T* sum, const T* groups, int64_t count, int64_t stride, int64_t c,
                           bool accumulate) {
  if (!accumulate) std::fill(sum, sum + c, T{0});
  for (int64_t g = 0; g < count; ++g) {
    const T* group = groups + g * stride;
#pragma omp simd
    for (int64_t i = 0; i < c; ++i) sum[i] += group[i];
  }
}

template <class T>
void forward(const NormForward& a) {
  const int64_t n = a.out.rows(), c = a.out.columns();
  T* out = a.out.as<T>();
  T* residual_out = a.branch ? a.residual_out.as<T>() : nullptr;
  const T* residual = a.residual.as<T>();
  const T* branch = a.branch ? a.branch.as<T>() : nullptr;
  const T* weight = a.weight.as<T>();
  const T* bias = a.bias ? a.bias.as<T>() : nullptr;
  T* mean = a.mean ? a.mean.as<T>() : nullptr;
  T* rstd = a.rstd.as<T>();
#pragma omp parallel for if (n * c > kParallelWork)
  for (int64_t row = 0; row < n; ++row) {
    const int64_t at = row * c;
    if (branch) add_row(residual_out + at, residual + at, branch + at, c);
    const T* r = branch ? residual_out + at : residual + at;
    norm_row(out + at, mean ? mean + row : nullptr, rstd + row, r, weight, bias, static_cast<T>(a.eps), c);
  }
}

template <class T>
void backward(const NormBackward& a) {
  const int64_t n = a.d_residual.rows(), c = a.d_residual.columns();
  const int64_t groups = std::min(n, kGroups);
  T* partials = static_cast<T*>(a.scratch.data);  // [groups, 2, c]: d_weight, d_bias
  T* d_residual = a.d_residual.as<T>();
  const T* d_residual_in = a.d_residual_in ? a.d_residual_in.as<T>() : nullptr;
  const T* d_out = a.d_out.as<T>();
  const T* r = a.residual.as<T>();
  const T* weight = a.weight.as<T>();
  const T* mean = a.mean ? a.mean.as<T>() : nullptr;
  const T* rstd = a.rstd.as<T>();
#pragma omp parallel for if (n * c > kParallelWork)
  for (int64_t group = 0; group < groups; ++group) {
    T* d_weight = partials + group * 2 * c;
    std::fill(d_weight, d_weight + 2 * c, T{0});
    for (int64_t row = group * n / groups; row < (group + 1) * n / groups; ++row) {
      const int64_t at = row * c;
      backward_row(d_residual + at, d_weight, d_weight + c, d_residual_in ? d_residual_in + at : nullptr,
                   d_out + at, r + at, weight, mean ? mean + row : nullptr, rstd[row], c);
    }
  }
  add_groups(a.d_weight.as<T>(), partials, groups, 2 * c, c, a.accumulate);
  if (a.d_bias) add_groups(a.d_bias.as<T>(), partials + c, groups, 2 * c, c, a.accumulate);
}

}  // namespace

size_t cpu::norm_backward_scratch_bytes(int64_t rows, int64_t columns) {
  return static_cast<size_t>(std::min(rows, kGroups) * 2 * columns) * sizeof(double);
}

void cpu::norm_forward(const Context& /*ctx*/, const NormForward& args) {
  check(args);
  with_scalar("norm_forward", args.out.dtype, [&](auto scalar) { forward<decltype(scalar)>(args); });
}

void cpu::norm_backward(const Context& /*ctx*/, const NormBackward& args) {
  check(args);
  require_scratch({"norm_backward", "scratch", args.scratch},
                  norm_backward_scratch_bytes(args.d_residual.rows(), args.d_residual.columns()));
  with_scalar("norm_backward", args.d_residual.dtype, [&](auto scalar) { backward<decltype(scalar)>(args); });
}

}  // namespace kinoe
