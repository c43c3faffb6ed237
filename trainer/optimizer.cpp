// The flat ranges of a run, their first values, and the queue of one update.
#include "trainer/optimizer.h"

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/cast.h"
#include "kernels/global_norm.h"

namespace kinoe {

ParameterMemory take_parameters(Arena& arena, const Model& model, const OptimizerSettings* settings) {
  const int64_t n = model.table.flat_size();
  ParameterMemory p;
  p.weights = arena.take("weights", model.dtype, {n});
  p.masters = p.weights;
  if (settings == nullptr) return p;

  if (model.dtype == DType::bf16) p.masters = arena.take("master weights", DType::f32, {n});
  p.gradients = arena.take("gradients", model.accumulator(), {n});
  const DType moments = model.dtype == DType::f64 ? DType::f64 : settings->moments;
  p.m = arena.take("optimizer", moments, {n});
  p.v = arena.take("optimizer", moments, {n});
  p.segment_count = static_cast<int64_t>(model.table.segments({{0, n, 0}}, settings->weight_decay).size());
  p.segments = arena.take("optimizer", DType::i32,
                          {p.segment_count * static_cast<int64_t>(sizeof(AdamWSegment) / sizeof(int32_t))});
  p.partials = arena.take("optimizer", DType::f64, {n / kChunk});
  p.raw_norm = arena.take("optimizer", DType::f64, {1});
  return p;
}

void set_parameters(const Context& ctx, const ParameterMemory& memory, const float* flat) {
  if (memory.masters.dtype == DType::f64) {
    const std::vector<double> wide(flat, flat + memory.masters.size());
    upload(ctx, memory.masters.data, wide.data(), memory.masters.bytes());
    synchronize(ctx);
    return;
  }
  if (memory.masters.dtype == DType::bf16) {  // inference: no masters
    std::vector<bf16> narrow(static_cast<size_t>(memory.masters.size()));
    for (size_t i = 0; i < narrow.size(); ++i) narrow[i] = to_bf16(flat[i]);
    upload(ctx, memory.masters.data, narrow.data(), memory.masters.bytes());
    synchronize(ctx);
    return;
  }
  upload(ctx, memory.masters.data, flat, memory.masters.bytes());
  if (memory.weights.data != memory.masters.data) cast(ctx, {memory.weights, memory.masters});
  synchronize(ctx);
}

void Optimizer::initialize_masters(const Context& ctx, uint64_t seed) const {
  const ParameterTable& table = model_.table;
  if (memory_.masters.dtype != DType::f32) {
    std::vector<float> flat(static_cast<size_t>(table.flat_size()));
    kinoe::initialize(table, seed, flat.data());
    set_parameters(ctx, memory_, flat.data());
    return;
  }
  auto* masters = memory_.masters.as<float>();
  if (ctx.backend == Backend::cpu) {
    kinoe::initialize(table, seed, masters);
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
  for (int64_t begin = 0; begin < table.flat_size(); begin += kPiece, next ^= 1) {
    const int64_t end = std::min(begin + kPiece, table.flat_size());
    Half& half = halves[next];
    half.uploaded.wait();
    kinoe::initialize(table, seed, begin, end, static_cast<float*>(half.memory.data()));
    upload(ctx, masters + begin, half.memory.data(), static_cast<size_t>(end - begin) * sizeof(float));
    half.uploaded.record(ctx);
  }
  if (memory_.weights.data != memory_.masters.data) cast(ctx, {memory_.weights, memory_.masters});
  synchronize(ctx);
}

void Optimizer::prepare(const Context& ctx) const {
  fill_zero(ctx, memory_.gradients.data, memory_.gradients.bytes());
  fill_zero(ctx, memory_.m.data, memory_.m.bytes());
  fill_zero(ctx, memory_.v.data, memory_.v.bytes());
  const std::vector<AdamWSegment> segments =
      model_.table.segments({{0, model_.table.flat_size(), 0}}, settings_.weight_decay);
  upload(ctx, memory_.segments.data, segments.data(), memory_.segments.bytes());
  synchronize(ctx);
}

void Optimizer::initialize(const Context& ctx, uint64_t seed) const {
  prepare(ctx);
  initialize_masters(ctx, seed);
}

void Optimizer::update(const Context& ctx, const Activations& acts, double lr, int64_t update,
                       double nominal_tokens) const {
  norm_partials(ctx, {memory_.partials, memory_.gradients});
  norm_finish(ctx, {memory_.raw_norm, memory_.partials, {}});
  step_gate(ctx, {.state = acts.state,
                  .raw_norm = memory_.raw_norm,
                  .nominal_tokens = nominal_tokens,
                  .grad_clip = settings_.grad_clip});
  apply(ctx, acts, lr, update);
}

void Optimizer::hash(const Context& ctx, const Activations& acts) const { apply(ctx, acts, 0, 1); }

void Optimizer::apply(const Context& ctx, const Activations& acts, double lr, int64_t update) const {
  adamw(ctx, {.masters = memory_.masters,
              .m = memory_.m,
              .v = memory_.v,
              .gradients = memory_.gradients,
              .weights = memory_.weights.data == memory_.masters.data ? Tensor{} : memory_.weights,
              .segments = memory_.segments,
              .segment_count = memory_.segment_count,
              .state = acts.state,
              .lr = static_cast<float>(lr),
              .beta1 = settings_.beta1,
              .beta2 = settings_.beta2,
              .eps = settings_.eps,
              .t = update,
              .rounding_seed = mix64(settings_.seed + static_cast<uint64_t>(update))});
}

}  // namespace kinoe
