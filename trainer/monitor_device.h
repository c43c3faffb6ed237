// What the device was really like during a run: the memory it used against what the plan said, and whether it was throttled.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/common/device.h"

namespace kinoe {

class DeviceWatch {
 public:
  /// `planned`: bytes the printed plan says, everything included.
  DeviceWatch(Device& device, size_t planned) : device_(device), planned_(planned) {}

  /// To be called after each step: asks the device at most ten times a second, for its health once a second. `now` in
  /// seconds of any clock that only goes forward.
  void look(double now);
  [[nodiscard]] MemoryUse memory() const { return memory_; }

  /// What is worth saying at the end of the run, a line each: use that differs from the plan by more than 3 % (and 16 MiB, which
  /// small runs may scatter by), throttling, memory errors that came up during the run.
  [[nodiscard]] std::vector<std::string> findings();

 private:
  Device& device_;
  size_t planned_;
  MemoryUse memory_;
  double memory_at_ = -1e9, health_at_ = -1e9;
  int64_t looks_ = 0, throttled_ = 0;
  std::map<std::string, int64_t> reasons_;
  int hottest_ = 0, slowest_mhz_ = 0, max_mhz_ = 0;
  uint64_t first_ecc_ = 0, last_ecc_ = 0;
};

/// Facts for run.json: "temperature", "35 C" and so on; only what is known.
std::vector<std::pair<std::string, std::string>> health_facts(const GpuHealth& health);

}  // namespace kinoe
