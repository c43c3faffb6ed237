// What the CPU implementations share: the choice of the scalar, and when threads are worth waking.
//
// They are templates on the scalar: fp32 trains and is the oracle of the GPU, fp64 is for checking gradients. bf16 exists
// here only as a storage type of the optimizer and of casts.
#pragma once

#include "kernels/common/tensor.h"

namespace kinoe {

/// Elements below which a loop stays on one thread (waking the others costs microseconds). Results never depend on it.
inline constexpr int64_t kParallelWork = 8192;

/// Calls run(float{}) or run(double{}).
template <class Run>
void with_scalar(const char* operation, DType type, Run run) {
  CHECK(type == DType::f32 || type == DType::f64, operation, " on the CPU computes in fp32 or fp64, given ",
        name_of(type));
  if (type == DType::f64)
    run(double{});
  else
    run(float{});
}

}  // namespace kinoe
