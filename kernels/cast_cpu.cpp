// Conversions on the CPU. Between fp32 and fp64 the language's own rounding is to nearest even; bf16 is defined in
// kernels/common/dtype.h.
#include "kernels/cast.h"

#include <algorithm>
#include <type_traits>

#include "kernels/common/arguments.h"
#include "kernels/common/cpu.h"
#include "kernels/common/simd.h"

namespace kinoe {

void check(const Cast& a) {
  for (const DType type : {a.to.dtype, a.from.dtype})
    CHECK(type == DType::f32 || type == DType::bf16 || type == DType::f64, "cast: from ",
          name_of(a.from.dtype), " to ", name_of(a.to.dtype));
  CHECK(!(a.from.dtype == DType::f64 && a.to.dtype == DType::bf16),
        "cast: fp64 to bf16 would be rounded twice");
  require_type({"cast", "from", a.from}, a.from.dtype);
  require_size({"cast", "to", a.to}, a.to.dtype, a.from.size());
}

namespace {

KINOE_INLINE void convert(float& to, bf16 from) { to = to_float(from); }
KINOE_INLINE void convert(bf16& to, float from) { to = to_bf16(from); }
KINOE_INLINE void convert(float& to, double from) { to = static_cast<float>(from); }
KINOE_INLINE void convert(double& to, float from) { to = static_cast<double>(from); }
KINOE_INLINE void convert(double& to, bf16 from) { to = static_cast<double>(to_float(from)); }
template <class T>
KINOE_INLINE void convert(T& to, T from) {
  to = from;
}

template <class To, class From>
KINOE_SIMD void cast_run(To* to, const From* from, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) convert(to[i], from[i]);
}

template <class To, class From>
void run(const Cast& a) {
  constexpr int64_t kBlock = 16384;
  const int64_t n = a.from.size();
  To* to = a.to.as<To>();
  const From* from = a.from.as<From>();
#pragma omp parallel for if (n > 2 * kBlock)
  for (int64_t begin = 0; begin < n; begin += kBlock)
    cast_run(to + begin, from + begin, std::min(kBlock, n - begin));
}

template <class From>
void run_from(const Cast& a) {
  if (a.to.dtype == DType::f32) return run<float, From>(a);
  if (a.to.dtype == DType::f64) return run<double, From>(a);
  if constexpr (!std::is_same_v<From, double>) run<bf16, From>(a);
}

}  // namespace

void cpu::cast(const Context& /*ctx*/, const Cast& args) {
  check(args);
  if (args.from.dtype == DType::f32) return run_from<float>(args);
  if (args.from.dtype == DType::f64) return run_from<double>(args);
  run_from<bf16>(args);
}

}  // namespace kinoe
