// Limits of the machine that a run of many ranks meets later than it should.
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <system_error>

#include "trainer/launch_limits.h"

namespace kinoe {
namespace {

/// NCCL's shared memory transport makes one file of 9,637,888 bytes in /dev/shm per connection of a rank (the size that
/// NCCL prints when it fails: NVIDIA/nccl issues 290, 342 and 525, where Docker's 64 MiB did not do for 4 GPUs). Two
/// neighbours in a ring, a few channels each: 64 MiB a rank.
constexpr int64_t kSharedPerRank = 64 << 20;

/// Connections of rank 0, of NCCL between ranks, shards and checkpoint files of a rank.
int64_t files_needed(int ranks) { return 512 + 8 * int64_t{ranks}; }

}  // namespace

int64_t raise_open_files() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return INT64_MAX;
  if (limit.rlim_cur < limit.rlim_max) {
    const rlim_t before = limit.rlim_cur;
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = before;
  }
  return static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, INT64_MAX));
}

void check_open_files(int error) {
  if (error == EMFILE)
    fail(ExitCode::usage, "only ", raise_open_files(),
         " files may be open (ulimit -n), and all are: raise the hard limit");
  if (error == ENFILE)
    fail(ExitCode::usage, "this machine has as many files open as it may (sysctl fs.file-max): raise that");
}

void require_open_files(int ranks, int64_t open_files) {
  constexpr int64_t kBesides = 8;  // the port, the heartbeat's pipe, the run directory's files
  std::error_code none;
  const std::filesystem::directory_iterator entries("/proc/self/fd", none);
  const auto open = none ? 3 : std::distance(entries, std::filesystem::directory_iterator());
  const int64_t needed = open + 3 * int64_t{ranks - 1} + kBesides;
  if (open_files < needed)
    fail(ExitCode::usage, "only ", open_files, " files may be open (ulimit -n), and rank 0 of ", ranks,
         " needs ", needed, " at least: raise the hard limit");
}

std::vector<std::string> limit_warnings(int ranks, int64_t open_files, int64_t shared_bytes) {
  std::vector<std::string> warnings;
  if (open_files < files_needed(ranks))
    warnings.push_back(cat("only ", open_files, " files may be open (ulimit -n); ", ranks, " ranks may need ",
                           files_needed(ranks), ": raise the hard limit"));
  if (shared_bytes >= 0 && shared_bytes < kSharedPerRank * ranks)
    warnings.push_back(
        cat("/dev/shm has ", shared_bytes >> 20, " MiB free; NCCL may need ", (kSharedPerRank * ranks) >> 20,
            " MiB for the ", ranks, " ranks of this host: enlarge it (docker run --shm-size=",
            (kSharedPerRank * ranks) >> 20, "m), or NCCL may fail with 'No space left on device'"));
  return warnings;
}

std::vector<std::string> launch_warnings(const Place& place, bool gpus) {
  const int64_t open_files = raise_open_files();
  std::vector<std::string> warnings = limit_warnings(place.ranks, open_files, -1);
  struct statvfs shared {};
  if (gpus && place.ranks_here > 1 && statvfs("/dev/shm", &shared) == 0) {
    const auto free_bytes = static_cast<int64_t>(shared.f_bavail) * static_cast<int64_t>(shared.f_frsize);
    for (std::string& warning : limit_warnings(place.ranks_here, INT64_MAX, free_bytes))
      warnings.push_back(std::move(warning));
  }
  return warnings;
}

}  // namespace kinoe
