// Defaults that depend on the model and the machine.
#include <gtest/gtest.h>

#include "trainer/config.h"

namespace kinoe {
namespace {

const GpuFacts kHopper = {.built = true, .count = 1, .compute_capability = 90, .name = "NVIDIA H200"};
const RunFacts kTiny = {.parameters = 858'880, .max_positions = 256};
const RunFacts kGpt2 = {.parameters = 124'439'808,
                        .max_positions = 1024,
                        .byte_tokens = false,
                        .has_validation = true,
                        .gpus = kHopper};

template <class Config>
std::string refusal(Config config, const RunFacts& facts) {
  try {
    resolve(config, facts);
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ExitCode::usage) << error.what();
    return error.what();
  }
  return "";
}

#define EXPECT_CONTAINS(text, part) \
  EXPECT_NE(std::string(text).find(part), std::string::npos) << "'" << (text) << "'"

TEST(ConfigResolve, OptionsThatNeedAnother) {
  RunConfig c;
  c.data_start = "continue";
  EXPECT_CONTAINS(refusal(c, kTiny), "--init-from");
  c.init_from = "run";
  EXPECT_EQ(refusal(c, kTiny), "");
}

/// The steps of a run that goes on with another batch are counted anew later: its warm-up is measured against its schedule.
TEST(ConfigResolve, WarmUpOfARunThatGoesOn) {
  RunConfig c;
  c.steps = 10;
  c.global_batch = 1;
  c.warmup_tokens = 5000;
  RunFacts facts = kTiny;
  EXPECT_CONTAINS(refusal(c, facts), "longer than the run's");
  facts.schedule_tokens = 5000;
  EXPECT_EQ(refusal(c, facts), "");
  facts.schedule_tokens = 4999;
  EXPECT_CONTAINS(refusal(c, facts), "longer than the run's");
}

TEST(ConfigResolve, TinyModelOnACpu) {
  RunConfig c;
  const auto notes = resolve(c, kTiny);
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_CONTAINS(notes[0], "Computing on the CPU");
  EXPECT_EQ(c.seq_len, 256);
  EXPECT_EQ(c.global_batch, 16);
  EXPECT_EQ(c.micro_batch, 16);
  EXPECT_EQ(c.steps, 1000);
  EXPECT_EQ(c.tokens_per_step(), 4096);
  EXPECT_EQ(c.total_tokens(), 4'096'000);
  EXPECT_EQ(c.warmup_tokens, 204'800);
  EXPECT_EQ(c.lr, 2e-3);
  EXPECT_EQ(c.eval_every, 100);
  EXPECT_EQ(c.sample_every, 100);
  EXPECT_EQ(c.save_every, 100);
  EXPECT_EQ(c.device, DeviceChoice::cpu);
  EXPECT_EQ(c.dtype, DType::f32);
}

TEST(ConfigResolve, Gpt2OnAGpu) {
  RunConfig c;
  EXPECT_TRUE(resolve(c, kGpt2).empty());
  EXPECT_EQ(c.seq_len, 1024);
  EXPECT_EQ(c.global_batch, 512);
  EXPECT_EQ(c.micro_batch, 16);
  EXPECT_EQ(c.lr, 6e-4);
  EXPECT_EQ(c.warmup_tokens, 1000 * 524288 / 20);
  EXPECT_EQ(c.sample_every, 0);
  EXPECT_EQ(c.device, DeviceChoice::cuda);
  EXPECT_EQ(c.dtype, DType::bf16);
}

TEST(ConfigResolve, BySizeOfModel) {
  for (const auto& [parameters, lr, tokens] :
       std::vector<std::tuple<int64_t, double, int64_t>>{{9'999'999, 2e-3, 4096},
                                                         {10'000'000, 6e-4, 524288},
                                                         {354'823'168, 3e-4, 524288},
                                                         {774'030'080, 2.5e-4, 524288},
                                                         {1'235'814'400, 2e-4, 1048576},
                                                         {3'212'749'824, 1.6e-4, 1048576},
                                                         {8'030'261'248, 1.2e-4, 2097152},
                                                         {405'000'000'000, 1.2e-4, 2097152}}) {
    RunConfig c;
    RunFacts facts = kGpt2;
    facts.parameters = parameters;
    facts.max_positions = 131072;
    resolve(c, facts);
    EXPECT_EQ(c.seq_len, 1024);
    EXPECT_EQ(c.lr, lr) << parameters;
    EXPECT_EQ(c.tokens_per_step(), tokens) << parameters;
  }
}

TEST(ConfigResolve, WhatTheUserSaidStays) {
  RunConfig c;
  c.seq_len = 100;
  c.global_batch = 7;
  c.micro_batch = 3;
  c.lr = 1.0;
  c.steps = 5;
  c.warmup_tokens = 0;
  c.save_every = 0;
  c.eval_every = 3;
  c.sample_every = 0;
  c.device = DeviceChoice::cpu;
  RunConfig before = c;
  EXPECT_TRUE(resolve(c, kTiny).empty());
  before.dtype = DType::f32;
  EXPECT_EQ(c, before);
}

TEST(ConfigResolve, AMicroBatchIsAtMostTheGlobalBatch) {
  RunConfig c;
  c.global_batch = 8;
  c.micro_batch = 100;
  c.device = DeviceChoice::cpu;
  RunConfig resumed = c;
  const std::vector<std::string> notes = resolve(c, kTiny);
  EXPECT_EQ(c.micro_batch, 8);
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_NE(notes[0].find("micro-batch of 100 is more than the global batch: 8"), std::string::npos);
  RunFacts going_on = kTiny;
  going_on.schedule_tokens = 1'000'000;
  resolve(resumed, going_on);
  EXPECT_EQ(resumed.micro_batch, 100) << "what a checkpoint recorded may be part of its bits";
}

TEST(ConfigResolve, TokensBecomeWholeSteps) {
  for (const auto& [tokens, steps] : {std::pair<int64_t, int64_t>{1, 1}, {4096, 1}, {4097, 2}, {40960, 10}}) {
    RunConfig c;
    c.tokens = tokens;
    resolve(c, kTiny);
    EXPECT_EQ(c.steps, steps) << tokens;
    EXPECT_EQ(c.tokens, std::nullopt);
    EXPECT_EQ(c.save_every, 1);
  }
}

TEST(ConfigResolve, TheDefaultWarmupIsAtMost375MTokens) {
  RunConfig c;
  c.tokens = 100'000'000'000;
  resolve(c, kGpt2);
  EXPECT_EQ(c.warmup_tokens, 375'000'000);
}

TEST(ConfigResolve, WarmupStepsBecomeTokens) {
  RunConfig c;
  c.warmup_steps = 10;
  resolve(c, kTiny);
  EXPECT_EQ(c.warmup_tokens, 40960);
  EXPECT_EQ(c.warmup_steps, std::nullopt);
  RunConfig all;
  all.warmup_steps = 1000;
  EXPECT_EQ(refusal(all, kTiny), "");
}

TEST(ConfigResolve, Idempotent) {
  for (const RunFacts& facts : {kTiny, kGpt2}) {
    RunConfig once;
    once.tokens = 10'000'000;
    once.warmup_steps = 2;
    resolve(once, facts);
    RunConfig twice = once;
    EXPECT_TRUE(resolve(twice, facts).empty());
    EXPECT_EQ(twice, once);
    EXPECT_EQ(run_config_from_toml(to_toml(once), "t"), once);
  }
}

TEST(ConfigResolve, WhatCannotWorkIsRefused) {
  RunConfig c;
  c.seq_len = 257;
  EXPECT_CONTAINS(refusal(c, kTiny), "--seq-len 257 is beyond the model's 256 positions");
  c = {};
  c.warmup_steps = 1001;
  EXPECT_CONTAINS(refusal(c, kTiny), "longer than the run's 1000 steps");
  c = {};
  c.warmup_steps = INT64_MAX;
  EXPECT_CONTAINS(refusal(c, kTiny), "longer than the run's 1000 steps");
  c = {};
  c.warmup_tokens = 4'096'001;
  EXPECT_CONTAINS(refusal(c, kTiny), "longer than the run's 4096000 tokens");
  c = {};
  c.global_batch = INT64_MAX;
  EXPECT_CONTAINS(refusal(c, kTiny), "above 2^63 - 1");
  c = {};
  c.steps = INT64_MAX;
  EXPECT_CONTAINS(refusal(c, kTiny), "above 2^63 - 1");
  c = {};
  c.tokens = INT64_MAX;
  EXPECT_CONTAINS(refusal(c, kTiny), "above 2^63 - 1");  // rounded up to a whole step
  c = {};
  c.adam_state = DType::bf16;
  EXPECT_CONTAINS(refusal(c, kTiny), "--adam-state bf16: the CPU");
  EXPECT_EQ(refusal(c, kGpt2), "");
  c = {};
  c.dtype = DType::bf16;
  EXPECT_CONTAINS(refusal(c, kTiny), "--dtype bf16: the CPU");
  c = {};
  c.eval_every = 10;
  RunFacts blind = kTiny;
  blind.has_validation = false;
  EXPECT_CONTAINS(refusal(c, blind), "give --val-data");
  c = {};
  c.sample_every = 10;
  EXPECT_CONTAINS(refusal(c, kGpt2), "--sample-every 10");
}

TEST(ConfigResolve, WithoutValidationDataNothingIsEvaluated) {
  RunConfig c;
  RunFacts blind = kTiny;
  blind.has_validation = false;
  resolve(c, blind);
  EXPECT_EQ(c.eval_every, 0);
}

TEST(ConfigResolve, AGlobalBatchThatTheMicroBatchDoesNotDivideIsLegal) {
  RunConfig c;
  c.global_batch = 10;
  c.micro_batch = 16;
  EXPECT_EQ(refusal(c, kTiny), "");
  c.micro_batch = 3;
  EXPECT_EQ(refusal(c, kTiny), "");
}

/// What can be done about it is not refused later.
TEST(ConfigResolve, MoreRanksThanMicroBatchesAreSaidWithWhatHelps) {
  for (const char* mode : {"run", "topology"})
    for (const int64_t schedule_tokens : {0, 40960}) {
      RunFacts facts = kTiny;
      facts.ranks = 4;
      facts.schedule_tokens = schedule_tokens;
      RunConfig c;
      c.device = DeviceChoice::cpu;
      c.determinism = mode;
      c.global_batch = 4;
      c.micro_batch = 2;
      const auto notes = resolve(c, facts);
      ASSERT_EQ(notes.size(), 1U);
      EXPECT_CONTAINS(notes[0], "is work for 2 of 4 ranks; ");
      const bool recorded = c.determinism == "topology" && schedule_tokens > 0;
      EXPECT_CONTAINS(notes[0], recorded ? "only --override micro-batch changes that, and the bits differ"
                                         : "a smaller --micro-batch gives the others some");
    }
}

TEST(ConfigResolve, ALargeModelOnACpuIsWarnedAbout) {
  RunFacts facts = kGpt2;
  facts.gpus = {};
  RunConfig c;
  c.device = DeviceChoice::cpu;
  const auto notes = resolve(c, facts);
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_CONTAINS(notes[0], "524288 tokens");
  EXPECT_EQ(c.micro_batch, 1);
  c = {};
  c.device = DeviceChoice::cpu;
  c.global_batch = 8;
  EXPECT_TRUE(resolve(c, facts).empty());
}

TEST(ConfigResolve, Device) {
  const auto demand = [](const GpuFacts& gpus) {
    try {
      choose_device(DeviceChoice::cuda, gpus);
    } catch (const Error& error) {
      EXPECT_EQ(error.code, ExitCode::usage);
      return std::string(error.what());
    }
    return std::string();
  };
  const GpuFacts none = {.built = true};
  const GpuFacts turing = {.built = true, .count = 1, .compute_capability = 75, .name = "Tesla T4"};
  EXPECT_CONTAINS(demand({}), "--device cuda: this build has no CUDA");
  EXPECT_CONTAINS(demand(none), "no GPU is visible");
  EXPECT_CONTAINS(demand(turing), "Tesla T4 has compute capability 7.5, at least 8.0");
  GpuFacts old_driver = none;
  old_driver.problem = "the NVIDIA driver is for CUDA 11.4, this program needs 13.0";
  EXPECT_CONTAINS(demand(old_driver),
                  "--device cuda: the NVIDIA driver is for CUDA 11.4, this program needs 13.0");
  EXPECT_CONTAINS(choose_device(DeviceChoice::automatic, old_driver).note,
                  "Computing on the CPU: the NVIDIA driver is for CUDA 11.4");
  EXPECT_CONTAINS(choose_device(DeviceChoice::automatic, turing).note, "Tesla T4 has compute capability 7.5");
  EXPECT_EQ(demand(kHopper), "");
  EXPECT_EQ(choose_device(DeviceChoice::cuda, kHopper).backend, Backend::cuda);
  for (const GpuFacts& gpus : {GpuFacts{}, none, turing}) {
    const DeviceDecision decision = choose_device(DeviceChoice::automatic, gpus);
    EXPECT_EQ(decision.backend, Backend::cpu);
    EXPECT_CONTAINS(decision.note, "Computing on the CPU: ");
  }
  EXPECT_EQ(choose_device(DeviceChoice::automatic, kHopper).backend, Backend::cuda);
  EXPECT_EQ(choose_device(DeviceChoice::automatic, kHopper).note, "");
  EXPECT_EQ(choose_device(DeviceChoice::cpu, kHopper).backend, Backend::cpu);
  EXPECT_EQ(choose_device(DeviceChoice::cpu, kHopper).note, "");
}

TEST(ConfigResolve, Dtype) {
  EXPECT_EQ(choose_dtype(std::nullopt, Backend::cpu), DType::f32);
  EXPECT_EQ(choose_dtype(DType::f32, Backend::cpu), DType::f32);
  EXPECT_EQ(choose_dtype(std::nullopt, Backend::cuda), DType::bf16);
  EXPECT_EQ(choose_dtype(DType::f32, Backend::cuda), DType::f32);
  EXPECT_THROW(choose_dtype(DType::bf16, Backend::cpu), Error);
}

TEST(ConfigResolve, Eval) {
  EvalConfig c;
  resolve(c, kTiny);
  EXPECT_EQ(c.seq_len, 256);
  EXPECT_EQ(c.micro_batch, 16);
  EXPECT_EQ(c.device, DeviceChoice::cpu);
  EXPECT_EQ(c.dtype, DType::f32);
  c = {};
  c.seq_len = 300;
  EXPECT_CONTAINS(refusal(c, kTiny), "positions");
}

}  // namespace
}  // namespace kinoe
