// What fixed point should give, in integers alone; no rounding of the machine's floating point is used.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/common/fixed.h"
#include "test/op_harness.h"

namespace kinoe::optest {

/// magnitude / 2^shift, rounded to nearest even.
inline uint64_t shifted_to_even(uint64_t magnitude, int shift) {
  if (shift <= 0) return magnitude << -shift;
  if (shift > 64) return 0;
  const auto wide = static_cast<unsigned __int128>(magnitude);
  const auto quotient = static_cast<uint64_t>(wide >> shift);
  const unsigned __int128 rest = wide - (static_cast<unsigned __int128>(quotient) << shift),
                          half = static_cast<unsigned __int128>(1) << (shift - 1);
  return quotient + (rest > half || (rest == half && quotient % 2 == 1) ? 1 : 0);
}

/// value / 2^-50, rounded to nearest even; |value| < 2^12.
inline int64_t exact_fixed(double value) {
  int exponent = 0;
  const double fraction = std::frexp(std::abs(value), &exponent);  // value = fraction 2^exponent
  const auto digits = static_cast<uint64_t>(std::ldexp(fraction, 53));
  const auto x = static_cast<int64_t>(shifted_to_even(digits, 53 - 50 - exponent));
  return value < 0 ? -x : x;
}

/// The number of `digits` binary digits nearest to sum * 2^-50.
inline double nearest_of_fixed(int64_t sum, int digits) {
  const uint64_t magnitude = sum < 0 ? ~static_cast<uint64_t>(sum) + 1 : static_cast<uint64_t>(sum);
  const int shift = std::max(0, static_cast<int>(std::bit_width(magnitude)) - digits);
  const double x = std::ldexp(static_cast<double>(shifted_to_even(magnitude, shift)), shift - 50);
  return sum < 0 ? -x : x;
}

/// Sums of all magnitudes and signs; among them ties of fp32 and fp64, what lies beside them, the ends of the range.
inline std::vector<int64_t> telling_sums(size_t n) {
  std::vector<int64_t> sums(n);
  for (size_t i = 0; i < n; ++i) {
    const Philox4 w = philox(Random::default_seed(), 9, i);
    const uint64_t bits = static_cast<uint64_t>(w.v[0]) << 32 | w.v[1];
    uint64_t x = bits >> (w.v[2] % 64);
    for (const int digits : {24, 53}) {
      const int tail = static_cast<int>(std::bit_width(x)) - digits;
      if (tail < 1 || w.v[3] % 4 == 0) continue;
      // Half a unit of the last place behind the leading digits, one more or one less.
      x = (x >> tail << tail) + (uint64_t{1} << (tail - 1)) + static_cast<uint64_t>(w.v[3] % 4) - 2;
      break;
    }
    sums[i] = static_cast<int64_t>(x);
  }
  const int64_t most = std::numeric_limits<int64_t>::max();
  const std::vector<int64_t> ends = {0, 1, -1, most, -most, -most - 1, (1 << 24) + 1, (int64_t{1} << 53) + 1};
  std::copy_n(ends.begin(), std::min(ends.size(), n), sums.begin());
  return sums;
}

}  // namespace kinoe::optest
