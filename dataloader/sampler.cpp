// The Feistel network and the tree that deals samples to sources.
#include "dataloader/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/common/check.h"
#include "kernels/common/rng.h"

namespace kinoe {
namespace {

constexpr int kRounds = 6;
constexpr uint64_t kAll = uint64_t{1} << 63;  // a share of 1

// round(n * share), exact: n stays below 2^63 and so does the result.
uint64_t part_of(uint64_t n, uint64_t share) {
  const auto product = static_cast<unsigned __int128>(n) * share + kAll / 2;
  return static_cast<uint64_t>(product >> 63);
}

}  // namespace

Permutation::Permutation(uint64_t size, uint64_t seed, uint64_t stream, uint64_t epoch)
    : size_(size), key_(0), half_bits_(1) {
  CHECK(size > 0, "a permutation of nothing");
  const Philox4 key = philox(seed, stable_key("sample order") ^ mix64(stream), epoch);
  key_ = uint64_t{key.v[0]} << 32 | key.v[1];
  while (half_bits_ < 32 && (uint64_t{1} << (2 * half_bits_)) < size) ++half_bits_;
}

uint64_t Permutation::operator()(uint64_t position) const {
  CHECK(position < size_, "position ", position, " of a permutation of ", size_);
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  do {
    uint64_t left = position >> half_bits_, right = position & mask;
    for (uint64_t round = 0; round < kRounds; ++round) {
      const uint64_t mixed = left ^ (philox(key_, round, right).v[0] & mask);
      left = right;
      right = mixed;
    }
    position = left << half_bits_ | right;
  } while (position >= size_);
  return position;
}

Mixture::Mixture(const std::vector<double>& weights) {
  CHECK(!weights.empty(), "a mixture of no sources");
  for (const double weight : weights) CHECK(std::isfinite(weight) && weight > 0, "mixture weight ", weight);
  // Scaled by a power of two, which changes no ratio, so that sums of the largest doubles stay finite.
  const int exponent = std::ilogb(*std::max_element(weights.begin(), weights.end()));
  std::vector<double> scaled;
  for (const double weight : weights) scaled.push_back(std::ldexp(weight, -exponent));
  root_ = build(scaled, 0, static_cast<int>(scaled.size()));
}

int Mixture::build(const std::vector<double>& weights, int begin, int end) {
  if (end - begin == 1) return ~begin;
  const int middle = begin + (end - begin) / 2;
  double left = 0, all = 0;
  for (int s = begin; s < end; ++s) {
    all += weights[static_cast<size_t>(s)];
    if (s < middle) left += weights[static_cast<size_t>(s)];
  }
  Node node;
  node.left_share = static_cast<uint64_t>(std::ldexp(left / all, 63));
  node.left = build(weights, begin, middle);
  node.right = build(weights, middle, end);
  nodes_.push_back(node);
  return static_cast<int>(nodes_.size()) - 1;
}

Mixture::Share Mixture::at(uint64_t sample) const {
  int at = root_;
  while (at >= 0) {
    const Node& node = nodes_[static_cast<size_t>(at)];
    const uint64_t left = part_of(sample, node.left_share);
    if (part_of(sample + 1, node.left_share) > left) {
      sample = left;
      at = node.left;
    } else {
      sample -= left;
      at = node.right;
    }
  }
  return {~at, sample};
}

uint64_t Mixture::count(int source, uint64_t samples) const {
  // The path to a source follows from how build() halves the range.
  int at = root_, begin = 0, end = static_cast<int>(nodes_.size()) + 1;
  CHECK(source >= 0 && source < end, "source ", source, " of ", end);
  while (at >= 0) {
    const Node& node = nodes_[static_cast<size_t>(at)];
    const int middle = begin + (end - begin) / 2;
    const uint64_t left = part_of(samples, node.left_share);
    if (source < middle) {
      samples = left;
      at = node.left;
      end = middle;
    } else {
      samples -= left;
      at = node.right;
      begin = middle;
    }
  }
  return samples;
}

}  // namespace kinoe
