// Saving while training goes on: a private copy of masters and moments, written by a thread.
//
// save() queues the copies behind the update they belong to, so that later updates cannot reach them, and returns; the thread
// writes each block as it arrives. With a block for everything (the default where host memory allows) training
// stalls for the copies alone; with fewer, save() waits for blocks to be written and used again.
//
// All ranks save together, each what it owns: rank 0 begins, all write, rank 0 publishes. save() is called for the same steps on
// every rank; the threads agree over a channel of their own (checkpoint_ranks.h), so training does not wait for it. A failure
// anywhere is the failure of the save everywhere; a rank that is lost is no failed save but thrown.
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
#include "trainer/channel.h"
#include "trainer/checkpoint_ranks.h"
#include "trainer/checkpoint_write.h"

namespace kinoe {

/// What a checkpoint is made of: this rank's memory, on the device.
struct CheckpointSource {
  Tensor masters;  // fp32
  Tensor m, v;     // fp32 or bf16
};

/// The same on every rank but for `warning` and `write_ms`.
struct SaveResult {
  int64_t step = 0;
  std::string error;    // why it failed, of the lowest rank where it did; "" if it is complete
  std::string warning;  // on rank 0, of a complete one: older ones that could not be removed
  uint64_t bytes = 0;   // of all ranks
  double stall_ms = 0;  // what training lost, on the rank that lost most
  double write_ms = 0;  // from the first block to the last fsync
};

class CheckpointSaver {
 public:
  static constexpr int64_t kBlockElements = int64_t{1} << 23;  // whole chunks

  struct Options {
    std::string run_directory;
    DType weights = DType::f32;     // bf16 beside fp32 masters, or fp32
    size_t buffer_bytes = 0;        // host memory for the copies
    std::vector<HeldRange> ranges;  // what this rank writes, and where `source` has it
    int writers = 1;                // threads that write blocks
    Retention keep;
    int64_t block_elements = kBlockElements;  // at most; whole chunks
  };
  /// Host memory for copies of `ranges`, or what this machine can spare of it; at least two blocks. `sharing` ranks run on this
  /// machine, each of which takes `reserved` bytes more and as much for its copies.
  static size_t planned_buffer_bytes(const std::vector<HeldRange>& ranges, size_t reserved, int sharing);

  /// `files`, `table`, `ranks` and what `source` views must outlive the saver; `ranks` is used by its thread alone. Allocates the
  /// buffers in the thread.
  CheckpointSaver(Files& files, const Context& ctx, const ParameterTable& table,
                  const CheckpointSource& source, Channel& ranks, const Options& options);
  ~CheckpointSaver();  // waits for a save in progress
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  /// Waits for the save before it, if one is in progress (its result is kept for poll()). `state` is that of the step
  /// whose update was queued last on the context's stream. Rank 0's `state` and `small_files` are written. With fewer blocks than
  /// copies it returns only after the other ranks have called it.
  void save(const TrainingState& state, const std::vector<SmallFile>& small_files);

  /// The result of a finished save, each once.
  std::optional<SaveResult> poll();
  /// Waits until nothing is in progress, then as poll().
  std::optional<SaveResult> wait();

 private:
  /// Consecutive elements of the flat range, whole chunks.
  struct Piece {
    int64_t begin = 0, count = 0;
    int64_t from = 0;  // in the source's memory
    int64_t at = 0;    // in the block
  };
  struct Block {
    Memory memory;
    Event ready;
    Section section = Section::masters;
    const std::vector<Piece>* pieces = nullptr;
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
    bool torn = false;  // save() ended before all were copied
  };
  void work();
  static std::vector<std::vector<Piece>> cut(const std::vector<HeldRange>& ranges, int64_t elements);
  void allocate();
  SaveResult write(Job& job);
  std::string write_together(Job& job);
  std::vector<uint64_t> write_blocks(Job& job, FirstFailure& failure, bool begun);
  void clean_up(const Job& job, SaveResult& result);
  std::optional<Block> next_filled(Job& job);
  void copy_all();
  void copy(Section section, const Tensor& from);
  Block take(std::deque<Block>& list);
  void put(std::deque<Block>& list, Block block);

  Files& files_;
  Context ctx_;
  const ParameterTable& table_;
  CheckpointSource source_;
  Channel& ranks_;
  int64_t block_elements_;
  Options options_;
  std::vector<std::vector<Piece>> cut_;  // what this rank writes of each section, block by block

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
