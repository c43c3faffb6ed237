// What launch_place.cpp reads out of environment variables besides the place itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "trainer/launch.h"

namespace kinoe {

using Environment = std::function<const char*(const char*)>;

/// Where rank 0 listens, for launchers that say so.
struct MeetingPoint {
  std::string host;
  int port = 0;
  // Tells this job's ranks from strangers on the port. The number of ranks is no part of it: who was told another one is
  // to hear so.
  uint64_t key = 0;
};
/// MASTER_ADDR and MASTER_PORT where both are set; else Slurm's first host and a port that follows from the job's number.
/// The agent of torchrun keeps MASTER_PORT for itself (TORCHELASTIC_USE_AGENT_STORE): then the next port.
MeetingPoint find_meeting_point(const Environment& env);

/// The hosts of Slurm's short form, in order: "n[01-03,7],m1" is n01 n02 n03 n7 m1. Empty when it cannot be read.
std::vector<std::string> expand_hosts(const std::string& list);

/// "0, 2-5, 9": ranks in increasing order.
std::string rank_ranges(const std::vector<int>& ranks);

/// An error that another rank notices as well and says.
class ToldElsewhere : public Error {
 public:
  using Error::Error;
};
/// Throws Error(rank_lost) on rank 0 and ToldElsewhere elsewhere.
[[noreturn]] void fail_together(const Place& place, const std::string& message);

}  // namespace kinoe
