// The host side of device.h: the CPU as a device, owned memory, copies and events of both backends.
//
// A CPU operation is over when its call returns, so a copy is a memcpy and an event is the time of its recording.
// What needs a GPU goes through device_cuda.h.
#include <sched.h>
#include <sys/mman.h>
#include <sys/utsname.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>

#include "kernels/common/arena.h"
#include "kernels/common/device_cuda.h"

namespace kinoe {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLargeAllocation = size_t{256} << 20;

/// The text after "key<blanks>:" in files like /proc/cpuinfo and /proc/meminfo; "" when there is none.
std::string proc_field(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || line.compare(0, key.size(), key) != 0) continue;
    if (line.find_first_not_of(" \t", key.size()) != colon) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

/// A field in kB, as bytes.
size_t proc_bytes(const char* path, const std::string& key) {
  return static_cast<size_t>(std::strtoull(proc_field(path, key).c_str(), nullptr, 10)) * 1024;
}
size_t meminfo_bytes(const std::string& key) { return proc_bytes("/proc/meminfo", key); }

class CpuDevice final : public Device {
 public:
  [[nodiscard]] Context context() const override { return Context{}; }
  [[nodiscard]] DeviceInfo info() const override { return cpu_info(); }
  [[nodiscard]] MemoryUse memory_use() override {
    const char* self = "/proc/self/status";
    const size_t resident = proc_bytes(self, "VmRSS"), files = proc_bytes(self, "RssFile");
    const size_t most = proc_bytes(self, "VmHWM");  // files included; they seldom shrink
    const size_t now = resident - std::min(resident, files);
    peak_ = std::max({peak_, now, most - std::min(most, files)});
    return {now, peak_};
  }

 private:
  size_t peak_ = 0;
};

/// A number that is alone in a file; `otherwise` when the file is missing or holds a word ("max").
size_t number_in_file(const char* path, size_t otherwise) {
  std::ifstream file(path);
  size_t value = 0;
  return file >> value ? value : otherwise;
}

void* allocate_host(size_t bytes) {
  // Huge pages: a training step touches every page of the arena, and 4 KiB pages would cost it in TLB misses.
  const size_t alignment = bytes >= 4 * kHugePage ? kHugePage : Arena::kAlignment;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  // Linux promises more memory than there is and ends the process when it is touched, so a large wish is compared first.
  const bool fits = rounded >= bytes && (rounded < kLargeAllocation || rounded <= cpu_info().free_bytes);
  void* memory = fits ? std::aligned_alloc(alignment, rounded) : nullptr;
  if (!memory)
    fail(ExitCode::usage, "out of host memory: ", bytes, " bytes asked for, ", cpu_info().free_bytes,
         " free; use a smaller model, micro-batch or sequence length");
  if (alignment == kHugePage) madvise(memory, rounded, MADV_HUGEPAGE);  // a wish; refused without harm
  return memory;
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

DeviceInfo cpu_info() {
  DeviceInfo info;
  info.name = proc_field("/proc/cpuinfo", "model name");
  if (info.name.empty()) {
    utsname system{};
    info.name = uname(&system) == 0 ? cat("CPU (", system.machine, ")") : "CPU";
  }
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  info.multiprocessors = sched_getaffinity(0, sizeof(allowed), &allowed) == 0 ? CPU_COUNT(&allowed) : 1;

  // A container may own less than the machine has (cgroup v2; "max" or no such file: no limit).
  const size_t total = meminfo_bytes("MemTotal");
  const size_t limit = number_in_file("/sys/fs/cgroup/memory.max", total);
  const size_t in_use = number_in_file("/sys/fs/cgroup/memory.current", 0);
  info.memory_bytes = std::min(total, limit);
  info.free_bytes = meminfo_bytes("MemAvailable");
  if (limit < total) info.free_bytes = std::min(info.free_bytes, limit - std::min(limit, in_use));
  return info;
}

std::unique_ptr<Device> Device::cpu() { return std::make_unique<CpuDevice>(); }

Memory Memory::on(Backend backend, size_t bytes) {
  Memory result;
  if (bytes == 0) return result;
  const bool gpu = backend == Backend::cuda;
  result.data_ = gpu ? cuda::allocate(bytes) : allocate_host(bytes);
  result.kind_ = gpu ? Kind::device : Kind::host;
  result.bytes_ = bytes;
  return result;
}

Memory Memory::pinned(Backend backend, size_t bytes) {
  if (backend == Backend::cpu || bytes == 0) return on(Backend::cpu, bytes);
  Memory result;
  result.data_ = cuda::allocate_pinned(bytes);
  result.kind_ = Kind::pinned;
  result.bytes_ = bytes;
  return result;
}

Memory::~Memory() {
  switch (kind_) {
    case Kind::none: break;
    case Kind::host: std::free(data_); break;
    case Kind::device: cuda::release(data_); break;
    case Kind::pinned: cuda::release_pinned(data_); break;
  }
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      kind_(std::exchange(other.kind_, Kind::none)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  Memory taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(bytes_, taken.bytes_);
  std::swap(kind_, taken.kind_);
  return *this;
}

// memcpy and memset must not be given a null pointer, not even for 0 bytes.

void upload(const Context& ctx, void* device, const void* host, size_t bytes) {
  if (bytes == 0) return;
  if (ctx.backend == Backend::cuda) return cuda::upload(ctx, device, host, bytes);
  std::memcpy(device, host, bytes);
}

void download(const Context& ctx, void* host, const void* device, size_t bytes) {
  if (bytes == 0) return;
  if (ctx.backend == Backend::cuda) return cuda::download(ctx, host, device, bytes);
  std::memcpy(host, device, bytes);
}

void copy(const Context& ctx, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  if (ctx.backend == Backend::cuda) return cuda::copy(ctx, to, from, bytes);
  std::memcpy(to, from, bytes);
}

void fill_zero(const Context& ctx, void* memory, size_t bytes) {
  if (bytes == 0) return;
  if (ctx.backend == Backend::cuda) return cuda::fill_zero(ctx, memory, bytes);
  std::memset(memory, 0, bytes);
}

void synchronize(const Context& ctx) {
  if (ctx.backend == Backend::cuda) cuda::synchronize(ctx);
}

void use_device(const Context& ctx) {
  if (ctx.backend == Backend::cuda) cuda::use_device(ctx);
}

Event::Event(Backend backend) : backend_(backend) {
  if (backend == Backend::cuda) handle_ = cuda::create_event();
}

Event::~Event() {
  if (handle_) cuda::destroy_event(handle_);
}

Event::Event(Event&& other) noexcept
    : backend_(other.backend_), handle_(std::exchange(other.handle_, nullptr)), host_ms_(other.host_ms_) {}

Event& Event::operator=(Event&& other) noexcept {
  Event taken(std::move(other));
  std::swap(backend_, taken.backend_);
  std::swap(handle_, taken.handle_);
  std::swap(host_ms_, taken.host_ms_);
  return *this;
}

void Event::record(const Context& ctx) {
  CHECK(ctx.backend == backend_, "an event is recorded on the backend it was made for");
  if (backend_ == Backend::cuda)
    cuda::record_event(ctx, handle_);
  else
    host_ms_ = now_ms();
}

void Event::wait() const {
  if (backend_ == Backend::cuda) cuda::wait_event(handle_);
}

double Event::ms_since(const Event& start) const {
  CHECK(start.backend_ == backend_, "the time between events of different backends has no meaning");
  return backend_ == Backend::cuda ? cuda::event_ms_between(start.handle_, handle_)
                                   : host_ms_ - start.host_ms_;
}

}  // namespace kinoe
