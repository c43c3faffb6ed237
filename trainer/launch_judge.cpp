#include "trainer/launch_judge.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

const char* const kStartAgain = "start again with --resume auto, with fewer ranks if need be";

std::string last_reached(const Progress& progress) {
  return progress.what.empty() ? "nothing yet" : progress.what;
}

/// Who is how far: collectives and exchanges are the same on all ranks, phases decide between equals.
std::pair<uint64_t, uint64_t> position(const Progress& progress) {
  return {progress.operations, progress.phases};
}

/// Whose checkpoint thread keeps the others waiting; "" where they are equally far.
std::string hanging_save(const std::vector<Standing>& standings, const std::vector<std::string>& hosts) {
  uint64_t least = UINT64_MAX;
  for (const Standing& one : standings)
    if (!one.departed) least = std::min(least, one.progress.saves);
  std::vector<std::string> behind;
  std::string reached, others;
  for (size_t rank = 0; rank < standings.size(); ++rank) {
    const auto& [progress, silent, closed, departed] = standings[rank];
    if (departed) continue;
    if (progress.saves > least) {
      others = progress.saving;
    } else {
      behind.push_back(cat("rank ", rank, " (", hosts[rank], ")"));
      reached = progress.saving.empty() ? "nothing yet" : progress.saving;
    }
  }
  if (others.empty()) return "";
  return cat("the checkpoint thread of ", joined(behind), " hangs: the last thing it reached: ", reached,
             "; others are at: ", others);
}

}  // namespace

std::string lost_sentence(int rank, const std::string& host, const Standing& standing) {
  const std::string why =
      standing.closed ? "it ended without a word (killed, out of memory, or crashed: see its host's log)"
                      : cat("no heartbeat for ", std::lround(standing.silent_s),
                            " s (stopped, or its host or the network is down)");
  return cat("rank ", rank, " (", host, ") is lost: ", why,
             "; the last thing it reached: ", last_reached(standing.progress));
}

std::string judge(const std::vector<Standing>& standings, const std::vector<std::string>& hosts,
                  double hang_timeout_s) {
  const auto present = [&](size_t rank) { return !standings[rank].departed; };
  std::vector<std::string> lost;
  for (size_t rank = 0; rank < standings.size(); ++rank)
    if (present(rank) &&
        (standings[rank].closed || (hang_timeout_s > 0 && standings[rank].silent_s > hang_timeout_s / 2)))
      lost.push_back(lost_sentence(static_cast<int>(rank), hosts[rank], standings[rank]));
  if (!lost.empty()) return joined(lost) + "; " + kStartAgain;
  if (hang_timeout_s <= 0) return "";

  std::pair<uint64_t, uint64_t> least{UINT64_MAX, UINT64_MAX};
  size_t count = 0;
  for (size_t rank = 0; rank < standings.size(); ++rank)
    if (present(rank)) {
      least = std::min(least, position(standings[rank].progress));
      ++count;
    }
  std::vector<std::string> hanging;
  std::string others;
  size_t behind = 0;
  for (size_t rank = 0; rank < standings.size(); ++rank) {
    if (!present(rank)) continue;
    const Progress& progress = standings[rank].progress;
    if (position(progress) != least) {
      others = progress.what;
      continue;
    }
    ++behind;
    if (progress.limit_s > 0 && progress.idle_s > progress.limit_s)
      hanging.push_back(cat("rank ", rank, " (", hosts[rank], ") hangs: no progress for ",
                            std::lround(progress.idle_s),
                            " s; the last thing it reached: ", last_reached(progress)));
  }
  if (hanging.empty()) return "";
  if (behind == count)
    if (const std::string saving = hanging_save(standings, hosts); !saving.empty())
      return cat(saving, "; see that host's disk, then ", kStartAgain);
  if (behind == count)
    return cat("no rank goes on (all ", count, " are equally far): ", joined(hanging),
               "; see the GPUs and the network between the hosts, then ", kStartAgain);
  return cat(joined(hanging), "; others are at: ", others.empty() ? "nothing yet" : others,
             "; see what holds that process up, then ", kStartAgain);
}

}  // namespace kinoe
