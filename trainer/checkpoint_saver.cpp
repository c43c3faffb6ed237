// The training side queues copies, the thread writes what has arrived.
#include "trainer/checkpoint_saver.h"

#include <algorithm>
#include <chrono>

#include "trainer/checkpoint.h"

namespace kinoe {
namespace {

int64_t block_elements(const CheckpointSource& source) {
  return std::min(CheckpointSaver::kBlockElements, source.masters.size());
}
size_t block_bytes(const CheckpointSource& source) {
  return static_cast<size_t>(block_elements(source)) * sizeof(float);
}

double ms_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

size_t CheckpointSaver::planned_buffer_bytes(const CheckpointSource& source, size_t reserved) {
  const size_t block = block_bytes(source);
  const auto blocks = static_cast<size_t>((source.masters.size() - 1) / block_elements(source) + 1);
  const size_t free = cpu_info().free_bytes, spare = (free - std::min(free, reserved)) / 2 / block;
  return std::max<size_t>(2, std::min(3 * blocks, spare)) * block;
}

CheckpointSaver::CheckpointSaver(Files& files, const Context& ctx, const ParameterTable& table,
                                 const CheckpointSource& source, const Options& options)
    : files_(files),
      ctx_(ctx),
      table_(table),
      source_(source),
      block_elements_(block_elements(source)),
      options_(options),
      thread_([this] { work(); }) {}

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
  copy(Section::masters, source_.masters);
  copy(Section::m, source_.m);
  copy(Section::v, source_.v);
  in_progress->ended.record(ctx_);
  {
    const std::lock_guard lock(mutex_);
    if (job_.get() == in_progress) job_->copied = true;
  }
  changed_.notify_all();
}

void CheckpointSaver::copy(Section section, const Tensor& from) {
  for (const HeldRange& range : options_.ranges)
    for (int64_t at = range.begin; at < range.end; at += block_elements_) {
      Block block = take(free_);
      block.section = section;
      block.begin = at;
      block.count = std::min(block_elements_, range.end - at);
      const Tensor part = from.slice(range.local + (at - range.begin), block.count);
      download(ctx_, block.memory.data(), part.data, part.bytes());
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
  const size_t block = block_bytes(source_);
  for (size_t bytes = 0; bytes < options_.buffer_bytes; bytes += block) {
    put(free_, Block{.memory = Memory::pinned(ctx_.backend, block), .ready = Event(ctx_.backend)});
    const std::lock_guard lock(mutex_);
    if (stop_ && job_ == nullptr) return;
  }
}

void CheckpointSaver::work() {
  try {
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

/// Takes every block of the save, whatever happens: training must not wait for blocks that nobody gives back.
SaveResult CheckpointSaver::write(Job& job) {
  const auto began = std::chrono::steady_clock::now();
  SaveResult result;
  result.step = job.state.step;
  std::unique_ptr<CheckpointPart> part;
  std::mutex failing;  // the writers' first failure
  std::exception_ptr failure;
  const auto attempt = [&](const auto& step) {
    {
      const std::lock_guard lock(failing);
      if (failure) return;
    }
    try {
      step();
    } catch (...) {
      const std::lock_guard lock(failing);
      if (!failure) failure = std::current_exception();
    }
  };
  attempt([&] {
    begin_checkpoint(files_, options_.run_directory, job.plan);
    part = std::make_unique<CheckpointPart>(files_, options_.run_directory, table_, job.plan);
  });
  const auto write_blocks = [&] {
    while (std::optional<Block> block = next_filled(job)) {
      block->ready.wait();
      const Section section = block->section == Section::masters && options_.weights == DType::f32
                                  ? Section::weights
                                  : block->section;
      attempt([&] { part->write(section, block->begin, block->count, block->memory.data()); });
      put(free_, std::move(*block));
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < options_.writers; ++i) others.emplace_back(write_blocks);
  write_blocks();
  for (std::thread& other : others) other.join();
  attempt([&] {
    const std::vector<uint64_t> checksums = part->finish();
    publish_checkpoint(files_, options_.run_directory, table_, job.plan, checksums, job.state,
                       job.small_files);
    result.bytes = job.plan.bytes();
  });
  part.reset();
  try {
    if (failure) std::rethrow_exception(failure);
    remove_old_checkpoints(files_, options_.run_directory, options_.keep);
  } catch (const Error& error) {
    if (failure)
      result.error = error.what();
    else
      result.warning = cat("an older checkpoint was not removed: ", error.what());
  }
  if (!result.error.empty()) {
    try {
      const std::string left = checkpoint_path(options_.run_directory, job.plan.step) + ".tmp";
      if (files_.kind(left) != Files::Kind::absent) remove_tree(files_, left);
    } catch (const FileError&) {  // what cannot be removed now is removed at the next save or start
    }
  }
  job.ended.wait();
  result.stall_ms = job.ended.ms_since(job.began);
  result.write_ms = ms_since(began);
  return result;
}

}  // namespace kinoe
