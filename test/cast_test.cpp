// Casts on the CPU: every bf16, ties, the ends of the range, NaN, every pair of types.
#include "kernels/cast.h"

#include "test/op_cases.h"
#include "test/op_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;

/// Round to nearest even from the two neighbours, in fp64: another way than the bit trick under test.
double nearest_bf16(double x) {
  if (std::isnan(x) || std::isinf(x)) return x;
  const int exponent = std::max(x == 0 ? -126 : std::ilogb(x), -126);
  const double unit = std::ldexp(1.0, exponent - 7);
  const double rounded = std::nearbyint(x / unit) * unit;  // the default mode rounds ties to even
  return std::abs(rounded) >= std::ldexp(1.0, 128) ? std::copysign(std::numeric_limits<double>::infinity(), x)
                                                   : rounded;
}

TEST(Cast, EveryBf16ReturnsFromFloatAndDouble) {
  std::vector<bf16> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i].bits = static_cast<uint16_t>(i);
  const TensorOn from = TensorOn::of(kCpu, {65536}, all);
  const TensorOn single(kCpu, DType::f32, {65536}), wide(kCpu, DType::f64, {65536}),
      back(kCpu, DType::bf16, {65536});
  cpu::cast(kCpu, {single, from});
  cpu::cast(kCpu, {wide, from});
  cpu::cast(kCpu, {back, single});
  from.expect_unchanged("from");
  const std::vector<float> f = single.raw<float>();
  const std::vector<double> d = wide.raw<double>();
  const std::vector<bf16> b = back.raw<bf16>();
  for (size_t i = 0; i < all.size(); ++i) {
    const bool nan = (i & 0x7fff) > 0x7f80;
    ASSERT_EQ(std::isnan(f[i]), nan) << i;
    ASSERT_EQ(std::isnan(d[i]), nan) << i;
    if (!nan) {
      ASSERT_EQ(std::bit_cast<uint32_t>(f[i]), static_cast<uint32_t>(i) << 16);
      ASSERT_EQ(d[i], static_cast<double>(f[i]));
    }
    ASSERT_EQ(b[i].bits, nan ? 0x7fff : i);
  }
}

TEST(Cast, FloatToBf16RoundsToNearestEven) {
  Random random;
  for (const int64_t n : flat_sizes()) {
    SCOPED_TRACE(cat("n=", n));
    Values x = random.outliers(n, 10.0);
    // Ties both ways, just beside ties, subnormals, the largest finite numbers.
    const Values special = {1.00390625, 1.01171875, 0x1.010002p0,   0x1.00fffep0, 0x1p-149,        0x1.8p-134,
                            -0x1p-134,  0x1.fep127, 0x1.fefffep127, 0x1.ffp127,   -0x1.fffffep127, -0.0};
    std::copy_n(special.begin(), std::min(special.size(), x.size()), x.begin());
    const TensorOn from(kCpu, DType::f32, {n}, x), to(kCpu, DType::bf16, {n});
    cpu::cast(kCpu, {to, from});
    to.expect_written("to");
    const Values got = to.values();
    for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(got[i], nearest_bf16(x[i])) << i << ": " << x[i];
  }
}

TEST(Cast, FloatAndDoubleConvertAsTheLanguageDoes) {
  Random random;
  Values x = random.normal(1003);
  x[5] = 1e300;
  x[6] = std::nan("");
  x[7] = 0.1;
  x[8] = 1e-35;
  const TensorOn wide(kCpu, DType::f64, {1003}, x), narrow(kCpu, DType::f32, {1003}),
      back(kCpu, DType::f64, {1003});
  cpu::cast(kCpu, {narrow, wide});
  cpu::cast(kCpu, {back, narrow});
  const Values got = back.values();
  for (size_t i = 0; i < x.size(); ++i) {
    if (i == 6)
      EXPECT_TRUE(std::isnan(got[i]));
    else
      EXPECT_EQ(got[i], static_cast<double>(static_cast<float>(x[i]))) << i;
  }
}

TEST(Cast, ToTheSameTypeCopiesBits) {
  Random random;
  for (const DType type : {DType::f32, DType::bf16, DType::f64}) {
    const TensorOn from(kCpu, type, {777}, random.normal(777)), to(kCpu, type, {777});
    cpu::cast(kCpu, {to, from});
    expect_same_bits(name_of(type), to, from);
  }
}

TEST(Cast, NanAndInfinityStay) {
  const double inf = std::numeric_limits<double>::infinity();
  const TensorOn from(kCpu, DType::f32, {20}, Values(20, std::nan(""))), to(kCpu, DType::bf16, {20});
  cpu::cast(kCpu, {to, from});
  for (const bf16 b : to.raw<bf16>()) EXPECT_EQ(b.bits, 0x7fff);
  const TensorOn infinite(kCpu, DType::f32, {2}, {inf, -inf}), small(kCpu, DType::bf16, {2});
  cpu::cast(kCpu, {small, infinite});
  EXPECT_EQ(small.values(), (Values{inf, -inf}));
}

TEST(Cast, BitsDoNotDependOnThreads) {
  Random random;
  const TensorOn from(kCpu, DType::f32, {100003}, random.normal(100003));
  expect_independent_of_threads("cast", [&] {
    const TensorOn to(kCpu, DType::bf16, {100003});
    cpu::cast(kCpu, {to, from});
    return to.bytes();
  });
}

TEST(Cast, WrongArgumentsAreNamed) {
  const TensorOn f(kCpu, DType::f32, {4}), d(kCpu, DType::f64, {4}), b(kCpu, DType::bf16, {4}),
      i(kCpu, DType::i32, {4}), five(kCpu, DType::f32, {5});
  expect_rejected("rounded twice", [&] { cpu::cast(kCpu, {b, d}); });
  expect_rejected("from int32", [&] { cpu::cast(kCpu, {f, i}); });
  expect_rejected("to must have 4 elements", [&] { cpu::cast(kCpu, {five, b}); });
}

}  // namespace
}  // namespace kinoe::optest
