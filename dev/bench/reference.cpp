// See reference.h.
#include "dev/bench/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "kernels/common/cpu.h"

namespace kinoe::bench {
namespace {

template <class T>
double element_at(const char* data, size_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  if constexpr (std::is_same_v<T, bf16>)
    return static_cast<double>(to_float(value));
  else
    return static_cast<double>(value);
}

double element_at(DType type, const char* data, size_t index) {
  switch (type) {
    case DType::bf16: return element_at<bf16>(data, index);
    case DType::f32: return element_at<float>(data, index);
    case DType::f64: return element_at<double>(data, index);
    default: CHECK(false, "no numbers to compare: ", name_of(type));
  }
  return 0;
}

}  // namespace

Part::Part(int64_t rows, int64_t columns)
    : rows_(rows),
      columns_(columns),
      values_(static_cast<size_t>(rows * columns), std::numeric_limits<double>::quiet_NaN()) {}

Part Part::of(Workspace& work, const Tensor& from, Span rows, const std::vector<Span>& columns) {
  int64_t width = 0;
  for (const Span& run : columns) {
    CHECK(run.begin >= 0 && run.begin + run.count <= from.columns(), "columns [", run.begin, ", +", run.count,
          ") of ", from.shape());
    width += run.count;
  }
  Part part(rows.count, width);
  const int64_t pitch = from.columns();
  work.read_rows(from, rows, [&](const char* data, int64_t first, int64_t count) {
#pragma omp parallel for if (count * width > kParallelWork)
    for (int64_t r = 0; r < count; ++r) {
      auto to = static_cast<size_t>((first + r) * width);
      for (const Span& run : columns)
        for (int64_t c = 0; c < run.count; ++c)
          part.values_[to++] = element_at(from.dtype, data, static_cast<size_t>(r * pitch + run.begin + c));
    }
  });
  return part;
}

Part Part::leading(Workspace& work, const Tensor& from, int64_t count) {
  Part part = of(work, from.view({from.size(), 1}), {0, count});
  std::swap(part.rows_, part.columns_);
  return part;
}

Part Part::columns(Span run) const {
  CHECK(run.begin >= 0 && run.begin + run.count <= columns_, "columns [", run.begin, ", +", run.count,
        ") of ", columns_);
  Part part(rows_, run.count);
  for (int64_t r = 0; r < rows_; ++r)
    std::copy_n(values_.begin() + (r * columns_ + run.begin), run.count,
                part.values_.begin() + r * run.count);
  return part;
}

double Part::error_against(const Part& truth) const {
  CHECK(values_.size() == truth.values_.size(), values_.size(), " values against ", truth.values_.size());
  double difference = 0, size = 0;
  for (size_t i = 0; i < values_.size(); ++i) {
    const double d = values_[i] - truth.values_[i];
    difference += d * d;
    size += truth.values_[i] * truth.values_[i];
  }
  return difference == 0 ? 0 : std::sqrt(difference / size);
}

double worst(std::initializer_list<double> errors) {
  double result = 0;
  for (const double e : errors)
    if (std::isnan(e) || e > result) result = e;
  return result;
}

}  // namespace kinoe::bench
