// The L2 norm of all gradients, summed in one canonical order: fp64 partial sums per chunk of 16 Ki elements, then the
// partials in chunk order. The result depends on the flat layout alone, not on threads, blocks or ranks.
#pragma once

#include "kernels/common/cost.h"
#include "kernels/common/dispatch.h"

namespace kinoe {

/// Elements per chunk: the unit of sharding, of the norm and of the optimizer (DESIGN: buckets are cut into chunks).
inline constexpr int64_t kChunk = int64_t{16} * 1024;

/// partials[i] = sum of squares of gradients[i * kChunk, (i + 1) * kChunk).
struct NormPartials {
  Tensor partials;   // [ceil(n / kChunk)] fp64
  Tensor gradients;  // [n] fp32 (or fp64)
};

/// norm[0] = sqrt(partials[0] + partials[1] + ...), from left to right in a fixed tree.
struct NormFinish {
  Tensor norm;      // [1] fp64
  Tensor partials;  // [m] fp64
};

/// Throws unless types and shapes are as stated above; both backends call it first.
void check(const NormPartials& args);
void check(const NormFinish& args);

KINOE_OPERATION(norm_partials, NormPartials)
KINOE_OPERATION(norm_finish, NormFinish)

inline Cost norm_partials_cost(int64_t n) {
  return {4.0 * static_cast<double>(n), 2.0 * static_cast<double>(n)};
}

}  // namespace kinoe
