// Where an operation runs: a backend, its stream and its libraries; memory and copies on it.
//
// No CUDA header is seen here: device_cpu.cpp implements the host side, device.cu the GPU side. With
// KINOE_WITH_CUDA=0 (no nvcc) the second does not exist and Backend::cuda can not be constructed.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/common/nvml.h"
#include "kernels/common/tensor.h"

#ifndef KINOE_WITH_CUDA
#define KINOE_WITH_CUDA 0
#endif

namespace kinoe {

enum class Backend : uint8_t { cpu, cuda };

class BlasLt;  // kernels/common/cublaslt.h: pinned GEMM algorithms of one stream
class Graphs;  // kernels/common/graphs.h: launches recorded for repetition

/// Passed by value to every operation. On the CPU calls return when the work is done; on the GPU they are queued on
/// `stream` and nothing in an operation waits.
struct Context {
  Backend backend = Backend::cpu;
  void* stream = nullptr;  // cudaStream_t
  BlasLt* blas = nullptr;
  Graphs* graphs = nullptr;  // set by who owns the memory that operations work in; null: launch by launch
  int device = 0;            // index of the GPU
};

struct DeviceInfo {
  std::string name;            // "NVIDIA H200", or the CPU's model name
  int compute_capability = 0;  // 90 for sm_90; 0 on the CPU
  int multiprocessors = 0;
  size_t memory_bytes = 0;
  size_t free_bytes = 0;  // 0 from gpu_info(): asking takes some
  std::string driver;     // "" on the CPU
  std::string uuid;       // GPU UUID, "" on the CPU
  std::string pci;        // "0000:1b:00.0", "" on the CPU
};

/// Number of GPUs the CUDA runtime sees; 0 without a driver, a device or CUDA in this build.
int gpu_count();
/// Facts that need no memory on the GPU.
DeviceInfo gpu_info(int index);
DeviceInfo cpu_info();

/// The algorithm pinned for one shape of matrix product: the same algorithm gives the same bits.
struct GemmChoice {
  std::string shape;      // everything that distinguishes the product: sizes, transpositions, types, epilogue
  std::string algorithm;  // opaque, in hexadecimal; means something to one library version and GPU model only
  double us = 0;          // when it was chosen, with a cold L2; 0: not measured
  double tflops = 0;
};

/// Memory that the program really holds. GPU: what the device has in use, less what it had before this program opened it
/// (without NVML: all that is in use). CPU: the process's resident memory without mapped files, which the system takes back
/// when it wants to.
struct MemoryUse {
  size_t bytes = 0;
  size_t peak_bytes = 0;  // the most seen so far; on the CPU the system's own record
};

/// Owns the stream and libraries of one rank's device.
class Device {
 public:
  static std::unique_ptr<Device> cpu();
  static std::unique_ptr<Device> gpu(int index);
  static std::unique_ptr<Device> open(Backend backend) { return backend == Backend::cuda ? gpu(0) : cpu(); }
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  [[nodiscard]] virtual Context context() const = 0;
  [[nodiscard]] virtual DeviceInfo info() const = 0;

  /// Takes some microseconds and waits for nothing.
  [[nodiscard]] virtual MemoryUse memory_use() = 0;
  /// Of memory_use(): workspace of the libraries.
  [[nodiscard]] virtual size_t workspace_bytes() const { return 0; }
  /// Absent on the CPU and without NVML.
  [[nodiscard]] virtual std::optional<GpuHealth> health() const { return std::nullopt; }

  /// GPU: the matrix products seen so far and their algorithms, and the reverse: algorithms to use from now on. What is not
  /// pinned is measured at its first use. The key says for which library and GPU choices are valid.
  [[nodiscard]] virtual std::string gemm_key() const { return ""; }
  [[nodiscard]] virtual std::vector<GemmChoice> gemm_choices() const { return {}; }
  virtual void pin_gemm_choices(const std::vector<GemmChoice>& /*choices*/) {}

 protected:
  Device() = default;
};

/// Owned memory, 256-byte aligned. `pinned` host memory can be copied asynchronously.
class Memory {
 public:
  Memory() = default;
  static Memory on(Backend backend, size_t bytes);
  static Memory pinned(Backend backend, size_t bytes);  // host memory; plain on the CPU backend
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  enum class Kind : uint8_t { none, host, device, pinned };
  void* data_ = nullptr;
  size_t bytes_ = 0;
  Kind kind_ = Kind::none;
};

/// Stream-ordered copies. On the GPU the host side must stay untouched until the stream has passed the copy.
void upload(const Context& ctx, void* device, const void* host, size_t bytes);
void download(const Context& ctx, void* host, const void* device, size_t bytes);
void copy(const Context& ctx, void* to, const void* from, size_t bytes);  // within the device
void fill_zero(const Context& ctx, void* memory, size_t bytes);
void synchronize(const Context& ctx);

/// Every thread but the one that opened the device calls it first: to CUDA, a new thread means GPU 0.
void use_device(const Context& ctx);

/// A point in a stream. On the CPU every point has already passed.
class Event {
 public:
  explicit Event(Backend backend);
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(const Context& ctx);
  void wait() const;  // blocks the host
  /// Milliseconds between two recorded and passed events.
  [[nodiscard]] double ms_since(const Event& start) const;

 private:
  Backend backend_;
  void* handle_ = nullptr;  // cudaEvent_t
  double host_ms_ = 0;
};

}  // namespace kinoe
