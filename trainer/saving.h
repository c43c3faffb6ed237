// The checkpoints of a run: what goes into them, and what becomes of each.
#pragma once

#include <string>
#include <vector>

#include "trainer/checkpoint_saver.h"
#include "trainer/config.h"
#include "trainer/model.h"
#include "trainer/monitor.h"
#include "trainer/optimizer.h"

namespace kinoe {

class Saving {
 public:
  /// `carried`: files that every checkpoint has as they are. All references must outlive the object.
  Saving(Files& files, const Context& ctx, const Model& model, const RunConfig& config,
         const ParameterMemory& memory, size_t buffer_bytes, const std::vector<SmallFile>& carried,
         Monitor& monitor);

  static CheckpointSource source(const ParameterMemory& memory) {
    return {memory.masters, memory.m, memory.v};
  }

  /// Begins the checkpoint of the step whose update was queued last.
  void begin(const TrainingState& state);
  /// Reports what has ended. Three failures in a row end the run (ExitCode::checkpoint): nobody looks after its disk.
  void report();
  /// Waits, and requires that the last one succeeded.
  void finish();

 private:
  static constexpr int kMostFailures = 3;
  void report(const SaveResult& result);

  Files& files_;
  std::string run_;
  Monitor& monitor_;
  CheckpointSaver saver_;
  std::vector<SmallFile> small_files_;
  int failures_ = 0;
  std::string last_error_;
};

}  // namespace kinoe
