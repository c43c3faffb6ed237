// The thread on every rank that tells the others how far its main thread is, and ends the process when the run is over.
//
// Main threads sit in MPI, NCCL or CUDA calls that may never return; this thread waits for nothing but its sockets and so
// can always act. It ends a process with _exit: destructors and exit handlers may wait for what is never going to come.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "trainer/launch.h"
#include "trainer/launch_judge.h"
#include "trainer/launch_socket.h"

namespace kinoe {

class Watch {
 public:
  /// `lines`: the Roster's heartbeat lines. Throws Error(usage) at a limit of threads or open files; the others know then.
  Watch(int rank, std::vector<std::string> hosts, std::vector<Socket> lines, double hang_timeout_s);
  /// Without finish() the others see this rank end without a word.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // The main thread's side; see Team.
  void at(const std::string& what, double limit_s);
  void reached(const char* what, int64_t number);
  void alive();
  void exchanging(const char* what);
  /// Of the checkpoint thread: an exchange begins.
  void saving(const char* what);
  /// Tells the others; returns the exit code of the run when all know it. What there was to print has been printed.
  ExitCode leave(const Error& error);
  /// Says goodbye; returns when all have, or after some seconds.
  void finish();
  /// See Team::last_words().
  [[nodiscard]] int last_words() const { return wake_write_.fd(); }

 private:
  enum class Request { none, leave, finish, stop };
  static constexpr double kBetterReason = 2;  // "a rank is gone" waits so long for why

  /// Another rank at the end of a line: all others on rank 0, rank 0 elsewhere.
  struct Peer {
    int rank = 0;
    MessageLine line;
    bool leaving = false;  // it has an error and waits for the verdict
    bool heard = false;    // since the last tick
  };

  /// Why the run ends, on rank 0.
  struct Reason {
    int rank = -1;  // whose error; -1: the judge's
    ExitCode code = ExitCode::rank_lost;
    std::string text;
    bool weak = false;  // only says that somebody is gone
  };

  [[nodiscard]] std::thread start();
  [[noreturn]] void never_begun(const Error& error);
  void run();
  void wait(double seconds);
  void tick(double elapsed_s);
  void send_beat(double counted_s);
  void wake() const;
  void take_last_words(std::string_view bytes);
  void begin_operation();
  void hear(Peer& peer);
  void consider(const Reason& reason, double delay_s);
  [[nodiscard]] bool all_have_spoken() const;
  void look_at_requests();
  void decide();
  void first_is_lost();
  void conclude(ExitCode code);
  void say_goodbye();
  [[nodiscard]] Standing& standing(int rank) { return standings_[static_cast<size_t>(rank)]; }
  [[nodiscard]] const std::string& host(int rank) const { return hosts_[static_cast<size_t>(rank)]; }

  const int rank_;
  const std::vector<std::string> hosts_;
  const double hang_timeout_s_;
  const double interval_s_;

  // The thread's own.
  std::vector<Peer> peers_;
  std::vector<Standing> standings_;
  std::optional<Reason> reason_;
  Clock::time_point decide_at_{};
  uint64_t seen_ = 0;           // changes_ at the last heartbeat
  bool request_taken_ = false;  // the main thread's error was passed on
  Clock::time_point give_up_at_{};
  Clock::time_point last_beat_{};
  std::string last_words_;    // that have come so far
  double stood_still_s_ = 0;  // this whole process, so long that others may miss it; nobody was heard since

  // Shared with the main thread, under mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;
  Progress progress_;              // idle_s is the thread's business
  std::string phase_, operation_;  // the latest of each
  uint64_t changes_ = 0;
  bool new_phase_ = false;  // of which the others should hear before the next second
  Request request_ = Request::none;
  Reason mine_;
  bool main_waits_ = false;  // in leave()
  std::optional<ExitCode> verdict_;
  bool done_ = false;  // the thread has nothing more to do

  Socket wake_read_, wake_write_;  // a pipe: ends the thread's wait; what is not 0 in it are last words
  std::thread thread_;
};

}  // namespace kinoe
