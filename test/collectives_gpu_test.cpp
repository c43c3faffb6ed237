// Collectives between GPUs: the tests named CollectivesGpuRank run inside processes that CollectivesGpu.* starts, one per
// GPU; two of them where there are two GPUs, and one by itself, for which NCCL does the same with less company.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <sstream>
#include <thread>

#include "test/collectives_values.h"
#include "test/program.h"
#include "trainer/collectives.h"

namespace kinoe {
namespace {

constexpr const char* kInside = "KINOE_TEST_INSIDE_NCCL";  // directory, rank, ranks

/// A vector in GPU memory.
template <class T>
class OnGpu {
 public:
  OnGpu(const Context& ctx, const std::vector<T>& values)
      : ctx_(ctx),
        memory_(Memory::on(Backend::cuda, std::max<size_t>(values.size() * sizeof(T), 1))),
        size_(values.size()) {
    set(values);
  }
  void set(const std::vector<T>& values) { upload(ctx_, memory_.data(), values.data(), size_ * sizeof(T)); }
  [[nodiscard]] std::vector<T> get() const {
    std::vector<T> values(size_);
    download(ctx_, values.data(), memory_.data(), size_ * sizeof(T));
    synchronize(ctx_);
    return values;
  }
  [[nodiscard]] Tensor tensor() const { return {memory_.data(), dtype_of<T>, {static_cast<int64_t>(size_)}}; }

 private:
  Context ctx_;
  Memory memory_;
  size_t size_;
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

class CollectivesGpuRank : public testing::Test {
 protected:
  void SetUp() override {
    const char* inside = std::getenv(kInside);
    if (inside == nullptr) GTEST_SKIP() << "runs one per GPU, started by the tests of CollectivesGpu";
    std::istringstream(inside) >> directory >> rank >> ranks;
    device = Device::gpu(rank);
    ctx = device->context();
    comm = collectives_nccl(ctx, rank, ranks, exchange());
  }
  void TearDown() override {
    if (device) synchronize(ctx);
    comm.reset();
  }

  /// Rank 0's text on all ranks, through a file of the test's own.
  [[nodiscard]] std::function<std::string(const std::string&)> exchange() const {
    const std::string file = directory + "/" + testing::UnitTest::GetInstance()->current_test_info()->name();
    return [file, this](const std::string& text) {
      if (rank == 0) {
        std::ofstream(file + ".new") << text;
        std::filesystem::rename(file + ".new", file);
      }
      for (int i = 0; !std::filesystem::exists(file) && i < 6000; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      std::string common;
      std::ifstream(file) >> common;
      return common;
    };
  }

  template <class T>
  void expect_known_sums(int64_t n) {
    SCOPED_TRACE(cat(name_of(dtype_of<T>), ", ", n, " elements, rank ", rank));
    const OnGpu<T> reduced(ctx, known_values<T>(rank, n)), all(ctx, known_values<T>(rank, n * ranks));
    const OnGpu<T> mine(ctx, std::vector<T>(static_cast<size_t>(n), 77)),
        given(ctx, known_values<T>(rank, n));
    const OnGpu<T> gathered(ctx, std::vector<T>(static_cast<size_t>(n * ranks), 77));
    comm->follow(ctx);
    comm->all_reduce(reduced.tensor());
    comm->reduce_scatter(mine.tensor(), all.tensor());
    comm->all_gather(gathered.tensor(), given.tensor());
    comm->await(ctx, comm->mark());
    const auto sums = reduced.get(), part = mine.get(), whole = gathered.get();
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(sums[static_cast<size_t>(i)], known_sum<T>(ranks, i)) << i;
      ASSERT_EQ(part[static_cast<size_t>(i)], known_sum<T>(ranks, rank * n + i)) << i;
    }
    for (int r = 0; r < ranks; ++r)
      for (int64_t i = 0; i < n; ++i)
        ASSERT_EQ(whole[static_cast<size_t>(r * n + i)], static_cast<T>(known(r, i))) << r << " " << i;
    EXPECT_TRUE(same_bits(all.get(), known_values<T>(rank, n * ranks)));
  }

  std::unique_ptr<Device> device;
  std::unique_ptr<Collectives> comm;
  Context ctx;
  std::string directory;
  int rank = 0, ranks = 0;
};

TEST_F(CollectivesGpuRank, KnownSums) {
  for (const int64_t n : {0, 1, 1009, (1 << 20) + 3}) {
    expect_known_sums<float>(n);
    expect_known_sums<double>(n);
    expect_known_sums<int64_t>(n);
    expect_known_sums<uint64_t>(n);
  }
}

TEST_F(CollectivesGpuRank, Bf16IsGathered) {
  std::vector<bf16> halves(10007);
  for (size_t i = 0; i < halves.size(); ++i)
    halves[i].bits = static_cast<uint16_t>(i * 61 + static_cast<size_t>(rank));
  const OnGpu<bf16> mine(ctx, halves),
      all(ctx, std::vector<bf16>(halves.size() * static_cast<size_t>(ranks)));
  comm->follow(ctx);
  comm->all_gather(all.tensor(), mine.tensor());
  comm->await(ctx, comm->mark());
  const auto got = all.get();
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_EQ(got[i].bits, static_cast<uint16_t>(i % 10007 * 61 + i / 10007)) << i;
}

// From a size that NCCL sends in one go to one that it cuts into many.
TEST_F(CollectivesGpuRank, SameBitsOnAllRanksAndEveryTime) {
  for (const int64_t n : {int64_t{97}, int64_t{50021}, int64_t{1} << 22}) {
    SCOPED_TRACE(n);
    const auto start = random_values<float>(static_cast<uint64_t>(rank), n);
    OnGpu<float> sum(ctx, start);
    const OnGpu<float> part(ctx, std::vector<float>(static_cast<size_t>(n / ranks)));
    const OnGpu<float> everyones(ctx, std::vector<float>(static_cast<size_t>(n * ranks)));
    std::vector<float> first_sum, first_part;
    for (int repetition = 0; repetition < 20; ++repetition) {
      sum.set(start);
      comm->follow(ctx);
      comm->reduce_scatter(part.tensor(), sum.tensor());
      comm->all_reduce(sum.tensor());
      comm->all_gather(everyones.tensor(), sum.tensor());
      comm->await(ctx, comm->mark());
      const auto now_sum = sum.get(), now_part = part.get();
      if (repetition == 0) {
        first_sum = now_sum;
        first_part = now_part;
        const auto all = everyones.get();
        for (int r = 0; r < ranks; ++r)
          ASSERT_EQ(std::memcmp(all.data() + static_cast<size_t>(r * n), now_sum.data(), now_sum.size() * 4),
                    0)
              << r;
      }
      ASSERT_TRUE(same_bits(now_sum, first_sum)) << repetition;
      ASSERT_TRUE(same_bits(now_part, first_part)) << repetition;
    }
  }
}

// Nothing here waits on the host until the end: only follow() and await() keep the copies on the compute stream and the
// sums on NCCL's apart. 2^24 elements take long enough for every missing order to be seen.
TEST_F(CollectivesGpuRank, StreamsFollowAndAwaitEachOther) {
  const int64_t n = int64_t{1} << 24;
  const OnGpu<int64_t> source(ctx, std::vector<int64_t>(static_cast<size_t>(n), rank + 1));
  const OnGpu<int64_t> buffer(ctx, std::vector<int64_t>(static_cast<size_t>(n), -5));
  const OnGpu<int64_t> result(ctx, std::vector<int64_t>(static_cast<size_t>(n), -7));
  std::vector<Collectives::Mark> marks;
  for (int round = 0; round < 5; ++round) {
    copy(ctx, buffer.tensor().data, source.tensor().data, source.tensor().bytes());
    comm->follow(ctx);
    comm->all_reduce(buffer.tensor());
    marks.push_back(comm->mark());
    comm->poke();
    comm->await(ctx, marks.back());
    copy(ctx, result.tensor().data, buffer.tensor().data, buffer.tensor().bytes());
    fill_zero(ctx, buffer.tensor().data, buffer.tensor().bytes());
  }
  EXPECT_EQ(result.get(), std::vector<int64_t>(static_cast<size_t>(n), int64_t{ranks} * (ranks + 1) / 2));
  for (const auto mark : marks) comm->await(Context{}, mark);
}

// More marks than are kept: the oldest is served by a later one.
TEST_F(CollectivesGpuRank, OldMarksCanStillBeAwaited) {
  const OnGpu<float> x(ctx, {1.0F});
  comm->follow(ctx);
  std::vector<Collectives::Mark> marks;
  for (int i = 0; i < 1000; ++i) {
    comm->all_gather(x.tensor().slice(0, 0), x.tensor().slice(0, 0));
    if (i % 10 == 0) comm->all_reduce(x.tensor());
    marks.push_back(comm->mark());
  }
  EXPECT_EQ(comm->mark(), marks.back());
  for (const auto mark : marks) comm->await(ctx, mark);
  EXPECT_EQ(x.get()[0], std::pow(static_cast<float>(ranks), 100.0F));
  EXPECT_THROW(comm->await(ctx, marks.back() + 1), Error);
}

TEST_F(CollectivesGpuRank, AMissingRankIsNoticedInTime) {
  Collectives::Options options;
  options.init_timeout_s = 3;
  const auto begin = std::chrono::steady_clock::now();
  try {
    // Every rank takes itself for the first of two, with an id of its own: the second never comes.
    collectives_nccl(
        ctx, 0, 2, [](const std::string& id) { return id; }, options);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ExitCode::rank_lost) << error.what();
    EXPECT_NE(std::string(error.what()).find("a rank is missing"), std::string::npos) << error.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

class CollectivesGpu : public testing::TestWithParam<int> {};

TEST_P(CollectivesGpu, EveryRankPasses) {
  const int ranks = GetParam();
  if (gpu_count() < ranks) GTEST_SKIP() << "fewer than " << ranks << " GPUs";
  const std::string directory = testing::TempDir() + cat("nccl_", getpid(), "_", ranks);
  std::filesystem::remove_all(directory);
  std::filesystem::create_directories(directory);
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  std::string command = "code=0; pids=''";
  for (int rank = 0; rank < ranks; ++rank)
    command +=
        cat("; env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX -u GTEST_SHARD_STATUS_FILE GTEST_COLOR=no ",
            kInside, "=", quoted(cat(directory, " ", rank, " ", ranks)), " timeout --kill-after=5 300 ",
            quoted(self), " '--gtest_filter=CollectivesGpuRank.*' >", quoted(cat(directory, "/log", rank)),
            " 2>&1 & pids=\"$pids $!\"");
  command +=
      "; for pid in $pids; do wait $pid || code=1; done; cat " + quoted(directory) + "/log*; exit $code";
  const Outcome outcome = run_shell(command);
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  const std::string passed = "[  PASSED  ] 6 tests.";
  int seen = 0;
  for (size_t at = 0; (at = outcome.output.find(passed, at)) != std::string::npos; at += passed.size())
    ++seen;
  EXPECT_EQ(seen, ranks) << outcome.output;
  std::filesystem::remove_all(directory);
}

INSTANTIATE_TEST_SUITE_P(Gpus, CollectivesGpu, testing::Values(1, 2), testing::PrintToStringParamName());

}  // namespace
}  // namespace kinoe
