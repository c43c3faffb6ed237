// The blocked matrix product; its plan is explained in gemm_cpu.h.
#include "kernels/common/gemm_cpu.h"

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "kernels/common/simd.h"

namespace kinoe::cpu {

namespace {

constexpr int64_t kTileRows = 6;
constexpr int64_t kDepth = 256;             // a piece of the depth: part of the result's definition
constexpr int64_t kBlockRows = 96;          // rows of A copied at a time
constexpr int64_t kPanelBytes = 256 << 10;  // panels of B kept at a time

/// 32 bytes: one AVX register, or two of SSE or NEON.
template <class T>
struct Vector {
  static constexpr int kLanes = static_cast<int>(32 / sizeof(T));
  typedef T Type __attribute__((vector_size(32)));

  static KINOE_INLINE void load(Type& v, const T* from) { std::memcpy(&v, from, sizeof v); }
  static KINOE_INLINE void store(T* to, const Type& v) { std::memcpy(to, &v, sizeof v); }
};

/// Rows x kPanelColumns elements of C from `depth` steps of A and one panel of B. `bias` is null or the bias of the
/// first column; only the first `columns` columns are written.
template <class T, int Rows>
KINOE_INLINE void tile(int64_t depth, Strided<T> a, const T* panel, T* c, int64_t c_row, int columns,
                       const T* bias, bool accumulate) {
  // Indexed by constants alone once the loops are unrolled: only then do the sums stay in registers.
  using V = Vector<T>;
  typename V::Type sum[static_cast<size_t>(Rows)][2];
  for (int r = 0; r < Rows; ++r)
    for (int half = 0; half < 2; ++half) sum[r][half] = typename V::Type{};
  const T* upper = a.data;
  const T* lower = a.data + 3 * a.row;  // two pointers and one scaled index reach six rows
  for (int64_t k = 0; k < depth; ++k) {
    typename V::Type b[2];
    V::load(b[0], panel);
    V::load(b[1], panel + V::kLanes);
    for (int r = 0; r < Rows; ++r) {
      const T x = r < 3 ? upper[r * a.row] : lower[(r - 3) * a.row];
      sum[r][0] += x * b[0];
      sum[r][1] += x * b[1];
    }
    upper += a.column;
    lower += a.column;
    panel += kPanelColumns<T>;
  }
  if (columns == kPanelColumns<T>) {
    for (int r = 0; r < Rows; ++r)
      for (int half = 0; half < 2; ++half) {
        T* to = c + r * c_row + half * V::kLanes;
        typename V::Type x{};
        if (accumulate)
          V::load(x, to);
        else if (bias)
          V::load(x, bias + half * V::kLanes);
        x += sum[r][half];
        V::store(to, x);
      }
    return;
  }
  T edge[static_cast<size_t>(Rows * kPanelColumns<T>)];
  for (int r = 0; r < Rows; ++r)
    for (int half = 0; half < 2; ++half)
      V::store(edge + r * kPanelColumns<T> + half * V::kLanes, sum[r][half]);
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < columns; ++j) {
      T& to = c[r * c_row + j];
      const T x = accumulate ? to : bias ? bias[j] : T{0};
      to = x + edge[r * kPanelColumns<T> + j];
    }
}

/// The tile with 1 to kTileRows rows.
template <class T>
KINOE_INLINE void tile_of(int64_t rows, int64_t depth, Strided<T> a, const T* panel, T* c, int64_t c_row,
                          int columns, const T* bias, bool accumulate) {
  switch (rows) {
    case 1: return tile<T, 1>(depth, a, panel, c, c_row, columns, bias, accumulate);
    case 2: return tile<T, 2>(depth, a, panel, c, c_row, columns, bias, accumulate);
    case 3: return tile<T, 3>(depth, a, panel, c, c_row, columns, bias, accumulate);
    case 4: return tile<T, 4>(depth, a, panel, c, c_row, columns, bias, accumulate);
    case 5: return tile<T, 5>(depth, a, panel, c, c_row, columns, bias, accumulate);
    default: return tile<T, 6>(depth, a, panel, c, c_row, columns, bias, accumulate);
  }
}

/// 16 bytes: the unit in which panels are transposed.
template <class T>
struct Quad;
template <>
struct Quad<float> {
  typedef float Type __attribute__((vector_size(16)));
  static constexpr int64_t kSize = 4;
  static KINOE_INLINE void transpose(Type (&v)[4]) {
    const Type a = __builtin_shufflevector(v[0], v[1], 0, 4, 1, 5),
               b = __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5);
    const Type c = __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7),
               d = __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7);
    v[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
    v[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    v[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
    v[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
  }
};
template <>
struct Quad<double> {
  typedef double Type __attribute__((vector_size(16)));
  static constexpr int64_t kSize = 2;
  static KINOE_INLINE void transpose(Type (&v)[2]) {
    const Type a = v[0];
    v[0] = __builtin_shufflevector(a, v[1], 0, 2);
    v[1] = __builtin_shufflevector(a, v[1], 1, 3);
  }
};

/// A whole panel of a B whose columns are contiguous.
template <class T>
KINOE_INLINE void transpose_panel(const T* from, int64_t pitch, int64_t depth, T* to) {
  using Q = Quad<T>;
  constexpr int64_t kWidth = kPanelColumns<T>;
  int64_t k = 0;
  for (; k + Q::kSize <= depth; k += Q::kSize)
    for (int64_t j = 0; j < kWidth; j += Q::kSize) {
      typename Q::Type v[static_cast<size_t>(Q::kSize)];
      for (int64_t i = 0; i < Q::kSize; ++i) std::memcpy(&v[i], from + (j + i) * pitch + k, sizeof v[i]);
      Q::transpose(v);
      for (int64_t i = 0; i < Q::kSize; ++i) std::memcpy(to + (k + i) * kWidth + j, &v[i], sizeof v[i]);
    }
  for (; k < depth; ++k)
    for (int64_t j = 0; j < kWidth; ++j) to[k * kWidth + j] = from[j * pitch + k];
}

/// Panels of B[depth, columns]: for each 16 columns, depth rows of 16; columns beyond the last are zero.
template <class T>
KINOE_INLINE void copy_panels(Strided<T> b, int64_t depth, int64_t columns, T* to) {
  constexpr int64_t kWidth = kPanelColumns<T>;
  for (int64_t j0 = 0; j0 < columns; j0 += kWidth, to += depth * kWidth) {
    const int64_t width = std::min(kWidth, columns - j0);
    const T* from = b.data + j0 * b.column;
    if (width == kWidth && b.column == 1) {
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t j = 0; j < kWidth; ++j) to[k * kWidth + j] = from[k * b.row + j];
      continue;
    }
    if (width == kWidth && b.row == 1) {
      transpose_panel(from, b.column, depth, to);
      continue;
    }
    for (int64_t j = 0; j < width; ++j)
      for (int64_t k = 0; k < depth; ++k) to[k * kWidth + j] = from[k * b.row + j * b.column];
    for (int64_t j = width; j < kWidth; ++j)
      for (int64_t k = 0; k < depth; ++k) to[k * kWidth + j] = T{0};
  }
}

/// Strips of A[rows, depth] whose columns are contiguous: for each 6 rows, depth groups of 6. What a last, shorter
/// strip leaves open is never read.
template <class T>
KINOE_INLINE void copy_strips(Strided<T> a, int64_t rows, int64_t depth, T* to) {
  for (int64_t i0 = 0; i0 < rows; i0 += kTileRows, to += depth * kTileRows) {
    const T* from = a.data + i0;
    if (rows - i0 >= kTileRows) {
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t r = 0; r < kTileRows; ++r) to[k * kTileRows + r] = from[k * a.column + r];
    } else {
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t r = 0; r < rows - i0; ++r) to[k * kTileRows + r] = from[k * a.column + r];
    }
  }
}

/// A part of C, for one thread.
struct Rectangle {
  int64_t row, row_end, column, column_end;
};

template <class T>
KINOE_SIMD void multiply_rectangle(const Product<T>& p, const Rectangle& part) {
  alignas(64) T panels[static_cast<size_t>(kPanelBytes) / sizeof(T)];
  alignas(64) T strips[static_cast<size_t>(kBlockRows * kDepth)];
  constexpr int64_t kWidth = kPanelColumns<T>;
  const int64_t kept = kPanelBytes / static_cast<int64_t>(sizeof(T)) / kWidth / std::min(p.depth, kDepth);
  const bool copy_a = p.a.row == 1 && p.a.column != 1;

  for (int64_t n0 = part.column; n0 < part.column_end; n0 += kept * kWidth) {
    const int64_t n1 = std::min(n0 + kept * kWidth, part.column_end);
    for (int64_t k0 = 0; k0 < p.depth; k0 += kDepth) {
      const int64_t depth = std::min(kDepth, p.depth - k0);
      const bool accumulate = p.accumulate || k0 > 0;
      copy_panels(p.b.at(k0, n0), depth, n1 - n0, panels);
      for (int64_t m0 = part.row; m0 < part.row_end; m0 += kBlockRows) {
        const int64_t m1 = std::min(m0 + kBlockRows, part.row_end);
        if (copy_a) copy_strips(p.a.at(m0, k0), m1 - m0, depth, strips);
        for (int64_t n = n0; n < n1; n += kWidth)
          for (int64_t m = m0; m < m1; m += kTileRows)
            tile_of<T>(m1 - m, depth,
                       copy_a ? Strided<T>{strips + (m - m0) * depth, 1, kTileRows} : p.a.at(m, k0),
                       panels + (n - n0) * depth, p.c + m * p.c_row + n, p.c_row,
                       static_cast<int>(std::min(kWidth, n1 - n)), p.bias ? p.bias + n : nullptr, accumulate);
      }
    }
  }
}

template <class T>
KINOE_SIMD void pack(Strided<T> b, int64_t depth, int64_t columns, T* panels) {
  copy_panels(b, depth, columns, panels);
}

template <class T>
KINOE_SIMD void multiply_packed(int64_t rows, int64_t columns, int64_t depth, Strided<T> a, const T* panels,
                                int64_t panel_depth, T* c, int64_t c_row, bool accumulate) {
  constexpr int64_t kWidth = kPanelColumns<T>;
  for (int64_t n = 0; n < columns; n += kWidth)
    for (int64_t m = 0; m < rows; m += kTileRows)
      tile_of<T>(rows - m, depth, a.at(m, 0), panels + n * panel_depth, c + m * c_row + n, c_row,
                 static_cast<int>(std::min(kWidth, columns - n)), nullptr, accumulate);
}

/// How C is dealt out: `down` x `across` rectangles of whole tiles.
struct Grid {
  int64_t down = 1, across = 1;
  double work = 0;      // of the largest rectangle, in multiply-adds per step of depth, copies included
  double overhead = 0;  // the copies' share of it
};

/// The grid of at most `parts` rectangles whose largest one has the least work: multiply-adds, and what copying its
/// columns of B and reading its rows of A cost in units of them (measured).
template <class T>
Grid grid_for(const Product<T>& p, int64_t parts) {
  constexpr double kCopyColumn = 16, kReadRow = 4;
  const auto largest = [](int64_t n, int64_t unit, int64_t count) {
    const int64_t units = (n + unit - 1) / unit, most = (units + count - 1) / count;
    return static_cast<double>(most * unit);
  };
  Grid best;
  for (int64_t down = 1; down <= parts; ++down) {
    const int64_t across = parts / down;
    const double rows = largest(p.rows, kTileRows, down),
                 columns = largest(p.columns, kPanelColumns<T>, across);
    const double copies = kCopyColumn * columns + kReadRow * rows, work = rows * columns + copies;
    if (down == 1 || work < best.work) best = {down, across, work, copies / work};
  }
  return best;
}

/// A few rectangles for each thread where they stay large enough, so that a thread which the system interrupts does not
/// hold up the others.
template <class T>
Grid grid_for_threads(const Product<T>& p, int64_t threads) {
  constexpr double kTolerated = 0.08;
  for (int64_t each = 4; each > 1; each /= 2)
    if (const Grid grid = grid_for(p, each * threads); grid.overhead < kTolerated) return grid;
  return grid_for(p, threads);
}

/// Where part i of `parts` begins when n is cut into whole units.
int64_t cut(int64_t n, int64_t unit, int64_t i, int64_t parts) {
  return std::min(n, (n + unit - 1) / unit * i / parts * unit);
}

}  // namespace

template <class T>
void multiply(const Product<T>& p) {
  // Below about 10 us of work, waking the other threads costs more than they save.
  constexpr double kWorthThreads = 5e5;
  const double work =
      static_cast<double>(p.rows) * static_cast<double>(p.columns) * static_cast<double>(p.depth);
  const int threads = work < kWorthThreads ? 1 : omp_get_max_threads();
  const Grid grid = threads == 1 ? Grid{} : grid_for_threads(p, threads);
#pragma omp parallel for schedule(dynamic, 1) if (threads > 1)
  for (int64_t part = 0; part < grid.down * grid.across; ++part) {
    const int64_t i = part / grid.across, j = part % grid.across;
    const Rectangle rectangle{cut(p.rows, kTileRows, i, grid.down), cut(p.rows, kTileRows, i + 1, grid.down),
                              cut(p.columns, kPanelColumns<T>, j, grid.across),
                              cut(p.columns, kPanelColumns<T>, j + 1, grid.across)};
    multiply_rectangle(p, rectangle);
  }
}

template <class T>
void pack_panels(Strided<T> b, int64_t depth, int64_t columns, T* panels) {
  pack(b, depth, columns, panels);
}

template <class T>
void multiply_panels(int64_t rows, int64_t columns, int64_t depth, Strided<T> a, const T* panels,
                     int64_t panel_depth, T* c, int64_t c_row, bool accumulate) {
  multiply_packed(rows, columns, depth, a, panels, panel_depth, c, c_row, accumulate);
}

template void multiply<float>(const Product<float>&);
template void multiply<double>(const Product<double>&);
template void pack_panels<float>(Strided<float>, int64_t, int64_t, float*);
template void pack_panels<double>(Strided<double>, int64_t, int64_t, double*);
template void multiply_panels<float>(int64_t, int64_t, int64_t, Strided<float>, const float*, int64_t, float*,
                                     int64_t, bool);
template void multiply_panels<double>(int64_t, int64_t, int64_t, Strided<double>, const double*, int64_t,
                                      double*, int64_t, bool);

}  // namespace kinoe::cpu
