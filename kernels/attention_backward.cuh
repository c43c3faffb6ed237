// Portable flash attention, backward: bf16 on the tensor cores through mma.sync, sm_80 and later.
//
// Two kernels, so that every output element is summed by one warp in one order and nothing is added atomically:
//
//   dQ       a block owns query rows and walks over tiles of keys and values, as the forward pass does:
//              S = Q K^T,  dP = dO V^T,  P = exp2(c S - lse),  dS = P * (dP - delta),  dQ += dS K
//            It starts by computing delta = row sums of dO * O, and leaves {lse, delta} for the second kernel.
//   dK, dV   a block owns key rows and walks over the query heads of their group and, in each, tiles of queries:
//              S^T = K Q^T,  dP^T = V dO^T,  P^T, dS^T as above,  dV += P^T dO,  dK += dS^T Q
//            Transposed, so that P^T and dS^T stand in registers as the A operands of the last two products.
//
// S and dP are computed twice: seven products where the fused kernel of FlashAttention-2 has five, but none of its
// atomics, its fp32 copy of dQ, or its passage of P and dS through shared memory. c = scale log2(e); lse is kept in
// units of log2. Query rows beyond the end have lse = +inf and with it P = 0.
//
// Both walk through a tile in steps of kStep columns, which bounds the registers that S and dP take; the operands a
// warp owns (its rows of Q and dO, or of K and V) stay in registers where they fit. Tiles beyond the diagonal or
// outside the documents of a warp's rows are skipped by that warp; masks are applied only where a border passes.
#pragma once

#include <cuda_runtime.h>

#include "kernels/attention.h"
#include "kernels/attention_tile.cuh"

namespace kinoe::cuda {

/// attention_stats_rows() is a multiple of this, which the tiles of both kernels divide.
inline constexpr int kStatsRows = static_cast<int>(kAttentionStatsRows);

struct BackwardParams {
  bf16* d_qkv;
  float2* stats;  // [B, H, stats_length]: {lse in units of log2, delta}
  const bf16 *d_out, *out, *qkv;
  const float* lse;
  const int32_t *doc_start, *doc_end;                // null: documents do not bound attention
  int length, stats_length, heads, kv_heads, group;  // group: query heads per key head
  int pitch, out_pitch;                              // elements from one row of qkv, or of out, to the next
  uint32_t pass_bytes, out_pass_bytes, tile_bytes, out_tile_bytes, values_from_keys_bytes;
  float scale, scale_log2;
  WorkOrder order;
};

/// Where a block works; kept in shared memory, since registers are what both kernels have least of.
struct alignas(16) QueryPlace {
  const bf16* keys;  // of the block's head
  int unit, batch, head, row0;
};
struct alignas(16) KeyPlace {
  const bf16 *queries, *d_out;  // of the group's first head
  const float2* stats;
  int first_tile, end_tile;
  int batch, kv_head, row0;
};

/// P and dS of one score, in place of S and dP.
__device__ __forceinline__ void score_gradient(float& s, float& dp, float scale_log2, float lse,
                                               float delta) {
  s = exp2_fast(fmaf(s, scale_log2, -lse));
  dp = s * (dp - delta);
}

/// Accumulators rounded to bf16 as A operands of the next product.
template <int kM, int kN>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[kM][kN / 2][4], const float (&acc)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        a[m][n / 2][2 * (n % 2) + half] = pack_bf16(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
}

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&acc)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = 0;
}

// ---- dQ ---------------------------------------------------------------------------------------------------------

template <int kHeadDim_, int kM_, int kWarps_, int kBlockN_, int kStep_, int kUnroll_, bool kInRegisters_,
          int kBlocksPerSm_>
struct QueryConfig {
  static constexpr int kHeadDim = kHeadDim_, kM = kM_, kWarps = kWarps_, kBlockN = kBlockN_, kStep = kStep_;
  static constexpr bool kInRegisters = kInRegisters_;  // Q and dO
  static constexpr int kUnroll = kUnroll_, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kWarpRows = 16 * kM, kBlockM = kWarpRows * kWarps, kThreads = 32 * kWarps;
  static_assert(kBlockN % kWarpRows == 0, "the diagonal of a warp's rows must lie in one tile");
  static_assert(kBlockN % kStep == 0 && kStep % 16 == 0 && kStatsRows % kBlockM == 0);

  static constexpr int kRowTile = Tile<kHeadDim>::bytes(kBlockM), kTileBytes = Tile<kHeadDim>::bytes(kBlockN);
  static constexpr int kQueriesAt = 0, kDOutAt = kRowTile, kKeysAt = 2 * kRowTile;
  static constexpr int kValuesAt = kKeysAt + 2 * kTileBytes, kStatsAt = kValuesAt + 2 * kTileBytes;
  static constexpr int kStartsAt = kStatsAt + 8 * kBlockM, kTilesAt = kStartsAt + 4 * kBlockM;
  static constexpr int kPlaceAt = kTilesAt + 16 * kWarps;
  static constexpr int kSharedBytes = kPlaceAt + static_cast<int>(sizeof(QueryPlace));
  static_assert(kSharedBytes <= static_cast<int>(kMaxSharedBytes));
};

/// Which tiles a warp meets, in falling order (as in the forward pass).
struct alignas(16) QueryTiles {
  int diagonal, leftmost, clear, first;
};

/// lse and delta of the block's rows, from dO in shared memory, which it waits for, and O in global memory.
template <class Config>
__device__ __forceinline__ void write_stats(const BackwardParams& p, unsigned char* shared, int unit,
                                            int batch, int head, int row0) {
  using T = Tile<Config::kHeadDim>;
  constexpr int kRowsPerPass = Config::kThreads / T::kLanesPerRow, kPasses = Config::kBlockM / kRowsPerPass;
  static_assert(Config::kBlockM % kRowsPerPass == 0);
  const int thread = thread_index(), thread_row = thread / T::kLanesPerRow,
            thread_chunk = thread % T::kLanesPerRow;
  uint4 out[kPasses][T::kCopiesPerRow];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int t = row0 + pass * kRowsPerPass + thread_row;
    const bf16* from =
        p.out + (static_cast<int64_t>(batch) * p.length + t) * p.out_pitch + head * Config::kHeadDim;
#pragma unroll
    for (int i = 0; i < T::kCopiesPerRow; ++i)
      out[pass][i] = t < p.length
                         ? *reinterpret_cast<const uint4*>(from + (thread_chunk + i * T::kLanesPerRow) * 8)
                         : make_uint4(0, 0, 0, 0);
  }
  copy_async_wait<1>();
  __syncthreads();
  auto* stats = reinterpret_cast<float2*>(shared + Config::kStatsAt);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * kRowsPerPass + thread_row, t = row0 + row;
    float delta = 0;
#pragma unroll
    for (int i = 0; i < T::kCopiesPerRow; ++i) {
      const uint4 o = out[pass][i];
      const uint4 d = *reinterpret_cast<const uint4*>(shared + Config::kDOutAt +
                                                      T::offset(row, thread_chunk + i * T::kLanesPerRow));
      const uint32_t os[4] = {o.x, o.y, o.z, o.w}, ds[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        delta += low_bf16(os[j]) * low_bf16(ds[j]) + high_bf16(os[j]) * high_bf16(ds[j]);
    }
    delta = warp_sum<T::kLanesPerRow>(delta);
    if (thread_chunk == 0) {
      const float lse = t < p.length ? p.lse[static_cast<int64_t>(unit) * p.length + t] * kLog2E : INFINITY;
      stats[row] = make_float2(lse, delta);
      p.stats[static_cast<int64_t>(unit) * p.stats_length + t] = make_float2(lse, delta);
    }
  }
}

/// The tile of keys at `keys`, and its values a constant behind. For the mask: the warp's first row, the tile's first
/// column, and the first visible column of each of the warp's rows.
template <class Config, bool kMasked, class RowOperand>
__device__ __forceinline__ void add_to_dq(float (&dq)[Config::kM][Config::kHeadDim / 8][4],
                                          const RowOperand& queries, const RowOperand& d_out,
                                          const float2 (&stats)[Config::kM][2], uint32_t keys,
                                          const typename Tile<Config::kHeadDim>::Lanes& lanes,
                                          float scale_log2, int first_row, int column,
                                          const int32_t* starts) {
  constexpr int kHeadDim = Config::kHeadDim, kM = Config::kM, kStep = Config::kStep, kN = kStep / 8;
#pragma unroll Config::kUnroll
  for (int step = 0; step < Config::kBlockN; step += kStep) {
    if (kMasked && column + step > first_row + Config::kWarpRows - 1) break;
    const uint32_t keys_at = lanes.columns_first(keys + static_cast<uint32_t>(Tile<kHeadDim>::bytes(step)));
    float s[kM][kN][4], dp[kM][kN][4];
    clear(s);
    multiply_transposed<kHeadDim>(s, queries.fragments(), keys_at);
    clear(dp);
    multiply_transposed<kHeadDim>(dp, d_out.fragments(), keys_at + (Config::kValuesAt - Config::kKeysAt));

    if constexpr (kMasked) {
      const int lane = thread_index() % 32, lane_column = column + step + 2 * (lane % 4);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * m + 8 * half + lane / 4;
          const int last = first_row + row - lane_column, first = starts[row] - lane_column;
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (8 * n + i > last || 8 * n + i < first) s[m][n][2 * half + i] = -INFINITY;
        }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          score_gradient(s[m][n][i], dp[m][n][i], scale_log2, stats[m][i / 2].x, stats[m][i / 2].y);

    uint32_t ds[kM][kN / 2][4];
    pack_operand(ds, dp);
    multiply<kHeadDim>(dq, ds, lanes.rows_first(keys + static_cast<uint32_t>(Tile<kHeadDim>::bytes(step))));
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_dq_kernel(const BackwardParams p) {
  constexpr int kHeadDim = Config::kHeadDim, kM = Config::kM, kBlockM = Config::kBlockM,
                kBlockN = Config::kBlockN;
  constexpr int kThreads = Config::kThreads, kTileBytes = Config::kTileBytes, kWarpRows = Config::kWarpRows;
  using CopyKeys = TileCopy<kHeadDim, kBlockN, kThreads>;
  using CopyRows = TileCopy<kHeadDim, kBlockM, kThreads>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t base = shared_address(shared);
  auto* starts = reinterpret_cast<int32_t*>(shared + Config::kStartsAt);
  auto* tiles = reinterpret_cast<QueryTiles*>(shared + Config::kTilesAt);
  auto* place = reinterpret_cast<QueryPlace*>(shared + Config::kPlaceAt);

  const auto [unit, rank] = p.order[static_cast<int>(blockIdx.x)];
  const int batch = unit / p.heads, head = unit % p.heads, row0 = (p.order.blocks - 1 - rank) * kBlockM;
  const int64_t sequence = static_cast<int64_t>(batch) * p.length;
  const int32_t* doc_start = p.doc_start ? p.doc_start + sequence : nullptr;
  const int last_tile = (min(row0 + kBlockM, p.length) - 1) / kBlockN;
  const int first_tile = doc_start ? doc_start[row0] / kBlockN : 0;

  const bf16* keys = p.qkv + sequence * p.pitch + (p.heads + head / p.group) * kHeadDim;
  const auto stage_of = [](int tile) { return static_cast<uint32_t>(tile % 2 * kTileBytes); };
  const auto copy_keys_and_values = [&](const bf16* keys, int tile, int present) {
    const bf16* from = after(keys, tile, p.tile_bytes);
    const uint32_t to = base + stage_of(tile);
    CopyKeys::start(to + Config::kKeysAt, from, p.pitch, p.pass_bytes, present);
    CopyKeys::start(to + Config::kValuesAt, after(from, p.values_from_keys_bytes), p.pitch, p.pass_bytes,
                    present);
    copy_async_commit();
  };
  CopyRows::start(base + Config::kQueriesAt, p.qkv + (sequence + row0) * p.pitch + head * kHeadDim, p.pitch,
                  p.pass_bytes, p.length - row0);
  CopyRows::start(base + Config::kDOutAt, p.d_out + (sequence + row0) * p.out_pitch + head * kHeadDim,
                  p.out_pitch, p.out_pass_bytes, p.length - row0);
  copy_async_commit();
  copy_keys_and_values(keys, last_tile, p.length - last_tile * kBlockN);
  if (thread_index() == 0) *place = {keys, unit, batch, head, row0};
  for (int i = thread_index(); i < kBlockM; i += kThreads)
    starts[i] = doc_start ? doc_start[min(row0 + i, p.length - 1)] : 0;
  write_stats<Config>(p, shared, unit, batch, head, row0);

  const int lane = thread_index() % 32;
  if (const int warp = warp_index(), warp_row = warp * kWarpRows; lane == 0)
    tiles[warp] = {row0 + warp_row < p.length ? (row0 + warp_row) / kBlockN : -1, starts[warp_row] / kBlockN,
                   (starts[warp_row + kWarpRows - 1] + kBlockN - 1) / kBlockN, first_tile};
  const typename Tile<kHeadDim>::Lanes lanes(lane);
  const Operand<Config::kInRegisters, kHeadDim, kM> queries(base + Config::kQueriesAt, lanes);
  const Operand<Config::kInRegisters, kHeadDim, kM> d_out(base + Config::kDOutAt, lanes);
  __syncthreads();
  float2 stats[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      stats[m][half] = reinterpret_cast<const float2*>(
          shared + Config::kStatsAt)[warp_index() * kWarpRows + 16 * m + 8 * half + lane / 4];
  float dq[kM][kHeadDim / 8][4];
  clear(dq);

  for (int tile = last_tile;; --tile) {
    const QueryTiles mine = tiles[warp_index()];
    if (tile < mine.first) break;
    copy_async_wait<0>();
    __syncthreads();
    if (tile > mine.first) copy_keys_and_values(place->keys, tile - 1, kAllRows);

    if (tile > mine.diagonal || tile < mine.leftmost) continue;
    const uint32_t keys_at = base + Config::kKeysAt + stage_of(tile);
    if (tile == mine.diagonal || tile < mine.clear) {
      const int warp_row = warp_index() * kWarpRows;
      add_to_dq<Config, true>(dq, queries, d_out, stats, keys_at, lanes, p.scale_log2, place->row0 + warp_row,
                              tile * kBlockN, starts + warp_row);
    } else {
      add_to_dq<Config, false>(dq, queries, d_out, stats, keys_at, lanes, p.scale_log2, 0, 0, nullptr);
    }
  }

  const QueryPlace end = *place;
  const int warp_row = warp_index() * kWarpRows, first_row = end.row0 + warp_row;
  float factor[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) factor[m][0] = factor[m][1] = p.scale;
  store_rows<kHeadDim>(
      dq, factor, shared + Config::kQueriesAt + Tile<kHeadDim>::bytes(warp_row),
      p.d_qkv + (static_cast<int64_t>(end.batch) * p.length + first_row) * p.pitch + end.head * kHeadDim,
      p.pitch, p.length - first_row);
}

// ---- dK and dV --------------------------------------------------------------------------------------------------

template <int kHeadDim_, int kM_, int kWarps_, int kBlockM_, int kStep_, int kUnroll_, bool kKeysInRegisters_,
          bool kValuesInRegisters_, int kBlocksPerSm_>
struct KeyConfig {
  static constexpr int kHeadDim = kHeadDim_, kM = kM_, kWarps = kWarps_, kBlockM = kBlockM_, kStep = kStep_;
  static constexpr bool kKeysInRegisters = kKeysInRegisters_, kValuesInRegisters = kValuesInRegisters_;
  static constexpr int kUnroll = kUnroll_, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kWarpRows = 16 * kM, kBlockN = kWarpRows * kWarps, kThreads = 32 * kWarps;
  static_assert(kBlockM % kStep == 0 && kStep % 16 == 0 && kStatsRows % kBlockM == 0 &&
                kBlockM / 2 <= kThreads);

  static constexpr int kRowTile = Tile<kHeadDim>::bytes(kBlockN), kTileBytes = Tile<kHeadDim>::bytes(kBlockM);
  static constexpr int kKeysAt = 0, kValuesAt = kRowTile, kQueriesAt = 2 * kRowTile;
  static constexpr int kDOutAt = kQueriesAt + 2 * kTileBytes, kStatsAt = kDOutAt + 2 * kTileBytes;
  static constexpr int kStatsBytes = 8 * kBlockM;
  static constexpr int kEndsAt = kStatsAt + 2 * kStatsBytes, kTilesAt = kEndsAt + 4 * kBlockN;
  static constexpr int kStepsAt = kTilesAt + 16 * kWarps, kPlaceAt = kStepsAt + 16 * kWarps;
  static constexpr int kSharedBytes = kPlaceAt + static_cast<int>(sizeof(KeyPlace));
  static_assert(kSharedBytes <= static_cast<int>(kMaxSharedBytes));
};

/// Which tiles of queries a warp meets in each head: [first, last), unmasked in [clear_from, clear_to).
struct alignas(16) KeyTiles {
  int first, last, clear_from, clear_to;
};

/// Where a warp stands in its walk; every warp has its own copy.
struct alignas(16) KeyStep {
  int tile, group_head, stage, unused;
};

/// The tile of queries at `queries`, and its dO a constant behind. For the mask: the warp's first row, the tile's first
/// column, and one past the last visible column of each of the warp's rows.
template <class Config, bool kMasked, class KeyOperand, class ValueOperand>
__device__ __forceinline__ void add_to_dk_dv(float (&dk)[Config::kM][Config::kHeadDim / 8][4],
                                             float (&dv)[Config::kM][Config::kHeadDim / 8][4],
                                             const KeyOperand& keys, const ValueOperand& values,
                                             uint32_t queries, const unsigned char* stats,
                                             const typename Tile<Config::kHeadDim>::Lanes& lanes,
                                             float scale_log2, int first_row, int column,
                                             const int32_t* ends) {
  constexpr int kHeadDim = Config::kHeadDim, kM = Config::kM, kStep = Config::kStep, kN = kStep / 8;
#pragma unroll Config::kUnroll
  for (int step = 0; step < Config::kBlockM; step += kStep) {
    if (kMasked && column + step + kStep <= first_row) continue;
    constexpr uint32_t kDOut = Config::kDOutAt - Config::kQueriesAt;
    const auto at = static_cast<uint32_t>(Tile<kHeadDim>::bytes(step));
    const uint32_t columns_first = lanes.columns_first(queries + at);
    float s[kM][kN][4], dp[kM][kN][4];
    clear(s);
    multiply_transposed<kHeadDim>(s, keys.fragments(), columns_first);
    clear(dp);
    multiply_transposed<kHeadDim>(dp, values.fragments(), columns_first + kDOut);

    const int lane = thread_index() % 32;
    if constexpr (kMasked) {
      const int lane_column = column + step + 2 * (lane % 4);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * m + 8 * half + lane / 4;
          const int first = first_row + row - lane_column, end = ends[row] - lane_column;
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (8 * n + i < first || 8 * n + i >= end) s[m][n][2 * half + i] = -INFINITY;
        }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float4 pair = *reinterpret_cast<const float4*>(stats + 8 * (step + 8 * n) + 16 * (lane % 4));
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          score_gradient(s[m][n][2 * half], dp[m][n][2 * half], scale_log2, pair.x, pair.y);
          score_gradient(s[m][n][2 * half + 1], dp[m][n][2 * half + 1], scale_log2, pair.z, pair.w);
        }
    }
    const uint32_t rows_first = lanes.rows_first(queries + at);
    uint32_t a[kM][kN / 2][4];
    pack_operand(a, s);
    multiply<kHeadDim>(dv, a, rows_first + kDOut);
    pack_operand(a, dp);
    multiply<kHeadDim>(dk, a, rows_first);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_dk_dv_kernel(const BackwardParams p) {
  constexpr int kHeadDim = Config::kHeadDim, kM = Config::kM, kBlockM = Config::kBlockM,
                kBlockN = Config::kBlockN;
  constexpr int kThreads = Config::kThreads, kTileBytes = Config::kTileBytes, kWarpRows = Config::kWarpRows;
  using CopyQueries = TileCopy<kHeadDim, kBlockM, kThreads>;
  using CopyRows = TileCopy<kHeadDim, kBlockN, kThreads>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t base = shared_address(shared);
  auto* ends = reinterpret_cast<int32_t*>(shared + Config::kEndsAt);
  auto* tiles = reinterpret_cast<KeyTiles*>(shared + Config::kTilesAt);
  auto* steps = reinterpret_cast<KeyStep*>(shared + Config::kStepsAt);
  auto* place = reinterpret_cast<KeyPlace*>(shared + Config::kPlaceAt);

  const auto [unit, rank] = p.order[static_cast<int>(blockIdx.x)];
  const int batch = unit / p.kv_heads, kv_head = unit % p.kv_heads, row0 = rank * kBlockN;
  const int64_t sequence = static_cast<int64_t>(batch) * p.length;
  const int32_t* doc_end = p.doc_end ? p.doc_end + sequence : nullptr;
  const int first_tile = row0 / kBlockM;
  const int last_query = doc_end ? doc_end[min(row0 + kBlockN, p.length) - 1] : p.length;
  const int end_tile = (last_query + kBlockM - 1) / kBlockM;

  const auto copy_queries = [&](const KeyPlace& from, int group_head, int tile, int stage) {
    const int present = p.length - tile * kBlockM;
    const auto to = base + static_cast<uint32_t>(stage * kTileBytes);
    CopyQueries::start(to + Config::kQueriesAt,
                       after(from.queries + group_head * kHeadDim, tile, p.tile_bytes), p.pitch, p.pass_bytes,
                       present);
    CopyQueries::start(to + Config::kDOutAt,
                       after(from.d_out + group_head * kHeadDim, tile, p.out_tile_bytes), p.out_pitch,
                       p.out_pass_bytes, present);
    if (thread_index() < kBlockM / 2)
      copy_async(
          base + static_cast<uint32_t>(Config::kStatsAt + stage * Config::kStatsBytes + 16 * thread_index()),
          from.stats + static_cast<int64_t>(group_head) * p.stats_length + tile * kBlockM +
              2 * thread_index(),
          true);
    copy_async_commit();
  };
  const KeyPlace here{p.qkv + sequence * p.pitch + kv_head * p.group * kHeadDim,
                      p.d_out + sequence * p.out_pitch + kv_head * p.group * kHeadDim,
                      p.stats + (static_cast<int64_t>(batch) * p.heads + kv_head * p.group) * p.stats_length,
                      first_tile,
                      end_tile,
                      batch,
                      kv_head,
                      row0};
  const bf16* keys_from = p.qkv + (sequence + row0) * p.pitch + (p.heads + kv_head) * kHeadDim;
  CopyRows::start(base + Config::kKeysAt, keys_from, p.pitch, p.pass_bytes, p.length - row0);
  CopyRows::start(base + Config::kValuesAt, after(keys_from, p.values_from_keys_bytes), p.pitch, p.pass_bytes,
                  p.length - row0);
  copy_async_commit();
  copy_queries(here, 0, first_tile, 0);
  if (thread_index() == 0) *place = here;
  for (int i = thread_index(); i < kBlockN; i += kThreads)
    ends[i] = doc_end ? doc_end[min(row0 + i, p.length - 1)] : p.stats_length;
  copy_async_wait<1>();
  __syncthreads();

  const int lane = thread_index() % 32;
  if (const int warp = warp_index(), warp_row = warp * kWarpRows; lane == 0) {
    steps[warp] = {first_tile, 0, 0, 0};
    const int first_row = row0 + warp_row;
    tiles[warp] = {first_row < p.length ? first_row / kBlockM : INT32_MAX,
                   (ends[warp_row + kWarpRows - 1] + kBlockM - 1) / kBlockM,
                   (first_row + kWarpRows - 1 + kBlockM - 1) / kBlockM, ends[warp_row] / kBlockM};
  }
  __syncwarp();
  const typename Tile<kHeadDim>::Lanes lanes(lane);
  const Operand<Config::kKeysInRegisters, kHeadDim, kM> keys(base + Config::kKeysAt, lanes);
  const Operand<Config::kValuesInRegisters, kHeadDim, kM> values(base + Config::kValuesAt, lanes);
  float dk[kM][kHeadDim / 8][4], dv[kM][kHeadDim / 8][4];
  clear(dk);
  clear(dv);

  while (true) {
    const KeyTiles mine = tiles[warp_index()];
    const KeyStep step = steps[warp_index()];
    if (step.group_head == p.group) break;
    copy_async_wait<0>();
    __syncthreads();
    {
      KeyStep next = {step.tile + 1, step.group_head, step.stage ^ 1, 0};
      if (next.tile == place->end_tile) {
        next.tile = place->first_tile;
        ++next.group_head;
      }
      if (thread_index() % 32 == 0) steps[warp_index()] = next;
      if (next.group_head < p.group) copy_queries(*place, next.group_head, next.tile, next.stage);
      __syncwarp();
    }
    if (step.tile < mine.first || step.tile >= mine.last) continue;
    const uint32_t queries_at = base + static_cast<uint32_t>(Config::kQueriesAt + step.stage * kTileBytes);
    const unsigned char* stats_at = shared + Config::kStatsAt + step.stage * Config::kStatsBytes;
    if (step.tile < mine.clear_from || step.tile >= mine.clear_to) {
      const int warp_row = warp_index() * kWarpRows;
      add_to_dk_dv<Config, true>(dk, dv, keys, values, queries_at, stats_at, lanes, p.scale_log2,
                                 place->row0 + warp_row, step.tile * kBlockM, ends + warp_row);
    } else {
      add_to_dk_dv<Config, false>(dk, dv, keys, values, queries_at, stats_at, lanes, p.scale_log2, 0, 0,
                                  nullptr);
    }
  }

  const KeyPlace end = *place;
  const int warp_row = warp_index() * kWarpRows, first_row = end.row0 + warp_row;
  float scale[kM][2], one[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    scale[m][0] = scale[m][1] = p.scale;
    one[m][0] = one[m][1] = 1;
  }
  bf16* d_keys = p.d_qkv + (static_cast<int64_t>(end.batch) * p.length + first_row) * p.pitch +
                 (p.heads + end.kv_head) * kHeadDim;
  store_rows<kHeadDim>(dk, scale, shared + Config::kKeysAt + Tile<kHeadDim>::bytes(warp_row), d_keys, p.pitch,
                       p.length - first_row);
  store_rows<kHeadDim>(dv, one, shared + Config::kValuesAt + Tile<kHeadDim>::bytes(warp_row),
                       d_keys + p.kv_heads * kHeadDim, p.pitch, p.length - first_row);
}

// ---- Launch -----------------------------------------------------------------------------------------------------

/// What both kernels are given; `rows_per_pass`, and the rows of the tiles that pass by, are theirs.
inline BackwardParams backward_params(const AttentionBackward& args, int rows_per_pass, int tile_rows,
                                      const WorkOrder& order) {
  const int64_t head_dim = args.out.columns() / args.heads;
  const auto row_bytes = static_cast<uint32_t>(args.qkv.columns() * 2);
  const auto out_row_bytes = static_cast<uint32_t>(args.out.columns() * 2);
  return {.d_qkv = args.d_qkv.as<bf16>(),
          .stats = reinterpret_cast<float2*>(args.scratch.as<int32_t>()),
          .d_out = args.d_out.as<bf16>(),
          .out = args.out.as<bf16>(),
          .qkv = args.qkv.as<bf16>(),
          .lse = args.lse.as<float>(),
          .doc_start = args.doc_start ? args.doc_start.as<int32_t>() : nullptr,
          .doc_end = args.doc_end ? args.doc_end.as<int32_t>() : nullptr,
          .length = static_cast<int>(args.qkv.dim(1)),
          .stats_length = static_cast<int>(attention_stats_rows(args.qkv.dim(1))),
          .heads = static_cast<int>(args.heads),
          .kv_heads = static_cast<int>(args.kv_heads),
          .group = static_cast<int>(args.heads / args.kv_heads),
          .pitch = static_cast<int>(args.qkv.columns()),
          .out_pitch = static_cast<int>(args.out.columns()),
          .pass_bytes = row_bytes * static_cast<uint32_t>(rows_per_pass),
          .out_pass_bytes = out_row_bytes * static_cast<uint32_t>(rows_per_pass),
          .tile_bytes = row_bytes * static_cast<uint32_t>(tile_rows),
          .out_tile_bytes = out_row_bytes * static_cast<uint32_t>(tile_rows),
          .values_from_keys_bytes = static_cast<uint32_t>(args.kv_heads * head_dim * 2),
          .scale = args.scale,
          .scale_log2 = args.scale * kLog2E,
          .order = order};
}

/// dQ, and {lse, delta} in args.scratch.
template <class Config>
void run_attention_dq(const Context& ctx, const AttentionBackward& args) {
  const int64_t batch = args.qkv.dim(0), length = args.qkv.dim(1);
  const int64_t bytes_per_head = length * Config::kHeadDim * 4 * args.kv_heads / args.heads;
  const BackwardParams params = backward_params(
      args, TileCopy<Config::kHeadDim, Config::kBlockN, Config::kThreads>::kRowsPerPass, Config::kBlockN,
      WorkOrder(ceil_div<int64_t>(length, Config::kBlockM), batch * args.heads, bytes_per_head));
  launch_attention(ctx, attention_dq_kernel<Config>, Config::kThreads, Config::kSharedBytes, params);
}

/// dK and dV, after run_attention_dq.
template <class Config>
void run_attention_dk_dv(const Context& ctx, const AttentionBackward& args) {
  const int64_t batch = args.qkv.dim(0), length = args.qkv.dim(1);
  const int64_t bytes_per_head = length * Config::kHeadDim * 4 * args.heads / args.kv_heads;
  const BackwardParams params = backward_params(
      args, TileCopy<Config::kHeadDim, Config::kBlockM, Config::kThreads>::kRowsPerPass, Config::kBlockM,
      WorkOrder(ceil_div<int64_t>(length, Config::kBlockN), batch * args.kv_heads, bytes_per_head));
  launch_attention(ctx, attention_dk_dv_kernel<Config>, Config::kThreads, Config::kSharedBytes, params);
}

/// The shapes for each head size: what reads the least shared memory per product among those that fit into 255 registers
/// without a spill on sm_80 and sm_90a; dQ of 128, whose two row tiles per warp leave Q and dO in shared memory, since that
/// took 7 % less time on an H200 than one with both in registers (dev/bench_attention.cu, B = 4, T = 4096).
template <int kHeadDim>
struct QueryChoice;
//                                           head  kM warps  N step unroll Q, dO in regs blocks/SM
template <>
struct QueryChoice<64> : QueryConfig<64, 2, 4, 64, 16, 2, true, 2> {};
template <>
struct QueryChoice<80> : QueryConfig<80, 1, 4, 64, 64, 1, true, 2> {};
template <>
struct QueryChoice<96> : QueryConfig<96, 1, 4, 64, 64, 1, true, 2> {};
template <>
struct QueryChoice<128> : QueryConfig<128, 2, 4, 32, 32, 1, false, 2> {};

template <int kHeadDim>
struct KeyChoice;
//                                       head  kM warps  M step unroll K, V in regs blocks/SM
template <>
struct KeyChoice<64> : KeyConfig<64, 2, 4, 64, 16, 1, true, true, 2> {};
template <>
struct KeyChoice<80> : KeyConfig<80, 1, 4, 64, 64, 1, true, true, 2> {};
template <>
struct KeyChoice<96> : KeyConfig<96, 1, 4, 64, 64, 1, false, false, 2> {};
template <>
struct KeyChoice<128> : KeyConfig<128, 1, 4, 64, 16, 1, true, true, 2> {};

}  // namespace kinoe::cuda
