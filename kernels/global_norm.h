// The L2 norm of all gradients: fp64 partial sums per chunk of 16 Ki elements, then the sum of the partials, both in an
// order of the backend's that depends on the flat layout alone, not on threads, multiprocessors or ranks.
#pragma once

#include "kernels/common/cost.h"
#include "kernels/common/dispatch.h"

namespace kinoe {

/// Elements per chunk: buckets of parameters are whole numbers of chunks (trainer/parameters.h).
inline constexpr int64_t kChunk = int64_t{16} * 1024;

/// partials[i] = sum of squares of gradients[i * kChunk, (i + 1) * kChunk).
struct NormPartials {
  Tensor partials;   // [ceil(n / kChunk)] fp64
  Tensor gradients;  // [n] fp32 (or fp64)
};

/// norm[0] = sqrt(partials[order[0]] + partials[order[1]] + ...), added in an order given by m alone. With partials
/// gathered from ranks, each of which has its own chunks, `order` says where each chunk's is: the norm has the bits of
/// one rank's.
struct NormFinish {
  Tensor norm;      // [1] fp64
  Tensor partials;  // [m] fp64; with an order any number, those it does not name are not looked at
  /// [m] int64: indices into partials, all within it (the GPU does not check them); absent: 0, 1, ...
  Tensor order;
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
