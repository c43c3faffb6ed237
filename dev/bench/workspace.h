// The memory of one benchmark row: inputs of random numbers, poisoned outputs, and the way back to the host.
//
// Random, never zero: a GPU multiplies zeros with less power and a higher clock. The numbers are made once on the host, a
// prime count of them, and copied end to end over a tensor on the device, every tensor from another place: making the
// billions of a head's logits one by one would take longer than all measurements together.
#pragma once

#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "kernels/common/device.h"

namespace kinoe::bench {

struct Distribution {
  bool uniform;
  double a, b;  // normal: 0 and the deviation; uniform: the ends
  auto operator<=>(const Distribution&) const = default;
};
constexpr Distribution normal(double deviation) { return {false, 0, deviation}; }
constexpr Distribution uniform(double low, double high) { return {true, low, high}; }

/// About as large as in training: weights as initialised, gradients as they come back.
inline constexpr Distribution kWeights = normal(0.02);
inline constexpr Distribution kGradients = normal(1e-3);

struct Span {
  int64_t begin = 0;
  int64_t count = 0;
};

/// Tensors live until clear(). Everything is queued on the context's stream; what goes to or comes from the host waits.
class Workspace {
 public:
  using Shape = std::initializer_list<int64_t>;

  explicit Workspace(const Context& ctx);

  [[nodiscard]] const Context& context() const { return ctx_; }

  Tensor random(DType type, Shape shape, Distribution distribution = normal(1));
  /// The numbers that random() gave it, once more.
  void refill(const Tensor& tensor);
  Tensor zeros(DType type, Shape shape);
  /// Token ids in [0, vocabulary) with the frequencies of Zipf's law, as those of real text: 0 is the most frequent.
  Tensor ids(Shape shape, int64_t vocabulary);
  template <class S>
  Tensor structs(const std::vector<S>& elements) {  // as the int32 tensor in which operations take them
    static_assert(sizeof(S) % 4 == 0);
    return from_host(DType::i32, {static_cast<int64_t>(elements.size() * sizeof(S) / 4)}, elements.data());
  }
  Tensor from_host(DType type, Shape shape, const void* data);
  /// Absent for 0 bytes. Not poisoned and not checked: its content means nothing.
  Tensor scratch(size_t bytes);

  /// NaN everywhere; expected to be finite in the end.
  Tensor output(DType type, Shape shape);
  /// An input that the operation overwrites: expected to be finite in the end.
  Tensor watched(const Tensor& tensor);
  [[nodiscard]] bool has_output_of(DType type) const;
  /// Every output holds finite numbers only.
  bool outputs_are_finite();

  /// Hands rows [rows.begin, +count) of a matrix to `use` in blocks: the block's data, the number of its first row (from
  /// rows.begin), its rows.
  using UseRows = std::function<void(const char* data, int64_t first, int64_t count)>;
  void read_rows(const Tensor& tensor, Span rows, const UseRows& use);

  /// Of all tensors, scratch included: what must fit into a cache to stay there.
  [[nodiscard]] size_t bytes() const;
  void clear();

 private:
  struct Fill {
    Distribution distribution;
    int64_t phase;
  };

  Tensor take(DType type, Shape shape);
  const Memory& numbers(DType type, Distribution distribution);
  void tile(const Tensor& tensor, const Memory& pattern, size_t phase);

  Context ctx_;
  int64_t period_;
  int64_t phase_ = 0;
  uint64_t stream_ = 0;
  Memory staging_, poison_;
  std::map<std::pair<DType, Distribution>, Memory> numbers_;
  std::vector<Memory> tensors_;
  std::vector<Tensor> outputs_;
  std::map<const void*, Fill> fills_;
};

}  // namespace kinoe::bench
