// AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), gated and hashed.
//
//   g = gradient * grad_scale
//   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
//   p = p - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p)
//   weight = bf16(p), round to nearest even          (where weights are not the masters themselves)
//
// Never applied: when StepState::halted or skipped is set nothing is written but the hash of the unchanged masters.
// The hash is the wrapping sum over all elements of mix64(mix64(tensor_key + index) + fp32 bits of the new master):
// order-free, so that ranks can add their parts.
#pragma once

#include <cstddef>
#include <limits>

#include "kernels/common/cost.h"
#include "kernels/common/dispatch.h"
#include "kernels/common/fixed.h"
#include "kernels/common/rng.h"

namespace kinoe {

/// What the device itself decides about a step; lives in device memory, copied to the host one step late.
struct StepState {
  // What ranks add up: integers, so that no order can be seen in their sums.
  int64_t loss_sum = 0;       // in kLossUnit nats, over all target tokens of the global batch: see loss_of
  int64_t target_tokens = 0;  // of the global batch
  // From embedding and cross-entropy: 1 + index, 0 = none; of several ranks a sum of these.
  int64_t bad_token = 0;
  int64_t overflow = 0;  // not 0: a loss or a gradient was not finite, or beyond the range of its fixed point

  double grad_norm = 0;       // of the mean loss's gradient, before clipping
  uint64_t weights_hash = 0;  // added to by adamw
  float grad_scale = 0;       // nominal / true tokens, times the clip factor
  int32_t halted = 0;         // sticky: a step was not finite, or bad; no updates until the host clears it
  int32_t skipped = 0;        // this step had no target token: update not applied, not sticky
  int32_t padding = 0;
};
/// The fields that ranks add up, at the front of StepState.
inline constexpr int64_t kStepSums = 4;
static_assert(offsetof(StepState, overflow) == (kStepSums - 1) * sizeof(int64_t));

/// The loss summed over all target tokens, in nats; NaN when it, or a gradient, had no place in its fixed point.
inline double loss_of(const StepState& state) {
  if (state.overflow != 0) return std::numeric_limits<double>::quiet_NaN();
  return static_cast<double>(state.loss_sum) * kLossUnit;
}

/// Derives grad_scale, grad_norm, halted and skipped from the reduced sums and the raw gradient norm.
struct StepGate {
  Tensor state;               // one StepState as int32; its sums are complete
  Tensor raw_norm;            // [1] fp64: norm of the gradients as accumulated: of sum(loss) / nominal_tokens
  double nominal_tokens = 0;  // the divisor used in the backward pass
  double grad_clip = 0;       // 0: no clipping
};

/// A run of elements of one tensor inside a flat range. Between segments lies padding, which is never touched.
struct AdamWSegment {
  int64_t begin = 0;  // offsets into the flat tensors below
  int64_t end = 0;
  uint64_t tensor_key = 0;  // stable_key(Hugging Face name)
  int64_t first_index = 0;  // logical index within the tensor of the element at `begin`
  float weight_decay = 0;   // already zero for tensors that do not decay
  int32_t padding = 0;
};

struct AdamW {
  Tensor masters;    // [n] fp32 (or fp64)
  Tensor m;          // [n] fp32 or bf16 (fp64 with fp64 masters)
  Tensor v;          // [n] the type of m
  Tensor gradients;  // [n] fp32 (or fp64)
  Tensor weights;    // [n] bf16, or absent when the masters are the weights
  Tensor segments;   // AdamWSegment[segment_count] as int32: sorted, disjoint, in the backend's memory
  int64_t segment_count = 0;
  Tensor state;  // one StepState as int32; grad_scale, halted, skipped are read, weights_hash is added to
  float lr = 0;
  float beta1 = 0;
  float beta2 = 0;
  float eps = 0;
  int64_t t = 0;               // 1 for the first applied update
  uint64_t rounding_seed = 0;  // stochastic rounding of bf16 m and v: see rounding_word
};

/// Throws unless types and shapes are as stated above; both backends call it first.
void check(const StepGate& args);
void check(const AdamW& args);

KINOE_OPERATION(step_gate, StepGate)
KINOE_OPERATION(adamw, AdamW)

/// One element's part of the hash of all masters.
KINOE_HD inline uint64_t master_hash(uint64_t tensor_key, int64_t index, uint32_t bits) {
  return mix64(mix64(tensor_key + static_cast<uint64_t>(index)) + bits);
}

/// The 32 random bits of one element: its low half rounds m, its high half v. One Philox block serves four elements.
KINOE_HD inline uint32_t rounding_word(uint64_t seed, uint64_t tensor_key, int64_t index) {
  return philox(seed, tensor_key, static_cast<uint64_t>(index) >> 2).v[index & 3];
}

/// Up with the probability of the cut-off fraction: adds 16 random bits below the significand of bf16 and truncates.
/// Inf and NaN as to_bf16 gives them.
KINOE_HD inline bf16 to_bf16_stochastic(float value, uint32_t random16) {
#if defined(__CUDA_ARCH__)
  const uint32_t u = __float_as_uint(value);
#else
  const uint32_t u = std::bit_cast<uint32_t>(value);
#endif
  if ((u & 0x7f800000U) == 0x7f800000U) return to_bf16(value);
  return bf16{static_cast<uint16_t>((u + (random16 & 0xffffU)) >> 16)};
}

/// fp32 masters, gradients and moments; bf16 weights written where there are any.
inline Cost adamw_cost(int64_t n, size_t moment_bytes, bool bf16_weights) {
  const double per = 4.0 + 8.0 + 4.0 * static_cast<double>(moment_bytes) + (bf16_weights ? 2.0 : 0.0);
  return {static_cast<double>(n) * per, static_cast<double>(n) * 14.0};
}

}  // namespace kinoe
