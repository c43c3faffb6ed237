// See measure.h.
#include "dev/bench/measure.h"

#include <algorithm>
#include <fstream>
#include <vector>

#include "kernels/matmul.h"

namespace kinoe::bench {
namespace {

constexpr int kWarmUps = 3;
constexpr size_t kGpuDisplacer = size_t{256} << 20;
constexpr size_t kGpuCopy = size_t{1} << 30;
constexpr size_t kCpuCopy = size_t{128} << 20;
constexpr int64_t kGpuSquare = 8192;
constexpr int64_t kCpuSquare = 1024;

}  // namespace

size_t cache_bytes(Backend backend) {
  if (backend == Backend::cuda) return size_t{50} * 1000 * 1000;
  // "32768K"; sysconf tells what a virtual machine's host has in all.
  size_t kib = 0;
  std::ifstream("/sys/devices/system/cpu/cpu0/cache/index3/size") >> kib;
  return kib > 0 ? kib << 10 : size_t{32} << 20;
}

Timer::Timer(const Context& ctx, int repeat)
    : ctx_(ctx),
      repeat_(repeat),
      displacer_(Memory::on(ctx.backend, ctx.backend == Backend::cuda
                                             ? kGpuDisplacer
                                             : std::min(kGpuDisplacer, 2 * cache_bytes(Backend::cpu)))) {}

void Timer::displace_cache() {
  if (ctx_.backend == Backend::cuda) return fill_zero(ctx_, displacer_.data(), displacer_.bytes());
  // memset may write around the cache; ordinary stores do not.
  auto* lines = static_cast<volatile char*>(displacer_.data());
  const auto bytes = static_cast<int64_t>(displacer_.bytes());
#pragma omp parallel for
  for (int64_t i = 0; i < bytes; i += 64) lines[i] = 1;
}

double Timer::median_us(const std::function<void()>& run, const std::function<void()>& restore) {
  std::vector<Event> begins, ends;
  for (int i = -kWarmUps; i < repeat_; ++i) {
    if (restore) restore();
    displace_cache();
    Event begin(ctx_.backend), end(ctx_.backend);
    begin.record(ctx_);
    run();
    end.record(ctx_);
    if (i < 0) continue;
    begins.push_back(std::move(begin));
    ends.push_back(std::move(end));
  }
  synchronize(ctx_);
  std::vector<double> us;
  for (size_t i = 0; i < ends.size(); ++i) us.push_back(ends[i].ms_since(begins[i]) * 1000);
  std::sort(us.begin(), us.end());
  const size_t middle = us.size() / 2;
  return us.size() % 2 == 1 ? us[middle] : (us[middle - 1] + us[middle]) / 2;
}

Ceilings measure_ceilings(Workspace& work, Timer& timer) {
  const Context& ctx = work.context();
  const bool gpu = ctx.backend == Backend::cuda;
  Ceilings result;

  const size_t bytes = gpu ? kGpuCopy : kCpuCopy;
  const auto floats = static_cast<int64_t>(bytes / 4);
  const Tensor from = work.random(DType::f32, {floats}), to = work.output(DType::f32, {floats});
  const double copy_us = timer.median_us([&] { copy(ctx, to.data, from.data, bytes); });
  result.copy_gb_per_s = 2 * static_cast<double>(bytes) / copy_us * 1e-3;
  result.copy_what = cat(bytes >> 20, " MiB copied");
  work.clear();

  const int64_t n = gpu ? kGpuSquare : kCpuSquare;
  const DType type = gpu ? DType::bf16 : DType::f32;
  const MatmulForward product = {.y = work.output(type, {n, n}),
                                 .x = work.random(type, {n, n}),
                                 .weight = work.random(type, {n, n}),
                                 .bias = {}};
  const double gemm_us = timer.median_us([&] { matmul_forward(ctx, product); });
  result.gemm_tflop_per_s = matmul_cost(n, n, n, size_of(type)).flops / gemm_us * 1e-6;
  result.gemm_what = cat(name_of(type), " product of ", n, " x ", n, " matrices");
  work.clear();
  return result;
}

}  // namespace kinoe::bench
