// Shares of a step: everything once, nearly equal, whatever divides or does not.
#include "trainer/batch_plan.h"

#include <gtest/gtest.h>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

TEST(BatchPlan, OneRankRunsEverythingAndTheLastSlotMayBePartlyFilled) {
  const BatchPlan plan(10, 4);
  EXPECT_EQ(plan.slots(), 3);
  const std::vector<MicroBatch> expected = {{100, 4, 0}, {104, 4, 1}, {108, 2, 2}};
  EXPECT_EQ(plan.mine(100), expected);
}

TEST(BatchPlan, AMicroBatchLargerThanTheGlobalBatchIsOnePartialSlot) {
  const BatchPlan plan(3, 8);
  const std::vector<MicroBatch> expected = {{0, 3, 0}};
  EXPECT_EQ(plan.mine(0), expected);
}

TEST(BatchPlan, RanksBeyondTheSlotsHaveNothing) {
  const std::vector<MicroBatch> first = {{8, 4, 0}}, second = {{12, 1, 1}};
  EXPECT_EQ(BatchPlan(5, 4, 0, 4).mine(8), first);
  EXPECT_EQ(BatchPlan(5, 4, 1, 4).mine(8), second);
  EXPECT_TRUE(BatchPlan(5, 4, 2, 4).mine(8).empty());
  EXPECT_TRUE(BatchPlan(5, 4, 3, 4).mine(8).empty());
}

TEST(BatchPlan, AThousandAndTwentyFourSequencesOnTwentyFourRanks) {
  int64_t sum = 0;
  for (int64_t rank = 0; rank < 24; ++rank) {
    const BatchPlan plan(1024, 1, rank, 24);
    EXPECT_EQ(plan.my_slots(), rank < 16 ? 43 : 42);
    EXPECT_EQ(plan.most_slots(), 43);
    sum += plan.my_slots();
  }
  EXPECT_EQ(sum, 1024);
}

// Over every small combination: the ranks' portions, one after the other, are the step's samples in order, each once;
// shares differ by one slot at most; slots and samples do not depend on the number of ranks.
TEST(BatchPlan, UnionOverRanksIsTheWholeStepInOrder) {
  constexpr int64_t kConsumed = 12345;
  for (int64_t global = 1; global <= 40; ++global)
    for (int64_t micro = 1; micro <= 9; ++micro) {
      const std::vector<MicroBatch> whole = BatchPlan(global, micro).mine(kConsumed);
      int64_t next = kConsumed;
      for (const MicroBatch& mb : whole) {
        ASSERT_EQ(mb.first_sample, next);
        ASSERT_GE(mb.valid, 1);
        ASSERT_LE(mb.valid, micro);
        next += mb.valid;
      }
      ASSERT_EQ(next, kConsumed + global);

      for (int64_t ranks = 1; ranks <= 12; ++ranks) {
        std::vector<MicroBatch> joined;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const BatchPlan plan(global, micro, rank, ranks);
          const std::vector<MicroBatch> mine = plan.mine(kConsumed);
          const auto slots = static_cast<int64_t>(whole.size());
          ASSERT_EQ(plan.slots(), slots);
          ASSERT_EQ(plan.my_slots(), static_cast<int64_t>(mine.size()));
          ASSERT_EQ(plan.first_slot(), static_cast<int64_t>(joined.size()));
          ASSERT_GE(plan.my_slots(), slots / ranks);
          ASSERT_LE(plan.my_slots(), (slots + ranks - 1) / ranks);
          ASSERT_EQ(plan.most_slots(), (slots + ranks - 1) / ranks);
          joined.insert(joined.end(), mine.begin(), mine.end());
        }
        ASSERT_EQ(joined, whole) << global << " by " << micro << " on " << ranks;
      }
    }
}

TEST(BatchPlan, SizesBelowOneAreTheUsersMistake) {
  for (const auto& [global, micro] : {std::pair<int64_t, int64_t>{0, 1}, {-1, 1}, {1, 0}, {1, -4}}) {
    try {
      BatchPlan(global, micro);
      FAIL() << global << " " << micro;
    } catch (const Error& error) {
      EXPECT_EQ(error.code, ExitCode::usage);
    }
  }
  EXPECT_THROW(BatchPlan(1, 1, 1, 1), Error);
}

}  // namespace
}  // namespace kinoe
