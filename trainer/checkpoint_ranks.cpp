// Failures and checksums between ranks, as texts over a channel.
#include "trainer/checkpoint_ranks.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

constexpr size_t kPiece = size_t{1} << 20;  // numbers of one exchange: 8 MiB from all ranks together

void put(std::string& message, uint64_t value) {
  message.append(reinterpret_cast<const char*>(&value), sizeof value);
}
uint64_t number_at(const std::string& message, size_t i) {
  uint64_t value = 0;
  std::memcpy(&value, message.data() + i * sizeof value, sizeof value);
  return value;
}

/// Runs of numbers that are not 0 among [first, last): index of the first, how many, the numbers.
std::string runs_of(const std::vector<uint64_t>& numbers, size_t first, size_t last) {
  std::string message;
  for (size_t i = first; i < last;) {
    if (numbers[i] == 0) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < last && numbers[end] != 0) ++end;
    put(message, i);
    put(message, end - i);
    for (; i < end; ++i) put(message, numbers[i]);
  }
  return message;
}

}  // namespace

std::string FirstFailure::text() const {
  const std::lock_guard lock(mutex_);
  if (!failure_) return "";
  try {
    std::rethrow_exception(failure_);
  } catch (const Error& error) {
    return error.what();
  } catch (const std::bad_alloc&) {
    return "out of host memory";
  }
}

std::string agree(Channel& ranks, const std::string& what, const std::string& failure) {
  std::string mine = failure;
  if (!failure.empty() && ranks.rank() != 0) {
    char host[256] = {};
    ::gethostname(host, sizeof host - 1);
    mine = cat("rank ", ranks.rank(), " (", host, "): ", failure);
  }
  const std::vector<std::string> all = ranks.exchange(what, mine);
  const auto failed = std::find_if(all.begin(), all.end(), [](const std::string& s) { return !s.empty(); });
  return failed == all.end() ? "" : *failed;
}

Gathering::Gathering(Channel& ranks, const std::string& what, const std::vector<uint64_t>& mine) {
  const bool first = ranks.rank() == 0;
  if (first) all_ = mine;
  for (size_t at = 0; at < mine.size(); at += kPiece) {
    const std::vector<std::string> messages =
        ranks.exchange(what, first ? "" : runs_of(mine, at, std::min(mine.size(), at + kPiece)));
    if (!first) continue;
    for (int rank = 1; rank < ranks.ranks(); ++rank) take(rank, messages[static_cast<size_t>(rank)]);
  }
}

void Gathering::take(int rank, const std::string& message) {
  const size_t count = message.size() / sizeof(uint64_t);
  if (count > 0 &&
      std::none_of(samples_.begin(), samples_.end(), [&](const Sample& s) { return s.rank == rank; }))
    samples_.push_back({rank, static_cast<size_t>(number_at(message, 0))});
  for (size_t i = 0; i + 2 <= count;) {
    const uint64_t begin = number_at(message, i), length = number_at(message, i + 1);
    i += 2;
    if (begin > all_.size() || length > all_.size() - begin || length > count - i) {
      wrong_ = cat("rank ", rank, " sent numbers beyond the last one");
      return;
    }
    for (uint64_t k = begin; k < begin + length; ++k, ++i) {
      if (all_[k] != 0) wrong_ = cat("number ", k, " came from rank ", rank, " and from another one");
      all_[k] = number_at(message, i);
    }
  }
}

const std::vector<uint64_t>& Gathering::complete() const {
  CHECK(wrong_.empty(), wrong_);
  const auto missing = std::find(all_.begin(), all_.end(), uint64_t{0});
  CHECK(missing == all_.end(), "nobody wrote chunk ", missing - all_.begin(), " of ", all_.size());
  return all_;
}

}  // namespace kinoe
