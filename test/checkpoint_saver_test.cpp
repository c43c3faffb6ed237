// Saving in the background: what is saved is the step it names, however slow the disk is and whatever training does meanwhile; failed
// saves are results, not ends.
#include "trainer/checkpoint_saver.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <system_error>
#include <thread>

#include "test/checkpoint_harness.h"

namespace kinoe {
namespace {

namespace fs = std::filesystem;

/// Real files whose writes take their time.
class SlowFiles : public FaultyFiles {
 public:
  explicit SlowFiles(std::chrono::microseconds delay) : delay_(delay) {}
  std::unique_ptr<File> open_write(const std::string& path) override {
    return std::make_unique<SlowFile>(FaultyFiles::open_write(path), delay_);
  }

 private:
  class SlowFile : public File {
   public:
    SlowFile(std::unique_ptr<File> real, std::chrono::microseconds delay)
        : File(real->path()), real_(std::move(real)), delay_(delay) {}
    void write_at(uint64_t offset, const void* data, size_t bytes) override {
      std::this_thread::sleep_for(delay_);
      real_->write_at(offset, data, bytes);
    }
    void read_at(uint64_t offset, void* data, size_t bytes) const override {
      real_->read_at(offset, data, bytes);
    }
    void resize(uint64_t bytes) override { real_->resize(bytes); }
    [[nodiscard]] uint64_t size() const override { return real_->size(); }
    void sync() override { real_->sync(); }
    void close() override { real_->close(); }

   private:
    std::unique_ptr<File> real_;
    std::chrono::microseconds delay_;
  };
  std::chrono::microseconds delay_;
};

/// No thread can be started: each would get a stack larger than the address space.
class NoMoreThreads {
 public:
  NoMoreThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    pthread_getattr_default_np(&huge);
    pthread_attr_setstacksize(&huge, size_t{1} << 47);
    pthread_setattr_default_np(&huge);
    pthread_attr_destroy(&huge);
  }
  ~NoMoreThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  NoMoreThreads(const NoMoreThreads&) = delete;
  NoMoreThreads& operator=(const NoMoreThreads&) = delete;

 private:
  pthread_attr_t before_{};
};

class CheckpointSaverTest : public testing::Test {
 protected:
  CheckpointSource source() {
    const int64_t n = live.table.flat_size();
    return {Tensor(live.masters.data(), DType::f32, {n}), Tensor(live.m.data(), DType::f32, {n}),
            Tensor(live.v.data(), DType::f32, {n})};
  }
  [[nodiscard]] CheckpointSaver::Options options(size_t blocks, DType weights = DType::f32) const {
    CheckpointSaver::Options options;
    options.run_directory = run.path();
    options.weights = weights;
    options.buffer_bytes = blocks * live.masters.size() * sizeof(float);
    for (int rank = 0; rank < 4; ++rank)  // four ranges: more blocks than one
      for (const HeldRange& range : owned_by(live.table, rank, 4)) options.ranges.push_back(range);
    return options;
  }
  /// What an update does: every number is another one.
  void train_on() {
    for (const Parameter& p : live.table.parameters())
      for (int64_t i = p.offset; i < p.offset + p.size; ++i) {
        const auto at = static_cast<size_t>(i);
        live.masters[at] += 0.01F;
        live.m[at] -= 0.02F;
        live.v[at] += 0.03F;
      }
  }
  void save(CheckpointSaver& saver, int64_t step, DType weights = DType::f32) {
    saver.save(live.state(step), live.small_files(weights));
  }
  [[nodiscard]] std::string at(int64_t step) const { return checkpoint_path(run.path(), step); }

  std::unique_ptr<Device> device = Device::cpu();
  std::unique_ptr<Channel> ranks = alone();
  std::unique_ptr<Files> real = std::make_unique<FaultyFiles>();
  FreshDirectory run;
  StoredModel live{small_llama(false)};
};

TEST_F(CheckpointSaverTest, WithoutMoreThreadsItsOwnWritesAll) {
  CheckpointSaver::Options alone = options(2);
  alone.writers = 4;
  CheckpointSaver saver(*real, device->context(), live.table, source(), *ranks, alone);
  {
    const NoMoreThreads none;
    EXPECT_THROW(std::thread([] {}).join(), std::system_error);
    save(saver, 1);
    const std::optional<SaveResult> result = saver.wait();
    ASSERT_TRUE(result);
    EXPECT_EQ(result->error, "");
  }
  expect_holds(*real, at(1), live);
}

TEST_F(CheckpointSaverTest, HoldsExactlyItsStepWhileTrainingGoesOn) {
  for (const DType weights : {DType::f32, DType::bf16})
    for (const size_t blocks : {size_t{1}, size_t{2}, size_t{64}}) {
      SlowFiles slow(std::chrono::microseconds(300));
      std::vector<std::pair<int64_t, StoredModel>> expected;
      {
        CheckpointSaver saver(slow, device->context(), live.table, source(), *ranks,
                              options(blocks, weights));
        for (int64_t step = 1; step <= 3; ++step) {
          train_on();
          expected.emplace_back(step, live);
          save(saver, step, weights);
          train_on();  // at once, while the disk is still busy with this step
          if (blocks == 64 && step == 1) {
            EXPECT_FALSE(saver.poll()) << "the slow disk was too fast for this test";
          }
        }
      }  // waits for the last one
      for (const auto& [step, model] : expected) expect_holds(*real, at(step), model);
      // The same bytes as a synchronous save.
      const std::string background = at(3);
      std::vector<std::string> contents;
      const auto read_all = [&](const std::string& directory) {
        std::string all;
        for (const char* name :
             {"model.safetensors", "trainer/optimizer-m.safetensors", "trainer/optimizer-v.safetensors",
              "trainer/state.json", "trainer/manifest.json"})
          all += read_file(*real, directory + "/" + name);
        return all;
      };
      const std::string asynchronous = read_all(background);
      EXPECT_TRUE(asynchronous == read_all(expected.back().second.save(*real, run / "sync", 3, weights)));
      fs::remove_all(run / "sync");
      fs::remove_all(run / "checkpoints");
    }
}

TEST_F(CheckpointSaverTest, ResultsComeOnceEachInOrder) {
  SlowFiles slow(std::chrono::microseconds(100));
  CheckpointSaver saver(slow, device->context(), live.table, source(), *ranks, options(64));
  EXPECT_FALSE(saver.poll());
  EXPECT_FALSE(saver.wait());
  save(saver, 1);
  save(saver, 2);
  for (const int64_t step : {1, 2}) {
    const std::optional<SaveResult> result = saver.wait();
    ASSERT_TRUE(result);
    EXPECT_EQ(result->step, step);
    EXPECT_EQ(result->error, "");
    EXPECT_EQ(result->bytes, live.plan(step, DType::f32).bytes());
    EXPECT_GT(result->write_ms, 0);
    EXPECT_GE(result->stall_ms, 0);
  }
  EXPECT_FALSE(saver.wait());
  EXPECT_EQ(checkpoint_steps(*real, run.path()), (std::vector<int64_t>{1, 2}));
}

TEST_F(CheckpointSaverTest, AFailedSaveIsSaidCleanedUpAndTriedAgain) {
  for (const size_t blocks : {size_t{1}, size_t{64}})
    for (const int call : {1, 4, 25, 60}) {
      SCOPED_TRACE(call);
      FaultyFiles files;
      CheckpointSaver saver(files, device->context(), live.table, source(), *ranks, options(blocks));
      save(saver, 10);
      EXPECT_EQ(saver.wait()->error, "");
      const StoredModel good = live;
      files.fail_at(files.calls() + call, ENOSPC);
      train_on();
      save(saver, 20);
      const std::optional<SaveResult> failed = saver.wait();
      ASSERT_TRUE(failed);
      EXPECT_EQ(failed->step, 20);
      EXPECT_NE(failed->error.find("No space left"), std::string::npos) << failed->error;
      EXPECT_FALSE(fs::exists(at(20) + ".tmp"));
      EXPECT_EQ(find_checkpoint(*real, run.path()), at(10));
      expect_holds(*real, at(10), good);
      train_on();
      save(saver, 30);
      EXPECT_EQ(saver.wait()->error, "");
      expect_holds(*real, at(30), live);
      fs::remove_all(run / "checkpoints");
    }
}

TEST_F(CheckpointSaverTest, AFullDiskKeepsTheLastGoodOneHoweverOftenItFails) {
  FaultyFiles files;
  CheckpointSaver saver(files, device->context(), live.table, source(), *ranks, options(64));
  save(saver, 1);
  EXPECT_EQ(saver.wait()->error, "");
  const StoredModel good = live;
  files.fail_from(files.calls() + 30, ENOSPC);
  for (const int64_t step : {2, 3, 4}) {
    train_on();
    save(saver, step);
    EXPECT_NE(saver.wait()->error, "");
  }
  EXPECT_EQ(find_checkpoint(*real, run.path()), at(1));
  expect_holds(*real, at(1), good);
  files.fail_from(1 << 30, 0);  // somebody made room
  save(saver, 5);
  EXPECT_EQ(saver.wait()->error, "");
  expect_holds(*real, at(5), live);
}

TEST_F(CheckpointSaverTest, OldOnesGoAfterTheNewOneIsThere) {
  FaultyFiles files;
  CheckpointSaver::Options keeping = options(64);
  keeping.keep = {.newest = 2, .every = 4};
  CheckpointSaver saver(files, device->context(), live.table, source(), *ranks, keeping);
  for (int64_t step = 1; step <= 7; ++step) save(saver, step);
  while (const std::optional<SaveResult> result = saver.wait()) EXPECT_EQ(result->error, "");
  EXPECT_EQ(checkpoint_steps(*real, run.path()), (std::vector<int64_t>{4, 6, 7}));
}

TEST_F(CheckpointSaverTest, OldOnesThatCannotBeRemovedAreNoFailedSave) {
  FaultyFiles files;
  CheckpointSaver::Options keeping = options(64);
  keeping.keep = {.newest = 1, .every = 0};
  CheckpointSaver saver(files, device->context(), live.table, source(), *ranks, keeping);
  save(saver, 1);
  EXPECT_EQ(saver.wait()->error, "");
  const int before = files.calls();
  save(saver, 2);
  EXPECT_EQ(saver.wait()->error, "");
  // Of the third save the call that puts the second one away.
  int removal = before;
  while (!files.log()[static_cast<size_t>(removal)].starts_with("rename " + at(1) + " ")) ++removal;
  files.fail_at(files.calls() + removal - before + 1, EIO);
  save(saver, 3);
  const std::optional<SaveResult> result = saver.wait();
  ASSERT_TRUE(result);
  EXPECT_EQ(result->error, "");
  EXPECT_NE(result->warning.find("step_00000002"), std::string::npos) << result->warning;
  EXPECT_EQ(checkpoint_steps(*real, run.path()), (std::vector<int64_t>{2, 3}));
}

TEST_F(CheckpointSaverTest, AThreadThatDiesIsHeardOf) {
  for (const size_t blocks : {size_t{1}, size_t{64}}) {
    FaultyFiles files;
    files.kill_at(20);
    CheckpointSaver saver(files, device->context(), live.table, source(), *ranks, options(blocks));
    const auto all = [&] {
      save(saver, 1);
      saver.wait();
    };
    EXPECT_THROW(all(), Killed);
    EXPECT_THROW(saver.poll(), Killed);
    EXPECT_THROW(save(saver, 2), Killed);
    EXPECT_TRUE(checkpoint_steps(*real, run.path()).empty());
    fs::remove_all(run / "checkpoints");
  }
}

}  // namespace
}  // namespace kinoe
