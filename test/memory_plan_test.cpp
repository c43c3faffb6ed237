// Memory and the device's state: what a run says of them before, during and after, and the fault "the model does not fit".
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "test/program.h"
#include "trainer/config.h"
#include "trainer/monitor_device.h"

namespace kinoe {
namespace {

RunConfig resolved(DeviceChoice device, int64_t micro_batch) {
  RunConfig c;
  c.device = device;
  c.micro_batch = micro_batch;
  c.global_batch = 512;
  c.seq_len = 1024;
  return c;
}

/// Megabytes: weights, moments, and activations by --recompute.
size_t model_of_bytes(const RunConfig& c) {
  const size_t per_sequence = c.recompute == "none" ? 100 : c.recompute == "light" ? 70 : 20;
  return 1000 + (c.adam_state == DType::bf16 ? 400 : 800) +
         per_sequence * static_cast<size_t>(*c.micro_batch);
}

TEST(FindFitting, TakesWhatCostsLeast) {
  const auto options = [](const RunConfig& c, size_t limit) {
    const Fitting fitting = find_fitting(c, model_of_bytes, limit);
    EXPECT_TRUE(!fitting.fits || fitting.bytes <= limit);
    return (fitting.fits ? "" : "no: ") + fitting.options;
  };
  const RunConfig gpu = resolved(DeviceChoice::cuda, 64);
  EXPECT_EQ(options(gpu, 10000), "");
  EXPECT_EQ(options(gpu, 5000), "--micro-batch 32");
  EXPECT_EQ(options(gpu, 2600), "--micro-batch 8");
  // Below 8192 tokens a smaller micro-batch costs more than some recomputation.
  EXPECT_EQ(options(gpu, 2400), "--micro-batch 8 --recompute light");
  EXPECT_EQ(options(gpu, 1990), "--micro-batch 2 --recompute light");
  EXPECT_EQ(options(gpu, 1799), "--micro-batch 4 --recompute light --adam-state bf16");
  EXPECT_EQ(options(gpu, 1425), "--micro-batch 1 --recompute block --adam-state bf16");
  EXPECT_EQ(options(gpu, 1000), "no: --micro-batch 1 --recompute block --adam-state bf16");
  const RunConfig cpu = resolved(DeviceChoice::cpu, 3);
  EXPECT_EQ(options(cpu, 1900), "--micro-batch 1");
  EXPECT_EQ(options(cpu, 1000), "no: --micro-batch 1 --recompute block");
  RunConfig least = resolved(DeviceChoice::cpu, 1);
  least.recompute = "block";
  EXPECT_EQ(options(least, 1000), "no: ");
}

class FakeDevice : public Device {
 public:
  [[nodiscard]] Context context() const override { return {}; }
  [[nodiscard]] DeviceInfo info() const override { return {}; }
  [[nodiscard]] MemoryUse memory_use() override {
    ++memory_asked;
    return use;
  }
  [[nodiscard]] std::optional<GpuHealth> health() const override { return state; }
  MemoryUse use;
  std::optional<GpuHealth> state;
  int memory_asked = 0;
};

constexpr size_t kMiB = 1 << 20;

TEST(DeviceWatch, SaysWhenUseAndPlanDiffer) {
  for (const auto& [used, said] :
       {std::pair{1000, false}, {1029, false}, {971, false}, {1031, true}, {969, true}}) {
    FakeDevice device;
    DeviceWatch watch(device, 1000 * kMiB);
    device.use = {500 * kMiB, static_cast<size_t>(used) * kMiB};
    watch.look(0);
    EXPECT_EQ(watch.memory().bytes, 500 * kMiB);
    const std::vector<std::string> findings = watch.findings();
    ASSERT_EQ(findings.size(), said ? 1U : 0U) << used;
    if (!said) continue;
    EXPECT_NE(findings[0].find(std::to_string(used) + ".0 MiB"), std::string::npos) << findings[0];
    EXPECT_NE(findings[0].find("1000.0 MiB"), std::string::npos) << findings[0];
  }
  FakeDevice small;  // 15 of 30 MiB: a small run's scatter
  small.use = {45 * kMiB, 45 * kMiB};
  EXPECT_TRUE(DeviceWatch(small, 30 * kMiB).findings().empty());
}

TEST(DeviceWatch, AsksNowAndThenOnly) {
  FakeDevice device;
  DeviceWatch watch(device, 1);
  for (int i = 0; i < 1000; ++i) watch.look(100 + i * 0.001);
  EXPECT_GE(device.memory_asked, 9);
  EXPECT_LE(device.memory_asked, 11);
}

TEST(DeviceWatch, CountsThrottlingAndNewMemoryErrors) {
  FakeDevice device;
  DeviceWatch watch(device, 1);
  GpuHealth health;
  health.temperature_c = 60;
  health.sm_mhz = 1980;
  health.sm_max_mhz = 1980;
  health.ecc_uncorrected = 3;  // old ones
  device.state = health;
  watch.look(0);
  watch.look(1.5);
  EXPECT_TRUE(watch.findings().empty());
  device.state->clock_reasons = 0x4;
  device.state->sm_mhz = 1500;
  device.state->temperature_c = 71;
  watch.look(3);
  device.state->clock_reasons = 0x4 | 0x20;
  device.state->sm_mhz = 1200;
  device.state->ecc_uncorrected = 5;
  watch.look(4.5);
  const std::vector<std::string> findings = watch.findings();
  ASSERT_EQ(findings.size(), 2U);
  for (const char* part :
       {"2 of 4", "power limit (2)", "thermal slowdown by the driver (1)", "1200 MHz of 1980", "71 C"})
    EXPECT_NE(findings[0].find(part), std::string::npos) << part << " in: " << findings[0];
  EXPECT_NE(findings[1].find("2 uncorrected"), std::string::npos) << findings[1];
}

TEST(DeviceWatch, FactsAreThoseThatAreKnown) {
  EXPECT_TRUE(health_facts({}).empty());
  GpuHealth health;
  health.temperature_c = 35;
  health.power_w = 71.5;
  health.clock_reasons = 0x40;
  using Facts = std::vector<std::pair<std::string, std::string>>;
  EXPECT_EQ(health_facts(health), Facts({{"temperature", "35 C"},
                                         {"power", "71.5 W"},
                                         {"throttled", "thermal slowdown by the hardware"}}));
}

class MemoryFaults : public ProgramTest {};

TEST_F(MemoryFaults, Row21AModelThatDoesNotFitEndsWithTheTableAndWhatWouldFit) {
  // Weights and moments of a model of two million parameters are nothing, the activations of its micro-batch are more
  // than a terabyte.
  write("text.txt", std::string(262144 * 128 + 1, 'a'));
  const std::vector<std::string> run_small = {
      "--data", "text.txt",       "--device", "cpu",          "--model", "small",          "--seq-len",
      "128",    "--sample-every", "0",        "--eval-every", "0",       "--global-batch", "262144"};
  std::vector<std::string> fits = run_small;
  fits.insert(fits.end(), {"--micro-batch", "262144", "--steps", "1", "--out", "run"});
  const Outcome one = run(fits);
  EXPECT_EQ(one.code, 2) << one.output;
  for (const char* part :
       {"\nmemory\n", "activations", "total", "this run needs", "it fits with --micro-batch "})
    EXPECT_NE(one.output.find(part), std::string::npos) << "no '" << part << "' in: " << one.output;
  EXPECT_FALSE(std::filesystem::exists(path("run")));
}

TEST_F(MemoryFaults, Row21AModelThatFitsInNoWaySaysSo) {
  write("huge.json",
        R"({"model_type": "llama", "vocab_size": 256, "hidden_size": 65536, "intermediate_size": 262144,
      "num_hidden_layers": 400, "num_attention_heads": 64, "num_key_value_heads": 64, "max_position_embeddings": 64,
      "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true})");
  const Outcome none = run({"--device", "cpu", "--model", "huge.json", "--seq-len", "64", "--global-batch",
                            "4", "--micro-batch", "4", "--steps", "1", "--out", "run"});
  EXPECT_EQ(none.code, 2) << none.output;
  for (const char* part : {"total", "even with --micro-batch 1 --recompute block it needs", "smaller model"})
    EXPECT_NE(none.output.find(part), std::string::npos) << "no '" << part << "' in: " << none.output;
}

TEST_F(MemoryFaults, TheRecordIsTheProcessMemoryNearThePlan) {
  // 60 MB of weights, gradients and moments: enough for the plan's few percent to be more than noise.
  write("model.json",
        R"({"model_type": "llama", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 1024,
      "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
      "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true})");
  write("text.txt", std::string(4000, 'a'));  // no validation data: nothing else is computed
  const Outcome got = run({"--data", "text.txt", "--device", "cpu", "--model", "model.json", "--seq-len",
                           "32", "--global-batch", "4", "--micro-batch", "4", "--steps", "2",
                           "--sample-every", "0", "--out", "run"});
  ASSERT_EQ(got.code, 0) << got.output;
  const size_t at = got.output.find("\n  total");
  ASSERT_NE(at, std::string::npos);
  const double planned = std::stod(got.output.substr(at + 9));
  // Those are taken as saves need them.
  const std::string buffers = "checkpoint buffers (host)";
  const size_t at_buffers = got.output.find(buffers);
  ASSERT_NE(at_buffers, std::string::npos);
  const double at_first = planned - std::stod(got.output.substr(at_buffers + buffers.size()));
  std::istringstream lines(read("run/metrics.jsonl"));
  double peak = 0, bytes = 0;
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line);
    if (!json.contains("mem_bytes")) continue;
    bytes = json["mem_bytes"].get<double>() / kMiB;
    peak = json["mem_peak_bytes"].get<double>() / kMiB;
  }
  EXPECT_GT(at_first, 60);
  EXPECT_GT(bytes, 0.8 * at_first) << got.output;
  EXPECT_GE(peak, bytes);
  EXPECT_LT(peak, 1.2 * planned) << got.output;
  std::printf("             planned %.1f MiB, %.1f in use, %.1f at most\n", planned, bytes, peak);
}

}  // namespace
}  // namespace kinoe
