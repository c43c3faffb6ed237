// From a dataset to the device: micro-batches prepared by the loader's thread and uploaded without waiting.
#pragma once

#include <functional>
#include <vector>

#include "dataloader/loader.h"
#include "trainer/eval.h"
#include "trainer/model.h"

namespace kinoe {

/// A loader and the uploads from its buffers. A buffer is written again only when its upload has passed.
class Feed {
 public:
  /// `rows` sequences per micro-batch; `dataset` must outlive the feed. `passed` is called in every put(), as a sign that what was
  /// queued before goes on: a CPU has then computed the micro-batch before. On a GPU the host runs ahead, but put() has waited for
  /// an upload Loader::kHeld micro-batches ago, behind which stands what was computed before it: the sign is no older
  /// than that, and a device that hangs ends the calls.
  Feed(const Context& ctx, const Dataset& dataset, int64_t rows, std::function<void()> passed = {});

  /// Puts samples [first_sample, first_sample + valid) into `batch` and returns the milliseconds spent waiting for data.
  double put(const DeviceBatch& batch, int64_t first_sample, int64_t valid);
  /// Lets the loader's thread prepare a later put(). To be called in the order of the puts to come.
  void announce(int64_t first_sample, int64_t valid) { loader_.prefetch(first_sample, valid); }

 private:
  Context ctx_;
  std::function<void()> passed_;
  Loader loader_;
  std::vector<Event> uploaded_;  // of the loader's buffers that may still be read
  size_t next_ = 0;
};

/// The loss of the first `batches` micro-batches of a dataset, all of it when 0; the last one may be partly filled.
/// Ranks take them in turn.
EvalResult evaluate_dataset(const Context& ctx, const Model& model, Activations& acts, LayerHooks hooks,
                            Feed& feed, const Dataset& dataset, int64_t batches, Collectives& collectives);

}  // namespace kinoe
