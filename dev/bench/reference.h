// The error of a row: a part of the device's result against the CPU twin in fp64 on the same part of the inputs.
//
// fp64 rather than fp32, so that the figure also means something on the CPU backend, whose fp32 it then judges. Which
// part that is, an operation's own benchmark decides: leading rows where rows are independent, leading columns where
// columns are (sums over rows), one group of heads of one sequence for attention.
#pragma once

#include <cstring>
#include <vector>

#include "dev/bench/workspace.h"

namespace kinoe::bench {

/// A matrix in host memory in fp64, and a tensor of it for the CPU twin.
class Part {
 public:
  /// To be written: NaN.
  Part(int64_t rows, int64_t columns);
  /// `rows` of the device's matrix and, one after the other, the given runs of their columns.
  static Part of(Workspace& work, const Tensor& from, Span rows, const std::vector<Span>& columns);
  static Part of(Workspace& work, const Tensor& from, Span rows) {
    return of(work, from, rows, {{0, from.columns()}});
  }
  /// The first elements of a flat tensor, as a row.
  static Part leading(Workspace& work, const Tensor& from, int64_t count);

  [[nodiscard]] Part columns(Span run) const;

  [[nodiscard]] Tensor tensor() { return {values_.data(), DType::f64, {rows_, columns_}}; }
  [[nodiscard]] Tensor flat() { return {values_.data(), DType::f64, {rows_ * columns_}}; }
  [[nodiscard]] Tensor sequence() { return {values_.data(), DType::f64, {1, rows_, columns_}}; }

  /// sqrt(sum (this - truth)^2 / sum truth^2). Not a number when one of the values is none.
  [[nodiscard]] double error_against(const Part& truth) const;

 private:
  int64_t rows_, columns_;
  std::vector<double> values_;
};

// The usual parts: a few leading rows; a few leading columns of all rows.
inline constexpr Span kFirstRows{0, 16};
inline constexpr Span kFirstColumns{0, 16};
inline Span all_rows(const Tensor& tensor) { return {0, tensor.rows()}; }
inline Part first_rows(Workspace& work, const Tensor& from) { return Part::of(work, from, kFirstRows); }
inline Part first_columns(Workspace& work, const Tensor& from) {
  return Part::of(work, from, all_rows(from), {kFirstColumns});
}

/// Scratch of a CPU twin.
class HostScratch {
 public:
  explicit HostScratch(size_t bytes) : words_((bytes + 3) / 4) {}
  [[nodiscard]] Tensor tensor() {
    return words_.empty() ? Tensor{}
                          : Tensor(words_.data(), DType::i32, {static_cast<int64_t>(words_.size())});
  }

 private:
  std::vector<int32_t> words_;
};

/// The first `count` elements of a tensor of T.
template <class T>
std::vector<T> read_elements(Workspace& work, const Tensor& from, int64_t count) {
  CHECK(from.dtype == dtype_of<T>, "expected ", name_of(dtype_of<T>), ", is ", name_of(from.dtype));
  std::vector<T> elements(static_cast<size_t>(count));
  work.read_rows(from.view({from.size(), 1}), {0, count}, [&](const char* data, int64_t first, int64_t n) {
    std::memcpy(elements.data() + first, data, static_cast<size_t>(n) * sizeof(T));
  });
  return elements;
}
inline std::vector<int32_t> read_ints(Workspace& work, const Tensor& from, int64_t count) {
  return read_elements<int32_t>(work, from, count);
}

/// The largest, where "not a number" is larger than anything.
double worst(std::initializer_list<double> errors);

}  // namespace kinoe::bench
