// The checkpoints of a run: what goes into them, and what becomes of each.
//
// Every rank has one and calls it at the same steps: each writes what it owns. What is said is said by rank 0.
#pragma once

#include <string>
#include <vector>

#include "trainer/channel.h"
#include "trainer/checkpoint_saver.h"
#include "trainer/config.h"
#include "trainer/model.h"
#include "trainer/monitor.h"
#include "trainer/optimizer.h"

namespace kinoe {

class Saving {
 public:
  /// `carried`: files that every checkpoint has as they are (rank 0's count). `ranks` is the savings' alone. `monitor`: null on a
  /// rank that reports nothing. All references must outlive the object.
  Saving(Files& files, const Context& ctx, const Model& model, const RunConfig& config,
         const ParameterMemory& memory, const ShardLayout& layout, Channel& ranks, size_t buffer_bytes,
         const std::vector<SmallFile>& carried, Monitor* monitor);

  static CheckpointSource source(const ParameterMemory& memory) {
    return {memory.masters, memory.m, memory.v};
  }

  /// Begins the checkpoint of the step whose update was queued last.
  void begin(const TrainingState& state);
  /// Reports what has ended. Three failures in a row end the run (ExitCode::checkpoint, the same text on every rank): nobody looks
  /// after its disk.
  void report();
  /// Waits, and requires that the last one succeeded.
  void finish();

 private:
  static constexpr int kMostFailures = 3;
  void report(const SaveResult& result);

  Files& files_;
  std::string run_;
  bool first_;  // rank 0
  Monitor* monitor_;
  CheckpointSaver saver_;
  std::vector<SmallFile> small_files_;
  int failures_ = 0;
  std::string last_error_;
};

}  // namespace kinoe
