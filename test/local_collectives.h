// Collectives between threads of one process, each of which plays a rank: for tests of what is built on them.
#pragma once

#include <barrier>
#include <cstring>
#include <memory>
#include <vector>

#include "trainer/collectives.h"

namespace kinoe {

/// What the threads of one group share.
struct LocalGroup {
  explicit LocalGroup(int ranks) : meeting(ranks), from(static_cast<size_t>(ranks)) {}
  std::barrier<> meeting;
  std::vector<const void*> from;
};

class LocalCollectives : public Collectives {
 public:
  LocalCollectives(std::shared_ptr<LocalGroup> group, int rank)
      : Collectives(rank, static_cast<int>(group->from.size()), {}), group_(std::move(group)) {}
  void follow(const Context&) override {}
  void await(const Context&, Mark) override {}

 private:
  void queue_all_reduce(const Tensor& buffer) override {
    std::vector<char> sum(buffer.bytes());
    meet(buffer.data, [&] { add(buffer.dtype, sum.data(), buffer.size(), 0); });
    std::memcpy(buffer.data, sum.data(), sum.size());
    group_->meeting.arrive_and_wait();
  }
  void queue_reduce_scatter(const Tensor& mine, const Tensor& all) override {
    meet(all.data, [&] { add(mine.dtype, mine.data, mine.size(), rank() * mine.size()); });
  }
  void queue_all_gather(const Tensor& all, const Tensor& mine) override {
    meet(mine.data, [&] {
      for (size_t r = 0; r < group_->from.size(); ++r)
        std::memcpy(static_cast<char*>(all.data) + r * mine.bytes(), group_->from[r], mine.bytes());
    });
  }

  /// Everybody's memory can be read during `work`.
  template <class Work>
  void meet(const void* memory, const Work& work) {
    group_->from[static_cast<size_t>(rank())] = memory;
    group_->meeting.arrive_and_wait();
    work();
    group_->meeting.arrive_and_wait();
  }
  void add(DType type, void* to, int64_t n, int64_t first) const {
    switch (type) {
      case DType::f32: add_as<float>(to, n, first); break;
      case DType::f64: add_as<double>(to, n, first); break;
      case DType::i64:
      case DType::u64: add_as<uint64_t>(to, n, first); break;
      default: CHECK(false, "sums of ", name_of(type));
    }
  }
  /// In order of rank.
  template <class T>
  void add_as(void* to, int64_t n, int64_t first) const {
    auto* sum = static_cast<T*>(to);
    for (int64_t i = 0; i < n; ++i) {
      T s{};
      for (const void* from : group_->from) s += static_cast<const T*>(from)[first + i];
      sum[i] = s;
    }
  }

  std::shared_ptr<LocalGroup> group_;
};

}  // namespace kinoe
