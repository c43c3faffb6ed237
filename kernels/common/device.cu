// The GPU as a device: its stream, its memory, its copies and events. The host side of all this is device_cpu.cpp.
#include "kernels/common/device_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>

#include "kernels/common/cublaslt.h"
#include "kernels/common/cuda_util.cuh"
#include "kernels/common/gpu_driver.h"

namespace kinoe {
namespace {

std::string version_text(int version) { return cat(version / 1000, ".", version % 1000 / 10); }

std::string uuid_text(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  char byte[3];
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    std::snprintf(byte, sizeof(byte), "%02x",
                  static_cast<unsigned>(static_cast<unsigned char>(uuid.bytes[i])));
    text += byte;
  }
  return text;
}

/// Bytes in use on the current GPU by everybody.
size_t cuda_bytes_in_use() {
  size_t free_bytes = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
  return total - free_bytes;
}

class GpuDevice final : public Device {
 public:
  explicit GpuDevice(int index) : index_(index), info_(gpu_info(index)), nvml_(Nvml::load()) {
    if (nvml_) {
      char bus[32] = "";
      CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof(bus), index));
      gpu_ = nvml_->find(bus);
      if (!nvml_->driver().empty()) info_.driver = cat(nvml_->driver(), ", ", info_.driver);
    }
    // What the context takes is seen only from outside: before, and after.
    const std::optional<uint64_t> before = nvml_ ? nvml_->memory_in_use(gpu_) : std::nullopt;
    CUDA_CHECK(cudaSetDevice(index));
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    const size_t now = cuda_bytes_in_use();
    const std::optional<uint64_t> after = before ? nvml_->memory_in_use(gpu_) : std::nullopt;
    others_ = after ? now - std::min<size_t>(now, *after - std::min(*after, *before)) : 0;
    blas_ = std::make_unique<BlasLt>(stream_, [this] { peak_ = std::max(peak_, memory_use().bytes); });
  }
  ~GpuDevice() override {
    blas_.reset();
    cudaStreamDestroy(stream_);
  }
  GpuDevice(const GpuDevice&) = delete;
  GpuDevice& operator=(const GpuDevice&) = delete;

  [[nodiscard]] Context context() const override {
    return {Backend::cuda, stream_, blas_.get(), nullptr, index_};
  }
  [[nodiscard]] DeviceInfo info() const override {
    DeviceInfo info = info_;
    CUDA_CHECK(cudaMemGetInfo(&info.free_bytes, &info.memory_bytes));
    return info;
  }
  [[nodiscard]] MemoryUse memory_use() override {
    const size_t all = cuda_bytes_in_use(), own = all - std::min(all, others_);
    peak_ = std::max(peak_, own);
    return {own, peak_};
  }
  [[nodiscard]] size_t workspace_bytes() const override { return BlasLt::kWorkspaceBytes; }
  [[nodiscard]] std::optional<GpuHealth> health() const override {
    if (gpu_ == nullptr) return std::nullopt;
    return nvml_->health(gpu_);
  }
  [[nodiscard]] std::string gemm_key() const override { return cat(info_.name, ", ", BlasLt::version()); }
  [[nodiscard]] std::vector<GemmChoice> gemm_choices() const override { return blas_->choices(); }
  void pin_gemm_choices(const std::vector<GemmChoice>& choices) override { blas_->pin(choices); }

 private:
  int index_;
  DeviceInfo info_;
  std::unique_ptr<Nvml> nvml_;
  void* gpu_ = nullptr;  // NVML's handle
  size_t others_ = 0;    // bytes in use before this program opened the GPU
  size_t peak_ = 0;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<BlasLt> blas_;
};

}  // namespace

int gpu_count() {
  int count = 0;
  // Without a driver or a device this is an error; for us it means none.
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

std::string gpu_driver_problem() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess) return "";
  cudaGetLastError();
  if (status == cudaErrorNoDevice) return "";
  if (status != cudaErrorInsufficientDriver)
    return cat("CUDA does not start: ", cudaGetErrorName(status), " (", cudaGetErrorString(status), ")");
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver == 0) return "no NVIDIA driver is installed";
  return cat("the NVIDIA driver is for CUDA ", version_text(driver), ", this program needs ",
             version_text(runtime));
}

DeviceInfo gpu_info(int index) {
  cudaDeviceProp properties{};
  CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
  int driver = 0, runtime = 0;
  CUDA_CHECK(cudaDriverGetVersion(&driver));
  CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  DeviceInfo info;
  info.name = properties.name;
  info.compute_capability = properties.major * 10 + properties.minor;
  info.multiprocessors = properties.multiProcessorCount;
  info.memory_bytes = properties.totalGlobalMem;
  info.driver = cat("CUDA ", version_text(driver), " driver, ", version_text(runtime), " runtime");
  info.uuid = uuid_text(properties.uuid);
  char pci[32];
  CUDA_CHECK(cudaDeviceGetPCIBusId(pci, sizeof(pci), index));
  info.pci = pci;
  return info;
}

std::unique_ptr<Device> Device::gpu(int index) { return std::make_unique<GpuDevice>(index); }

namespace cuda {

void* allocate(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free_bytes = 0, total = 0;
    cudaMemGetInfo(&free_bytes, &total);
    fail(ExitCode::usage, "out of GPU memory: ", bytes, " bytes asked for, ", free_bytes, " of ", total,
         " free; use a smaller --micro-batch or --recompute block");
  }
  check_cuda(status, "cudaMalloc", __FILE__, __LINE__);
  return memory;
}

void release(void* memory) noexcept { cudaFree(memory); }

void* allocate_pinned(size_t bytes) {
  void* memory = nullptr;
  CUDA_CHECK(cudaMallocHost(&memory, bytes));
  return memory;
}

void release_pinned(void* memory) noexcept { cudaFreeHost(memory); }

void upload(const Context& ctx, void* device, const void* host, size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_of(ctx)));
}

void download(const Context& ctx, void* host, const void* device, size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_of(ctx)));
}

void copy(const Context& ctx, void* to, const void* from, size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_of(ctx)));
}

void fill_zero(const Context& ctx, void* memory, size_t bytes) {
  CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream_of(ctx)));
}

void synchronize(const Context& ctx) { CUDA_CHECK(cudaStreamSynchronize(stream_of(ctx))); }

void use_device(const Context& ctx) { CUDA_CHECK(cudaSetDevice(ctx.device)); }

void* create_event() {
  cudaEvent_t event = nullptr;
  CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDefault));
  return event;
}

void destroy_event(void* event) noexcept { cudaEventDestroy(static_cast<cudaEvent_t>(event)); }

void record_event(const Context& ctx, void* event) {
  CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(event), stream_of(ctx)));
}

void wait_event(void* event) { CUDA_CHECK(cudaEventSynchronize(static_cast<cudaEvent_t>(event))); }

double event_ms_between(void* start, void* end) {
  float ms = 0;
  CUDA_CHECK(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(start), static_cast<cudaEvent_t>(end)));
  return static_cast<double>(ms);
}

}  // namespace cuda
}  // namespace kinoe
