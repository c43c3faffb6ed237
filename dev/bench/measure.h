// Time on the device, and the two speeds against which it is judged.
#pragma once

#include <functional>
#include <string>

#include "dev/bench/workspace.h"

namespace kinoe::bench {

/// What can stay in the cache between two calls: the L2 of an H100 or H200 (A100: 40 MB), the CPU's last level.
size_t cache_bytes(Backend backend);

class Timer {
 public:
  /// `repeat` timed calls after three that are not.
  Timer(const Context& ctx, int repeat);

  /// Median time of run() in microseconds, begun with a cache that holds nothing of it. `restore` may be empty.
  ///
  /// The cache is displaced by writing, so it is full of changed lines whose way to memory run() pays for; its own last
  /// lines are paid for by what follows. Inside a training step it is the same.
  double median_us(const std::function<void()>& run, const std::function<void()>& restore = {});

 private:
  void displace_cache();

  Context ctx_;
  int repeat_;
  Memory displacer_;
};

struct Ceilings {
  double copy_gb_per_s = 0;  // read and written
  double gemm_tflop_per_s = 0;
  std::string copy_what, gemm_what;
};

/// A copy within the device's memory, on the CPU one thread's memcpy: operations with all threads may beat it. The product
/// is matmul_forward of square matrices, bf16 on a GPU, fp32 on a CPU.
Ceilings measure_ceilings(Workspace& work, Timer& timer);

}  // namespace kinoe::bench
