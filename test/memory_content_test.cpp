// No result depends on what memory held before: a run reads nothing that it has not written. The memory of two runs differs in
// every byte beforehand (zeros in one; in the other NaN as floats, -1 as integers), their steps do not differ in any bit.
#include <gtest/gtest.h>

#include <cstring>

#include "test/model_harness.h"
#include "test/op_harness.h"

namespace kinoe {
namespace {

struct Trained {
  std::vector<StepState> steps;
  std::vector<double> evaluations;
  std::vector<float> gradient;  // of the last step
};

constexpr int64_t kBatch = 2, kLength = 40;
constexpr int kSteps = 3, kMicroBatches = 2;

Trained trained(const Context& ctx, const ModelConfig& config, DType dtype, const WorkShape& shape,
                uint8_t held) {
  ModelRun run(ctx, config, dtype, shape, {}, held);
  if (shape.document_mask) run.set_documents({{17, 23}, {1, 39}});
  const auto target_tokens = static_cast<double>(kMicroBatches * kBatch * kLength);
  Trained result;
  for (int step = 1; step <= kSteps; ++step) {
    for (int i = 0; i < kMicroBatches; ++i) {
      const auto seed = static_cast<uint64_t>(step * 10 + i);
      run.micro_batch(random_ids(kBatch * kLength, config.vocab_size, seed),
                      random_ids(kBatch * kLength, config.vocab_size, ~seed), i == 0, target_tokens);
    }
    run.optimizer->update(run.ctx, run.acts, 1e-3 * step, step, target_tokens);
    result.steps.push_back(run.state());
    result.gradient = run.host<float>(run.parameters.gradients.whole);
    begin_step(run.ctx, run.acts);
    forward(run.ctx, run.model, run.acts, run.hooks());
    head_loss(run.ctx, run.model, run.acts, run.hooks());
    result.evaluations.push_back(loss_of(run.state()));
  }
  return result;
}

void expect_no_traces(const Context& ctx, DType dtype) {
  struct Case {
    const char* name;
    ModelConfig config;
    Recompute recompute;
    bool document_mask;
  };
  for (const Case& c : {Case{"gpt2", small_gpt2(), Recompute::none, false},
                        Case{"gpt2, block", small_gpt2(), Recompute::block, true},
                        Case{"llama", small_llama(false), Recompute::none, true},
                        Case{"tied llama, light", small_llama(true), Recompute::light, false},
                        Case{"qwen2", small_qwen2(), Recompute::none, false},
                        Case{"qwen3", small_qwen3(), Recompute::none, false},
                        Case{"qwen3, light", small_qwen3(), Recompute::light, true}}) {
    SCOPED_TRACE(c.name);
    const WorkShape shape{.batch = kBatch,
                          .length = kLength,
                          .recompute = c.recompute,
                          .document_mask = c.document_mask,
                          .training = true,
                          .head_rows = 48};
    const Trained zeros = trained(ctx, with_heads_of_64(c.config), dtype, shape, 0x00);
    const Trained ones = trained(ctx, with_heads_of_64(c.config), dtype, shape, 0xFF);
    for (size_t i = 0; i < zeros.steps.size(); ++i) {
      EXPECT_EQ(std::memcmp(&zeros.steps[i], &ones.steps[i], sizeof(StepState)), 0)
          << "step " << i + 1 << ": loss " << loss_of(zeros.steps[i]) << " and " << loss_of(ones.steps[i]);
      EXPECT_EQ(zeros.steps[i].halted, 0);
      EXPECT_EQ(zeros.evaluations[i], ones.evaluations[i]) << "evaluation " << i + 1;
    }
    EXPECT_EQ(std::memcmp(zeros.gradient.data(), ones.gradient.data(), zeros.gradient.size() * sizeof(float)),
              0);
  }
}

TEST(MemoryContent, LeavesNoTraces) { expect_no_traces(Context{}, DType::f32); }

TEST(MemoryContentGpu, LeavesNoTraces) {
  KINOE_GPU_OR_SKIP(device);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    SCOPED_TRACE(name_of(dtype));
    expect_no_traces(device->context(), dtype);
  }
}

}  // namespace
}  // namespace kinoe
