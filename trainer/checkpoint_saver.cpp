// The training side queues copies, the thread writes what has arrived.
#include "trainer/checkpoint_saver.h"

#include <algorithm>
#include <chrono>

#include "trainer/checkpoint.h"
#include "trainer/files_threads.h"

namespace kinoe {
namespace {

int64_t elements_of(const std::vector<HeldRange>& ranges) {
  int64_t count = 0;
  for (const HeldRange& range : ranges) count += range.end - range.begin;
  return count;
}

/// Of one block: a rank that owns nothing has small ones.
int64_t block_elements(const std::vector<HeldRange>& ranges, int64_t most) {
  return std::clamp(elements_of(ranges), kChunk, most);
}

double ms_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

size_t CheckpointSaver::planned_buffer_bytes(const std::vector<HeldRange>& ranges, size_t reserved,
                                             int sharing) {
  const int64_t elements = block_elements(ranges, kBlockElements);
  const size_t block = static_cast<size_t>(elements) * sizeof(float);
  const auto blocks = static_cast<size_t>((elements_of(ranges) + elements - 1) / elements);
  const auto ranks = static_cast<size_t>(sharing);
  const size_t free = cpu_info().free_bytes, spare = (free - std::min(free, reserved * ranks)) / ranks / 2;
  return std::max<size_t>(2, std::min(3 * blocks, spare / block)) * block;
}

CheckpointSaver::CheckpointSaver(Files& files, const Context& ctx, const ParameterTable& table,
                                 const CheckpointSource& source, Channel& ranks, const Options& options)
    : files_(files),
      ctx_(ctx),
      table_(table),
      source_(source),
      ranks_(ranks),
      block_elements_(block_elements(options.ranges, options.block_elements)),
      options_(options),
      cut_(cut(options.ranges, block_elements_)),
      thread_([this] { work(); }) {}

/// Every block full but the last: small ranges share one.
std::vector<std::vector<CheckpointSaver::Piece>> CheckpointSaver::cut(const std::vector<HeldRange>& ranges,
                                                                      int64_t elements) {
  std::vector<std::vector<Piece>> blocks;
  int64_t used = elements;
  for (const HeldRange& range : ranges)
    for (int64_t at = range.begin; at < range.end;) {
      if (used == elements) {
        blocks.emplace_back();
        used = 0;
      }
      const int64_t count = std::min(elements - used, range.end - at);
      blocks.back().push_back({at, count, range.local + (at - range.begin), used});
      at += count;
      used += count;
    }
  return blocks;
}

CheckpointSaver::~CheckpointSaver() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void CheckpointSaver::save(const TrainingState& state, const std::vector<SmallFile>& small_files) {
  auto job = std::make_unique<Job>(state, small_files,
                                   plan_checkpoint(table_, options_.weights, source_.m.dtype, state.step),
                                   ctx_.backend);
  job->began.record(ctx_);
  Job* const in_progress = job.get();
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return job_ == nullptr || broken_; });
    if (broken_) std::rethrow_exception(broken_);
    job_ = std::move(job);
  }
  changed_.notify_all();
  const auto copied = [&](bool torn) {
    {
      const std::lock_guard lock(mutex_);
      if (job_.get() == in_progress) {
        job_->copied = true;
        job_->torn = torn;
      }
    }
    changed_.notify_all();
  };
  try {
    copy_all();
    in_progress->ended.record(ctx_);
  } catch (...) {
    copied(true);  // or the thread, and the other ranks with it, would wait for the rest for ever
    throw;
  }
  copied(false);
}

void CheckpointSaver::copy_all() {
  copy(Section::masters, source_.masters);
  copy(Section::m, source_.m);
  copy(Section::v, source_.v);
}

void CheckpointSaver::copy(Section section, const Tensor& from) {
  for (const std::vector<Piece>& pieces : cut_) {
    Block block = take(free_);
    block.section = section;
    block.pieces = &pieces;
    for (const Piece& piece : pieces) {
      const Tensor part = from.slice(piece.from, piece.count);
      download(ctx_,
               static_cast<char*>(block.memory.data()) + static_cast<size_t>(piece.at) * size_of(part.dtype),
               part.data, part.bytes());
    }
    block.ready.record(ctx_);
    {
      const std::lock_guard lock(mutex_);
      ++job_->blocks;
    }
    put(filled_, std::move(block));
  }
}

std::optional<SaveResult> CheckpointSaver::poll() {
  const std::lock_guard lock(mutex_);
  if (broken_) std::rethrow_exception(broken_);
  if (results_.empty()) return std::nullopt;
  SaveResult result = std::move(results_.front());
  results_.pop_front();
  return result;
}

std::optional<SaveResult> CheckpointSaver::wait() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return job_ == nullptr || broken_; });
  }
  return poll();
}

CheckpointSaver::Block CheckpointSaver::take(std::deque<Block>& list) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !list.empty() || broken_; });
  if (broken_) std::rethrow_exception(broken_);
  Block block = std::move(list.front());
  list.pop_front();
  return block;
}

void CheckpointSaver::put(std::deque<Block>& list, Block block) {
  {
    const std::lock_guard lock(mutex_);
    list.push_back(std::move(block));
  }
  changed_.notify_all();
}

// ---- The thread ------------------------------------------------------------------------------------------------------

void CheckpointSaver::allocate() {
  const size_t block = static_cast<size_t>(block_elements_) * sizeof(float);
  for (size_t bytes = 0; bytes < options_.buffer_bytes; bytes += block) {
    put(free_, Block{.memory = Memory::pinned(ctx_.backend, block), .ready = Event(ctx_.backend)});
    const std::lock_guard lock(mutex_);
    if (stop_ && job_ == nullptr) return;
  }
}

void CheckpointSaver::work() {
  try {
    use_device(ctx_);
    allocate();
    for (;;) {
      Job* job = nullptr;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return job_ != nullptr || stop_; });
        if (job_ == nullptr) return;
        job = job_.get();
      }
      SaveResult result = write(*job);
      {
        const std::lock_guard lock(mutex_);
        results_.push_back(std::move(result));
        job_.reset();
      }
      changed_.notify_all();
    }
  } catch (...) {
    {
      const std::lock_guard lock(mutex_);
      broken_ = std::current_exception();
    }
    changed_.notify_all();
  }
}

/// The next block to write; nothing when the save has no more.
std::optional<CheckpointSaver::Block> CheckpointSaver::next_filled(Job& job) {
  std::optional<Block> block;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !filled_.empty() || (job.copied && job.taken == job.blocks); });
    if (filled_.empty()) return block;
    block.emplace(std::move(filled_.front()));
    filled_.pop_front();
    ++job.taken;
  }
  changed_.notify_all();  // the last block ends the other writers' waiting
  return block;
}

/// Takes every block of the save, whatever has failed and where: training must not wait for blocks that nobody gives back.
/// Returns the checksums of what was written.
std::vector<uint64_t> CheckpointSaver::write_blocks(Job& job, FirstFailure& failure, bool begun) {
  std::unique_ptr<CheckpointPart> part;
  if (begun)
    failure.attempt([&] {
      if (ranks_.rank() != 0) check_begun(files_, options_.run_directory, job.plan);
      part = std::make_unique<CheckpointPart>(files_, options_.run_directory, table_, job.plan);
    });
  const auto write_block = [&](const Block& block) {
    block.ready.wait();
    const Section section = block.section == Section::masters && options_.weights == DType::f32
                                ? Section::weights
                                : block.section;
    const size_t element = size_of(block.section == Section::masters ? DType::f32 : source_.m.dtype);
    const char* elements = static_cast<const char*>(block.memory.data());
    for (const Piece& piece : *block.pieces)
      part->write(section, piece.begin, piece.count, elements + static_cast<size_t>(piece.at) * element);
  };
  const auto write_some = [&] {
    while (std::optional<Block> block = next_filled(job)) {
      if (part) failure.attempt([&] { write_block(*block); });
      put(free_, std::move(*block));
    }
  };
  share_out(options_.writers, static_cast<size_t>(options_.writers), [&](int, size_t) {
    failure.attempt([&] { use_device(ctx_); });
    write_some();
  });
  std::vector<uint64_t> checksums(job.plan.chunks());
  failure.attempt([&] {
    if (job.torn) fail(ExitCode::checkpoint, "the numbers of the step could not be copied");
    if (part) checksums = part->finish();
  });
  return checksums;
}

/// Every rank makes the same exchanges: what is done next follows from what all have said. Returns why the save failed.
std::string CheckpointSaver::write_together(Job& job) {
  const bool first = ranks_.rank() == 0;
  const std::string what = cat("checkpoint of step ", job.plan.step);
  FirstFailure failure;
  if (first) failure.attempt([&] { begin_checkpoint(files_, options_.run_directory, job.plan); });
  std::string error = agree(ranks_, what + " begun", failure.text());
  const std::vector<uint64_t> mine = write_blocks(job, failure, error.empty());
  if (!error.empty()) return error;
  error = agree(ranks_, what + " written", failure.text());
  if (!error.empty()) return error;
  const Gathering checksums(ranks_, what + ": checksums", mine);
  if (first)
    failure.attempt([&] {
      const std::vector<uint64_t>& all = checksums.complete();
      for (const Gathering::Sample& sample : checksums.samples())
        check_arrived(files_, options_.run_directory, table_, job.plan, sample.index, all[sample.index]);
      publish_checkpoint(files_, options_.run_directory, table_, job.plan, all, job.state, job.small_files);
    });
  return agree(ranks_, what + " published", failure.text());
}

SaveResult CheckpointSaver::write(Job& job) {
  const auto began = std::chrono::steady_clock::now();
  SaveResult result;
  result.step = job.state.step;
  result.error = write_together(job);
  if (result.error.empty()) result.bytes = job.plan.bytes();
  if (ranks_.rank() == 0) clean_up(job, result);
  double stall_ms = 0;
  if (!job.torn) {
    job.ended.wait();
    stall_ms = job.ended.ms_since(job.began);
  }
  for (const std::string& text :
       ranks_.exchange(cat("checkpoint of step ", result.step, " ended"), cat(stall_ms)))
    result.stall_ms = std::max(result.stall_ms, std::stod(text));
  result.write_ms = ms_since(began);
  return result;
}

/// Old checkpoints after a new one; what is left of one that failed.
void CheckpointSaver::clean_up(const Job& job, SaveResult& result) {
  try {
    if (result.error.empty()) {
      remove_unfinished_checkpoints(files_, options_.run_directory);  // of saves that could not even clean up
      remove_old_checkpoints(files_, options_.run_directory, options_.keep);
      return;
    }
    const std::string left = checkpoint_path(options_.run_directory, job.plan.step) + ".tmp";
    if (files_.kind(left) != Files::Kind::absent) remove_tree(files_, left);
  } catch (const Error& error) {
    // What is left of one that failed is removed after the next save, or at the next start.
    if (result.error.empty()) result.warning = cat("an older checkpoint was not removed: ", error.what());
  }
}

}  // namespace kinoe
