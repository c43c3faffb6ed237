#include "trainer/launch_socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>

#include "kernels/common/check.h"
#include "trainer/launch_limits.h"

namespace kinoe {
namespace {

constexpr size_t kLongestBody = 1 << 20;  // of a MessageLine: an error's text is the longest

void send_at_once(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

bool wait_for(int fd, short events, Clock::time_point deadline) {
  for (;;) {
    const double left = seconds_until(deadline);
    if (left <= 0) return false;
    pollfd entry{fd, events, 0};
    // An hour at most at a time, so that the milliseconds fit; rounded up, so that the last wait is not a busy one.
    const int n = poll(&entry, 1, static_cast<int>(std::ceil(std::min(left, 3600.0) * 1000)));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return true;  // the transfer will say what is wrong
  }
}

Socket make_listener(int family, int port, int& error) {
  Socket socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  error = errno;
  if (!socket.is_open()) return socket;
  // A port whose last owner has just ended is free; one that somebody listens on is taken all the same.
  const int on = 1, off = 0;
  setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_storage address{};
  socklen_t length = 0;
  if (family == AF_INET6) {
    setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
    v6.sin6_family = AF_INET6;
    v6.sin6_addr = in6addr_any;
    v6.sin6_port = htons(static_cast<uint16_t>(port));
    length = sizeof(v6);
  } else {
    auto& v4 = reinterpret_cast<sockaddr_in&>(address);
    v4.sin_family = AF_INET;
    v4.sin_addr.s_addr = htonl(INADDR_ANY);
    v4.sin_port = htons(static_cast<uint16_t>(port));
    length = sizeof(v4);
  }
  if (bind(socket.fd(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(socket.fd(), SOMAXCONN) != 0) {
    error = errno;
    socket.close();
  }
  return socket;
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.fd_;
    other.fd_ = -1;
  }
  return *this;
}

void Socket::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Socket listen_on(int port) {
  int error = 0;
  Socket socket = make_listener(AF_INET6, port, error);  // takes IPv4 as well
  if (!socket.is_open() && error != EADDRINUSE) socket = make_listener(AF_INET, port, error);
  if (socket.is_open()) return socket;
  check_open_files(error);
  if (error == EADDRINUSE)
    fail(ExitCode::rank_lost, "port ", port,
         ", where rank 0 is to be found, is taken by another program on this host: set "
         "MASTER_PORT to a free port, the same for all ranks (or wait for the other run to end)");
  fail(ExitCode::rank_lost, "rank 0 cannot listen on port ", port, ": ", std::strerror(error),
       "; set MASTER_PORT to another port, the same for all ranks");
}

int port_of(const Socket& listener) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

Socket accept_one(const Socket& listener) {
  // At the limit of open files accept() fails before it looks whether anybody is there.
  pollfd entry{listener.fd(), POLLIN, 0};
  if (poll(&entry, 1, 0) <= 0) return {};
  Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket.is_open())
    send_at_once(socket.fd());
  else
    check_open_files(errno);
  return socket;
}

Socket connect_to(const std::string& host, int port, Clock::time_point deadline, std::string& reason) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list); error != 0) {
    reason = cat("the name '", host, "' is not known here (", gai_strerror(error), ")");
    return {};
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, freeaddrinfo);
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    Socket socket(::socket(entry->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket.is_open()) {
      check_open_files(errno);
      reason = std::strerror(errno);
      continue;
    }
    int error = connect(socket.fd(), entry->ai_addr, entry->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS || error == EINTR) {
      socklen_t length = sizeof(error);
      // One address that does not answer must not use up the time of the others.
      if (!wait_writable(socket, std::min(deadline, in_seconds(5))))
        error = ETIMEDOUT;
      else if (getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length) != 0)
        error = errno;
    }
    if (error == 0) {
      send_at_once(socket.fd());
      return socket;
    }
    reason = std::strerror(error);
  }
  return {};
}

bool wait_readable(const Socket& socket, Clock::time_point deadline) {
  return wait_for(socket.fd(), POLLIN, deadline);
}
bool wait_writable(const Socket& socket, Clock::time_point deadline) {
  return wait_for(socket.fd(), POLLOUT, deadline);
}

Transfer send_all(const Socket& socket, const void* data, size_t bytes, Clock::time_point deadline) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::send(socket.fd(), from, bytes, MSG_NOSIGNAL);
    if (n >= 0) {
      from += n;
      bytes -= static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      if (!wait_writable(socket, deadline)) return Transfer::timed_out;
    } else if (errno != EINTR) {
      return Transfer::closed;
    }
  }
  return Transfer::done;
}

Transfer receive_all(const Socket& socket, void* data, size_t bytes, Clock::time_point deadline) {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::recv(socket.fd(), to, bytes, 0);
    if (n > 0) {
      to += n;
      bytes -= static_cast<size_t>(n);
    } else if (n < 0 && errno == EAGAIN) {
      if (!wait_readable(socket, deadline)) return Transfer::timed_out;
    } else if (n == 0 || errno != EINTR) {
      return Transfer::closed;
    }
  }
  return Transfer::done;
}

void MessageLine::send(uint32_t kind, std::string_view body) {
  if (!is_open()) return;
  const std::array<uint32_t, 2> head{kind, static_cast<uint32_t>(std::min(body.size(), kLongestBody))};
  out_.append(reinterpret_cast<const char*>(head.data()), sizeof(head));
  out_.append(body.substr(0, head[1]));
  flush();
}

void MessageLine::flush() {
  while (is_open() && !out_.empty()) {
    const ssize_t n = ::send(socket_.fd(), out_.data(), out_.size(), MSG_NOSIGNAL);
    if (n > 0) {
      out_.erase(0, static_cast<size_t>(n));
    } else if (n < 0 && errno != EINTR) {
      // What the other end has said before it closed is still to be read: receive() finds the end.
      if (errno != EAGAIN) out_.clear();
      return;
    }
  }
}

std::vector<MessageLine::Message> MessageLine::receive() {
  std::array<char, 4096> buffer{};
  bool ended = false;
  while (is_open()) {
    const ssize_t n = ::recv(socket_.fd(), buffer.data(), buffer.size(), 0);
    if (n > 0) {
      in_.append(buffer.data(), static_cast<size_t>(n));
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
      ended = true;
      break;
    } else if (errno == EAGAIN) {
      break;
    }
  }
  std::vector<Message> messages;
  for (;;) {
    std::array<uint32_t, 2> head{};
    if (in_.size() < sizeof(head)) break;
    std::memcpy(head.data(), in_.data(), sizeof(head));
    if (head[1] > kLongestBody) {
      ended = true;
      break;
    }
    if (in_.size() < sizeof(head) + head[1]) break;
    messages.push_back({head[0], in_.substr(sizeof(head), head[1])});
    in_.erase(0, sizeof(head) + head[1]);
  }
  if (ended) close();
  return messages;
}

}  // namespace kinoe
