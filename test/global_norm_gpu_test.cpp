// The gradient norm on the GPU against the CPU: both sum in fp64.
#include "kernels/global_norm.h"

#include "test/gpu_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;
constexpr Tolerance kFp64{0, 1e-13, 1e-13};

int64_t chunks_of(int64_t n) { return (n + kChunk - 1) / kChunk; }

/// {partials, norm}
Outputs run(const Context& ctx, const Values& gradients) {
  const auto n = static_cast<int64_t>(gradients.size());
  const TensorOn g(ctx, DType::f32, {n}, gradients), partials(ctx, DType::f64, {chunks_of(n)}),
      norm(ctx, DType::f64, {1});
  norm_partials(ctx, {partials, g});
  norm_finish(ctx, {norm, partials, {}});
  g.expect_unchanged("gradients");
  partials.expect_written("partials");
  return {{"partials", partials}, {"norm", norm}};
}

TEST(GlobalNormGpu, EqualsTheCpu) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  std::vector<int64_t> sizes = flat_sizes();
  sizes.push_back(5 * kChunk);
  for (const int64_t n : sizes) {
    const Values g = random.outliers(n, 1e-3);
    const Outputs actual = run(device->context(), g), exact = run(kCpu, g);
    for (size_t i = 0; i < 2; ++i)
      expect_close(cat(actual[i].name, ", n = ", n), actual[i].tensor.values(), exact[i].tensor.values(),
                   kFp64);
  }
}

TEST(GlobalNormGpu, FinishAddsAnyNumberOfPartials) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const int64_t m : {1, 31, 1023, 1024, 1025, 8191, 500003}) {
    const Values partials = random.uniform(m, 0, 1);
    double norms[2];
    for (const bool on_gpu : {false, true}) {
      const Context ctx = on_gpu ? device->context() : kCpu;
      const TensorOn in(ctx, DType::f64, {m}, partials), norm(ctx, DType::f64, {1});
      norm_finish(ctx, {norm, in, {}});
      in.expect_unchanged("partials");
      norms[on_gpu ? 1 : 0] = norm.values()[0];
    }
    EXPECT_NEAR(norms[1], norms[0], 1e-12 * norms[0]) << m << " partials";
  }
}

// Partials gathered from ranks: each one's chunks, then room that no chunk needs.
TEST(GlobalNormGpu, AnOrderUndoesAPermutationToTheBit) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const int64_t m : {1, 31, 1024, 1025, 8191, 50003}) {
    const Values partials = random.uniform(m, 0, 1);
    const TensorOn in(gpu, DType::f64, {m}, partials), norm(gpu, DType::f64, {1});
    norm_finish(gpu, {norm, in, {}});
    Values gathered(static_cast<size_t>(m + 7), std::nan(""));
    std::vector<int64_t> order;
    for (int64_t i = 0; i < m; ++i) {
      order.push_back(m + 6 - i);
      gathered[static_cast<size_t>(m + 6 - i)] = partials[static_cast<size_t>(i)];
    }
    const TensorOn moved(gpu, DType::f64, {m + 7}, gathered), places = TensorOn::of(gpu, {m}, order),
                                                              again(gpu, DType::f64, {1});
    norm_finish(gpu, {again, moved, places});
    EXPECT_EQ(again.values()[0], norm.values()[0]) << m << " partials";
    moved.expect_unchanged("partials");
    places.expect_unchanged("order");
  }
}

TEST(GlobalNormGpu, SquaresNeitherOverflowNorVanish) {
  KINOE_GPU_OR_SKIP(device);
  for (const double size : {1e38, 1e-38, 1e-44}) {
    const auto g = static_cast<double>(static_cast<float>(size));
    const Values values(static_cast<size_t>(2 * kChunk), g);
    const double norm = run(device->context(), values)[1].tensor.values()[0];
    EXPECT_NEAR(norm / (g * std::sqrt(static_cast<double>(2 * kChunk))), 1, 1e-12) << size;
  }
}

TEST(GlobalNormGpu, NanAndInfReachTheNorm) {
  KINOE_GPU_OR_SKIP(device);
  for (const int64_t at : {int64_t{0}, kChunk - 1, kChunk, 3 * kChunk + 4}) {
    Values g(static_cast<size_t>(3 * kChunk + 5), 1);
    g[static_cast<size_t>(at)] = std::nan("");
    EXPECT_TRUE(std::isnan(run(device->context(), g)[1].tensor.values()[0])) << at;
    g[static_cast<size_t>(at)] = -std::numeric_limits<double>::infinity();
    EXPECT_EQ(run(device->context(), g)[1].tensor.values()[0], std::numeric_limits<double>::infinity()) << at;
  }
}

TEST(GlobalNormGpu, Repeats) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  const Values g = random.normal(70 * kChunk + 77);
  expect_repeats(
      "norm", [&] { return run(device->context(), g); }, 3);
}

// A range whose address allows no vector access has its own order, but the same value.
TEST(GlobalNormGpu, AddressesThatAllowNoVectors) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  const Values g = random.normal(2 * kChunk + 9);
  const ShiftedTensor shifted(gpu, DType::f32, {static_cast<int64_t>(g.size())}, 1, g);
  const TensorOn partials(gpu, DType::f64, {3});
  norm_partials(gpu, {partials, shifted});
  expect_close("partials", partials.values(), run(gpu, g)[0].tensor.values(), kFp64);
}

TEST(GlobalNormGpu, MoreThanTwoToThe31Elements) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  constexpr int64_t kN = (int64_t{1} << 31) + 7 * kChunk + 5, kBlock = 16 * kChunk;
  if (!enough_memory(*device, size_t{4} * kN)) GTEST_SKIP() << "too little memory";
  Random random;
  const Values block = random.normal(kBlock);
  const Values block_partials = run(kCpu, block)[0].tensor.values();
  const BigTensor g(gpu, DType::f32, {kN}, block);
  const BigTensor partials(gpu, DType::f64, {chunks_of(kN)});
  const TensorOn norm(gpu, DType::f64, {1});
  norm_partials(gpu, {partials, g});
  norm_finish(gpu, {norm, partials, {}});
  const int64_t whole = kN / kChunk;
  Values expected;
  for (int64_t i = 0; i < whole; ++i) expected.push_back(block_partials[static_cast<size_t>(i % 16)]);
  expect_close("partials", partials.values(0, whole), expected, kFp64);
  double sum = 0;
  for (const double x : partials.values(0, whole + 1)) sum += x;
  EXPECT_NEAR(norm.values()[0], std::sqrt(sum), 1e-10 * std::sqrt(sum));
}

}  // namespace
}  // namespace kinoe::optest
