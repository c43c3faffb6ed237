// What the tests of the GPU kernels share: comparison with the CPU in fp64, the error that bf16 cannot avoid, repeated
// runs, tensors of more than 2^31 elements, addresses that allow no vector access.
//
// The reference is always the CPU twin in fp64 on the same inputs, already rounded to the type under test. What the GPU
// then stores in fp32 must be right to about 1e-5, what it stores in bf16 must be the reference rounded once: its error
// is measured against that of the reference's own rounding, so that a kernel that loses digits on the way is seen.
#pragma once

#include <cstdio>

#include "kernels/common/arguments.h"
#include "test/op_cases.h"
#include "test/op_harness.h"

namespace kinoe::optest {

struct Output {
  std::string name;
  TensorOn tensor;
  double noise = 0;  // what fp32 arithmetic may add to a bf16 result, absolute
};
using Outputs = std::vector<Output>;

/// The worst of what a test compared; prints one line at its end.
class Precision {
 public:
  Precision(const char* operation, DType type) : operation_(operation), type_(type) {}
  ~Precision() {
    std::printf("             %-20s %s: relative L2 at worst %.3g", operation_, name_of(type_), l2_);
    if (type_ == DType::bf16) std::printf(", rounding alone %.3g, worst ratio %.4f", rounding_, ratio_);
    std::printf("; largest error %.3g\n", max_abs_);
  }
  Precision(const Precision&) = delete;
  Precision& operator=(const Precision&) = delete;

  /// `exact` from the CPU in fp64.
  void expect(const std::string& name, const Values& actual, DType stored, const Values& exact,
              Tolerance tolerance, double noise) {
    if (stored == DType::bf16) return expect_rounded_once(name, actual, exact, noise);
    note(expect_close(name, actual, exact, tolerance));
  }

  void expect(const Outputs& actual, const Outputs& exact, Tolerance tolerance) {
    ASSERT_EQ(actual.size(), exact.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      if (!actual[i].tensor) continue;
      actual[i].tensor.expect_written(actual[i].name);
      expect(actual[i].name, actual[i].tensor.values(), actual[i].tensor.dtype(), exact[i].tensor.values(),
             tolerance, actual[i].noise);
    }
  }

 private:
  void note(const Errors& errors) {
    l2_ = std::max(l2_, errors.relative_l2);
    max_abs_ = std::max(max_abs_, errors.max_abs);
  }

  /// Every element within half a unit of bf16's last place of `exact` (2^-8 of it) and the noise; all together no worse
  /// than 1.02 times `exact` rounded.
  void expect_rounded_once(const std::string& name, const Values& actual, const Values& exact, double noise) {
    Values rounded = exact;
    for (double& x : rounded) x = representable(x, DType::bf16);
    const Errors alone = compare(rounded, exact);
    const double floor = 1e-6;  // of results that bf16 holds exactly
    const Errors errors = expect_close(name, actual, exact,
                                       {noise + 1e-37, 0x1.01p-8, 1.02 * alone.relative_l2 + floor + noise});
    note(errors);
    rounding_ = std::max(rounding_, alone.relative_l2);
    if (alone.relative_l2 > 1e-4) ratio_ = std::max(ratio_, errors.relative_l2 / alone.relative_l2);
  }

  const char* operation_;
  DType type_;
  double l2_ = 0, max_abs_ = 0, rounding_ = 0, ratio_ = 0;
};

/// The same bits from every run; `run` starts from fresh tensors each time.
template <class Run>
void expect_repeats(const std::string& what, const Run& run, int times = 2) {
  const Outputs first = run();
  for (int i = 1; i < times; ++i) {
    const Outputs again = run();
    ASSERT_EQ(first.size(), again.size());
    for (size_t k = 0; k < first.size(); ++k)
      if (first[k].tensor)
        expect_same_bits(cat(what, ", run ", i + 1, ": ", first[k].name), again[k].tensor, first[k].tensor);
  }
}

/// The same bits in both, output by output.
inline void expect_same_outputs(const std::string& what, const Outputs& actual, const Outputs& expected) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t k = 0; k < actual.size(); ++k)
    if (actual[k].tensor)
      expect_same_bits(cat(what, ": ", actual[k].name), actual[k].tensor, expected[k].tensor);
}

/// A tensor whose first element is `shift` elements behind an address that is a multiple of 256: with 1, no access of
/// more than one element is allowed. The elements around it are guards.
class ShiftedTensor {
 public:
  ShiftedTensor() = default;
  ShiftedTensor(const Context& ctx, DType type, const std::vector<int64_t>& shape, int64_t shift,
                const Values& values = {})
      : shift_(static_cast<size_t>(shift)) {
    int64_t n = 1;
    for (const int64_t d : shape) n *= d;
    Values all(static_cast<size_t>(n) + 2 * shift_, kAround);
    if (values.empty())
      std::fill(all.begin() + shift, all.end() - shift, std::numeric_limits<double>::quiet_NaN());
    else
      std::copy(values.begin(), values.end(), all.begin() + shift);
    memory_ = TensorOn(ctx, type, {static_cast<int64_t>(all.size())}, all);
    tensor_ = memory_.tensor();
    tensor_.ndim = 0;
    for (const int64_t d : shape) tensor_.dims[static_cast<size_t>(tensor_.ndim++)] = d;
    tensor_.data = static_cast<char*>(tensor_.data) + shift_ * size_of(type);
  }
  operator Tensor() const { return tensor_; }  // NOLINT(google-explicit-constructor): as TensorOn

  [[nodiscard]] Values values() const {
    Values all = memory_.values();
    for (size_t i = 0; i < shift_; ++i) {
      EXPECT_EQ(all[i], kAround) << "written " << shift_ - i << " elements in front of a tensor";
      EXPECT_EQ(all[all.size() - 1 - i], kAround) << "written " << shift_ - i << " elements behind a tensor";
    }
    return {all.begin() + static_cast<std::ptrdiff_t>(shift_),
            all.end() - static_cast<std::ptrdiff_t>(shift_)};
  }

 private:
  static constexpr double kAround = 77;
  size_t shift_ = 0;
  TensorOn memory_;
  Tensor tensor_;
};

/// Memory of the GPU for shapes beyond 2^31 elements: a block of rows that repeats. No guards.
class BigTensor {
 public:
  BigTensor() = default;
  /// Uninitialised.
  BigTensor(const Context& ctx, DType type, std::initializer_list<int64_t> shape) : ctx_(ctx) {
    tensor_ = Tensor(nullptr, type, shape);
    memory_ = Memory::on(ctx.backend, tensor_.bytes());
    tensor_.data = memory_.data();
  }
  /// The elements of `block`, over and over.
  BigTensor(const Context& ctx, DType type, std::initializer_list<int64_t> shape, const Values& block)
      : BigTensor(ctx, type, shape) {
    const std::vector<char> bytes = pack(block, type);
    size_t filled = std::min(bytes.size(), tensor_.bytes());
    upload(ctx, tensor_.data, bytes.data(), filled);
    while (filled < tensor_.bytes()) {
      const size_t more = std::min(filled, tensor_.bytes() - filled);  // filled is a multiple of the block
      copy(ctx, static_cast<char*>(tensor_.data) + filled, tensor_.data, more);
      filled += more;
    }
    synchronize(ctx);
  }
  operator Tensor() const { return tensor_; }  // NOLINT(google-explicit-constructor): as TensorOn
  [[nodiscard]] Tensor tensor() const { return tensor_; }

  /// Elements [begin, begin + count) of the flat tensor.
  [[nodiscard]] Values values(int64_t begin, int64_t count) const {
    const size_t element = size_of(tensor_.dtype);
    std::vector<char> bytes(static_cast<size_t>(count) * element);
    download(ctx_, bytes.data(), static_cast<char*>(tensor_.data) + static_cast<size_t>(begin) * element,
             bytes.size());
    synchronize(ctx_);
    return unpack(bytes, tensor_.dtype);
  }
  [[nodiscard]] std::vector<char> bytes() const {
    std::vector<char> bytes(tensor_.bytes());
    download(ctx_, bytes.data(), tensor_.data, bytes.size());
    synchronize(ctx_);
    return bytes;
  }

 private:
  Context ctx_;
  Memory memory_;
  Tensor tensor_;
};

/// The first, the last, and those around element 2^31 of `rows` rows of `columns`.
inline std::vector<int64_t> telling_rows(int64_t rows, int64_t columns) {
  const int64_t crossing = (int64_t{1} << 31) / columns;
  std::vector<int64_t> result = {0, 1, rows / 3, rows - 1};
  for (const int64_t row : {crossing - 1, crossing, crossing + 1})
    if (row > 1 && row < rows - 1) result.push_back(row);
  return result;
}

/// False, with a word, where the GPU has less than `bytes` free.
inline bool enough_memory(const Device& device, size_t bytes) {
  const size_t free_bytes = device.info().free_bytes;
  if (free_bytes >= bytes + (size_t{1} << 30)) return true;
  std::printf("             left out: needs %zu MiB, the GPU has %zu MiB free\n", bytes >> 20,
              free_bytes >> 20);
  return false;
}

}  // namespace kinoe::optest
