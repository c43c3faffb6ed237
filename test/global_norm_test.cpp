// The global norm on the CPU: canonical chunks, fp64 sums, nothing hidden.
#include "kernels/global_norm.h"

#include "test/op_cases.h"
#include "test/op_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;

Values partials(const Values& gradients, DType type) {
  const auto n = static_cast<int64_t>(gradients.size());
  const TensorOn g(kCpu, type, {n}, gradients), p(kCpu, DType::f64, {(n + kChunk - 1) / kChunk});
  cpu::norm_partials(kCpu, {p, g});
  p.expect_written("partials");
  g.expect_unchanged("gradients");
  return p.values();
}

double finish(const Values& sums) {
  const TensorOn p(kCpu, DType::f64, {static_cast<int64_t>(sums.size())}, sums), norm(kCpu, DType::f64, {1});
  cpu::norm_finish(kCpu, {norm, p, {}});
  norm.expect_written("norm");
  return norm.values()[0];
}

TEST(GlobalNorm, PartialSumsAreThoseOfTheirChunks) {
  Random random;
  for (const int64_t n : flat_sizes())
    for (const DType type : {DType::f32, DType::f64}) {
      SCOPED_TRACE(cat("n=", n));
      const Values g = random.normal(n);
      Values expected(static_cast<size_t>((n + kChunk - 1) / kChunk));
      long double all = 0;
      for (size_t i = 0; i < g.size(); ++i) {
        expected[i / kChunk] += g[i] * g[i];
        all += static_cast<long double>(g[i]) * g[i];
      }
      const Values sums = partials(g, type);
      expect_close("partials", sums, expected, {0, 1e-12, 1e-12});
      EXPECT_NEAR(finish(sums), static_cast<double>(std::sqrt(all)),
                  1e-12 * static_cast<double>(std::sqrt(all)));
    }
}

TEST(GlobalNorm, ThreeFourFive) {
  Values g(3 * kChunk, 0.0);
  g[7] = 3;
  g[2 * kChunk + 1] = -4;
  EXPECT_EQ(partials(g, DType::f32), (Values{9, 0, 16}));
  EXPECT_EQ(finish({9, 0, 16}), 5);
}

TEST(GlobalNorm, SquaresNeitherOverflowNorVanish) {
  EXPECT_NEAR(finish(partials(Values(4, 1e30), DType::f32)), 2e30, 1e24);
  EXPECT_NEAR(finish(partials(Values(4, 1e-30), DType::f32)), 2e-30, 1e-36);
}

TEST(GlobalNorm, NanAndInfinityAreNotHidden) {
  Values g(kChunk + 5, 1.0);
  for (const size_t at :
       {size_t{0}, size_t{100}, static_cast<size_t>(kChunk), static_cast<size_t>(kChunk + 4)}) {
    Values h = g;
    h[at] = std::nan("");
    EXPECT_TRUE(std::isnan(finish(partials(h, DType::f32)))) << at;
    h[at] = -std::numeric_limits<double>::infinity();
    EXPECT_TRUE(std::isinf(finish(partials(h, DType::f32)))) << at;
  }
}

TEST(GlobalNorm, PartialSumsDoNotDependOnWhereARangeWasCut) {
  // What makes the norm independent of the rank count: chunk i alone gives partial i of the whole.
  Random random;
  const Values g = random.normal(3 * kChunk + 11), whole = partials(g, DType::f32);
  for (size_t i = 0; i < whole.size(); ++i) {
    const auto from = g.begin() + static_cast<std::ptrdiff_t>(i * kChunk);
    const auto to = i + 1 < whole.size() ? from + kChunk : g.end();
    EXPECT_EQ(partials(Values(from, to), DType::f32)[0], whole[i]) << i;
  }
}

TEST(GlobalNorm, AnOrderUndoesAPermutationToTheBit) {
  // Partials gathered from ranks, and room that no chunk needs.
  Random random;
  for (const int64_t m : {1, 2, 7, 1000}) {
    const Values sums = random.uniform(m, 0, 1);
    Values gathered(static_cast<size_t>(m + 3), std::nan(""));
    std::vector<int64_t> order;
    for (int64_t i = 0; i < m; ++i) {
      order.push_back(3 + 11 * i % m);  // m is no multiple of 11: a permutation
      gathered[static_cast<size_t>(order.back())] = sums[static_cast<size_t>(i)];
    }
    const TensorOn p(kCpu, DType::f64, {m + 3}, gathered), places = TensorOn::of(kCpu, {m}, order),
                                                           norm(kCpu, DType::f64, {1});
    cpu::norm_finish(kCpu, {norm, p, places});
    EXPECT_EQ(norm.values()[0], finish(sums)) << m << " partials";
    p.expect_unchanged("partials");
    places.expect_unchanged("order");
  }
}

TEST(GlobalNorm, BitsDoNotDependOnThreads) {
  Random random;
  const Values g = random.normal(7 * kChunk + 3);
  expect_independent_of_threads("norm_partials", [&] { return pack(partials(g, DType::f32), DType::f64); });
}

TEST(GlobalNorm, WrongArgumentsAreNamed) {
  const TensorOn g(kCpu, DType::f32, {kChunk + 1}), one(kCpu, DType::f64, {1}), half(kCpu, DType::bf16, {4});
  expect_rejected("partials must have 2 elements", [&] { cpu::norm_partials(kCpu, {one, g}); });
  expect_rejected("gradients must be fp32", [&] { cpu::norm_partials(kCpu, {one, half}); });
  const TensorOn places = TensorOn::of<int64_t>(kCpu, {1}, {1}), norm(kCpu, DType::f64, {1}, {0});
  expect_rejected("order[0] is 1, there are 1 partials", [&] {
    cpu::norm_finish(kCpu, {one, norm, places});
  });
  expect_rejected("order must be int64", [&] { cpu::norm_finish(kCpu, {one, norm, norm}); });
  expect_rejected("partials must be fp64", [&] { cpu::norm_finish(kCpu, {one, g, {}}); });
}

}  // namespace
}  // namespace kinoe::optest
