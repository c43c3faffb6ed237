// Cross-entropy on the CPU against its definition in long double, finite differences, and what padding, ignored and bad
// targets promise.
#include "kernels/crossentropy.h"

#include "test/op_cases.h"
#include "test/op_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;

struct Result {
  Values losses, d_logits;
  int64_t bad = 0;
};

struct Problem {
  Problem(const CrossEntropyCase& c, DType dtype, Random& random)
      : shape(c), type(dtype), logits(random.normal(c.rows * c.pitch, 3.0)), d_loss(0.25F) {
    targets = random.integers(c.rows, 0, static_cast<int32_t>(c.vocab));
    for (size_t i = 0; i < targets.size(); ++i)
      if (c.targets == Targets::none || (c.targets == Targets::some && i % 3 == 1)) targets[i] = -1;
    // Padding must be able to win every maximum and sum, if it were looked at.
    for (size_t i = 0; i < logits.size(); ++i)
      if (static_cast<int64_t>(i) % c.pitch >= c.vocab) logits[i] = 1e4;
  }

  [[nodiscard]] Result run(const Values& x, bool with_gradient) const {
    const TensorOn in(kCpu, type, {shape.rows, shape.pitch}, x), losses(kCpu, type, {shape.rows});
    const TensorOn ids = TensorOn::of(kCpu, {shape.rows}, targets),
                   bad = TensorOn::of<int64_t>(kCpu, {1}, {0});
    cpu::cross_entropy(kCpu, {in, ids, losses, shape.vocab, d_loss, with_gradient, bad});
    losses.expect_written("losses");
    ids.expect_unchanged("targets");
    if (!with_gradient) in.expect_unchanged("logits");
    return {losses.values(), in.values(), bad.raw<int64_t>()[0]};
  }

  [[nodiscard]] Result expected() const {
    Result r;
    r.d_logits.assign(logits.size(), 0.0);
    for (size_t n = 0; n < targets.size(); ++n) {
      const double* x = logits.data() + n * static_cast<size_t>(shape.pitch);
      const auto vocab = static_cast<size_t>(shape.vocab);
      if (targets[n] < 0 || targets[n] >= shape.vocab) {
        r.losses.push_back(0);
        continue;
      }
      const auto target = static_cast<size_t>(targets[n]);
      long double sum = 0;
      for (size_t v = 0; v < vocab; ++v) sum += std::exp(static_cast<long double>(x[v]));
      r.losses.push_back(static_cast<double>(std::log(sum) - x[target]));
      for (size_t v = 0; v < vocab; ++v)
        r.d_logits[n * static_cast<size_t>(shape.pitch) + v] = static_cast<double>(
            d_loss * (std::exp(static_cast<long double>(x[v])) / sum - (v == target ? 1 : 0)));
    }
    return r;
  }

  CrossEntropyCase shape;
  DType type;
  Values logits;
  float d_loss;
  std::vector<int32_t> targets;
};

TEST(CrossEntropy, LossAndGradientAreTheirDefinition) {
  Random random;
  for (const CrossEntropyCase& c : cases_for(cross_entropy_cases(), kCompare)) {
    SCOPED_TRACE(c.label());
    for (const DType type : {DType::f32, DType::f64}) {
      if (type == DType::f64 && c.vocab > 1024) continue;
      const Problem p(c, type, random);
      const Result expected = p.expected(), plain = p.run(p.logits, false), with = p.run(p.logits, true);
      const Tolerance tolerance = type == DType::f64 ? Tolerance{1e-13, 1e-13} : Tolerance{1e-6, 2e-6};
      expect_close("losses", plain.losses, expected.losses, tolerance);
      expect_close("losses with gradient", with.losses, expected.losses, tolerance);
      expect_close("gradient", with.d_logits, expected.d_logits,
                   type == DType::f64 ? Tolerance{1e-14, 1e-12, 1e-13} : Tolerance{1e-8, 2e-6, 1e-6});
      EXPECT_EQ(with.bad, 0);
    }
  }
}

TEST(CrossEntropy, GradientsAreThoseOfFiniteDifferences) {
  Random random;
  for (const CrossEntropyCase& c : cases_for(cross_entropy_cases(), kGradient)) {
    SCOPED_TRACE(c.label());
    const Problem p(c, DType::f64, random);
    const Values d(p.targets.size(), static_cast<double>(p.d_loss));
    expect_gradient(
        "logits", [&](const Values& x) { return p.run(x, false).losses; }, p.logits, d,
        p.run(p.logits, true).d_logits);
  }
}

TEST(CrossEntropy, EqualLogitsCostTheLogarithmOfTheVocabulary) {
  const CrossEntropyCase c{kCompare, 2, 50257, 50304, Targets::all};
  Random random;
  Problem p(c, DType::f32, random);
  for (const double level : {0.0, 1000.0, -1000.0}) {
    for (double& x : p.logits) x = level;
    const Result r = p.run(p.logits, true);
    EXPECT_NEAR(r.losses[0], std::log(50257.0), 1e-5) << level;
    EXPECT_NEAR(r.d_logits[static_cast<size_t>(p.targets[0])], 0.25 * (1 / 50257.0 - 1), 1e-7) << level;
    EXPECT_EQ(r.d_logits[50257], 0);
    EXPECT_EQ(r.d_logits[50303], 0);
  }
}

TEST(CrossEntropy, FarApartLogitsNeitherOverflowNorVanish) {
  Random random;
  Problem p({kCompare, 2, 3, 3, Targets::all}, DType::f32, random);
  p.logits = {0, 30000, -30000, 0, 30000, -30000};
  p.targets = {1, 2};
  const Result r = p.run(p.logits, true);
  EXPECT_EQ(r.losses[0], 0);
  EXPECT_EQ(r.losses[1], 60000);
  EXPECT_EQ(r.d_logits, (Values{0, 0, 0, 0, 0.25, -0.25}));
}

TEST(CrossEntropy, MinusInfinityIsAnImpossibleToken) {
  Random random;
  Problem p({kCompare, 1, 3, 3, Targets::all}, DType::f32, random);
  const double inf = std::numeric_limits<double>::infinity();
  p.logits = {0, -inf, 0};
  p.targets = {0};
  const Result r = p.run(p.logits, true);
  EXPECT_NEAR(r.losses[0], std::log(2.0), 1e-7);
  EXPECT_EQ(r.d_logits[1], 0);
}

TEST(CrossEntropy, BadTargetsAreFlaggedAndIgnored) {
  Random random;
  Problem p({kCompare, 6, 5, 8, Targets::all}, DType::f32, random);
  p.targets = {0, -2, 4, 5, 1, -1};
  for (const bool with_gradient : {false, true}) {
    const Result r = p.run(p.logits, with_gradient);
    EXPECT_EQ(r.bad, 4);  // 1 + the largest row; -1 is not bad, 5 is, though the padded row has a column 5
    for (const size_t row : {1U, 3U, 5U}) EXPECT_EQ(r.losses[row], 0);
    for (const size_t row : {0U, 2U, 4U}) EXPECT_GT(r.losses[row], 0);
    if (!with_gradient) continue;
    for (size_t i = 0; i < r.d_logits.size(); ++i) {
      const bool zero = (i / 8) % 2 == 1 || i % 8 >= 5;
      EXPECT_EQ(r.d_logits[i] == 0, zero) << i;
    }
  }
}

TEST(CrossEntropy, NegativeTargetsOtherThanMinusOneAreBad) {
  Random random;
  Problem p({kCompare, 3, 5, 8, Targets::all}, DType::f32, random);
  p.targets = {-1, -100, -1};
  EXPECT_EQ(p.run(p.logits, true).bad, 2);
  p.targets = {-1, -1, -1};
  EXPECT_EQ(p.run(p.logits, true).bad, 0);
}

TEST(CrossEntropy, TheFlagIsOnlyRaised) {
  const TensorOn logits = TensorOn::full(kCpu, DType::f32, {1, 4}, 1), losses(kCpu, DType::f32, {1});
  const TensorOn targets = TensorOn::of<int32_t>(kCpu, {1}, {9}),
                 bad = TensorOn::of<int64_t>(kCpu, {1}, {77});
  cpu::cross_entropy(kCpu, {logits, targets, losses, 4, 1.0F, false, bad});
  EXPECT_EQ(bad.raw<int64_t>()[0], 77);
}

TEST(CrossEntropy, NanAndInfinityAreNotHidden) {
  Random random;
  for (const double poison : {std::nan(""), std::numeric_limits<double>::infinity()})
    for (const size_t at : {0U, 1500U, 2999U}) {
      Problem p({kCompare, 3, 3000, 3008, Targets::all}, DType::f32, random);
      p.logits[3008 + at] = poison;
      p.targets[1] = 7;
      for (const bool with_gradient : {false, true}) {
        const Result r = p.run(p.logits, with_gradient);
        for (size_t n = 0; n < 3; ++n)
          EXPECT_EQ(std::isnan(r.losses[n]), n == 1) << "row " << n << ", column " << at;
        if (!with_gradient) continue;
        EXPECT_TRUE(std::isnan(r.d_logits[3008 + 7]));
        EXPECT_FALSE(std::isnan(r.d_logits[7]));
        EXPECT_EQ(r.d_logits[3008 + 3000], 0);  // padding stays padding
      }
    }
}

TEST(CrossEntropy, BitsDoNotDependOnThreads) {
  Random random;
  const Problem p({kCompare, 23, 1003, 1024, Targets::some}, DType::f32, random);
  expect_independent_of_threads("cross-entropy", [&] {
    const Result r = p.run(p.logits, true);
    std::vector<char> bytes = pack(r.losses, DType::f64), more = pack(r.d_logits, DType::f64);
    bytes.insert(bytes.end(), more.begin(), more.end());
    return bytes;
  });
}

/// What loss_sum adds to.
struct Sums {
  explicit Sums(int64_t units = 0, int64_t tokens = 0)
      : sum(TensorOn::of<int64_t>(kCpu, {1}, {units})),
        count(TensorOn::of<int64_t>(kCpu, {1}, {tokens})),
        overflow(TensorOn::of<int64_t>(kCpu, {1}, {0})) {}
  void add(const TensorOn& losses, const TensorOn& targets) const {
    cpu::loss_sum(kCpu, {sum, count, overflow, losses, targets});
  }
  [[nodiscard]] double nats() const { return static_cast<double>(sum.raw<int64_t>()[0]) * kLossUnit; }

  TensorOn sum, count, overflow;
};

TEST(LossSum, AddsTheLossesOfRowsWithATarget) {
  const TensorOn losses(kCpu, DType::f32, {4}, {1.5, 100, 2.25, 0});
  const TensorOn targets = TensorOn::of<int32_t>(kCpu, {4}, {3, -1, 0, 2});
  const Sums sums(int64_t{10} << 24, 5);
  sums.add(losses, targets);
  EXPECT_EQ(sums.nats(), 13.75);
  EXPECT_EQ(sums.count.raw<int64_t>()[0], 8);
  EXPECT_EQ(sums.overflow.raw<int64_t>()[0], 0);
  losses.expect_unchanged("losses");
}

TEST(LossSum, SumsInFp64AndRoundsOnceToEven) {
  const int64_t n = 100000;
  const Values one_tenth(static_cast<size_t>(n), representable(0.1, DType::f32));
  const TensorOn many = TensorOn::full(kCpu, DType::i32, {n}, 1),
                 two = TensorOn::full(kCpu, DType::i32, {2}, 1);
  const Sums sums;
  sums.add(TensorOn(kCpu, DType::f32, {n}, one_tenth), many);
  EXPECT_NEAR(sums.nats(), static_cast<double>(n) * one_tenth[0], kLossUnit / 2 + 1e-8);
  // Sums of two losses, in units: 0.5, 1.5, 2.5, -1.5 and what lies beside a tie.
  struct Case {
    double units;
    int64_t expected;
  };
  for (const Case& c :
       {Case{0.5, 0}, {1.5, 2}, {2.5, 2}, {-1.5, -2}, {2.5 + 0x1p-30, 3}, {2.5 - 0x1p-30, 2}}) {
    const Sums small;
    small.add(TensorOn(kCpu, DType::f64, {2}, {3.0 * kLossUnit, (c.units - 3.0) * kLossUnit}), two);
    EXPECT_EQ(small.sum.raw<int64_t>()[0], c.expected) << c.units;
  }
}

TEST(LossSum, NoOrderOfMicroBatchesChangesABit) {
  Random random;
  std::vector<TensorOn> losses;
  for (int i = 0; i < 6; ++i)
    losses.emplace_back(kCpu, DType::f32, std::vector<int64_t>{77}, random.uniform(77, 0, 12));
  const TensorOn targets = TensorOn::full(kCpu, DType::i32, {77}, 1);
  const Sums forwards, backwards, left, right;
  for (size_t i = 0; i < losses.size(); ++i) {
    forwards.add(losses[i], targets);
    backwards.add(losses[losses.size() - 1 - i], targets);
    (i % 3 == 0 ? left : right).add(losses[i], targets);  // two ranks
  }
  const int64_t sum = forwards.sum.raw<int64_t>()[0];
  EXPECT_GT(sum, int64_t{1000} << 24);
  EXPECT_EQ(backwards.sum.raw<int64_t>()[0], sum);
  EXPECT_EQ(left.sum.raw<int64_t>()[0] + right.sum.raw<int64_t>()[0], sum);
}

TEST(LossSum, WhatIsNotFiniteOrTooLargeIsFlaggedAndNotAdded) {
  const TensorOn targets = TensorOn::full(kCpu, DType::i32, {4}, 1);
  const double inf = std::numeric_limits<double>::infinity(), limit = kLossLimit,
               above = std::nextafter(limit, inf);
  struct Case {
    double each;
    bool good;
  };
  for (const DType type : {DType::f32, DType::f64})
    for (const Case& c : {Case{std::nan(""), false},
                          {inf, false},
                          {-inf, false},
                          {1e30, false},
                          {limit, true},
                          {-limit, true},
                          {type == DType::f32 ? limit + 0x1p-9 : above, false}}) {
      const Sums sums(77, 1);
      sums.add(TensorOn(kCpu, type, {4}, {c.each, c.each, c.each, c.each}), targets);
      EXPECT_EQ(sums.overflow.raw<int64_t>()[0], c.good ? 0 : 1) << c.each;
      EXPECT_EQ(sums.sum.raw<int64_t>()[0], c.good ? 77 + std::llrint(4 * c.each / kLossUnit) : 77) << c.each;
      EXPECT_EQ(sums.count.raw<int64_t>()[0], 5) << c.each;
      // Sticky.
      sums.add(TensorOn(kCpu, type, {4}, {1, 1, 1, 1}), targets);
      EXPECT_EQ(sums.overflow.raw<int64_t>()[0], c.good ? 0 : 1) << c.each;
    }
}

TEST(LossSum, AllIgnoredAddsNothing) {
  const TensorOn losses(kCpu, DType::f32, {3}, {0, 0, 0}),
      targets = TensorOn::full(kCpu, DType::i32, {3}, -1);
  const Sums sums;
  sums.add(losses, targets);
  EXPECT_EQ(sums.sum.raw<int64_t>()[0], 0);
  EXPECT_EQ(sums.count.raw<int64_t>()[0], 0);
  EXPECT_EQ(sums.overflow.raw<int64_t>()[0], 0);
}

TEST(CrossEntropy, WrongArgumentsAreNamed) {
  const TensorOn logits(kCpu, DType::f32, {2, 4}), losses(kCpu, DType::f32, {2}),
      targets(kCpu, DType::i32, {2}), bad(kCpu, DType::i64, {1}), wide(kCpu, DType::f64, {2});
  expect_rejected("vocab_size 5 in rows of 4", [&] {
    cpu::cross_entropy(kCpu, {logits, targets, losses, 5, 1.0F, true, bad});
  });
  expect_rejected("losses must be fp32", [&] {
    cpu::cross_entropy(kCpu, {logits, targets, wide, 4, 1.0F, true, bad});
  });
  expect_rejected("targets must be int32", [&] {
    cpu::cross_entropy(kCpu, {logits, losses, losses, 4, 1.0F, true, bad});
  });
  expect_rejected("count must be int64", [&] { cpu::loss_sum(kCpu, {bad, wide, bad, losses, targets}); });
  expect_rejected("sum must be int64", [&] { cpu::loss_sum(kCpu, {wide, bad, bad, losses, targets}); });
  expect_rejected("overflow must be int64", [&] { cpu::loss_sum(kCpu, {bad, bad, wide, losses, targets}); });
}

}  // namespace
}  // namespace kinoe::optest
