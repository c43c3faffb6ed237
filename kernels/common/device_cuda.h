// The GPU half of device.h as free functions, for device_cpu.cpp alone. No CUDA header is seen here.
//
// device.cu implements them with CUDA, device_cuda_fallback.cpp without; exactly one of the two is linked. So the
// owning types (Memory, Event) exist once, and the host code has no #if.
#pragma once

#include <cstddef>

#include "kernels/common/device.h"

namespace kinoe::cuda {

/// Device memory of the current GPU, 256-byte aligned. Fails with ExitCode::usage and the bytes asked for and
/// free when there is not enough.
void* allocate(size_t bytes);
void release(void* memory) noexcept;

/// Page-locked host memory.
void* allocate_pinned(size_t bytes);
void release_pinned(void* memory) noexcept;

void upload(const Context& ctx, void* device, const void* host, size_t bytes);
void download(const Context& ctx, void* host, const void* device, size_t bytes);
void copy(const Context& ctx, void* to, const void* from, size_t bytes);
void fill_zero(const Context& ctx, void* memory, size_t bytes);
void synchronize(const Context& ctx);
void use_device(const Context& ctx);

/// `event` is a cudaEvent_t with timing.
void* create_event();
void destroy_event(void* event) noexcept;
void record_event(const Context& ctx, void* event);
void wait_event(void* event);
double event_ms_between(void* start, void* end);

}  // namespace kinoe::cuda
