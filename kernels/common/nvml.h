// What the driver's management library (NVML) knows of a GPU: driver, memory in use, temperature, clocks, power, why the
// clocks are low, memory errors.
//
// The library comes with the driver and is loaded at run time; nothing is linked and no header of it is needed. All of this is
// of use and none of it is necessary: what can not be had is absent, never an error.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kinoe {

struct GpuHealth {
  std::optional<int> temperature_c;
  std::optional<int> sm_mhz;  // of the multiprocessors, now
  std::optional<int> sm_max_mhz;
  std::optional<double> power_w;
  std::optional<double> power_limit_w;
  std::optional<uint64_t> ecc_uncorrected;  // since the driver was loaded
  uint64_t clock_reasons = 0;               // why the clocks are what they are: NVML's bits
};

/// What slows a GPU that has work, in words: "power limit", "thermal slowdown", ... Bits for an idle GPU or for clocks that
/// somebody set are no reason.
std::vector<std::string> throttle_reasons(uint64_t clock_reasons);

class Nvml {
 public:
  /// Null where the library or what is needed of it is missing.
  static std::unique_ptr<Nvml> load(const char* library = "libnvidia-ml.so.1");
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  /// "580.82.07", or "".
  [[nodiscard]] std::string driver() const;
  /// A handle for the functions below; null if there is no such GPU. `pci_bus_id` as CUDA gives it: "0000:1B:00.0". CUDA's
  /// indices are of no use here: NVML does not know CUDA_VISIBLE_DEVICES.
  [[nodiscard]] void* find(const std::string& pci_bus_id) const;
  /// Bytes in use on the GPU by everybody.
  [[nodiscard]] std::optional<uint64_t> memory_in_use(void* gpu) const;
  [[nodiscard]] GpuHealth health(void* gpu) const;

 private:
  struct Functions;
  Nvml(void* library, std::unique_ptr<Functions> functions);
  void* library_;
  std::unique_ptr<Functions> functions_;
};

}  // namespace kinoe
