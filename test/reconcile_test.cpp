// Which settings of a run that goes on may differ from the recorded ones, and what follows from those that do.
#include <gtest/gtest.h>

#include <algorithm>

#include "test/faulty_files.h"
#include "trainer/resume.h"
#include "trainer/schedule.h"

namespace kinoe {
namespace {

/// A resolved configuration.
RunConfig config_40() {
  RunConfig c;
  c.steps = 40;
  c.global_batch = 4;
  c.micro_batch = 2;
  c.seq_len = 16;
  c.lr = 1e-3;
  c.warmup_tokens = 5 * 64;
  c.save_every = 10;
  c.eval_every = c.sample_every = 0;
  c.device = DeviceChoice::cpu;
  c.dtype = DType::f32;
  return c;
}

/// The state after `step` steps of it.
TrainingState state_at(int64_t step, const RunConfig& c = config_40()) {
  TrainingState state;
  state.step = step;
  state.samples = step * *c.global_batch;
  state.tokens = step * c.tokens_per_step();
  state.schedule_tokens = c.total_tokens();
  state.settings = settings_of(c);
  state.data.seq_len = *c.seq_len;
  state.data.sources = {{"text", 1, 1000, 62, {{"a.txt", "text", 1000, 1000, 62, "0123"}}}};
  return state;
}

bool has(const std::vector<std::string>& notes, const std::string& part) {
  return std::any_of(notes.begin(), notes.end(),
                     [&](const std::string& note) { return note.find(part) != std::string::npos; });
}

TEST(Reconcile, TheSameSettingsPass) {
  RunConfig config = config_40();
  TrainingState state = state_at(20);
  std::vector<std::string> notes;
  reconcile(config, state, notes);
  EXPECT_TRUE(notes.empty());
  EXPECT_TRUE(state.changes.empty());
  EXPECT_EQ(config.steps, 40);
  EXPECT_EQ(state.schedule_tokens, 40 * 64);
}

struct Change {
  const char* name;  // as --override has it
  void (*apply)(RunConfig&);
};

const std::vector<Change>& changes_of_numbers() {
  static const std::vector<Change> changes = {
      {"steps", [](RunConfig& c) { c.steps = 50; }},
      {"seed", [](RunConfig& c) { c.seed = 2; }},
      {"lr", [](RunConfig& c) { c.lr = 2e-3; }},
      {"schedule", [](RunConfig& c) { c.schedule = "linear"; }},
      {"warmup-tokens", [](RunConfig& c) { c.warmup_tokens = 640; }},
      {"min-lr-frac", [](RunConfig& c) { c.min_lr_frac = 0.2; }},
      {"weight-decay", [](RunConfig& c) { c.weight_decay = 0; }},
      {"beta1", [](RunConfig& c) { c.beta1 = 0.8; }},
      {"beta2", [](RunConfig& c) { c.beta2 = 0.99; }},
      {"eps", [](RunConfig& c) { c.eps = 1e-6; }},
      {"grad-clip", [](RunConfig& c) { c.grad_clip = 0.5; }},
      {"adam-state", [](RunConfig& c) { c.adam_state = DType::bf16; }},
      {"dtype", [](RunConfig& c) { c.dtype = DType::bf16; }},
      {"document-mask", [](RunConfig& c) { c.document_mask = true; }},
      {"determinism", [](RunConfig& c) { c.determinism = "topology"; }},
      {"global-batch", [](RunConfig& c) { c.global_batch = 8; }}};
  return changes;
}

TEST(Reconcile, Row42WhatDecidesTheNumbersNeedsOverride) {
  for (const Change& change : changes_of_numbers()) {
    RunConfig config = config_40();
    change.apply(config);
    TrainingState state = state_at(20);
    const auto value = [&](const RunConfig& of) {
      for (const auto& [name, text] : settings_of(of))
        if (name == change.name) return text;
      return std::string("not set");
    };
    const std::string from = value(config_40()), to = value(config);
    ASSERT_NE(from, to) << change.name;
    std::vector<std::string> notes;
    expect_error(ExitCode::checkpoint,
                 {cat(change.name, ": ", from, " in the checkpoint, ", to, " here"), "--override"},
                 [&] { reconcile(config, state, notes); });
    EXPECT_TRUE(state.changes.empty());
    config.override_ = {"data"};  // another name does not help
    expect_error(ExitCode::checkpoint, {change.name}, [&] { reconcile(config, state, notes); });
    config.override_ = {change.name};
    reconcile(config, state, notes);
    ASSERT_EQ(state.changes.size(), 1U) << change.name;
    EXPECT_EQ(state.changes[0].step, 20);
    EXPECT_EQ(state.changes[0].name, change.name);
    EXPECT_EQ(state.changes[0].from, from);
    EXPECT_EQ(state.changes[0].to, to);
    EXPECT_TRUE(has(notes, cat("from step 21 on ", change.name, " is ", to, ", was ", from)));
  }
}

TEST(Reconcile, AllDifferencesAreListedAtOnce) {
  RunConfig config = config_40();
  config.lr = 2e-3;
  config.beta1 = 0.8;
  config.eps = 1e-6;
  config.override_ = {"eps"};
  TrainingState state = state_at(20);
  std::vector<std::string> notes;
  expect_error(ExitCode::checkpoint,
               {"lr: 0.001 in the checkpoint, 0.002 here; beta1: 0.9 in the checkpoint, 0.8 here"},
               [&] { reconcile(config, state, notes); });
}

TEST(Reconcile, Row41WhatChangesNoNumbersIsFree) {
  RunConfig config = config_40();
  config.save_every = 3;
  config.keep = 2;
  config.keep_every = 100;
  config.eval_every = 5;
  config.eval_batches = 1;
  config.log_format = "json";
  config.val_data = {"v.txt"};
  config.out = "elsewhere";
  config.stop_after = 30;
  TrainingState state = state_at(20);
  std::vector<std::string> notes;
  reconcile(config, state, notes);
  EXPECT_TRUE(notes.empty()) << notes[0];
  EXPECT_TRUE(state.changes.empty());
  config.micro_batch = 4;  // the same numbers but for the last bits
  reconcile(config, state, notes);
  EXPECT_TRUE(has(notes, "micro-batch is 4, was 2"));
}

TEST(Reconcile, Row41TheMicroBatchIsPartOfTheResultInTopologyMode) {
  RunConfig before = config_40(), config = before;
  before.determinism = config.determinism = "topology";
  config.micro_batch = 4;
  TrainingState state = state_at(20, before);
  std::vector<std::string> notes;
  expect_error(ExitCode::checkpoint, {"micro-batch: 2 in the checkpoint, 4 here", "--override"},
               [&] { reconcile(config, state, notes); });
  config.override_ = {"micro-batch"};
  reconcile(config, state, notes);
  ASSERT_EQ(state.changes.size(), 1U);
  EXPECT_EQ(state.changes[0].name, "micro-batch");
  EXPECT_EQ(notes, std::vector<std::string>{"from step 21 on micro-batch is 4, was 2"});
  // From one mode to the other the micro-batch is named where it counts from then on.
  config.determinism = "run";
  config.override_ = {"determinism"};
  state = state_at(20, before);
  notes.clear();
  reconcile(config, state, notes);
  EXPECT_EQ(state.changes.size(), 1U);
  EXPECT_TRUE(has(notes, "micro-batch is 4, was 2: sums"));
}

TEST(Reconcile, Row41OtherRanksAndStagesAreFreeAndSaid) {
  for (const char* mode : {"run", "topology"}) {
    RunConfig config = config_40();
    config.determinism = mode;
    TrainingState state = state_at(20, config);
    state.ranks = 2;
    std::vector<std::string> notes;
    const std::string numbers =
        config.determinism == "run" ? ": sums are added in another order" : ": the same numbers";
    reconcile_ranks(config, state, 2, notes);
    EXPECT_TRUE(notes.empty());
    reconcile_ranks(config, state, 3, notes);
    EXPECT_TRUE(has(notes, "saved by 2 ranks, going on with 3" + numbers));
    EXPECT_EQ(state.ranks, 3);
    notes.clear();
    config.zero = 0;
    reconcile(config, state, notes);
    EXPECT_TRUE(notes.empty());
    reconcile_ranks(config, state, 3, notes);
    ASSERT_EQ(notes.size(), 1U);
    EXPECT_TRUE(notes[0].starts_with("zero is ") && has(notes, numbers)) << notes[0];
    EXPECT_TRUE(state.changes.empty());
    // They are others for another reason, which has been said.
    notes.clear();
    config.micro_batch = 4;
    config.lr = 0.5;
    config.override_ = {"micro-batch", "lr"};
    reconcile(config, state, notes);
    reconcile_ranks(config, state, 2, notes);
    EXPECT_TRUE(has(notes, "saved by 3 ranks, going on with 2"));
    EXPECT_FALSE(has(notes, "the same numbers"));
    // But those of the next start are the same again.
    state.step += 5;
    state.settings = settings_of(config);
    notes.clear();
    reconcile_ranks(config, state, 3, notes);
    EXPECT_TRUE(has(notes, "saved by 2 ranks, going on with 3" + numbers));
    notes.clear();
    config.device = DeviceChoice::cuda;
    reconcile_ranks(config, state, 2, notes);
    EXPECT_FALSE(has(notes, "the same numbers"));
  }
}

/// Without this a run that goes on with more ranks would have another default, and in topology mode be refused.
TEST(Reconcile, Row41TheRecordedMicroBatchIsKeptWithOtherRanks) {
  const RunConfig before = config_40();
  for (const int ranks : {1, 2, 3, 8}) {
    RunConfig config = resumed_config(settings_of(before), "state.json", {});
    RunFacts facts;
    facts.parameters = 1000;
    facts.max_positions = 64;
    facts.ranks = ranks;
    facts.schedule_tokens = before.total_tokens();
    resolve(config, facts);
    EXPECT_EQ(config.micro_batch, before.micro_batch);
    TrainingState state = state_at(20);
    std::vector<std::string> notes;
    reconcile(config, state, notes);
    EXPECT_TRUE(notes.empty()) << notes[0];
  }
}

TEST(Reconcile, ACheckpointOlderThanAnOptionHadItsDefault) {
  TrainingState state = state_at(20);
  std::erase_if(state.settings, [](const auto& s) { return s.first == "determinism" || s.first == "zero"; });
  RunConfig config = config_40();
  std::vector<std::string> notes;
  reconcile(config, state, notes);
  EXPECT_TRUE(notes.empty()) << notes[0];
  config.determinism = "topology";
  expect_error(ExitCode::checkpoint, {"determinism: \"run\" in the checkpoint, \"topology\" here"},
               [&] { reconcile(config, state, notes); });
}

TEST(Reconcile, TheLengthOfSequencesNeverChanges) {
  RunConfig config = config_40();
  config.seq_len = 8;
  TrainingState state = state_at(20);
  std::vector<std::string> notes;
  expect_error(ExitCode::checkpoint, {"seq-len: 16 in the checkpoint, 8 here", "--init-from"},
               [&] { reconcile(config, state, notes); });
  config.override_ = {"seq-len"};
  expect_error(ExitCode::usage, {"--override seq-len", "--init-from"},
               [&] { reconcile(config, state, notes); });
}

TEST(Reconcile, HowARunBeganCannotBeSaidLater) {
  RunConfig config = config_40();
  config.init_from = "elsewhere";
  config.override_ = {"data"};
  TrainingState state = state_at(20);
  std::vector<std::string> notes;
  expect_error(ExitCode::checkpoint, {"init-from: not set in the checkpoint, \"elsewhere\" here"},
               [&] { reconcile(config, state, notes); });
  config.data_start = "continue";
  state = state_at(20, config);
  reconcile(config, state, notes);  // the same command line once more
  EXPECT_TRUE(state.changes.empty());
  config.data_start = "fresh";
  expect_error(ExitCode::checkpoint, {"data-start", "continue", "fresh"},
               [&] { reconcile(config, state, notes); });
}

TEST(Reconcile, OverrideKnowsItsNames) {
  RunConfig config = config_40();
  TrainingState state = state_at(20);
  std::vector<std::string> notes;
  config.override_ = {"lr", "schedul"};
  expect_error(ExitCode::usage, {"--override schedul", "schedule"}, [&] { reconcile(config, state, notes); });
  config.override_ = {"model"};
  expect_error(ExitCode::usage, {"--override model"}, [&] { reconcile(config, state, notes); });
  config.override_ = {"lr", "tokens", "warmup-steps", "data"};
  config.steps = 60;
  config.warmup_tokens = 0;
  reconcile(config, state, notes);
  EXPECT_EQ(state.changes.size(), 2U);
}

/// Report 9: at a step boundary tokens and learning rate are continuous, and the end stays where it was.
TEST(Reconcile, AnotherGlobalBatchKeepsTokensAndSchedule) {
  const RunConfig before = config_40();
  for (const int64_t batch : {1, 2, 3, 8, 100}) {
    RunConfig config = before;
    config.global_batch = batch;
    config.override_ = {"global-batch"};
    TrainingState state = state_at(20);
    std::vector<std::string> notes;
    reconcile(config, state, notes);
    EXPECT_EQ(state.schedule_tokens, before.total_tokens());
    EXPECT_EQ(state.tokens, 20 * 64);
    EXPECT_EQ(state.samples, 80);
    const int64_t left = before.total_tokens() - state.tokens, per_step = batch * 16;
    EXPECT_EQ(*config.steps, 20 + (left + per_step - 1) / per_step);
    EXPECT_GE(state.tokens + (*config.steps - 20) * per_step, state.schedule_tokens);
    EXPECT_LT(state.tokens + (*config.steps - 21) * per_step, state.schedule_tokens);
    EXPECT_TRUE(has(notes, cat("at step ", *config.steps)));
    // The rate is a function of tokens: equal wherever both runs pass the same count.
    const Schedule schedule{ScheduleKind::cosine, *before.lr, 0.1, *before.warmup_tokens,
                            state.schedule_tokens};
    const Schedule straight{ScheduleKind::cosine, *before.lr, 0.1, *before.warmup_tokens,
                            before.total_tokens()};
    EXPECT_EQ(schedule, straight);

    // Going on once more needs no override, and nothing is counted anew.
    TrainingState later = state;
    later.step = 21;
    later.samples += batch;
    later.tokens += per_step;
    later.settings = settings_of(config);
    RunConfig again = config;
    again.override_.clear();
    notes.clear();
    reconcile(again, later, notes);
    EXPECT_EQ(again.steps, config.steps);
    EXPECT_TRUE(notes.empty());
    EXPECT_EQ(later.changes.size(), 1U);
  }
}

TEST(Reconcile, MoreOrFewerStepsMoveTheEndOfTheSchedule) {
  RunConfig config = config_40();
  config.override_ = {"steps"};
  std::vector<std::string> notes;
  for (const int64_t steps : {20, 30, 80}) {
    TrainingState state = state_at(20);
    config.steps = steps;
    reconcile(config, state, notes);
    EXPECT_EQ(state.schedule_tokens, steps * 64);
    EXPECT_EQ(config.steps, steps);
  }
  TrainingState state = state_at(20);
  config.steps = 19;
  expect_error(ExitCode::checkpoint, {"--steps 19", "20"}, [&] { reconcile(config, state, notes); });
}

TEST(Reconcile, OtherDataIsDescribed) {
  RunConfig config = config_40();
  TrainingState state = state_at(20);
  DataState now = state.data;
  std::vector<std::string> notes;
  now.sources[0].files[0].path = "moved/a.txt";  // the same bytes elsewhere
  reconcile_data(config, state, now, notes);
  EXPECT_TRUE(notes.empty());
  EXPECT_EQ(state.data, now);
  now.sources[0].files[0].bytes = now.sources[0].files[0].tokens = 999;
  expect_error(ExitCode::checkpoint, {"training data", "1000 in the checkpoint, 999 here", "--override"},
               [&] { reconcile_data(config, state, now, notes); });
  now = state.data;
  now.sources[0].files[0].fingerprint = "4567";
  expect_error(ExitCode::checkpoint, {"0123", "4567"}, [&] { reconcile_data(config, state, now, notes); });
  config.override_ = {"data"};
  reconcile_data(config, state, now, notes);
  EXPECT_EQ(state.data, now);
  ASSERT_EQ(state.changes.size(), 1U);
  EXPECT_EQ(state.changes[0].name, "data");
  EXPECT_TRUE(has(notes, "from step 21 on the data is other"));
  EXPECT_EQ(state.samples, 80);
}

TEST(ResumedConfig, RecordedValuesStayAndWhatIsGivenReplacesThem) {
  RunConfig recorded = config_40();
  recorded.resume = "auto";
  recorded.override_ = {"lr"};
  recorded.stop_after = 20;
  recorded.dry_run = true;
  recorded.data = {"a.bin", "b.bin"};
  const RunConfig same = resumed_config(settings_of(recorded), "state.json", {});
  EXPECT_EQ(same, without_start_options(recorded));
  EXPECT_EQ(same.resume, "never");
  EXPECT_FALSE(same.stop_after);
  const RunConfig changed = resumed_config(
      settings_of(recorded), "state.json",
      {{"lr", {"0.5"}, "--lr"}, {"data", {"c.bin"}, "--data"}, {"tokens", {"6400"}, "--tokens"}});
  EXPECT_EQ(changed.lr, 0.5);
  EXPECT_EQ(changed.data, std::vector<std::string>{"c.bin"});
  EXPECT_EQ(changed.tokens, 6400);
  EXPECT_FALSE(changed.steps);
  EXPECT_EQ(changed.global_batch, 4);
  auto settings = settings_of(recorded);
  settings.emplace_back("flux-capacitor", "1");
  expect_error(ExitCode::checkpoint, {"state.json", "flux-capacitor"},
               [&] { resumed_config(settings, "state.json", {}); });
}

}  // namespace
}  // namespace kinoe
