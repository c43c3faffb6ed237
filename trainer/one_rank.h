// The weights of a model that is not trained: everything is in its own memory and stays there.
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

}  // namespace kinoe
