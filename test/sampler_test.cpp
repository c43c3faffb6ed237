// The order of samples: permutations, mixtures, visit counts.
#include "dataloader/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

TEST(PermutationTest, VisitsEachOnce) {
  for (const uint64_t size :
       {1ULL, 2ULL, 3ULL, 4ULL, 5ULL, 16ULL, 17ULL, 255ULL, 1000ULL, 4097ULL, 65536ULL, 100003ULL}) {
    const Permutation permutation(size, 42, 0, 0);
    std::vector<int> visits(size, 0);
    for (uint64_t i = 0; i < size; ++i) {
      const uint64_t to = permutation(i);
      ASSERT_LT(to, size);
      ++visits[to];
    }
    EXPECT_EQ(std::count(visits.begin(), visits.end(), 1), static_cast<int64_t>(size)) << size;
  }
}

std::vector<uint64_t> order(uint64_t size, uint64_t seed, uint64_t stream, uint64_t epoch) {
  const Permutation permutation(size, seed, stream, epoch);
  std::vector<uint64_t> result(size);
  for (uint64_t i = 0; i < size; ++i) result[i] = permutation(i);
  return result;
}

// Fixed points of a random permutation: one expected, whatever its size (Poisson).
size_t agreements(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
  size_t n = 0;
  for (size_t i = 0; i < a.size(); ++i) n += a[i] == b[i];
  return n;
}

TEST(PermutationTest, SeedStreamAndEpochChangeTheOrder) {
  const auto base = order(10000, 1, 0, 0);
  EXPECT_EQ(base, order(10000, 1, 0, 0));
  EXPECT_LT(agreements(base, order(10000, 2, 0, 0)), 10U);
  EXPECT_LT(agreements(base, order(10000, 1, 1, 0)), 10U);
  EXPECT_LT(agreements(base, order(10000, 1, 0, 1)), 10U);
  std::vector<uint64_t> identity(10000);
  std::iota(identity.begin(), identity.end(), uint64_t{0});
  EXPECT_LT(agreements(base, identity), 10U);
}

TEST(PermutationTest, LooksRandom) {
  const uint64_t n = 20000;
  const auto p = order(n, 7, 0, 3);
  // Neighbours are independent: the rank correlation of p[i] with i and with p[i + 1] is within 5 / sqrt(n).
  const auto correlation = [n](auto first, auto second) {
    const double mean = static_cast<double>(n - 1) / 2, variance = static_cast<double>(n * n - 1) / 12;
    double sum = 0;
    for (uint64_t i = 0; i + 1 < n; ++i) sum += (first(i) - mean) * (second(i) - mean);
    return sum / (static_cast<double>(n - 1) * variance);
  };
  const auto value = [&p](uint64_t i) { return static_cast<double>(p[i]); };
  EXPECT_LT(std::abs(correlation(value, [](uint64_t i) { return static_cast<double>(i); })),
            5 / std::sqrt(n));
  EXPECT_LT(std::abs(correlation(value, [&](uint64_t i) { return value(i + 1); })), 5 / std::sqrt(n));
  // Small sizes reach all orders alike: over 6000 seeds each order of 3 comes 1000 times, within 5 standard deviations.
  std::array<int, 27> seen{};
  for (uint64_t seed = 0; seed < 6000; ++seed) {
    const auto q = order(3, seed, 0, 0);
    ++seen[q[0] * 9 + q[1] * 3 + q[2]];
  }
  for (const int count : seen) {
    if (count != 0) {
      EXPECT_NEAR(count, 1000, 5 * std::sqrt(1000.0 * 5 / 6));
    }
  }
  EXPECT_EQ(std::count_if(seen.begin(), seen.end(), [](int c) { return c > 0; }), 6);
}

TEST(PermutationTest, HugeSizes) {
  const uint64_t size = (uint64_t{1} << 40) + 12345;
  const Permutation permutation(size, 9, 0, 0);
  std::vector<uint64_t> values;
  for (uint64_t i = size - 2000; i < size; ++i) values.push_back(permutation(i));
  std::sort(values.begin(), values.end());
  EXPECT_EQ(std::adjacent_find(values.begin(), values.end()), values.end());
  EXPECT_LT(values.back(), size);
  EXPECT_GT(values.back(), size / 2);
}

// Pinned: a run's order must not change with a compiler, a platform or a later version.
TEST(PermutationTest, IsTheSameEverywhere) {
  const auto p = order(10, 1234, 0, 2);
  EXPECT_EQ(p, (std::vector<uint64_t>{2, 0, 7, 4, 1, 5, 9, 6, 8, 3}));
}

TEST(MixtureTest, ExactProportionsAtEveryPrefix) {
  const std::vector<std::vector<double>> mixtures = {{1},
                                                     {1, 1},
                                                     {0.7, 0.2, 0.1},
                                                     {1e-6, 1},
                                                     {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5},
                                                     {1.0 / 3, 1.0 / 3, 1.0 / 3},
                                                     {1e9, 1, 1}};
  for (const auto& weights : mixtures) {
    const Mixture mixture(weights);
    const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
    const double bound = std::ceil(std::log2(static_cast<double>(weights.size()))) + 1;
    std::vector<uint64_t> received(weights.size(), 0);
    for (uint64_t sample = 0; sample < 20000; ++sample) {
      const Mixture::Share share = mixture.at(sample);
      const auto s = static_cast<size_t>(share.source);
      ASSERT_LT(s, weights.size());
      ASSERT_EQ(share.index, received[s]) << "a source's samples come in order, none twice, none left out";
      ++received[s];
      for (size_t t = 0; t < weights.size(); ++t) {
        ASSERT_LE(
            std::abs(static_cast<double>(received[t]) - static_cast<double>(sample + 1) * weights[t] / all),
            bound);
        ASSERT_EQ(mixture.count(static_cast<int>(t), sample + 1), received[t]);
      }
    }
  }
}

// Pinned, as the permutation is.
TEST(MixtureTest, IsTheSameEverywhere) {
  const Mixture mixture({0.7, 0.2, 0.1});
  std::vector<int> sources;
  for (uint64_t sample = 0; sample < 12; ++sample) sources.push_back(mixture.at(sample).source);
  EXPECT_EQ(sources, (std::vector<int>{0, 1, 0, 0, 0, 2, 0, 0, 1, 0, 0, 1}));
}

// 100,000 samples of 0.7 / 0.2 / 0.1: the shares, and that nothing but the seed decides what comes where.
TEST(MixtureTest, SharesOfAHundredThousandSamples) {
  const Mixture mixture({0.7, 0.2, 0.1});
  constexpr uint64_t kSamples = 100'000;
  std::array<uint64_t, 3> received{};
  for (uint64_t sample = 0; sample < kSamples; ++sample)
    ++received[static_cast<size_t>(mixture.at(sample).source)];
  const double shares[3] = {0.7, 0.2, 0.1};
  for (size_t s = 0; s < 3; ++s) {
    const double share = static_cast<double>(received[s]) / kSamples;
    RecordProperty(cat("share_", s), cat(share));
    EXPECT_NEAR(share, shares[s], 1e-3);
    EXPECT_NEAR(share, shares[s], 2e-5) << "the bound of a tree of three sources";
  }
}

TEST(MixtureTest, FarPositions) {
  const Mixture mixture({0.5, 0.3, 0.2});
  const uint64_t far = uint64_t{1} << 45;
  std::vector<uint64_t> next(3);
  for (int s = 0; s < 3; ++s) next[static_cast<size_t>(s)] = mixture.count(s, far);
  EXPECT_NEAR(static_cast<double>(next[1]) / static_cast<double>(far), 0.3, 1e-12);
  for (uint64_t sample = far; sample < far + 1000; ++sample) {
    const Mixture::Share share = mixture.at(sample);
    ASSERT_EQ(share.index, next[static_cast<size_t>(share.source)]++);
  }
}

}  // namespace
}  // namespace kinoe
