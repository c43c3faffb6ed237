// When a step counts as hung.
#include "trainer/step_limit.h"

#include <gtest/gtest.h>

namespace kinoe {
namespace {

TEST(StepLimit, IsTenMediansOrWhatTheUserSaid) {
  StepLimit limit(40);
  EXPECT_EQ(limit.seconds(), 600);
  for (const double ms : {9000.0, 5000.0}) limit.took(ms);
  EXPECT_EQ(limit.seconds(), 600) << "the first steps say little";
  limit.took(6000);
  EXPECT_EQ(limit.seconds(), 60);
  for (int i = 0; i < 100; ++i) limit.took(1000);
  EXPECT_EQ(limit.seconds(), 40) << "no less than --hang-timeout";
  for (int i = 0; i < 15; ++i) limit.took(20000);
  EXPECT_EQ(limit.seconds(), 40) << "the median of the last 31, not the mean";
  limit.took(20000);
  EXPECT_EQ(limit.seconds(), 200);
}

TEST(StepLimit, NothingTakesLessThanTheUserSaid) {
  EXPECT_EQ(StepLimit(3600).seconds(), 3600);
  EXPECT_EQ(StepLimit(3600).unknown(), 3600);
  EXPECT_EQ(StepLimit(3600).of_files(50'000'000'000), 3600);
  EXPECT_EQ(StepLimit(40).unknown(), 600);
  EXPECT_EQ(StepLimit(40).of_files(50'000'000'000), 600 + 1000);
}

}  // namespace
}  // namespace kinoe
