// Rotary position embedding on the CPU: the table holds cos and sin of t w_i, the row of position t is shared by all
// heads. Backward multiplies by the transposed rotation: the sines with the other sign.
#include "kernels/rope.h"

#include <cmath>

#include "kernels/common/arguments.h"
#include "kernels/common/cpu.h"
#include "kernels/common/simd.h"

namespace kinoe {

void check(const Rope& a) {
  const char* op = "rope";
  CHECK(a.qkv.ndim == 3, op, ": qkv must be [B, T, (H + 2 Hkv) * D], is ", a.qkv.shape());
  CHECK(a.heads > 0 && a.kv_heads > 0, op, ": ", a.heads, " heads, ", a.kv_heads, " key/value heads");
  const int64_t d = a.table.ndim == 2 ? a.table.dim(1) : 0;
  CHECK(d > 0 && d % 2 == 0, op, ": table must be [T, D] with D even, is ", a.table.shape());
  require_type({op, "qkv", a.qkv}, a.qkv.dtype);
  CHECK(a.qkv.dim(2) == (a.heads + 2 * a.kv_heads) * d, op, ": qkv must have rows of (", a.heads, " + 2 * ",
        a.kv_heads, ") * ", d, ", is ", a.qkv.shape());
  require_table({op, "table", a.table}, accumulator_of(a.qkv.dtype), a.qkv.dim(1), d);
}

namespace {

/// Rotates `heads` consecutive heads of one position. sign: +1 forward, -1 backward.
template <class T>
KINOE_SIMD void rotate(T* x, const T* table, int64_t heads, int64_t d, T sign) {
  const int64_t half = d / 2;
  const T* cosine = table;
  const T* sine = table + half;
  for (int64_t h = 0; h < heads; ++h) {
    T* low = x + h * d;
    T* high = low + half;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const T a = low[i], b = high[i], s = sign * sine[i];
      low[i] = a * cosine[i] - b * s;
      high[i] = b * cosine[i] + a * s;
    }
  }
}

template <class T>
void run(const Rope& a) {
  const int64_t t = a.qkv.dim(1), n = a.qkv.dim(0) * t, pitch = a.qkv.dim(2), d = a.table.dim(1);
  T* qkv = a.qkv.as<T>();
  const T* table = a.table.as<T>();
  // Query and key heads are neighbours: one run of H + Hkv heads.
#pragma omp parallel for if (n * pitch > kParallelWork)
  for (int64_t i = 0; i < n; ++i)
    rotate(qkv + i * pitch, table + i % t * d, a.heads + a.kv_heads, d, a.backward ? T{-1} : T{1});
}

}  // namespace

template <class T>
std::vector<T> make_rope_table(int64_t positions, const std::vector<double>& frequencies) {
  std::vector<T> table;
  table.reserve(static_cast<size_t>(positions) * 2 * frequencies.size());
  for (int64_t t = 0; t < positions; ++t) {
    for (const double w : frequencies) table.push_back(static_cast<T>(std::cos(static_cast<double>(t) * w)));
    for (const double w : frequencies) table.push_back(static_cast<T>(std::sin(static_cast<double>(t) * w)));
  }
  return table;
}
template std::vector<float> make_rope_table<float>(int64_t positions, const std::vector<double>& frequencies);
template std::vector<double> make_rope_table<double>(int64_t positions,
                                                     const std::vector<double>& frequencies);

void cpu::rope(const Context& /*ctx*/, const Rope& args) {
  check(args);
  with_scalar("rope", args.qkv.dtype, [&](auto scalar) { run<decltype(scalar)>(args); });
}

}  // namespace kinoe
