// Channels between the threads of one process: what needs several ranks is tested without starting any.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common/check.h"
#include "trainer/channel.h"

namespace kinoe {

class LocalChannel final : public Channel {
 public:
  /// Where the threads meet.
  struct Room {
    explicit Room(int n) : texts(static_cast<size_t>(n)) {}
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::string> texts;
    int arrived = 0;
    int64_t round = 0;
    std::string what;                                        // of the exchange under way
    std::shared_ptr<const std::vector<std::string>> result;  // of the last round
    int closed_by = -1;
    std::string broken;  // an exchange that cannot be mended
  };

  LocalChannel(std::shared_ptr<Room> room, int rank) : room_(std::move(room)), rank_(rank) {}
  ~LocalChannel() override {
    const std::lock_guard lock(room_->mutex);
    if (room_->closed_by < 0) room_->closed_by = rank_;
    room_->changed.notify_all();
  }

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int ranks() const override { return static_cast<int>(room_->texts.size()); }

  std::vector<std::string> exchange(const std::string& what, const std::string& mine) override {
    std::unique_lock lock(room_->mutex);
    Room& room = *room_;
    if (room.arrived == 0) room.what = what;
    if (room.what != what && room.broken.empty()) {
      room.broken = cat("rank ", rank_, " is at '", what, "', another rank at '", room.what, "'");
      room.changed.notify_all();
    }
    CHECK(room.broken.empty(), room.broken);
    room.texts[static_cast<size_t>(rank_)] = mine;
    const int64_t round = room.round;
    if (++room.arrived == ranks()) {
      room.result = std::make_shared<const std::vector<std::string>>(room.texts);
      room.arrived = 0;
      ++room.round;
      room.changed.notify_all();
    } else {
      room.changed.wait(lock,
                        [&] { return room.round != round || room.closed_by >= 0 || !room.broken.empty(); });
      if (room.round == round) {
        CHECK(room.broken.empty(), room.broken);
        fail(ExitCode::rank_lost, "rank ", room.closed_by, " is gone (rank ", rank_,
             " waited for everybody at '", what, "')");
      }
    }
    const std::shared_ptr<const std::vector<std::string>> result = room.result;
    lock.unlock();
    return *result;
  }

 private:
  std::shared_ptr<Room> room_;
  int rank_;
};

/// n channels, one for each of n threads. An exchange throws Error(rank_lost) when a participant has closed its own.
inline std::vector<std::unique_ptr<Channel>> make_local_channels(int n) {
  const auto room = std::make_shared<LocalChannel::Room>(n);
  std::vector<std::unique_ptr<Channel>> channels;
  channels.reserve(static_cast<size_t>(n));
  for (int rank = 0; rank < n; ++rank) channels.push_back(std::make_unique<LocalChannel>(room, rank));
  return channels;
}

}  // namespace kinoe
