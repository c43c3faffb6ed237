// Tensor: a contiguous row-major view of memory that somebody else owns.
#pragma once

#include <array>
#include <initializer_list>
#include <string>

#include "kernels/common/dtype.h"

namespace kinoe {

/// At most four dimensions, the last one contiguous. A default Tensor is "absent": optional arguments (a bias, a
/// residual branch) are passed as Tensor{} and tested with operator bool.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  int ndim = 0;
  std::array<int64_t, 4> dims{};

  Tensor() = default;
  Tensor(void* memory, DType type, std::initializer_list<int64_t> shape) : data(memory), dtype(type) {
    CHECK(shape.size() <= 4, "a tensor has at most 4 dimensions, here ", shape.size());
    for (const int64_t n : shape) dims[static_cast<size_t>(ndim++)] = n;
  }

  explicit operator bool() const { return data != nullptr; }

  [[nodiscard]] int64_t dim(int i) const { return dims[static_cast<size_t>(i < 0 ? ndim + i : i)]; }

  [[nodiscard]] int64_t size() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= dim(i);
    return n;
  }
  [[nodiscard]] size_t bytes() const { return static_cast<size_t>(size()) * size_of(dtype); }

  /// The last dimension, and the product of all others: most operations see a matrix of rows.
  [[nodiscard]] int64_t columns() const { return dim(-1); }
  [[nodiscard]] int64_t rows() const { return columns() == 0 ? 0 : size() / columns(); }

  template <class T>
  [[nodiscard]] T* as() const {
    CHECK(dtype == dtype_of<T>, "tensor holds ", name_of(dtype), ", asked for ", name_of(dtype_of<T>));
    return static_cast<T*>(data);
  }

  /// The same memory under another shape of equal size.
  [[nodiscard]] Tensor view(std::initializer_list<int64_t> shape) const {
    Tensor result(data, dtype, shape);
    CHECK(result.size() == size(), "view of ", size(), " elements as ", result.shape());
    return result;
  }

  /// Rows [begin, begin + count) of the first dimension.
  [[nodiscard]] Tensor slice(int64_t begin, int64_t count) const {
    CHECK(begin >= 0 && count >= 0 && begin + count <= dim(0), "rows [", begin, ", ", begin + count, ") of ",
          shape());
    Tensor result = *this;
    const int64_t stride = dim(0) == 0 ? 0 : size() / dim(0);
    result.data = static_cast<char*>(data) + static_cast<size_t>(begin * stride) * size_of(dtype);
    result.dims[0] = count;
    return result;
  }

  [[nodiscard]] std::string shape() const {
    std::string s = "[";
    for (int i = 0; i < ndim; ++i) s += (i ? ", " : "") + std::to_string(dim(i));
    return s + "]";
  }
};

}  // namespace kinoe
