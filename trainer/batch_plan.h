// Which sequences of a step this rank runs, and in what portions.
//
// A step's global batch is a fixed grid of micro-batch slots with global indices; ranks take contiguous, nearly equal
// shares of the grid. Nothing has to divide: the last slot may be partly filled, and a rank may own no slot at all.
#pragma once

#include <cstdint>
#include <vector>

namespace kinoe {

/// One portion of fixed shape. Rows [valid, micro_batch) are padding: their targets are ignored.
struct MicroBatch {
  int64_t first_sample = 0;  // position in the training order; the portion is the next `valid` samples
  int64_t valid = 0;         // 1 .. micro_batch
  int64_t slot = 0;          // index in the step's grid, the same on whatever rank it runs

  bool operator==(const MicroBatch&) const = default;
};

class BatchPlan {
 public:
  /// Sizes in sequences. Throws Error(usage) for a size below 1; rank must be in [0, ranks).
  BatchPlan(int64_t global_batch, int64_t micro_batch, int64_t rank = 0, int64_t ranks = 1);

  /// This rank's portions of the step that starts at `samples_consumed`, in order of slot. The next step starts at
  /// samples_consumed + global_batch.
  [[nodiscard]] std::vector<MicroBatch> mine(int64_t samples_consumed) const;

  /// Slots of the whole grid: ceil(global_batch / micro_batch).
  [[nodiscard]] int64_t slots() const;
  /// This rank's slots [first_slot(), first_slot() + my_slots()): floor or ceil of slots() / ranks of them.
  [[nodiscard]] int64_t first_slot() const;
  [[nodiscard]] int64_t my_slots() const;
  /// The most any rank runs: how long a step lasts.
  [[nodiscard]] int64_t most_slots() const;

  [[nodiscard]] int64_t global_batch() const { return global_batch_; }
  [[nodiscard]] int64_t micro_batch() const { return micro_batch_; }

 private:
  int64_t global_batch_;
  int64_t micro_batch_;
  int64_t rank_;
  int64_t ranks_;
};

}  // namespace kinoe
