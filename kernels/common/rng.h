// Counter-based random numbers: the value at (seed, stream, index) is a pure function, so any rank can make any part
// of anything, in any order, with the same bits on host and device.
//
// Philox4x32-10: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>

#include "kernels/common/dtype.h"

namespace kinoe {

struct Philox4 {
  uint32_t v[4];
};

/// Ten rounds over the 128-bit counter (index, stream) with the 64-bit key `seed`.
KINOE_HD inline Philox4 philox(uint64_t seed, uint64_t stream, uint64_t index) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32);
  uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53U} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57U} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return {{c0, c1, c2, c3}};
}

/// Uniform in (0, 1): 23 bits and a half, exact in fp32, so never 0 and never 1.
KINOE_HD inline float uniform01(uint32_t bits) { return (static_cast<float>(bits >> 9) + 0.5F) * 0x1p-23F; }

/// A full-avalanche mix of 64 bits (the finalizer of splitmix64, Vigna's constants of MurmurHash3 variant 13).
KINOE_HD inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

/// Two independent standard normals (Box and Muller), host only: libm's log and cos are not the device's.
inline std::array<float, 2> normal_pair(uint32_t a, uint32_t b) {
  const double radius = std::sqrt(-2.0 * std::log(static_cast<double>(uniform01(a))));
  const double angle = 6.283185307179586 * static_cast<double>(uniform01(b));
  return {static_cast<float>(radius * std::cos(angle)), static_cast<float>(radius * std::sin(angle))};
}

/// A stable 64-bit name for a tensor (FNV-1a), the key of its random stream and of its hash.
constexpr uint64_t stable_key(std::string_view name) {
  uint64_t h = 0xCBF29CE484222325ULL;
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  return h;
}

}  // namespace kinoe
