// Saving by several ranks, here threads: the same files whoever wrote them, one outcome on all ranks whatever fails on one of them, and
// nobody who waits for a rank that is gone.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>

#include "test/checkpoint_harness.h"
#include "test/local_channel.h"
#include "trainer/checkpoint_ranks.h"
#include "trainer/checkpoint_saver.h"
#include "trainer/resume.h"
#include "trainer/saving.h"

namespace kinoe {
namespace {

namespace fs = std::filesystem;

/// work(rank, channel) on a thread for each rank. The channel is closed when its rank's work ends, which must not throw.
void on_ranks(int ranks, const std::function<void(int, Channel&)>& work) {
  std::vector<std::unique_ptr<Channel>> channels = make_local_channels(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&work, rank, mine = std::move(channels[static_cast<size_t>(rank)])]() mutable {
      try {
        work(rank, *mine);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
      mine.reset();
    });
  for (std::thread& thread : threads) thread.join();
}

/// One rank's memory: what it holds of a model. What is nobody's is NaN.
struct RankMemory {
  ShardLayout layout;
  std::vector<float> masters, m, v;

  RankMemory(const ParameterTable& table, int rank, int ranks, bool sharded)
      : layout(table, rank, ranks, sharded) {
    for (std::vector<float>* memory : {&masters, &m, &v})
      memory->assign(static_cast<size_t>(layout.size()), NAN);
  }
  void take(const StoredModel& model) {
    for (const auto& [mine, all] :
         {std::pair(&masters, &model.masters), std::pair(&m, &model.m), std::pair(&v, &model.v)})
      for (const HeldRange& range : layout.held())
        std::copy(all->begin() + range.begin, all->begin() + range.end, mine->begin() + range.local);
  }
  [[nodiscard]] CheckpointSource source() {
    const int64_t n = layout.size();
    return {Tensor(masters.data(), DType::f32, {n}), Tensor(m.data(), DType::f32, {n}),
            Tensor(v.data(), DType::f32, {n})};
  }
};

std::string all_bytes(Files& files, const std::string& directory) {
  std::string all;
  std::vector<std::string> paths;
  for (const auto& entry : fs::recursive_directory_iterator(directory))
    if (entry.is_regular_file()) paths.push_back(entry.path().string());
  std::sort(paths.begin(), paths.end());
  for (const std::string& path : paths) all += path.substr(directory.size()) + read_file(files, path);
  return all;
}

class RanksSave : public testing::Test {
 protected:
  [[nodiscard]] CheckpointSaver::Options options(const ShardLayout& layout,
                                                 DType weights = DType::f32) const {
    CheckpointSaver::Options options;
    options.run_directory = run.path();
    options.weights = weights;
    options.ranges = layout.owned();
    options.block_elements = 2 * kChunk;  // blocks that end within ranges, and ranges that share a block
    options.buffer_bytes = 3 * 2 * kChunk * sizeof(float);
    return options;
  }
  [[nodiscard]] std::string at(int64_t step) const { return checkpoint_path(run.path(), step); }
  void save_together(const StoredModel& model, int64_t step, DType weights, int ranks, bool sharded) {
    on_ranks(ranks, [&](int rank, Channel& channel) {
      FaultyFiles files;
      RankMemory memory(model.table, rank, ranks, sharded);
      memory.take(model);
      CheckpointSaver::Options mine = options(memory.layout, weights);
      CheckpointSaver saver(files, device->context(), model.table, memory.source(), channel, mine);
      // Of the other ranks neither state nor small files are used.
      TrainingState state;
      state.step = step;
      saver.save(rank == 0 ? model.state(step) : state,
                 rank == 0 ? model.small_files(weights) : std::vector<SmallFile>{});
      const std::optional<SaveResult> result = saver.wait();
      ASSERT_TRUE(result);
      EXPECT_EQ(result->error, "");
      EXPECT_EQ(result->bytes, model.plan(step, weights).bytes());
    });
  }

  std::unique_ptr<Device> device = Device::cpu();
  std::unique_ptr<Files> real = std::make_unique<FaultyFiles>();
  FreshDirectory run;
};

TEST_F(RanksSave, BySaversOfPRanksIntoMemoryOfQ) {
  const StoredModel model(prime_llama());
  const int counts[] = {1, 2, 3, 4, 5, 7, 8, 64};  // 64: more than a bucket has chunks
  for (const DType weights : {DType::bf16, DType::f32}) {
    std::string first;
    for (const int p : counts)
      for (const bool sharded : {true, false}) {
        SCOPED_TRACE(cat(p, " ranks, ", sharded ? "sharded" : "whole"));
        save_together(model, 5, weights, p, sharded);
        const std::string bytes = all_bytes(*real, at(5));
        if (first.empty()) first = all_bytes(*real, model.save(*real, run / "one", 5, weights));
        EXPECT_TRUE(bytes == first) << "the files depend on who wrote them";
        if (weights == DType::f32 && p > 3) continue;
        const CheckpointReader reader(*real, at(5));
        for (const int q : counts) {
          if (!sharded && q > 3) continue;  // each rank reads everything
          uint64_t hash = 0;
          for (int rank = 0; rank < q; ++rank) {
            RankMemory expected(model.table, rank, q, sharded), loaded = expected;
            expected.take(model);
            hash += load_parameters(device->context(), reader, model.table, loaded.layout,
                                    loaded.source().masters, loaded.source().m, loaded.source().v);
            const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
              return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;  // NaN where nobody's
            };
            ASSERT_TRUE(same(loaded.masters, expected.masters)) << rank << " of " << q;
            ASSERT_TRUE(same(loaded.m, expected.m)) << rank << " of " << q;
            ASSERT_TRUE(same(loaded.v, expected.v)) << rank << " of " << q;
          }
          EXPECT_EQ(hash, model.hash()) << q;
        }
      }
  }
}

// ---- Failures --------------------------------------------------------------------------------------------------------

/// Of every bucket each of three ranks owns something.
ModelConfig for_three() {
  ModelConfig config = small_llama(true);
  config.vocab_size = 1009;
  config.hidden = 60;
  config.heads = config.kv_heads = 2;
  config.head_dim = 30;
  config.ffn = 300;
  return config;
}

class RanksFail : public RanksSave {
 protected:
  static constexpr int kRanks = 3;

  /// Saves steps 10, 20 and 30 with every rank's files; `arm` is called on each rank before step 20 and after it.
  void save_three(const std::function<void(int, FaultyFiles&, bool)>& arm) {
    results.assign(kRanks, {});
    logs.assign(kRanks, {});
    fs::remove_all(run / "checkpoints");
    on_ranks(kRanks, [&](int rank, Channel& channel) {
      FaultyFiles files;
      RankMemory memory(model.table, rank, kRanks, true);
      memory.take(model);
      CheckpointSaver saver(files, device->context(), model.table, memory.source(), channel,
                            options(memory.layout));
      for (const int64_t step : {10, 20, 30}) {
        const int before = files.calls();
        if (step == 20) arm(rank, files, true);
        saver.save(model.state(step), model.small_files(DType::f32));
        results[static_cast<size_t>(rank)].push_back(*saver.wait());
        if (step != 20) continue;
        logs[static_cast<size_t>(rank)].assign(files.log().begin() + before, files.log().end());
        arm(rank, files, false);
      }
    });
  }
  /// Every rank has the same results: step 20's failed (with which text is returned), the others did not.
  std::string expect_one_outcome() {
    for (size_t i = 0; i < 3; ++i)
      for (int rank = 1; rank < kRanks; ++rank) {
        const SaveResult &mine = results[static_cast<size_t>(rank)].at(i), &first = results[0].at(i);
        EXPECT_EQ(mine.error, first.error);
        EXPECT_EQ(mine.bytes, first.bytes);
        EXPECT_EQ(mine.stall_ms, first.stall_ms);
      }
    EXPECT_EQ(results[0][0].error, "");
    EXPECT_EQ(results[0][2].error, "");
    for (const auto& entry : fs::directory_iterator(run / "checkpoints"))
      EXPECT_FALSE(entry.path().string().ends_with(".tmp")) << entry.path();
    for (const int64_t step : checkpoint_steps(*real, run.path())) expect_holds(*real, at(step), model);
    EXPECT_EQ(find_checkpoint(*real, run.path()), at(30));
    return results[0][1].error;
  }

  StoredModel model{for_three()};
  std::vector<std::vector<SaveResult>> results;  // by rank
  std::vector<std::vector<std::string>> logs;    // of step 20
};

TEST_F(RanksFail, AnyCallOfAnyRankFailsTheSaveOnAll) {
  save_three([](int, FaultyFiles&, bool) {});
  EXPECT_EQ(expect_one_outcome(), "");
  const std::vector<std::vector<std::string>> calls = logs;
  for (int failing = 0; failing < kRanks; ++failing) {
    const auto& log = calls[static_cast<size_t>(failing)];
    ASSERT_GT(log.size(), 10U);
    for (size_t n = 1; n <= log.size(); n += n > 8 && n + 24 < log.size() ? size_t{7} : size_t{1}) {
      const bool full = n % 2 == 0;  // a full disk, or one call
      SCOPED_TRACE(cat("rank ", failing, full ? ": from call " : ": call ", n, ": ", log[n - 1]));
      save_three([&](int rank, FaultyFiles& files, bool on) {
        if (rank != failing) return;
        const int call = on ? files.calls() + static_cast<int>(n) : 1 << 30;
        if (full)
          files.fail_from(call, ENOSPC);
        else
          files.fail_at(call, ENOSPC);
      });
      const std::string error = expect_one_outcome();
      EXPECT_NE(error.find("No space left"), std::string::npos) << error;
      EXPECT_EQ(error.find('\n'), std::string::npos);
      if (failing == 0)
        EXPECT_EQ(error.find("rank"), std::string::npos) << error;
      else
        EXPECT_TRUE(error.starts_with(cat("rank ", failing, " ("))) << error;
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST_F(RanksFail, OfSeveralTheLowestRankIsNamed) {
  save_three([](int rank, FaultyFiles& files, bool on) {
    if (rank > 0) files.fail_from(on ? files.calls() + 3 : 1 << 30, rank == 1 ? EIO : ENOSPC);
  });
  const std::string error = expect_one_outcome();
  EXPECT_TRUE(error.starts_with("rank 1 (")) << error;
  EXPECT_NE(error.find("Input/output error"), std::string::npos) << error;
}

TEST_F(RanksFail, ADirectoryThatNotAllRanksSee) {
  for (const bool stale : {false, true}) {
    const std::string elsewhere = run / (stale ? "stale" : "empty");
    // A .tmp of this very step, left there by an earlier run: what is written into it is lost.
    if (stale) begin_checkpoint(*real, elsewhere, model.plan(20, DType::f32));
    std::vector<std::string> errors(kRanks);
    on_ranks(kRanks, [&](int rank, Channel& channel) {
      FaultyFiles files;
      RankMemory memory(model.table, rank, kRanks, true);
      memory.take(model);
      CheckpointSaver::Options mine = options(memory.layout);
      if (rank == 1) mine.run_directory = elsewhere;
      CheckpointSaver saver(files, device->context(), model.table, memory.source(), channel, mine);
      saver.save(model.state(20), model.small_files(DType::f32));
      errors[static_cast<size_t>(rank)] = saver.wait()->error;
    });
    for (const std::string& error : errors) EXPECT_EQ(error, errors[0]);
    EXPECT_NE(errors[0].find("on a file system that all hosts see"), std::string::npos) << errors[0];
    EXPECT_NE(errors[0].find(stale ? "is not there for rank 0" : "rank 1 ("), std::string::npos) << errors[0];
    EXPECT_FALSE(fs::exists(at(20)));
    EXPECT_FALSE(fs::exists(at(20) + ".tmp"));
  }
}

TEST_F(RanksFail, NumbersThatOneRankCannotCopy) {
  on_ranks(kRanks, [&](int rank, Channel& channel) {
    FaultyFiles files;
    RankMemory memory(model.table, rank, kRanks, true);
    memory.take(model);
    CheckpointSource source = memory.source();
    if (rank == 1) source.v = source.v.slice(0, kChunk);
    CheckpointSaver saver(files, device->context(), model.table, source, channel, options(memory.layout));
    const auto save = [&] { saver.save(model.state(20), model.small_files(DType::f32)); };
    if (rank == 1)
      EXPECT_THROW(save(), Error);
    else
      save();
    const std::string error = saver.wait()->error;
    EXPECT_TRUE(error.starts_with("rank 1 (") && error.find("could not be copied") != std::string::npos)
        << error;
  });
  EXPECT_FALSE(fs::exists(at(20)));
}

TEST_F(RanksFail, ARankThatDiesIsLostToTheOthers) {
  for (int dying = 0; dying < kRanks; ++dying)
    for (const int call : {0, 1, 4, 9, 13}) {  // 0: before it calls save()
      SCOPED_TRACE(cat("rank ", dying, " at call ", call));
      on_ranks(kRanks, [&](int rank, Channel& channel) {
        FaultyFiles files;
        RankMemory memory(model.table, rank, kRanks, true);
        memory.take(model);
        CheckpointSaver saver(files, device->context(), model.table, memory.source(), channel,
                              options(memory.layout));
        const auto save = [&] {
          saver.save(model.state(20), model.small_files(DType::f32));
          saver.wait();
        };
        if (rank != dying) {
          expect_error(ExitCode::rank_lost, {cat("rank ", dying, " is gone"), "checkpoint of step 20"}, save);
          expect_error(ExitCode::rank_lost, {}, save);  // and so it stays
        } else if (call > 0) {
          files.kill_at(call);
          EXPECT_THROW(save(), Killed);
        }
      });
      EXPECT_TRUE(checkpoint_steps(*real, run.path()).empty());
      fs::remove_all(run / "checkpoints");
    }
}

TEST_F(RanksFail, ThreeInARowEndTheRunOnEveryRankWithTheSameText) {
  std::vector<std::string> errors(kRanks);
  const Model built(model.config, Backend::cpu, DType::f32);
  RunConfig config;
  config.out = run.path();
  on_ranks(kRanks, [&](int rank, Channel& channel) {
    FaultyFiles files;
    RankMemory memory(model.table, rank, kRanks, true);
    memory.take(model);
    ParameterMemory parameters;
    parameters.masters = parameters.weights.whole = memory.source().masters;
    parameters.m = memory.source().m;
    parameters.v = memory.source().v;
    std::unique_ptr<Monitor> monitor;  // on rank 0 alone
    const int nowhere = ::open("/dev/null", O_WRONLY);
    if (rank == 0)
      monitor = std::make_unique<Monitor>(Monitor::Options{.metrics_path = run / "metrics.jsonl",
                                                           .out = nowhere,
                                                           .warnings = nowhere,
                                                           .bar = Monitor::kNoBar});
    Saving saving(files, device->context(), built, config, parameters, memory.layout, channel,
                  CheckpointSaver::planned_buffer_bytes(memory.layout.owned(), 0, kRanks), {}, monitor.get());
    saving.begin(model.state(1));
    saving.finish();
    if (rank == 2) files.fail_from(files.calls() + 2, ENOSPC);
    try {
      for (const int64_t step : {2, 3, 4}) saving.begin(model.state(step));
      saving.finish();
    } catch (const Error& error) {
      EXPECT_EQ(error.code, ExitCode::checkpoint);
      errors[static_cast<size_t>(rank)] = error.what();
    }
    ::close(nowhere);
  });
  EXPECT_TRUE(errors[0].starts_with("3 checkpoints in a row could not be written: rank 2 (")) << errors[0];
  for (const std::string& error : errors) EXPECT_EQ(error, errors[0]);
  const std::string metrics = read_file(*real, run / "metrics.jsonl");
  EXPECT_EQ(std::count(metrics.begin(), metrics.end(), '\n'), 4);
  EXPECT_EQ(checkpoint_steps(*real, run.path()), (std::vector<int64_t>{1}));
}

// ---- Memory and messages ---------------------------------------------------------------------------------------------

TEST_F(RanksSave, CopiesTakeTheMemoryOfWhatIsOwned) {
  const ParameterTable table(prime_llama());
  const auto planned = [&](int ranks, int rank) {
    return CheckpointSaver::planned_buffer_bytes(ShardLayout(table, rank, ranks, true).owned(), 0, ranks);
  };
  const auto all = static_cast<size_t>(table.flat_size()) * 3 * sizeof(float);
  EXPECT_EQ(planned(1, 0), all);
  size_t sum = 0;
  for (int rank = 0; rank < 4; ++rank) sum += planned(4, rank);
  EXPECT_EQ(sum, all);
  EXPECT_EQ(planned(64, 63), 2 * kChunk * sizeof(float));  // owns nothing
  // One host's memory, shared: so many that each gets its two blocks and no more.
  const std::vector<HeldRange> large = {{0, int64_t{1} << 40, 0}};
  EXPECT_EQ(CheckpointSaver::planned_buffer_bytes(large, 0, 1 << 20),
            2 * CheckpointSaver::kBlockElements * sizeof(float));
  const size_t alone = CheckpointSaver::planned_buffer_bytes(large, 0, 1);
  EXPECT_LE(CheckpointSaver::planned_buffer_bytes(large, 0, 2), alone * 6 / 10 + (size_t{256} << 20));
}

TEST(CheckpointRanks, NumbersComeTogetherOnRankZero) {
  const size_t n = (size_t{1} << 20) + 77;  // two messages each
  for (const int fault : {0, 1, 2}) {       // none, a number of two ranks, a number of none
    on_ranks(3, [&](int rank, Channel& channel) {
      std::vector<uint64_t> mine(n);
      for (size_t i = 0; i < n; ++i)
        if (i / 1000 % 3 == static_cast<size_t>(rank)) mine[i] = i + 1;
      if (fault == 1 && rank == 1) mine[0] = 5;
      if (fault == 2) mine[n - 1] = 0;
      const Gathering gathered(channel, "numbers", mine);
      if (rank != 0) return;
      if (fault != 0) {
        expect_error(ExitCode::internal, {fault == 1 ? "from rank 1 and from another" : "nobody"},
                     [&] { (void)gathered.complete(); });
        return;
      }
      const std::vector<uint64_t>& all = gathered.complete();
      for (size_t i = 0; i < n; ++i) ASSERT_EQ(all[i], i + 1);
      ASSERT_EQ(gathered.samples().size(), 2U);
      EXPECT_EQ(gathered.samples()[1].rank, 2);
      EXPECT_EQ(gathered.samples()[1].index, 2000U);
    });
  }
}

}  // namespace
}  // namespace kinoe
