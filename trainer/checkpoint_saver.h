// Saving while training goes on: a private copy of masters and moments, written by a thread.
//
// save() queues the copies behind the update they belong to, so that later updates cannot reach them, and returns; the thread
// writes each block as it arrives. With a block for everything (the default where host memory allows) training
// stalls for the copies alone; with fewer, save() waits for blocks to be written and used again.
//
// A save that fails is said, its .tmp removed, and training goes on: the next interval tries again. The previous
// checkpoint is never touched.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "kernels/common/device.h"
#include "trainer/checkpoint_write.h"

namespace kinoe {

/// The flat ranges a checkpoint is made of, on the device.
struct CheckpointSource {
  Tensor masters;  // [flat] fp32
  Tensor m, v;     // [flat] fp32 or bf16
};

struct SaveResult {
  int64_t step = 0;
  std::string error;    // why it failed; "" if it is complete
  std::string warning;  // of a complete one: older ones that could not be removed
  uint64_t bytes = 0;
  double stall_ms = 0;  // what training lost
  double write_ms = 0;  // from the first block to the last fsync
};

class CheckpointSaver {
 public:
  static constexpr int64_t kBlockElements = int64_t{1} << 23;

  struct Options {
    std::string run_directory;
    DType weights = DType::f32;     // bf16 beside fp32 masters, or fp32
    size_t buffer_bytes = 0;        // host memory for the copies
    std::vector<HeldRange> ranges;  // what this rank writes, and where `source` has it
    int writers = 1;                // threads that write blocks
    Retention keep;
  };
  /// Host memory for copies of everything, or what this machine can spare of it when `reserved` bytes more are taken; at least
  /// two blocks.
  static size_t planned_buffer_bytes(const CheckpointSource& source, size_t reserved);

  /// `files`, `table` and what `source` views must outlive the saver. Allocates the buffers in the thread.
  CheckpointSaver(Files& files, const Context& ctx, const ParameterTable& table,
                  const CheckpointSource& source, const Options& options);
  ~CheckpointSaver();  // waits for a save in progress
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  /// Waits for the save before it, if one is in progress (its result is kept for poll()). `state` is that of the step
  /// whose update was queued last on the context's stream.
  void save(const TrainingState& state, const std::vector<SmallFile>& small_files);

  /// The result of a finished save, each once.
  std::optional<SaveResult> poll();
  /// Waits until nothing is in progress, then as poll().
  std::optional<SaveResult> wait();

 private:
  struct Block {
    Memory memory;
    Event ready;
    Section section = Section::masters;
    int64_t begin = 0, count = 0;
  };
  struct Job {
    Job(TrainingState at, std::vector<SmallFile> small, CheckpointPlan planned, Backend backend)
        : state(std::move(at)),
          small_files(std::move(small)),
          plan(std::move(planned)),
          began(backend),
          ended(backend) {}
    TrainingState state;
    std::vector<SmallFile> small_files;
    CheckpointPlan plan;
    Event began, ended;  // of the copies
    int64_t blocks = 0;  // copied so far; all of them when `copied`
    bool copied = false;
    int64_t taken = 0;  // of them, by the writers
  };
  void work();
  void allocate();
  SaveResult write(Job& job);
  std::optional<Block> next_filled(Job& job);
  void copy(Section section, const Tensor& from);
  Block take(std::deque<Block>& list);
  void put(std::deque<Block>& list, Block block);

  Files& files_;
  Context ctx_;
  const ParameterTable& table_;
  CheckpointSource source_;
  int64_t block_elements_;
  Options options_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Block> free_, filled_;
  std::unique_ptr<Job> job_;  // in progress
  bool stop_ = false;
  std::exception_ptr broken_;  // an error that is no failed save; thrown where results are asked for
  std::deque<SaveResult> results_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace kinoe
