// The backward pass of a micro-batch: forward.cpp read from its end to its beginning.
#pragma once

#include "trainer/layer_hooks.h"
#include "trainer/model.h"

namespace kinoe {

/// After forward(): the head's losses (added to acts.loss_sum and acts.target_tokens) and every gradient, to where
/// hooks.grads says. The gradients are those of sum(losses) / nominal_tokens; the true number of target tokens is known
/// only at the end of the step and is applied by the optimizer.
void backward(const Context& ctx, const Model& model, Activations& acts, LayerHooks hooks,
              double nominal_tokens);

}  // namespace kinoe
