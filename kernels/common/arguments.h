// The shapes and types an operation states in its contract, checked at its top: `check(args)` beside each contract.
//
// A wrong shape here is a bug of the program, so these are CHECKs; both backends call the same ones.
#pragma once

#include "kernels/common/tensor.h"

namespace kinoe {

/// Which operation and which argument a message is about.
struct Argument {
  const char* operation;
  const char* name;
  const Tensor& tensor;
};

inline void require_type(const Argument& a, DType type) {
  CHECK(static_cast<bool>(a.tensor), a.operation, ": ", a.name, " is absent");
  CHECK(a.tensor.dtype == type, a.operation, ": ", a.name, " must be ", name_of(type), ", is ",
        name_of(a.tensor.dtype));
}

/// `rows` rows of `columns`, whatever the leading dimensions are: [B, T, C] is B*T rows of C.
inline void require_matrix(const Argument& a, DType type, int64_t rows, int64_t columns) {
  require_type(a, type);
  CHECK(a.tensor.ndim >= 1 && a.tensor.columns() == columns && a.tensor.rows() == rows, a.operation, ": ",
        a.name, " must be ", rows, " rows of ", columns, ", is ", a.tensor.shape());
}

/// `size` elements in all.
inline void require_size(const Argument& a, DType type, int64_t size) {
  require_type(a, type);
  CHECK(a.tensor.size() == size, a.operation, ": ", a.name, " must have ", size, " elements, is ",
        a.tensor.shape());
}

/// A table of `columns` with at least `rows` rows.
inline void require_table(const Argument& a, DType type, int64_t rows, int64_t columns) {
  require_type(a, type);
  CHECK(a.tensor.ndim == 2 && a.tensor.columns() == columns && a.tensor.dim(0) >= rows, a.operation, ": ",
        a.name, " must have at least ", rows, " rows of ", columns, ", is ", a.tensor.shape());
}

/// Scratch of at least `bytes`; it may be absent when none is needed.
inline void require_scratch(const Argument& a, size_t bytes) {
  if (bytes == 0) return;
  require_type(a, DType::i32);
  CHECK(a.tensor.bytes() >= bytes, a.operation, ": ", a.name, " must have ", bytes, " bytes, has ",
        a.tensor.bytes());
}

/// The type in which an operation on `activations` accumulates: fp64 for fp64, else fp32.
constexpr DType accumulator_of(DType activations) {
  return activations == DType::f64 ? DType::f64 : DType::f32;
}

}  // namespace kinoe
