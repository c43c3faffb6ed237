// Sums in fixed point on the GPU: bit for bit those of the CPU.
#include "kernels/fixed_point.h"

#include "test/fixed_point_harness.h"
#include "test/gpu_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;

struct Result {
  std::vector<int64_t> sums;
  int64_t overflow;
  friend bool operator==(const Result&, const Result&) = default;
};

/// The sum of `slots`, the first of them stored.
Result sum_of(const Context& ctx, const std::vector<std::vector<float>>& slots, double limit) {
  const auto n = static_cast<int64_t>(slots.front().size());
  const TensorOn sums(ctx, DType::i64, {n}), overflow = TensorOn::of<int64_t>(ctx, {1}, {0});
  for (size_t i = 0; i < slots.size(); ++i) {
    const TensorOn values = TensorOn::of(ctx, {n}, slots[i]);
    fixed_point_add(ctx, {sums, values, i == 0, limit, overflow});
    values.expect_unchanged("values");
    sums.expect_written("sums");
  }
  return {sums.raw<int64_t>(), overflow.raw<int64_t>()[0]};
}

void expect_same(const Result& actual, const Result& expected, const std::vector<std::vector<float>>& slots) {
  EXPECT_EQ(actual.overflow, expected.overflow);
  ASSERT_EQ(actual.sums.size(), expected.sums.size());
  for (size_t i = 0; i < expected.sums.size(); ++i) {
    if (actual.sums[i] == expected.sums[i]) continue;
    std::string terms;
    for (const std::vector<float>& slot : slots) terms += cat(" ", static_cast<double>(slot[i]));
    ADD_FAILURE() << "element " << i << " of " << expected.sums.size() << ": " << actual.sums[i]
                  << ", the CPU has " << expected.sums[i] << "; terms" << terms;
    return;
  }
}

std::vector<float> gradients(int64_t n, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) {
    const Philox4 w = philox(Random::default_seed() + seed, 6, i);
    // Every magnitude from 2^-60, below half a unit, to 2^1.
    values[i] = std::ldexp(static_cast<float>(static_cast<int32_t>(w.v[0])) * 0x1p-31F,
                           1 - static_cast<int>(w.v[1] % 61));
    // Ties, and what is next to them.
    if (w.v[2] % 8 == 0)
      values[i] = (static_cast<float>(w.v[3] % 4096) + 0.5F + static_cast<float>(w.v[2] / 8 % 3) * 0x1p-11F -
                   0x1p-11F) *
                  0x1p-50F;
  }
  return values;
}

TEST(FixedPointGpu, SumsHaveTheBitsOfTheCpu) {
  KINOE_GPU_OR_SKIP(device);
  std::vector<int64_t> sizes = flat_sizes();
  for (const int64_t n : {2047, 2048, 2049, 3000000, 3000001}) sizes.push_back(n);
  for (const int64_t n : sizes) {
    SCOPED_TRACE(cat("n = ", n));
    const std::vector<std::vector<float>> slots = {gradients(n, 1), gradients(n, 2), gradients(n, 3)};
    const Result gpu = sum_of(device->context(), slots, gradient_limit(3));
    expect_same(gpu, sum_of(kCpu, slots, gradient_limit(3)), slots);
    EXPECT_EQ(gpu.overflow, 0);
    const std::vector<std::vector<float>> other = {slots[2], slots[0], slots[1]};
    EXPECT_TRUE(sum_of(device->context(), other, gradient_limit(3)) == gpu) << "another order of the terms";
  }
}

TEST(FixedPointGpu, AnyBitsAreTakenOrFlaggedAsOnTheCpu) {
  KINOE_GPU_OR_SKIP(device);
  constexpr int64_t kN = 300007;  // NaN, Inf, subnormal numbers, all magnitudes and both zeros among them
  std::vector<float> values(kN);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = std::bit_cast<float>(philox(Random::default_seed(), 8, i).v[0]);
  values[7] = -0.0F;
  for (const int64_t slots : {1, 3, 1000}) {
    const Result gpu = sum_of(device->context(), {values, values}, gradient_limit(slots));
    expect_same(gpu, sum_of(kCpu, {values, values}, gradient_limit(slots)), {values, values});
    EXPECT_EQ(gpu.overflow, 1);
  }
}

TEST(FixedPointGpu, TheFlagIsSetWhereverTheElementIs) {
  KINOE_GPU_OR_SKIP(device);
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const int64_t slots : {1, 3, 7, 1000}) {
    auto below = static_cast<float>(gradient_limit(slots));
    while (static_cast<double>(below) >= gradient_limit(slots)) below = std::nextafter(below, 0.0F);
    const float above = std::nextafter(below, inf);
    for (const float value : {below, -below, above, -above, nan, inf, -inf})
      for (const int64_t n : {1, 2, 2049, 100003})
        for (const int64_t at : {int64_t{0}, n / 2, n - 1}) {
          std::vector<float> values(static_cast<size_t>(n), 1e-3F);
          values[static_cast<size_t>(at)] = value;
          SCOPED_TRACE(cat("slots ", slots, ", ", static_cast<double>(value), " at ", at, " of ", n));
          const Result gpu = sum_of(device->context(), {values}, gradient_limit(slots));
          expect_same(gpu, sum_of(kCpu, {values}, gradient_limit(slots)), {values});
          EXPECT_EQ(gpu.overflow, std::abs(value) == below ? 0 : 1);
        }
  }
}

TEST(FixedPointGpu, TheFlagIsNeverCleared) {
  KINOE_GPU_OR_SKIP(device);
  const std::vector<float> good(5000, 0.5F), bad(5000, 1e9F);
  EXPECT_EQ(sum_of(device->context(), {bad, good, good}, gradient_limit(3)).overflow, 1);
}

TEST(FixedPointGpu, BackToFloatHasTheBitsOfTheCpu) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  std::vector<int64_t> sizes = flat_sizes();
  for (const int64_t n : {2047, 2048, 2049, 3000001}) sizes.push_back(n);
  for (const int64_t n : sizes) {
    const std::vector<int64_t> sums = telling_sums(static_cast<size_t>(n));
    const TensorOn in = TensorOn::of(gpu, {n}, sums), out(gpu, DType::f32, {n});
    fixed_point_to_float(gpu, {out, in});
    in.expect_unchanged("sums");
    out.expect_written("values");
    const TensorOn host = TensorOn::of(kCpu, {n}, sums), expected(kCpu, DType::f32, {n});
    fixed_point_to_float(kCpu, {expected, host});
    expect_same_bits(cat("n = ", n), out, expected);
    const std::vector<float> values = out.raw<float>();
    for (size_t i = 0; i < values.size(); i += 7)
      ASSERT_EQ(static_cast<double>(values[i]), nearest_of_fixed(sums[i], 24)) << sums[i];
  }
}

TEST(FixedPointGpu, AddressesThatAllowNoPairs) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  constexpr int64_t kN = 10007;
  const std::vector<float> slot = gradients(kN, 4);
  const std::vector<std::vector<float>> slots = {slot, slot};
  const Result expected = sum_of(kCpu, slots, 1);
  const std::vector<int64_t> old = telling_sums(kN + 3);
  for (const int64_t values_at : {0, 1, 2, 3})
    for (const int64_t sums_at : {0, 1, 2}) {
      SCOPED_TRACE(cat("values from element ", values_at, ", sums from element ", sums_at));
      std::vector<float> padded(kN + 3, 77.0F);
      std::copy(slot.begin(), slot.end(), padded.begin() + values_at);
      const TensorOn values = TensorOn::of(gpu, {kN + 3}, padded), sums = TensorOn::of(gpu, {kN + 3}, old),
                     overflow = TensorOn::of<int64_t>(gpu, {1}, {0});
      const Tensor v = values.tensor().slice(values_at, kN), s = sums.tensor().slice(sums_at, kN);
      fixed_point_add(gpu, {s, v, true, 1, overflow});
      fixed_point_add(gpu, {s, v, false, 1, overflow});
      const std::vector<int64_t> all = sums.raw<int64_t>();
      const auto begin = all.begin() + sums_at;
      expect_same({{begin, begin + kN}, overflow.raw<int64_t>()[0]}, expected, slots);
      for (int64_t i = 0; i < kN + 3; ++i) {
        if (i >= sums_at && i < sums_at + kN) continue;
        EXPECT_EQ(all[static_cast<size_t>(i)], old[static_cast<size_t>(i)]) << "written outside, at " << i;
      }

      fixed_point_to_float(gpu, {v, s});
      const std::vector<float> floats = values.raw<float>();
      for (int64_t i = 0; i < kN + 3; ++i) {
        const bool inside = i >= values_at && i < values_at + kN;
        const double exact =
            inside ? nearest_of_fixed(expected.sums[static_cast<size_t>(i - values_at)], 24) : 77.0;
        ASSERT_EQ(static_cast<double>(floats[static_cast<size_t>(i)]), exact) << "element " << i;
      }
    }
}

TEST(FixedPointGpu, MoreThanTwoToThe31Elements) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  constexpr int64_t kN = (int64_t{1} << 31) + 1000003, kBlock = 1000003;
  if (!enough_memory(*device, size_t{16} * kN)) GTEST_SKIP() << "too little memory";
  Random random;
  const Values block = random.normal(kBlock, 1e-3);
  const BigTensor values(gpu, DType::f32, {kN}, block), sums(gpu, DType::i64, {kN}),
      out(gpu, DType::f32, {kN});
  const TensorOn overflow = TensorOn::of<int64_t>(gpu, {1}, {0});
  for (const bool store : {true, false, false}) fixed_point_add(gpu, {sums, values, store, 1, overflow});
  fixed_point_to_float(gpu, {out, sums});
  EXPECT_EQ(overflow.raw<int64_t>()[0], 0);
  for (const int64_t begin : {int64_t{0}, (int64_t{1} << 31) - 500, kN - 1000}) {
    Values expected, floats;  // three times 1e-3 in units is below 2^53: a double holds it
    for (int64_t i = begin; i < begin + 1000; ++i) {
      const int64_t sum = 3 * exact_fixed(block[static_cast<size_t>(i % kBlock)]);
      expected.push_back(static_cast<double>(sum));
      floats.push_back(nearest_of_fixed(sum, 24));
    }
    expect_close(cat("sums from element ", begin), sums.values(begin, 1000), expected, {0, 0, 0});
    expect_close(cat("values from element ", begin), out.values(begin, 1000), floats, {0, 0, 0});
  }
}

}  // namespace
}  // namespace kinoe::optest
