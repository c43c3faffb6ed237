// What a rank tells and hears. Reasons to end are collected here; what follows from them is in launch_verdict.cpp.
#include "trainer/launch_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>

#include "trainer/launch_end.h"
#include "trainer/launch_limits.h"
#include "trainer/launch_message.h"
#include "trainer/launch_place.h"

namespace kinoe {
namespace {

constexpr double kBetweenPhases = 0.05;  // phases shorter than this need not all be told
constexpr double kSettle = 0.25;         // other connections of a dying host close within this
constexpr double kOthersError =
    0.3;  // all ranks make the same mistake at the same time: rank 0 says it as its own
constexpr double kSelfHelp =
    0.5;  // whoever killed rank 0 may be about to kill this rank too: then nothing need be said

}  // namespace

Watch::Watch(int rank, std::vector<std::string> hosts, std::vector<Socket> lines, double hang_timeout_s)
    : rank_(rank),
      hosts_(std::move(hosts)),
      hang_timeout_s_(hang_timeout_s),
      interval_s_(hang_timeout_s > 0 ? std::clamp(hang_timeout_s / 8, 0.05, 1.0) : 1.0),
      standings_(hosts_.size()) {
  for (size_t other = 0; other < lines.size(); ++other)
    if (lines[other].is_open())
      peers_.push_back({static_cast<int>(other), MessageLine(std::move(lines[other])), false});
  try {
    int ends[2] = {-1, -1};
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
      check_open_files(errno);
      fail(ExitCode::internal, "no pipe for the heartbeat thread: ", std::strerror(errno));
    }
    wake_read_ = Socket(ends[0]);
    wake_write_ = Socket(ends[1]);
    thread_ = start();
  } catch (const std::exception& exception) {
    never_begun(error_of(exception));
  }
}

std::thread Watch::start() {
  // Signals are for the main thread.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const std::unique_ptr<sigset_t, void (*)(sigset_t*)> restored(
      &before, [](sigset_t* signals) { pthread_sigmask(SIG_SETMASK, signals, nullptr); });
  return std::thread([this] { run(); });
}

/// There is a team, but no thread here: the others are told why, as the thread would have done.
void Watch::never_begun(const Error& error) {
  for (Peer& peer : peers_) peer.line.send(rank_ == 0 ? kVerdict : kError, pack(error.code, error.what()));
  if (rank_ == 0) throw Error(error);
  throw ToldElsewhere(error.code, error.what());
}

Watch::~Watch() {
  {
    const std::lock_guard lock(mutex_);
    if (request_ != Request::finish) request_ = Request::stop;
  }
  wake();
  thread_.join();
}

// ------------------------------------------------------------------------------------------ the main thread's side

void Watch::wake() const {
  // A pipe that is full wakes as well.
  while (write(wake_write_.fd(), "", 1) < 0 && errno == EINTR) {
  }
}

void Watch::at(const std::string& what, double limit_s) {
  const std::lock_guard lock(mutex_);
  phase_ = what;
  progress_.what = what;
  if (!operation_.empty()) progress_.what.append(" (after ").append(operation_).append(")");
  progress_.limit_s = limit_s;
  ++progress_.phases;
  ++changes_;
  new_phase_ = true;
  wake();
}

void Watch::reached(const char* what, int64_t number) {
  const std::lock_guard lock(mutex_);
  operation_.assign(what).append(" ").append(std::to_string(number));
  begin_operation();
}

void Watch::alive() {
  const std::lock_guard lock(mutex_);
  ++changes_;
}

void Watch::exchanging(const char* what) {
  const std::lock_guard lock(mutex_);
  operation_.assign("exchange of '").append(what).append("'");
  begin_operation();
}

void Watch::saving(const char* what) {
  const std::lock_guard lock(mutex_);
  progress_.saving.assign("exchange of '").append(what).append("'");
  ++progress_.saves;
}

void Watch::begin_operation() {
  progress_.what.assign(phase_).append(phase_.empty() ? "" : ": ").append(operation_);
  ++progress_.operations;
  ++changes_;
}

ExitCode Watch::leave(const Error& error) {
  // What was said before the error comes before it. Without the lock: a reader that has stopped must not stop the heartbeats.
  std::fflush(stdout);
  std::unique_lock lock(mutex_);
  if (verdict_) return *verdict_;
  if (done_) {  // the others have gone their way
    print_error(error.what());
    return error.code;
  }
  main_waits_ = true;
  if (request_ != Request::leave)
    mine_ = {rank_, error.code, error.what(), error.code == ExitCode::rank_lost};
  request_ = Request::leave;
  wake();
  changed_.wait(lock, [this] { return verdict_.has_value() || done_; });
  return verdict_.value_or(error.code);
}

void Watch::finish() {
  std::unique_lock lock(mutex_);
  request_ = Request::finish;
  wake();
  changed_.wait(lock, [this] { return done_; });
}

// ------------------------------------------------------------------------------------------ the thread

void Watch::run() {
  Clock::time_point last = Clock::now();
  bool new_phase = false;  // that has not been told
  tick(0);
  for (;;) {
    const double since = -seconds_until(last);
    double pause = std::max(0.0, interval_s_ - since);
    if (reason_) pause = std::clamp(seconds_until(decide_at_), 0.0, pause);
    if (new_phase) pause = std::clamp(kBetweenPhases + seconds_until(last_beat_), 0.0, pause);
    wait(pause);
    for (Peer& peer : peers_) hear(peer);
    look_at_requests();
    {
      const std::lock_guard lock(mutex_);
      if (request_ == Request::stop || done_) break;
      new_phase = new_phase_;
    }
    if (new_phase && -seconds_until(last_beat_) >= kBetweenPhases) {
      send_beat(0);
      new_phase = false;
    }
    const double elapsed = -seconds_until(last);
    if (elapsed >= interval_s_) {
      last = Clock::now();
      tick(elapsed);
    }
    if (reason_ && (seconds_until(decide_at_) <= 0 || all_have_spoken())) decide();
  }
  const std::lock_guard lock(mutex_);
  done_ = true;
  changed_.notify_all();
}

void Watch::wait(double seconds) {
  std::vector<pollfd> entries{{wake_read_.fd(), POLLIN, 0}};
  for (const Peer& peer : peers_)
    if (peer.line.is_open())
      entries.push_back(
          {peer.line.socket().fd(), static_cast<short>(peer.line.is_busy() ? POLLIN | POLLOUT : POLLIN), 0});
  poll(entries.data(), entries.size(), static_cast<int>(seconds * 1000) + 1);
  char used[64];
  for (ssize_t n = 0; (n = read(wake_read_.fd(), used, sizeof(used))) > 0;)
    take_last_words({used, static_cast<size_t>(n)});
  for (Peer& peer : peers_) peer.line.flush();
}

/// A signal handler has written why this process cannot go on: as if the main thread left with that error.
void Watch::take_last_words(std::string_view bytes) {
  for (const char c : bytes)
    if (c != '\0') last_words_ += c;
  if (!last_words_.ends_with('\n')) return;
  const std::string text = last_words_.substr(1, last_words_.size() - 2);
  const auto code = static_cast<ExitCode>(last_words_.front() - '0');
  last_words_.clear();
  const std::lock_guard lock(mutex_);
  if (request_ != Request::none) return;
  mine_ = {rank_, code, text, false};
  request_ = Request::leave;
}

/// How far the main thread is, to all, with `counted_s` more of time.
void Watch::send_beat(double counted_s) {
  Standing& own = standing(rank_);
  {
    const std::lock_guard lock(mutex_);
    const double idle = changes_ == seen_ ? own.progress.idle_s + counted_s : 0;
    seen_ = changes_;
    new_phase_ = false;
    own.progress = progress_;
    own.progress.idle_s = idle;
  }
  last_beat_ = Clock::now();
  const std::string beat = pack(own.progress);
  // A line on which something waits is that of a rank that does not read: one more message would not help.
  for (Peer& peer : peers_)
    if (!peer.line.is_busy()) peer.line.send(kBeat, beat);
}

/// Time passes: sends this rank's heartbeat, and judges.
void Watch::tick(double elapsed_s) {
  // Much more time than asked for: the whole job was suspended, or the machine was. Nobody could do anything in it.
  const double counted = hang_timeout_s_ > 0 && elapsed_s > hang_timeout_s_ / 4 ? interval_s_ : elapsed_s;
  if (hang_timeout_s_ > 0 && elapsed_s > hang_timeout_s_ / 2) stood_still_s_ = elapsed_s;
  send_beat(counted);
  for (Peer& peer : peers_) {
    // Who was heard since the last look may have been so a moment ago, however long ago that look was.
    if (!peer.heard) standing(peer.rank).silent_s += counted;
    peer.heard = false;
  }
  if (rank_ != 0) {
    const Standing& first = standing(0);
    if (!first.departed && hang_timeout_s_ > 0 && first.silent_s > hang_timeout_s_ / 2) first_is_lost();
  } else if (!reason_ || reason_->weak) {
    if (const std::string why = judge(standings_, hosts_, hang_timeout_s_); !why.empty())
      consider({-1, ExitCode::rank_lost, why, false}, kSettle);
  }
}

void Watch::hear(Peer& peer) {
  if (!peer.line.is_open()) return;
  Standing& other = standing(peer.rank);
  for (const MessageLine::Message& message : peer.line.receive()) {
    other.silent_s = 0;
    peer.heard = true;
    stood_still_s_ = 0;
    switch (message.kind) {
      case kBeat: other.progress = unpack_progress(message.body); break;
      case kGoodbye: other.departed = true; break;
      case kError: {
        peer.leaving = true;
        const auto [code, text] = unpack_error(message.body);
        const bool weak = code == ExitCode::rank_lost;
        if (rank_ == 0) consider({peer.rank, code, text, weak}, weak ? kBetterReason : kOthersError);
        break;
      }
      case kVerdict: conclude(unpack_error(message.body).first); break;
      default: break;
    }
  }
  if (peer.line.is_open() || other.departed) return;
  if (peer.leaving) {
    other.departed = true;  // it has given up waiting; its error is known
    return;
  }
  other.closed = true;
  if (rank_ == 0)
    consider({-1, ExitCode::rank_lost, judge(standings_, hosts_, hang_timeout_s_), false}, kSettle);
  else
    consider({-1, ExitCode::rank_lost, "", false}, kSelfHelp);
}

}  // namespace kinoe
