// Threads that take the next piece of work until there is none.
#include "trainer/files_threads.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace kinoe {

int reading_threads(int sharing) {
  constexpr int kMost = 8;
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / std::max(1, sharing), 2, kMost);
}

void share_out(int threads, size_t count, const std::function<void(int, size_t)>& work) {
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  size_t failed = count;
  std::exception_ptr error;
  const auto take = [&](int thread) {
    for (size_t i = next++; i < count; i = next++) {
      try {
        work(thread, i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (i < failed) {
          failed = i;
          error = std::current_exception();
        }
        next = count;
      }
    }
  };
  {
    std::vector<std::jthread> others;
    try {
      for (int thread = 1; thread < threads && static_cast<size_t>(thread) < count; ++thread)
        others.emplace_back(take, thread);
    } catch (const std::system_error&) {  // a limit of threads: fewer do the same
    }
    take(0);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace kinoe
