// Token and position embedding on the CPU.
//
// The backward pass sorts the places n by token with a counting sort, which keeps their order; every row of the table
// is then summed by one thread in the order of n, so the bits do not depend on the threads.
#include "kernels/embedding.h"

#include <algorithm>

#include "kernels/common/arguments.h"
#include "kernels/common/cpu.h"
#include "kernels/common/simd.h"

namespace kinoe {

void check(const EmbeddingForward& a) {
  const char* op = "embedding_forward";
  CHECK(a.out.ndim == 3, op, ": out must be [B, T, C], is ", a.out.shape());
  const DType type = a.out.dtype;
  const int64_t t = a.out.dim(1), c = a.out.dim(2);
  require_type({op, "out", a.out}, type);
  require_matrix({op, "tokens", a.tokens}, DType::i32, a.out.dim(0), t);
  CHECK(a.vocab_size > 0, op, ": vocab_size is ", a.vocab_size);
  require_table({op, "token_table", a.token_table}, type, a.vocab_size, c);
  if (a.position_table) require_table({op, "position_table", a.position_table}, type, t, c);
  require_size({op, "bad_token", a.bad_token}, DType::i64, 1);
}

void check(const EmbeddingBackward& a) {
  const char* op = "embedding_backward";
  CHECK(a.d_out.ndim == 3, op, ": d_out must be [B, T, C], is ", a.d_out.shape());
  const DType type = a.d_out.dtype, accumulator = accumulator_of(type);
  const int64_t b = a.d_out.dim(0), t = a.d_out.dim(1), c = a.d_out.dim(2);
  require_type({op, "d_out", a.d_out}, type);
  require_matrix({op, "tokens", a.tokens}, DType::i32, b, t);
  CHECK(b * t <= INT32_MAX, op, ": ", b * t, " tokens, more than 32 bits can number");
  CHECK(a.vocab_size > 0, op, ": vocab_size is ", a.vocab_size);
  require_table({op, "d_token_table", a.d_token_table}, accumulator, a.vocab_size, c);
  if (a.d_position_table) require_table({op, "d_position_table", a.d_position_table}, accumulator, t, c);
}

namespace {

template <class T>
KINOE_SIMD void add_to_row(T* sum, const T* row, int64_t c) {
#pragma omp simd
  for (int64_t i = 0; i < c; ++i) sum[i] += row[i];
}

template <class T>
void forward(const EmbeddingForward& a) {
  const int64_t t = a.out.dim(1), n = a.out.dim(0) * t, c = a.out.dim(2);
  const int32_t* tokens = a.tokens.as<int32_t>();
  const T* token_table = a.token_table.as<T>();
  const T* position_table = a.position_table ? a.position_table.as<T>() : nullptr;
  T* out = a.out.as<T>();
  int64_t bad = 0;
#pragma omp parallel for reduction(max : bad) if (n * c > kParallelWork)
  for (int64_t i = 0; i < n; ++i) {
    T* row = out + i * c;
    if (tokens[i] < 0 || tokens[i] >= a.vocab_size) {
      std::fill(row, row + c, T{0});
      bad = std::max(bad, i + 1);
      continue;
    }
    const T* token_row = token_table + tokens[i] * c;
    std::copy(token_row, token_row + c, row);
    if (position_table) add_to_row(row, position_table + i % t * c, c);
  }
  int64_t& flag = *a.bad_token.as<int64_t>();
  flag = std::max(flag, bad);
}

template <class T>
void backward(const EmbeddingBackward& a) {
  const int64_t batch = a.d_out.dim(0), t = a.d_out.dim(1), n = batch * t, c = a.d_out.dim(2),
                vocab = a.vocab_size;
  const int32_t* tokens = a.tokens.as<int32_t>();
  const T* d_out = a.d_out.as<T>();
  T* d_token_table = a.d_token_table.as<T>();
  T* d_position_table = a.d_position_table ? a.d_position_table.as<T>() : nullptr;
  const auto good = [&](int64_t i) { return tokens[i] >= 0 && tokens[i] < vocab; };

  // places[end[v - 1] ... end[v]) are the places of token v. end[v] starts as the first of v's and counts up to its end.
  int32_t* end = static_cast<int32_t*>(a.scratch.data);  // [vocab + 1]
  int32_t* places = end + vocab + 1;                     // [n]
  std::fill(end, end + vocab + 1, 0);
  for (int64_t i = 0; i < n; ++i)
    if (good(i)) ++end[tokens[i] + 1];
  for (int64_t v = 0; v < vocab; ++v) end[v + 1] += end[v];
  for (int64_t i = 0; i < n; ++i)
    if (good(i)) places[end[tokens[i]]++] = static_cast<int32_t>(i);

  const int64_t rows = a.d_token_table.dim(0);
#pragma omp parallel for schedule(dynamic, 16) if (n * c > kParallelWork)
  for (int64_t v = 0; v < rows; ++v) {
    T* sum = d_token_table + v * c;
    if (!a.accumulate_tokens) std::fill(sum, sum + c, T{0});
    if (v >= vocab) continue;
    for (int32_t k = v == 0 ? 0 : end[v - 1]; k < end[v]; ++k)
      add_to_row(sum, d_out + int64_t{places[k]} * c, c);
  }

  if (!d_position_table) return;
  const int64_t positions = a.d_position_table.dim(0);
#pragma omp parallel for if (n * c > kParallelWork)
  for (int64_t p = 0; p < positions; ++p) {
    T* sum = d_position_table + p * c;
    if (!a.accumulate_positions) std::fill(sum, sum + c, T{0});
    if (p >= t) continue;
    for (int64_t b = 0; b < batch; ++b)
      if (good(b * t + p)) add_to_row(sum, d_out + (b * t + p) * c, c);
  }
}

}  // namespace

size_t cpu::embedding_backward_scratch_bytes(int64_t tokens, int64_t /*channels*/, int64_t vocab_size) {
  return static_cast<size_t>(vocab_size + 1 + tokens) * sizeof(int32_t);
}

void cpu::embedding_forward(const Context& /*ctx*/, const EmbeddingForward& args) {
  check(args);
  with_scalar("embedding_forward", args.out.dtype, [&](auto scalar) { forward<decltype(scalar)>(args); });
}

void cpu::embedding_backward(const Context& /*ctx*/, const EmbeddingBackward& args) {
  check(args);
  require_scratch(
      {"embedding_backward", "scratch", args.scratch},
      embedding_backward_scratch_bytes(args.tokens.size(), args.d_out.columns(), args.vocab_size));
  with_scalar("embedding_backward", args.d_out.dtype, [&](auto scalar) { backward<decltype(scalar)>(args); });
}

}  // namespace kinoe
