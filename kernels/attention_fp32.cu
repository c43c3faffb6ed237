// Attention in plain fp32 for `--dtype fp32`: no tensor cores, no TF32, any head size up to 256. For teaching, and for
// checking the fast kernels to 1e-5; it is meant to be read.
//
// All three kernels work on square tiles of kTile rows by kTile columns of scores, eight threads to a row:
//
//   forward  a block owns kTile queries; keys and values pass by in ascending order (online softmax);
//   dQ       a block owns kTile queries, and computes and leaves delta of its rows;
//   dK, dV   a block owns kTile keys; the query heads of their group and in each the queries pass by in order.
//
// A thread computes kTile / 8 scores of its row as dot products over the head, puts the weights made of them into
// shared memory, and adds, for every eighth vector of four of its row, the weighted rows of the passing tile. Rows in
// shared memory are an odd number of float4 long, so that eight neighbouring rows lie in different banks. Every sum
// runs in one fixed order.
#include <cuda_runtime.h>

#include "kernels/attention_tile.cuh"
#include "kernels/attention_variants.h"

namespace kinoe::cuda {

namespace {

struct Fp32Params {
  const float* qkv = nullptr;
  const int32_t* doc_start = nullptr;  // null: documents do not bound attention
  int length = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int vectors = 0, row_vectors = 0;  // float4 per head, and from row to row in shared memory
  float scale = 0;
  WorkOrder order;

  float *out = nullptr, *lse_out = nullptr;  // forward

  float *d_qkv = nullptr, *delta = nullptr;  // backward
  const float *d_out = nullptr, *out_in = nullptr, *lse = nullptr;
  const int32_t* doc_end = nullptr;
};

constexpr int kThreadsPerRow = 8;

/// kMaxHeadDim bounds the registers, and with them and shared memory the tile.
template <int kMaxHeadDim>
struct Fp32Config {
  static constexpr int kTile = kMaxHeadDim <= 128 ? 32 : 16, kThreads = kTile * kThreadsPerRow;
  static constexpr int kScores = kTile / kThreadsPerRow;             // per thread
  static constexpr int kVectors = kMaxHeadDim / 4 / kThreadsPerRow;  // per thread, at most
  static constexpr int kWeightRow = kTile + 1;

  static constexpr int shared_bytes(int tiles, int row_vectors) {
    return tiles * kTile * row_vectors * 16 + kTile * (kWeightRow + 3) * 4;
  }
};

template <class Config>
struct Fp32Block {
  static constexpr int kTile = Config::kTile;
  using Accumulator = float4[Config::kVectors];

  const Fp32Params& p;
  float4* tiles;
  float* weights;  // [kTile][kWeightRow], a row is written and read by the same eight threads
  float* row_lse;
  float* row_delta;
  int* row_bound;  // documents' starts or ends
  int row, part;   // of this thread

  __device__ Fp32Block(const Fp32Params& params, unsigned char* shared, int tile_count)
      : p(params), tiles(reinterpret_cast<float4*>(shared)) {
    weights = reinterpret_cast<float*>(tiles + tile_count * kTile * p.row_vectors);
    row_lse = weights + kTile * Config::kWeightRow;
    row_delta = row_lse + kTile;
    row_bound = reinterpret_cast<int*>(row_delta + kTile);
    row = static_cast<int>(threadIdx.x) / kThreadsPerRow;
    part = static_cast<int>(threadIdx.x) % kThreadsPerRow;
  }

  [[nodiscard]] __device__ float4* tile(int index) const { return tiles + index * kTile * p.row_vectors; }
  [[nodiscard]] __device__ int64_t pitch() const {
    return static_cast<int64_t>(p.heads + 2 * p.kv_heads) * p.head_dim;
  }
  [[nodiscard]] __device__ int64_t out_pitch() const { return static_cast<int64_t>(p.heads) * p.head_dim; }

  /// Rows `pitch` apart from `from`, zeros beyond `present` rows and beyond the head.
  __device__ void load(float4* to, const float* from, int64_t row_pitch, int present) const {
    auto* values = reinterpret_cast<float*>(to + row * p.row_vectors);
    for (int d = part; d < 4 * p.vectors; d += kThreadsPerRow)
      values[d] = row < present && d < p.head_dim ? from[row * row_pitch + d] : 0.0F;
  }

  /// scores[j] = row of a . row (part + 8 j) of b.
  __device__ void dot(float (&scores)[Config::kScores], const float4* a, const float4* b) const {
#pragma unroll
    for (int j = 0; j < Config::kScores; ++j) scores[j] = 0;
    for (int v = 0; v < p.vectors; ++v) {
      const float4 x = a[row * p.row_vectors + v];
#pragma unroll
      for (int j = 0; j < Config::kScores; ++j) {
        const float4 y = b[(part + kThreadsPerRow * j) * p.row_vectors + v];
        scores[j] = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, scores[j]))));
      }
    }
  }

  /// sum += the rows of b, weighted with this row's `values`, which its eight threads hold as dot() gives them.
  __device__ void add_weighted(Accumulator& sum, const float (&values)[Config::kScores],
                               const float4* b) const {
    float* mine = weights + row * Config::kWeightRow;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < Config::kScores; ++j) mine[part + kThreadsPerRow * j] = values[j];
    __syncwarp();
    for (int k = 0; k < kTile; ++k) {
      const float w = mine[k];
#pragma unroll
      for (int i = 0; i < Config::kVectors; ++i) {
        const int v = part + kThreadsPerRow * i;
        if (v >= p.vectors) break;
        const float4 y = b[k * p.row_vectors + v];
        sum[i] = {fmaf(w, y.x, sum[i].x), fmaf(w, y.y, sum[i].y), fmaf(w, y.z, sum[i].z),
                  fmaf(w, y.w, sum[i].w)};
      }
    }
  }

  __device__ void store(float* to, int64_t row_pitch, int present, const Accumulator& sum,
                        float factor) const {
    if (row >= present) return;
#pragma unroll
    for (int i = 0; i < Config::kVectors; ++i) {
      const float x[4] = {sum[i].x, sum[i].y, sum[i].z, sum[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int d = 4 * (part + kThreadsPerRow * i) + j;
        if (d < p.head_dim) to[row * row_pitch + d] = x[j] * factor;
      }
    }
  }

  /// Over the eight threads of a row.
  static __device__ float row_sum(float x) { return warp_sum<kThreadsPerRow>(x); }
  static __device__ float row_max(float x) {
#pragma unroll
    for (int lanes = 1; lanes < kThreadsPerRow; lanes *= 2)
      x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, lanes));
    return x;
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) attention_fp32_forward_kernel(const Fp32Params p) {
  constexpr int kTile = Config::kTile;
  extern __shared__ __align__(16) unsigned char shared[];
  const Fp32Block<Config> block(p, shared, 3);
  float4 *queries = block.tile(0), *keys = block.tile(1), *values = block.tile(2);

  const auto [unit, rank] = p.order[static_cast<int>(blockIdx.x)];
  const int batch = unit / p.heads, head = unit % p.heads, row0 = (p.order.blocks - 1 - rank) * kTile;
  const int64_t sequence = static_cast<int64_t>(batch) * p.length, pitch = block.pitch();
  const int t = row0 + block.row;
  const int start = p.doc_start && t < p.length ? p.doc_start[sequence + t] : 0;
  const int first = p.doc_start ? p.doc_start[sequence + row0] / kTile * kTile : 0;
  const float* from = p.qkv + sequence * pitch;
  const float* keys_from = from + (p.heads + head / (p.heads / p.kv_heads)) * p.head_dim;

  block.load(queries, from + row0 * pitch + head * p.head_dim, pitch, p.length - row0);
  typename Fp32Block<Config>::Accumulator out = {};
  float maximum = -INFINITY, sum = 0;
  for (int column0 = first; column0 < min(row0 + kTile, p.length); column0 += kTile) {
    __syncthreads();
    block.load(keys, keys_from + column0 * pitch, pitch, p.length - column0);
    block.load(values, keys_from + p.kv_heads * p.head_dim + column0 * pitch, pitch, p.length - column0);
    __syncthreads();
    float s[Config::kScores];
    block.dot(s, queries, keys);
    float tile_maximum = -INFINITY;
#pragma unroll
    for (int j = 0; j < Config::kScores; ++j) {
      const int column = column0 + block.part + kThreadsPerRow * j;
      s[j] = column <= t && column >= start ? s[j] * p.scale : -INFINITY;
      tile_maximum = fmaxf(tile_maximum, s[j]);
    }
    const float next = fmaxf(maximum, block.row_max(tile_maximum));
    // Before the first visible column of a document nothing has been added yet: 0 keeps exp() away from inf - inf.
    const float shift = next == -INFINITY ? 0.0F : next;
    const float factor = expf(maximum - shift);
    maximum = next;
    sum *= factor;
#pragma unroll
    for (int j = 0; j < Config::kScores; ++j) {
      s[j] = expf(s[j] - shift);
      sum += s[j];
    }
#pragma unroll
    for (float4& o : out) o = {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
    block.add_weighted(out, s, values);
  }
  sum = block.row_sum(sum);
  if (block.part == 0 && t < p.length)
    p.lse_out[static_cast<int64_t>(unit) * p.length + t] = maximum + logf(sum);
  block.store(p.out + (sequence + row0) * block.out_pitch() + head * p.head_dim, block.out_pitch(),
              p.length - row0, out, 1 / sum);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) attention_fp32_dq_kernel(const Fp32Params p) {
  constexpr int kTile = Config::kTile;
  extern __shared__ __align__(16) unsigned char shared[];
  const Fp32Block<Config> block(p, shared, 4);
  float4 *queries = block.tile(0), *d_out = block.tile(1), *keys = block.tile(2), *values = block.tile(3);

  const auto [unit, rank] = p.order[static_cast<int>(blockIdx.x)];
  const int batch = unit / p.heads, head = unit % p.heads, row0 = (p.order.blocks - 1 - rank) * kTile;
  const int64_t sequence = static_cast<int64_t>(batch) * p.length, pitch = block.pitch(),
                out_pitch = block.out_pitch();
  const int t = row0 + block.row;
  const int start = p.doc_start && t < p.length ? p.doc_start[sequence + t] : 0;
  const int first = p.doc_start ? p.doc_start[sequence + row0] / kTile * kTile : 0;
  const float* from = p.qkv + sequence * pitch;
  const float* keys_from = from + (p.heads + head / (p.heads / p.kv_heads)) * p.head_dim;

  block.load(queries, from + row0 * pitch + head * p.head_dim, pitch, p.length - row0);
  block.load(d_out, p.d_out + (sequence + row0) * out_pitch + head * p.head_dim, out_pitch, p.length - row0);
  float delta = 0, lse = 0;
  if (t < p.length) {
    const int64_t at = (sequence + t) * out_pitch + head * p.head_dim;
    for (int d = block.part; d < p.head_dim; d += kThreadsPerRow)
      delta = fmaf(p.out_in[at + d], p.d_out[at + d], delta);
    lse = p.lse[static_cast<int64_t>(unit) * p.length + t];
  }
  delta = block.row_sum(delta);
  if (block.part == 0 && t < p.length) p.delta[static_cast<int64_t>(unit) * p.length + t] = delta;

  typename Fp32Block<Config>::Accumulator dq = {};
  for (int column0 = first; column0 < min(row0 + kTile, p.length); column0 += kTile) {
    __syncthreads();
    block.load(keys, keys_from + column0 * pitch, pitch, p.length - column0);
    block.load(values, keys_from + p.kv_heads * p.head_dim + column0 * pitch, pitch, p.length - column0);
    __syncthreads();
    float s[Config::kScores], dp[Config::kScores];
    block.dot(s, queries, keys);
    block.dot(dp, d_out, values);
#pragma unroll
    for (int j = 0; j < Config::kScores; ++j) {
      const int column = column0 + block.part + kThreadsPerRow * j;
      const bool visible = column <= t && column >= start && t < p.length;
      s[j] = visible ? expf(s[j] * p.scale - lse) * (dp[j] - delta) : 0.0F;
    }
    block.add_weighted(dq, s, keys);
  }
  block.store(p.d_qkv + (sequence + row0) * pitch + head * p.head_dim, pitch, p.length - row0, dq, p.scale);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) attention_fp32_dk_dv_kernel(const Fp32Params p) {
  constexpr int kTile = Config::kTile;
  extern __shared__ __align__(16) unsigned char shared[];
  const Fp32Block<Config> block(p, shared, 4);
  float4 *keys = block.tile(0), *values = block.tile(1), *queries = block.tile(2), *d_out = block.tile(3);

  const auto [unit, rank] = p.order[static_cast<int>(blockIdx.x)];
  const int batch = unit / p.kv_heads, kv_head = unit % p.kv_heads, row0 = rank * kTile,
            group = p.heads / p.kv_heads;
  const int64_t sequence = static_cast<int64_t>(batch) * p.length, pitch = block.pitch(),
                out_pitch = block.out_pitch();
  const int t = row0 + block.row;
  const int end = p.doc_end && t < p.length ? p.doc_end[sequence + t] : p.length;
  const int last = p.doc_end ? p.doc_end[sequence + min(row0 + kTile, p.length) - 1] : p.length;
  const int64_t keys_at = (sequence + row0) * pitch + (p.heads + kv_head) * p.head_dim;

  block.load(keys, p.qkv + keys_at, pitch, p.length - row0);
  block.load(values, p.qkv + keys_at + p.kv_heads * p.head_dim, pitch, p.length - row0);
  typename Fp32Block<Config>::Accumulator dk = {}, dv = {};
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const int64_t rows = (static_cast<int64_t>(batch) * p.heads + head) * p.length;
    for (int column0 = row0; column0 < last; column0 += kTile) {
      __syncthreads();
      block.load(queries, p.qkv + (sequence + column0) * pitch + head * p.head_dim, pitch,
                 p.length - column0);
      block.load(d_out, p.d_out + (sequence + column0) * out_pitch + head * p.head_dim, out_pitch,
                 p.length - column0);
      if (block.part == 0 && column0 + block.row < p.length) {
        block.row_lse[block.row] = p.lse[rows + column0 + block.row];
        block.row_delta[block.row] = p.delta[rows + column0 + block.row];
      }
      __syncthreads();
      float s[Config::kScores], dp[Config::kScores];
      block.dot(s, keys, queries);
      block.dot(dp, values, d_out);
#pragma unroll
      for (int j = 0; j < Config::kScores; ++j) {
        const int i = block.part + kThreadsPerRow * j, column = column0 + i;
        const bool visible = column >= t && column < end;
        s[j] = visible ? expf(s[j] * p.scale - block.row_lse[i]) : 0.0F;
        dp[j] = visible ? s[j] * (dp[j] - block.row_delta[i]) : 0.0F;
      }
      block.add_weighted(dv, s, d_out);
      block.add_weighted(dk, dp, queries);
    }
  }
  block.store(p.d_qkv + keys_at, pitch, p.length - row0, dk, p.scale);
  block.store(p.d_qkv + keys_at + p.kv_heads * p.head_dim, pitch, p.length - row0, dv, 1);
}

/// Calls run(Fp32Config<...>{}) with the smallest that holds the head.
template <class Run>
void with_config(int64_t head_dim, const Run& run) {
  if (head_dim <= 64)
    run(Fp32Config<64>{});
  else if (head_dim <= 128)
    run(Fp32Config<128>{});
  else
    run(Fp32Config<kAttentionFp32MaxHeadDim>{});
}

template <class Args>
Fp32Params params_of(const Args& args, int64_t tile) {
  const int64_t batch = args.qkv.dim(0), length = args.qkv.dim(1), head_dim = args.out.columns() / args.heads;
  const int64_t vectors = ceil_div<int64_t>(head_dim, 4);
  Fp32Params params;
  params.qkv = args.qkv.template as<float>();
  params.doc_start = args.doc_start ? args.doc_start.template as<int32_t>() : nullptr;
  params.length = static_cast<int>(length);
  params.heads = static_cast<int>(args.heads);
  params.kv_heads = static_cast<int>(args.kv_heads);
  params.head_dim = static_cast<int>(head_dim);
  params.vectors = static_cast<int>(vectors);
  params.row_vectors = static_cast<int>(vectors | 1);
  params.scale = args.scale;
  params.order = WorkOrder(ceil_div(length, tile), batch * args.heads, length * head_dim * 8);
  return params;
}

}  // namespace

void attention_forward_fp32(const Context& ctx, const AttentionForward& args) {
  with_config(args.out.columns() / args.heads, [&](auto config) {
    using Config = decltype(config);
    Fp32Params params = params_of(args, Config::kTile);
    params.out = args.out.as<float>();
    params.lse_out = args.lse.as<float>();
    launch_attention(ctx, attention_fp32_forward_kernel<Config>, Config::kThreads,
                     Config::shared_bytes(3, params.row_vectors), params);
  });
}

void attention_backward_fp32(const Context& ctx, const AttentionBackward& args) {
  with_config(args.out.columns() / args.heads, [&](auto config) {
    using Config = decltype(config);
    Fp32Params params = params_of(args, Config::kTile);
    params.d_qkv = args.d_qkv.as<float>();
    params.delta = reinterpret_cast<float*>(args.scratch.as<int32_t>());
    params.d_out = args.d_out.as<float>();
    params.out_in = args.out.as<float>();
    params.lse = args.lse.as<float>();
    params.doc_end = args.doc_end ? args.doc_end.as<int32_t>() : nullptr;
    const int shared = Config::shared_bytes(4, params.row_vectors);
    launch_attention(ctx, attention_fp32_dq_kernel<Config>, Config::kThreads, shared, params);
    params.order = WorkOrder(params.order.blocks, args.qkv.dim(0) * args.kv_heads,
                             args.qkv.dim(1) * params.head_dim * 8 * args.heads / args.kv_heads);
    launch_attention(ctx, attention_fp32_dk_dv_kernel<Config>, Config::kThreads, shared, params);
  });
}

}  // namespace kinoe::cuda
