// A line between the ranks of a run for small messages: facts, checksums, an error.
//
// One operation, an all-gather of texts, is all that agreement needs; a program that only ever waits for everybody cannot
// mix up who said what. Numbers of training go through collectives, which are made for size; this is made for being
// debugged: every message carries the name of what it is about.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace kinoe {

class Channel {
 public:
  Channel() = default;
  virtual ~Channel() = default;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int ranks() const = 0;

  /// `mine` of every rank, in order of rank, on every rank. Blocks until all have come. All ranks call it in the same order
  /// with the same `what`; another one is a bug and both are said (Error(internal)). One thread at a time uses a channel.
  /// `mine` may have up to 64 MiB. Throws Error(rank_lost) when a rank is gone or the channel's deadline has passed: rank,
  /// host and `what`.
  virtual std::vector<std::string> exchange(const std::string& what, const std::string& mine) = 0;

  /// Rank 0's text on every rank.
  std::string from_first(const std::string& what, const std::string& mine);
  /// Returns when every rank has come.
  void barrier(const std::string& what);
  /// Sum of every rank's numbers, element by element, wrapping at 2^64. All ranks give equally many.
  std::vector<uint64_t> sum(const std::string& what, std::span<const uint64_t> mine);
};

/// The channel of a single process: what it says comes back.
std::unique_ptr<Channel> alone();

}  // namespace kinoe
