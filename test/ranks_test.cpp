// What ranks find out about their machine.
#include "trainer/ranks.h"

#include <gtest/gtest.h>

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
