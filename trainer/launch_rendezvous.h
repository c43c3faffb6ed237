// How the ranks find each other: rank 0 listens, the others come, each with three connections.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "trainer/launch.h"
#include "trainer/launch_socket.h"

namespace kinoe {

/// What a connection is for.
enum class Line : int { control, saving, heartbeat };
constexpr int kLines = 3;

/// The team as every rank knows it after the rendezvous.
struct Roster {
  std::vector<std::string> hosts;  // of each rank
  int local_rank = 0;              // of this one
  /// [line][rank] on rank 0 (its own are not open); [line][0], to rank 0, elsewhere.
  std::array<std::vector<Socket>, kLines> lines;
};

/// Rank 0: takes in everybody who comes to `listener`, which the others know as `address`, and knows `key`; others that come are turned away. Throws
/// Error(rank_lost) at the deadline, with who is missing, and when two processes say they are the same rank, Error(usage) when
/// it may open no more files; whoever has come by then is told.
Roster gather_ranks(const Socket& listener, const std::string& address, const Place& place, uint64_t key,
                    const Patience& patience);

/// Other ranks: comes to rank 0 at the first of `hosts` that answers. Throws Error(rank_lost) when there is no answer in
/// time, ToldElsewhere with what rank 0 says when it turns the team down.
Roster join_ranks(const std::vector<std::string>& hosts, int port, const Place& place, uint64_t key,
                  const Patience& patience);

/// Network interfaces that are up, with their addresses as numbers.
struct Interface {
  std::string name;
  std::string address;
  bool loopback = false;
};
std::vector<Interface> list_interfaces();
/// Those that NCCL_SOCKET_IFNAME's value `filter` names (NCCL's own syntax: "eth,ib" prefixes, "=eth0" exactly, "^docker"
/// none of these); "" is all but loopback and the bridges of containers. Throws Error(rank_lost), listing what there is,
/// when none is left.
std::vector<Interface> choose_interfaces(const std::vector<Interface>& all, const std::string& filter);

}  // namespace kinoe
