// The arithmetic of shares: all of it in integers that cannot overflow.
#include "trainer/batch_plan.h"

#include <algorithm>

#include "kernels/common/check.h"

namespace kinoe {

BatchPlan::BatchPlan(int64_t global_batch, int64_t micro_batch, int64_t rank, int64_t ranks)
    : global_batch_(global_batch), micro_batch_(micro_batch), rank_(rank), ranks_(ranks) {
  if (global_batch < 1)
    fail(ExitCode::usage, "global batch: expected at least 1 sequence, got ", global_batch);
  if (micro_batch < 1) fail(ExitCode::usage, "micro-batch: expected at least 1 sequence, got ", micro_batch);
  CHECK(ranks >= 1 && rank >= 0 && rank < ranks, "rank ", rank, " of ", ranks);
}

int64_t BatchPlan::slots() const { return (global_batch_ - 1) / micro_batch_ + 1; }

// The first slots() mod ranks ranks run one slot more. (slots * rank / ranks would spread them, but overflows.)
int64_t BatchPlan::first_slot() const {
  return rank_ * (slots() / ranks_) + std::min(rank_, slots() % ranks_);
}

int64_t BatchPlan::my_slots() const { return slots() / ranks_ + (rank_ < slots() % ranks_ ? 1 : 0); }

int64_t BatchPlan::most_slots() const { return (slots() - 1) / ranks_ + 1; }

std::vector<MicroBatch> BatchPlan::mine(int64_t samples_consumed) const {
  std::vector<MicroBatch> result;
  result.reserve(static_cast<size_t>(my_slots()));
  for (int64_t i = 0; i < my_slots(); ++i) {
    const int64_t slot = first_slot() + i;
    const int64_t offset = slot * micro_batch_;
    result.push_back({samples_consumed + offset, std::min(micro_batch_, global_batch_ - offset), slot});
  }
  return result;
}

}  // namespace kinoe
