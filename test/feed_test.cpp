// What a feed says while it feeds.
#include "trainer/feed.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <string>

#include "dataloader/dataset.h"

namespace kinoe {
namespace {

TEST(Feed, EveryMicroBatchIsASignOfLife) {
  const std::string path = testing::TempDir() + "feed_" + std::to_string(getpid()) + ".txt";
  std::ofstream(path) << std::string(100, 'x');
  DatasetOptions options;
  options.seq_len = 4;
  options.vocab_size = 257;
  const Dataset dataset = Dataset::open(expand_data({path}), options);
  const auto device = Device::cpu();
  int signs = 0;
  Feed feed(device->context(), dataset, 2, [&signs] { ++signs; });
  std::array<int32_t, 8> tokens{}, targets{};
  const DeviceBatch batch{
      Tensor(tokens.data(), DType::i32, {2, 4}), Tensor(targets.data(), DType::i32, {2, 4}), {}, {}};
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(signs, i);
    feed.put(batch, 2 * i, 2);
  }
  EXPECT_EQ(signs, 5);
  unlink(path.c_str());
}

}  // namespace
}  // namespace kinoe
