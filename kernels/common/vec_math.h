// exp for vectorised loops of the CPU backend.
//
// The C library's expf is a call, which keeps a loop scalar. This one is straight-line arithmetic on floats and their
// bits, so a KINOE_SIMD loop that uses it becomes vector code. In fp64, where gradients are checked, it is std::exp.
// It is the only transcendental that inner loops need: GELU's tanh and SiLU are written with it.
#pragma once

#include <bit>
#include <cmath>

#include "kernels/common/simd.h"

namespace kinoe {

/// e^x within 1 ulp, with and without fused multiply-add, also where the result is subnormal; 0 below that,
/// +Inf above, NaN for NaN.
///
/// x = n ln2 + r with |r| <= ln2 / 2; e^r by a polynomial of degree 6 whose relative error is 2^-28 (least squares on
/// Chebyshev nodes, reweighted towards the largest error); times 2^n in two factors, as n may leave the exponent's range.
KINOE_INLINE float vec_exp(float x) {
  x = x > 89.0F ? 89.0F : x;  // e^89 is already +Inf; a comparison with NaN is false and lets it pass
  x = x < -104.0F ? -104.0F : x;
  // Adding 1.5 * 2^23 leaves no fraction bits: the sum's low bits are the nearest integer.
  constexpr float kShift = 0x1.8p23F;
  const float shifted = x * 0x1.715476p0F + kShift;
  const float n = shifted - kShift;
  const uint32_t k = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kShift);
  // ln2 in two parts; n times the first is exact.
  const float r = (x - n * 0x1.63p-1F) + n * 0x1.bd0106p-13F;
  float p = 0x1.6a23c4p-10F;
  p = p * r + 0x1.123a22p-7F;
  p = p * r + 0x1.5558f4p-5F;
  p = p * r + 0x1.555492p-3F;
  p = p * r + 0x1.fffffcp-2F;
  const float e = (p * (r * r) + r) + 1.0F;
  const uint32_t half = static_cast<uint32_t>(static_cast<int32_t>(k) >> 1);
  const float scale1 = std::bit_cast<float>((half + 127U) << 23);
  const float scale2 = std::bit_cast<float>((k - half + 127U) << 23);
  return e * scale1 * scale2;
}

inline double vec_exp(double x) { return std::exp(x); }

}  // namespace kinoe
