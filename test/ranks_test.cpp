// What ranks find out about their machine.
#include "trainer/ranks.h"

#include <gtest/gtest.h>

#include <thread>

#include "test/local_channel.h"

namespace kinoe {
namespace {

TEST(Ranks, Row28SlowLinksAreSaidWithWhatWasMeasured) {
  EXPECT_EQ(link_warning(320, 1), "");
  EXPECT_EQ(link_warning(45, 3), "");
  EXPECT_EQ(link_warning(0, 3), "") << "nothing was measured";
  const std::string tcp = link_warning(1.4, 3);
  EXPECT_NE(tcp.find("only 1.4 GB/s"), std::string::npos) << tcp;
  EXPECT_NE(tcp.find("TCP"), std::string::npos) << tcp;
  EXPECT_NE(link_warning(4, 1).find("NVLink"), std::string::npos);
}

TEST(Ranks, OneRankMeasuresNothing) { EXPECT_EQ(measure_links({}, *collectives_self()), 0); }

/// Two hosts of two ranks each.
Place place_of(int rank) { return {rank, 4, rank % 2, rank < 2 ? "n1" : "n2", "Slurm", 2}; }

/// What each of four ranks returns, or the error that it throws.
std::vector<std::string> on_four_ranks(const std::function<std::string(Channel&, const Place&)>& work) {
  const std::vector<std::unique_ptr<Channel>> channels = make_local_channels(4);
  std::vector<std::string> said(4);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank)
    threads.emplace_back([&, rank] {
      const auto at = static_cast<size_t>(rank);
      try {
        said[at] = work(*channels[at], place_of(rank));
      } catch (const Error& error) {
        said[at] = cat(static_cast<int>(error.code), ": ", error.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
  return said;
}

TEST(Ranks, OtherWeightsUnderTheSameNameAreSaidOnEveryRank) {
  const auto compare = [](int other, size_t element) {
    return on_four_ranks([=](Channel& channel, const Place& place) {
      std::vector<float> weights(1000, 0.5F);
      if (place.rank == other) weights[element] = 0.25F;
      compare_weights(channel, place, "models/start", weights);
      return std::string("same");
    });
  };
  EXPECT_EQ(compare(-1, 0), std::vector<std::string>(4, "same"));
  for (const std::string& text : compare(2, 999))
    EXPECT_EQ(text.find("4: models/start holds other weights for rank 2 (n2) than for rank 0 (n1)"), 0U)
        << text;
}

TEST(Ranks, AlgorithmsTravelAsText) {
  const std::vector<GemmChoice> choices = {{"a 1x2", "00ff", 1.5, 700}, {"b 3x4", "", 0, 0}};
  const std::vector<GemmChoice> back = gemm_choices_from_text(to_text(choices));
  ASSERT_EQ(back.size(), 2U);
  EXPECT_EQ(back[0].shape, "a 1x2");
  EXPECT_EQ(back[0].algorithm, "00ff");
  EXPECT_EQ(back[0].us, 1.5);
  EXPECT_EQ(back[1].shape, "b 3x4");
}

}  // namespace
}  // namespace kinoe
