// What device.h says about GPUs in a build without CUDA: there are none, and asking for one is an error that says
// how to get a build that has them. Left out of the build when device.cu is in it.
#include "kernels/common/device_cuda.h"
#include "kernels/common/gpu_driver.h"
#include "kernels/common/graphs.h"

namespace kinoe {

namespace {

[[noreturn]] void no_cuda() {
  fail(ExitCode::usage,
       "this build has no CUDA: put nvcc on the PATH and run make again, or use --device cpu");
}

}  // namespace

int gpu_count() { return 0; }

std::string gpu_driver_problem() { return ""; }

DeviceInfo gpu_info(int /*index*/) { no_cuda(); }

std::unique_ptr<Device> Device::gpu(int /*index*/) { no_cuda(); }

namespace cuda {

void* allocate(size_t /*bytes*/) { no_cuda(); }
void release(void* /*memory*/) noexcept {}
void* allocate_pinned(size_t /*bytes*/) { no_cuda(); }
void release_pinned(void* /*memory*/) noexcept {}

void upload(const Context& /*ctx*/, void* /*device*/, const void* /*host*/, size_t /*bytes*/) { no_cuda(); }
void download(const Context& /*ctx*/, void* /*host*/, const void* /*device*/, size_t /*bytes*/) { no_cuda(); }
void copy(const Context& /*ctx*/, void* /*to*/, const void* /*from*/, size_t /*bytes*/) { no_cuda(); }
void fill_zero(const Context& /*ctx*/, void* /*memory*/, size_t /*bytes*/) { no_cuda(); }
void synchronize(const Context& /*ctx*/) { no_cuda(); }
void use_device(const Context& /*ctx*/) { no_cuda(); }

void* create_event() { no_cuda(); }
void destroy_event(void* /*event*/) noexcept {}
void record_event(const Context& /*ctx*/, void* /*event*/) { no_cuda(); }
void wait_event(void* /*event*/) { no_cuda(); }
double event_ms_between(void* /*start*/, void* /*end*/) { no_cuda(); }

std::unique_ptr<Recorder> make_recorder(const Context& /*ctx*/) { no_cuda(); }

}  // namespace cuda

}  // namespace kinoe
