// Arena: one planned allocation. The same code runs twice: once to measure, once to hand out memory.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/common/tensor.h"

namespace kinoe {

/// A constructor that takes tensors from an Arena is run first with Arena() (data() is null; the totals are the
/// plan that is printed), then with Arena(memory) to receive addresses. Nothing is ever given back. A plan whose bytes
/// do not fit in 63 bits throws Error(usage): wrapped around it would look small.
class Arena {
 public:
  static constexpr size_t kAlignment = 256;

  struct Group {
    std::string name;
    size_t bytes = 0;
  };

  Arena() = default;
  explicit Arena(void* memory) : base_(static_cast<char*>(memory)) {}

  /// Bytes are counted under `group` ("weights", "activations", ...) in the order of first use.
  Tensor take(std::string_view group, DType dtype, std::initializer_list<int64_t> shape) {
    Tensor tensor(base_ ? base_ + used_ : nullptr, dtype, shape);
    auto total = static_cast<int64_t>(size_of(dtype));
    bool too_large = false;
    for (const int64_t n : shape) too_large |= __builtin_mul_overflow(total, n, &total);
    const size_t bytes = (static_cast<size_t>(total) + kAlignment - 1) / kAlignment * kAlignment;
    too_large |= bytes > size_t{INT64_MAX} - used_;
    if (too_large)
      fail(ExitCode::usage, "the ", group, " of this run take more than 2^63 bytes (one tensor is ",
           tensor.shape(), "); use a smaller model, --micro-batch or --seq-len");
    used_ += bytes;
    for (Group& g : groups_)
      if (g.name == group) {
        g.bytes += bytes;
        return tensor;
      }
    groups_.push_back({std::string(group), bytes});
    return tensor;
  }

  [[nodiscard]] size_t used() const { return used_; }
  [[nodiscard]] const std::vector<Group>& groups() const { return groups_; }

 private:
  char* base_ = nullptr;
  size_t used_ = 0;
  std::vector<Group> groups_;
};

}  // namespace kinoe
