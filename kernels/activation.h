// GELU (tanh form) and SwiGLU.
//
//   gelu(x)   = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))           (Hendrycks and Gimpel, 2016)
//   swiglu    = silu(gate) * up,  silu(x) = x / (1 + exp(-x))             (Shazeer, 2020)
#pragma once

#include "kernels/common/cost.h"
#include "kernels/common/dispatch.h"

namespace kinoe {

struct GeluForward {
  Tensor out;  // [N, F]
  Tensor x;    // [N, F]; may be the same memory as out
};
struct GeluBackward {
  Tensor dx;     // [N, F]; may be the same memory as d_out
  Tensor d_out;  // [N, F]
  Tensor x;      // [N, F] the forward pass's input
};

struct SwigluForward {
  Tensor out;      // [N, F]
  Tensor gate_up;  // [N, 2F]: the row's F gates, then its F ups
};
struct SwigluBackward {
  Tensor d_gate_up;  // [N, 2F]; may be the same memory as gate_up
  Tensor d_out;      // [N, F]
  Tensor gate_up;    // [N, 2F]
};

/// Throws unless types and shapes are as stated above; both backends call it first.
void check(const GeluForward& args);
void check(const GeluBackward& args);
void check(const SwigluForward& args);
void check(const SwigluBackward& args);

KINOE_OPERATION(gelu_forward, GeluForward)
KINOE_OPERATION(gelu_backward, GeluBackward)
KINOE_OPERATION(swiglu_forward, SwigluForward)
KINOE_OPERATION(swiglu_backward, SwigluBackward)

inline Cost gelu_forward_cost(int64_t n, int64_t f, size_t element) {
  return {static_cast<double>(n * f) * static_cast<double>(element) * 2.0, static_cast<double>(n * f) * 8.0};
}
inline Cost gelu_backward_cost(int64_t n, int64_t f, size_t element) {
  return {static_cast<double>(n * f) * static_cast<double>(element) * 3.0, static_cast<double>(n * f) * 14.0};
}
inline Cost swiglu_forward_cost(int64_t n, int64_t f, size_t element) {
  return {static_cast<double>(n * f) * static_cast<double>(element) * 3.0, static_cast<double>(n * f) * 5.0};
}
inline Cost swiglu_backward_cost(int64_t n, int64_t f, size_t element) {
  return {static_cast<double>(n * f) * static_cast<double>(element) * 5.0, static_cast<double>(n * f) * 12.0};
}

}  // namespace kinoe
