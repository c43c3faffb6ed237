// The flat ranges of a run, their first values, and the queue of one update.
#include "trainer/optimizer.h"

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/cast.h"
#include "kernels/global_norm.h"

namespace kinoe {

ParameterMemory take_parameters(Arena& arena, const Model& model, const OptimizerSettings& settings,
                                const ShardLayout& layout, GradientSum sum) {
  const int64_t n = layout.size();
  ParameterMemory p;
  p.weights.whole = arena.take("weights", model.dtype, {layout.whole_size()});
  const bool rounded = model.dtype == DType::bf16;
  p.masters =
      rounded || layout.sharded() ? arena.take("master weights", model.accumulator(), {n}) : p.weights.whole;
  if (layout.sharded()) p.weights.shard = rounded ? arena.take("weights", model.dtype, {n}) : p.masters;
  p.gradients = take_gradients(arena, model.table, layout, sum, model.accumulator());
  const DType moments = model.dtype == DType::f64 ? DType::f64 : settings.moments;
  p.m = arena.take("optimizer", moments, {n});
  p.v = arena.take("optimizer", moments, {n});
  p.segment_count = static_cast<int64_t>(model.table.segments(layout.held(), settings.weight_decay).size());
  p.segments = arena.take("optimizer", DType::i32,
                          {p.segment_count * static_cast<int64_t>(sizeof(AdamWSegment) / sizeof(int32_t))});
  p.partials = arena.take("optimizer", DType::f64, {n / kChunk});
  if (layout.sharded()) {
    p.gathered = arena.take("optimizer", DType::f64, {layout.ranks() * n / kChunk});
    p.order = arena.take("optimizer", DType::i64, {model.table.flat_size() / kChunk});
  }
  p.raw_norm = arena.take("optimizer", DType::f64, {1});
  return p;
}

ParameterMemory take_weights(Arena& arena, const Model& model) {
  ParameterMemory p;
  p.weights.whole = arena.take("weights", model.dtype, {model.table.flat_size()});
  p.masters = p.weights.whole;
  return p;
}

void set_weights(const Context& ctx, const ParameterMemory& memory, const float* flat) {
  const Tensor& weights = memory.weights.whole;
  if (weights.dtype == DType::f32) {
    upload(ctx, weights.data, flat, weights.bytes());
    synchronize(ctx);
    return;
  }
  std::vector<bf16> narrow(static_cast<size_t>(weights.size()));
  CHECK(weights.dtype == DType::bf16, "weights of ", name_of(weights.dtype));
  for (size_t i = 0; i < narrow.size(); ++i) narrow[i] = to_bf16(flat[i]);
  upload(ctx, weights.data, narrow.data(), weights.bytes());
  synchronize(ctx);
}

// ---- First values ----------------------------------------------------------------------------------------------------

void Optimizer::prepare(const Context& ctx) const {
  // Masters as well: in a shard there is room that no tensor fills.
  for (const Tensor& t :
       {memory_.gradients.whole, memory_.gradients.slot, memory_.gradients.sums, memory_.gradients.shard,
        memory_.masters, memory_.weights.whole, memory_.weights.shard, memory_.m, memory_.v})
    if (t) fill_zero(ctx, t.data, t.bytes());
  const std::vector<AdamWSegment> segments = model_.table.segments(layout_.held(), settings_.weight_decay);
  upload(ctx, memory_.segments.data, segments.data(), memory_.segments.bytes());
  const std::vector<int64_t> order = layout_.gathered_chunks();
  if (memory_.order) upload(ctx, memory_.order.data, order.data(), memory_.order.bytes());
  synchronize(ctx);
}

void Optimizer::derive_weights(const Context& ctx) const {
  const Tensor& weights = layout_.sharded() ? memory_.weights.shard : memory_.weights.whole;
  if (weights.data != memory_.masters.data) cast(ctx, {weights, memory_.masters});
}

void Optimizer::set_masters(const Context& ctx, const float* flat) const {
  std::vector<double> wide;
  for (const HeldRange& held : layout_.held()) {
    const Tensor to = memory_.masters.slice(held.local, held.end - held.begin);
    const void* from = flat + held.begin;
    if (to.dtype == DType::f64) {
      wide.assign(flat + held.begin, flat + held.end);
      from = wide.data();
    }
    upload(ctx, to.data, from, to.bytes());
    synchronize(ctx);
  }
  derive_weights(ctx);
  synchronize(ctx);
}

void Optimizer::initialize(const Context& ctx, uint64_t seed) const {
  const ParameterTable& table = model_.table;
  if (memory_.masters.dtype != DType::f32) {
    std::vector<float> flat(static_cast<size_t>(table.flat_size()));
    kinoe::initialize(table, seed, flat.data());
    set_masters(ctx, flat.data());
    return;
  }
  auto* masters = memory_.masters.as<float>();
  if (ctx.backend == Backend::cpu) {
    for (const HeldRange& held : layout_.held())
      kinoe::initialize(table, seed, held.begin, held.end, masters + held.local);
    return;
  }
  // Made piece by piece beside the uploads, so that no second copy of the model exists and neither side waits long.
  constexpr int64_t kPiece = 512 * kChunk;  // 32 MiB
  struct Half {
    Memory memory = Memory::pinned(Backend::cuda, kPiece * sizeof(float));
    Event uploaded{Backend::cuda};
  };
  std::array<Half, 2> halves;
  for (Half& half : halves) half.uploaded.record(ctx);
  size_t next = 0;
  for (const HeldRange& held : layout_.held())
    for (int64_t begin = held.begin; begin < held.end; begin += kPiece, next ^= 1) {
      const int64_t end = std::min(begin + kPiece, held.end);
      Half& half = halves[next];
      half.uploaded.wait();
      kinoe::initialize(table, seed, begin, end, static_cast<float*>(half.memory.data()));
      upload(ctx, masters + held.local + (begin - held.begin), half.memory.data(),
             static_cast<size_t>(end - begin) * sizeof(float));
      half.uploaded.record(ctx);
    }
  derive_weights(ctx);
  synchronize(ctx);
}

// ---- One update ------------------------------------------------------------------------------------------------------

/// In the order of the flat range's chunks, whoever holds them.
void Optimizer::gradient_norm(const Context& ctx) const {
  norm_partials(ctx, {memory_.partials, memory_.gradients.shard});
  if (layout_.sharded()) {
    sharding_.gather(memory_.gathered, memory_.partials);
  }
  norm_finish(ctx, {.norm = memory_.raw_norm,
                    .partials = layout_.sharded() ? memory_.gathered : memory_.partials,
                    .order = memory_.order});
}

void Optimizer::update(const Context& ctx, const Activations& acts, double lr, int64_t update,
                       double nominal_tokens) const {
  gradient_norm(ctx);
  step_gate(ctx, {.state = acts.state,
                  .raw_norm = memory_.raw_norm,
                  .nominal_tokens = nominal_tokens,
                  .grad_clip = settings_.grad_clip});
  apply(ctx, acts, lr, update);
}

void Optimizer::hash(const Context& ctx, const Activations& acts) const { apply(ctx, acts, 0, 1); }

void Optimizer::apply(const Context& ctx, const Activations& acts, double lr, int64_t update) const {
  const Tensor& weights = layout_.sharded() ? memory_.weights.shard : memory_.weights.whole;
  adamw(ctx, {.masters = memory_.masters,
              .m = memory_.m,
              .v = memory_.v,
              .gradients = memory_.gradients.shard,
              .weights = weights.data == memory_.masters.data ? Tensor{} : weights,
              .segments = memory_.segments,
              .segment_count = memory_.segment_count,
              .state = acts.state,
              .lr = static_cast<float>(lr),
              .beta1 = settings_.beta1,
              .beta2 = settings_.beta2,
              .eps = settings_.eps,
              .t = update,
              .rounding_seed = mix64(settings_.seed + static_cast<uint64_t>(update))});
  if (layout_.sharded()) {
    sharding_.add_up(acts.weights_hash);
  }
}

}  // namespace kinoe
