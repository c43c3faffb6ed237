// Conversions between element types: fp32 to bf16 rounds to nearest even, NaN stays NaN; the others are exact.
#pragma once

#include "kernels/common/cost.h"
#include "kernels/common/dispatch.h"

namespace kinoe {

struct Cast {
  Tensor to;    // [n] fp32 or bf16 (fp64 on the CPU)
  Tensor from;  // [n] fp32 or bf16 (fp64 on the CPU)
};

KINOE_OPERATION(cast, Cast)

inline Cost cast_cost(int64_t n, size_t from, size_t to) {
  return {static_cast<double>(n) * static_cast<double>(from + to), 0};
}

}  // namespace kinoe
