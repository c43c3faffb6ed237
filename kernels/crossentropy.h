// Softmax and cross-entropy in one pass, the gradient written over the logits.
//
//   loss[n]      = logsumexp(logits[n, :V]) - logits[n, target[n]]           0 when target[n] is ignored (-1)
//   dlogits[n,v] = d_loss * (softmax(logits[n, :V])[v] - [v == target[n]])   0 for ignored rows and for v >= V
//
// V is the true vocabulary; columns from V up to the row pitch are padding and never enter a sum.
#pragma once

#include "kernels/common/cost.h"
#include "kernels/common/dispatch.h"
#include "kernels/common/fixed.h"

namespace kinoe {

struct CrossEntropy {
  Tensor logits;   // [N, >= V] activation type; overwritten by the gradient when with_gradient
  Tensor targets;  // [N] int32; -1: ignored
  Tensor losses;   // [N] fp32 (fp64 in fp64), in nats
  int64_t vocab_size = 0;
  float d_loss = 0;  // gradient of the objective with respect to one token's loss: 1 / nominal tokens
  bool with_gradient = false;
  Tensor bad_target;  // [1] int64: max with 1 + n for a target that is neither -1 nor in [0, V); such a row
                      // is treated as ignored
};

/// Adds the losses of all rows with a target (>= 0) to sum[0] and their number to count[0]. They are summed in fp64, in an
/// order given by N alone, then rounded to a whole number of units, so that several micro-batches, on any ranks and in
/// any order, have one sum. Where the fp64 sum is beyond N * kLossLimit, NaN or Inf it is not added, and overflow[0] is
/// set to 1.
struct LossSum {
  Tensor sum;       // [1] int64, in kLossUnit nats; added to
  Tensor count;     // [1] int64; added to
  Tensor overflow;  // [1] int64; never cleared
  Tensor losses;    // [N] fp32 (fp64 in fp64)
  Tensor targets;   // [N] int32
};

/// Throws unless types and shapes are as stated above; both backends call it first.
void check(const CrossEntropy& args);
void check(const LossSum& args);

KINOE_OPERATION(cross_entropy, CrossEntropy)
KINOE_OPERATION(loss_sum, LossSum)

inline Cost cross_entropy_cost(int64_t n, int64_t v, size_t element, bool with_gradient) {
  return {static_cast<double>(n * v) * static_cast<double>(element) * (with_gradient ? 2.0 : 1.0),
          static_cast<double>(n * v) * (with_gradient ? 6.0 : 4.0)};
}

}  // namespace kinoe
