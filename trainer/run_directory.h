// The directory of a run: rank 0 makes it, or takes it over, and holds it; the others only learn where it is.
#pragma once

#include <memory>

#include "trainer/files.h"
#include "trainer/launch.h"
#include "trainer/run_setup.h"

namespace kinoe {

/// Sets setup.config.out on every rank. On rank 0 the directory is there with what produced the run in it (config.toml, run.json),
/// has room for `needed_bytes` more, and is this process's as long as the lock returned lives. Throws ExitCode::usage.
std::unique_ptr<RunLock> take_run_directory(Files& files, Team& team, RunSetup& setup, const Device& device,
                                            bool resumes, uint64_t needed_bytes, int argc, char** argv);

}  // namespace kinoe
