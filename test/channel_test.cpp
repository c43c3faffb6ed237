#include "trainer/channel.h"

#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "test/local_channel.h"

namespace kinoe {
namespace {

/// Runs `work` on n ranks, each in a thread; what a rank throws is its result.
std::vector<std::string> on_ranks(int n, const std::function<std::string(Channel&)>& work) {
  std::vector<std::unique_ptr<Channel>> channels = make_local_channels(n);
  std::vector<std::string> results(static_cast<size_t>(n));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < channels.size(); ++rank)
    threads.emplace_back([&, rank] {
      try {
        results[rank] = work(*channels[rank]);
      } catch (const Error& error) {
        results[rank] = cat(static_cast<int>(error.code), ": ", error.what());
      }
      channels[rank].reset();
    });
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(Channel, ASingleProcessHearsItself) {
  const std::unique_ptr<Channel> channel = alone();
  EXPECT_EQ(channel->rank(), 0);
  EXPECT_EQ(channel->ranks(), 1);
  EXPECT_EQ(channel->exchange("greeting", "hello"), std::vector<std::string>{"hello"});
  EXPECT_EQ(channel->from_first("greeting", "hello"), "hello");
  const std::vector<uint64_t> numbers{1, ~uint64_t{0}};
  EXPECT_EQ(channel->sum("numbers", numbers), numbers);
}

TEST(Channel, EveryRankHearsAllInOrder) {
  const std::vector<std::string> got = on_ranks(4, [](Channel& channel) {
    std::string text;
    for (int round = 0; round < 200; ++round)
      for (const std::string& part :
           channel.exchange(cat("round ", round), cat(channel.rank(), ".", round, " ")))
        if (round % 100 == 99) text += part;
    return text + channel.from_first("name", cat("from ", channel.rank()));
  });
  EXPECT_EQ(got, std::vector<std::string>(4, "0.99 1.99 2.99 3.99 0.199 1.199 2.199 3.199 from 0"));
}

TEST(Channel, SumsWrapAndMustHaveOneSize) {
  on_ranks(3, [](Channel& channel) {
    const std::vector<uint64_t> mine{uint64_t(channel.rank()), ~uint64_t{0}, 0};
    EXPECT_EQ(channel.sum("sums", mine), (std::vector<uint64_t>{3, ~uint64_t{0} - 2, 0}));
    EXPECT_TRUE(channel.sum("nothing", {}).empty());
    return "";
  });
  for (const std::string& said : on_ranks(2, [](Channel& channel) {
         channel.sum("sizes", std::vector<uint64_t>(size_t(channel.rank() + 1)));
         return "";
       }))
    EXPECT_NE(said.find("1: internal error"), std::string::npos) << said;
}

TEST(Channel, ALostParticipantAndAnotherPurposeEndTheWait) {
  for (const std::string& said : on_ranks(3, [](Channel& channel) {
         if (channel.rank() != 1) channel.barrier("step 7");
         return "5: step 7";
       })) {
    EXPECT_EQ(said.substr(0, 3), "5: ");
    EXPECT_NE(said.find("step 7"), std::string::npos) << said;
  }
  for (const std::string& said : on_ranks(2, [](Channel& channel) {
         channel.barrier(channel.rank() == 0 ? "a save" : "an evaluation");
         return "";
       })) {
    EXPECT_EQ(said.substr(0, 2), "1:") << said;
    EXPECT_NE(said.find("a save"), std::string::npos) << said;
    EXPECT_NE(said.find("an evaluation"), std::string::npos) << said;
  }
}

}  // namespace
}  // namespace kinoe
