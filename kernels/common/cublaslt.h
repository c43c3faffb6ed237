// Plain matrix products on the GPU: cuBLASLt behind descriptors made once and algorithms measured once.
//
// The library's first suggestion is often 2 to 10 % off the best. So at the first use of a shape its candidates are timed
// on the operands at hand, with a cold L2, and the fastest is pinned: for the rest of the run, and by Device's
// choices for the next one, since another algorithm sums in another order and gives other bits. Candidates whose reduction
// order is not fixed are not asked for.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/common/device.h"

namespace kinoe {

/// Column-major, as the library has it: D[m, n] = op(A)[m, k] op(B)[k, n] (+ D) (+ bias[m] to every column), the whole times
/// gelu'(gelu_input) element by element. A row-major [r, c] tensor is a column-major [c, r] matrix of the same memory with
/// leading dimension c.
struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  Tensor a, b, d;
  int64_t lda = 0, ldb = 0, ldd = 0;
  bool transpose_a = false, transpose_b = false;
  bool accumulate = false;
  Tensor bias;  // [m] of D's type, or absent
  /// Of D's type, shape and leading dimension, or absent; not together with bias or accumulate.
  Tensor gelu_input = {};
};

class BlasLt {
 public:
  static constexpr size_t kWorkspaceBytes = size_t{64} << 20;

  /// `stream` is a cudaStream_t; products of one BlasLt run on it alone, since they share its workspace. `at_most` is called
  /// when measuring holds the most memory.
  explicit BlasLt(void* stream, std::function<void()> at_most = {});
  ~BlasLt();
  BlasLt(const BlasLt&) = delete;
  BlasLt& operator=(const BlasLt&) = delete;

  /// Queues the product. The first time a shape is seen it is measured, which waits for the stream and, when accumulating,
  /// takes memory for a second D for that long.
  void run(const Gemm& gemm);
  /// The same, but false, with nothing queued, where the library has no algorithm; for one shape always the same answer.
  [[nodiscard]] bool try_run(const Gemm& gemm);

  [[nodiscard]] std::vector<GemmChoice> choices() const;
  void pin(const std::vector<GemmChoice>& choices);
  /// "cublasLt 130001": with the GPU's name, what a choice is valid for.
  [[nodiscard]] static std::string version();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kinoe
