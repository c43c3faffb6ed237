// Learning rates against the formulas of schedule.h, and exactness at the ends.
#include "trainer/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

// Numbers without a short binary form: an end point that is right by luck of rounding would show.
constexpr double kLr = 6e-4;
constexpr double kFrac = 0.07;

Schedule make(ScheduleKind kind, int64_t warmup = 1001, int64_t total = 10007) {
  return {.kind = kind, .lr = kLr, .min_lr_frac = kFrac, .warmup_tokens = warmup, .total_tokens = total};
}

TEST(Schedule, EndPointsAreExact) {
  for (const std::string& name : schedule_names()) {
    const Schedule s = make(schedule_kind(name));
    const double end = s.kind == ScheduleKind::constant ? kLr : kLr * kFrac;
    EXPECT_EQ(s.at(0), 0.0) << name;
    EXPECT_EQ(s.at(1001), kLr) << name;
    EXPECT_EQ(s.at(10007), end) << name;
    EXPECT_EQ(s.at(10008), end) << name;
    EXPECT_EQ(s.at(std::numeric_limits<int64_t>::max()), end) << name;
  }
}

TEST(Schedule, WarmupIsLinear) {
  const Schedule s = make(ScheduleKind::cosine, 1000, 10000);
  EXPECT_EQ(s.at(250), kLr * 0.25);
  EXPECT_EQ(s.at(500), kLr * 0.5);
  EXPECT_LT(s.at(999), kLr);
}

TEST(Schedule, NoWarmupStartsAtThePeak) {
  for (const std::string& name : schedule_names()) EXPECT_EQ(make(schedule_kind(name), 0).at(0), kLr) << name;
}

TEST(Schedule, CosineIsHalfWayDownInTheMiddle) {
  const Schedule s = make(ScheduleKind::cosine, 1000, 9000);
  EXPECT_NEAR(s.at(5000), kLr * (1 + kFrac) / 2, 1e-18);
  // A quarter of the way the cosine of 45 degrees.
  EXPECT_NEAR(s.at(3000), kLr * (kFrac + (1 - kFrac) * (1 + std::numbers::sqrt2 / 2) / 2), 1e-18);
}

TEST(Schedule, LinearIsLinear) {
  const Schedule s = make(ScheduleKind::linear, 1000, 9000);
  EXPECT_NEAR(s.at(3000), kLr * (kFrac + (1 - kFrac) * 0.75), 1e-18);
  EXPECT_NEAR(s.at(7000), kLr * (kFrac + (1 - kFrac) * 0.25), 1e-18);
}

TEST(Schedule, WsdDecaysOverTheLastFifth) {
  const Schedule s = make(ScheduleKind::wsd, 1000, 10000);
  EXPECT_EQ(s.at(1000), kLr);
  EXPECT_EQ(s.at(8000), kLr);
  EXPECT_LT(s.at(8001), kLr);
  EXPECT_NEAR(s.at(9000), kLr * (1 + kFrac) / 2, 1e-18);
}

TEST(Schedule, WsdDecayNeverStartsWithinTheWarmup) {
  const Schedule s = make(ScheduleKind::wsd, 9000, 10000);
  EXPECT_EQ(s.at(9000), kLr);
  EXPECT_NEAR(s.at(9500), kLr * (1 + kFrac) / 2, 1e-18);
  EXPECT_EQ(s.at(10000), kLr * kFrac);
}

TEST(Schedule, ConstantStays) {
  const Schedule s = make(ScheduleKind::constant, 10, 100);
  for (const int64_t t : {10, 11, 55, 99, 100, 101}) EXPECT_EQ(s.at(t), kLr);
}

TEST(Schedule, NeverRisesAfterTheWarmupAndStaysWithinBounds) {
  for (const std::string& name : schedule_names()) {
    const Schedule s = make(schedule_kind(name), 37, 1000);
    for (int64_t t = 38; t <= 1100; ++t) {
      EXPECT_LE(s.at(t), s.at(t - 1)) << name << " " << t;
      EXPECT_GE(s.at(t), kLr * kFrac) << name << " " << t;
    }
  }
}

TEST(Schedule, ARunThatIsAllWarmupEndsAtThePeak) {
  const Schedule s = make(ScheduleKind::cosine, 100, 100);
  EXPECT_EQ(s.at(50), kLr * 0.5);
  EXPECT_EQ(s.at(100), kLr);
  EXPECT_EQ(s.at(101), kLr);
}

TEST(Schedule, HugeTokenCounts) {
  const Schedule s = make(ScheduleKind::cosine, 375'000'000, 15'000'000'000'000);
  EXPECT_EQ(s.at(375'000'000), kLr);
  EXPECT_EQ(s.at(15'000'000'000'000), kLr * kFrac);
  EXPECT_NEAR(s.at(7'500'187'500'000), kLr * (1 + kFrac) / 2, 1e-18);
}

std::string refusal(const Schedule& schedule) {
  try {
    validate(schedule);
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ExitCode::usage);
    return error.what();
  }
  return "";
}

TEST(Schedule, ValidateRefusesWhatCannotWork) {
  const double nan = std::nan("");
  const double inf = std::numeric_limits<double>::infinity();
  const Schedule good = make(ScheduleKind::cosine);
  EXPECT_EQ(refusal(good), "");
  for (const double lr : {0.0, -1.0, nan, inf}) {
    Schedule s = good;
    s.lr = lr;
    EXPECT_NE(refusal(s).find("learning rate"), std::string::npos) << lr;
  }
  for (const double fraction : {-0.1, 1.1, nan}) {
    Schedule s = good;
    s.min_lr_frac = fraction;
    EXPECT_NE(refusal(s).find("min-lr-frac"), std::string::npos) << fraction;
    s = good;
    s.wsd_decay_frac = fraction;
    EXPECT_NE(refusal(s).find("wsd"), std::string::npos) << fraction;
  }
  EXPECT_NE(refusal(make(ScheduleKind::cosine, 10008)).find("warm-up"), std::string::npos);
  EXPECT_NE(refusal(make(ScheduleKind::cosine, -1)).find("warm-up"), std::string::npos);
  EXPECT_NE(refusal(make(ScheduleKind::cosine, 0, 0)).find("run"), std::string::npos);
  EXPECT_EQ(refusal(make(ScheduleKind::cosine, 10007)), "");
}

TEST(Schedule, NamesAndKinds) {
  EXPECT_EQ(schedule_kind("cosine"), ScheduleKind::cosine);
  EXPECT_EQ(schedule_kind("linear"), ScheduleKind::linear);
  EXPECT_EQ(schedule_kind("wsd"), ScheduleKind::wsd);
  EXPECT_EQ(schedule_kind("constant"), ScheduleKind::constant);
  for (const std::string& name : schedule_names()) EXPECT_EQ(name, name_of(schedule_kind(name)));
  try {
    schedule_kind("cosin");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ExitCode::usage);
    EXPECT_NE(std::string(error.what()).find("nearest known: cosine"), std::string::npos);
  }
}

}  // namespace
}  // namespace kinoe
