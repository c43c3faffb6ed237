// NVML: its absence is silence, its bits are words, and on a GPU it knows what it should.
#include "kernels/common/nvml.h"

#include <gtest/gtest.h>

#include "test/op_harness.h"

namespace kinoe {
namespace {

using Words = std::vector<std::string>;

TEST(Nvml, WithoutTheLibraryThereIsNone) {
  EXPECT_EQ(Nvml::load("libno-such-library.so.1"), nullptr);
  EXPECT_EQ(Nvml::load("libc.so.6"), nullptr);  // a library, but another one
}

TEST(Nvml, ReasonsAreWordsAndIdlenessIsNone) {
  EXPECT_EQ(throttle_reasons(0), Words());
  EXPECT_EQ(throttle_reasons(0x1 | 0x2 | 0x10 | 0x100),
            Words());  // idle, set by somebody, synchronised, display
  EXPECT_EQ(throttle_reasons(0x4 | 0x1), Words({"power limit"}));
  EXPECT_EQ(throttle_reasons(0x8 | 0x80), Words({"hardware slowdown", "power brake"}));
  EXPECT_EQ(throttle_reasons(0x20 | 0x40).size(), 2U);
}

TEST(Nvml, TheCpuHasNoHealth) { EXPECT_FALSE(Device::cpu()->health().has_value()); }

TEST(NvmlGpu, KnowsTemperatureClocksPowerAndDriver) {
  KINOE_GPU_OR_SKIP(device);
  const std::unique_ptr<Nvml> nvml = Nvml::load();
  if (!nvml) GTEST_SKIP() << "no NVML on this machine";
  EXPECT_NE(nvml->driver(), "");
  EXPECT_EQ(nvml->find("0000:FF:1F.7"), nullptr);
  EXPECT_EQ(nvml->memory_in_use(nullptr), std::nullopt);
  const std::optional<GpuHealth> health = device->health();
  ASSERT_TRUE(health.has_value()) << "NVML does not know the GPU that CUDA has";
  EXPECT_GT(health->temperature_c.value_or(0), 0);
  EXPECT_LT(health->temperature_c.value_or(0), 120);
  EXPECT_GT(health->sm_mhz.value_or(0), 100);
  EXPECT_GE(health->sm_max_mhz.value_or(0), health->sm_mhz.value_or(0));
  EXPECT_GT(health->power_limit_w.value_or(0), 10);
}

TEST(DeviceMemoryGpu, UseFollowsWhatIsTaken) {
  KINOE_GPU_OR_SKIP(device);
  const size_t bytes = size_t{1} << 30, slack = size_t{8} << 20;
  const MemoryUse before = device->memory_use();
  EXPECT_GE(before.bytes, device->workspace_bytes());  // and a context, unless an earlier test had made it
  EXPECT_LT(before.bytes, size_t{4} << 30) << "a context without memory of a model";
  {
    const Memory memory = Memory::on(Backend::cuda, bytes);
    const MemoryUse during = device->memory_use();
    EXPECT_GE(during.bytes, before.bytes + bytes);
    EXPECT_LE(during.bytes, before.bytes + bytes + slack);
    EXPECT_EQ(during.peak_bytes, during.bytes);
  }
  const MemoryUse after = device->memory_use();
  EXPECT_LE(after.bytes, before.bytes + slack);
  EXPECT_GE(after.peak_bytes, before.bytes + bytes);
}

TEST(DeviceMemory, OfTheCpuFollowsWhatIsTouched) {
  const auto device = Device::cpu();
  const size_t bytes = size_t{96} << 20, slack = size_t{8} << 20;
  const MemoryUse before = device->memory_use();
  EXPECT_GT(before.bytes, size_t{1} << 18);
  {
    const Memory memory = Memory::on(Backend::cpu, bytes);
    std::memset(memory.data(), 1, bytes);
    const MemoryUse during = device->memory_use();
    EXPECT_GE(during.bytes + slack, before.bytes + bytes);
    EXPECT_LE(during.bytes, before.bytes + bytes + slack);
    EXPECT_GE(during.peak_bytes, during.bytes);
  }
  const MemoryUse after = device->memory_use();
  EXPECT_LE(after.bytes, before.bytes + slack);
  EXPECT_GE(after.peak_bytes + slack, before.bytes + bytes);
}

}  // namespace
}  // namespace kinoe
