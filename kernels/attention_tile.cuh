// Tiles of bf16 rows in shared memory, and the two products attention needs of them.
//
// A tile is [rows][head_dim], rows without padding. The 16-byte chunks of a row are permuted (XOR with bits of the row
// number) so that the eight rows of an 8x8 matrix, and the chunks that eight neighbouring lanes copy, always lie in
// different banks; the permutation stays inside groups of 2, 4 or 8 chunks, so rows of 10 and 12 chunks (head sizes 80
// and 96) work as rows of 8 and 16 do. All addresses of a lane are a few precomputed offsets plus constants.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/attention_mma.cuh"
#include "kernels/common/cuda_util.cuh"

namespace kinoe::cuda {

/// No block uses more than a GPU of compute capability 8.6 or 8.9 gives it.
inline constexpr size_t kMaxSharedBytes = 99 * 1024;

template <int kHeadDim>
struct Tile {
  static_assert(kHeadDim % 16 == 0);
  static constexpr int kChunks = kHeadDim / 8;  // of 16 bytes
  static constexpr int kPitch = kHeadDim * 2;   // bytes
  static constexpr int kSwizzleBits = kChunks % 8 == 0 ? 3 : kChunks % 4 == 0 ? 2 : 1;
  /// Neighbouring lanes that share a row when tiles are copied: whole 32-byte sectors, no bank conflict.
  static constexpr int kLanesPerRow = 1 << kSwizzleBits;
  static constexpr int kCopiesPerRow = kChunks / kLanesPerRow;
  /// Chunk pairs (16 columns, one k-step) whose permuted positions differ by more than a constant.
  static constexpr int kVariants = kSwizzleBits == 3 ? 4 : kSwizzleBits;

  __host__ __device__ static constexpr int bytes(int rows) { return rows * kPitch; }

  __device__ static int swizzle(int row) { return (row >> (3 - kSwizzleBits)) & (kLanesPerRow - 1); }
  /// Byte offset of a chunk.
  __device__ static int offset(int row, int chunk) { return row * kPitch + ((chunk ^ swizzle(row)) << 4); }

  /// How one lane of a warp addresses 16 x 16 blocks. Tiles begin at multiples of 128 bytes, and a block's columns
  /// enter only the address bits of the permutation, or above them: one offset serves all blocks of a tile.
  class Lanes {
   public:
    __device__ explicit Lanes(int lane)
        : offsets_(static_cast<uint32_t>(offset(lane & 15, lane >> 4)) |
                   static_cast<uint32_t>(offset((lane & 7) + (lane >> 4 << 3), (lane >> 3) & 1)) << 16) {}

    /// `tile` with the lane's offset, for load_matrices of A tiles [16 x 16] and for load_matrices_transposed of B
    /// tiles of 16 (k, along rows) x 16 (n).
    __device__ __forceinline__ uint32_t rows_first(uint32_t tile) const {
      return tile + (opaque(offsets_) & 0xffffU);
    }
    /// For load_matrices of B tiles of 16 (n, along rows) x 16 (k).
    __device__ __forceinline__ uint32_t columns_first(uint32_t tile) const {
      return tile + (opaque(offsets_) >> 16);
    }

   private:
    uint32_t offsets_;  // two numbers below 2^12
  };

  /// Order of the head_dim / 16 column blocks in which those that share an address but for a constant are neighbours.
  __host__ __device__ static constexpr int in_order(int i) {
    constexpr int kShared = kHeadDim / 16 / kVariants;
    return i % kShared * kVariants + i / kShared;
  }
  /// The block at rows 16 * block_row, columns 16 * block_column of a tile whose address has the lane's offset.
  __device__ __forceinline__ static uint32_t block(uint32_t tile, int block_row, int block_column) {
    const int low = block_column % kVariants, high = block_column - low;
    return (tile ^ static_cast<uint32_t>(32 * low)) +
           static_cast<uint32_t>(32 * high + 16 * block_row * kPitch);
  }
};

/// `from` moved by `bytes`: unsigned and from the kernel's parameters, so that the step takes no register.
__device__ __forceinline__ const bf16* after(const bf16* from, uint32_t bytes) {
  return reinterpret_cast<const bf16*>(reinterpret_cast<const char*>(from) + bytes);
}
/// `from` moved by `count` times `bytes`.
__device__ __forceinline__ const bf16* after(const bf16* from, int count, uint32_t bytes) {
  return reinterpret_cast<const bf16*>(reinterpret_cast<const char*>(from) +
                                       static_cast<uint64_t>(static_cast<uint32_t>(count)) * bytes);
}

/// The `present` of a tile that is known to lie inside its sequence: nothing is tested.
inline constexpr int kAllRows = INT32_MAX;

/// Copies of tiles of kRows rows by the whole block.
template <int kHeadDim, int kRows, int kThreads>
class TileCopy {
  using T = Tile<kHeadDim>;

 public:
  static constexpr int kRowsPerPass = kThreads / T::kLanesPerRow;
  static_assert(kRowsPerPass % 8 == 0, "a thread's rows must share their permutation");

  /// Starts copying rows `pitch` elements apart from `from` to the tile at `to`; rows from `present` on become zeros.
  /// `pass_bytes` is the size of kRowsPerPass rows in global memory.
  __device__ __forceinline__ static void start(uint32_t to, const bf16* from, int pitch, uint32_t pass_bytes,
                                               int present) {
    const int thread = thread_index(), row = thread / T::kLanesPerRow, chunk = thread % T::kLanesPerRow;
    to += static_cast<uint32_t>(T::offset(row, chunk));
    from += row * pitch + chunk * 8;
#pragma unroll
    for (int first = 0; first < kRows; first += kRowsPerPass) {
      if (kRows % kRowsPerPass != 0 && row + first >= kRows) break;
#pragma unroll
      for (int i = 0; i < T::kCopiesPerRow; ++i)
        copy_async(to + static_cast<uint32_t>(first * T::kPitch + i * T::kLanesPerRow * 16),
                   from + i * T::kLanesPerRow * 8, present == kAllRows || row + first < present);
      from = after(from, pass_bytes);
    }
  }
};

/// acc[16 kM x 8 kN] += A . B^T over the head dimension. `a(k, fragments)` gives the k-th 16 columns of A; B is
/// kN * 8 rows of a tile, `b` their address for this lane.
template <int kHeadDim, int kM, int kN, class FragmentsOfA>
__device__ __forceinline__ void multiply_transposed(float (&acc)[kM][kN][4], const FragmentsOfA& a,
                                                    uint32_t b) {
  static_assert(kN % 2 == 0);
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i) {
    const int k = Tile<kHeadDim>::in_order(i);
    uint32_t a_k[kM][4];
    a(k, a_k);
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      uint32_t b_kn[4];
      load_matrices(b_kn, Tile<kHeadDim>::block(b, n, k));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma(acc[m][2 * n], a_k[m], b_kn[0], b_kn[1]);
        mma(acc[m][2 * n + 1], a_k[m], b_kn[2], b_kn[3]);
      }
    }
  }
}

/// acc[16 kM x head_dim] += P . B: `p` holds P [16 kM x 16 kK] as A fragments; the k-th row of B is the k-th row of a
/// tile, `b` their address for this lane.
template <int kHeadDim, int kM, int kK>
__device__ __forceinline__ void multiply(float (&acc)[kM][kHeadDim / 8][4], const uint32_t (&p)[kM][kK][4],
                                         uint32_t b) {
#pragma unroll
  for (int k = 0; k < kK; ++k)
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      const int n = Tile<kHeadDim>::in_order(i);
      uint32_t b_kn[4];
      load_matrices_transposed(b_kn, Tile<kHeadDim>::block(b, k, n));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma(acc[m][2 * n], p[m][k], b_kn[0], b_kn[1]);
        mma(acc[m][2 * n + 1], p[m][k], b_kn[2], b_kn[3]);
      }
    }
}

/// The warp's 16 kM rows of the tile at `tile` as an A operand: read from shared memory at every use ...
template <int kHeadDim, int kM>
class SharedOperand {
 public:
  __device__ __forceinline__ SharedOperand(uint32_t tile, const typename Tile<kHeadDim>::Lanes& lanes)
      : tile_(tile), lanes_(lanes) {}

  /// What multiply_transposed takes.
  __device__ __forceinline__ auto fragments() const {
    const int rows = warp_index() * 16 * kM;
    const uint32_t at = lanes_.rows_first(tile_ + static_cast<uint32_t>(Tile<kHeadDim>::bytes(rows)));
    return [at](int k, uint32_t(&a)[kM][4]) {
#pragma unroll
      for (int m = 0; m < kM; ++m) load_matrices(a[m], Tile<kHeadDim>::block(at, m, k));
    };
  }

 private:
  uint32_t tile_;
  typename Tile<kHeadDim>::Lanes lanes_;
};

/// ... or read once and kept in registers.
template <int kHeadDim, int kM>
class RegisterOperand {
 public:
  __device__ __forceinline__ RegisterOperand(uint32_t tile, const typename Tile<kHeadDim>::Lanes& lanes) {
    const auto read = SharedOperand<kHeadDim, kM>(tile, lanes).fragments();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) read(k, fragments_[k]);
  }

  __device__ __forceinline__ auto fragments() const {
    return [this](int k, uint32_t(&a)[kM][4]) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = fragments_[k][m][i];
    };
  }

 private:
  uint32_t fragments_[kHeadDim / 16][kM][4];
};

template <bool kInRegisters, int kHeadDim, int kM>
using Operand = std::conditional_t<kInRegisters, RegisterOperand<kHeadDim, kM>, SharedOperand<kHeadDim, kM>>;

/// Writes one warp's accumulators, times factor[m][row half], as bf16 rows `pitch` elements apart. They pass through
/// 16 kM rows of a tile at `staging`, which no other warp may be using, so that whole sectors are written.
template <int kHeadDim, int kM>
__device__ __forceinline__ void store_rows(const float (&acc)[kM][kHeadDim / 8][4],
                                           const float (&factor)[kM][2], unsigned char* staging, bf16* to,
                                           int64_t pitch, int present) {
  using T = Tile<kHeadDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * m + 8 * half + lane / 4;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)
        *reinterpret_cast<uint32_t*>(staging + T::offset(row, n) + 4 * (lane % 4)) =
            pack_bf16(acc[m][n][2 * half] * factor[m][half], acc[m][n][2 * half + 1] * factor[m][half]);
    }
  __syncwarp();
  constexpr int kRowsPerPass = 32 / T::kLanesPerRow;
#pragma unroll
  for (int pass = 0; pass * kRowsPerPass < 16 * kM; ++pass) {
    const int row = pass * kRowsPerPass + lane / T::kLanesPerRow;
#pragma unroll
    for (int i = 0; i < T::kCopiesPerRow; ++i) {
      const int chunk = lane % T::kLanesPerRow + i * T::kLanesPerRow;
      if (row < present)
        *reinterpret_cast<uint4*>(to + static_cast<int64_t>(row) * pitch + chunk * 8) =
            *reinterpret_cast<const uint4*>(staging + T::offset(row, chunk));
    }
  }
}

/// The order of blocks in a launch: heads in sections whose tensors stay in the L2 cache; in a section the longest rows
/// of blocks first, so that short ones fill the tail. Results do not depend on it.
struct WorkOrder {
  static constexpr int64_t kSectionBytes = int64_t{32} << 20;

  int blocks = 0;   // per head
  int heads = 0;    // in all: batch * heads
  int section = 0;  // heads per section

  WorkOrder() = default;
  /// `bytes_per_head`: what the blocks of one head read again and again.
  WorkOrder(int64_t blocks_per_head, int64_t head_count, int64_t bytes_per_head)
      : blocks(static_cast<int>(blocks_per_head)),
        heads(static_cast<int>(head_count)),
        section(static_cast<int>(std::clamp(kSectionBytes / bytes_per_head, int64_t{1}, head_count))) {
    grid_of(blocks_per_head * head_count);
  }
  [[nodiscard]] unsigned count() const { return grid_of(int64_t{blocks} * heads); }

  struct Item {
    int head, rank;  // rank 0 is the longest
  };
  __device__ __forceinline__ Item operator[](int i) const {
    const int first = i / (section * blocks) * section;
    const int width = min(section, heads - first);
    const int j = i - first * blocks;
    return {first + j % width, j / width};
  }
};

/// Launches one block per item of params.order, with `shared` bytes of dynamic shared memory.
template <class Params>
void launch_attention(const Context& ctx, void (*kernel)(Params), int threads, int shared,
                      const Params& params) {
  CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  kernel<<<params.order.count(), static_cast<unsigned>(threads), static_cast<size_t>(shared),
           stream_of(ctx)>>>(params);
  CUDA_CHECK_LAUNCH(attention kernel);
}

}  // namespace kinoe::cuda
