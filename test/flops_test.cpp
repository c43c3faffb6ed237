// Model FLOPs and the table of peaks.
#include "trainer/flops.h"

#include <gtest/gtest.h>

namespace kinoe {
namespace {

TEST(Flops, Gpt2SmallAgreesWithTheFormula) {
  // 6 x (parameters in products) + 6 L H D T per token: 12 layers, width 768, vocabulary 50257, T = 1024.
  const TokenFlops f = training_flops(load_model_config("gpt2-124m"), 1024);
  const double products = 12.0 * 12 * 768 * 768 + 50257.0 * 768;
  EXPECT_NEAR(f.causal, 6 * products + 6.0 * 12 * 768 * 1025, 1);
  EXPECT_NEAR(f.full, 6 * products + 12.0 * 12 * 768 * 1024, 1);
}

TEST(Flops, GroupedQueriesSaveProjectionsNotAttention) {
  ModelConfig grouped = load_model_config("llama3-8b"), full = grouped;
  full.kv_heads = full.heads;
  const double saved = training_flops(full, 4096).causal - training_flops(grouped, 4096).causal;
  EXPECT_NEAR(saved, 6.0 * 32 * 4096 * 2 * (32 - 8) * 128, 1e3);
}

TEST(Flops, KnownGpusHaveAPeakAndOthersHaveNone) {
  EXPECT_NEAR(peak_flops("NVIDIA H200", DType::bf16)->flops, 989.4e12, 1e9);
  EXPECT_NEAR(peak_flops("NVIDIA H100 PCIe", DType::bf16)->flops, 756.4e12, 1e9);
  EXPECT_NEAR(peak_flops("NVIDIA H100 80GB HBM3", DType::bf16)->flops, 989.4e12, 1e9);
  EXPECT_NEAR(peak_flops("NVIDIA A100-SXM4-40GB", DType::f32)->flops, 19.5e12, 1e9);
  EXPECT_FALSE(peak_flops("NVIDIA Z9000", DType::bf16).has_value());
  EXPECT_FALSE(peak_flops("", DType::bf16).has_value());
}

}  // namespace
}  // namespace kinoe
