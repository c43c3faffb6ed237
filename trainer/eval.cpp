// Sums of losses are kept on the device; the host waits once, at the end.
#include "trainer/eval.h"

#include "kernels/adamw.h"
#include "trainer/forward.h"

namespace kinoe {

EvalResult evaluate(const Context& ctx, const Model& model, Activations& acts, LayerHooks hooks,
                    const std::function<bool(const DeviceBatch&)>& next, Collectives& collectives) {
  begin_step(ctx, acts);
  while (next(acts.batch)) {
    forward(ctx, model, acts, hooks);
    head_loss(ctx, model, acts, hooks);
  }
  collectives.follow(ctx);
  collectives.all_reduce(acts.sums);
  collectives.await(ctx, collectives.mark());
  StepState state;
  download(ctx, &state, acts.state.data, sizeof(state));
  synchronize(ctx);
  if (state.bad_token != 0)
    fail(ExitCode::data, "a token id in the validation data is not below the vocabulary size of ",
         model.config.vocab_size, "; use data made with this model's tokenizer");
  EvalResult result;
  result.target_tokens = state.target_tokens;
  if (state.target_tokens > 0) result.loss = loss_of(state) / static_cast<double>(state.target_tokens);
  return result;
}

}  // namespace kinoe
