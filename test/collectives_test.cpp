// Collectives of one rank, and over MPI: the tests named CollectivesRank run inside processes that the test
// Collectives.* starts under mpirun, every rank checking all of its results by itself.
//
// Sums are of two kinds: of small integers, whose sum is exact in any order and therefore known, and of random floats,
// which must come out with the same bits on all ranks and in every repetition.
#include "trainer/collectives.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "test/collectives_values.h"
#include "test/mpi_program.h"
#include "test/mpi_session.h"

namespace kinoe {
namespace {

const Context kCpu;
constexpr const char* kInside = "KINOE_TEST_INSIDE_MPI";

// ---- one rank ---------------------------------------------------------------------------------------------------

TEST(Collectives, OfOneRankCopy) {
  const auto self = collectives_self();
  EXPECT_EQ(self->rank(), 0);
  EXPECT_EQ(self->ranks(), 1);
  auto values = random_values<float>(1, 1009);
  const auto original = values;
  std::vector<float> part(1009), whole(1009);
  self->follow(kCpu);
  self->all_reduce(view(values));
  self->reduce_scatter(view(part), view(values));
  self->all_gather(view(whole), view(part));
  self->poke();
  self->await(kCpu, self->mark());
  EXPECT_EQ(values, original);
  EXPECT_EQ(part, original);
  EXPECT_EQ(whole, original);
  EXPECT_EQ(self->traffic().calls, 3);
  EXPECT_EQ(self->traffic().bytes, 0);
}

TEST(Collectives, CallsAreNumberedAndAnnounced) {
  std::vector<std::string> seen;
  Collectives::Options options;
  options.reached = [&](const char* what, int64_t number) { seen.push_back(cat(number, " ", what)); };
  const auto self = collectives_self(options);
  std::vector<double> a(3), b(3), empty;
  self->all_reduce(view(a));
  self->reduce_scatter(view(b), view(a));
  self->all_gather(view(empty), view(empty));
  EXPECT_EQ(seen, (std::vector<std::string>{"1 all-reduce", "2 reduce-scatter", "3 all-gather"}));
  EXPECT_EQ(self->mark(), 3);
}

TEST(Collectives, MisuseIsABug) {
  const auto self = collectives_self();
  std::vector<bf16> halves(4);
  std::vector<float> floats(4), more(8);
  EXPECT_THROW(self->all_reduce(view(halves)), Error);
  EXPECT_THROW(self->all_gather(view(floats), view(halves)), Error);
  EXPECT_THROW(self->all_gather(view(floats), view(more)), Error);
  EXPECT_THROW(self->reduce_scatter(view(floats), view(floats)), Error);
  EXPECT_THROW(self->await(kCpu, 1), Error);
  EXPECT_EQ(self->traffic().calls, 0);
  EXPECT_NO_THROW(self->all_gather(view(more).slice(4, 4), view(more).slice(0, 4)));
}

TEST(Collectives, WithoutMpiSayHowToGetIt) {
  if (built_with_mpi()) GTEST_SKIP() << "this build has MPI";
  try {
    collectives_mpi();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ExitCode::rank_lost);
    EXPECT_NE(std::string(error.what()).find("scripts/setup.sh"), std::string::npos) << error.what();
  }
}

TEST(Collectives, WithoutNcclSayHowToGetIt) {
  try {
    collectives_nccl(kCpu, 0, 1, [](const std::string& text) { return text; });
    FAIL() << "no error";
  } catch (const Error& error) {
    if (error.code == ExitCode::internal) GTEST_SKIP() << "this build has NCCL";
    EXPECT_EQ(error.code, ExitCode::rank_lost);
    EXPECT_NE(std::string(error.what()).find("libnccl-dev"), std::string::npos) << error.what();
  }
}

// ---- inside mpirun ----------------------------------------------------------------------------------------------

class CollectivesRank : public testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv(kInside) == nullptr)
      GTEST_SKIP() << "runs inside mpirun, started by the tests of Collectives";
    start_mpi();
    comm = make();
    rank = comm->rank();
    ranks = comm->ranks();
  }
  static std::unique_ptr<Collectives> make(int64_t piece = Collectives::Options{}.piece_elements) {
    Collectives::Options options;
    options.piece_elements = piece;
    return collectives_mpi(options);
  }
  void finish() const { comm->await(kCpu, comm->mark()); }

  template <class T>
  void expect_known_sums(int64_t n) {
    SCOPED_TRACE(cat(name_of(dtype_of<T>), ", ", n, " elements, rank ", rank));
    auto reduced = known_values<T>(rank, n);
    auto all = known_values<T>(rank, n * ranks);
    const auto all_before = all;
    std::vector<T> mine(static_cast<size_t>(n), static_cast<T>(77)), gathered(static_cast<size_t>(n * ranks));
    auto given = known_values<T>(rank, n);
    comm->all_reduce(view(reduced));
    comm->reduce_scatter(view(mine), view(all));
    comm->all_gather(view(gathered), view(given));
    finish();
    EXPECT_EQ(all, all_before);
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(reduced[static_cast<size_t>(i)], known_sum<T>(ranks, i)) << i;
      ASSERT_EQ(mine[static_cast<size_t>(i)], known_sum<T>(ranks, rank * n + i)) << i;
    }
    for (int r = 0; r < ranks; ++r)
      for (int64_t i = 0; i < n; ++i)
        ASSERT_EQ(gathered[static_cast<size_t>(r * n + i)], static_cast<T>(known(r, i))) << r << " " << i;
  }

  /// `values` are the same bits on all ranks.
  template <class T>
  void expect_same_everywhere(std::vector<T>& values) {
    std::vector<T> everyones(values.size() * static_cast<size_t>(ranks));
    comm->all_gather(view(everyones), view(values));
    finish();
    for (int r = 0; r < ranks; ++r)
      ASSERT_EQ(std::memcmp(everyones.data() + static_cast<size_t>(r) * values.size(), values.data(),
                            values.size() * sizeof(T)),
                0)
          << "ranks " << rank << " and " << r;
  }

  template <class T>
  void expect_reproducible(int64_t n) {
    SCOPED_TRACE(cat(name_of(dtype_of<T>), ", ", n, " elements, rank ", rank));
    const auto start = random_values<T>(static_cast<uint64_t>(rank), n);
    auto all = random_values<T>(static_cast<uint64_t>(rank) + 1000, n * ranks);
    std::vector<T> first_sum, first_part;
    for (int repetition = 0; repetition < 2; ++repetition) {
      auto sum = start;
      std::vector<T> part(static_cast<size_t>(n));
      comm->all_reduce(view(sum));
      comm->reduce_scatter(view(part), view(all));
      finish();
      expect_same_everywhere(sum);
      if (repetition == 0) {
        first_sum = sum;
        first_part = part;
        check_near(sum, part, n);
      }
      ASSERT_EQ(std::memcmp(sum.data(), first_sum.data(), sum.size() * sizeof(T)), 0) << repetition;
      ASSERT_EQ(std::memcmp(part.data(), first_part.data(), part.size() * sizeof(T)), 0) << repetition;
    }
  }

  /// Within the rounding of any order of additions.
  template <class T>
  void check_near(const std::vector<T>& sum, const std::vector<T>& part, int64_t n) {
    std::vector<std::vector<T>> summed, scattered;
    for (int r = 0; r < ranks; ++r) {
      summed.push_back(random_values<T>(static_cast<uint64_t>(r), n));
      scattered.push_back(random_values<T>(static_cast<uint64_t>(r) + 1000, n * ranks));
    }
    const auto expect = [&](const std::vector<std::vector<T>>& from, size_t at, T got) {
      long double exact = 0, size = 0;
      for (const auto& v : from) {
        exact += v[at];
        size += std::abs(static_cast<long double>(v[at]));
      }
      ASSERT_NEAR(static_cast<double>(got), static_cast<double>(exact),
                  static_cast<double>(size * ranks * std::numeric_limits<T>::epsilon()))
          << at;
    };
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
      expect(summed, i, sum[i]);
      expect(scattered, static_cast<size_t>(rank * n) + i, part[i]);
    }
  }

  std::unique_ptr<Collectives> comm;
  int rank = 0, ranks = 0;
};

TEST_F(CollectivesRank, KnownSums) {
  for (const int64_t n : {0, 1, 1009, 30011}) {
    expect_known_sums<float>(n);
    expect_known_sums<double>(n);
    expect_known_sums<int64_t>(n);
    expect_known_sums<uint64_t>(n);
  }
}

// 97 and 1009 divide nothing: every piece begins and ends somewhere odd. A piece of one element is smaller than the ranks.
TEST_F(CollectivesRank, InPieces) {
  for (const auto& [piece, n] : {std::pair<int64_t, int64_t>{1, 3}, {97, 101}, {1009, 2003}}) {
    comm = make(piece);
    expect_known_sums<float>(n);
    expect_known_sums<int64_t>(n + 1);
    expect_reproducible<float>(n);
  }
}

TEST_F(CollectivesRank, IntegersWrap) {
  std::vector<int64_t> i(5, INT64_MAX - rank);
  std::vector<uint64_t> u(5, UINT64_MAX - static_cast<uint64_t>(rank));
  comm->all_reduce(view(i));
  comm->all_reduce(view(u));
  finish();
  uint64_t expected_i = 0, expected_u = 0;
  for (int r = 0; r < ranks; ++r) {
    expected_i += static_cast<uint64_t>(INT64_MAX - r);
    expected_u += UINT64_MAX - static_cast<uint64_t>(r);
  }
  EXPECT_EQ(i, std::vector<int64_t>(5, static_cast<int64_t>(expected_i)));
  EXPECT_EQ(u, std::vector<uint64_t>(5, expected_u));
}

TEST_F(CollectivesRank, AnyTypeIsGathered) {
  for (const int64_t piece : {int64_t{97}, Collectives::Options{}.piece_elements}) {
    comm = make(piece);
    std::vector<bf16> halves(1009), all_halves(1009 * static_cast<size_t>(ranks));
    std::vector<int32_t> words(1009, rank), all_words(1009 * static_cast<size_t>(ranks));
    for (size_t i = 0; i < halves.size(); ++i)
      halves[i].bits = static_cast<uint16_t>(i * 61 + static_cast<size_t>(rank));
    comm->all_gather(view(all_halves), view(halves));
    comm->all_gather(view(all_words), view(words));
    finish();
    for (size_t i = 0; i < all_halves.size(); ++i) {
      ASSERT_EQ(all_halves[i].bits, static_cast<uint16_t>(i % 1009 * 61 + i / 1009)) << i;
      ASSERT_EQ(all_words[i], static_cast<int32_t>(i / 1009)) << i;
    }
  }
}

// Sizes for which Open MPI takes its trees, its ring, and several segments of it.
TEST_F(CollectivesRank, SameBitsOnAllRanksAndEveryTime) {
  for (const int64_t n : {1, 97, 10007, 100003}) expect_reproducible<float>(n);
  expect_reproducible<double>(10007);
}

// The second call reads what the first one writes, and so on: order must hold though nobody waits in between.
TEST_F(CollectivesRank, CallsSeeTheResultsOfEarlierOnes) {
  for (const int64_t piece : {int64_t{499}, Collectives::Options{}.piece_elements}) {
    comm = make(piece);
    const int64_t n = 2003;
    std::vector<int64_t> part = known_values<int64_t>(rank, n), whole(static_cast<size_t>(n * ranks));
    comm->all_reduce(view(part));
    comm->all_gather(view(whole), view(part));
    comm->reduce_scatter(view(part), view(whole));
    comm->all_reduce(view(part));
    finish();
    for (int64_t i = 0; i < n; ++i)
      ASSERT_EQ(part[static_cast<size_t>(i)], known_sum<int64_t>(ranks, i) * ranks * ranks) << i;
  }
}

// A mark lets past when its own calls are done; what came later is done at the later mark.
TEST_F(CollectivesRank, MarksAndProgressWithoutWaiting) {
  comm = make(1009);
  std::vector<float> first = known_values<float>(rank, 4001), second = known_values<float>(rank, 4001);
  comm->follow(kCpu);
  comm->all_reduce(view(first));
  const auto one = comm->mark();
  comm->all_reduce(view(second));
  const auto two = comm->mark();
  comm->await(kCpu, one);
  for (int64_t i = 0; i < 4001; ++i) ASSERT_EQ(first[static_cast<size_t>(i)], known_sum<float>(ranks, i));
  for (int i = 0; i < 100; ++i) comm->poke();
  comm->await(kCpu, two);
  for (int64_t i = 0; i < 4001; ++i) ASSERT_EQ(second[static_cast<size_t>(i)], known_sum<float>(ranks, i));
  comm->await(kCpu, one);
}

TEST_F(CollectivesRank, TrafficIsThatOfARing) {
  const int64_t n = 1001;
  std::vector<float> sum(static_cast<size_t>(n)), all(static_cast<size_t>(n * ranks));
  std::vector<bf16> halves(static_cast<size_t>(n)), all_halves(static_cast<size_t>(n * ranks));
  comm->all_reduce(view(sum));
  EXPECT_EQ(comm->traffic().bytes, 2 * (ranks - 1) * n * 4 / ranks);
  const int64_t before = comm->traffic().bytes;
  comm->reduce_scatter(view(sum), view(all));
  comm->all_gather(view(all_halves), view(halves));
  EXPECT_EQ(comm->traffic().bytes - before, (ranks - 1) * n * (4 + 2));
  EXPECT_EQ(comm->traffic().calls, 3);
  EXPECT_THROW(comm->await(kCpu, 4), Error);
  finish();
}

// ---- mpirun -----------------------------------------------------------------------------------------------------

class CollectivesOverMpi : public testing::TestWithParam<int> {};

TEST_P(CollectivesOverMpi, EveryRankPasses) {
  if (!built_with_mpi()) GTEST_SKIP() << "this build has no MPI";
  if (!why_no_mpi().empty()) GTEST_SKIP() << why_no_mpi();
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const Outcome outcome = run_mpi(GetParam(), {self, "--gtest_filter=CollectivesRank.*"},
                                  {{kInside, "1"}, {"GTEST_COLOR", "no"}}, 300);
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  const std::string passed = "[  PASSED  ] 8 tests.";
  int ranks = 0;
  for (size_t at = 0; (at = outcome.output.find(passed, at)) != std::string::npos; at += passed.size())
    ++ranks;
  EXPECT_EQ(ranks, GetParam()) << outcome.output;
}

INSTANTIATE_TEST_SUITE_P(Ranks, CollectivesOverMpi, testing::Values(1, 2, 3, 5, 8),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace kinoe
