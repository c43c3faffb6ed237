// Which collective moves which bucket, and when.
#include "trainer/sharding.h"

#include <algorithm>

#include "kernels/fixed_point.h"

namespace kinoe {
namespace {

constexpr Collectives::Mark kNow = -1;

int64_t largest_other_than_embedding(const ParameterTable& table) {
  int64_t largest = 0;
  for (int b = 0; b < static_cast<int>(table.buckets().size()); ++b)
    if (b != ParameterTable::embedding_bucket())
      largest = std::max(largest, table.buckets()[static_cast<size_t>(b)].size);
  return largest;
}

}  // namespace

GradientMemory take_gradients(Arena& arena, const ParameterTable& table, const ShardLayout& layout,
                              GradientSum sum, DType accumulator) {
  GradientMemory g;
  if (sum == GradientSum::floating) {
    g.whole = arena.take("gradients", accumulator, {layout.whole_size()});
    g.shard = layout.sharded() ? arena.take("gradients", accumulator, {layout.size()}) : g.whole;
    return g;
  }
  // A tied head adds to the embedding's gradient while the other buckets come and go: it has a place of its own.
  const int64_t embedding = table.buckets()[static_cast<size_t>(ParameterTable::embedding_bucket())].size;
  g.whole = arena.take("gradients", DType::i64, {layout.whole_size()});
  g.slot = arena.take("gradients", accumulator, {embedding + largest_other_than_embedding(table)});
  g.sums = layout.sharded() ? arena.take("gradients", DType::i64, {layout.size()}) : g.whole;
  g.shard = arena.take("gradients", accumulator, {layout.size()});
  return g;
}

Sharding::Sharding(const Context& ctx, const ParameterTable& table, const ShardLayout& layout,
                   Collectives& collectives, GradientMemory gradients, WeightMemory weights, StepSums step)
    : ctx_(ctx),
      table_(table),
      layout_(layout),
      collectives_(collectives),
      gradients_(gradients),
      weights_(weights),
      step_(step),
      published_(table.buckets().size(), kNow) {
  CHECK(collectives.ranks() == layout.ranks() && collectives.rank() == layout.rank(),
        "collectives and shards disagree about the ranks");
  runs_.resize(table.buckets().size());
  for (const Parameter& p : table.parameters()) {
    std::vector<Run>& runs = runs_[static_cast<size_t>(p.bucket)];
    const int64_t begin = p.offset - table.buckets()[static_cast<size_t>(p.bucket)].offset;
    if (!runs.empty() && runs.back().end == begin)
      runs.back().end = begin + p.size;
    else
      runs.push_back({begin, begin + p.size});
  }
}

Tensor Sharding::shares_of(const Tensor& flat, int bucket) const {
  return flat.slice(table_.buckets()[static_cast<size_t>(bucket)].offset,
                    layout_.ranks() * layout_.share(bucket).size);
}

Tensor Sharding::slot(int bucket) const {
  const int64_t size = table_.buckets()[static_cast<size_t>(bucket)].size;
  const int64_t embedding = table_.buckets()[static_cast<size_t>(ParameterTable::embedding_bucket())].size;
  return gradients_.slot.slice(bucket == ParameterTable::embedding_bucket() ? 0 : embedding, size);
}

// ---- Weights ---------------------------------------------------------------------------------------------------------

void Sharding::publish_weights() {
  if (!layout_.sharded()) return;
  collectives_.follow(ctx_);
  // In order of the buckets: shares may reach beyond their bucket's end, and what they put there is overwritten by the next.
  for (int b = 0; b < static_cast<int>(published_.size()); ++b) {
    const ShardLayout::Share share = layout_.share(b);
    collectives_.all_gather(shares_of(weights_.whole, b), weights_.shard.slice(share.local, share.size));
    published_[static_cast<size_t>(b)] = collectives_.mark();
    if (ctx_.backend == Backend::cpu) acquire(b);  // messages, unlike streams, may overtake each other
  }
}

Tensor Sharding::acquire(int bucket) {
  Collectives::Mark& mark = published_[static_cast<size_t>(bucket)];
  if (mark != kNow) await(mark);
  mark = kNow;
  return table_.bucket(weights_.whole, bucket);
}

// ---- Gradients -------------------------------------------------------------------------------------------------------

void Sharding::begin_step(int64_t number, int64_t mine, int64_t slots) {
  mine_ = mine;
  slots_ = slots;
  micro_batch_ = 0;
  timed_ = static_cast<size_t>(number) % waits_.size();
  waits_[timed_].step = number;
  waits_[timed_].used = 0;
}

void Sharding::begin_micro_batch() { ++micro_batch_; }

GradientTarget Sharding::target(int bucket) {
  if (fixed_point()) return {slot(bucket), false};
  return {table_.bucket(gradients_.whole, bucket), micro_batch_ > 1};
}

void Sharding::ready(int bucket) {
  if (fixed_point()) {
    const Tensor sums = table_.bucket(gradients_.whole, bucket), values = slot(bucket);
    for (const Run& run : runs_[static_cast<size_t>(bucket)])
      fixed_point_add(ctx_, {.sums = sums.slice(run.begin, run.end - run.begin),
                             .values = values.slice(run.begin, run.end - run.begin),
                             .store = micro_batch_ == 1,
                             .limit = gradient_limit(slots_),
                             .overflow = step_.overflow});
  }
  if (micro_batch_ == mine_) reduce(bucket);
  collectives_.poke();
}

void Sharding::reduce(int bucket) {
  if (alone()) return;
  collectives_.follow(ctx_);
  if (!layout_.sharded()) {
    collectives_.all_reduce(table_.bucket(gradients_.whole, bucket));
    return;
  }
  const ShardLayout::Share share = layout_.share(bucket);
  const Tensor& mine = fixed_point() ? gradients_.sums : gradients_.shard;
  collectives_.reduce_scatter(mine.slice(share.local, share.size), shares_of(gradients_.whole, bucket));
}

void Sharding::finish_gradients() {
  CHECK(micro_batch_ == mine_, "a step of ", mine_, " micro-batches ended after ", micro_batch_);
  if (!alone()) {
    if (mine_ == 0) {
      // Nothing to add, but the others wait for it: in the order in which backward() ends buckets.
      fill_zero(ctx_, gradients_.whole.data, gradients_.whole.bytes());
      for (int b = table_.head_bucket(); b >= 0; --b) reduce(b);
    }
    add_up(step_.all);
  }
  if (fixed_point()) fixed_point_to_float(ctx_, {gradients_.shard, gradients_.sums});
}

void Sharding::add_up(const Tensor& buffer) {
  if (alone()) return;
  collectives_.follow(ctx_);
  collectives_.all_reduce(buffer);
  await(collectives_.mark());
}

void Sharding::gather(const Tensor& all, const Tensor& mine) {
  collectives_.follow(ctx_);
  collectives_.all_gather(all, mine);
  await(collectives_.mark());
}

// ---- Waiting ---------------------------------------------------------------------------------------------------------

void Sharding::await(Collectives::Mark mark) {
  Waits& waits = waits_[timed_];
  if (waits.used == waits.events.size()) waits.events.emplace_back(Event(ctx_.backend), Event(ctx_.backend));
  auto& [began, ended] = waits.events[waits.used++];
  began.record(ctx_);
  collectives_.await(ctx_, mark);
  ended.record(ctx_);
}

double Sharding::wait_ms(int64_t number) const {
  const Waits& waits = waits_[static_cast<size_t>(number) % waits_.size()];
  CHECK(waits.step == number, "step ", number, " was asked for after step ", waits.step);
  double ms = 0;
  for (size_t i = 0; i < waits.used; ++i) ms += waits.events[i].second.ms_since(waits.events[i].first);
  return ms;
}

}  // namespace kinoe
