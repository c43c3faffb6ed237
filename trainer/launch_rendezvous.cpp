// The protocol: a rank opens a connection per line and says hello on each; when all hellos of all ranks are there, rank 0
// answers every rank on its control line with the list of hosts, or with why there is no team. Anything can connect to an
// open port (scanners, another job): who does not begin with a right hello is dropped and costs nobody anything.
#include "trainer/launch_rendezvous.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>

#include "trainer/launch_place.h"

namespace kinoe {
namespace {

constexpr uint64_t kMagic = 0x314d414554454f4bULL;  // differs on a machine of the other byte order
constexpr uint32_t kProtocol = 1;

struct Hello {
  uint64_t magic = kMagic;
  uint32_t protocol = kProtocol;
  int32_t line = 0;
  uint64_t key = 0;
  int32_t rank = 0, ranks = 0, local_rank = 0, process = 0;
  std::array<char, 256> host{};
};

struct Answer {
  uint64_t magic = kMagic;
  int32_t code = 0;  // an ExitCode; 0: welcome
  uint32_t bytes = 0;
};

std::string host_of(const Hello& hello) {
  return {hello.host.data(), strnlen(hello.host.data(), hello.host.size())};
}

Hello make_hello(const Place& place, uint64_t key, int line) {
  Hello hello;
  hello.line = line;
  hello.key = key;
  hello.rank = place.rank;
  hello.ranks = place.ranks;
  hello.local_rank = place.local_rank;
  hello.process = static_cast<int32_t>(getpid());
  place.host.copy(hello.host.data(), hello.host.size() - 1);
  return hello;
}

void give_answer(const Socket& socket, ExitCode code, const std::string& text) {
  const Answer answer{kMagic, static_cast<int32_t>(code), static_cast<uint32_t>(text.size())};
  std::string bytes(reinterpret_cast<const char*>(&answer), sizeof(answer));
  bytes += text;
  send_all(socket, bytes.data(), bytes.size(), in_seconds(2));
}

/// Rank 0's side.
class Reception {
 public:
  Reception(const Socket& listener, const std::string& address, const Place& place, uint64_t key,
            const Patience& patience)
      : listener_(listener), address_(address), place_(place), key_(key), patience_(patience) {
    seats_.resize(static_cast<size_t>(place.ranks));
    seats_[0].hello = make_hello(place, key, 0);
    missing_ = (place.ranks - 1) * kLines;
  }

  Roster run() {
    while (missing_ > 0) {
      if (seconds_until(patience_.end) <= 0) turn_down(who_is_missing());
      wait();
      while (true) {
        Socket socket = next();
        if (!socket.is_open()) break;
        guests_.push_back({std::move(socket), {}, 0, in_seconds(10)});
      }
      for (Guest& guest : guests_) listen_to(guest);
      std::erase_if(guests_, [](const Guest& guest) { return !guest.socket.is_open(); });
    }
    return welcome();
  }

 private:
  /// A connection of which nothing is known yet.
  struct Guest {
    Socket socket;
    Hello hello;
    size_t bytes = 0;  // of the hello, so far
    Clock::time_point patience;
  };
  struct Seat {
    Hello hello;
    std::array<Socket, kLines> lines;
  };

  Socket next() {
    try {
      return accept_one(listener_);
    } catch (const Error& error) {
      turn_down(error.what(), error.code);
    }
  }

  void wait() {
    std::vector<pollfd> entries{{listener_.fd(), POLLIN, 0}};
    for (const Guest& guest : guests_) entries.push_back({guest.socket.fd(), POLLIN, 0});
    const double left = std::clamp(seconds_until(patience_.end), 0.0, 0.5);
    poll(entries.data(), entries.size(), static_cast<int>(left * 1000) + 1);
  }

  void listen_to(Guest& guest) {
    while (guest.bytes < sizeof(Hello)) {
      const ssize_t n = recv(guest.socket.fd(), reinterpret_cast<char*>(&guest.hello) + guest.bytes,
                             sizeof(Hello) - guest.bytes, 0);
      if (n > 0) {
        guest.bytes += static_cast<size_t>(n);
      } else if (n < 0 && errno == EINTR) {
        continue;
      } else {
        if (n == 0 || errno != EAGAIN || seconds_until(guest.patience) <= 0) guest.socket.close();
        return;
      }
      if (guest.bytes >= sizeof(kMagic) && guest.hello.magic != kMagic) {
        guest.socket.close();
        return;
      }
    }
    const Hello& hello = guest.hello;
    const std::string host = host_of(hello);
    const bool known_layout = hello.protocol == kProtocol;
    if (known_layout && (hello.key != key_ || hello.line < 0 || hello.line >= kLines)) {
      guest.socket.close();  // another job's
      return;
    }
    // It is taken in before it is judged: whoever has come hears why there is no team.
    Socket& socket = late_.emplace_back(std::move(guest.socket));
    if (!known_layout)
      turn_down(cat("a rank came with another version of this program (protocol ", hello.protocol,
                    ", rank 0 has ", kProtocol, "): start the same binary everywhere"));
    if (hello.ranks != place_.ranks || hello.rank < 1 || hello.rank >= place_.ranks)
      turn_down(cat(hello.rank == 0 ? "a second process says it is rank 0" : cat("rank ", hello.rank), " (",
                    host, ", process ", hello.process, ") says there are ", hello.ranks, " ranks, rank 0 (",
                    place_.host, ") was told ", place_.ranks, "; see how the processes are started"));
    Seat& seat = seats_[static_cast<size_t>(hello.rank)];
    const bool first =
        std::none_of(seat.lines.begin(), seat.lines.end(), [](const Socket& line) { return line.is_open(); });
    if (!first && (seat.hello.process != hello.process || host_of(seat.hello) != host))
      turn_down(cat("two processes say they are rank ", hello.rank, ": process ", seat.hello.process, " on ",
                    host_of(seat.hello), " and process ", hello.process, " on ", host,
                    "; each process needs a number of its own"));
    seat.hello = hello;
    // The same process again has lost its connection and tried once more.
    Socket& line = seat.lines[static_cast<size_t>(hello.line)];
    if (!line.is_open()) --missing_;
    line = std::move(socket);
    late_.pop_back();
  }

  [[nodiscard]] std::string who_is_missing() const {
    std::vector<int> missing;
    for (int rank = 1; rank < place_.ranks; ++rank)
      for (const Socket& line : seats_[static_cast<size_t>(rank)].lines)
        if (!line.is_open()) {
          missing.push_back(rank);
          break;
        }
    const int came = place_.ranks - static_cast<int>(missing.size());
    return cat(came, " of ", place_.ranks, " ranks arrived at ", address_, ":", port_of(listener_),
               " within ", patience_.seconds,
               " s (--launch-timeout); missing: ", missing.size() == 1 ? "rank " : "ranks ",
               rank_ranges(missing), "; see whether they were started and can reach that port");
  }

  [[noreturn]] void turn_down(const std::string& why, ExitCode code = ExitCode::rank_lost) {
    for (const Seat& seat : seats_)
      if (seat.lines[0].is_open()) give_answer(seat.lines[0], code, why);
    for (const Socket& socket : late_) give_answer(socket, code, why);
    fail(code, why);
  }

  Roster welcome() {
    Roster roster;
    std::string list;
    std::vector<int> local_ranks;
    for (const Seat& seat : seats_) {
      const std::string host = host_of(seat.hello);
      const auto before = std::count(roster.hosts.begin(), roster.hosts.end(), host);
      local_ranks.push_back(seat.hello.local_rank >= 0 ? seat.hello.local_rank : static_cast<int>(before));
      roster.hosts.push_back(host);
      list += cat(local_ranks.back(), " ", host, "\n");
    }
    roster.local_rank = local_ranks[0];
    for (size_t line = 0; line < kLines; ++line)
      for (Seat& seat : seats_) roster.lines[line].push_back(std::move(seat.lines[line]));
    for (const Socket& socket : roster.lines[0])
      if (socket.is_open()) give_answer(socket, ExitCode::finished, list);
    return roster;
  }

  const Socket& listener_;
  const std::string& address_;
  const Place& place_;
  const uint64_t key_;
  const Patience patience_;
  std::vector<Guest> guests_;
  std::vector<Seat> seats_;
  std::vector<Socket> late_;
  int missing_ = 0;
};

/// Opens this rank's lines at one of the hosts, or the first of them; false when rank 0 is not there (yet).
bool open_lines(const std::vector<std::string>& hosts, int port, const Place& place, uint64_t key,
                Clock::time_point deadline, Roster& roster, std::string& reason) {
  for (const std::string& host : hosts) {
    bool all = true;
    for (int line = 0; line < kLines && all; ++line) {
      Socket socket = connect_to(host, port, deadline, reason);
      const Hello hello = make_hello(place, key, line);
      all = socket.is_open() && send_all(socket, &hello, sizeof(hello), deadline) == Transfer::done;
      auto& lines = roster.lines[static_cast<size_t>(line)];
      lines.clear();
      lines.push_back(std::move(socket));
    }
    // Who is turned down after the first hello finds nobody at the port for the others: the answer is on its way.
    if (all || roster.lines[0][0].is_open()) return true;
  }
  return false;
}

}  // namespace

Roster gather_ranks(const Socket& listener, const std::string& address, const Place& place, uint64_t key,
                    const Patience& patience) {
  return Reception(listener, address, place, key, patience).run();
}

Roster join_ranks(const std::vector<std::string>& hosts, int port, const Place& place, uint64_t key,
                  const Patience& patience) {
  const Clock::time_point deadline = patience.end;
  // Rank 0 may have begun to wait later than this rank: a rank that has arrived lets it have the last word.
  const Clock::time_point last_word = deadline + std::chrono::seconds(2);
  std::string reason = "no answer";
  Roster roster;
  while (seconds_until(deadline) > 0) {
    if (open_lines(hosts, port, place, key, deadline, roster, reason)) {
      Answer answer;
      const Transfer got = receive_all(roster.lines[0][0], &answer, sizeof(answer), last_word);
      if (got == Transfer::timed_out)
        reason = "it took the connection and gave no answer; is another program at that port?";
      else if (got == Transfer::closed)
        reason = "it closed the connection; is another program, or another job, at that port?";
      else if (answer.magic != kMagic || answer.bytes > (1U << 28))
        reason = "the answer is not this program's; another program is at that port";
      else {
        std::string text(answer.bytes, '\0');
        if (receive_all(roster.lines[0][0], text.data(), text.size(), in_seconds(5)) == Transfer::done) {
          if (answer.code != 0) throw ToldElsewhere(static_cast<ExitCode>(answer.code), text);
          std::istringstream lines(text);
          int local_rank = 0;
          for (std::string host; lines >> local_rank && std::getline(lines >> std::ws, host);) {
            if (static_cast<int>(roster.hosts.size()) == place.rank) roster.local_rank = local_rank;
            roster.hosts.push_back(host);
          }
          CHECK(static_cast<int>(roster.hosts.size()) == place.ranks, "rank 0 named ", roster.hosts.size(),
                " hosts for ", place.ranks, " ranks");
          return roster;
        }
      }
    }
    usleep(100'000);
  }
  std::string where;
  for (const std::string& host : hosts) where += cat(where.empty() ? "" : ", ", host, ":", port);
  fail(ExitCode::rank_lost, "rank ", place.rank, " (", place.host, ") did not reach rank 0 at ", where,
       " within ", patience.seconds, " s (--launch-timeout): ", reason,
       "; see whether rank 0 was started and that port is open between the hosts");
}

}  // namespace kinoe
