// When a save fails and what is said about it.
#include "trainer/saving.h"

#include <algorithm>
#include <thread>

#include "trainer/checkpoint.h"

namespace kinoe {

Saving::Saving(Files& files, const Context& ctx, const Model& model, const RunConfig& config,
               const ParameterMemory& memory, const ShardLayout& layout, Channel& ranks, size_t buffer_bytes,
               const std::vector<SmallFile>& carried, Monitor* monitor)
    : files_(files),
      run_(config.out),
      first_(ranks.rank() == 0),
      monitor_(monitor),
      saver_(files, ctx, model.table, source(memory), ranks,
             {.run_directory = config.out,
              .weights = model.dtype,
              .buffer_bytes = buffer_bytes,
              .ranges = layout.owned(),
              .writers = std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 4, 1, 4),
              .keep = {config.keep, config.keep_every}}),
      small_files_(carried) {
  small_files_.push_back(
      {"config.json",
       model_config_to_json(model.config, model.dtype == DType::bf16 ? "bfloat16" : "float32")});
  small_files_.push_back({"generation_config.json", generation_config_json(model.config)});
}

void Saving::begin(const TrainingState& state) {
  if (monitor_ != nullptr) monitor_->sync();  // no step before a checkpoint may be missing after it
  if (!first_) return saver_.save(state, {});
  std::vector<SmallFile> small = small_files_;
  if (const std::string gemms = join_path(run_, "gemm.json"); files_.kind(gemms) == Files::Kind::file)
    small.push_back({"trainer/gemm.json", read_file(files_, gemms)});
  saver_.save(state, small);
}

void Saving::report() {
  while (const std::optional<SaveResult> result = saver_.poll()) report(*result);
}

void Saving::finish() {
  while (const std::optional<SaveResult> result = saver_.wait()) report(*result);
  if (failures_ > 0)
    fail(ExitCode::checkpoint, "the last checkpoint could not be written: ", last_error_,
         "; the one before it, if any, is in ", join_path(run_, "checkpoints"));
}

void Saving::report(const SaveResult& result) {
  if (monitor_ != nullptr) {
    monitor_->record(SaveRecord{.step = result.step,
                                .path = checkpoint_path(run_, result.step),
                                .error = result.error,
                                .save_stall_ms = result.stall_ms,
                                .save_ms = result.write_ms,
                                .save_bytes = static_cast<int64_t>(result.bytes)});
    if (!result.warning.empty()) monitor_->note("warning: " + result.warning);
  }
  failures_ = result.error.empty() ? 0 : failures_ + 1;
  last_error_ = result.error;
  if (failures_ == kMostFailures)
    fail(ExitCode::checkpoint, kMostFailures, " checkpoints in a row could not be written: ", last_error_,
         "; the last good one is in ", join_path(run_, "checkpoints"));
}

}  // namespace kinoe
