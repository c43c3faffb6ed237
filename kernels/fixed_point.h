// Sums of gradients that do not depend on the order of their terms: in fixed point, as int64.
//
//   x       = value / kGradientUnit, rounded to nearest even       kGradientUnit = 2^-50
//   sums[i] = x      (store: the first term)      or      sums[i] += x
//   value   = sum * kGradientUnit, rounded to nearest even
//
// Integer addition is associative: any order and grouping of the terms, over micro-batches and over ranks, gives the
// same bits, and so does either backend. A term is rounded by at most 2^-51.
#pragma once

#include "kernels/common/cost.h"
#include "kernels/common/dispatch.h"
#include "kernels/common/fixed.h"

namespace kinoe {

/// The bound of every |value| where a sum has `slots` terms. Then |x| < 2^62 / slots + 1/2 (and the quotient's own
/// rounding), a sum of them is below 2^63: nothing ever wraps.
constexpr double gradient_limit(int64_t slots) { return 0x1p12 / static_cast<double>(slots); }

struct FixedPointAdd {
  Tensor sums;         // [n] int64; must not overlap values
  Tensor values;       // [n] fp32 (or fp64)
  bool store = false;  // sums are written, not added to: what they held is not read
  double limit = 0;    // gradient_limit(slots); greater than 0, at most 2^12
  /// [1] int64: set to 1 where some |value| is not below limit, NaN and Inf included; never cleared. Such an element
  /// counts as 0.
  Tensor overflow;
};

struct FixedPointToFloat {
  Tensor values;  // [n] fp32 (or fp64); must not overlap sums
  Tensor sums;    // [n] int64
};

/// Throws unless types and shapes are as stated above; both backends call it first.
void check(const FixedPointAdd& args);
void check(const FixedPointToFloat& args);

KINOE_OPERATION(fixed_point_add, FixedPointAdd)
KINOE_OPERATION(fixed_point_to_float, FixedPointToFloat)

/// Of fp32 values.
inline Cost fixed_point_add_cost(int64_t n, bool store) {
  return {static_cast<double>(n) * (store ? 12.0 : 20.0), static_cast<double>(n) * (store ? 1.0 : 2.0)};
}
inline Cost fixed_point_to_float_cost(int64_t n) {
  return {static_cast<double>(n) * 12.0, static_cast<double>(n)};
}

}  // namespace kinoe
