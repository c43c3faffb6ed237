// The monitor's streams: each may fail at any time without stopping the run.
#include "trainer/monitor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <system_error>

namespace kinoe {
namespace {

constexpr size_t kMaxPending = size_t{64} << 20;  // about 100,000 steps held back by a full disk
constexpr int kPatienceMs = 1000;                 // for a reader whose non-blocking pipe is full

std::string reason_of(int error_number) { return std::generic_category().message(error_number); }

/// Writes what it can; returns the bytes written, and errno or 0. A closed pipe is an error here, never a signal: the
/// signal is blocked in this thread for the call and, if the call raised it, taken out again.
std::pair<size_t, int> write_some(int fd, std::string_view text) {
  sigset_t pipe_signal, old_mask, pending;
  sigemptyset(&pipe_signal);
  sigaddset(&pipe_signal, SIGPIPE);
  sigpending(&pending);
  const bool was_pending = sigismember(&pending, SIGPIPE) == 1;
  pthread_sigmask(SIG_BLOCK, &pipe_signal, &old_mask);

  size_t done = 0;
  int error_number = 0;
  while (done < text.size()) {
    const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
    if (n > 0) {
      done += static_cast<size_t>(n);
      continue;
    }
    error_number = n == 0 ? EIO : errno;
    if (error_number == EAGAIN) {
      pollfd wait{fd, POLLOUT, 0};
      if (::poll(&wait, 1, kPatienceMs) > 0) error_number = EINTR;
    }
    if (error_number != EINTR) break;
    error_number = 0;
  }

  if (error_number == EPIPE && !was_pending) {
    const timespec no_wait{};
    while (sigtimedwait(&pipe_signal, nullptr, &no_wait) == -1 && errno == EINTR) {
    }
  }
  pthread_sigmask(SIG_SETMASK, &old_mask, nullptr);
  return {done, error_number};
}

int terminal_width(int fd) {
  winsize size{};
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

bool is_terminal(int fd) {
  const char* term = std::getenv("TERM");
  return fd >= 0 && ::isatty(fd) == 1 && (term == nullptr || std::string_view(term) != "dumb");
}

/// Cuts a line without its newline off the end of a file: a crash, or a disk that stayed full, left it there.
void cut_torn_line(int fd, const std::string& path) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) return;
  char block[4096];
  off_t end = status.st_size;
  while (end > 0) {
    const off_t begin = std::max<off_t>(0, end - static_cast<off_t>(sizeof block));
    const ssize_t n = ::pread(fd, block, static_cast<size_t>(end - begin), begin);
    if (n != end - begin)
      fail(ExitCode::usage, path, ": cannot be read back: ", reason_of(n < 0 ? errno : EIO));
    const size_t newline = std::string_view(block, static_cast<size_t>(n)).rfind('\n');
    if (newline != std::string_view::npos) {
      end = begin + static_cast<off_t>(newline) + 1;
      break;
    }
    end = begin;
  }
  if (end < status.st_size && ::ftruncate(fd, end) != 0)
    fail(ExitCode::usage, path, ": the torn line at its end cannot be cut off: ", reason_of(errno));
}

int open_metrics(const std::string& path) {
  int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  // Started with a standard stream closed: console lines must not land in this file.
  if (fd >= 0 && fd <= 2) {
    const int low = fd;
    fd = ::fcntl(low, F_DUPFD_CLOEXEC, 3);
    ::close(low);
  }
  if (fd < 0)
    fail(ExitCode::usage, path, ": cannot be opened for writing: ", reason_of(errno),
         "; choose another --out");
  try {
    cut_torn_line(fd, path);
  } catch (const Error&) {
    ::close(fd);
    throw;
  }
  return fd;
}

}  // namespace

Monitor::Monitor(const Options& options)
    : options_(options), step_(options.first_step - 1), skipped_(options.skipped), nan_(options.nan) {
  if (!options.metrics_path.empty()) {
    metrics_.fd = open_metrics(options.metrics_path);
    metrics_.name = options.metrics_path;
    metrics_.keeps = true;
  }
  out_.fd = options.out;
  out_.name = "standard output";
  warnings_.fd = options.warnings;
  warnings_.name = "standard error";
  bar_.name = "the terminal";
  bar_.fd = options.bar;
  if (options.bar == kAutoBar)
    bar_.fd = is_terminal(options.warnings) ? options.warnings
              : is_terminal(options.out)    ? options.out
                                            : kNoBar;
}

Monitor::~Monitor() {
  finish();
  if (metrics_.fd >= 0) ::close(metrics_.fd);
}

StepRecord Monitor::record(StepRecord record) {
  const bool finite = std::isfinite(record.loss) && std::isfinite(record.grad_norm);
  record.applied = record.applied && finite;
  record.skipped = skipped_ += record.applied ? 0 : 1;
  record.nan = nan_ += finite ? 0 : 1;

  const std::string json = to_json(record);
  write(metrics_, json + "\n");
  switch (options_.format) {
    case LogFormat::line: print(out_, to_line(record, options_.total_steps)); break;
    case LogFormat::megatron: print(out_, to_megatron(record, options_.total_steps)); break;
    case LogFormat::json: print(out_, json); break;
  }
  if (step_ == options_.first_step - 1) first_done_ = std::chrono::steady_clock::now();
  step_ = record.step;
  last_loss_ = record.loss;
  draw_bar();
  return record;
}

void Monitor::record(const EvalRecord& record) {
  const std::string json = to_json(record);
  write(metrics_, json + "\n");
  switch (options_.format) {
    case LogFormat::line: print(out_, to_line(record, options_.total_steps)); break;
    case LogFormat::megatron: print(out_, to_megatron(record, options_.total_steps)); break;
    case LogFormat::json: print(out_, json); break;
  }
  draw_bar();
}

void Monitor::record(const SaveRecord& record) {
  const std::string json = to_json(record);
  write(metrics_, json + "\n");
  if (options_.format == LogFormat::json)
    print(out_, json);
  else
    print(record.error.empty() ? out_ : warnings_, to_line(record, options_.total_steps));
  draw_bar();
}

void Monitor::sync() {
  if (metrics_.fd >= 0) ::fdatasync(metrics_.fd);
}

void Monitor::note(const std::string& text) {
  print(options_.format == LogFormat::json ? warnings_ : out_, text);
  draw_bar();
}

void Monitor::finish() {
  clear_bar();
  if (metrics_.pending.empty() && metrics_.dropped == 0) return;
  write(metrics_, "");
  const uint64_t lost = metrics_.pending.size() + metrics_.dropped;
  if (lost > 0)
    print(warnings_,
          cat("warning: ", metrics_.name, ": the last ", lost, " bytes of records could not be written"));
  metrics_.pending.clear();
  metrics_.dropped = 0;
}

void Monitor::print(Stream& stream, const std::string& line) {
  clear_bar();
  write(stream, line + "\n");
}

void Monitor::write(Stream& stream, const std::string& text) {
  if (stream.fd < 0) return;
  int error_number = 0;
  if (stream.keeps) {
    // Bytes, not lines, are kept: what a full disk cut in two is continued at the byte where it stopped.
    if (stream.pending.size() + text.size() <= kMaxPending)
      stream.pending += text;
    else
      stream.dropped += text.size();
    const auto [done, error] = write_some(stream.fd, stream.pending);
    stream.pending.erase(0, done);
    error_number = error;
  } else {
    error_number = write_some(stream.fd, text).second;
  }
  if (error_number == 0) return;

  const bool closed = error_number == EPIPE || error_number == EBADF;
  if (closed && !stream.keeps) stream.fd = -1;
  if (stream.warned || &stream == &warnings_ || &stream == &bar_) return;
  stream.warned = true;
  print(warnings_,
        cat("warning: ", stream.name, ": cannot be written: ", reason_of(error_number), "; training goes on",
            stream.keeps ? ", records are held in memory and written when that is possible again" : ""));
}

void Monitor::draw_bar() {
  if (bar_.fd < 0) return;
  double seconds_left = -1;
  const int64_t timed = step_ - options_.first_step;  // the first step warms up and is not counted
  if (timed > 0) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - first_done_;
    seconds_left =
        elapsed.count() / static_cast<double>(timed) * static_cast<double>(options_.total_steps - step_);
  }
  // One column stays free, so that the line never wraps. The width is asked for each time: windows change their size.
  write(bar_,
        "\r" +
            progress_bar(terminal_width(bar_.fd) - 1, step_, options_.total_steps, last_loss_, seconds_left) +
            "\x1b[K");
  bar_drawn_ = true;
}

void Monitor::clear_bar() {
  if (!bar_drawn_) return;
  bar_drawn_ = false;
  write(bar_, "\r\x1b[K");
}

}  // namespace kinoe
