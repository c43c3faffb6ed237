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
  EXPECT_NEAR(peak_flops("NVIDIA H200 NVL", DType::bf16)->flops, 835.5e12, 1e9);
  EXPECT_NEAR(peak_flops("NVIDIA GeForce RTX 4090", DType::bf16)->flops, 165.2e12, 1e9);
  EXPECT_NE(peak_flops("NVIDIA GH200 480GB", DType::bf16)->source.find("GH200 data sheet"),
            std::string::npos);
  for (const char* other : {"NVIDIA Z9000", "", "NVIDIA RTX A4000", "NVIDIA H800 PCIe", "NVIDIA A100X",
                            "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti",
                            "NVIDIA H100 80GB HBM3 MIG 1g.10gb"})
    EXPECT_FALSE(peak_flops(other, DType::bf16).has_value()) << other;
}

}  // namespace
}  // namespace kinoe
