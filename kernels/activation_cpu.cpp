// GELU and SwiGLU on the CPU, written with one exponential each.
//
// 0.5 (1 + tanh u) is the logistic function s(2u) = 1 / (1 + exp(-2u)), which keeps its relative precision where the
// tanh form cancels. With z = 2 sqrt(2/pi) (x + 0.044715 x^3) and s = s(z):
//   gelu(x) = x s,   gelu'(x) = s + x s (1 - s) z'
//   silu(x) = x s(x),   silu'(x) = s(x) (1 + x (1 - s(x)))
#include "kernels/activation.h"

#include <algorithm>

#include "kernels/common/arguments.h"
#include "kernels/common/cpu.h"
#include "kernels/common/simd.h"
#include "kernels/common/vec_math.h"

namespace kinoe {

void check(const GeluForward& a) {
  require_matrix({"gelu_forward", "out", a.out}, a.out.dtype, a.out.rows(), a.out.columns());
  require_matrix({"gelu_forward", "x", a.x}, a.out.dtype, a.out.rows(), a.out.columns());
}

void check(const GeluBackward& a) {
  const char* op = "gelu_backward";
  const DType type = a.dx.dtype;
  require_matrix({op, "dx", a.dx}, type, a.dx.rows(), a.dx.columns());
  require_matrix({op, "d_out", a.d_out}, type, a.dx.rows(), a.dx.columns());
  require_matrix({op, "x", a.x}, type, a.dx.rows(), a.dx.columns());
}

void check(const SwigluForward& a) {
  require_matrix({"swiglu_forward", "out", a.out}, a.out.dtype, a.out.rows(), a.out.columns());
  require_matrix({"swiglu_forward", "gate_up", a.gate_up}, a.out.dtype, a.out.rows(), 2 * a.out.columns());
}

void check(const SwigluBackward& a) {
  const char* op = "swiglu_backward";
  const DType type = a.d_out.dtype;
  require_matrix({op, "d_out", a.d_out}, type, a.d_out.rows(), a.d_out.columns());
  require_matrix({op, "d_gate_up", a.d_gate_up}, type, a.d_out.rows(), 2 * a.d_out.columns());
  require_matrix({op, "gate_up", a.gate_up}, type, a.d_out.rows(), 2 * a.d_out.columns());
}

namespace {

template <class T>
KINOE_INLINE T logistic(T x) {
  return T{1} / (T{1} + vec_exp(-x));
}

template <class T>
inline constexpr T kTwoRoot2OverPi = static_cast<T>(1.5957691216057307117597842397375);  // 2 sqrt(2 / pi)
template <class T>
inline constexpr T kCubic = static_cast<T>(0.044715);

template <class T>
KINOE_SIMD void gelu(T* out, const T* x, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const T z = kTwoRoot2OverPi<T> * (x[i] + kCubic<T> * x[i] * x[i] * x[i]);
    out[i] = x[i] * logistic(z);
  }
}

template <class T>
KINOE_SIMD void gelu_gradient(T* dx, const T* d_out, const T* in, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    // From 16 on the slope is 0 or 1 in every precision; unlimited, x^2 would overflow and give 0 * Inf.
    const T below = in[i] > T{16} ? T{16} : in[i];
    const T x = below < T{-16} ? T{-16} : below;
    const T s = logistic(kTwoRoot2OverPi<T> * (x + kCubic<T> * x * x * x));
    const T slope = kTwoRoot2OverPi<T> * (T{1} + 3 * kCubic<T> * x * x);
    dx[i] = d_out[i] * (s + x * s * (T{1} - s) * slope);
  }
}

template <class T>
KINOE_SIMD void swiglu_row(T* out, const T* gate, const T* up, int64_t f) {
#pragma omp simd
  for (int64_t i = 0; i < f; ++i) out[i] = gate[i] * logistic(gate[i]) * up[i];
}

template <class T>
KINOE_SIMD void swiglu_gradient_row(T* d_gate, T* d_up, const T* d_out, const T* gate, const T* up,
                                    int64_t f) {
#pragma omp simd
  for (int64_t i = 0; i < f; ++i) {
    const T g = gate[i], u = up[i], s = logistic(g);
    d_gate[i] = d_out[i] * u * s * (T{1} + g * (T{1} - s));
    d_up[i] = d_out[i] * g * s;
  }
}

/// Elementwise operations on n elements, in blocks that threads share out.
constexpr int64_t kBlock = 4096;

template <class Run>
void in_blocks(int64_t n, Run run) {
#pragma omp parallel for if (n > kParallelWork)
  for (int64_t begin = 0; begin < n; begin += kBlock) run(begin, std::min(kBlock, n - begin));
}

}  // namespace

void cpu::gelu_forward(const Context& /*ctx*/, const GeluForward& args) {
  check(args);
  with_scalar("gelu_forward", args.out.dtype, [&](auto scalar) {
    using T = decltype(scalar);
    T* out = args.out.as<T>();
    const T* x = args.x.as<T>();
    in_blocks(args.out.size(), [&](int64_t begin, int64_t n) { gelu(out + begin, x + begin, n); });
  });
}

void cpu::gelu_backward(const Context& /*ctx*/, const GeluBackward& args) {
  check(args);
  with_scalar("gelu_backward", args.dx.dtype, [&](auto scalar) {
    using T = decltype(scalar);
    T* dx = args.dx.as<T>();
    const T* d_out = args.d_out.as<T>();
    const T* x = args.x.as<T>();
    in_blocks(args.dx.size(),
              [&](int64_t begin, int64_t n) { gelu_gradient(dx + begin, d_out + begin, x + begin, n); });
  });
}

void cpu::swiglu_forward(const Context& /*ctx*/, const SwigluForward& args) {
  check(args);
  with_scalar("swiglu_forward", args.out.dtype, [&](auto scalar) {
    using T = decltype(scalar);
    const int64_t n = args.out.rows(), f = args.out.columns();
    T* out = args.out.as<T>();
    const T* gate_up = args.gate_up.as<T>();
#pragma omp parallel for if (n * f > kParallelWork)
    for (int64_t row = 0; row < n; ++row)
      swiglu_row(out + row * f, gate_up + 2 * row * f, gate_up + 2 * row * f + f, f);
  });
}

void cpu::swiglu_backward(const Context& /*ctx*/, const SwigluBackward& args) {
  check(args);
  with_scalar("swiglu_backward", args.d_out.dtype, [&](auto scalar) {
    using T = decltype(scalar);
    const int64_t n = args.d_out.rows(), f = args.d_out.columns();
    T* d_gate_up = args.d_gate_up.as<T>();
    const T* d_out = args.d_out.as<T>();
    const T* gate_up = args.gate_up.as<T>();
#pragma omp parallel for if (n * f > kParallelWork)
    for (int64_t row = 0; row < n; ++row) {
      const int64_t at = 2 * row * f;
      swiglu_gradient_row(d_gate_up + at, d_gate_up + at + f, d_out + row * f, gate_up + at, gate_up + at + f,
                          f);
    }
  });
}

}  // namespace kinoe
