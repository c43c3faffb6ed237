// Nothing here waits for long or needs what an error may have taken away: locks, memory, threads.
#include "trainer/launch_end.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <new>
#include <system_error>
#include <thread>

#include "kernels/common/untrusted.h"

namespace kinoe {

Error error_of(const std::exception& exception) {
  if (const auto* error = dynamic_cast<const Error*>(&exception)) return *error;
  if (dynamic_cast<const std::bad_alloc*>(&exception) != nullptr)
    return {ExitCode::usage, "out of host memory; use a smaller model, batch or sequence length"};
  const auto* system = dynamic_cast<const std::system_error*>(&exception);
  if (system != nullptr && system->code() == std::errc::resource_unavailable_try_again)
    return {
        ExitCode::usage,
        "no more threads or processes may be started here (ulimit -u, pids.max of a container): raise the "
        "limit"};
  return {ExitCode::internal, cat("internal error: ", exception.what())};
}

void print_error(const std::string& text) noexcept {
  try {
    const std::string line = "train_gpt: error: " + one_line(text, 4000) + "\n";
    // Not through stdio: the main thread may hold its lock.
    if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;
  } catch (...) {
    return;
  }
}

void end_process(ExitCode code) noexcept {
  const int number = static_cast<int>(code);
  // Whoever reads our output may have stopped reading.
  try {
    std::thread([number] {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      _exit(number);
    }).detach();
    for (FILE* file : {stdout, stderr})
      if (ftrylockfile(file) == 0) {
        std::fflush(file);
        funlockfile(file);
      }
  } catch (...) {
  }
  _exit(number);
}

}  // namespace kinoe
