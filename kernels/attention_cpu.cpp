// Attention on the CPU, in tiles of queries x keys that stay in cache; no [T, T] matrix exists.
//
// Forward, one task per (batch, head, tile of queries): the tiles of keys up to the diagonal are visited in ascending
// order with the online softmax (Milakov and Gimelshein, 2018): of each query the largest score so far, the sum of
// exponentials relative to it, and in `out` the sum of their values, rescaled when a larger score appears.
//
// Backward, one task per (batch, key/value head), because all that is summed then belongs to one thread: for each tile
// of keys, for each query head of the group, for each tile of queries from the diagonal on (names as in attention.h)
//   S = Q K^T,  dP = dO V^T,  P = exp(scale S - lse),  dS = scale P (dP - delta),
//   dV += P^T dO,  dK += dS^T Q,  dQ += dS K
// so dk and dv are summed over heads, then queries, and dq over keys, in ascending order.
//
// Tiles begin at multiples of their size, so the bits of a position depend on what it attends to and on nothing else: not
// on T, not on the other sequences, not on the number of threads. Tiles without a visible pair are never touched.
//
// A hidden pair has probability exactly 0, and 0 times a finite number adds nothing. Only when a tile that the mask
// cuts holds NaN or Inf (0 * Inf is NaN) are its products summed over the visible pairs alone: what a query cannot
// see cannot reach it, whatever it is.
#include "kernels/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels/common/arguments.h"
#include "kernels/common/cpu.h"
#include "kernels/common/gemm_cpu.h"
#include "kernels/common/simd.h"
#include "kernels/common/vec_math.h"

namespace kinoe {

namespace {

/// Elements of one head, from qkv [B, T, (H + 2 Hkv) * D].
int64_t head_dim_of(const char* op, const Tensor& qkv, int64_t heads, int64_t kv_heads) {
  CHECK(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, op, ": ", heads, " query heads over ", kv_heads,
        " key/value heads");
  CHECK(qkv.ndim == 3 && qkv.columns() % (heads + 2 * kv_heads) == 0, op, ": qkv must be [B, T, (", heads,
        " + 2 * ", kv_heads, ") * D], is ", qkv.shape());
  return qkv.columns() / (heads + 2 * kv_heads);
}

}  // namespace

void check(const AttentionForward& a) {
  const char* op = "attention_forward";
  const DType type = a.qkv.dtype;
  require_type({op, "qkv", a.qkv}, type);
  const int64_t d = head_dim_of(op, a.qkv, a.heads, a.kv_heads), rows = a.qkv.rows();
  require_matrix({op, "out", a.out}, type, rows, a.heads * d);
  require_size({op, "lse", a.lse}, accumulator_of(type), rows * a.heads);
  if (a.doc_start) require_size({op, "doc_start", a.doc_start}, DType::i32, rows);
}

void check(const AttentionBackward& a) {
  const char* op = "attention_backward";
  const DType type = a.qkv.dtype;
  require_type({op, "qkv", a.qkv}, type);
  const int64_t d = head_dim_of(op, a.qkv, a.heads, a.kv_heads), rows = a.qkv.rows();
  require_matrix({op, "d_qkv", a.d_qkv}, type, rows, a.qkv.columns());
  require_matrix({op, "d_out", a.d_out}, type, rows, a.heads * d);
  require_matrix({op, "out", a.out}, type, rows, a.heads * d);
  require_size({op, "lse", a.lse}, accumulator_of(type), rows * a.heads);
  CHECK(static_cast<bool>(a.doc_start) == static_cast<bool>(a.doc_end), op,
        ": doc_start and doc_end come together");
  if (a.doc_start) require_size({op, "doc_start", a.doc_start}, DType::i32, rows);
  if (a.doc_end) require_size({op, "doc_end", a.doc_end}, DType::i32, rows);
}

namespace cpu {

namespace {

constexpr int64_t kTile = 64;       // queries, and keys, of a tile
constexpr int64_t kHeadPart = 128;  // elements of a head that are packed at a time

/// Scores, probabilities or their gradients: [query, key].
template <class T>
using TileOf = std::array<T, static_cast<size_t>(kTile* kTile)>;
template <class T>
using PerQuery = std::array<T, static_cast<size_t>(kTile)>;

/// The sequence that a task works on.
struct Sequence {
  int64_t length, head_dim;
  const int32_t* doc_start;  // or null
  const int32_t* doc_end;    // or null

  [[nodiscard]] int64_t first_key(int64_t query) const {
    return doc_start ? std::max<int64_t>(doc_start[query], 0) : 0;
  }
  [[nodiscard]] int64_t end_query(int64_t key) const {
    return doc_end ? std::min<int64_t>(doc_end[key], length) : length;
  }
  [[nodiscard]] int64_t first_key_tile(int64_t query) const { return first_key(query) / kTile * kTile; }
};

/// One head's columns of a matrix of T rows.
template <class T>
struct Head {
  T* data;
  int64_t pitch;

  [[nodiscard]] T* row(int64_t t) const { return data + t * pitch; }
  [[nodiscard]] Strided<std::remove_const_t<T>> from(int64_t t) const { return {row(t), pitch, 1}; }
  [[nodiscard]] Strided<std::remove_const_t<T>> transposed_from(int64_t t) const {
    return {row(t), 1, pitch};
  }
};

struct Range {
  int64_t begin, end;
};

/// A tile of the [T, T] matrix and the keys [begin[r], end[r]) of it that its query r sees. Both grow with r, so the
/// queries that see a key are a range too.
struct Tile {
  int64_t query, key;     // position
  int64_t queries, keys;  // size: less than kTile at the end of the sequence
  bool cut;               // not a full tile of visible pairs; otherwise begin and end are not set
  std::array<int32_t, static_cast<size_t>(kTile)> begin, end;

  Tile(const Sequence& s, int64_t query0, int64_t key0)
      : query(query0),
        key(key0),
        queries(std::min(kTile, s.length - query0)),
        keys(std::min(kTile, s.length - key0)),
        cut(keys < kTile || query < key + keys - 1 || s.first_key(query + queries - 1) > key) {
    if (!cut) return;
    for (int64_t r = 0; r < queries; ++r) {
      const int64_t last = std::clamp<int64_t>(query + r + 1 - key, 0, keys);
      const int64_t first = std::clamp<int64_t>(s.first_key(query + r) - key, 0, last);
      begin[static_cast<size_t>(r)] = static_cast<int32_t>(first);
      end[static_cast<size_t>(r)] = static_cast<int32_t>(last);
    }
  }

  /// The keys that queries [r, r_end) see, and the queries that see keys [j, j_end).
  [[nodiscard]] Range keys_of(int64_t r, int64_t r_end) const {
    if (!cut) return {0, keys};
    return {begin[static_cast<size_t>(r)], end[static_cast<size_t>(r_end - 1)]};
  }
  [[nodiscard]] Range queries_of(int64_t j, int64_t j_end) const {
    if (!cut) return {0, queries};
    Range range{0, queries};
    while (range.begin < queries && end[static_cast<size_t>(range.begin)] <= j) ++range.begin;
    while (range.end > range.begin && begin[static_cast<size_t>(range.end - 1)] >= j_end) --range.end;
    return range;
  }

  /// Keys [0, width) hold all that query r sees; whole vectors.
  [[nodiscard]] int64_t width(int64_t r) const {
    const int64_t seen = cut ? end[static_cast<size_t>(r)] : kTile;
    return (seen + 15) / 16 * 16;
  }

  /// Sets what query r does not see in its row of a tile.
  template <class T>
  void hide(T* row, int64_t r, T value) const {
    if (!cut) return;
    std::fill(row, row + begin[static_cast<size_t>(r)], value);
    std::fill(row + end[static_cast<size_t>(r)], row + kTile, value);
  }
};

// ---- Products -----------------------------------------------------------------------------------------------------

/// Rows of a tile that are multiplied at a time where the mask cuts it: as few hidden pairs as whole panels allow.
constexpr int64_t kBand = 12;

/// The packed panels of one operand. They are kept until told otherwise: keys and values serve many tiles of queries.
template <class T>
class Panels {
 public:
  void forget() { part_ = -1; }

  /// B[depth, columns], which is part number `part` of the operand.
  const T* of(int64_t part, Strided<T> b, int64_t depth, int64_t columns) {
    if (part != part_) pack_panels(b, depth, columns, panels_.data());
    part_ = part;
    return panels_.data();
  }

 private:
  int64_t part_ = -1;
  alignas(64) std::array<T, static_cast<size_t>(kHeadPart* kTile)> panels_;
};

/// scores[queries, keys] = A[queries, D] B[D, keys]. Of hidden pairs some get a score and some keep what was there.
template <class T>
void multiply_heads(TileOf<T>& scores, const Tile& tile, int64_t head_dim, Strided<T> a, Strided<T> b,
                    Panels<T>& panels) {
  constexpr int64_t kWidth = kPanelColumns<T>;
  const int64_t band = tile.cut ? kBand : kTile;
  for (int64_t d = 0; d < head_dim; d += kHeadPart) {
    const int64_t part = std::min(kHeadPart, head_dim - d);
    const T* packed = panels.of(d, b.at(d, 0), part, tile.keys);
    for (int64_t r = 0; r < tile.queries; r += band) {
      const int64_t r_end = std::min(r + band, tile.queries);
      const Range keys = tile.keys_of(r, r_end);
      const int64_t j = keys.begin / kWidth * kWidth;
      multiply_panels(r_end - r, keys.end - j, part, a.at(r, d), packed + j * part, part,
                      scores.data() + r * kTile + j, kTile, d > 0);
    }
  }
}

enum class Rows : uint8_t { queries, keys };

/// C[rows, D] (+)= A[rows, depth] B[depth, D], where A is a tile (rows are queries) or its transpose (rows are keys).
/// `exact`: no product with a hidden pair is formed, not even by 0.
template <class T>
void multiply_tile(const Tile& tile, Rows rows, int64_t head_dim, Strided<T> a, Strided<T> b, T* c,
                   int64_t c_row, bool accumulate, bool exact, Panels<T>& panels) {
  const bool by_query = rows == Rows::queries;
  const int64_t count = by_query ? tile.queries : tile.keys, depth = by_query ? tile.keys : tile.queries;
  const int64_t band = !tile.cut ? kTile : exact ? 1 : kBand;
  for (int64_t d = 0; d < head_dim; d += kHeadPart) {
    const int64_t part = std::min(kHeadPart, head_dim - d);
    const T* packed = panels.of(d, b.at(0, d), depth, part);
    for (int64_t i = 0; i < count; i += band) {
      const int64_t i_end = std::min(i + band, count);
      const Range k = by_query ? tile.keys_of(i, i_end) : tile.queries_of(i, i_end);
      multiply_panels(i_end - i, part, k.end - k.begin, a.at(i, k.begin), packed + k.begin * kPanelColumns<T>,
                      depth, c + i * c_row + d, c_row, accumulate);
    }
  }
}

template <class T>
KINOE_SIMD bool all_finite(const T* data, int64_t rows, int64_t columns, int64_t pitch) {
  T sum = 0;
  for (int64_t i = 0; i < rows; ++i)
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < columns; ++j) sum += data[i * pitch + j] * T{0};
  return sum == T{0};
}

// ---- Forward ------------------------------------------------------------------------------------------------------

/// What the online softmax knows of a tile of queries.
template <class T>
struct Softmax {
  PerQuery<T> largest;  // scaled score
  PerQuery<T> sum;      // of exp(score - largest)

  Softmax() {
    largest.fill(-std::numeric_limits<T>::infinity());
    sum.fill(T{0});
  }
};

/// Turns a tile of scores into exp(scaled score - largest) and rescales what `out` [queries, D] holds for the new
/// largest scores.
template <class T>
KINOE_SIMD void softmax_tile(TileOf<T>& scores, const Tile& tile, T scale, Softmax<T>& state, T* out,
                             int64_t pitch, int64_t head_dim, bool first) {
  for (int64_t r = 0; r < tile.queries; ++r) {
    T* row = scores.data() + r * kTile;
    T& largest = state.largest[static_cast<size_t>(r)];
    T& sum = state.sum[static_cast<size_t>(r)];
    const T before = largest;
    const int64_t width = tile.width(r);
    tile.hide(row, r, -std::numeric_limits<T>::infinity());
    T top = before;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < width; ++j) {
      const T score = row[j] * scale;
      top = score > top ? score : top;
    }
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) row[j] = vec_exp(row[j] * scale - top);
    tile.hide(row, r, T{0});  // where nothing is visible yet, top is -Inf and exp(-Inf + Inf) is NaN
    T part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = 0; j < width; ++j) part += row[j];
    if (top == before) {
      sum += part;
      continue;
    }
    const T factor = vec_exp(before - top);
    largest = top;
    sum = sum * factor + part;
    if (first) continue;
    for (int64_t d = 0; d < head_dim; ++d) out[r * pitch + d] *= factor;
  }
}

/// out /= sum, lse = largest + log(sum).
template <class T>
KINOE_SIMD void finish_queries(int64_t queries, const Softmax<T>& state, T* out, int64_t pitch,
                               int64_t head_dim, T* lse) {
  for (int64_t r = 0; r < queries; ++r) {
    const T sum = state.sum[static_cast<size_t>(r)], inverse = T{1} / sum;
    for (int64_t d = 0; d < head_dim; ++d) out[r * pitch + d] *= inverse;
    lse[r] = state.largest[static_cast<size_t>(r)] + std::log(sum);
  }
}

/// One tile of queries of one head.
template <class T>
void forward_task(const Sequence& s, T scale, int64_t query0, Head<const T> q, Head<const T> k,
                  Head<const T> v, Head<T> out, T* lse) {
  alignas(64) TileOf<T> scores{};
  Panels<T> panels;
  Softmax<T> state;
  const int64_t first = s.first_key_tile(query0), queries = std::min(kTile, s.length - query0);
  for (int64_t key0 = first; key0 < query0 + queries; key0 += kTile) {
    const Tile tile(s, query0, key0);
    panels.forget();
    multiply_heads(scores, tile, s.head_dim, q.from(query0), k.transposed_from(key0), panels);
    softmax_tile(scores, tile, scale, state, out.row(query0), out.pitch, s.head_dim, key0 == first);
    const bool exact = tile.cut && !all_finite(v.row(key0), tile.keys, s.head_dim, v.pitch);
    panels.forget();
    multiply_tile(tile, Rows::queries, s.head_dim, {scores.data(), kTile, 1}, v.from(key0), out.row(query0),
                  out.pitch, key0 > first, exact, panels);
  }
  finish_queries(queries, state, out.row(query0), out.pitch, s.head_dim, lse + query0);
}

template <class T>
void forward(const AttentionForward& args) {
  const int64_t batch = args.qkv.dim(0), length = args.qkv.dim(1), pitch = args.qkv.columns();
  const int64_t heads = args.heads, kv_heads = args.kv_heads, d = pitch / (heads + 2 * kv_heads);
  const int64_t tiles = (length + kTile - 1) / kTile;
  const T* qkv = args.qkv.as<T>();
  T* out = args.out.as<T>();
  T* lse = args.lse.as<T>();
  const int32_t* doc_start = args.doc_start ? args.doc_start.as<int32_t>() : nullptr;
  // The last tiles of queries see the most keys: they come first, so that threads finish together.
#pragma omp parallel for schedule(dynamic, 1) if (batch * heads * length * d > kParallelWork)
  for (int64_t task = 0; task < batch * heads * tiles; ++task) {
    const int64_t tile = tiles - 1 - task / (batch * heads), b = task / heads % batch, h = task % heads;
    const Sequence sequence{length, d, doc_start ? doc_start + b * length : nullptr, nullptr};
    const T* rows = qkv + b * length * pitch;
    const int64_t kv = h / (heads / kv_heads);
    forward_task<T>(sequence, static_cast<T>(args.scale), tile * kTile, {rows + h * d, pitch},
                    {rows + (heads + kv) * d, pitch}, {rows + (heads + kv_heads + kv) * d, pitch},
                    {out + b * length * heads * d + h * d, heads * d}, lse + (b * heads + h) * length);
  }
}

// ---- Backward -----------------------------------------------------------------------------------------------------

/// delta[t] = dout_t . out_t
template <class T>
KINOE_SIMD void delta_rows(T* delta, const T* d_out, const T* out, int64_t length, int64_t pitch,
                           int64_t head_dim) {
  for (int64_t t = 0; t < length; ++t) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < head_dim; ++d) sum += d_out[t * pitch + d] * out[t * pitch + d];
    delta[t] = sum;
  }
}

/// Scores become probabilities, and the gradients of probabilities those of unscaled scores.
template <class T>
KINOE_SIMD void softmax_gradient(TileOf<T>& scores, TileOf<T>& gradients, const Tile& tile, T scale,
                                 const T* lse, const T* delta) {
  for (int64_t r = 0; r < tile.queries; ++r) {
    T* p = scores.data() + r * kTile;
    T* ds = gradients.data() + r * kTile;
    const T log_sum = lse[r], mean = delta[r];
    const int64_t width = tile.width(r);
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      p[j] = vec_exp(p[j] * scale - log_sum);
      ds[j] = p[j] * (ds[j] - mean) * scale;
    }
    tile.hide(p, r, T{0});
    tile.hide(ds, r, T{0});
  }
}

/// What the backward pass of one query head reads and writes.
template <class T>
struct QueryHead {
  Head<const T> q, d_out, out;
  Head<T> dq;
  const T* lse;
  T* delta;
};

/// The stack of a backward task.
template <class T>
struct BackwardTiles {
  alignas(64) TileOf<T> p{};
  alignas(64) TileOf<T> ds{};
  Panels<T> k_transposed, v_transposed, k;  // of one tile of keys
  Panels<T> d_out, q;                       // of one tile of queries
};

/// What one tile adds to dq, dk and dv. `first`: it is the first tile of its keys.
template <class T>
void backward_tile(const Sequence& s, const Tile& tile, T scale, const QueryHead<T>& head, Head<const T> k,
                   Head<const T> v, Head<T> dk, Head<T> dv, bool first, BackwardTiles<T>& on) {
  const int64_t i = tile.query, j = tile.key, d = s.head_dim;
  on.d_out.forget();
  on.q.forget();
  multiply_heads(on.p, tile, d, head.q.from(i), k.transposed_from(j), on.k_transposed);
  multiply_heads(on.ds, tile, d, head.d_out.from(i), v.transposed_from(j), on.v_transposed);
  softmax_gradient(on.p, on.ds, tile, scale, head.lse + i, head.delta + i);

  const bool exact = tile.cut && !(all_finite(head.q.row(i), tile.queries, d, head.q.pitch) &&
                                   all_finite(head.d_out.row(i), tile.queries, d, head.d_out.pitch) &&
                                   all_finite(k.row(j), tile.keys, d, k.pitch));
  multiply_tile(tile, Rows::keys, d, {on.p.data(), 1, kTile}, head.d_out.from(i), dv.row(j), dv.pitch, !first,
                exact, on.d_out);
  multiply_tile(tile, Rows::keys, d, {on.ds.data(), 1, kTile}, head.q.from(i), dk.row(j), dk.pitch, !first,
                exact, on.q);
  multiply_tile(tile, Rows::queries, d, {on.ds.data(), kTile, 1}, k.from(j), head.dq.row(i), head.dq.pitch,
                j > s.first_key_tile(i), exact, on.k);
}

/// One key/value head of one sequence, with the `group` query heads that read it.
template <class T, class HeadAt>
void backward_task(const Sequence& s, T scale, int64_t group, const HeadAt& head_at, Head<const T> k,
                   Head<const T> v, Head<T> dk, Head<T> dv) {
  BackwardTiles<T> on;
  for (int64_t g = 0; g < group; ++g) {
    const QueryHead<T> head = head_at(g);
    delta_rows(head.delta, head.d_out.data, head.out.data, s.length, head.out.pitch, s.head_dim);
  }
  for (int64_t key0 = 0; key0 < s.length; key0 += kTile) {
    on.k_transposed.forget();
    on.v_transposed.forget();
    on.k.forget();
    const int64_t end = s.end_query(std::min(key0 + kTile, s.length) - 1);
    for (int64_t g = 0; g < group; ++g)
      for (int64_t query0 = key0; query0 < end; query0 += kTile)
        backward_tile(s, Tile(s, query0, key0), scale, head_at(g), k, v, dk, dv, g == 0 && query0 == key0,
                      on);
  }
}

template <class T>
void backward(const AttentionBackward& args) {
  const int64_t batch = args.qkv.dim(0), length = args.qkv.dim(1), pitch = args.qkv.columns();
  const int64_t heads = args.heads, kv_heads = args.kv_heads, group = heads / kv_heads;
  const int64_t d = pitch / (heads + 2 * kv_heads), out_pitch = heads * d;
  const T* qkv = args.qkv.as<T>();
  const T* out = args.out.as<T>();
  const T* d_out = args.d_out.as<T>();
  const T* lse = args.lse.as<T>();
  T* d_qkv = args.d_qkv.as<T>();
  T* delta = static_cast<T*>(args.scratch.data);
  const int32_t* doc_start = args.doc_start ? args.doc_start.as<int32_t>() : nullptr;
  const int32_t* doc_end = args.doc_end ? args.doc_end.as<int32_t>() : nullptr;
#pragma omp parallel for schedule(dynamic, 1) if (batch * heads * length * d > kParallelWork)
  for (int64_t task = 0; task < batch * kv_heads; ++task) {
    const int64_t b = task / kv_heads, kv = task % kv_heads;
    const Sequence sequence{length, d, doc_start ? doc_start + b * length : nullptr,
                            doc_end ? doc_end + b * length : nullptr};
    const T* rows = qkv + b * length * pitch;
    T* d_rows = d_qkv + b * length * pitch;
    const auto head_at = [&](int64_t g) {
      const int64_t h = kv * group + g, at = b * length * out_pitch + h * d, of = (b * heads + h) * length;
      return QueryHead<T>{{rows + h * d, pitch},
                          {d_out + at, out_pitch},
                          {out + at, out_pitch},
                          {d_rows + h * d, pitch},
                          lse + of,
                          delta + of};
    };
    const int64_t key = (heads + kv) * d, value = (heads + kv_heads + kv) * d;
    backward_task<T>(sequence, static_cast<T>(args.scale), group, head_at, {rows + key, pitch},
                     {rows + value, pitch}, {d_rows + key, pitch}, {d_rows + value, pitch});
  }
}

}  // namespace

void attention_forward(const Context& /*ctx*/, const AttentionForward& args) {
  check(args);
  with_scalar("attention_forward", args.qkv.dtype, [&]<class T>(T) { forward<T>(args); });
}

void attention_backward(const Context& /*ctx*/, const AttentionBackward& args) {
  check(args);
  require_scratch(
      {"attention_backward", "scratch", args.scratch},
      attention_backward_scratch_bytes(args.qkv.dtype, args.qkv.dim(0), args.qkv.dim(1), args.heads));
  with_scalar("attention_backward", args.qkv.dtype, [&]<class T>(T) { backward<T>(args); });
}

}  // namespace cpu

}  // namespace kinoe
