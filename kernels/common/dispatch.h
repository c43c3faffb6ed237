// The single place where an operation's backend is picked.
#pragma once

#include "kernels/common/device.h"

#if KINOE_WITH_CUDA
#define KINOE_DISPATCH(ctx, operation, ...) \
  ((ctx).backend == Backend::cuda ? cuda::operation(ctx, __VA_ARGS__) : cpu::operation(ctx, __VA_ARGS__))
#else
#define KINOE_DISPATCH(ctx, operation, ...) cpu::operation(ctx, __VA_ARGS__)
#endif

/// Declares both implementations of an operation and the inline dispatcher in front of them.
#define KINOE_OPERATION(operation, Arguments)                \
  namespace cpu {                                            \
  void operation(const Context& ctx, const Arguments& args); \
  }                                                          \
  namespace cuda {                                           \
  void operation(const Context& ctx, const Arguments& args); \
  }                                                          \
  inline void operation(const Context& ctx, const Arguments& args) { KINOE_DISPATCH(ctx, operation, args); }
