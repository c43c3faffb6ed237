// Vector code for the CPU backend: the same loops compiled for several instruction sets, chosen at load time.
//
// KINOE_SIMD in front of a function with plain loops makes GCC emit AVX-512, AVX2+FMA and baseline versions. An
// OpenMP region inside such a function is outlined without the clones, so the pattern is: the parallel loop outside, a
// KINOE_SIMD function for one row or one tile inside. Helpers used inside must be inlined: KINOE_INLINE.
// A clone is a property of the machine, not of the thread count: results repeat on the same machine.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(KINOE_NO_SIMD)
#define KINOE_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KINOE_SIMD
#endif

namespace kinoe {

/// Which of the versions this machine runs: sums of floats have other bits in another.
inline const char* vector_units() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(KINOE_NO_SIMD)
  if (__builtin_cpu_supports("x86-64-v4")) return "x86-64-v4";
  if (__builtin_cpu_supports("x86-64-v3")) return "x86-64-v3";
#endif
  return "baseline";
}

}  // namespace kinoe

#define KINOE_INLINE inline __attribute__((always_inline))
