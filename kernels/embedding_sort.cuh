// The sort of the embedding's backward pass: places by token, in their order where tokens are equal.
//
// A radix sort of (token, place) pairs, least significant digit first, 8 bits a pass, as many passes as the vocabulary
// needs (2 up to 65,535 tokens, 3 beyond). A pass counts the digits of every tile of kEmbeddingSortTile pairs; then every
// tile adds up the counts in front of it by itself (the counts of all tiles stay in L2) and moves its pairs to their
// places. At 65,536 places a pass is two launches of 32 blocks: latency, not bandwidth, is what it costs.
#pragma once

#include "kernels/common/cuda_util.cuh"
#include "kernels/embedding.h"

namespace kinoe::cuda {

inline constexpr int kSortThreads = 256;
inline constexpr int kSortWarps = kSortThreads / 32;
inline constexpr int kDigits = static_cast<int>(kEmbeddingDigits);
inline constexpr int kTile = static_cast<int>(kEmbeddingSortTile);
inline constexpr int kRounds = kTile / kSortThreads;  // pairs of one thread
static_assert(kDigits == kSortThreads, "one thread per digit");

/// (token, place) pairs.
struct Pairs {
  int32_t* keys;
  int32_t* places;
};

/// The tokens as keys in front of the first pass.
static __global__ void __launch_bounds__(kSortThreads)
    sort_keys_kernel(Pairs to, const int32_t* tokens, int n, int vocab) {
  const int i = static_cast<int>(blockIdx.x) * kSortThreads + static_cast<int>(threadIdx.x);
  if (i >= n) return;
  const int token = tokens[i];
  to.keys[i] = token >= 0 && token < vocab ? token : vocab;
  to.places[i] = i;
}

/// counts[tile, digit]: how often the digit occurs in the tile.
static __global__ void __launch_bounds__(kSortThreads)
    sort_count_kernel(int32_t* counts, const int32_t* keys, int n, int shift) {
  __shared__ int count[kDigits];
  count[threadIdx.x] = 0;
  __syncthreads();
  const int begin = static_cast<int>(blockIdx.x) * kTile;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int i = begin + r * kSortThreads + static_cast<int>(threadIdx.x);
    if (i < n) atomicAdd(&count[(keys[i] >> shift) & (kDigits - 1)], 1);
  }
  __syncthreads();
  counts[static_cast<int64_t>(blockIdx.x) * kDigits + threadIdx.x] = count[threadIdx.x];
}

/// Sum over the threads in front, for kSortThreads threads.
__device__ __forceinline__ int exclusive_sum(int x, int* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int inclusive = x;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int below = __shfl_up_sync(kAllLanes, inclusive, offset);
    if (lane >= offset) inclusive += below;
  }
  if (lane == 31) shared[warp] = inclusive;
  __syncthreads();
  int before = 0;
#pragma unroll
  for (int w = 0; w < kSortWarps; ++w)
    if (w < warp) before += shared[w];
  return before + inclusive - x;
}

/// Moves the tile's pairs: those with smaller digits anywhere, then those with the same digit in earlier tiles, then in
/// earlier warps, then earlier in the warp stand in front of a pair. Within a tile warp w has the w-th run of
/// consecutive pairs and takes 32 of them at a time, so that lane order is their order.
static __global__ void __launch_bounds__(kSortThreads)
    sort_move_kernel(Pairs to, Pairs from, const int32_t* counts, int n, int shift) {
  __shared__ int start[kSortWarps]
                      [kDigits];  // first the warp's count, then where its next pair of the digit goes
  __shared__ int warp_totals[kSortWarps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int tile = static_cast<int>(blockIdx.x), tiles = static_cast<int>(gridDim.x);

  int key[kRounds], place[kRounds], rank[kRounds];
  const int begin = tile * kTile + warp * (kTile / kSortWarps);
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int i = begin + r * 32 + lane;
    key[r] = i < n ? from.keys[i] : -1;
    place[r] = i < n ? from.places[i] : 0;
  }

  int before = 0, total = 0;  // of digit `thread`: in earlier tiles, in all
#pragma unroll 8
  for (int t = 0; t < tiles; ++t) {
    const int count = counts[static_cast<int64_t>(t) * kDigits + thread];
    total += count;
    if (t < tile) before += count;
  }
#pragma unroll
  for (int w = 0; w < kSortWarps; ++w) start[w][thread] = 0;
  before += exclusive_sum(total, warp_totals);  // meets all threads between clearing and counting

#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const bool live = key[r] >= 0;
    const int digit = (key[r] >> shift) & (kDigits - 1);
    const unsigned peers = __match_any_sync(kAllLanes, live ? digit : -1);
    const unsigned below = peers & ((1U << lane) - 1U);
    const int seen = live ? start[warp][digit] : 0;
    __syncwarp();
    rank[r] = seen + __popc(below);
    if (live && below == 0) start[warp][digit] = seen + __popc(peers);
    __syncwarp();
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kSortWarps; ++w) {
    const int count = start[w][thread];
    start[w][thread] = before;
    before += count;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    if (key[r] < 0) continue;
    const int i = start[warp][(key[r] >> shift) & (kDigits - 1)] + rank[r];
    to.keys[i] = key[r];
    to.places[i] = place[r];
  }
}

/// first[v]: how many sorted keys are smaller than v, for v = 0 ... vocab.
static __global__ void __launch_bounds__(256)
    first_place_kernel(int32_t* first, const int32_t* keys, int n, int vocab) {
  const int v = static_cast<int>(blockIdx.x) * 256 + static_cast<int>(threadIdx.x);
  if (v > vocab) return;
  int low = 0, high = n;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (keys[middle] < v)
      low = middle + 1;
    else
      high = middle;
  }
  first[v] = low;
}

/// Sorts the places of `tokens` between the two buffers; returns the one that holds the result. Ids outside [0, vocab)
/// have become the key `vocab` and stand at the end. `counts`: [ceil(n / kEmbeddingSortTile), kEmbeddingDigits].
inline Pairs sort_places(cudaStream_t stream, const int32_t* tokens, int n, int vocab,
                         const Pairs (&buffers)[2], int32_t* counts) {
  sort_keys_kernel<<<grid_of(ceil_div(n, kSortThreads)), kSortThreads, 0, stream>>>(buffers[0], tokens, n,
                                                                                    vocab);
  CUDA_CHECK_LAUNCH(sort_keys);
  const unsigned tiles = grid_of(ceil_div(n, kTile));
  int now = 0;
  for (int shift = 0; shift < 32 && (vocab >> shift) != 0; shift += 8, now ^= 1) {
    sort_count_kernel<<<tiles, kSortThreads, 0, stream>>>(counts, buffers[now].keys, n, shift);
    CUDA_CHECK_LAUNCH(sort_count);
    sort_move_kernel<<<tiles, kSortThreads, 0, stream>>>(buffers[now ^ 1], buffers[now], counts, n, shift);
    CUDA_CHECK_LAUNCH(sort_move);
  }
  return buffers[now];
}

/// first[v] for v = 0 ... vocab.
inline void find_first_places(cudaStream_t stream, int32_t* first, const int32_t* sorted_keys, int n,
                              int vocab) {
  first_place_kernel<<<grid_of(ceil_div(vocab + 1, 256)), 256, 0, stream>>>(first, sorted_keys, n, vocab);
  CUDA_CHECK_LAUNCH(first_place);
}

}  // namespace kinoe::cuda
