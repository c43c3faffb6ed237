// Datasets and the loader: which tokens come when, how often, and what goes wrong in words.
#include "dataloader/loader.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <thread>

#include "dataloader/file_kind.h"
#include "kernels/common/check.h"

namespace kinoe {
namespace {

namespace fs = std::filesystem;

class LoaderTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = testing::TempDir() + "kinoe_loader_" +
           testing::UnitTest::GetInstance()->current_test_info()->name() + "_" + std::to_string(::getpid());
    fs::remove_all(dir_);
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  // A uint32 shard with the tokens first, first + 1, ...
  std::string counting(const std::string& name, uint32_t first, size_t tokens) const {
    std::vector<uint32_t> words(256 + tokens);
    words[0] = static_cast<uint32_t>(kLlmcMagicUint32);
    words[1] = static_cast<uint32_t>(kLlmcVersionUint32);
    words[2] = static_cast<uint32_t>(tokens);
    std::iota(words.begin() + 256, words.end(), first);
    const std::string path = dir_ + "/" + name;
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(words.data()), static_cast<std::streamsize>(words.size() * 4));
    return path;
  }
  std::string text(const std::string& name, const std::string& content) const {
    const std::string path = dir_ + "/" + name;
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }

  static Dataset open(const std::vector<std::string>& arguments, DatasetOptions options) {
    return Dataset::open(expand_data(arguments), options);
  }
  static DatasetOptions options(int64_t seq_len, bool shuffle = true) {
    DatasetOptions o;
    o.seq_len = seq_len;
    o.vocab_size = 1 << 20;
    o.seed = 5;
    o.shuffle = shuffle;
    return o;
  }

  static std::string error_of(const std::function<void()>& action, ExitCode code = ExitCode::data) {
    try {
      action();
    } catch (const Error& error) {
      EXPECT_EQ(static_cast<int>(error.code), static_cast<int>(code)) << error.what();
      return error.what();
    }
    ADD_FAILURE() << "no error";
    return "";
  }

  static std::vector<int32_t> first_tokens(const Dataset& data, int64_t from, int64_t to) {
    std::vector<int32_t> sample(static_cast<size_t>(data.seq_len()) + 1), result;
    for (int64_t i = from; i < to; ++i) {
      data.read(i, sample.data());
      for (size_t t = 0; t + 1 < sample.size(); ++t) EXPECT_EQ(sample[t + 1], sample[t] + 1);
      result.push_back(sample[0]);
    }
    return result;
  }
  static Memory buffers(int64_t rows, int64_t seq_len, bool document_mask = false) {
    return Memory::pinned(Backend::cpu, Loader::buffer_bytes(rows, seq_len, document_mask));
  }

  std::string dir_;
};

#define EXPECT_SAYS(message, part) EXPECT_NE((message).find(part), std::string::npos) << (message)

TEST_F(LoaderTest, EverySampleOnceAnEpoch) {
  // 25 tokens at seq_len 8: windows at 0, 8 and 16; 24 tokens: the last window lacks its target, so two.
  const Dataset data = open(
      {counting("a.bin", 1000, 25), counting("b.bin", 2000, 24), counting("c.bin", 3000, 9)}, options(8));
  EXPECT_EQ(data.samples(), 3 + 2 + 1);
  EXPECT_EQ(data.tokens(), 58);
  const std::multiset<int32_t> expected{1000, 1008, 1016, 2000, 2008, 3000};
  std::set<std::vector<int32_t>> orders;
  for (int64_t epoch = 0; epoch < 20; ++epoch) {
    const auto order = first_tokens(data, epoch * 6, epoch * 6 + 6);
    EXPECT_EQ(std::multiset<int32_t>(order.begin(), order.end()), expected);
    EXPECT_EQ(data.place(epoch * 6 + 5).epoch, epoch);
    orders.insert(order);
  }
  EXPECT_GT(orders.size(), 15U) << "every epoch has its own order";
  EXPECT_DOUBLE_EQ(data.epochs(9)[0], 1.5);
}

TEST_F(LoaderTest, OrderIsIndependentOfRanksAndStart) {
  const Dataset data = open({counting("a.bin", 0, 1001)}, options(10));
  const auto straight = first_tokens(data, 0, 240);
  for (const int64_t ranks : {1, 2, 3, 5, 7}) {
    std::vector<int32_t> merged(240);
    for (int64_t rank = 0; rank < ranks; ++rank)
      for (int64_t i = rank; i < 240; i += ranks)
        merged[static_cast<size_t>(i)] = first_tokens(data, i, i + 1)[0];
    EXPECT_EQ(merged, straight);
  }
  EXPECT_EQ(first_tokens(data, 130, 240), std::vector<int32_t>(straight.begin() + 130, straight.end()));
}

TEST_F(LoaderTest, ValidationIsInNaturalOrder) {
  const Dataset data = open({counting("b.bin", 100, 17), counting("a.bin", 200, 17)}, options(8, false));
  EXPECT_EQ(first_tokens(data, 0, 4), (std::vector<int32_t>{100, 108, 200, 208}));
  EXPECT_SAYS(error_of([&] { (void)data.place(4); }, ExitCode::internal), "sample 4 of 4");
  EXPECT_SAYS(
      error_of(
          [&] {
            open({counting("c.bin", 0, 17) + ":1", counting("d.bin", 0, 17) + ":2"}, options(8, false));
          },
          ExitCode::usage),
      "no mixture weights");
}

TEST_F(LoaderTest, MixturesKeepProportionsAndEpochs) {
  const Dataset data =
      open({counting("a.bin", 10000, 41) + ":0.75", counting("b.bin", 20000, 81) + ":0.25"}, options(8));
  ASSERT_EQ(data.samples(), 15);
  std::map<int32_t, int> visits;
  for (const int32_t first : first_tokens(data, 0, 400)) ++visits[first];
  int from_a = 0;
  for (const auto& [first, count] : visits) from_a += first < 20000 ? count : 0;
  EXPECT_EQ(from_a, 300);
  EXPECT_EQ(visits.size(), 15U);
  for (const auto& [first, count] : visits)
    EXPECT_EQ(count, first < 20000 ? 60 : 10) << "each source has its own epochs";
  EXPECT_DOUBLE_EQ(data.epochs(400)[0], 60);
  EXPECT_DOUBLE_EQ(data.epochs(400)[1], 10);
}

// 0.7 / 0.2 / 0.1 over 100,000 samples: shares, every sample of a source once per epoch, and an order that only the seed changes:
// not the batch size, not the number of ranks, not where one starts, not how a source is cut into files.
TEST_F(LoaderTest, AMixtureOfAHundredThousandSamples) {
  const auto tokens_of = [](int64_t samples) { return static_cast<size_t>(samples) * 4 + 1; };
  const std::string b = counting("b.bin", 400'000, tokens_of(11'000)),
                    c = counting("c.bin", 600'000, tokens_of(30'000));
  const std::vector<std::string> whole = {counting("a.bin", 0, tokens_of(90'000)) + ":0.7", b + ":0.2",
                                          c + ":0.1"};
  (void)counting("a_1.bin", 0, tokens_of(50'000));
  (void)counting("a_2.bin", 200'000, tokens_of(40'000));
  const std::vector<std::string> parts = {dir_ + "/a_?.bin:0.7", b + ":0.2", c + ":0.1"};
  static constexpr int64_t kSamples = 100'000;
  const Dataset data = open(whole, options(4));
  const auto order_of = [](const Dataset& dataset, int64_t batch, int64_t ranks) {
    std::vector<int32_t> order(kSamples), sample(5);
    for (int64_t rank = 0; rank < ranks; ++rank)
      for (int64_t first = rank * batch; first < kSamples; first += ranks * batch)
        for (int64_t i = first; i < std::min(first + batch, kSamples); ++i) {
          dataset.read(i, sample.data());
          order[static_cast<size_t>(i)] = sample[0];
        }
    return order;
  };
  const auto order = order_of(data, 1, 1);
  std::map<int32_t, int> visits;
  int64_t received[3] = {};
  for (const int32_t first : order) {
    ++visits[first];
    ++received[first < 400'000 ? 0 : first < 600'000 ? 1 : 2];
  }
  const double shares[3] = {0.7, 0.2, 0.1};
  for (size_t s = 0; s < 3; ++s) EXPECT_NEAR(static_cast<double>(received[s]) / kSamples, shares[s], 1e-3);
  for (const auto& [first, count] : visits)
    ASSERT_LE(count, first < 400'000   ? 1
                     : first < 600'000 ? 2
                                       : 1)
        << "20,000 samples of 11,000 are two epochs";
  EXPECT_EQ(order, order_of(data, 7, 3));
  EXPECT_EQ(order, order_of(data, 64, 8));
  EXPECT_EQ(order, order_of(open(parts, options(4)), 1, 1)) << "cut into files";
  DatasetOptions other = options(4);
  other.seed = 6;
  const auto reseeded = order_of(open(whole, other), 1, 1);
  EXPECT_NE(order, reseeded);
  int64_t same_source = 0;
  for (size_t i = 0; i < order.size(); ++i) same_source += (order[i] < 400'000) == (reseeded[i] < 400'000);
  EXPECT_EQ(same_source, kSamples)
      << "the seed orders the samples within a source, weights alone deal sources";
}

TEST_F(LoaderTest, ShortShardsAreSkippedAndCounted) {  // row 7
  const std::vector<std::string> files = {counting("a.bin", 0, 100), counting("b.bin", 0, 8),
                                          counting("c.bin", 0, 1)};
  const Dataset data = open(files, options(8));
  EXPECT_EQ(data.samples(), 12);
  ASSERT_EQ(data.warnings().size(), 1U);
  EXPECT_SAYS(data.warnings()[0], "skipped 2 of 3 files (9 tokens)");
  EXPECT_SAYS(data.warnings()[0], "b.bin");
  EXPECT_EQ(data.state().sources[0].files[1].samples, 0);
  EXPECT_EQ(data.state().sources[0].tokens, 109);
  EXPECT_SAYS(error_of([&] { open({files[1], files[2]}, options(8)); }), "no file of at least 9 tokens");
}

TEST_F(LoaderTest, ShorterThanOneGlobalBatch) {  // row 8
  DatasetOptions o = options(8);
  o.min_samples = 13;
  const std::string file = counting("a.bin", 0, 104);  // 12 windows: 105 tokens are needed for 13
  EXPECT_SAYS(error_of([&] { open({file}, o); }), "at least 105 tokens are needed");
  EXPECT_SAYS(error_of([&] { open({file}, o); }), "found 104 tokens");
  EXPECT_EQ(open({counting("b.bin", 0, 105)}, o).samples(), 13);
}

TEST_F(LoaderTest, TextAndTokenShardsDoNotMix) {
  const std::string a = text("a.txt", std::string(100, 'x')), b = counting("b.bin", 0, 100);
  EXPECT_SAYS(error_of([&] { open({a, b}, options(8)); }), "its tokens are bytes");
  EXPECT_TRUE(open({a}, options(8)).byte_tokens());
  EXPECT_FALSE(open({b}, options(8)).byte_tokens());
  DatasetOptions small = options(8);
  small.vocab_size = 100;
  EXPECT_SAYS(error_of([&] { open({a}, small); }), "token id 120");
}

TEST_F(LoaderTest, BatchHasInputsTargetsAndPadding) {
  const Dataset data = open({counting("a.bin", 0, 1000)}, options(5, false));
  Loader loader(data, 3, buffers(3, 5));
  const Batch& batch = loader.fetch(7, 2);
  EXPECT_EQ(batch.rows, 3);
  EXPECT_EQ(batch.seq_len, 5);
  EXPECT_EQ(batch.valid_rows, 2);
  EXPECT_EQ(batch.target_tokens, 10);
  for (int row = 0; row < 3; ++row)
    for (int t = 0; t < 5; ++t) {
      const int i = row * 5 + t;
      EXPECT_EQ(batch.tokens[i], row < 2 ? (7 + row) * 5 + t : 0);
      EXPECT_EQ(batch.targets[i], row < 2 ? (7 + row) * 5 + t + 1 : -1);
    }
  EXPECT_GE(loader.data_wait_ms(), 0);
}

TEST_F(LoaderTest, BatchWithoutAnyTarget) {  // row 14
  const Dataset data = open({counting("a.bin", 0, 1000)}, options(5));
  Loader loader(data, 2, buffers(2, 5));
  (void)loader.fetch(0, 2);  // so that what is asserted below was not zero by chance
  const Batch& batch = loader.fetch(2, 0);
  EXPECT_EQ(batch.target_tokens, 0);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(batch.tokens[i] == 0 && batch.targets[i] == -1);
}

TEST_F(LoaderTest, ValidationShorterThanOneBatch) {  // row 16: what there is fits a batch with padding
  const Dataset data = open({counting("a.bin", 0, 12)}, options(5, false));
  ASSERT_EQ(data.samples(), 2);
  Loader loader(data, 8, buffers(8, 5));
  EXPECT_EQ(loader.fetch(0, data.samples()).target_tokens, 10);
}

TEST_F(LoaderTest, PrefetchGivesTheSameBatchesAndHoldsThem) {
  const Dataset data = open({counting("a.bin", 0, 5001)}, options(5));
  const int64_t rows = 4;
  Loader loader(data, rows, buffers(rows, 5));
  std::vector<const Batch*> held;
  std::vector<std::vector<int32_t>> expected;
  int64_t announced = 0;
  for (int64_t step = 0; step < 200; ++step) {
    while (announced < 200 && loader.prefetch(announced * 4, announced % 5 == 4 ? 3 : 4)) ++announced;
    // While the thread fills what was announced, the last kHeld batches are still what they were.
    if (step % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (size_t back = 1; back <= std::min<size_t>(held.size(), Loader::kHeld); ++back) {
      const size_t k = held.size() - back;
      ASSERT_EQ(std::vector<int32_t>(held[k]->tokens, held[k]->tokens + 20), expected[k])
          << "step " << step << ", " << back << " back";
    }
    const Batch& batch = loader.fetch(step * 4, step % 5 == 4 ? 3 : 4);
    ASSERT_EQ(batch.first_sample, step * 4);
    std::vector<int32_t> tokens(20);
    for (int64_t row = 0; row < batch.valid_rows; ++row) {
      std::vector<int32_t> sample(6);
      data.read(step * 4 + row, sample.data());
      std::copy_n(sample.begin(), 5, tokens.begin() + row * 5);
    }
    held.push_back(&batch);
    expected.push_back(tokens);
  }
}

TEST_F(LoaderTest, UnexpectedFetchDropsWhatWasPrefetched) {
  const Dataset data = open({counting("a.bin", 0, 5001)}, options(5, false));
  Loader loader(data, 4, buffers(4, 5));
  EXPECT_TRUE(loader.prefetch(0, 4));
  EXPECT_TRUE(loader.prefetch(4, 4));
  EXPECT_FALSE(loader.prefetch(8, 4)) << "the queue is full";
  EXPECT_EQ(loader.fetch(100, 4).tokens[0], 500);
  EXPECT_EQ(loader.fetch(0, 4).tokens[0], 0);
  EXPECT_TRUE(loader.prefetch(8, 4));
  EXPECT_EQ(loader.fetch(8, 3).targets[15], -1) << "the same first sample with fewer rows is another batch";
}

TEST_F(LoaderTest,
       ErrorsOfTheThreadSurfaceInFetch) {  // row 5: a bad id that the start-up scan did not look at
  std::string content(int64_t{3} << 26, 'a');
  content[100'000'005] = 'z';
  DatasetOptions o = options(10, false);
  o.vocab_size = 'z';
  const Dataset data = open({text("a.txt", content)}, o);
  Loader loader(data, 2, buffers(2, 10));
  loader.prefetch(0, 2);
  loader.prefetch(10'000'000, 2);
  EXPECT_EQ(loader.fetch(0, 2).tokens[0], 'a');
  const std::string message = error_of([&] { (void)loader.fetch(10'000'000, 2); });
  EXPECT_SAYS(message, "token id 122 at token 100000005");
  EXPECT_EQ(loader.fetch(2, 2).tokens[0], 'a') << "the loader lives on";
}

TEST_F(LoaderTest, NineGibibytes) {  // row 9: over 2^31 tokens and 2^33 bytes
  const int64_t tokens = (int64_t{9} << 28) + 1;
  const std::string path = counting("huge.bin", 1, 2000);
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    const auto count = static_cast<uint32_t>(tokens);
    file.seekp(8);
    file.write(reinterpret_cast<const char*>(&count), 4);
  }
  if (::truncate(path.c_str(), 1024 + 4 * tokens) != 0)
    GTEST_SKIP() << "the file system refuses a sparse file of 9 GiB";
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(1024 + 4 * (tokens - 1));
    const uint32_t last = 77;
    file.write(reinterpret_cast<const char*>(&last), 4);
  }
  const Dataset data = open({path}, options(1024, false));
  ASSERT_EQ(data.samples(), int64_t{9} << 18);
  Loader loader(data, 2, buffers(2, 1024));
  EXPECT_EQ(loader.fetch(0, 1).tokens[1023], 1024);
  EXPECT_EQ(loader.fetch(data.samples() - 1, 1).targets[1023], 77);
}

TEST_F(LoaderTest, StoriesAreADataset) {
  DatasetOptions o = options(64);
  o.vocab_size = 256;
  const Dataset data = Dataset::stories(StorySplit::training, 10000, o);
  EXPECT_TRUE(data.byte_tokens());
  EXPECT_GE(data.tokens(), 10000);
  Loader loader(data, 2, buffers(2, 64));
  const Batch& batch = loader.fetch(0, 2);
  const std::string all = stories_text(StorySplit::training, 10000);
  std::string row;
  for (int t = 0; t < 64; ++t) row += static_cast<char>(batch.tokens[t]);
  EXPECT_NE(all.find(row), std::string::npos);
}

TEST_F(LoaderTest, StateNamesWhatWasOpened) {
  const std::string a = counting("a.bin", 0, 100);
  const Dataset data = open({a + ":2"}, options(9));
  const DataState& state = data.state();
  EXPECT_EQ(state.seed, 5U);
  EXPECT_EQ(state.seq_len, 9);
  ASSERT_EQ(state.sources.size(), 1U);
  EXPECT_EQ(state.sources[0].name, a);
  EXPECT_EQ(state.sources[0].weight, 2);
  ASSERT_EQ(state.sources[0].files.size(), 1U);
  EXPECT_EQ(state.sources[0].files[0].format, "llm.c uint32");
  EXPECT_EQ(state.sources[0].files[0].bytes, 1424);
  EXPECT_EQ(state.sources[0].files[0].tokens, 100);
  EXPECT_EQ(state.sources[0].files[0].samples, 11);
}

}  // namespace
}  // namespace kinoe
