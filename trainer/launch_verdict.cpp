// How a run ends. Rank 0 collects reasons: an error that a rank reports, a connection that closes, a heartbeat that stays
// away. A reason waits a moment before it counts, because the first message is not always the best one: a rank whose
// neighbour failed reports that the neighbour is gone while the neighbour's own error is still on its way. Then the verdict
// goes to all, rank 0 prints it, and everybody ends with its code. Only when rank 0 itself is lost do the others speak.
#include <algorithm>
#include <cmath>
#include <utility>

#include "trainer/launch_end.h"
#include "trainer/launch_message.h"
#include "trainer/launch_watch.h"

namespace kinoe {
namespace {

constexpr double kFarewell = 2;  // rank 0 waits so long for the others to take note

}  // namespace

/// The first reason counts, but one that only says that somebody is gone gives way.
void Watch::consider(const Reason& reason, double delay_s) {
  const bool better = !reason_ || (reason_->weak && !reason.weak);
  if (!better) return;
  reason_ = reason;
  decide_at_ = in_seconds(delay_s);
}

/// Every rank has an error of its own: no better reason can come.
bool Watch::all_have_spoken() const {
  return rank_ == 0 && request_taken_ &&
         std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.leaving; });
}

void Watch::look_at_requests() {
  std::unique_lock lock(mutex_);
  if (verdict_) return;
  if (request_ == Request::finish && !done_) {
    lock.unlock();
    say_goodbye();
    return;
  }
  if (request_ != Request::leave) return;
  const Reason mine = mine_;
  lock.unlock();
  if (rank_ == 0) {
    if (!request_taken_) {
      request_taken_ = true;
      if (reason_ && reason_->text == mine.text) reason_->rank = 0;
      consider(mine, mine.weak ? kBetterReason : 0);
    }
    return;
  }
  if (!request_taken_) {
    request_taken_ = true;
    // Rank 0 decides within kBetterReason; the rest is for the way.
    give_up_at_ = in_seconds(kBetterReason + 3);
    peers_.front().line.send(kError, pack(mine.code, mine.text));
  } else if (seconds_until(give_up_at_) <= 0) {
    first_is_lost();
  }
}

/// The run ends now.
void Watch::decide() {
  if (rank_ != 0) {
    first_is_lost();
    return;
  }
  Reason reason = *reason_;
  // More connections may have closed since.
  if (reason.rank < 0)
    if (const std::string now = judge(standings_, hosts_, hang_timeout_s_); !now.empty()) reason.text = now;
  const bool alone =
      std::none_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.line.is_open(); });
  if (reason.rank < 0 && alone && stood_still_s_ > 0)
    reason.text = cat("rank 0 (", host(0), ") did not run for ", std::lround(stood_still_s_),
                      " s (stopped, or its host was): the other ranks took it for lost and have ended; start "
                      "again with --resume auto");
  const std::string text =
      reason.rank > 0 ? cat("rank ", reason.rank, " (", host(reason.rank), "): ", reason.text) : reason.text;
  print_error(text);
  for (Peer& peer : peers_) peer.line.send(kVerdict, pack(reason.code, text));
  // Who has taken note ends its process, which closes the line. Who is lost does not.
  const Clock::time_point farewell = in_seconds(kFarewell);
  const auto waiting = [this] {
    return std::any_of(peers_.begin(), peers_.end(), [this](const Peer& peer) {
      const Standing& other = standing(peer.rank);
      return peer.line.is_open() && (hang_timeout_s_ <= 0 || other.silent_s <= hang_timeout_s_ / 2);
    });
  };
  while (waiting() && seconds_until(farewell) > 0) {
    wait(0.02);
    for (Peer& peer : peers_)
      if (peer.line.is_open()) peer.line.receive();
  }
  conclude(reason.code);
}

/// Elsewhere: rank 0 has ended without a verdict, or does not answer. Each rank speaks for itself.
void Watch::first_is_lost() {
  std::unique_lock lock(mutex_);
  if (verdict_) return;
  const bool own_error = request_ == Request::leave && !mine_.weak;
  const bool finishing = request_ == Request::finish;
  const Reason mine = mine_;
  lock.unlock();
  if (finishing) return;
  if (own_error)
    print_error(cat("rank ", rank_, " (", host(rank_), "): ", mine.text, "; and rank 0 (", host(0),
                    ") does not answer"));
  else
    print_error(cat("rank ", rank_, " (", host(rank_), "): ", lost_sentence(0, host(0), standing(0)),
                    "; start again with --resume auto"));
  conclude(own_error ? mine.code : ExitCode::rank_lost);
}

/// Ends the process, or lets the main thread end it where it waits in leave().
void Watch::conclude(ExitCode code) {
  {
    const std::lock_guard lock(mutex_);
    if (main_waits_) {
      for (Peer& peer : peers_) peer.line.close();
      verdict_ = code;
      done_ = true;
      changed_.notify_all();
      return;
    }
  }
  end_process(code);
}

/// A regular end. All ranks have come to it; what happens from here on is no fault of anybody.
void Watch::say_goodbye() {
  for (Peer& peer : peers_) peer.line.send(kGoodbye, "");
  const Clock::time_point deadline = in_seconds(5);
  const auto waiting = [this] {
    return std::any_of(peers_.begin(), peers_.end(), [this](const Peer& peer) {
      return peer.line.is_open() && (!standing(peer.rank).departed || peer.line.is_busy());
    });
  };
  while (waiting() && seconds_until(deadline) > 0) {
    wait(0.02);
    for (Peer& peer : peers_)
      if (peer.line.is_open())
        for (const MessageLine::Message& message : peer.line.receive())
          if (message.kind == kGoodbye) standing(peer.rank).departed = true;
  }
  const std::lock_guard lock(mutex_);
  done_ = true;
  changed_.notify_all();
}

}  // namespace kinoe
