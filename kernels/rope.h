// Rotary position embedding, in place on the packed projections.
//
// Head element i (i < D/2) is paired with i + D/2 (the half-split layout of Hugging Face's Llama; Su et al., 2021):
//   x[i]       <- x[i] cos(t w_i) - x[i + D/2] sin(t w_i)
//   x[i + D/2] <- x[i + D/2] cos(t w_i) + x[i] sin(t w_i)
// for every query and key head; values are left alone. The gradient is the rotation by the opposite angle.
#pragma once

#include <vector>

#include "kernels/common/cost.h"
#include "kernels/common/dispatch.h"

namespace kinoe {

struct Rope {
  Tensor qkv;    // [B, T, (H + 2 Hkv) * D], rows q | k | v; changed in place
  Tensor table;  // [>= T, D] fp32 (fp64 in fp64): cos(t w_0..D/2-1), then sin(t w_0..D/2-1)
  int64_t heads = 0;
  int64_t kv_heads = 0;
  bool backward = false;  // rotate by -t w_i
};

/// Throws unless types and shapes are as stated above; both backends call it first.
void check(const Rope& args);

KINOE_OPERATION(rope, Rope)

/// Host side of `table`: row-major [positions, D] from the D/2 angular frequencies w_i, angles computed in fp64.
template <class T>
std::vector<T> make_rope_table(int64_t positions, const std::vector<double>& frequencies);

inline Cost rope_cost(int64_t n, int64_t heads, int64_t kv_heads, int64_t d, size_t element) {
  const double rotated = static_cast<double>(n * (heads + kv_heads) * d);
  return {2.0 * rotated * static_cast<double>(element), 3.0 * rotated};
}

}  // namespace kinoe
