// The GPU as a device: its stream, its memory, its copies and events. The host side of all this is device_cpu.cpp.
#include "kernels/common/device_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>

#include "kernels/common/cublaslt.h"
#include "kernels/common/cuda_util.cuh"

namespace kinoe {
namespace {

#define CHECK_RUNTIME(call) cuda::check_cuda(call, #call, __FILE__, __LINE__)

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

class GpuDevice final : public Device {
 public:
  explicit GpuDevice(int index) : index_(index) {
    CHECK_RUNTIME(cudaSetDevice(index));
    CHECK_RUNTIME(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    blas_ = std::make_unique<BlasLt>(stream_);
  }
  ~GpuDevice() override {
    blas_.reset();
    cudaStreamDestroy(stream_);
  }
  GpuDevice(const GpuDevice&) = delete;
  GpuDevice& operator=(const GpuDevice&) = delete;

  [[nodiscard]] Context context() const override { return {Backend::cuda, stream_, blas_.get(), nullptr}; }
  [[nodiscard]] DeviceInfo info() const override { return gpu_info(index_); }
  [[nodiscard]] std::string gemm_key() const override { return cat(info().name, ", ", BlasLt::version()); }
  [[nodiscard]] std::vector<GemmChoice> gemm_choices() const override { return blas_->choices(); }
  void pin_gemm_choices(const std::vector<GemmChoice>& choices) override { blas_->pin(choices); }

 private:
  int index_;
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

DeviceInfo gpu_info(int index) {
  cudaDeviceProp properties{};
  CHECK_RUNTIME(cudaGetDeviceProperties(&properties, index));
  int previous = 0, driver = 0, runtime = 0;
  CHECK_RUNTIME(cudaGetDevice(&previous));
  CHECK_RUNTIME(cudaDriverGetVersion(&driver));
  CHECK_RUNTIME(cudaRuntimeGetVersion(&runtime));
  DeviceInfo info;
  info.name = properties.name;
  info.compute_capability = properties.major * 10 + properties.minor;
  info.multiprocessors = properties.multiProcessorCount;
  CHECK_RUNTIME(cudaSetDevice(index));
  CHECK_RUNTIME(cudaMemGetInfo(&info.free_bytes, &info.memory_bytes));
  CHECK_RUNTIME(cudaSetDevice(previous));
  info.driver = cat("CUDA ", version_text(driver), " driver, ", version_text(runtime), " runtime");
  info.uuid = uuid_text(properties.uuid);
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
  CHECK_RUNTIME(cudaMallocHost(&memory, bytes));
  return memory;
}

void release_pinned(void* memory) noexcept { cudaFreeHost(memory); }

void upload(const Context& ctx, void* device, const void* host, size_t bytes) {
  CHECK_RUNTIME(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_of(ctx)));
}

void download(const Context& ctx, void* host, const void* device, size_t bytes) {
  CHECK_RUNTIME(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_of(ctx)));
}

void copy(const Context& ctx, void* to, const void* from, size_t bytes) {
  CHECK_RUNTIME(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_of(ctx)));
}

void fill_zero(const Context& ctx, void* memory, size_t bytes) {
  CHECK_RUNTIME(cudaMemsetAsync(memory, 0, bytes, stream_of(ctx)));
}

void synchronize(const Context& ctx) { CHECK_RUNTIME(cudaStreamSynchronize(stream_of(ctx))); }

void* create_event() {
  cudaEvent_t event = nullptr;
  CHECK_RUNTIME(cudaEventCreateWithFlags(&event, cudaEventDefault));
  return event;
}

void destroy_event(void* event) noexcept { cudaEventDestroy(static_cast<cudaEvent_t>(event)); }

void record_event(const Context& ctx, void* event) {
  CHECK_RUNTIME(cudaEventRecord(static_cast<cudaEvent_t>(event), stream_of(ctx)));
}

void wait_event(void* event) { CHECK_RUNTIME(cudaEventSynchronize(static_cast<cudaEvent_t>(event))); }

double event_ms_between(void* start, void* end) {
  float ms = 0;
  CHECK_RUNTIME(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(start), static_cast<cudaEvent_t>(end)));
  return static_cast<double>(ms);
}

}  // namespace cuda
}  // namespace kinoe
