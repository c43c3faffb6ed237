// What an operation must move and compute at least: the denominators of every speed figure.
#pragma once

namespace kinoe {

/// bytes: each input read once, each output written once. flops: multiply and add count two; only work the
/// mathematics asks for (a masked score costs nothing, a recomputed one is not counted twice).
struct Cost {
  double bytes = 0;
  double flops = 0;
};

constexpr Cost operator+(Cost a, Cost b) { return {a.bytes + b.bytes, a.flops + b.flops}; }
constexpr Cost operator*(double n, Cost c) { return {n * c.bytes, n * c.flops}; }

}  // namespace kinoe
