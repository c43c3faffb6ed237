// The directory of a run: rank 0 makes it, or takes it over, and holds it; the others learn where it is, and have to see it too
// and write there, for every rank writes its part of a checkpoint.
#pragma once

#include <memory>

#include "trainer/files.h"
#include "trainer/launch.h"
#include "trainer/run_setup.h"

namespace kinoe {

/// Throws ExitCode::usage where --out of a new run holds something already, which take_run_directory() would find much later.
void check_new_run(Files& files, const RunConfig& config);

/// Called by all ranks; throws ExitCode::usage on all of them unless each sees `run_directory` (rank 0's word counts) as rank 0
/// does and can write there. Nothing is left in it.
void check_shared(Files& files, Channel& ranks, const std::string& run_directory);

/// Sets setup.config.out on every rank. On rank 0 the directory is there with what produced the run in it (config.toml, run.json),
/// has room for `needed_bytes` more, and is this process's as long as the lock returned lives. Where checkpoints are
/// written all ranks share it. Throws ExitCode::usage.
std::unique_ptr<RunLock> take_run_directory(Files& files, Team& team, RunSetup& setup, const Device& device,
                                            bool resumes, uint64_t needed_bytes, int argc, char** argv);

}  // namespace kinoe
