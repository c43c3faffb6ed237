// Conversions between fp32 and bf16 on the GPU: bit for bit those of kernels/common/dtype.h.
#include "kernels/cast.h"

#include "test/gpu_harness.h"

namespace kinoe::optest {
namespace {

std::vector<float> random_bits(size_t n) {
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i)
    values[i] =
        std::bit_cast<float>(philox(Random::default_seed(), 5, i).v[0]);  // NaN, Inf, denormals among them
  return values;
}

void expect_bf16_bits(const std::string& name, const std::vector<bf16>& actual,
                      const std::vector<float>& from) {
  ASSERT_EQ(actual.size(), from.size()) << name;
  for (size_t i = 0; i < from.size(); ++i)
    ASSERT_EQ(actual[i].bits, to_bf16(from[i]).bits)
        << name << ": element " << i << ", fp32 bits " << std::hex << std::bit_cast<uint32_t>(from[i]);
}

TEST(CastGpu, Fp32ToBf16RoundsToNearestEven) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  std::vector<int64_t> sizes = flat_sizes();
  sizes.push_back(3000000);
  for (const int64_t n : sizes) {
    std::vector<float> from = random_bits(static_cast<size_t>(n));
    // Ties, and what is next to them.
    for (size_t i = 0; i < from.size(); i += 5)
      from[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(from[i]) << 16 |
                                     (0x7fffU + static_cast<uint32_t>(i % 3)));
    const TensorOn in = TensorOn::of(gpu, {n}, from), out(gpu, DType::bf16, {n});
    cast(gpu, {out, in});
    expect_bf16_bits(cat("n = ", n), out.raw<bf16>(), from);
    in.expect_unchanged("from");
  }
}

TEST(CastGpu, Bf16ToFp32IsExactForEveryNumber) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  for (const int64_t n : {65536, 65535, 1, 9}) {
    std::vector<bf16> from;
    for (int64_t i = 0; i < n; ++i)
      from.push_back(bf16{static_cast<uint16_t>(i * 40503)});  // odd: all of them
    const TensorOn in = TensorOn::of(gpu, {n}, from), out(gpu, DType::f32, {n});
    cast(gpu, {out, in});
    const auto bits = out.raw<uint32_t>();
    for (size_t i = 0; i < from.size(); ++i)
      ASSERT_EQ(bits[i], static_cast<uint32_t>(from[i].bits) << 16) << "n = " << n << ", element " << i;
  }
}

TEST(CastGpu, EqualTypesAreCopied) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  const std::vector<float> from = random_bits(1001);
  const TensorOn in = TensorOn::of(gpu, {1001}, from), out(gpu, DType::f32, {1001});
  cast(gpu, {out, in});
  expect_same_bits("fp32 to fp32", out, in);
}

TEST(CastGpu, AddressesThatAllowNoVectors) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  const Values values = random.normal(10007);
  const ShiftedTensor in(gpu, DType::f32, {10007}, 1, values), out(gpu, DType::bf16, {10007}, 3);
  cast(gpu, {out, in});
  Values expected = values;
  for (double& x : expected) x = representable(x, DType::bf16);
  expect_close("fp32 to bf16", out.values(), expected, {0, 0, 0});
  const ShiftedTensor back(gpu, DType::f32, {10007}, 1);
  cast(gpu, {back, out});
  expect_close("bf16 to fp32", back.values(), expected, {0, 0, 0});
}

TEST(CastGpu, MoreThanTwoToThe31Elements) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  constexpr int64_t kN = (int64_t{1} << 31) + 1000003, kBlock = 1000003;
  if (!enough_memory(*device, size_t{6} * kN)) GTEST_SKIP() << "too little memory";
  Random random;
  const Values block = random.normal(kBlock);
  const BigTensor from(gpu, DType::f32, {kN}, block), to(gpu, DType::bf16, {kN});
  cast(gpu, {to, from});
  for (const int64_t begin : {int64_t{0}, (int64_t{1} << 31) - 500, kN - 1000}) {
    Values expected;
    for (int64_t i = begin; i < begin + 1000; ++i)
      expected.push_back(representable(block[static_cast<size_t>(i % kBlock)], DType::bf16));
    expect_close(cat("from element ", begin), to.values(begin, 1000), expected, {0, 0, 0});
  }
}

}  // namespace
}  // namespace kinoe::optest
