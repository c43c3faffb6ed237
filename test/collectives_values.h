// What the tests of the collectives let ranks add up, and what comes out.
#pragma once

#include <cmath>
#include <vector>

#include "kernels/common/tensor.h"

namespace kinoe {

template <class T>
Tensor view(std::vector<T>& v) {
  return {v.data(), dtype_of<T>, {static_cast<int64_t>(v.size())}};
}

/// Element i of what rank r brings in: the sums of any number of ranks are exact in every type.
inline int64_t known(int rank, int64_t i) { return (i * 7 + rank * rank * 13) % 1001 - 500; }

template <class T>
T known_sum(int ranks, int64_t i) {
  int64_t sum = 0;
  for (int r = 0; r < ranks; ++r) sum += known(r, i);
  return static_cast<T>(sum);
}

template <class T>
std::vector<T> known_values(int rank, int64_t n) {
  std::vector<T> v(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) v[static_cast<size_t>(i)] = static_cast<T>(known(rank, i));
  return v;
}

/// Sums of these depend on the order of the summands: scales from 2^-39 to 2^-8, times 23 bits and a sign.
template <class T>
std::vector<T> random_values(uint64_t stream, int64_t n) {
  std::vector<T> v(static_cast<size_t>(n));
  uint64_t state = stream * 0x9E3779B97F4A7C15U + 1;
  for (T& x : v) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const auto bits = static_cast<int64_t>(state >> 20);
    x = std::ldexp(static_cast<T>(bits % 16777216 - 8388608), static_cast<int>(state >> 8 & 31U) - 39);
  }
  return v;
}

}  // namespace kinoe
