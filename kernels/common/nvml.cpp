// Signatures and constants are those of NVML's public interface (NVML API Reference Guide), which has kept them for a decade.
#include "kernels/common/nvml.h"

#include <dlfcn.h>

#include <array>

namespace kinoe {
namespace {

using Gpu = void*;  // nvmlDevice_t
constexpr int kSuccess = 0;
constexpr int kTemperatureGpu = 0, kClockSm = 1, kUncorrected = 1, kSinceDriverLoad = 0;

struct MemoryInfo {  // nvmlMemory_t
  unsigned long long total, free, used;
};

struct Reason {
  uint64_t bit;
  const char* words;
};
constexpr std::array<Reason, 5> kReasons = {{{0x04, "power limit"},
                                             {0x08, "hardware slowdown"},
                                             {0x20, "thermal slowdown by the driver"},
                                             {0x40, "thermal slowdown by the hardware"},
                                             {0x80, "power brake"}}};

}  // namespace

std::vector<std::string> throttle_reasons(uint64_t clock_reasons) {
  std::vector<std::string> words;
  for (const Reason& reason : kReasons)
    if ((clock_reasons & reason.bit) != 0) words.emplace_back(reason.words);
  return words;
}

struct Nvml::Functions {
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*handle)(const char*, Gpu*) = nullptr;
  // The rest may be missing.
  int (*driver)(char*, unsigned) = nullptr;
  int (*memory)(Gpu, MemoryInfo*) = nullptr;
  int (*temperature)(Gpu, int, unsigned*) = nullptr;
  int (*clock)(Gpu, int, unsigned*) = nullptr;
  int (*max_clock)(Gpu, int, unsigned*) = nullptr;
  int (*power)(Gpu, unsigned*) = nullptr;
  int (*power_limit)(Gpu, unsigned*) = nullptr;
  int (*reasons)(Gpu, unsigned long long*) = nullptr;
  int (*ecc)(Gpu, int, int, unsigned long long*) = nullptr;
};

std::unique_ptr<Nvml> Nvml::load(const char* library) {
  void* handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return nullptr;
  auto f = std::make_unique<Functions>();
  const auto get = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, name));
    return function != nullptr;
  };
  const bool needed = get(f->init, "nvmlInit_v2") && get(f->shutdown, "nvmlShutdown") &&
                      get(f->handle, "nvmlDeviceGetHandleByPciBusId_v2");
  if (!needed || f->init() != kSuccess) {
    ::dlclose(handle);
    return nullptr;
  }
  get(f->driver, "nvmlSystemGetDriverVersion");
  get(f->memory, "nvmlDeviceGetMemoryInfo");
  get(f->temperature, "nvmlDeviceGetTemperature");
  get(f->clock, "nvmlDeviceGetClockInfo");
  get(f->max_clock, "nvmlDeviceGetMaxClockInfo");
  get(f->power, "nvmlDeviceGetPowerUsage");
  get(f->power_limit, "nvmlDeviceGetEnforcedPowerLimit");
  if (!get(f->reasons, "nvmlDeviceGetCurrentClocksEventReasons"))  // its name since driver 535
    get(f->reasons, "nvmlDeviceGetCurrentClocksThrottleReasons");
  get(f->ecc, "nvmlDeviceGetTotalEccErrors");
  return std::unique_ptr<Nvml>(new Nvml(handle, std::move(f)));
}

Nvml::Nvml(void* library, std::unique_ptr<Functions> functions)
    : library_(library), functions_(std::move(functions)) {}

Nvml::~Nvml() {
  functions_->shutdown();
  ::dlclose(library_);
}

std::string Nvml::driver() const {
  std::array<char, 96> text{};
  const auto size = static_cast<unsigned>(text.size());
  const bool known = functions_->driver != nullptr && functions_->driver(text.data(), size) == kSuccess;
  return known ? text.data() : "";
}

void* Nvml::find(const std::string& pci_bus_id) const {
  Gpu gpu = nullptr;
  return functions_->handle(pci_bus_id.c_str(), &gpu) == kSuccess ? gpu : nullptr;
}

std::optional<uint64_t> Nvml::memory_in_use(void* gpu) const {
  MemoryInfo info{};
  if (gpu == nullptr || functions_->memory == nullptr || functions_->memory(gpu, &info) != kSuccess)
    return std::nullopt;
  return info.used;
}

GpuHealth Nvml::health(void* gpu) const {
  GpuHealth health;
  if (gpu == nullptr) return health;
  const Functions& f = *functions_;
  unsigned value = 0;
  unsigned long long wide = 0;
  if (f.temperature != nullptr && f.temperature(gpu, kTemperatureGpu, &value) == kSuccess)
    health.temperature_c = static_cast<int>(value);
  if (f.clock != nullptr && f.clock(gpu, kClockSm, &value) == kSuccess)
    health.sm_mhz = static_cast<int>(value);
  if (f.max_clock != nullptr && f.max_clock(gpu, kClockSm, &value) == kSuccess)
    health.sm_max_mhz = static_cast<int>(value);
  if (f.power != nullptr && f.power(gpu, &value) == kSuccess) health.power_w = value / 1e3;
  if (f.power_limit != nullptr && f.power_limit(gpu, &value) == kSuccess) health.power_limit_w = value / 1e3;
  if (f.ecc != nullptr && f.ecc(gpu, kUncorrected, kSinceDriverLoad, &wide) == kSuccess)
    health.ecc_uncorrected = wide;
  if (f.reasons != nullptr && f.reasons(gpu, &wide) == kSuccess) health.clock_reasons = wide;
  return health;
}

}  // namespace kinoe
