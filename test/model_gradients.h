// A model's gradients against central differences of its loss, in fp64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "test/model_harness.h"

namespace kinoe {

/// Weights of all kinds away from 0 and 1.
template <class T = double>
void stir(ModelRun& run) {
  auto* weights = run.parameters.weights.whole.as<T>();
  for (const Parameter& p : run.model.table.parameters())
    for (int64_t i = 0; i < p.size; ++i)
      weights[p.offset + i] +=
          static_cast<T>(0.1 * std::sin(static_cast<double>(i) + static_cast<double>(p.key % 1000)));
}

/// The gradients in the memory of `run` at about a dozen elements of each tensor. `loss` computes the loss again.
inline void expect_gradients_of(ModelRun& run, const std::function<double()>& loss) {
  auto* weights = run.parameters.weights.whole.as<double>();
  const auto gradient = run.host<double>(run.parameters.gradients.whole);
  for (const Parameter& p : run.model.table.parameters()) {
    double worst = 0, largest = 0;
    for (int64_t i = 0; i < p.size; i += std::max<int64_t>(1, p.size / 12)) {
      double& w = weights[p.offset + i];
      const double kept = w, h = 1e-5;
      w = kept + h;
      const double above = loss();
      w = kept - h;
      const double below = loss();
      w = kept;
      const double numeric = (above - below) / (2 * h);
      worst = std::max(worst, std::abs(numeric - gradient[static_cast<size_t>(p.offset + i)]));
      largest = std::max(largest, std::abs(numeric));
    }
    EXPECT_LT(worst, 1e-8 + 1e-6 * largest) << p.name;
  }
}

}  // namespace kinoe
