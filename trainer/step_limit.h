// How long what a rank is doing may take before the rank counts as hung: an argument of Team::at().
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

namespace kinoe {

/// All of it no less than --hang-timeout. What consists of micro-batches may take as long for each of them: Team::alive().
class StepLimit {
 public:
  explicit StepLimit(double least_s) : least_s_(least_s) {}
  void took(double ms) {
    ms_.push_back(ms);
    if (ms_.size() > kRemembered) ms_.pop_front();
  }
  /// Of a step: ten times the median of the last ones.
  [[nodiscard]] double seconds() const {
    if (ms_.size() < 3) return unknown();  // the first steps measure matrix products
    std::vector<double> sorted(ms_.begin(), ms_.end());
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    return std::max(least_s_, *middle / 1e3 * 10);
  }

  /// Of what is no step: set-up, evaluation, a sample.
  [[nodiscard]] double unknown() const { return std::max(least_s_, kUnknown); }
  /// Of reading or writing so much, on a disk that many share: 50 MB/s. A save may wait for the one before it.
  [[nodiscard]] double of_files(uint64_t bytes) const {
    return std::max(least_s_, kUnknown + static_cast<double>(bytes) / 50e6);
  }

 private:
  static constexpr double kUnknown = 600;
  static constexpr size_t kRemembered = 31;
  double least_s_;
  std::deque<double> ms_;
};

}  // namespace kinoe
