// Uploads that the host does not wait for.
#include "trainer/feed.h"

#include <algorithm>
#include <utility>

namespace kinoe {

Feed::Feed(const Context& ctx, const Dataset& dataset, int64_t rows, std::function<void()> passed)
    : ctx_(ctx),
      passed_(std::move(passed)),
      loader_(dataset, rows,
              Memory::pinned(ctx.backend,
                             Loader::buffer_bytes(rows, dataset.seq_len(), dataset.document_mask()))) {
  for (int i = 0; i < Loader::kHeld; ++i) uploaded_.emplace_back(ctx.backend);
  for (Event& event : uploaded_) event.record(ctx_);
}

double Feed::put(const DeviceBatch& batch, int64_t first_sample, int64_t valid) {
  uploaded_[next_].wait();
  if (passed_) passed_();
  const Batch& host = loader_.fetch(first_sample, valid);
  upload(ctx_, batch.tokens.data, host.tokens, batch.tokens.bytes());
  upload(ctx_, batch.targets.data, host.targets, batch.targets.bytes());
  CHECK(!batch.doc_start == (host.doc_start == nullptr),
        "documents of the data and of the memory do not agree");
  if (batch.doc_start) upload(ctx_, batch.doc_start.data, host.doc_start, batch.doc_start.bytes());
  if (batch.doc_end) upload(ctx_, batch.doc_end.data, host.doc_end, batch.doc_end.bytes());
  uploaded_[next_].record(ctx_);
  next_ = (next_ + 1) % uploaded_.size();
  return loader_.data_wait_ms();
}

EvalResult evaluate_dataset(const Context& ctx, const Model& model, Activations& acts, LayerHooks hooks,
                            Feed& feed, const Dataset& dataset, int64_t batches, Collectives& collectives) {
  const int64_t rows = acts.shape.batch;
  const int64_t end = batches > 0 ? std::min(dataset.samples(), batches * rows) : dataset.samples();
  const int64_t stride = rows * collectives.ranks();
  int64_t at = rows * collectives.rank();
  return evaluate(
      ctx, model, acts, hooks,
      [&](const DeviceBatch& batch) {
        if (at >= end) return false;
        feed.put(batch, at, std::min(rows, end - at));
        at += stride;
        if (at < end) feed.announce(at, std::min(rows, end - at));
        return true;
      },
      collectives);
}

}  // namespace kinoe
