// Checkpoints under faults of the disk: whatever call fails or is the process's last, a checkpoint that was complete stays so, and
// what can be loaded is the right one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "test/checkpoint_harness.h"

namespace kinoe {
namespace {

namespace fs = std::filesystem;

ModelConfig one_layer() {
  ModelConfig config = small_llama(false);
  config.layers = 1;
  return config;
}

/// Index of the first log entry from `from` on that begins with `text`; -1 if there is none.
int find_call(const std::vector<std::string>& log, const std::string& text, size_t from = 0) {
  for (size_t i = from; i < log.size(); ++i)
    if (log[i].starts_with(text)) return static_cast<int>(i);
  return -1;
}
int last_call(const std::vector<std::string>& log, const std::string& text) {
  for (size_t i = log.size(); i-- > 0;)
    if (log[i] == text) return static_cast<int>(i);
  return -1;
}

class CheckpointFaults : public testing::Test {
 protected:
  /// A run with one checkpoint of step 10, and of step 20 if asked for.
  void fresh_run(bool with_20) {
    fs::create_directories(run() + "/checkpoints");
    for (const auto& entry : fs::directory_iterator(run() + "/checkpoints"))
      if (entry.path().filename() != "step_00000010") fs::remove_all(entry.path());
    if (checkpoint_steps(*real, run()).empty()) before.save(*real, run(), 10);
    if (with_20) before.save(*real, run(), 20);
  }
  [[nodiscard]] std::string run() const { return directory / "run"; }

  /// Every checkpoint that a reader would find is whole; the newest is of `step` and holds `model`.
  void expect_newest(int64_t step, const StoredModel& model) {
    const std::vector<int64_t> steps = checkpoint_steps(*real, run());
    ASSERT_FALSE(steps.empty());
    EXPECT_EQ(steps.back(), step);
    for (const int64_t s : steps) CheckpointReader(*real, checkpoint_path(run(), s)).verify();
    expect_holds(*real, find_checkpoint(*real, run()), model);
  }

  std::unique_ptr<Files> real = std::make_unique<FaultyFiles>();  // nothing armed
  FreshDirectory directory;
  StoredModel before{one_layer(), 1}, after{one_layer(), 100};
};

struct Case {
  int ranks;
  bool replaces;
};

TEST_F(CheckpointFaults, KilledAtAnyCallOfASaveTheRightOneLoads) {
  for (const auto& [ranks, replaces] : {Case{1, false}, Case{1, true}, Case{3, false}}) {
    fresh_run(replaces);
    FaultyFiles counted;
    after.save(counted, run(), 20, DType::f32, ranks);
    const int published =
        1 + find_call(counted.log(), (replaces ? "exchange " : "rename ") + checkpoint_path(run(), 20));
    ASSERT_GT(published, 1);
    // Every call around the names, of the many writes some.
    for (int n = 1; n <= counted.calls(); n += n > 28 && n < published - 22 ? 12 : 1) {
      SCOPED_TRACE(cat("killed at call ", n, ": ", counted.log()[static_cast<size_t>(n) - 1]));
      fresh_run(replaces);
      FaultyFiles files;
      files.kill_at(n);
      EXPECT_THROW(after.save(files, run(), 20, DType::f32, ranks), Killed);
      if (n <= published)
        expect_newest(replaces ? 20 : 10, before);
      else
        expect_newest(20, after);
      if (n % 4 != 0) continue;
      // The next start cleans up and goes on.
      remove_unfinished_checkpoints(*real, run());
      for (const auto& entry : fs::directory_iterator(run() + "/checkpoints"))
        EXPECT_FALSE(entry.path().string().ends_with(".tmp")) << entry.path();
      after.save(*real, run(), 20, DType::f32, ranks);
      expect_newest(20, after);
    }
  }
}

TEST_F(CheckpointFaults, KilledAtAnyCallOfRemovingOldOnesNoHalfOneIsFound) {
  const auto three = [&] {
    fresh_run(true);
    after.save(*real, run(), 30);
  };
  three();
  FaultyFiles counted;
  remove_old_checkpoints(counted, run(), {.newest = 1, .every = 0});
  ASSERT_GT(counted.calls(), 10);
  for (int n = 1; n <= counted.calls(); ++n) {
    SCOPED_TRACE(n);
    three();
    FaultyFiles files;
    files.kill_at(n);
    EXPECT_THROW(remove_old_checkpoints(files, run(), {.newest = 1, .every = 0}), Killed);
    expect_newest(30, after);
  }
}

TEST_F(CheckpointFaults, AFailedCallIsAnErrorAndThePreviousOneIsUntouched) {
  for (const bool replaces : {false, true}) {
    fresh_run(replaces);
    FaultyFiles counted;
    after.save(counted, run(), 20);
    const int published =
        1 + find_call(counted.log(), (replaces ? "exchange " : "rename ") + checkpoint_path(run(), 20));
    for (int n = 1; n <= counted.calls(); n += n > 28 && n < published - 22 ? 12 : 1) {
      SCOPED_TRACE(cat("failed at call ", n, ": ", counted.log()[static_cast<size_t>(n) - 1]));
      fresh_run(replaces);
      FaultyFiles files;
      const int code = n % 2 == 0 ? ENOSPC : EIO;
      if (n % 3 == 0)
        files.fail_from(n, code);  // a full disk
      else
        files.fail_at(n, code);
      try {
        after.save(files, run(), 20);
        // Only what has been replaced may be left: remove_tree() tries again from inside.
        EXPECT_TRUE(counted.log()[static_cast<size_t>(n) - 1].starts_with("remove ")) << "not reported";
      } catch (const FileError& error) {
        EXPECT_EQ(error.error_number, code) << error.what();
        EXPECT_EQ(error.code, ExitCode::checkpoint);
      }
      if (n <= published)
        expect_newest(replaces ? 20 : 10, before);
      else
        expect_newest(20, after);
      after.save(*real, run(), 20);  // there is room again
      expect_newest(20, after);
    }
  }
}

TEST_F(CheckpointFaults, TheOrderOfCallsIsDurable) {
  for (const int ranks : {1, 3}) {
    fresh_run(false);
    FaultyFiles files;
    const std::string final_path = after.save(files, run(), 20, DType::bf16, ranks, 4000);
    remove_old_checkpoints(files, run(), {.newest = 1, .every = 0});
    const std::vector<std::string>& log = files.log();
    const std::string temporary = final_path + ".tmp", checkpoints = run() + "/checkpoints";
    const int manifest = find_call(log, "create " + temporary + "/trainer/manifest.json");
    const int renamed = find_call(log, "rename " + temporary + " " + final_path);
    ASSERT_GT(manifest, 0);
    ASSERT_GT(renamed, manifest);

    // Everything written is synced after its last write; all but the manifest before the manifest exists.
    int synced_files = 0;
    std::vector<std::string> written;
    for (const auto& entry : fs::recursive_directory_iterator(final_path))
      if (entry.is_regular_file())
        written.push_back(temporary + entry.path().string().substr(final_path.size()));
    for (const std::string& path : written) {
      const int last_write = std::max(last_call(log, "write " + path), last_call(log, "resize " + path));
      const int sync = last_call(log, "sync " + path);
      const bool is_manifest = path.ends_with("/manifest.json");
      EXPECT_GE(last_write, 0) << path;
      EXPECT_GT(sync, last_write) << path;
      EXPECT_LT(sync, is_manifest ? renamed : manifest) << path;
      // Its name, too, before the rename.
      const std::string parent = parent_directory(path);
      const int named =
          find_call(log, "syncdir " + parent, static_cast<size_t>(find_call(log, "create " + path)));
      EXPECT_GT(named, 0) << path;
      EXPECT_LT(named, renamed) << path;
      ++synced_files;
    }
    EXPECT_GT(synced_files, 8) << "shards were expected";
    // With three ranks each of them syncs what it wrote.
    EXPECT_EQ(std::count(log.begin(), log.end(),
                         "sync " + temporary + "/trainer/optimizer-m.safetensors.index.json"),
              1);
    const std::string shard = temporary + "/trainer/optimizer-m-00001-of-";
    int syncs = 0;
    for (const std::string& call : log) syncs += call.starts_with("sync " + shard);
    EXPECT_EQ(syncs, ranks);

    const int parent = find_call(log, "syncdir " + checkpoints, static_cast<size_t>(renamed));
    const int latest = find_call(log, "create " + checkpoints + "/latest.tmp");
    const int latest_synced = find_call(log, "sync " + checkpoints + "/latest.tmp");
    const int latest_renamed = find_call(log, "rename " + checkpoints + "/latest.tmp");
    const int removal = find_call(log, "rename " + checkpoint_path(run(), 10));
    EXPECT_GT(parent, renamed);
    EXPECT_GT(latest, parent);
    EXPECT_GT(latest_synced, latest);
    EXPECT_GT(latest_renamed, latest_synced);
    EXPECT_GT(removal, latest_renamed);
    EXPECT_EQ(find_call(log, "remove "), find_call(log, "remove ", static_cast<size_t>(removal)));
  }
}

}  // namespace
}  // namespace kinoe
