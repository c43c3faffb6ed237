// In which order samples are visited: pure functions of (seed, epoch, position), so that the position of a run is one
// integer, any position is reached in O(1), and ranks have no part in it.
#pragma once

#include <cstdint>
#include <vector>

namespace kinoe {

/// A pseudo-random permutation of [0, size) without a table: a balanced Feistel network over the smallest even number of
/// bits that holds `size`, its round function Philox keyed by (seed, stream, epoch), and cycle walking: a value
/// outside [0, size) is permuted again until it is inside (fewer than 4 times on average).
class Permutation {
 public:
  Permutation(uint64_t size, uint64_t seed, uint64_t stream, uint64_t epoch);
  [[nodiscard]] uint64_t operator()(uint64_t position) const;

 private:
  uint64_t size_;
  uint64_t key_;
  int half_bits_;
};

/// Deals sample indices to weighted sources: of any first n samples, source s has received n * weight_s to within
/// log2(sources) + 1, and its own samples in order. A binary tree of sources; a node passes the n-th sample that reaches it to the
/// left if round((n + 1) p) > round(n p), where p is the left side's share. O(log sources), no state.
class Mixture {
 public:
  struct Share {
    int source = 0;
    uint64_t index = 0;  // how many earlier samples this source has received
  };
  /// Weights are positive and finite; they need not sum to 1.
  explicit Mixture(const std::vector<double>& weights);
  [[nodiscard]] Share at(uint64_t sample) const;
  /// How many of the first `samples` samples go to `source`.
  [[nodiscard]] uint64_t count(int source, uint64_t samples) const;

 private:
  struct Node {
    uint64_t left_share = 0;  // fixed point, 2^63 = all
    int left = 0, right = 0;  // >= 0: a node; < 0: source ~value
  };
  int build(const std::vector<double>& weights, int begin, int end);
  std::vector<Node> nodes_;
  int root_ = 0;
};

}  // namespace kinoe
