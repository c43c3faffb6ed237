// The layer hooks of a single rank: everything is in its own memory and stays there.
#pragma once

#include "trainer/layer_hooks.h"
#include "trainer/parameters.h"

namespace kinoe {

class OneRankWeights : public WeightHooks {
 public:
  OneRankWeights(const ParameterTable& table, const Tensor& weights) : table_(table), weights_(weights) {}
  Tensor acquire(int bucket) override { return table_.bucket(weights_, bucket); }
  void release(int) override {}

 private:
  const ParameterTable& table_;
  Tensor weights_;
};

/// The first micro-batch of a step overwrites, the others add.
class OneRankGradients : public GradientHooks {
 public:
  OneRankGradients(const ParameterTable& table, const Tensor& gradients)
      : table_(table), gradients_(gradients) {}
  void begin_micro_batch(bool first_of_step) { first_ = first_of_step; }
  GradientTarget begin(int bucket) override { return {table_.bucket(gradients_, bucket), !first_}; }
  void ready(int) override {}

 private:
  const ParameterTable& table_;
  Tensor gradients_;
  bool first_ = true;
};

}  // namespace kinoe
