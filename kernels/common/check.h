// Errors: one way to fail, with a class that becomes the exit code of the program.
//
// A fault of the user, the data or the machine throws kinoe::Error through fail(); main() prints its one line
// and exits with its code. CHECK states what must hold inside the program: it stays in release builds and its
// failure is a bug report, never the answer to a user's mistake.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kinoe {

/// Exit codes of the binary, by class of fault. Scripts rely on these numbers.
enum class ExitCode : int {
  finished = 0,
  internal = 1,    // a bug of this program
  usage = 2,       // options, configuration files, run directory
  data = 3,        // token shards and text
  checkpoint = 4,  // checkpoints and Hugging Face directories
  rank_lost = 5,   // a rank was lost, hung, or never arrived
  gpu = 6,         // a GPU fault
  diverged = 7,    // loss or gradients are not finite
  stopped = 75,    // stopped on request with a checkpoint written: start me again
};

class Error : public std::runtime_error {
 public:
  Error(ExitCode exit_code, const std::string& message) : std::runtime_error(message), code(exit_code) {}
  ExitCode code;
};

/// Joins its arguments as an ostream prints them: cat("expected ", 3, " rows").
template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

/// "a; b; c": several findings as one line. "" for none.
inline std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text.append(text.empty() ? "" : "; ").append(part);
  return text;
}

/// Throws Error(code). Message: what was expected, what was there, what to do; one line.
template <class... Parts>
[[noreturn]] void fail(ExitCode code, const Parts&... parts) {
  throw Error(code, cat(parts...));
}

template <class... Parts>
[[noreturn]] void check_failed(const char* file, int line, const char* condition, const Parts&... parts) {
  fail(ExitCode::internal, "internal error at ", file, ":", line, ": (", condition,
       ") does not hold: ", parts...);
}

/// The failure of a library call, the same sentence for CUDA, cuBLASLt, NCCL, MPI and the C library.
[[noreturn]] inline void call_failed(ExitCode code, const char* library, const char* call,
                                     const std::string& reason, const char* file, int line) {
  fail(code, library, " call failed: ", call, ": ", reason, " (", file, ":", line, ")");
}

}  // namespace kinoe

#define CHECK(condition, ...)                                             \
  do {                                                                    \
    if (!(condition)) [[unlikely]]                                        \
      ::kinoe::check_failed(__FILE__, __LINE__, #condition, __VA_ARGS__); \
  } while (false)
