// Matrix products of the CPU backend: one blocked, vectorised core under the linear layer and attention.
//
// The innermost piece is a tile of 6 rows x 16 columns (8 in fp64) of C that stays in registers while the depth runs:
// per step two vectors of B and six broadcast elements of A feed twelve multiply-adds, which is what a core with two
// FMA units, four cycles of latency and sixteen vector registers can keep busy.
//
//   B is copied into panels of 16 columns, depth by depth, so that the tile reads it as one stream;
//   the depth is cut into pieces of 256: a panel (16 KiB) lives in L1, all panels of a block (256 KiB) in L2;
//   A is read in place where its rows are contiguous, and copied into strips of 6 rows where its columns are.
//
// The order of every sum is fixed: over each piece of the depth from zero, in ascending order, then piece by piece onto
// C. It depends neither on the number of threads nor on where in C an element lies, so a row of C has the same bits
// whatever rows it is computed with. All buffers are arrays on the stack of the thread that uses them.
#pragma once

#include <cstdint>

namespace kinoe::cpu {

/// A matrix in memory: element (i, j) is data[i * row + j * column]. Transposing it means swapping the strides.
template <class T>
struct Strided {
  const T* data = nullptr;
  int64_t row = 0;
  int64_t column = 0;

  [[nodiscard]] Strided at(int64_t i, int64_t j) const { return {data + i * row + j * column, row, column}; }
};

/// C[rows, columns] (+)= A[rows, depth] B[depth, columns] (+ bias[columns]).
template <class T>
struct Product {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t depth = 0;
  Strided<T> a;  // one of its strides is 1
  Strided<T> b;  // one of its strides is 1
  T* c = nullptr;
  int64_t c_row = 0;        // elements from one row of C to the next
  const T* bias = nullptr;  // or absent; not together with accumulate
  bool accumulate = false;  // add to C instead of overwriting it
};

/// The product on all threads of the caller's OpenMP team. T is float or double.
template <class T>
void multiply(const Product<T>& product);

// The core in two halves, on the calling thread, for callers that use the same B several times or keep C in cache.

/// Columns of a panel.
template <class T>
inline constexpr int64_t kPanelColumns = static_cast<int64_t>(64 / sizeof(T));

/// Copies B[depth, columns] into panels, one behind the other; the last one is padded with zeros to kPanelColumns.
template <class T>
void pack_panels(Strided<T> b, int64_t depth, int64_t columns, T* panels);

/// C (+)= A B with B packed; the depth is summed in one piece, and A is read in place. The panels may hold more of B than
/// is asked for: they are `panel_depth` deep, and `panels` may point kPanelColumns elements per step further down.
template <class T>
void multiply_panels(int64_t rows, int64_t columns, int64_t depth, Strided<T> a, const T* panels,
                     int64_t panel_depth, T* c, int64_t c_row, bool accumulate);

}  // namespace kinoe::cpu
