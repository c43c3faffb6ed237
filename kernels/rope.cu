// Rotary position embedding on the GPU, in place on the packed projections.
//
// Bytes per rotated element (bf16): 2 read, 2 written. The table costs 8 bytes per pair if every pair reads it, so a
// thread takes one 16-byte piece of the first half of a head, its partner in the second half, and the same pieces of
// kHeads heads: sine and cosine are read once (from L1 or L2: the table of 4,096 positions and D = 128 is 2 MiB) for
// 2 * kHeads accesses. Measured on an H200 (2026-11-30): 88 % of the copy bandwidth at D = 128, H = 32, Hkv = 8.
//
// Head sizes whose half is not made of whole 16-byte accesses take the same kernel one element at a time.
#include "kernels/rope.h"

#include "kernels/common/cuda_util.cuh"

namespace kinoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 4;  // heads of one thread: 128 bytes in flight

struct Shape {
  int64_t tokens;
  int64_t pitch;  // elements of one token's row
  int length;     // T
  int rotated;    // H + Hkv heads
  int head_dim;   // D
  int pieces;     // accesses in half a head
  int items;      // pieces * ceil(rotated / kHeads): threads' worth of work per token
  int tokens_per_block;
  float sign;  // -1: backward
};

template <class T, int W>
__global__ void __launch_bounds__(kThreads) rope_kernel(T* qkv, const float* table, Shape s) {
  const int half = s.head_dim / 2;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * s.tokens_per_block;
  for (int item = static_cast<int>(threadIdx.x); item < s.tokens_per_block * s.items; item += kThreads) {
    const int64_t token = first + item / s.items;
    if (token >= s.tokens) return;
    const int rest = item % s.items;
    const int offset = rest % s.pieces * W, head = rest / s.pieces * kHeads;
    T* row = qkv + token * s.pitch + static_cast<int64_t>(head) * s.head_dim + offset;

    Raw<T, W> low[kHeads], high[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (head + h >= s.rotated) break;
      low[h] = load_once<T, W>(row + h * s.head_dim);
      high[h] = load_once<T, W>(row + h * s.head_dim + half);
    }
    const float* angles = table + token % s.length * s.head_dim + offset;
    float cosine[W], sine[W];
#pragma unroll
    for (int j = 0; j < W; j += W < 4 ? 1 : 4) {
      constexpr int kStep = W < 4 ? 1 : 4;
      float c[kStep], n[kStep];
      to_floats<float, kStep>(load_shared_input<float, kStep>(angles + j), c);
      to_floats<float, kStep>(load_shared_input<float, kStep>(angles + half + j), n);
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        cosine[j + k] = c[k];
        sine[j + k] = n[k] * s.sign;
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (head + h >= s.rotated) break;
      float a[W], b[W], x[W], y[W];
      to_floats<T, W>(low[h], a);
      to_floats<T, W>(high[h], b);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        x[j] = a[j] * cosine[j] - b[j] * sine[j];
        y[j] = b[j] * cosine[j] + a[j] * sine[j];
      }
      store<T, W>(row + h * s.head_dim, from_floats<T, W>(x));
      store<T, W>(row + h * s.head_dim + half, from_floats<T, W>(y));
    }
  }
}

template <class T, int W>
void launch(const Context& ctx, T* qkv, const float* table, Shape s) {
  s.pieces = s.head_dim / 2 / W;
  s.items = s.pieces * ceil_div(s.rotated, kHeads);
  s.tokens_per_block = s.items < kThreads ? kThreads / s.items : 1;
  const unsigned grid = grid_of(ceil_div<int64_t>(s.tokens, s.tokens_per_block));
  rope_kernel<T, W><<<grid, kThreads, 0, stream_of(ctx)>>>(qkv, table, s);
  CUDA_CHECK_LAUNCH(rope);
}

}  // namespace

void rope(const Context& ctx, const Rope& args) {
  check(args);
  const int64_t heads = args.heads + args.kv_heads;
  const int64_t length = args.qkv.dim(1), pitch = args.qkv.dim(2), head_dim = args.table.dim(1);
  CHECK(pitch < int64_t{1} << 30, "rope: rows of less than 2^30 elements, here ", pitch);
  if (args.qkv.size() == 0) return;
  const Shape shape{.tokens = args.qkv.rows(),
                    .pitch = pitch,
                    .length = static_cast<int>(length),
                    .rotated = static_cast<int>(heads),
                    .head_dim = static_cast<int>(head_dim),
                    .pieces = 0,
                    .items = 0,
                    .tokens_per_block = 0,
                    .sign = args.backward ? -1.0F : 1.0F};
  with_element(args.qkv.dtype, [&](auto element) {
    using T = decltype(element);
    T* qkv = args.qkv.as<T>();
    const float* table = args.table.as<float>();
    if (head_dim / 2 % kVector<T> == 0 && aligned_to(16, qkv, table))
      launch<T, kVector<T>>(ctx, qkv, table, shape);
    else
      launch<T, 1>(ctx, qkv, table, shape);
  });
}

}  // namespace kinoe::cuda
