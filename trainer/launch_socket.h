// TCP with deadlines: what the connections of a team need of sockets, and no more.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kinoe {

using Clock = std::chrono::steady_clock;
inline Clock::time_point in_seconds(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}
/// How long a whole start may take, and when that is over.
struct Patience {
  explicit Patience(double all_seconds) : seconds(all_seconds), end(in_seconds(all_seconds)) {}
  double seconds;
  Clock::time_point end;
};
inline double seconds_until(Clock::time_point time) {
  return std::chrono::duration<double>(time - Clock::now()).count();
}

/// Owns a descriptor. All of them are non-blocking, closed in started programs, and send small messages at once.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  ~Socket() { close(); }
  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] bool is_open() const { return fd_ >= 0; }
  void close();

 private:
  int fd_ = -1;
};

/// Listens on all interfaces; port 0: any free one. Throws Error(rank_lost) naming the port and what to do when it is taken.
Socket listen_on(int port);
int port_of(const Socket& listener);
/// The next waiting connection; not open when there is none. Throws Error(usage) when no more files may be open, as
/// connect_to() does.
Socket accept_one(const Socket& listener);
/// One attempt on every address of `host`. Not open when none answered in time: `reason` says why.
Socket connect_to(const std::string& host, int port, Clock::time_point deadline, std::string& reason);

/// Waits until something is to be read (or written); false when the deadline came first.
bool wait_readable(const Socket& socket, Clock::time_point deadline);
bool wait_writable(const Socket& socket, Clock::time_point deadline);

enum class Transfer { done, closed, timed_out };
Transfer send_all(const Socket& socket, const void* data, size_t bytes, Clock::time_point deadline);
Transfer receive_all(const Socket& socket, void* data, size_t bytes, Clock::time_point deadline);

/// Messages (a kind and some bytes) over a socket, without ever waiting.
class MessageLine {
 public:
  struct Message {
    uint32_t kind = 0;
    std::string body;
  };
  MessageLine() = default;
  explicit MessageLine(Socket socket) : socket_(std::move(socket)) {}
  [[nodiscard]] const Socket& socket() const { return socket_; }
  [[nodiscard]] bool is_open() const { return socket_.is_open(); }
  /// Something waits to be sent.
  [[nodiscard]] bool is_busy() const { return !out_.empty(); }
  void send(uint32_t kind, std::string_view body);
  /// Goes on sending what waits.
  void flush();
  /// All complete messages that have come. Closes the socket when the other end has, or sends what is no message.
  std::vector<Message> receive();
  void close() { socket_.close(); }

 private:
  Socket socket_;
  std::string in_, out_;
};

}  // namespace kinoe
