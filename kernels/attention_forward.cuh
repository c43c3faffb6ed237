// Portable flash attention, forward: bf16 on the tensor cores through mma.sync, sm_80 and later.
//
// One block computes kBlockM query rows of one head; each of its warps owns 16 kM of them from beginning to end. Tiles
// of kBlockN keys and values pass through a double buffer in shared memory, from the diagonal leftwards:
//
//   wait for tile n; barrier; start copying tile n - 1 into the other buffer
//   S = Q K_n^T                              accumulators of 16 kM x kBlockN, fp32
//   P = exp2(c S - c m)                      c = scale log2(e): one FFMA and one MUFU per score
//   l += row sums of P, per lane             the four lanes of a row are added up once, at the end
//   O += P V_n                               P rounded to bf16 in the registers it stands in
//
// The reference m of a row only has to be near its maximum: P, l and O share it, and it cancels. So it is raised, and O
// and l rescaled, only when some score of the warp exceeds it by more than 8 / c (a factor of 2^8 on P, which bf16 and
// fp32 carry with the same relative error); after the first tiles that is rare, and neither row maxima across lanes nor
// the rescaling of O are paid for. (The idea is FlashAttention-4's conditional rescaling; 2^8 is its threshold too.)
//
// The first tile a warp meets holds the diagonal of all its rows, so every row has at least one score by then and m is
// finite: the unmasked tiles need no guard. Tiles wholly above the diagonal, or wholly left of the documents of a
// warp's rows, are skipped by that warp; masks are applied only where a border passes through.
#pragma once

#include <cuda_runtime.h>

#include "kernels/attention.h"
#include "kernels/attention_tile.cuh"

namespace kinoe::cuda {

struct ForwardParams {
  bf16* out;
  float* lse;
  const bf16* qkv;
  const int32_t* doc_start;            // null: documents do not bound attention
  int length, heads, kv_heads, pitch;  // pitch: elements from one row of qkv to the next
  uint32_t pass_bytes, tile_bytes, values_from_keys_bytes;
  float scale, scale_log2, slack;  // slack: 8 / scale_log2, see above
  WorkOrder order;
};

/// Where a block works, and which tiles each of its warps meets: kept in shared memory, since registers are what the
/// kernel has least of.
struct alignas(16) ForwardPlace {
  const bf16* keys;  // of the block's head
  int unit, batch, head, row0;
};
struct alignas(16) ForwardTiles {
  int diagonal;  // the warp's first tile (they are visited in falling order); -1 where the warp has no rows
  int leftmost;  // its last one, where its first row's document begins
  int clear;  // those before this one need a mask on the left: its last row's document begins in or before it
  int first;  // the block's last one
};

/// kM: 16-row tiles per warp. More of them reuse each K and V fragment more often (shared memory is the limit below 2)
/// and cost registers.
template <int kHeadDim_, int kM_, int kWarps_, int kBlockN_, int kStep_, bool kQueryInRegisters_,
          int kBlocksPerSm_>
struct ForwardConfig {
  static constexpr int kHeadDim = kHeadDim_, kM = kM_, kWarps = kWarps_, kBlockN = kBlockN_, kStep = kStep_;
  static constexpr bool kQueryInRegisters = kQueryInRegisters_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kWarpRows = 16 * kM, kBlockM = kWarpRows * kWarps, kThreads = 32 * kWarps;
  static_assert(kStep % kWarpRows == 0, "the diagonal of a warp's rows must lie in one step");
  static_assert(kBlockN % kStep == 0);

  using QueryTile = Tile<kHeadDim>;
  static constexpr int kTileBytes = QueryTile::bytes(kBlockN);
  static constexpr int kQueryAt = 0, kKeysAt = QueryTile::bytes(kBlockM),
                       kValuesAt = kKeysAt + 2 * kTileBytes;
  static constexpr int kStartsAt = kValuesAt + 2 * kTileBytes;
  static constexpr int kTilesAt = kStartsAt + kBlockM * static_cast<int>(sizeof(int32_t));
  static constexpr int kPlaceAt = kTilesAt + 16 * kWarps;
  static constexpr int kSharedBytes = kPlaceAt + static_cast<int>(sizeof(ForwardPlace));
  static_assert(kSharedBytes <= static_cast<int>(kMaxSharedBytes));
};

/// What a warp carries from tile to tile.
template <class Config>
struct ForwardRows {
  static constexpr int kM = Config::kM, kN = Config::kStep / 8, kHeadDim = Config::kHeadDim;

  float out[kM][kHeadDim / 8][4];
  float reference[kM][2];  // m, in units of raw scores
  float sum[kM][2];        // l, this lane's part

  __device__ __forceinline__ ForwardRows() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][n][i] = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[m][half] = -INFINITY;
        sum[m][half] = 0;
      }
    }
  }

  /// `maximum` is this lane's; afterwards `reference` covers the maximum of each whole row.
  __device__ __forceinline__ void raise_reference(const float (&maximum)[kM][2], float scale_log2) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float row = fmaxf(reference[m][half], maximum[m][half]);
        row = fmaxf(row, __shfl_xor_sync(kAllLanes, row, 1));
        row = fmaxf(row, __shfl_xor_sync(kAllLanes, row, 2));
        const float factor = exp2_fast((reference[m][half] - row) * scale_log2);
        reference[m][half] = row;
        sum[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
          out[m][n][2 * half] *= factor;
          out[m][n][2 * half + 1] *= factor;
        }
      }
  }

  /// One tile of keys and values at their addresses for this lane, in steps from right to left. For the mask: the
  /// warp's first row, the tile's first column, and the first visible column of each of the warp's rows.
  template <bool kMasked, class QueryOperand>
  __device__ __forceinline__ void add_tile(const QueryOperand& query, uint32_t keys, uint32_t values,
                                           float scale_log2, float slack, int first_row, int column,
                                           const int32_t* starts) {
#pragma unroll
    for (int step = Config::kBlockN - Config::kStep; step >= 0; step -= Config::kStep) {
      if (kMasked && column + step > first_row + Config::kWarpRows - 1) continue;
      const auto at = static_cast<uint32_t>(Tile<kHeadDim>::bytes(step));
      add_step<kMasked>(query, keys + at, values + at, scale_log2, slack, first_row, column + step, starts);
    }
  }

  template <bool kMasked, class QueryOperand>
  __device__ __forceinline__ void add_step(const QueryOperand& query, uint32_t keys, uint32_t values,
                                           float scale_log2, float slack, int first_row, int column,
                                           const int32_t* starts) {
    float s[kM][kN][4] = {};
    multiply_transposed<kHeadDim>(s, query.fragments(), keys);

    if constexpr (kMasked) {
      const int lane = thread_index() % 32;
      column += 2 * (lane % 4);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * m + 8 * half + lane / 4;
          const int last = first_row + row - column, first = starts[row] - column;
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (8 * n + i > last || 8 * n + i < first) s[m][n][2 * half + i] = -INFINITY;
        }
    }

    float maximum[kM][2];
    bool exceeded = false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float value = fmaxf(s[m][0][2 * half], s[m][0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < kN; ++n) value = fmaxf(value, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        maximum[m][half] = value;
        exceeded |= value > reference[m][half] + slack;
      }
    if (__any_sync(kAllLanes, exceeded)) raise_reference(maximum, scale_log2);

    uint32_t p[kM][kN / 2][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = -reference[m][half] * scale_log2;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const float p0 = exp2_fast(fmaf(s[m][n][2 * half], scale_log2, shift));
          const float p1 = exp2_fast(fmaf(s[m][n][2 * half + 1], scale_log2, shift));
          sum[m][half] += p0 + p1;
          p[m][n / 2][2 * (n % 2) + half] = pack_bf16(p0, p1);
        }
      }
    multiply<kHeadDim>(out, p, values);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_forward_kernel(const ForwardParams p) {
  constexpr int kHeadDim = Config::kHeadDim, kM = Config::kM, kBlockM = Config::kBlockM,
                kBlockN = Config::kBlockN;
  constexpr int kThreads = Config::kThreads, kTileBytes = Config::kTileBytes, kWarpRows = Config::kWarpRows;
  using CopyKeys = TileCopy<kHeadDim, kBlockN, kThreads>;
  using CopyQueries = TileCopy<kHeadDim, kBlockM, kThreads>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t base = shared_address(shared);
  auto* starts = reinterpret_cast<int32_t*>(shared + Config::kStartsAt);
  auto* tiles = reinterpret_cast<ForwardTiles*>(shared + Config::kTilesAt);
  auto* place = reinterpret_cast<ForwardPlace*>(shared + Config::kPlaceAt);

  const auto [unit, rank] = p.order[static_cast<int>(blockIdx.x)];
  const int batch = unit / p.heads, head = unit % p.heads, row0 = (p.order.blocks - 1 - rank) * kBlockM;
  const int32_t* doc_start = p.doc_start ? p.doc_start + static_cast<int64_t>(batch) * p.length : nullptr;
  const int last_tile = (min(row0 + kBlockM, p.length) - 1) / kBlockN;
  const int first_tile = doc_start ? doc_start[row0] / kBlockN : 0;

  const int64_t sequence = static_cast<int64_t>(batch) * p.length;
  const bf16* keys = p.qkv + sequence * p.pitch + (p.heads + head / (p.heads / p.kv_heads)) * kHeadDim;
  const auto stage_of = [](int tile) { return static_cast<uint32_t>(tile % 2 * kTileBytes); };
  const auto copy_keys_and_values = [&](const bf16* keys, int tile, int present) {
    const bf16* from = after(keys, tile, p.tile_bytes);
    const uint32_t to = base + stage_of(tile);
    CopyKeys::start(to + Config::kKeysAt, from, p.pitch, p.pass_bytes, present);
    CopyKeys::start(to + Config::kValuesAt, after(from, p.values_from_keys_bytes), p.pitch, p.pass_bytes,
                    present);
    copy_async_commit();
  };
  CopyQueries::start(base + Config::kQueryAt, p.qkv + (sequence + row0) * p.pitch + head * kHeadDim, p.pitch,
                     p.pass_bytes, p.length - row0);
  copy_async_commit();
  copy_keys_and_values(keys, last_tile, p.length - last_tile * kBlockN);
  if (thread_index() == 0) *place = {keys, unit, batch, head, row0};
  for (int i = thread_index(); i < kBlockM; i += kThreads)
    starts[i] = doc_start ? doc_start[min(row0 + i, p.length - 1)] : 0;
  copy_async_wait<1>();
  __syncthreads();

  const int lane = thread_index() % 32;
  if (const int warp = warp_index(), warp_row = warp * kWarpRows; lane == 0)
    tiles[warp] = {row0 + warp_row < p.length ? (row0 + warp_row) / kBlockN : -1, starts[warp_row] / kBlockN,
                   (starts[warp_row + kWarpRows - 1] + kBlockN - 1) / kBlockN, first_tile};
  __syncwarp();
  const typename Tile<kHeadDim>::Lanes lanes(lane);
  const Operand<Config::kQueryInRegisters, kHeadDim, kM> query(base + Config::kQueryAt, lanes);
  ForwardRows<Config> rows;

  for (int tile = last_tile;; --tile) {
    const ForwardTiles mine = tiles[warp_index()];
    if (tile < mine.first) break;
    copy_async_wait<0>();
    __syncthreads();
    if (tile > mine.first) copy_keys_and_values(place->keys, tile - 1, kAllRows);

    if (tile > mine.diagonal || tile < mine.leftmost) continue;
    const uint32_t keys_at = lanes.columns_first(base + Config::kKeysAt + stage_of(tile));
    const uint32_t values_at = lanes.rows_first(base + Config::kValuesAt + stage_of(tile));
    if (tile == mine.diagonal || tile < mine.clear) {
      const int warp_row = warp_index() * kWarpRows;
      rows.template add_tile<true>(query, keys_at, values_at, p.scale_log2, p.slack, place->row0 + warp_row,
                                   tile * kBlockN, starts + warp_row);
    } else {
      rows.template add_tile<false>(query, keys_at, values_at, p.scale_log2, p.slack, 0, 0, nullptr);
    }
  }

  const ForwardPlace end = *place;
  const int end_lane = thread_index() % 32;
  const int warp_row = warp_index() * kWarpRows, first_row = end.row0 + warp_row;
  float inverse[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = rows.sum[m][half];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      inverse[m][half] = 1 / sum;
      const int t = first_row + 16 * m + 8 * half + end_lane / 4;
      if (end_lane % 4 == 0 && t < p.length)
        p.lse[static_cast<int64_t>(end.unit) * p.length + t] = rows.reference[m][half] * p.scale + logf(sum);
    }
  const int64_t out_pitch = static_cast<int64_t>(p.heads) * kHeadDim;
  bf16* out =
      p.out + (static_cast<int64_t>(end.batch) * p.length + first_row) * out_pitch + end.head * kHeadDim;
  store_rows<kHeadDim>(rows.out, inverse, shared + Config::kQueryAt + warp_row * Tile<kHeadDim>::kPitch, out,
                       out_pitch, p.length - first_row);
}

template <class Config>
void run_attention_forward(const Context& ctx, const AttentionForward& args) {
  const int64_t batch = args.qkv.dim(0), length = args.qkv.dim(1), heads = args.heads;
  const int64_t blocks = (length + Config::kBlockM - 1) / Config::kBlockM;
  const int64_t group = heads / args.kv_heads;
  const int64_t bytes_per_head = std::max<int64_t>(2 * length * Config::kHeadDim * 2 / group, 1);
  const auto row_bytes = static_cast<uint32_t>(args.qkv.columns() * 2);
  const ForwardParams params{
      .out = args.out.as<bf16>(),
      .lse = args.lse.as<float>(),
      .qkv = args.qkv.as<bf16>(),
      .doc_start = args.doc_start ? args.doc_start.as<int32_t>() : nullptr,
      .length = static_cast<int>(length),
      .heads = static_cast<int>(heads),
      .kv_heads = static_cast<int>(args.kv_heads),
      .pitch = static_cast<int>(args.qkv.columns()),
      .pass_bytes = row_bytes * TileCopy<Config::kHeadDim, Config::kBlockN, Config::kThreads>::kRowsPerPass,
      .tile_bytes = row_bytes * Config::kBlockN,
      .values_from_keys_bytes = static_cast<uint32_t>(args.kv_heads * Config::kHeadDim * 2),
      .scale = args.scale,
      .scale_log2 = args.scale * kLog2E,
      .slack = 8 / (args.scale * kLog2E),
      .order = WorkOrder(blocks, batch * heads, bytes_per_head)};
  launch_attention(ctx, attention_forward_kernel<Config>, Config::kThreads, Config::kSharedBytes, params);
}

/// The shape for each head size: two row tiles per warp, so that each K and V fragment read serves two products, and all
/// that then fits into 255 registers without a spill on sm_80 and sm_90a.
template <int kHeadDim>
struct ForwardChoice;
//                                               head  kM warps  N step Q regs blocks/SM
template <>
struct ForwardChoice<64> : ForwardConfig<64, 2, 4, 64, 64, true, 2> {};
template <>
struct ForwardChoice<80> : ForwardConfig<80, 2, 4, 64, 64, false, 2> {};
template <>
struct ForwardChoice<96> : ForwardConfig<96, 2, 4, 64, 64, false, 2> {};
template <>
struct ForwardChoice<128> : ForwardConfig<128, 2, 4, 64, 64, false, 2> {};

}  // namespace kinoe::cuda
