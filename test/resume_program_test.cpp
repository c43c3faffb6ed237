// Stopping and going on as a user does it: the numbers of a run that was stopped, killed or moved to other thread counts are those of
// the run that never was, step by step.
#include "test/resume_program.h"

#include <map>

namespace kinoe {
namespace {

class ResumeProgram : public ResumeProgramTest {};

// ---- The same numbers ------------------------------------------------------------------------------------------------

TEST_F(ResumeProgram, StoppedAndGoneOnEqualsStraightThrough) {
  for (const char* model : {"gpt2.json", "llama.json", "untied.json"}) {
    SCOPED_TRACE(model);
    const std::string name = std::string(model).substr(0, 5);
    expect_code(0, run_on(1, start(name, model)));
    const std::vector<Json> straight = steps_of(name);
    ASSERT_EQ(straight.size(), 40U);
    EXPECT_NE(straight[0]["weights_hash"], straight[39]["weights_hash"]);

    // 20 + 20.
    const std::string half = name + "_half";
    const Outcome stopped = run_on(2, start(half, model, {"--stop-after", "20"}));
    expect_code(kStopped, stopped);
    EXPECT_NE(stopped.output.find("stopped after step 20 of 40"), std::string::npos) << stopped.output;
    expect_code(0, run_on(3, go_on(half)));
    expect_same(half, straight);

    // Five stops, the epoch's end at step 13 among them, each part with another number of threads.
    const std::string parts = name + "_parts";
    int threads = 1;
    expect_code(kStopped, run_on(threads, start(parts, model, {"--stop-after", "3", "--save-every", "0"})));
    for (const char* stop : {"12", "13", "14", "29"}) {
      threads = threads % 3 + 1;
      expect_code(kStopped, run_on(threads, go_on(parts, {"--stop-after", stop})));
    }
    expect_code(0, run_on(2, go_on(parts)));
    expect_same(parts, straight);
    for (const char* file : {"model.safetensors", "trainer/optimizer-m.safetensors",
                             "trainer/optimizer-v.safetensors", "config.json"})
      EXPECT_TRUE(read(parts + "/checkpoints/step_00000040/" + file) ==
                  read(name + "/checkpoints/step_00000040/" + file))
          << file;
  }
}

TEST_F(ResumeProgram, KilledInMidRunAndGoneOn) {
  expect_code(0, run(start("straight", "llama.json", {"--steps", "1200", "--save-every", "1200"})));
  const std::vector<Json> straight = steps_of("straight");
  ASSERT_EQ(straight.size(), 1200U);
  // Killed three times, wherever it happens to be; metrics.jsonl is mostly ahead of the newest checkpoint.
  int ahead = 0;
  for (int i = 0; i < 3; ++i) {
    const size_t before = fs::exists(path("killed/metrics.jsonl")) ? read("killed/metrics.jsonl").size() : 0;
    run_shell(background(start("killed", "llama.json",
                               {"--steps", "1200", "--save-every", "50", "--resume", "auto"})) +
              "for i in $(seq 1000); do sleep 0.01; [ \"$(stat -c %s killed/metrics.jsonl 2>/dev/null || "
              "echo 0)\" -gt " +
              std::to_string(before + 40000) + " ] && break; done; kill -9 $pid; wait $pid");
    ahead += steps_of("killed").size() % 50 != 0;
  }
  EXPECT_GE(ahead, 1);
  EXPECT_LT(steps_of("killed").size(), 1200U) << "the run was over before it could be killed";
  const Outcome got = run(go_on("killed"));
  expect_code(0, got);
  EXPECT_NE(got.output.find("are cut off metrics.jsonl"), std::string::npos) << got.output;
  expect_same("killed", straight);
}

TEST_F(ResumeProgram, EveryKindOfDataGoesOnWithItsEvaluations) {
  std::vector<uint16_t> ids(61 * 8 + 1);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint16_t>(i * 7919 % 300);
  write_shard("b.bin", ids, 20240520, 1);
  write_shard("v.bin", std::vector<uint16_t>(ids.begin(), ids.begin() + 100), 20240520, 1);
  std::string text;
  for (int i = 0; i < 150; ++i) text += "line " + std::to_string(i * i) + "\n";
  write("t.txt", text);
  std::string masked = llama(true);
  masked.insert(masked.size() - 1, R"(, "eos_token_id": 7)");
  write("masked.json", masked);
  const std::vector<std::vector<std::string>> kinds = {
      {"--data", "a.bin:0.7", "b.bin:0.3", "--val-data", "v.bin", "--eval-every", "4"},
      {"--data", "t.txt", "--sample-every", "0"},
      {"--data", "a.bin", "b.bin", "--model", "masked.json", "--document-mask"},
      {"--sample-every", "0", "--eval-every", "7", "--eval-batches", "2"}};  // the stories
  for (size_t k = 0; k < kinds.size(); ++k) {
    SCOPED_TRACE(k);
    const auto with = [&](const std::string& out, std::vector<std::string> more) {
      more.insert(more.end(), kinds[k].begin(), kinds[k].end());
      std::vector<std::string> all = start(out, "llama.json", more);
      if (k == 3) {
        const auto data = std::find(all.begin(), all.end(), "--data");
        all.erase(data, data + 2);
      }
      return all;
    };
    const std::string name = "kind" + std::to_string(k);
    expect_code(0, run(with(name, {})));
    expect_code(kStopped, run(with(name + "b", {"--stop-after", "12"})));
    expect_code(kStopped, run(go_on(name + "b", {"--stop-after", "28"})));
    expect_code(0, run(go_on(name + "b")));
    expect_same(name + "b", steps_of(name));
    EXPECT_EQ(evaluations(name + "b"), evaluations(name));
    EXPECT_EQ(evaluations(name).empty(), k == 1 || k == 2);
  }
}

/// Report 8: the rate of every step, whatever was stopped where.
TEST_F(ResumeProgram, EveryScheduleGoesOn) {
  for (const char* schedule : {"cosine", "linear", "wsd", "constant"}) {
    const std::string name = schedule;
    expect_code(0, run(start(name, "gpt2.json", {"--schedule", schedule})));
    expect_code(kStopped, run(start(name + "2", "gpt2.json", {"--schedule", schedule, "--stop-after", "4"})));
    expect_code(kStopped, run(go_on(name + "2", {"--stop-after", "35"})));
    expect_code(0, run(go_on(name + "2")));
    expect_same(name + "2", steps_of(name));
  }
}

TEST_F(ResumeProgram, AFinishedOrStoppedRunHasNothingToDo) {
  make_half_a_run("run");
  // Not 75, after which a script starts the same command again.
  for (const char* step : {"15", "20"})
    expect_error(kUsage,
                 {std::string("--stop-after ") + step +
                  ": the checkpoint is already at step 20; give a later step or leave it out"},
                 go_on("run", {"--stop-after", step}));
  expect_code(0, run(go_on("run")));
  const std::string metrics = read("run/metrics.jsonl");
  expect_code(0, run(go_on("run")));
  for (const char* step : {"15", "40", "50"}) expect_code(0, run(go_on("run", {"--stop-after", step})));
  EXPECT_EQ(read("run/metrics.jsonl"), metrics);
  EXPECT_EQ(steps_of("run").size(), 40U);
  // The record of the configuration is the run's, not that of one start.
  EXPECT_EQ(read("run/config.toml").find("stop-after"), std::string::npos);
  EXPECT_NE(read("run/config.toml").find("resume = \"never\""), std::string::npos);
}

/// A run that ended before its first checkpoint was told to start again with --resume auto: that command alone must do.
TEST_F(ResumeProgram, ABegunRunWithoutACheckpointBeginsAgainWithItsOwnSettings) {
  expect_code(0, run(start("straight")));
  expect_code(kStopped, run(start("run", "llama.json", {"--stop-after", "3"})));
  fs::remove_all(path("run/checkpoints"));
  const std::string settings = read("run/config.toml");
  const Outcome got = run(go_on("run"));
  expect_code(0, got);
  EXPECT_NE(
      got.output.find("no checkpoint yet in run: begins at step 0 with the settings of run/config.toml\n"),
      std::string::npos)
      << got.output;
  expect_same("run", steps_of("straight"));
  EXPECT_EQ(read("run/config.toml"), settings);
  // The same command once more, and one that changes something.
  for (const std::string rate : {"0.01", "0.02"}) {
    fs::remove_all(path("run/checkpoints"));
    const Outcome again = run(go_on("run", {"--lr", rate, "--tokens", "1280", "--stop-after", "2"}));
    expect_code(kStopped, again);
    EXPECT_EQ(again.output.find("config.toml, but for lr: 0.02 instead of 0.01\n") != std::string::npos,
              rate == "0.02")
        << again.output;
  }
  EXPECT_NE(steps_of("run")[1]["weights_hash"], steps_of("straight")[1]["weights_hash"]);
  EXPECT_NE(read("run/config.toml").find("lr = 0.02\n"), std::string::npos);
}

TEST_F(ResumeProgram, KeepAndKeepEvery) {
  expect_code(kStopped,
              run(start("run", "llama.json",
                        {"--save-every", "5", "--keep", "2", "--keep-every", "10", "--stop-after", "25"})));
  EXPECT_EQ(checkpoints("run"),
            (std::vector<std::string>{"step_00000010", "step_00000020", "step_00000025"}));
  expect_code(0, run(go_on("run", {"--keep", "1"})));
  EXPECT_EQ(checkpoints("run"),
            (std::vector<std::string>{"step_00000010", "step_00000020", "step_00000030", "step_00000040"}));
  EXPECT_EQ(read("run/checkpoints/latest"), "step_00000040\n");
}

/// Report 9.
TEST_F(ResumeProgram, AnotherGlobalBatchFromAStepOn) {
  // A warm-up that would be too long for 40 of the smaller steps.
  expect_code(kStopped, run(start("run", "llama.json", {"--stop-after", "20", "--warmup-steps", "30"})));
  expect_error(kCheckpoint, {"global-batch: 4 in the checkpoint, 2 here"},
               go_on("run", {"--global-batch", "2"}));
  expect_code(kStopped,
              run(go_on("run", {"--global-batch", "2", "--override", "global-batch", "--stop-after", "30"})));
  expect_code(0, run(go_on("run")));
  expect_code(0, run(start("straight", "llama.json", {"--warmup-steps", "30"})));
  const std::vector<Json> straight = steps_of("straight"), steps = steps_of("run");
  ASSERT_EQ(steps.size(), 60U);  // 20 of 4, 40 of 2: the same tokens
  std::map<int64_t, double> rate;
  for (const Json& record : straight) rate[record["tokens"]] = record["lr"];
  int64_t samples = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    const int64_t batch = i < 20 ? 4 : 2;
    samples += batch;
    EXPECT_EQ(steps[i]["step"], i + 1);
    EXPECT_EQ(steps[i]["samples"], samples);
    EXPECT_EQ(steps[i]["tokens"], samples * 8);
    EXPECT_EQ(steps[i]["global_batch"], batch);
    if (rate.count(samples * 8) != 0) {
      EXPECT_EQ(steps[i]["lr"], rate[samples * 8]) << i;
    }
  }
  EXPECT_EQ(steps.back()["tokens"], straight.back()["tokens"]);
  EXPECT_EQ(state("run", "step_00000060")["changes"].size(), 1U);
}

// ---- Weights of a checkpoint -----------------------------------------------------------------------------------------

TEST_F(ResumeProgram, FromACheckpointsWeightsWithDataFreshOrContinued) {
  make_half_a_run("run");
  const std::string checkpoint = "run/checkpoints/step_00000020";
  const auto from = [&](const std::string& out, const std::string& begin) {
    return start(out, checkpoint, {"--init-from", checkpoint, "--data-start", begin, "--steps", "30"});
  };
  expect_code(0, run(start("straight")));
  expect_code(0, run(from("continued", "continue")));
  expect_code(0, run(from("fresh", "fresh")));
  const Json straight21 = steps_of("straight")[20], straight1 = steps_of("straight")[0];
  const Json continued = steps_of("continued")[0], fresh = steps_of("fresh")[0];
  // The same weights see the batch the straight run saw next: the same loss to the bit.
  EXPECT_EQ(continued["loss"], straight21["loss"]);
  EXPECT_NE(fresh["loss"], continued["loss"]);
  EXPECT_EQ(continued["samples"], 4);
  EXPECT_EQ(fresh["lr"], continued["lr"]);
  EXPECT_EQ(state("continued", "step_00000030")["first_sample"], 80);
  EXPECT_EQ(state("fresh", "step_00000030")["first_sample"], 0);
  // It is kept over a resume.
  expect_code(kStopped, run(start("again", checkpoint,
                                  {"--init-from", checkpoint, "--data-start", "continue", "--steps", "30",
                                   "--stop-after", "7"})));
  expect_code(0, run(go_on("again")));
  expect_same("again", steps_of("continued"));
  // Another data set has no such place.
  write_shard("b.bin", std::vector<uint16_t>(80 * 8 + 1, 7), 20240520, 1);
  std::vector<std::string> other = from("other", "continue");
  *(std::find(other.begin(), other.end(), "a.bin")) = "b.bin";
  expect_error(kCheckpoint, {"--data-start continue", "b.bin"}, other);
  // A damaged one gives no weights.
  flip(checkpoint + "/model.safetensors");
  expect_error(kCheckpoint, {"model.safetensors", "tensor "}, from("damaged", "fresh"));
}

TEST_F(ResumeProgram, ABranchLeavesTheRunItComesFromAlone) {
  make_half_a_run("run");
  expect_error(kCheckpoint, {"later checkpoint", "20"}, {"--resume", "run/checkpoints/step_00000010"});
  expect_code(0, run({"--resume", "run/checkpoints/step_00000010", "--out", "branch"}));
  EXPECT_EQ(checkpoints("run").size(), 2U);
  const std::vector<Json> steps = steps_of("branch");
  ASSERT_EQ(steps.size(), 30U);
  EXPECT_EQ(steps[0]["step"], 11);
  expect_code(0, run({"--resume", "run"}));  // the run itself
  EXPECT_EQ(steps_of("run").back()["weights_hash"], steps.back()["weights_hash"]);
}

}  // namespace
}  // namespace kinoe
