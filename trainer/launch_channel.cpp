// An all-gather of texts through rank 0: everybody sends to it, it sends everything to everybody. The star costs rank 0
// ranks times the bytes, which for facts and checksums is nothing, and makes every failure visible in one place.
#include "trainer/launch_channel.h"

#include <utility>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

constexpr uint64_t kLongestText = 64 << 20;

/// Precedes a rank's text, and rank 0's reply to all.
struct Head {
  uint64_t number = 0;      // of the exchange
  uint64_t what_bytes = 0;  // the name follows, then
  uint64_t bytes = 0;       // the text; of a reply: for each rank 8 bytes of length and its text
};

class SocketChannel final : public Channel {
 public:
  SocketChannel(int rank, const std::vector<std::string>& hosts, std::vector<Socket> lines, double timeout_s,
                std::function<void(const char*)> begun)
      : rank_(rank),
        hosts_(hosts),
        lines_(std::move(lines)),
        timeout_s_(timeout_s),
        begun_(std::move(begun)) {}

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int ranks() const override { return static_cast<int>(hosts_.size()); }

  std::vector<std::string> exchange(const std::string& what, const std::string& mine) override {
    CHECK(mine.size() <= kLongestText, "'", what, "': ", mine.size(), " bytes are too many for a channel");
    if (begun_) begun_(what.c_str());
    ++number_;
    deadline_ = in_seconds(timeout_s_);
    return rank_ == 0 ? serve(what, mine) : ask(what, mine);
  }

 private:
  std::vector<std::string> serve(const std::string& what, const std::string& mine) {
    std::vector<std::string> texts{mine};
    for (size_t from = 1; from < lines_.size(); ++from)
      texts.push_back(receive(static_cast<int>(from), what));
    std::string reply;
    for (const std::string& text : texts) {
      const uint64_t bytes = text.size();
      reply.append(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
      reply += text;
    }
    for (size_t to = 1; to < lines_.size(); ++to) send(static_cast<int>(to), what, reply);
    return texts;
  }

  std::vector<std::string> ask(const std::string& what, const std::string& mine) {
    send(0, what, mine);
    const std::string reply = receive(0, what);
    std::vector<std::string> texts;
    for (size_t at = 0; texts.size() < hosts_.size();) {
      uint64_t bytes = 0;
      CHECK(at + sizeof(bytes) <= reply.size(), "'", what, "': the reply ends early");
      reply.copy(reinterpret_cast<char*>(&bytes), sizeof(bytes), at);
      at += sizeof(bytes);
      CHECK(bytes <= reply.size() - at, "'", what, "': the reply ends early");
      texts.push_back(reply.substr(at, bytes));
      at += bytes;
    }
    return texts;
  }

  void send(int to, const std::string& what, const std::string& text) {
    const Head head{number_, what.size(), text.size()};
    std::string front(reinterpret_cast<const char*>(&head), sizeof(head));
    front += what;
    const Socket& line = lines_[static_cast<size_t>(to)];
    Transfer sent = send_all(line, front.data(), front.size(), deadline_);
    if (sent == Transfer::done) sent = send_all(line, text.data(), text.size(), deadline_);
    demand(sent, to, what);
  }

  std::string receive(int from, const std::string& what) {
    const Socket& line = lines_[static_cast<size_t>(from)];
    Head head;
    demand(receive_all(line, &head, sizeof(head), deadline_), from, what);
    const uint64_t longest = rank_ == 0 ? kLongestText : (kLongestText + sizeof(uint64_t)) * hosts_.size();
    CHECK(head.what_bytes < 65536 && head.bytes <= longest, "'", what, "': rank ", from,
          " sent no message of an exchange");
    std::string name(head.what_bytes, '\0');
    demand(receive_all(line, name.data(), name.size(), deadline_), from, what);
    CHECK(name == what && head.number == number_, "rank ", from, " is at exchange ", head.number, " ('", name,
          "'), rank ", rank_, " at exchange ", number_, " ('", what, "')");
    std::string text(head.bytes, '\0');
    demand(receive_all(line, text.data(), text.size(), deadline_), from, what);
    return text;
  }

  void demand(Transfer transfer, int other, const std::string& what) const {
    if (transfer == Transfer::done) return;
    const std::string& host = hosts_[static_cast<size_t>(other)];
    if (transfer == Transfer::closed)
      fail(ExitCode::rank_lost, "rank ", other, " (", host,
           ") is gone: its connection closed while all ranks exchange '", what,
           "'; see its own messages, then start again with --resume auto");
    fail(ExitCode::rank_lost, "rank ", other, " (", host, ") did not take part in the exchange '", what,
         "' within ", timeout_s_, " s; see what it does, then start again with --resume auto");
  }

  const int rank_;
  const std::vector<std::string> hosts_;
  const std::vector<Socket> lines_;
  const double timeout_s_;
  const std::function<void(const char*)> begun_;
  uint64_t number_ = 0;
  Clock::time_point deadline_;
};

}  // namespace

std::unique_ptr<Channel> make_socket_channel(int rank, const std::vector<std::string>& hosts,
                                             std::vector<Socket> lines, double timeout_s,
                                             std::function<void(const char*)> begun) {
  return std::make_unique<SocketChannel>(rank, hosts, std::move(lines), timeout_s, std::move(begun));
}

}  // namespace kinoe
