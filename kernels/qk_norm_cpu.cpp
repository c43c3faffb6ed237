// RMSNorm of query and key heads on the CPU: one head at a time, tokens in parallel.
//
// With x^ = x rstd, g = dy * weight and <.> the average over a head:
//   dx       = rstd (g - x^ <g x^>)
//   d_weight = sum over tokens and heads of dy x^
// The sums go into a fixed number of token groups, added in order: the bits do not depend on the threads.
#include "kernels/qk_norm.h"

#include <algorithm>
#include <cmath>

#include "kernels/common/arguments.h"
#include "kernels/common/cpu.h"
#include "kernels/common/simd.h"

namespace kinoe {
namespace {

/// The shapes that both directions share; returns D.
int64_t check_heads(const char* op, const Argument& qkv, const Tensor& raw, const Tensor& q_weight,
                    const Tensor& k_weight, int64_t heads, int64_t kv_heads) {
  CHECK(heads > 0 && kv_heads > 0, op, ": ", heads, " heads, ", kv_heads, " key/value heads");
  const DType type = qkv.tensor.dtype;
  const int64_t d = q_weight.size(), n = qkv.tensor.rows();
  require_size({op, "q_weight", q_weight}, type, d);
  require_size({op, "k_weight", k_weight}, type, d);
  require_matrix(qkv, type, n, (heads + 2 * kv_heads) * d);
  if (raw) require_matrix({op, "raw", raw}, type, n, (heads + kv_heads) * d);
  return d;
}

}  // namespace

void check(const QkNormForward& a) {
  const char* op = "qk_norm_forward";
  check_heads(op, {op, "qkv", a.qkv}, a.raw, a.q_weight, a.k_weight, a.heads, a.kv_heads);
}

void check(const QkNormBackward& a) {
  const char* op = "qk_norm_backward";
  const int64_t d =
      check_heads(op, {op, "d_qkv", a.d_qkv}, a.raw, a.q_weight, a.k_weight, a.heads, a.kv_heads);
  CHECK(static_cast<bool>(a.raw), op, ": raw is absent");
  const DType accumulator = accumulator_of(a.d_qkv.dtype);
  require_size({op, "d_q_weight", a.d_q_weight}, accumulator, d);
  require_size({op, "d_k_weight", a.d_k_weight}, accumulator, d);
}

namespace {

/// Token groups of the weight gradients.
constexpr int64_t kGroups = 32;

template <class T>
KINOE_INLINE T rstd_of(const T* x, T eps, int64_t d) {
  T squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < d; ++i) squares += x[i] * x[i];
  return T{1} / std::sqrt(squares / static_cast<T>(d) + eps);
}

template <class T>
KINOE_SIMD void norm_head(T* x, T* raw, const T* weight, T eps, int64_t d) {
  if (raw) std::copy(x, x + d, raw);
  const T rstd = rstd_of(x, eps, d);
#pragma omp simd
  for (int64_t i = 0; i < d; ++i) x[i] = x[i] * rstd * weight[i];
}

/// dy becomes dx; the head's part is added to d_weight.
template <class T>
KINOE_SIMD void backward_head(T* dy, T* d_weight, const T* x, const T* weight, T eps, int64_t d) {
  const T rstd = rstd_of(x, eps, d);
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < d; ++i) {
    const T xhat = x[i] * rstd;
    d_weight[i] += dy[i] * xhat;
    sum += dy[i] * weight[i] * xhat;
  }
  const T mean = sum / static_cast<T>(d);
#pragma omp simd
  for (int64_t i = 0; i < d; ++i) dy[i] = rstd * (dy[i] * weight[i] - x[i] * rstd * mean);
}

template <class T>
void forward(const QkNormForward& a) {
  const int64_t d = a.q_weight.size(), n = a.qkv.rows(), pitch = a.qkv.columns();
  const int64_t normed = a.heads + a.kv_heads;
  T* qkv = a.qkv.as<T>();
  T* raw = a.raw ? a.raw.as<T>() : nullptr;
  const T* q_weight = a.q_weight.as<T>();
  const T* k_weight = a.k_weight.as<T>();
#pragma omp parallel for if (n * pitch > kParallelWork)
  for (int64_t i = 0; i < n; ++i)
    for (int64_t h = 0; h < normed; ++h)
      norm_head(qkv + i * pitch + h * d, raw ? raw + (i * normed + h) * d : nullptr,
                h < a.heads ? q_weight : k_weight, static_cast<T>(a.eps), d);
}

template <class T>
void backward(const QkNormBackward& a) {
  const int64_t d = a.q_weight.size(), n = a.d_qkv.rows(), pitch = a.d_qkv.columns();
  const int64_t normed = a.heads + a.kv_heads, groups = std::min(n, kGroups);
  T* partials = static_cast<T*>(a.scratch.data);  // [groups, 2, D]: d_q_weight, d_k_weight
  T* d_qkv = a.d_qkv.as<T>();
  const T* raw = a.raw.as<T>();
  const T* q_weight = a.q_weight.as<T>();
  const T* k_weight = a.k_weight.as<T>();
#pragma omp parallel for if (n * pitch > kParallelWork)
  for (int64_t group = 0; group < groups; ++group) {
    T* sums = partials + group * 2 * d;
    std::fill(sums, sums + 2 * d, T{0});
    for (int64_t i = group * n / groups; i < (group + 1) * n / groups; ++i)
      for (int64_t h = 0; h < normed; ++h)
        backward_head(d_qkv + i * pitch + h * d, h < a.heads ? sums : sums + d, raw + (i * normed + h) * d,
                      h < a.heads ? q_weight : k_weight, static_cast<T>(a.eps), d);
  }
  const auto finish = [&](T* to, const T* from) {
    if (!a.accumulate) std::fill(to, to + d, T{0});
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t i = 0; i < d; ++i) to[i] += from[group * 2 * d + i];
  };
  finish(a.d_q_weight.as<T>(), partials);
  finish(a.d_k_weight.as<T>(), partials + d);
}

}  // namespace

size_t cpu::qk_norm_backward_scratch_bytes(int64_t rows, int64_t head_dim) {
  return static_cast<size_t>(std::min(rows, kGroups) * 2 * head_dim) * sizeof(double);
}

void cpu::qk_norm_forward(const Context& /*ctx*/, const QkNormForward& args) {
  check(args);
  with_scalar("qk_norm_forward", args.qkv.dtype, [&](auto scalar) { forward<decltype(scalar)>(args); });
}

void cpu::qk_norm_backward(const Context& /*ctx*/, const QkNormBackward& args) {
  check(args);
  require_scratch({"qk_norm_backward", "scratch", args.scratch},
                  qk_norm_backward_scratch_bytes(args.d_qkv.rows(), args.q_weight.size()));
  with_scalar("qk_norm_backward", args.d_qkv.dtype, [&](auto scalar) { backward<decltype(scalar)>(args); });
}

}  // namespace kinoe
