// Element types, and bfloat16 with the rounding of the GPU's own conversion instructions.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/common/check.h"

#if defined(__CUDACC__)
#define KINOE_HD __host__ __device__
#else
#define KINOE_HD
#endif

namespace kinoe {

/// f64 exists on the CPU only: gradients are checked in it.
enum class DType : uint8_t { f32, bf16, f64, i32, i64, u64 };

constexpr size_t size_of(DType type) {
  switch (type) {
    case DType::bf16: return 2;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f64:
    case DType::i64:
    case DType::u64: return 8;
  }
  return 0;
}

constexpr const char* name_of(DType type) {
  switch (type) {
    case DType::f32: return "fp32";
    case DType::bf16: return "bf16";
    case DType::f64: return "fp64";
    case DType::i32: return "int32";
    case DType::i64: return "int64";
    case DType::u64: return "uint64";
  }
  return "?";
}

/// The upper half of an IEEE float. Storage only: arithmetic is done in float.
struct bf16 {
  uint16_t bits = 0;
};

/// Round to nearest, ties to even. Every NaN becomes the quiet NaN 0x7fff, as cvt.rn.bf16.f32 gives it.
KINOE_HD inline bf16 to_bf16(float value) {
#if defined(__CUDA_ARCH__)
  const uint32_t u = __float_as_uint(value);
#else
  const uint32_t u = std::bit_cast<uint32_t>(value);
#endif
  if ((u & 0x7fffffffU) > 0x7f800000U) return bf16{0x7fff};
  return bf16{static_cast<uint16_t>((u + 0x7fffU + ((u >> 16) & 1U)) >> 16)};
}

KINOE_HD inline float to_float(bf16 value) {
  const uint32_t u = static_cast<uint32_t>(value.bits) << 16;
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  return std::bit_cast<float>(u);
#endif
}

template <class T>
struct dtype_of_t;
template <>
struct dtype_of_t<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of_t<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of_t<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of_t<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_of_t<int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct dtype_of_t<uint64_t> {
  static constexpr DType value = DType::u64;
};
template <class T>
inline constexpr DType dtype_of = dtype_of_t<T>::value;

}  // namespace kinoe
