// The harness must see what it promises to see: each of its checks is made to fail here once.
#include "test/op_harness.h"

#include <gtest/gtest-spi.h>

namespace kinoe::optest {
namespace {

const Context kCpu;

char* memory_of(const TensorOn& t) { return static_cast<char*>(t.tensor().data); }

TEST(OpHarness, SeesWritesBesideABuffer) {
  for (const std::ptrdiff_t at : {-1, -256, 12, 12 + 255}) {
    const TensorOn t = TensorOn::full(kCpu, DType::f32, {3}, 1);
    EXPECT_NONFATAL_FAILURE(
        {
          memory_of(t)[at] = static_cast<char>(memory_of(t)[at] ^ 1);
          t.expect_written("t");
        },
        at < 0 ? "before its begin" : "after its end");
    memory_of(t)[at] = static_cast<char>(memory_of(t)[at] ^ 1);  // its destructor looks again
  }
}

TEST(OpHarness, SeesElementsNeverWrittenInEveryType) {
  for (const DType type : {DType::f32, DType::bf16, DType::f64, DType::i32, DType::i64, DType::u64}) {
    TensorOn t(kCpu, type, {5});
    EXPECT_NONFATAL_FAILURE(t.expect_written("t"), "5 elements never written");
    t.set({1, 2, 3, 4, 5});
    t.expect_written("t");
  }
  for (const DType type : {DType::f32, DType::bf16, DType::f64})
    for (const double v : TensorOn(kCpu, type, {3}).values()) EXPECT_TRUE(std::isnan(v));
}

TEST(OpHarness, SeesAnInputThatChanged) {
  const TensorOn t(kCpu, DType::bf16, {4}, {1, 2, 3, 4});
  t.expect_unchanged("t");
  memory_of(t)[5] = static_cast<char>(memory_of(t)[5] ^ 0x40);
  EXPECT_NONFATAL_FAILURE(t.expect_unchanged("t"), "element 2 was changed");
}

TEST(OpHarness, NanAndInfinityFailWhateverTheTolerance) {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  const Tolerance any{inf, inf, inf};
  expect_close("equal", {nan, inf, -inf, 1}, {nan, inf, -inf, 1}, any);
  EXPECT_NONFATAL_FAILURE(expect_close("x", {nan, 1}, {1, 1}, any),
                          "NaN or Inf where the reference has none");
  EXPECT_NONFATAL_FAILURE(expect_close("x", {1, 1}, {1, nan}, any), "NaN or Inf");
  EXPECT_NONFATAL_FAILURE(expect_close("x", {inf}, {-inf}, any), "NaN or Inf");
  EXPECT_NONFATAL_FAILURE(expect_close("x", {inf}, {nan}, any), "NaN or Inf");
  EXPECT_NONFATAL_FAILURE(expect_close("x", {1}, {1, 2}, any), "1 values, expected 2");
}

TEST(OpHarness, EachToleranceBinds) {
  expect_close("x", {1.1, 100}, {1, 100}, {0.11, 0});
  EXPECT_NONFATAL_FAILURE(expect_close("x", {1.1, 100}, {1, 100}, {0.09, 0}), "1 of 2 values beyond");
  expect_close("x", {0, 101}, {0, 100}, {0, 0.011});
  EXPECT_NONFATAL_FAILURE(expect_close("x", {0, 101}, {0, 100}, {0, 0.009}), "first at 1");
  EXPECT_NONFATAL_FAILURE(expect_close("x", {3, 4}, {0, 5}, {9, 9, 0.5}), "relative L2 0.632");
}

TEST(OpHarness, MetricsAreTheirDefinitions) {
  const Errors e = compare({3, 4.5, 7}, {3, 5, 8});
  EXPECT_EQ(e.max_abs, 1);
  EXPECT_EQ(e.max_rel, 0.125);
  EXPECT_NEAR(e.relative_l2, std::sqrt(1.25 / 98), 1e-15);
  EXPECT_EQ(e.worst, 2);
}

TEST(OpHarness, FiniteDifferencesSeeAWrongGradient) {
  const Forward sine = [](const Values& x) {
    Values out;
    for (const double v : x) out.push_back(std::sin(v));
    return out;
  };
  expect_gradient("sin", sine, {1, 2}, {3, 4}, {3 * std::cos(1.0), 4 * std::cos(2.0)});
  EXPECT_NONFATAL_FAILURE(
      expect_gradient("sin", sine, {1, 2}, {3, 4}, {3 * std::cos(1.0) + 1e-6, 4 * std::cos(2.0)}),
      "gradient against finite differences");
}

TEST(OpHarness, SeesBitsThatDependOnThreads) {
  EXPECT_NONFATAL_FAILURE(
      expect_independent_of_threads(
          "x", [] { return std::vector<char>(1, omp_get_max_threads() == 3 ? 'a' : 'b'); }),
      "other bits with 3 threads");
}

TEST(OpHarness, SeesAcceptanceAndOtherMessages) {
  EXPECT_NONFATAL_FAILURE(expect_rejected("words", [] {}), "accepted");
  EXPECT_NONFATAL_FAILURE(expect_rejected("words", [] { CHECK(false, "something else"); }), "something else");
}

TEST(OpHarness, SeesBitsThatDiffer) {
  const TensorOn zero(kCpu, DType::f32, {2}, {1, 0.0}), minus(kCpu, DType::f32, {2}, {1, -0.0});
  expect_same_bits("zero", zero, zero);
  EXPECT_NONFATAL_FAILURE(expect_same_bits("zero", zero, minus), "element 1");
}

TEST(OpHarness, RandomDataRepeatsAndDiffersFromCallToCall) {
  Random a(7), b(7), c(8);
  const Values first = a.normal(1000), second = a.normal(1000);
  EXPECT_EQ(first, b.normal(1000));
  EXPECT_NE(first, second);
  EXPECT_NE(first, c.normal(1000));
  double sum = 0, squares = 0;
  for (const double v : first) {
    sum += v;
    squares += v * v;
  }
  EXPECT_NEAR(sum / 1000, 0, 0.15);
  EXPECT_NEAR(squares / 1000, 1, 0.2);
  for (const double v : a.normal(100, 3, DType::bf16)) EXPECT_EQ(v, representable(v, DType::bf16));
}

}  // namespace
}  // namespace kinoe::optest
