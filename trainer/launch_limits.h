// The parts of launch_warnings() that can be tried with any numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "trainer/launch.h"

namespace kinoe {

/// Raises the soft limit of open files to the hard one; returns what it is then.
int64_t raise_open_files();
/// Throws Error(usage), naming the limit, where `error`, an errno, says that no more files may be open.
void check_open_files(int error);
/// Throws Error(usage) unless so many files may be open that rank 0 can take in `ranks` - 1 others. Call it where the launcher's
/// own are open: it counts.
void require_open_files(int ranks, int64_t open_files);
/// Warnings for `ranks` ranks of the run (open_files) and of this host (free bytes of /dev/shm, < 0: not asked for).
std::vector<std::string> limit_warnings(int ranks, int64_t open_files, int64_t shared_bytes);

}  // namespace kinoe
