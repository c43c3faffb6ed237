// Writing a checkpoint, in the order that makes it durable.
//
//   one rank:   begin_checkpoint     step_N.tmp/ with all files at their full size and their headers
//   all ranks:  CheckpointPart       their byte ranges of the same files, each fsynced
//   one rank:   publish_checkpoint   small files, fsync, manifest, fsync, rename to step_N, fsync of the parent, `latest`
//
// Until the rename nothing but a .tmp exists, which no reader looks at; after it everything it names is on the disk. So a crash
// at any point leaves the previous checkpoint or the new one. What ranks hand over between the steps are the
// checksums, a vector with zeros where a rank owns nothing: added together they are complete.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "trainer/checkpoint_plan.h"
#include "trainer/checkpoint_state.h"
#include "trainer/files.h"

namespace kinoe {

/// A file of a few KB that goes into the checkpoint as it is.
struct SmallFile {
  std::string name;  // relative: "config.json", "trainer/gemm.json"
  std::string contents;
};

/// Files of a Hugging Face directory that tell how text becomes tokens; those that are there.
std::vector<SmallFile> read_tokenizer_files(Files& files, const std::string& directory);

/// Throws FileError (ExitCode::checkpoint), as all of these do. Replaces a .tmp left by a crash.
void begin_checkpoint(Files& files, const std::string& run_directory, const CheckpointPlan& plan);

/// Throws unless this rank sees the checkpoint that rank 0 has begun.
void check_begun(Files& files, const std::string& run_directory, const CheckpointPlan& plan);

/// The files of a begun checkpoint, opened by one rank to write what it owns.
class CheckpointPart {
 public:
  CheckpointPart(Files& files, const std::string& run_directory, const ParameterTable& table,
                 const CheckpointPlan& plan);

  /// Elements [begin, begin + count) of the flat range, whole chunks, of the section's type in the plan. Threads may write
  /// different ranges at once. Masters give the
  /// bf16 weights as well.
  void write(Section section, int64_t begin, int64_t count, const void* elements);

  /// All that was written is on the disk when it returns. Returns the checksums.
  std::vector<uint64_t> finish();

 private:
  void write_section(const CheckpointPlan::Part& part, int64_t begin, int64_t count, const void* elements);

  const ParameterTable& table_;
  const CheckpointPlan& plan_;
  std::vector<std::vector<std::unique_ptr<File>>> files_;  // by part and file
  std::vector<uint64_t> checksums_;
};

/// Throws unless chunk `chunk` of all, which another rank has written, is there for this one: two hosts may each have a directory
/// of that name, on disks of their own.
void check_arrived(Files& files, const std::string& run_directory, const ParameterTable& table,
                   const CheckpointPlan& plan, size_t chunk, uint64_t expected);

/// Completes a checkpoint whose parts are written and returns its directory. A complete one of the same step is replaced.
std::string publish_checkpoint(Files& files, const std::string& run_directory, const ParameterTable& table,
                               const CheckpointPlan& plan, std::span<const uint64_t> checksums,
                               const TrainingState& state, const std::vector<SmallFile>& small_files);

/// Which old checkpoints stay. `newest` 0: all of them.
struct Retention {
  int64_t newest = 0;  // the last so many
  int64_t every = 0;   // and those whose step is a multiple; 0: none
};
void remove_old_checkpoints(Files& files, const std::string& run_directory, const Retention& keep);

/// Removes what a crash left unfinished. Only while nobody writes into the run.
void remove_unfinished_checkpoints(Files& files, const std::string& run_directory);

}  // namespace kinoe
