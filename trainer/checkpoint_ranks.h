// What ranks tell each other while they save together.
//
// A save is the same sequence of exchanges on every rank, whatever fails where: a rank that has failed says so where the others
// say that they are done, and what comes next follows from what all have heard. So nobody waits for a rank that has given up.
#pragma once

#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "trainer/channel.h"

namespace kinoe {

/// The first failure of this rank, whichever of its threads it came from.
class FirstFailure {
 public:
  /// Does nothing once something has failed.
  template <class Step>
  void attempt(const Step& step) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return;
    }
    try {
      step();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
  }
  /// Why the save fails here, "" if it does not. What is no failed save (neither an Error nor a lack of memory) is thrown.
  [[nodiscard]] std::string text() const;

 private:
  mutable std::mutex mutex_;
  std::exception_ptr failure_;
};

/// The failure that counts, the same text on every rank: that of the lowest rank that has one, with its name unless it is
/// rank 0's. "" where no rank has failed.
std::string agree(Channel& ranks, const std::string& what, const std::string& failure);

/// Numbers of which every rank has some, the others being 0, put together on rank 0. Sent in pieces, and of each piece only
/// what is not 0: together the ranks send little more than the vector once.
class Gathering {
 public:
  /// Every rank calls it, with vectors of the same size. Throws only what the channel throws.
  Gathering(Channel& ranks, const std::string& what, const std::vector<uint64_t>& mine);

  /// On rank 0: throws Error(internal) unless every number has come from exactly one rank.
  [[nodiscard]] const std::vector<uint64_t>& complete() const;

  /// A number that another rank sent.
  struct Sample {
    int rank = 0;
    size_t index = 0;
  };
  /// The first one of each rank but 0 that has any.
  [[nodiscard]] const std::vector<Sample>& samples() const { return samples_; }

 private:
  void take(int rank, const std::string& message);

  std::vector<uint64_t> all_;
  std::vector<Sample> samples_;
  std::string wrong_;
};

}  // namespace kinoe
