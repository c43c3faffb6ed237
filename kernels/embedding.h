// Token and position embedding.
//
//   out[n, c] = token_table[tokens[n], c] + position_table[n mod T, c]        n = b*T + t
//
// The backward pass is a sum over all places where a token occurs; it is done in the order of n, so the bits do not
// depend on threads or blocks. A place whose id is outside [0, V) was a zero row and adds to neither table.
#pragma once

#include "kernels/common/cost.h"
#include "kernels/common/dispatch.h"

namespace kinoe {

struct EmbeddingForward {
  Tensor out;              // [B, T, C] activation type
  Tensor tokens;           // [B, T] int32
  Tensor token_table;      // [V or more, C] weight type
  Tensor position_table;   // [>= T, C], or absent
  int64_t vocab_size = 0;  // V: ids outside [0, V) give a zero row and set bad_token
  Tensor bad_token;        // [1] int64: 1 + the largest n whose id was out of range; 0 when all are good.
                           // Only ever raised here (max): the caller clears it
};

struct EmbeddingBackward {
  Tensor d_token_table;     // [V or more, C] gradient type (fp32; fp64 in fp64)
  Tensor d_position_table;  // [>= T, C], or absent
  Tensor d_out;             // [B, T, C] activation type
  Tensor tokens;            // [B, T] int32
  int64_t vocab_size = 0;
  bool accumulate_tokens = false;     // add to d_token_table instead of overwriting all of its rows
  bool accumulate_positions = false;  // the same for d_position_table
  Tensor scratch;  // embedding_backward_scratch_bytes() bytes as int32; absent when that is 0
};

namespace cpu {
size_t embedding_backward_scratch_bytes(int64_t tokens, int64_t channels, int64_t vocab_size);
}
namespace cuda {
inline constexpr int64_t kEmbeddingPiece = 128;      // occurrences summed in one go
inline constexpr int64_t kEmbeddingSortTile = 2048;  // pairs per tile of the sort
inline constexpr int64_t kEmbeddingDigits = 256;     // radix of the sort

constexpr size_t embedding_align(int64_t bytes) { return static_cast<size_t>((bytes + 255) / 256 * 256); }

/// Two (key, position) buffers of the sort, its per-tile digit counts, the first place of every token in the sorted
/// order, and fp32 partial rows for tokens that occur more than kEmbeddingPiece times.
inline constexpr size_t embedding_backward_scratch_bytes(int64_t tokens, int64_t channels,
                                                         int64_t vocab_size) {
  const int64_t tiles = (tokens + kEmbeddingSortTile - 1) / kEmbeddingSortTile;
  const int64_t pieces = 2 * ((tokens + kEmbeddingPiece - 1) / kEmbeddingPiece);
  return 4 * embedding_align(tokens * 4) + embedding_align(tiles * kEmbeddingDigits * 4) +
         embedding_align((vocab_size + 1) * 4) + embedding_align(pieces * channels * 4);
}
}  // namespace cuda

/// Bytes of EmbeddingBackward::scratch.
inline size_t embedding_backward_scratch_bytes(Backend backend, int64_t tokens, int64_t channels,
                                               int64_t vocab_size) {
  return backend == Backend::cuda ? cuda::embedding_backward_scratch_bytes(tokens, channels, vocab_size)
                                  : cpu::embedding_backward_scratch_bytes(tokens, channels, vocab_size);
}

/// Throws unless types and shapes are as stated above; both backends call it first.
void check(const EmbeddingForward& args);
void check(const EmbeddingBackward& args);

KINOE_OPERATION(embedding_forward, EmbeddingForward)
KINOE_OPERATION(embedding_backward, EmbeddingBackward)

inline Cost embedding_forward_cost(int64_t n, int64_t c, size_t element) {
  return {static_cast<double>(n) * (4.0 + 2.0 * static_cast<double>(c) * static_cast<double>(element)), 0};
}
/// Counts every touched row once per occurrence (read and write of fp32), the worst case.
inline Cost embedding_backward_cost(int64_t n, int64_t c, size_t element) {
  return {static_cast<double>(n * c) * (static_cast<double>(element) + 8.0), static_cast<double>(n * c)};
}

}  // namespace kinoe
