// Going on with a run: from which checkpoint, with which settings, and its numbers into memory.
//
// What decides the numbers (model, data, order, optimizer, schedule) must be what the checkpoint recorded unless the user names
// it with --override; the model never may change. Everything else (ranks, ZeRO stage, micro-batch, device, reports, saving) is
// free, but for the micro-batch with --determinism topology. A change is noted in the checkpoints that follow.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "trainer/checkpoint_read.h"
#include "trainer/config.h"
#include "trainer/model.h"
#include "trainer/optimizer.h"

namespace kinoe {

struct ResumePoint {
  std::unique_ptr<CheckpointReader> checkpoint;  // null: the run starts from its beginning
  std::string run_directory;                     // to go on in; "" where the caller chooses a new one
  std::vector<std::string> notes;                // sentences for the user
  std::vector<int64_t> passed_over;              // damaged checkpoints, newer than this one
};

/// Finds what --resume and --out mean. Throws ExitCode::checkpoint where a checkpoint is asked for and there is none, or it is
/// damaged; ExitCode::usage for a combination that means nothing.
ResumePoint find_resume_point(Files& files, const RunConfig& config);

/// Once the run directory is locked: nobody may have gone on with the run since find_resume_point() looked (ExitCode::usage). Damaged
/// checkpoints that were passed over get the name step_N.damaged: as step_N they would count as the newest, and good ones would be
/// removed in their place. Returns sentences for the user.
std::vector<std::string> claim_run(Files& files, const std::string& run_directory, const ResumePoint& from);

/// Compares a resolved configuration with the recorded one; throws ExitCode::checkpoint with all differences that need
/// --override and do not have it. Appends what changes to `state`. The schedule keeps its end in tokens unless the number of
/// steps is overridden: with another global batch config.steps is counted anew.
void reconcile(RunConfig& config, TrainingState& state, std::vector<std::string>& notes);

/// Throws ExitCode::usage where --stop-after names a step that was done already, unless all of the run's were: a script that
/// starts a stopped run again would do so for ever.
void check_stop_after(const RunConfig& config, const TrainingState& state);

/// Like reconcile(), of the data: `now` is what was opened.
void reconcile_data(const RunConfig& config, TrainingState& state, const DataState& now,
                    std::vector<std::string>& notes);

/// Says of another number of ranks, or another ZeRO stage, what it means for the numbers; called last, when it is known what else
/// changes them. `state` has this run's ranks afterwards.
void reconcile_ranks(const RunConfig& config, TrainingState& state, int ranks,
                     std::vector<std::string>& notes);

struct LoadOptions {
  int threads = reading_threads(1);
  int64_t block_elements = CheckpointReader::kBlockElements;  // at most; whole chunks
};

/// Host memory that load_parameters() takes while it runs: of every thread one block that is filled and one that is on its way.
size_t load_buffer_bytes(const ShardLayout& layout, DType moments, const LoadOptions& options = {});

/// Masters and moments of a checkpoint into this rank's memory, what `layout` says that it holds, block by block, each checked.
/// Returns the sum of the hashes of the masters that this rank owns: added over all ranks it is the state's weights_hash, or the
/// files are not of that step. Weights of another type than the masters' are left to the caller. Throws the first damage in the
/// order masters, m, v and within each of the flat range, whatever the threads did.
uint64_t load_parameters(const Context& ctx, const CheckpointReader& checkpoint, const ParameterTable& table,
                         const ShardLayout& layout, const Tensor& masters, const Tensor& m, const Tensor& v,
                         const LoadOptions& options = {});

}  // namespace kinoe
