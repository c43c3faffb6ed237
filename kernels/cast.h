// Conversions between element types: to a narrower one rounds to nearest even, NaN stays NaN; to a wider one is exact.
// Not offered: fp64 to bf16, which would be rounded twice on its way through fp32.
#pragma once

#include "kernels/common/cost.h"
#include "kernels/common/dispatch.h"

namespace kinoe {

struct Cast {
  Tensor to;    // [n] fp32 or bf16 (fp64 on the CPU)
  Tensor from;  // [n] fp32 or bf16 (fp64 on the CPU)
};

/// Throws unless types and shapes are as stated above; both backends call it first.
void check(const Cast& args);

KINOE_OPERATION(cast, Cast)

inline Cost cast_cost(int64_t n, size_t from, size_t to) {
  return {static_cast<double>(n) * static_cast<double>(from + to), 0};
}

}  // namespace kinoe
