// Going on when something is wrong, as a user meets it: exit code by class, one line, nothing changed; and a disk that is full.
#include "test/resume_program.h"

namespace kinoe {
namespace {

class ResumeFaults : public ResumeProgramTest {};

// ---- What is refused -------------------------------------------------------------------------------------------------

TEST_F(ResumeFaults, NoCheckpointWhereOneMustBe) {
  expect_error(kCheckpoint, {"--resume must", "no checkpoint"},
               start("run", "llama.json", {"--resume", "must"}));
  expect_error(kCheckpoint, {"--resume rum", "no such directory"},
               start("run", "llama.json", {"--resume", "rum"}));
  EXPECT_FALSE(fs::exists(path("run")));
  make_half_a_run("run");
  for (const char* step : {"10", "20"}) {
    const std::string name = path(std::string("run/checkpoints/step_000000") + step);
    fs::rename(name, name + ".tmp");
  }
  expect_error(kCheckpoint, {"--resume must", "no checkpoint"}, {"--resume", "must", "--out", "run"});
  EXPECT_EQ(steps_of("run").size(), 20U);
}

/// The defaults in place of settings that cannot be read would be another run in this one's directory.
TEST_F(ResumeFaults, SettingsOfABegunRunThatCannotBeRead) {
  expect_code(kStopped, run(start("run", "llama.json", {"--stop-after", "3"})));
  fs::remove_all(path("run/checkpoints"));
  const std::string whole = read("run/config.toml"), metrics = read("run/metrics.jsonl"),
                    record = read("run/run.json");
  const std::string half = whole.substr(0, whole.find("\nseed") + 1);
  for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
           {"", "run/config.toml is damaged: 'model'"},
           {half, "run/config.toml is damaged: 'lr'"},
           {whole.substr(0, whole.find("log-format")), "'log-format', which every run records, is missing"},
           {whole.substr(0, 20), "run/config.toml line "},
           {std::string(300, '\0'), "run/config.toml line 1"},
           {whole + "lr = 1\n", "'lr' was already set"}}) {
    write("run/config.toml", text);
    expect_error(kUsage, {part, "; put it right, or begin anew with another --out"}, go_on("run"));
    EXPECT_EQ(read("run/config.toml"), text);
  }
  EXPECT_EQ(read("run/metrics.jsonl"), metrics);
  EXPECT_EQ(read("run/run.json"), record);
}

TEST_F(ResumeFaults, Row37GarbageInLatestIsSaidAndIgnored) {
  make_half_a_run("run");
  write("run/checkpoints/latest", "\x01 nonsense");
  const Outcome got = run(go_on("run"));
  expect_code(0, got);
  EXPECT_NE(got.output.find("latest holds no name of a checkpoint; the newest complete one is step_00000020"),
            std::string::npos)
      << got.output;
}

TEST_F(ResumeFaults, Row30ARunThatIsThereIsNotBegunAnew) {
  make_half_a_run("run");
  expect_error(kUsage,
               {"run directory run exists and is not empty (",
                "): nothing was changed; choose another --out, or "
                "--resume auto to go on from step_00000020"},
               start("run"));
  EXPECT_EQ(steps_of("run").size(), 20U);
  fs::remove_all(path("run/checkpoints"));
  const Outcome got = run(start("run"));
  EXPECT_TRUE(got.output.ends_with("choose another --out\n")) << got.output;
  expect_code(0, run(start("run", "llama.json", {"--dry-run"})));
}

TEST_F(ResumeFaults, Row35AFlippedByteAndLatestValid) {
  make_half_a_run("run");
  const std::vector<Json> half = steps_of("run");
  const std::string damaged = "run/checkpoints/step_00000020/trainer/optimizer-v.safetensors";
  flip(damaged);
  const std::string metrics = read("run/metrics.jsonl");
  expect_error(kCheckpoint, {"optimizer-v.safetensors", "tensor ", "latest-valid"}, go_on("run"));
  EXPECT_EQ(read("run/metrics.jsonl"), metrics) << "a refused start changed the run";
  const Outcome got = run({"--resume", "latest-valid", "--out", "run", "--keep", "1"});
  expect_code(0, got);
  const size_t passed = got.output.find("passed over: ");
  ASSERT_NE(passed, std::string::npos) << got.output;
  EXPECT_EQ(got.output.find("--resume latest-valid", passed), std::string::npos) << got.output;
  EXPECT_NE(got.output.find("step_00000020 is damaged and now called"), std::string::npos) << got.output;
  EXPECT_NE(got.output.find("going on from run/checkpoints/step_00000010"), std::string::npos) << got.output;
  expect_code(0, run(start("straight")));
  expect_same("run", steps_of("straight"));
  EXPECT_EQ(checkpoints("run"), (std::vector<std::string>{"step_00000020.damaged", "step_00000040"}));
}

TEST_F(ResumeFaults, Row36AFileMissingOrLeftOver) {
  make_half_a_run("run");
  write("run/checkpoints/step_00000020/trainer/optimizer-x.safetensors", "x");
  expect_error(kCheckpoint, {"not known: trainer/optimizer-x.safetensors"}, go_on("run"));
  fs::remove(path("run/checkpoints/step_00000020/trainer/optimizer-x.safetensors"));
  fs::remove(path("run/checkpoints/step_00000020/model.safetensors"));
  expect_error(kCheckpoint, {"missing: model.safetensors"}, go_on("run"));
}

TEST_F(ResumeFaults, Row40AnotherModel) {
  make_half_a_run("run");
  std::string other = read("llama.json");
  other.replace(other.find("\"num_hidden_layers\": 2"), 22, "\"num_hidden_layers\": 3");
  other.replace(other.find("\"intermediate_size\": 24"), 23, "\"intermediate_size\": 32");
  write("other.json", other);
  expect_error(kCheckpoint, {"num_hidden_layers", "intermediate_size", "3", "2", "32", "24"},
               go_on("run", {"--model", "other.json"}));
  expect_code(0, run(go_on("run", {"--model", "llama.json"})));
}

TEST_F(ResumeFaults, Row41AnotherMicroBatchAndReportsAreFree) {
  make_half_a_run("run");
  const Outcome got = run(go_on("run", {"--micro-batch", "4", "--save-every", "7", "--log-format", "json"}));
  expect_code(0, got);
  EXPECT_NE(got.output.find("micro-batch is 4, was 3"), std::string::npos) << got.output;
  expect_code(0, run(start("straight")));
  const std::vector<Json> straight = steps_of("straight"), steps = steps_of("run");
  ASSERT_EQ(steps.size(), 40U);
  for (size_t i = 0; i < 40; ++i)
    EXPECT_NEAR(steps[i]["loss"].get<double>(), straight[i]["loss"].get<double>(), 1e-4) << i;
  EXPECT_TRUE(state("run", "step_00000040")["changes"].empty());
}

TEST_F(ResumeFaults, Row42OtherSettingsNeedOverride) {
  make_half_a_run("run");
  expect_error(kCheckpoint, {"lr: 0.01 in the checkpoint, 0.02 here", "beta2", "--override"},
               go_on("run", {"--lr", "0.02", "--beta2", "0.9"}));
  expect_error(kCheckpoint, {"steps: 40 in the checkpoint, 60 here"}, go_on("run", {"--tokens", "1920"}));
  expect_error(kCheckpoint, {"determinism: \"run\" in the checkpoint, \"topology\" here", "--override"},
               go_on("run", {"--determinism", "topology"}));
  expect_error(kUsage, {"--override", "--resume"}, start("new", "llama.json", {"--override", "lr"}));
  const Outcome got = run(go_on("run", {"--lr", "0.02", "--tokens", "1920", "--override", "lr", "tokens"}));
  expect_code(0, got);
  EXPECT_NE(got.output.find("from step 21 on lr is 0.02, was 0.01"), std::string::npos) << got.output;
  ASSERT_EQ(steps_of("run").size(), 60U);
  const Json changes = state("run", "step_00000060")["changes"];
  ASSERT_EQ(changes.size(), 2U);
  EXPECT_EQ(changes[0], Json::parse(R"({"step": 20, "name": "steps", "from": "40", "to": "60"})"));
  EXPECT_EQ(changes[1]["name"], "lr");
}

TEST_F(ResumeFaults, Row42OtherData) {
  make_half_a_run("run");
  std::vector<uint16_t> ids(80 * 8 + 1, 7);
  write_shard("b.bin", ids, 20240520, 1);
  expect_error(kCheckpoint, {"training data", "b.bin", "1858 in the checkpoint, 2306 here"},
               go_on("run", {"--data", "b.bin"}));
  fs::copy(path("a.bin"), path("c.bin"));
  expect_code(kStopped,
              run(go_on("run", {"--data", "c.bin", "--stop-after", "21"})));  // the same bytes elsewhere
  expect_code(0, run(go_on("run", {"--data", "b.bin", "--override", "data"})));
  EXPECT_EQ(state("run", "step_00000040")["changes"][0]["name"], "data");
  // Row 11: changed where it lies.
  write_shard("b.bin", std::vector<uint16_t>(80 * 8 + 1, 8), 20240520, 1);
  expect_error(kCheckpoint, {"b.bin", "fingerprint"}, go_on("run"));
}

// ---- One process at a time, and a disk that is full ------------------------------------------------------------------

TEST_F(ResumeFaults, Row29ASecondProcessInTheSameRun) {
  const std::string script =
      background(start("run", "llama.json", {"--steps", "1000000", "--save-every", "50"})) +
      "for i in $(seq 1000); do sleep 0.01; [ -e run/checkpoints/step_00000050 ] && break; done; " +
      command(go_on("run")) + "; echo code $?; kill -9 $pid; wait $pid 2>/dev/null";
  const Outcome got = run_shell(script);
  const size_t refused = got.output.find("in use by another process (host ");
  ASSERT_NE(refused, std::string::npos) << got.output;
  EXPECT_EQ(got.output.find(" )", refused), std::string::npos) << got.output;
  EXPECT_NE(got.output.find("code 2\n"), std::string::npos) << got.output;
  const Outcome on = run(go_on("run", {"--stop-after", next_step("run")}));
  EXPECT_TRUE(on.code == kStopped) << on.output;
  EXPECT_NE(on.output.find("stopped after step "), std::string::npos) << on.output;
}

TEST_F(ResumeFaults, Row34FilesThatCannotGrow) {
  // A limit on the size of files stands for a full disk: the weights of `wide` are beyond it, metrics.jsonl is not.
  std::string wide = llama(true);
  wide.replace(wide.find("\"hidden_size\": 16"), 17, "\"hidden_size\": 64");
  write("wide.json", wide);
  const auto limited = [&](const std::vector<std::string>& arguments, int kib) {
    return run_shell("trap '' XFSZ; ulimit -S -f " + std::to_string(kib) + "; " + command(arguments));
  };
  const Outcome failed = limited(start("run", "wide.json", {"--save-every", "5"}), 64);
  EXPECT_EQ(failed.code, kCheckpoint) << failed.output;
  size_t lines = 0;
  for (size_t at = 0; (at = failed.output.find("ulimit -f", at)) != std::string::npos; ++at) ++lines;
  EXPECT_EQ(lines, 4U) << "three failed saves and the end:\n" << failed.output;
  EXPECT_NE(failed.output.find("3 checkpoints in a row"), std::string::npos) << failed.output;
  EXPECT_EQ(checkpoints("run").size(), 0U);
  EXPECT_GE(steps_of("run").size(), 15U);

  // A good one, then a full disk for a while: training goes on and the next save succeeds.
  expect_code(kStopped, run(start("good", "wide.json", {"--stop-after", "10"})));
  const Outcome last = limited(go_on("good", {"--stop-after", "11"}), 64);
  EXPECT_EQ(last.code, kCheckpoint) << last.output;
  EXPECT_NE(last.output.find("the last checkpoint could not be written"), std::string::npos) << last.output;
  EXPECT_EQ(checkpoints("good"), (std::vector<std::string>{"step_00000010"}));
  expect_code(0, run(go_on("good")));
  expect_code(0, run(start("straight", "wide.json")));
  expect_same("good", steps_of("straight"));
}

TEST_F(ResumeFaults, Row34AFullDisk) {
  struct Disk {
    explicit Disk(const std::string& at) : path(at) {
      fs::create_directory(path);
      mounted = run_shell("mount -t tmpfs -o size=16m tmpfs " + kinoe::quoted(path)).code == 0;
    }
    ~Disk() {
      if (mounted) run_shell("umount " + kinoe::quoted(path));
    }
    Disk(const Disk&) = delete;
    Disk& operator=(const Disk&) = delete;
    std::string path;
    bool mounted = false;
  } disk(path("disk"));
  if (!disk.mounted) GTEST_SKIP() << "mounting a small tmpfs needs root";
  // A checkpoint takes 0.64 MB; the ballast leaves room for about three more.
  std::string wide = llama(true);
  wide.replace(wide.find("\"hidden_size\": 16"), 17, "\"hidden_size\": 64");
  write("wide.json", wide);
  expect_code(kStopped, run(start("disk/run", "wide.json", {"--save-every", "2", "--stop-after", "2"})));
  const auto free_bytes = fs::space(disk.path).available;
  run_shell("head -c " + std::to_string(free_bytes - 2'200'000) + " /dev/zero > " +
            quoted(disk.path + "/ballast"));
  const Outcome full = run(go_on("disk/run"));
  EXPECT_EQ(full.code, kCheckpoint) << full.output;
  EXPECT_NE(full.output.find("3 checkpoints in a row could not be written"), std::string::npos)
      << full.output;
  size_t lines = 0;
  for (size_t at = 0; (at = full.output.find("No space left on device", at)) != std::string::npos; ++at)
    ++lines;
  EXPECT_GE(lines, 4U) << full.output;
  const std::vector<std::string> kept = checkpoints("disk/run");
  EXPECT_GE(kept.size(), 3U);
  EXPECT_LE(kept.size(), 6U);
  fs::remove(path("disk/ballast"));  // somebody made room
  expect_code(0, run(go_on("disk/run")));
  expect_code(0, run(start("straight", "wide.json")));
  expect_same("disk/run", steps_of("straight"));
}

}  // namespace
}  // namespace kinoe
