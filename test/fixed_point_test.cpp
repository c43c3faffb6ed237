// Sums in fixed point on the CPU, against integer arithmetic in 128 bits: rounding, limits, any order of terms.
#include "kernels/fixed_point.h"

#include <algorithm>
#include <cmath>

#include "test/fixed_point_harness.h"
#include "test/op_cases.h"

namespace kinoe::optest {
namespace {

const Context kCpu;

struct Sums {
  explicit Sums(int64_t n) : sums(kCpu, DType::i64, {n}), overflow(TensorOn::of<int64_t>(kCpu, {1}, {0})) {}

  /// The first term is stored.
  void add(const TensorOn& values, int64_t slots) {
    cpu::fixed_point_add(kCpu, {.sums = sums,
                                .values = values,
                                .store = first,
                                .limit = gradient_limit(slots),
                                .overflow = overflow});
    first = false;
    values.expect_unchanged("values");
  }
  [[nodiscard]] std::vector<int64_t> raw() const { return sums.raw<int64_t>(); }
  [[nodiscard]] int64_t flag() const { return overflow.raw<int64_t>()[0]; }

  TensorOn sums, overflow;
  bool first = true;
};

TensorOn back(const TensorOn& sums, DType type) {
  const TensorOn values(kCpu, type, {sums.tensor().size()});
  const std::vector<char> before = sums.bytes();
  cpu::fixed_point_to_float(kCpu, {.values = values, .sums = sums});
  values.expect_written("values");
  EXPECT_EQ(sums.bytes(), before) << "sums were changed";
  return values;
}

TEST(FixedPoint, RoundsEachTermToNearestEven) {
  Random random;
  for (const int64_t n : flat_sizes())
    for (const DType type : {DType::f32, DType::f64})
      for (const double scale : {1.0, 1e-3, 1e-9, 1e-14}) {
        SCOPED_TRACE(cat("n=", n, " ", name_of(type), " scale ", scale));
        Values first = random.normal(n, scale, type), second = random.outliers(n, scale, type);
        // Ties both ways and what lies beside them, in units of the last place.
        const Values special = {0.5, 1.5, -0.5, -2.5, 2.5, 3.0, 0x1.000002p-1, 0x1.fffffep-2, -0x1.7ffffep1};
        for (size_t i = 0; i < std::min(special.size(), second.size()); ++i)
          second[i] = special[i] * kGradientUnit;
        Sums sums(n);
        sums.add(TensorOn(kCpu, type, {n}, first), 2);
        sums.sums.expect_written("sums");
        std::vector<int64_t> expected;
        for (const double x : first) expected.push_back(exact_fixed(x));
        ASSERT_EQ(sums.raw(), expected);
        sums.add(TensorOn(kCpu, type, {n}, second), 2);
        for (size_t i = 0; i < expected.size(); ++i) expected[i] += exact_fixed(second[i]);
        ASSERT_EQ(sums.raw(), expected);
        EXPECT_EQ(sums.flag(), 0);
      }
}

TEST(FixedPoint, NoOrderOrGroupingOfTheTermsChangesABit) {
  Random random;
  constexpr int64_t kN = 1003, kSlots = 6;
  std::vector<TensorOn> slots;
  for (int64_t i = 0; i < kSlots; ++i)
    slots.emplace_back(kCpu, DType::f32, std::vector<int64_t>{kN}, random.outliers(kN, std::pow(10.0, -i)));
  std::vector<int> order = {0, 1, 2, 3, 4, 5};
  std::vector<int64_t> expected;
  do {
    // Ranks with the first `cut` slots and with the rest; the second may have none: zeros.
    for (const size_t cut : {size_t{6}, size_t{1}, size_t{3}}) {
      Sums left(kN), right(kN);
      for (size_t i = 0; i < order.size(); ++i)
        (i < cut ? left : right).add(slots[static_cast<size_t>(order[i])], kSlots);
      std::vector<int64_t> sum = left.raw();
      if (cut < order.size()) {
        const std::vector<int64_t> other = right.raw();
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
      }
      if (expected.empty()) expected = sum;
      ASSERT_EQ(sum, expected);
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(FixedPoint, EveryMagnitudeBelowTheLimitAndNoneAtIt) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const DType type : {DType::f32, DType::f64})
    for (const int64_t slots : {1, 2, 3, 7, 1000, 4096}) {
      SCOPED_TRACE(cat(name_of(type), " slots ", slots));
      const double limit = gradient_limit(slots);
      // The type's largest number below the limit, and the next, which is at it or above.
      const auto neighbour = [&](double from, double towards) {
        return type == DType::f64 ? std::nextafter(from, towards)
                                  : static_cast<double>(std::nextafter(static_cast<float>(from),
                                                                       static_cast<float>(towards)));
      };
      double below = representable(limit, type);
      while (below >= limit) below = neighbour(below, 0);
      const double above = neighbour(below, inf);
      ASSERT_GE(above, limit);
      for (const double sign : {1.0, -1.0}) {
        Sums sums(2);
        for (int64_t i = 0; i < slots; ++i) sums.add(TensorOn(kCpu, type, {2}, {sign * below, 1e-3}), slots);
        EXPECT_EQ(sums.flag(), 0);
        const __int128 all = static_cast<__int128>(slots) * exact_fixed(sign * below);
        EXPECT_TRUE(static_cast<__int128>(sums.raw()[0]) == all) << "wrapped";
        sums.add(TensorOn(kCpu, type, {2}, {sign * above, 1e-3}), slots);
        EXPECT_EQ(sums.flag(), 1);
        EXPECT_TRUE(static_cast<__int128>(sums.raw()[0]) == all) << "added what is beyond the limit";
        EXPECT_EQ(sums.raw()[1], (slots + 1) * exact_fixed(representable(1e-3, type)));
      }
    }
}

TEST(FixedPoint, WhatIsNotFiniteSetsTheFlagForGood) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const DType type : {DType::f32, DType::f64})
    for (const double bad : {std::nan(""), -std::nan(""), inf, -inf, 1e30, -1e30})
      for (const int64_t n : {1, 7, 33, 100003})
        for (const int64_t at : {int64_t{0}, n / 2, n - 1}) {
          Values values(static_cast<size_t>(n), 0.25);
          Sums good(n), sums(n);
          const TensorOn quarter(kCpu, type, {n}, values);
          values[static_cast<size_t>(at)] = bad;
          const TensorOn broken(kCpu, type, {n}, values);
          sums.add(broken, 4);
          EXPECT_EQ(sums.flag(), 1) << bad << " at " << at;
          sums.add(quarter, 4);
          EXPECT_EQ(sums.flag(), 1) << "cleared";
          for (int i = 0; i < 2; ++i) good.add(quarter, 4);
          std::vector<int64_t> expected = good.raw();
          expected[static_cast<size_t>(at)] = int64_t{1} << 48;
          EXPECT_EQ(sums.raw(), expected) << bad << " at " << at;
          EXPECT_EQ(good.flag(), 0);
        }
}

TEST(FixedPoint, SubnormalsAndBothZerosAreZero) {
  Sums sums(5);
  sums.add(TensorOn(kCpu, DType::f32, {5}, {0x1p-149, -0x1p-149, 0x1.fffffcp-127, 0.0, -0.0}), 1);
  EXPECT_EQ(sums.raw(), (std::vector<int64_t>{0, 0, 0, 0, 0}));
  EXPECT_EQ(sums.flag(), 0);
  for (const uint32_t bits : back(sums.sums, DType::f32).raw<uint32_t>()) EXPECT_EQ(bits, 0U);
}

TEST(FixedPoint, BackToFloatRoundsOnceToNearestEven) {
  const std::vector<int64_t> sums = telling_sums(3001);
  const TensorOn in = TensorOn::of(kCpu, {3001}, sums);
  const std::vector<float> single = back(in, DType::f32).raw<float>();
  const std::vector<double> wide = back(in, DType::f64).raw<double>();
  for (size_t i = 0; i < sums.size(); ++i) {
    ASSERT_EQ(static_cast<double>(single[i]), nearest_of_fixed(sums[i], 24)) << sums[i];
    ASSERT_EQ(wide[i], nearest_of_fixed(sums[i], 53)) << sums[i];
  }
}

TEST(FixedPoint, ANumberOfTheTypeComesBackAsItWas) {
  // What fp32 can hold between 2^-26 and the limit is a whole number of units.
  Random random;
  Values values = random.normal(1000, 1e-2);
  for (double& x : values)
    if (std::abs(x) < 0x1p-26) x = 0x1p-26;
  Sums sums(1000);
  sums.add(TensorOn(kCpu, DType::f32, {1000}, values), 1);
  EXPECT_EQ(back(sums.sums, DType::f32).values(), values);
}

TEST(FixedPoint, GradientsOfRealisticSizeKeepTheirDigits) {
  Random random;
  constexpr int64_t kN = 20000, kSlots = 8;
  for (const double scale : {1e-3, 1e-5, 1e-7, 1e-8, 1e-9}) {
    Sums sums(kN);
    std::vector<long double> exact(kN);
    for (int64_t s = 0; s < kSlots; ++s) {
      const Values slot = random.normal(kN, scale);
      sums.add(TensorOn(kCpu, DType::f32, {kN}, slot), kSlots);
      for (size_t i = 0; i < slot.size(); ++i) exact[i] += static_cast<long double>(slot[i]);
    }
    const Values got = back(sums.sums, DType::f32).values();
    long double error = 0, norm = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      error += (got[i] - exact[i]) * (got[i] - exact[i]);
      norm += exact[i] * exact[i];
    }
    const auto relative = static_cast<double>(std::sqrt(error / norm));
    std::printf("             8 slots of gradients of %.0e: relative L2 error %.2g\n", scale, relative);
    EXPECT_LT(relative, 1e-6) << scale;
  }
}

TEST(FixedPoint, BitsDoNotDependOnThreads) {
  Random random;
  Values values = random.normal(100003);
  values[77777] = std::nan("");
  const TensorOn v(kCpu, DType::f32, {100003}, values);
  expect_independent_of_threads("fixed_point_add", [&] {
    Sums sums(100003);
    for (int i = 0; i < 2; ++i) sums.add(v, 2);
    return bytes_of({sums.sums, sums.overflow, back(sums.sums, DType::f32)});
  });
}

TEST(FixedPoint, WrongArgumentsAreNamed) {
  const TensorOn sums(kCpu, DType::i64, {4}), values(kCpu, DType::f32, {4}), flag(kCpu, DType::i64, {1}),
      narrow(kCpu, DType::bf16, {4}), five(kCpu, DType::f32, {5});
  const auto add = [&](const TensorOn& s, const TensorOn& v, double limit, const TensorOn& f) {
    cpu::fixed_point_add(kCpu, {s, v, true, limit, f});
  };
  expect_rejected("sums must be int64", [&] { add(values, values, 1, flag); });
  expect_rejected("sums must have 5 elements", [&] { add(sums, five, 1, flag); });
  expect_rejected("values must be fp32", [&] { add(sums, narrow, 1, flag); });
  expect_rejected("overflow must have 1 elements", [&] { add(sums, values, 1, sums); });
  for (const double limit : {0.0, -1.0, 4097.0, std::nan("")})
    expect_rejected("not in (0, 4096]", [&] { add(sums, values, limit, flag); });
  expect_rejected("values must be fp32", [&] { cpu::fixed_point_to_float(kCpu, {narrow, sums}); });
  expect_rejected("sums must have 5 elements", [&] { cpu::fixed_point_to_float(kCpu, {five, sums}); });
}

}  // namespace
}  // namespace kinoe::optest
