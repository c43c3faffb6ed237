// The one interface between the mathematics and the parallelism.
//
// forward and backward ask for a bucket of weights before they use it and say when they are done with it; backward
// asks where a bucket's gradients go and says when they are complete. One rank answers with its own memory; sharded
// weights, reduce-scatter and topology mode are other answers to the same four questions.
#pragma once

#include "kernels/common/tensor.h"

namespace kinoe {

/// Where the gradients of one bucket go in this micro-batch.
struct GradientTarget {
  Tensor bucket;            // flat, the whole bucket
  bool accumulate = false;  // add to what is there
};

class WeightHooks {
 public:
  WeightHooks() = default;
  virtual ~WeightHooks() = default;
  WeightHooks(const WeightHooks&) = delete;
  WeightHooks& operator=(const WeightHooks&) = delete;
  /// The bucket's weights, valid until release().
  virtual Tensor acquire(int bucket) = 0;
  virtual void release(int bucket) = 0;
};

class GradientHooks {
 public:
  GradientHooks() = default;
  virtual ~GradientHooks() = default;
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;
  /// Called once per micro-batch and bucket, before its first gradient.
  virtual GradientTarget begin(int bucket) = 0;
  /// All gradients of the bucket for this micro-batch have been queued.
  virtual void ready(int bucket) = 0;
};

struct LayerHooks {
  WeightHooks& weights;
  GradientHooks& grads;
};

}  // namespace kinoe
