// Loss on held-out data. Shares the weights with training and nothing else.
#pragma once

#include <functional>

#include "trainer/collectives.h"
#include "trainer/layer_hooks.h"
#include "trainer/model.h"

namespace kinoe {

struct EvalResult {
  double loss = 0;            // nats per target token
  int64_t target_tokens = 0;  // 0: there was nothing to evaluate and the loss means nothing
};

/// Runs micro-batches until `next`, which puts one of this rank's into acts.batch, returns false; the loss is over those of all
/// ranks. Waits for the device at the end.
/// `acts` is planned with training = false.
EvalResult evaluate(const Context& ctx, const Model& model, Activations& acts, LayerHooks hooks,
                    const std::function<bool(const DeviceBatch&)>& next, Collectives& collectives);

}  // namespace kinoe
