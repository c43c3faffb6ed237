// exp of vector loops against the C library in fp64: the promised error, and every special value.
#include "kernels/common/vec_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace kinoe {
namespace {

KINOE_SIMD void exp_all(float* y, const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = vec_exp(x[i]);
}

TEST(VecMath, ExpIsWithinOneUlpOverTheWholeRange) {
  std::vector<float> x;
  for (uint32_t bits = 0; bits < 0x7f800000U; bits += 4999) {
    x.push_back(std::bit_cast<float>(bits));
    x.push_back(-x.back());
  }
  for (int i = 0; i < 200000; ++i) x.push_back(-105.0F + 195.0F * static_cast<float>(i) / 200000.0F);
  std::vector<float> y(x.size());
  exp_all(y.data(), x.data(), static_cast<int64_t>(x.size()));
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    if (static_cast<float>(exact) == std::numeric_limits<float>::infinity()) {
      ASSERT_EQ(y[i], std::numeric_limits<float>::infinity()) << x[i];
      continue;
    }
    const double ulp = std::ldexp(1.0, std::max(exact > 0 ? std::ilogb(exact) : -126, -126) - 23);
    const double error = std::abs(static_cast<double>(y[i]) - exact) / ulp;
    ASSERT_LE(error, 1.0) << "exp(" << x[i] << ") = " << y[i];
    worst = std::max(worst, error);
  }
  EXPECT_GT(worst, 0.5);  // otherwise this test measures nothing
}

TEST(VecMath, ExpOfSpecialValues) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(vec_exp(0.0F), 1.0F);
  EXPECT_EQ(vec_exp(-0.0F), 1.0F);
  EXPECT_EQ(vec_exp(kInf), kInf);
  EXPECT_EQ(vec_exp(-kInf), 0.0F);
  EXPECT_EQ(vec_exp(1e30F), kInf);
  EXPECT_EQ(vec_exp(-1e30F), 0.0F);
  EXPECT_TRUE(std::isnan(vec_exp(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_TRUE(std::isfinite(vec_exp(88.72F)));
  EXPECT_EQ(vec_exp(88.73F), kInf);
  EXPECT_GT(vec_exp(-103.0F), 0.0F);  // subnormal
  EXPECT_EQ(vec_exp(1.0), std::exp(1.0));
}

TEST(VecMath, ExpInALoopAgreesWithExpOfOneValue) {
  // The vector body and the scalar tail may fuse differently; they must stay within one unit of each other.
  std::vector<float> x(37), y(37);
  for (size_t i = 0; i < x.size(); ++i) x[i] = 0.37F * static_cast<float>(i) - 7.0F;
  exp_all(y.data(), x.data(), 37);
  for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(y[i], vec_exp(x[i]), 1.2e-7F * y[i]) << x[i];
}

}  // namespace
}  // namespace kinoe
