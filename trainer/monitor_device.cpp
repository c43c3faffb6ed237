// Memory and health of the device, looked at now and then.
#include "trainer/monitor_device.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace kinoe {
namespace {

constexpr double kMemoryEvery = 0.1, kHealthEvery = 1.0;  // seconds
constexpr double kTolerance = 0.03;
constexpr double kScatter = 16.0 * (1 << 20);

std::string mebibytes(size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

}  // namespace

void DeviceWatch::look(double now) {
  if (now - memory_at_ >= kMemoryEvery) {
    memory_at_ = now;
    memory_ = device_.memory_use();
  }
  if (now - health_at_ < kHealthEvery) return;
  health_at_ = now;
  const std::optional<GpuHealth> health = device_.health();
  if (!health) return;
  const std::vector<std::string> reasons = throttle_reasons(health->clock_reasons);
  for (const std::string& reason : reasons) ++reasons_[reason];
  if (!reasons.empty()) {
    ++throttled_;
    if (health->sm_mhz)
      slowest_mhz_ = throttled_ == 1 ? *health->sm_mhz : std::min(slowest_mhz_, *health->sm_mhz);
  }
  hottest_ = std::max(hottest_, health->temperature_c.value_or(0));
  max_mhz_ = health->sm_max_mhz.value_or(0);
  last_ecc_ = health->ecc_uncorrected.value_or(0);
  if (looks_ == 0) first_ecc_ = last_ecc_;
  ++looks_;
}

std::vector<std::string> DeviceWatch::findings() {
  std::vector<std::string> lines;
  memory_ = device_.memory_use();
  const double planned = static_cast<double>(planned_);
  const double off = static_cast<double>(memory_.peak_bytes) - planned;
  if (std::abs(off) > kTolerance * planned && std::abs(off) > kScatter) {
    char percent[16];
    std::snprintf(percent, sizeof(percent), "%+.1f %%", 100 * off / planned);
    lines.push_back(cat("memory: ", mebibytes(memory_.peak_bytes), " were used at most, the plan said ",
                        mebibytes(planned_), " (", percent, ")"));
  }
  if (throttled_ > 0) {
    std::string text = cat("GPU throttled in ", throttled_, " of ", looks_, " looks:");
    for (const auto& [reason, count] : reasons_) text += cat(" ", reason, " (", count, "),");
    text.back() = ';';
    text += cat(" at least ", slowest_mhz_, " MHz of ", max_mhz_, ", at most ", hottest_, " C");
    lines.push_back(text);
  }
  if (last_ecc_ > first_ecc_)
    lines.push_back(cat("GPU: ", last_ecc_ - first_ecc_,
                        " uncorrected memory errors (ECC) during this run; have the GPU checked"));
  return lines;
}

std::vector<std::pair<std::string, std::string>> health_facts(const GpuHealth& health) {
  std::vector<std::pair<std::string, std::string>> facts;
  const auto add = [&](const char* name, const auto& value, const char* unit) {
    if (value) facts.emplace_back(name, cat(*value, unit));
  };
  add("temperature", health.temperature_c, " C");
  add("sm_clock", health.sm_mhz, " MHz");
  add("sm_clock_max", health.sm_max_mhz, " MHz");
  add("power", health.power_w, " W");
  add("power_limit", health.power_limit_w, " W");
  add("ecc_uncorrected", health.ecc_uncorrected, "");
  const std::vector<std::string> reasons = throttle_reasons(health.clock_reasons);
  if (!reasons.empty()) {
    std::string text;
    for (const std::string& reason : reasons) text += (text.empty() ? "" : ", ") + reason;
    facts.emplace_back("throttled", text);
  }
  return facts;
}

}  // namespace kinoe
