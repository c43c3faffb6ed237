// From heartbeats to a verdict: who is lost, who hangs. Pure functions of what is known; sockets and threads are elsewhere.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kinoe {

/// How far a rank's main thread is, and its checkpoint thread, as it tells the others.
struct Progress {
  uint64_t operations = 0;  // collectives and exchanges begun: every one needs all ranks
  uint64_t phases = 0;      // calls of at()
  double idle_s = 0;        // since either rose, or the main thread was last known to be alive
  double limit_s = 0;       // how long that may take; <= 0: for ever
  std::string what;         // reached last
  uint64_t saves = 0;       // exchanges that the checkpoint thread has begun
  std::string saving;       // the last of them
};

struct Standing {
  Progress progress;
  double silent_s = 0;    // since its last heartbeat
  bool closed = false;    // its connection ended without a goodbye
  bool departed = false;  // it said goodbye
};

/// The sentence that ends the run, "" when nothing is wrong. `standings` are those of all ranks, `hosts` their names,
/// hang_timeout_s as in LaunchOptions.
///
/// Lost: closed, or silent for more than half of hang_timeout_s. Hanging: among those who are furthest behind, the ranks
/// beyond their own limit; who is ahead of them waits, and is not to blame however long that takes.
/// Where all main threads are equally far, waiting for a save perhaps, those whose checkpoint thread is behind are named.
std::string judge(const std::vector<Standing>& standings, const std::vector<std::string>& hosts,
                  double hang_timeout_s);

/// "rank 3 (host) is lost: ..." for one rank.
std::string lost_sentence(int rank, const std::string& host, const Standing& standing);

}  // namespace kinoe
