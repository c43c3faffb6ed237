// Softmax and cross-entropy on the CPU, one row at a time, rows in parallel.
//
//   m = max_v x_v,  s = sum_v exp(x_v - m),  loss = m + log s - x_target,  dx_v = d_loss (exp(x_v - m) / s - [v == target])
//
// Subtracting the maximum keeps every exponential in [0, 1]. s is summed in vector lanes over blocks, blocks in fp64:
// a hundred thousand fp32 additions in a row would lose digits. With a gradient the exponentials take the place of the
// logits in the first pass, so that each is computed once. A NaN or +Inf among the logits gives a NaN loss.
#include "kernels/crossentropy.h"

#include <algorithm>
#include <cmath>

#include "kernels/common/arguments.h"
#include "kernels/common/cpu.h"
#include "kernels/common/simd.h"
#include "kernels/common/vec_math.h"

namespace kinoe {

void check(const CrossEntropy& a) {
  const char* op = "cross_entropy";
  const int64_t n = a.logits.rows();
  require_matrix({op, "logits", a.logits}, a.logits.dtype, n, a.logits.columns());
  CHECK(a.vocab_size > 0 && a.vocab_size <= a.logits.columns(), op, ": vocab_size ", a.vocab_size,
        " in rows of ", a.logits.columns());
  require_size({op, "targets", a.targets}, DType::i32, n);
  require_size({op, "losses", a.losses}, accumulator_of(a.logits.dtype), n);
  require_size({op, "bad_target", a.bad_target}, DType::i64, 1);
}

void check(const LossSum& a) {
  const char* op = "loss_sum";
  require_size({op, "sum", a.sum}, DType::i64, 1);
  require_size({op, "count", a.count}, DType::i64, 1);
  require_size({op, "overflow", a.overflow}, DType::i64, 1);
  require_size({op, "losses", a.losses}, accumulator_of(a.losses.dtype), a.losses.size());
  require_size({op, "targets", a.targets}, DType::i32, a.losses.size());
}

namespace {

constexpr int64_t kBlock = 1024;

template <class T>
KINOE_SIMD T largest(const T* x, int64_t v) {
  T m = x[0];
#pragma omp simd reduction(max : m)
  for (int64_t i = 0; i < v; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

template <class T>
KINOE_SIMD double sum_exp(const T* x, T m, int64_t v) {
  double total = 0;
  for (int64_t begin = 0; begin < v; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, v);
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) sum += vec_exp(x[i] - m);
    total += static_cast<double>(sum);
  }
  return total;
}

/// The same sum; the exponentials replace x.
template <class T>
KINOE_SIMD double exp_in_place(T* x, T m, int64_t v) {
  double total = 0;
  for (int64_t begin = 0; begin < v; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, v);
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) {
      x[i] = vec_exp(x[i] - m);
      sum += x[i];
    }
    total += static_cast<double>(sum);
  }
  return total;
}

template <class T>
KINOE_SIMD void scale_row(T* x, T factor, int64_t v) {
#pragma omp simd
  for (int64_t i = 0; i < v; ++i) x[i] *= factor;
}

template <class T>
T loss_of_row(T* x, int64_t target, const CrossEntropy& a) {
  const int64_t v = a.vocab_size;
  const T m = largest(x, v);
  const double at_target = static_cast<double>(x[target]);
  const double sum = a.with_gradient ? exp_in_place(x, m, v) : sum_exp(x, m, v);
  if (a.with_gradient) {
    scale_row(x, static_cast<T>(static_cast<double>(a.d_loss) / sum), v);
    x[target] -= static_cast<T>(a.d_loss);
    std::fill(x + v, x + a.logits.columns(), T{0});
  }
  return static_cast<T>(std::log(sum) + (static_cast<double>(m) - at_target));
}

template <class T>
void run(const CrossEntropy& a) {
  const int64_t n = a.logits.rows(), pitch = a.logits.columns();
  T* logits = a.logits.as<T>();
  T* losses = a.losses.as<T>();
  const int32_t* targets = a.targets.as<int32_t>();
  int64_t bad = 0;
#pragma omp parallel for schedule(dynamic, 4) reduction(max : bad) if (n * pitch > kParallelWork)
  for (int64_t row = 0; row < n; ++row) {
    T* x = logits + row * pitch;
    const int64_t target = targets[row];
    if (target >= 0 && target < a.vocab_size) {
      losses[row] = loss_of_row(x, target, a);
      continue;
    }
    if (target != -1) bad = std::max(bad, row + 1);
    losses[row] = 0;
    if (a.with_gradient) std::fill(x, x + pitch, T{0});
  }
  int64_t& flag = *a.bad_target.as<int64_t>();
  flag = std::max(flag, bad);
}

template <class T>
void sum_losses(const LossSum& a) {
  const T* losses = a.losses.as<T>();
  const int32_t* targets = a.targets.as<int32_t>();
  double sum = 0;
  int64_t count = 0;
  for (int64_t row = 0; row < a.losses.size(); ++row)
    if (targets[row] >= 0) {
      sum += static_cast<double>(losses[row]);
      ++count;
    }
  if (std::abs(sum) <= static_cast<double>(a.losses.size()) * kLossLimit)
    *a.sum.as<int64_t>() += std::llrint(sum / kLossUnit);
  else
    *a.overflow.as<int64_t>() = 1;
  *a.count.as<int64_t>() += count;
}

}  // namespace

void cpu::cross_entropy(const Context& /*ctx*/, const CrossEntropy& args) {
  check(args);
  with_scalar("cross_entropy", args.logits.dtype, [&](auto scalar) { run<decltype(scalar)>(args); });
}

void cpu::loss_sum(const Context& /*ctx*/, const LossSum& args) {
  check(args);
  with_scalar("loss_sum", args.losses.dtype, [&](auto scalar) { sum_losses<decltype(scalar)>(args); });
}

}  // namespace kinoe
