// Going on with a run: which checkpoint is meant.
#include "trainer/resume.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "test/checkpoint_harness.h"

namespace kinoe {
namespace {

namespace fs = std::filesystem;

bool has(const std::vector<std::string>& notes, const std::string& part) {
  return std::any_of(notes.begin(), notes.end(),
                     [&](const std::string& note) { return note.find(part) != std::string::npos; });
}

// ---- Which checkpoint ------------------------------------------------------------------------------------------------

class ResumePointTest : public testing::Test {
 protected:
  void SetUp() override {
    fs::create_directories(run());
    put_file(run() + "/config.toml", "");
  }
  [[nodiscard]] std::string run() const { return directory / "run"; }
  void save(int64_t step) { model.save(*files, run(), step); }
  void flip(int64_t step) {
    const std::string path = checkpoint_path(run(), step) + "/trainer/optimizer-m.safetensors";
    std::string text = read_file(*files, path);
    text[text.size() - 9] = static_cast<char>(text[text.size() - 9] ^ 1);
    put_file(path, text);
  }
  ResumePoint find(const std::string& mode) { return find(mode, run()); }
  ResumePoint find(const std::string& mode, const std::string& out) {
    RunConfig config;
    config.resume = mode;
    config.out = out;
    return find_resume_point(*files, config);
  }
  void expect_none(ExitCode code, const std::vector<std::string>& parts, const std::string& mode,
                   const std::string& out) {
    expect_error(code, parts, [&] { find(mode, out); });
  }

  std::unique_ptr<Files> files = std::make_unique<FaultyFiles>();
  FreshDirectory directory;
  StoredModel model{small_llama(true)};
};

TEST_F(ResumePointTest, NeverStartsFromTheBeginning) {
  save(10);
  const ResumePoint point = find("never");
  EXPECT_EQ(point.checkpoint, nullptr);
  EXPECT_EQ(point.run_directory, run());
  RunConfig config;
  config.override_ = {"lr"};
  expect_error(ExitCode::usage, {"--override", "--resume"}, [&] { find_resume_point(*files, config); });
}

TEST_F(ResumePointTest, AutoAndMustTakeTheNewest) {
  save(10);
  save(20);
  for (const char* mode : {"auto", "must", "latest-valid"}) {
    const ResumePoint point = find(mode);
    ASSERT_NE(point.checkpoint, nullptr) << mode;
    EXPECT_EQ(point.checkpoint->state().step, 20);
    EXPECT_EQ(point.run_directory, run());
    EXPECT_TRUE(point.notes.empty()) << point.notes.front();
    expect_none(ExitCode::usage, {mode, "--out"}, mode, "");
  }
}

TEST_F(ResumePointTest, Row38OnlyUnfinishedOnes) {
  for (const bool with_directory : {false, true}) {
    if (with_directory) {
      fs::create_directories(checkpoint_path(run(), 10) + ".tmp/trainer");
      put_file(checkpoint_path(run(), 10) + ".tmp/trainer/manifest.json", "{}");
      fs::create_directories(checkpoint_path(run(), 20) + "/trainer");  // no manifest
    }
    EXPECT_EQ(find("auto").checkpoint, nullptr);
    expect_none(ExitCode::checkpoint, {"must", "no checkpoint", run()}, "must", run());
    expect_none(ExitCode::checkpoint, {"latest-valid", "no undamaged checkpoint"}, "latest-valid", run());
    expect_none(ExitCode::checkpoint, {"no checkpoint"}, run(), "");
  }
  expect_none(ExitCode::checkpoint, {"must", "nowhere"}, "must", directory / "nowhere");
  EXPECT_EQ(find("auto", directory / "nowhere").checkpoint, nullptr);
}

TEST_F(ResumePointTest, Row39AMistypedPath) {
  save(10);
  for (const std::string& path :
       {directory / "rum", run() + "/checkpoints/step_00000011", run() + "/config.toml"})
    expect_none(ExitCode::checkpoint, {path, "no such directory"}, path, "");
  expect_none(ExitCode::checkpoint, {"autos", "expected never, auto, must, latest-valid"}, "autos", run());
}

TEST_F(ResumePointTest, APathOfARunOrOfACheckpoint) {
  save(10);
  save(20);
  EXPECT_EQ(find(run(), "").checkpoint->state().step, 20);
  const std::string newest = checkpoint_path(run(), 20);
  for (const std::string& path : {newest, newest + "/", run() + "/", run() + "/./checkpoints/step_00000020"})
    for (const std::string& out : {std::string(), run(), run() + "/", directory.path() + "/./run"}) {
      const ResumePoint point = find(path, out);
      EXPECT_EQ(point.checkpoint->state().step, 20) << path;
      EXPECT_TRUE(fs::equivalent(point.run_directory, run())) << path << " with --out '" << out << "'";
    }
  // An older one of the same run would end in a run with two histories; elsewhere it is a branch.
  const std::string older = checkpoint_path(run(), 10);
  expect_none(ExitCode::checkpoint, {"later checkpoint", "20", "--out"}, older, "");
  expect_none(ExitCode::checkpoint, {"later checkpoint", "20"}, older, run());
  const ResumePoint branch = find(older, directory / "branch");
  EXPECT_EQ(branch.checkpoint->state().step, 10);
  EXPECT_EQ(branch.run_directory, directory / "branch");
  model.save(*files, directory / "other", 5);
  expect_none(ExitCode::usage, {"other", "of its own"}, older, directory / "other");
  // A checkpoint that was copied out of its run: a new run directory.
  fs::copy(older, directory / "copied", fs::copy_options::recursive);
  EXPECT_EQ(find(directory / "copied", "").run_directory, "");
}

TEST_F(ResumePointTest, APathRelativeToTheRun) {
  save(10);
  const fs::path before = fs::current_path();
  fs::current_path(run());
  const std::string found = find("checkpoints/step_00000010", "").run_directory;
  fs::current_path(before);
  EXPECT_EQ(found, ".");
}

TEST_F(ResumePointTest, Row37LatestIsAHintAndSaidToBeWrong) {
  save(10);
  save(20);
  for (const std::string& text : {std::string(), std::string("\x01\xff garbage\n"),
                                  std::string("step_00000099\n"), std::string("step_00000010\n")}) {
    put_file(run() + "/checkpoints/latest", text);
    const ResumePoint point = find("auto");
    EXPECT_EQ(point.checkpoint->state().step, 20);
    ASSERT_EQ(point.notes.size(), 1U);
    EXPECT_NE(point.notes[0].find("latest"), std::string::npos);
    EXPECT_NE(point.notes[0].find("step_00000020"), std::string::npos);
    EXPECT_EQ(point.notes[0].find('\n'), std::string::npos);
  }
  fs::remove(run() + "/checkpoints/latest");
  EXPECT_TRUE(find("auto").notes.empty());
}

TEST_F(ResumePointTest, Row35LatestValidPassesOverDamagedOnesAndSetsThemAside) {
  for (const int64_t step : {10, 20, 30}) save(step);
  flip(30);
  fs::remove(checkpoint_path(run(), 20) + "/trainer/state.json");
  const ResumePoint point = find("latest-valid");
  EXPECT_EQ(point.checkpoint->state().step, 10);
  EXPECT_EQ(point.passed_over, (std::vector<int64_t>{30, 20}));
  EXPECT_TRUE(has(point.notes, "optimizer-m.safetensors: tensor "));
  EXPECT_TRUE(has(point.notes, "state.json"));
  // Once the run is claimed they are no checkpoints any more: the newest is the one that is gone on from.
  const std::vector<std::string> notes = claim_run(*files, run(), point);
  EXPECT_TRUE(has(notes, "step_00000030.damaged"));
  EXPECT_EQ(checkpoint_steps(*files, run()), (std::vector<int64_t>{10}));
  EXPECT_TRUE(fs::exists(checkpoint_path(run(), 30) + ".damaged/trainer/manifest.json"));
  EXPECT_EQ(find("must").checkpoint->state().step, 10);
  // The same step damaged again.
  save(30);
  flip(30);
  EXPECT_TRUE(has(claim_run(*files, run(), find("latest-valid")), "step_00000030.damaged-2"));
  save(11);
  remove_old_checkpoints(*files, run(), {.newest = 1, .every = 0});
  EXPECT_EQ(checkpoint_steps(*files, run()), (std::vector<int64_t>{11}));
  flip(11);
  expect_none(ExitCode::checkpoint, {"no undamaged checkpoint", "optimizer-m"}, "latest-valid", run());
}

TEST_F(ResumePointTest, Row36ACheckpointUnderTheNameOfAnotherStep) {
  save(10);
  fs::copy(checkpoint_path(run(), 10), checkpoint_path(run(), 99), fs::copy_options::recursive);
  expect_none(ExitCode::checkpoint, {"step_00000099", "step 10, not of step 99"}, "must", run());
  const ResumePoint point = find("latest-valid");
  EXPECT_EQ(point.checkpoint->state().step, 10);
  EXPECT_EQ(point.passed_over, std::vector<int64_t>{99});
}

TEST_F(ResumePointTest, ARunThatWentOnMeanwhileIsNotClaimed) {
  save(10);
  const ResumePoint point = find("auto");
  EXPECT_TRUE(claim_run(*files, run(), point).empty());
  save(20);
  expect_error(ExitCode::usage, {"step_00000020", "start this one again"},
               [&] { claim_run(*files, run(), point); });
  EXPECT_EQ(checkpoint_steps(*files, run()).size(), 2U);
  const ResumePoint first = find("auto", directory / "new");
  model.save(*files, directory / "new", 3);
  expect_error(ExitCode::usage, {"step_00000003"}, [&] { claim_run(*files, directory / "new", first); });
}

TEST_F(ResumePointTest, ADirectoryThatIsNoRunIsLeftAlone) {
  fs::create_directories(directory / "home");
  put_file(directory / "home/precious", "x");
  expect_none(ExitCode::usage, {"home", "not a run"}, "auto", directory / "home");
  // What a start that was killed early leaves is no reason to refuse the next one.
  fs::create_directories(directory / "early");
  put_file(directory / "early/lock", "pid 1");
  put_file(directory / "early/config.toml.tmp", "half");
  EXPECT_EQ(find("auto", directory / "early").checkpoint, nullptr);
}

}  // namespace
}  // namespace kinoe
