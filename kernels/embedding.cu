// Token and position embedding on the GPU; the backward pass sums in the order of the places, without atomics.
//
// Forward, bytes per element (bf16): 2 read from the table (from L2 for frequent tokens), 2 written. One warp per place
// with 16-byte accesses. Measured on an H200 (2026-11-30): 111 % of the copy bandwidth, because frequent tokens' rows
// come from L2.
//
// Backward:
//   1. Places are sorted by token, stably (embedding_sort.cuh). Ids outside the vocabulary are left at the end.
//   2. The first place of every token in the sorted order, by binary search: `first[v]`, v = 0 ... V.
//   3. Tokens with more than kEmbeddingPiece places are summed in pieces of that length first, so that one frequent
//      token does not occupy a single warp. Which pieces exist is known from the sorted keys alone: of the pieces that
//      start within kEmbeddingPiece sorted places one can be the first of its token and one a later one, so every such
//      block owns two partial rows and no counting is needed.
//   4. One warp per row of the table and 256 columns adds the row's places, or pieces, in order, in fp32;
//      rows of tokens that do not occur become 0, or stay as they are when gradients accumulate.
// The position table's rows are sums over the batch, one thread per four columns.
// Bytes: 2 NC read for the tokens, the same again for the positions, 4 (or 8 when accumulating) per element of the
// table's rows written. At 124M shapes the table alone (154 MB) takes 37 us of 4.2 TB/s; the sort's six launches add
// about 20 us. No bar: the row reads are scattered.
#include "kernels/embedding.h"

#include <algorithm>

#include "kernels/common/arguments.h"
#include "kernels/common/cuda_util.cuh"
#include "kernels/embedding_sort.cuh"

namespace kinoe::cuda {
namespace {

// ---- Forward ------------------------------------------------------------------------------------------------------------

constexpr int kRowWarps = 8;     // rows of a block
constexpr int kRowAccesses = 4;  // accesses in flight per lane

template <class T, int W>
__global__ void __launch_bounds__(32 * kRowWarps)
    embedding_forward_kernel(T* out, const int32_t* tokens, const T* token_table, const T* position_table,
                             int64_t places, int length, int channels, int64_t vocab, int64_t* bad_token) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / 32;
  if (n >= places) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, accesses = channels / W;
  T* row = out + n * channels;
  const int64_t token = __ldg(tokens + n);
  if (token < 0 || token >= vocab) {
    for (int a = lane; a < accesses; a += 32) store<T, W>(row + a * W, zero_raw<T, W>());
    if (lane == 0) atomicMax(reinterpret_cast<long long*>(bad_token), static_cast<long long>(n + 1));
    return;
  }
  const T* token_row = token_table + token * channels;
  const T* position_row = position_table == nullptr ? nullptr : position_table + n % length * channels;
  for (int first = lane; first < accesses; first += 32 * kRowAccesses) {
    Raw<T, W> x[kRowAccesses], p[kRowAccesses];
#pragma unroll
    for (int i = 0; i < kRowAccesses; ++i) {
      const int a = first + i * 32;
      if (a < accesses) x[i] = load_shared_input<T, W>(token_row + a * W);
    }
    if (position_row != nullptr) {
#pragma unroll
      for (int i = 0; i < kRowAccesses; ++i) {
        const int a = first + i * 32;
        if (a < accesses) p[i] = load_shared_input<T, W>(position_row + a * W);
      }
#pragma unroll
      for (int i = 0; i < kRowAccesses; ++i) {
        float sum[W], addend[W];
        to_floats<T, W>(x[i], sum);
        to_floats<T, W>(p[i], addend);
#pragma unroll
        for (int j = 0; j < W; ++j) sum[j] += addend[j];
        x[i] = from_floats<T, W>(sum);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowAccesses; ++i) {
      const int a = first + i * 32;
      if (a < accesses) store<T, W>(row + a * W, x[i]);
    }
  }
}

// ---- Sums over the places of a token ------------------------------------------------------------------------------------

constexpr int kPiece = static_cast<int>(kEmbeddingPiece);
constexpr int kSumWarps = 8;
constexpr int kSumAhead = 4;  // rows in flight per warp
// Columns of a lane: 16 bytes of fp32, so that the lanes of a warp stand side by side where tables are written; bf16 is
// read in 8 bytes then. Twice that, 32 lanes apart, to halve the number of warps.
constexpr int kSumWidth = 4;
constexpr int kSumParts = 2;

template <class T>
struct SumPointers {
  float* d_table;
  float* partials;  // [2 * ceil(places / kPiece), C]
  const T* d_out;
  const int32_t* keys;    // sorted
  const int32_t* places;  // sorted by token, then by place
  const int32_t* first;   // [vocab + 1]
  int n;
  int vocab;
  int channels;
  int slices;  // of 32 * kSumParts accesses
  bool accumulate;
};

/// The sums of a lane's columns: part i starts at column + i * 32 * W.
template <int W>
struct Sums {
  float part[kSumParts][W] = {};

  /// Calls f(sums of a part, its first column) for the parts that lie in the row.
  template <class F>
  __device__ __forceinline__ void each(int column, int channels, const F& f) {
#pragma unroll
    for (int i = 0; i < kSumParts; ++i)
      if (column + i * 32 * W < channels) f(part[i], column + i * 32 * W);
  }
};

/// The first column of the lane in slice `slice`.
template <int W>
__device__ __forceinline__ int first_column(int64_t slice) {
  return (static_cast<int>(slice) * 32 * kSumParts + static_cast<int>(threadIdx.x) % 32) * W;
}

template <int W>
__device__ __forceinline__ void add_row(float (&sum)[W], const float* row) {
  float x[W];
  to_floats<float, W>(load_plain<float, W>(row), x);
#pragma unroll
  for (int c = 0; c < W; ++c) sum[c] += x[c];
}

/// Adds the rows of d_out at places[begin ... end), one after the other.
template <class T, int W>
__device__ __forceinline__ void add_places(Sums<W>& sums, const SumPointers<T>& p, int begin, int end,
                                           int column) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = begin; i < end; i += 32) {
    const int mine = i + lane < end ? p.places[i + lane] : 0;
    const int count = min(32, end - i);
    for (int j = 0; j < count; j += kSumAhead) {
      Raw<T, W> row[kSumAhead][kSumParts];
#pragma unroll
      for (int k = 0; k < kSumAhead; ++k) {
        const int64_t place = __shfl_sync(kAllLanes, mine, (j + k) % 32);
#pragma unroll
        for (int part = 0; part < kSumParts; ++part) {
          const int at = column + part * 32 * W;
          row[k][part] = j + k < count && at < p.channels ? load_once<T, W>(p.d_out + place * p.channels + at)
                                                          : zero_raw<T, W>();
        }
      }
#pragma unroll
      for (int k = 0; k < kSumAhead; ++k) {
        if (j + k >= count) break;
#pragma unroll
        for (int part = 0; part < kSumParts; ++part) {
          float x[W];
          to_floats<T, W>(row[k][part], x);
#pragma unroll
          for (int c = 0; c < W; ++c) sums.part[part][c] += x[c];
        }
      }
    }
  }
}

/// The partial row of the piece that starts at sorted place `start`.
__device__ __forceinline__ int64_t partial_row(int start, bool first_of_token) {
  return 2 * static_cast<int64_t>(start / kPiece) + (first_of_token ? 0 : 1);
}

template <class T, int W>
__global__ void __launch_bounds__(32 * kSumWarps, 4)
    embedding_pieces_kernel(SumPointers<T> p, int64_t warps) {
  const int64_t id = static_cast<int64_t>(blockIdx.x) * kSumWarps + threadIdx.x / 32;
  if (id >= warps) return;
  const int64_t row = id / p.slices;
  const int column = first_column<W>(id % p.slices);
  const int block = static_cast<int>(row / 2) * kPiece;
  const bool first_of_token = row % 2 == 0;

  // A first piece in this block belongs to the token of the block's last place: a token with more than kPiece places
  // that starts here reaches beyond the end. A later one belongs to the token of the block's first place.
  const int probe = first_of_token ? block + kPiece - 1 : block;
  if (probe >= p.n) return;
  const int key = p.keys[probe];
  if (key >= p.vocab) return;
  const int begin = p.first[key], end = p.first[key + 1];
  if (end - begin <= kPiece) return;
  if (first_of_token != (begin >= block)) return;
  const int start = first_of_token ? begin : begin + ceil_div(block - begin, kPiece) * kPiece;
  if (start >= end) return;

  Sums<W> sums;
  add_places<T, W>(sums, p, start, min(start + kPiece, end), column);
  sums.each(column, p.channels, [&](const float(&sum)[W], int at) {
    store<float, W>(p.partials + row * p.channels + at, from_floats<float, W>(sum));
  });
}

template <class T, int W>
__global__ void __launch_bounds__(32 * kSumWarps, 4) embedding_rows_kernel(SumPointers<T> p, int64_t warps) {
  const int64_t id = static_cast<int64_t>(blockIdx.x) * kSumWarps + threadIdx.x / 32;
  if (id >= warps) return;
  const int64_t v = id / p.slices;
  const int column = first_column<W>(id % p.slices);
  const int begin = v < p.vocab ? p.first[v] : 0, end = v < p.vocab ? p.first[v + 1] : 0;
  if (begin == end && p.accumulate) return;

  Sums<W> sums;
  if (end - begin <= kPiece) {
    add_places<T, W>(sums, p, begin, end, column);
  } else {
#pragma unroll 4
    for (int start = begin; start < end; start += kPiece) {
      const float* partial = p.partials + partial_row(start, start == begin) * p.channels;
      sums.each(column, p.channels, [&](float(&sum)[W], int at) { add_row<W>(sum, partial + at); });
    }
  }
  float* to = p.d_table + v * p.channels;
  sums.each(column, p.channels, [&](float(&sum)[W], int at) {
    if (p.accumulate) add_row<W>(sum, to + at);
    store<float, W>(to + at, from_floats<float, W>(sum));
  });
}

constexpr int kBatchAhead = 8;  // sequences in flight

/// d_position_table[t, c] (+)= sum over b of d_out[b, t, c]; rows from `length` on become 0 when not accumulating.
template <class T, int W>
__global__ void __launch_bounds__(256, 2)
    position_rows_kernel(float* d_table, const T* d_out, const int32_t* tokens, int batch, int length,
                         int channels, int vocab, int64_t items, bool accumulate) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (item >= items) return;
  const int accesses = channels / W;
  const int64_t t = item / accesses;
  const int column = static_cast<int>(item % accesses) * W;
  if (t >= length && accumulate) return;
  float sum[W] = {};
  if (t < length) {
    for (int first = 0; first < batch; first += kBatchAhead) {
      Raw<T, W> row[kBatchAhead];
#pragma unroll
      for (int k = 0; k < kBatchAhead; ++k) {
        const int64_t n = static_cast<int64_t>(first + k) * length + t;
        row[k] = zero_raw<T, W>();
        if (first + k >= batch) continue;
        const int token = __ldg(tokens + n);
        if (token >= 0 && token < vocab) row[k] = load_once<T, W>(d_out + n * channels + column);
      }
#pragma unroll
      for (int k = 0; k < kBatchAhead; ++k) {
        float x[W];
        to_floats<T, W>(row[k], x);
#pragma unroll
        for (int c = 0; c < W; ++c) sum[c] += x[c];
      }
    }
  }
  float* to = d_table + t * channels + column;
  if (accumulate) add_row<W>(sum, to);
  store<float, W>(to, from_floats<float, W>(sum));
}

// ---- Launches -----------------------------------------------------------------------------------------------------------

/// The scratch cut into its parts, in the order in which embedding_backward_scratch_bytes adds them up.
struct Scratch {
  Pairs pairs[2];
  int32_t* counts;
  int32_t* first;
  float* partials;
};

Scratch cut(const EmbeddingBackward& args, int64_t n) {
  char* at = static_cast<char*>(args.scratch.data);
  const auto take = [&](int64_t bytes) {
    char* part = at;
    at += embedding_align(bytes);
    return part;
  };
  const auto ints = [&](int64_t count) { return reinterpret_cast<int32_t*>(take(count * 4)); };
  Scratch s{};
  for (Pairs& pairs : s.pairs) {
    pairs.keys = ints(n);
    pairs.places = ints(n);
  }
  s.counts = ints(ceil_div(n, kEmbeddingSortTile) * kEmbeddingDigits);
  s.first = ints(args.vocab_size + 1);
  s.partials = reinterpret_cast<float*>(at);
  return s;
}

template <class T, int W>
void sum_tokens(cudaStream_t stream, const EmbeddingBackward& args, const Scratch& scratch, Pairs sorted,
                int n) {
  const int channels = static_cast<int>(args.d_out.dim(2));
  const int slices = ceil_div(ceil_div(channels, W), 32 * kSumParts);
  const SumPointers<T> p{.d_table = args.d_token_table.as<float>(),
                         .partials = scratch.partials,
                         .d_out = args.d_out.as<T>(),
                         .keys = sorted.keys,
                         .places = sorted.places,
                         .first = scratch.first,
                         .n = n,
                         .vocab = static_cast<int>(args.vocab_size),
                         .channels = channels,
                         .slices = slices,
                         .accumulate = args.accumulate_tokens};
  if (n > kPiece) {
    const int64_t warps = 2 * static_cast<int64_t>(ceil_div(n, kPiece)) * slices;
    embedding_pieces_kernel<T, W>
        <<<grid_of(ceil_div<int64_t>(warps, kSumWarps)), 32 * kSumWarps, 0, stream>>>(p, warps);
    CUDA_CHECK_LAUNCH(embedding_pieces);
  }
  const int64_t warps = args.d_token_table.dim(0) * slices;
  embedding_rows_kernel<T, W>
      <<<grid_of(ceil_div<int64_t>(warps, kSumWarps)), 32 * kSumWarps, 0, stream>>>(p, warps);
  CUDA_CHECK_LAUNCH(embedding_rows);
}

template <class T, int W>
void sum_positions(cudaStream_t stream, const EmbeddingBackward& args) {
  const int channels = static_cast<int>(args.d_out.dim(2));
  const int64_t items = args.d_position_table.dim(0) * (channels / W);
  position_rows_kernel<T, W><<<grid_of(ceil_div<int64_t>(items, 256)), 256, 0, stream>>>(
      args.d_position_table.as<float>(), args.d_out.as<T>(), args.tokens.as<int32_t>(),
      static_cast<int>(args.d_out.dim(0)), static_cast<int>(args.d_out.dim(1)), channels,
      static_cast<int>(args.vocab_size), items, args.accumulate_positions);
  CUDA_CHECK_LAUNCH(position_rows);
}

}  // namespace

void embedding_forward(const Context& ctx, const EmbeddingForward& args) {
  check(args);
  const int64_t length = args.out.dim(1), places = args.out.dim(0) * length, channels = args.out.dim(2);
  CHECK(channels < int64_t{1} << 30, "embedding: rows of less than 2^30 elements, here ", channels);
  if (places * channels == 0) return;
  with_element(args.out.dtype, [&](auto element) {
    using T = decltype(element);
    T* out = args.out.as<T>();
    const T* token_table = args.token_table.as<T>();
    const T* position_table = args.position_table ? args.position_table.as<T>() : nullptr;
    const unsigned grid = grid_of(ceil_div<int64_t>(places, kRowWarps));
    const auto run = [&](auto kernel) {
      kernel<<<grid, 32 * kRowWarps, 0, stream_of(ctx)>>>(
          out, args.tokens.as<int32_t>(), token_table, position_table, places, static_cast<int>(length),
          static_cast<int>(channels), args.vocab_size, args.bad_token.as<int64_t>());
      CUDA_CHECK_LAUNCH(embedding_forward);
    };
    if (channels % kVector<T> == 0 && aligned_to(16, out, token_table, position_table))
      run(embedding_forward_kernel<T, kVector<T>>);
    else
      run(embedding_forward_kernel<T, 1>);
  });
}

void embedding_backward(const Context& ctx, const EmbeddingBackward& args) {
  check(args);
  const int64_t places = args.tokens.size(), channels = args.d_out.dim(2);
  CHECK(places < int64_t{1} << 30 && args.vocab_size < int64_t{1} << 30 && channels < int64_t{1} << 30,
        "embedding: fewer than 2^30 places, tokens and channels, here ", places, ", ", args.vocab_size, ", ",
        channels);
  require_scratch({"embedding_backward", "scratch", args.scratch},
                  embedding_backward_scratch_bytes(places, channels, args.vocab_size));
  if (places * channels == 0) return;
  const cudaStream_t stream = stream_of(ctx);
  const int n = static_cast<int>(places), vocab = static_cast<int>(args.vocab_size);
  const Scratch scratch = cut(args, places);
  const Pairs sorted =
      sort_places(stream, args.tokens.as<int32_t>(), n, vocab, scratch.pairs, scratch.counts);
  find_first_places(stream, scratch.first, sorted.keys, n, vocab);

  with_element(args.d_out.dtype, [&](auto element) {
    using T = decltype(element);
    const bool vectors = channels % kSumWidth == 0 &&
                         aligned_to(16, args.d_out.as<T>(), args.d_token_table.as<float>(), scratch.partials);
    if (vectors)
      sum_tokens<T, kSumWidth>(stream, args, scratch, sorted, n);
    else
      sum_tokens<T, 1>(stream, args, scratch, sorted, n);
    if (!args.d_position_table) return;
    if (vectors && aligned_to(16, args.d_position_table.as<float>()))
      sum_positions<T, kSumWidth>(stream, args);
    else
      sum_positions<T, 1>(stream, args);
  });
}

}  // namespace kinoe::cuda
