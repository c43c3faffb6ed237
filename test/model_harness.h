// A small model with everything around it, for the tests of forward, backward, optimizer and sampling.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/adamw.h"
#include "trainer/backward.h"
#include "trainer/forward.h"
#include "trainer/model.h"
#include "trainer/optimizer.h"
#include "trainer/sharding.h"

namespace kinoe {

class ModelRun {
 public:
  /// `held`: what every byte of the memory holds before anything is computed.
  ModelRun(const Context& context, const ModelConfig& config, DType dtype, const WorkShape& shape,
           const OptimizerSettings& settings = {}, std::optional<uint8_t> held = {})
      : ctx(context),
        model(config, context.backend, dtype),
        optimizer_settings(settings),
        layout(model.table, 0, 1, false),
        collectives(collectives_self()) {
    Arena planned;
    take(planned, shape);
    planned_bytes = planned.used();
    arena_memory_ = Memory::on(ctx.backend, planned.used());
    if (held) {
      const std::vector<uint8_t> bytes(planned_bytes, *held);
      upload(ctx, arena_memory_.data(), bytes.data(), planned_bytes);
      synchronize(ctx);
    }
    Arena arena(arena_memory_.data());
    take(arena, shape);
    upload_constants(ctx, model);
    fill_zero(ctx, acts.state.data, acts.state.bytes());
    sharding = std::make_unique<Sharding>(ctx, model.table, layout, *collectives, parameters.gradients,
                                          parameters.weights, StepSums{acts.sums, acts.overflow});
    optimizer = std::make_unique<Optimizer>(model, parameters, optimizer_settings, layout, *sharding);
    optimizer->prepare(ctx);
    optimizer->initialize(ctx, 7);
  }

  LayerHooks hooks() { return sharding->hooks(); }

  void set_batch(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets) {
    upload(ctx, acts.batch.tokens.data, tokens.data(), acts.batch.tokens.bytes());
    upload(ctx, acts.batch.targets.data, targets.data(), acts.batch.targets.bytes());
    synchronize(ctx);
  }

  /// For a shape with a document mask: the lengths of the documents of each row, which fill it.
  void set_documents(const std::vector<std::vector<int32_t>>& rows) {
    std::vector<int32_t> start, end;
    for (const std::vector<int32_t>& lengths : rows) {
      int32_t at = 0;
      for (const int32_t length : lengths) {
        start.insert(start.end(), static_cast<size_t>(length), at);
        at += length;
        end.insert(end.end(), static_cast<size_t>(length), at);
      }
    }
    upload(ctx, acts.batch.doc_start.data, start.data(), acts.batch.doc_start.bytes());
    if (acts.batch.doc_end) upload(ctx, acts.batch.doc_end.data, end.data(), acts.batch.doc_end.bytes());
    synchronize(ctx);
  }

  void begin_micro_batch(bool first) {
    if (first) sharding->begin_step(1, INT32_MAX, 1);
    sharding->begin_micro_batch();
  }

  /// Forward and backward of one micro-batch.
  void micro_batch(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets, bool first,
                   double nominal) {
    if (first) begin_step(ctx, acts);
    set_batch(tokens, targets);
    begin_micro_batch(first);
    forward(ctx, model, acts, hooks());
    backward(ctx, model, acts, hooks(), nominal);
  }

  [[nodiscard]] StepState state() const {
    StepState s;
    download(ctx, &s, acts.state.data, sizeof(s));
    synchronize(ctx);
    return s;
  }

  /// The loss of the last micro-batch, in nats, from its rows' (in fp64): finite differences need more digits than
  /// StepState keeps.
  [[nodiscard]] double exact_loss() const {
    double sum = 0;
    for (const double loss : host<double>(acts.losses)) sum += loss;
    return sum;
  }

  template <class T>
  [[nodiscard]] std::vector<T> host(const Tensor& tensor) const {
    std::vector<T> values(static_cast<size_t>(tensor.size()));
    CHECK(tensor.dtype == dtype_of<T>, "tensor of ", name_of(tensor.dtype));
    download(ctx, values.data(), tensor.data, tensor.bytes());
    synchronize(ctx);
    return values;
  }

  Context ctx;
  Model model;
  OptimizerSettings optimizer_settings;
  ShardLayout layout;
  std::unique_ptr<Collectives> collectives;
  size_t planned_bytes = 0;
  ParameterMemory parameters;
  Activations acts;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<Sharding> sharding;

 private:
  void take(Arena& arena, const WorkShape& shape) {
    take_constants(arena, model);
    parameters = take_parameters(arena, model, optimizer_settings, layout, GradientSum::floating);
    acts = take_activations(arena, model, shape);
  }
  Memory arena_memory_;
};

/// Small shapes in which nothing is a power of two, so that a swapped dimension shows.
inline ModelConfig small_gpt2() {
  ModelConfig c;
  c.family = Family::gpt2;
  c.vocab_size = 29;
  c.layers = 2;
  c.hidden = 18;
  c.heads = c.kv_heads = 3;
  c.head_dim = 6;
  c.ffn = 20;
  c.max_positions = 13;
  c.norm = NormKind::layernorm;
  c.position = PositionKind::learned;
  c.mlp = MlpKind::gelu_tanh;
  c.qkv_bias = c.output_bias = c.mlp_bias = true;
  c.tied = true;
  c.conv1d_weights = true;
  c.init_std = 0.2;
  return c;
}

inline ModelConfig small_llama(bool tied) {
  ModelConfig c;
  c.family = Family::llama;
  c.vocab_size = 29;
  c.layers = 2;
  c.hidden = 20;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 6;
  c.ffn = 14;
  c.max_positions = 13;
  c.norm = NormKind::rmsnorm;
  c.position = PositionKind::rope;
  c.mlp = MlpKind::swiglu;
  c.rope_theta = 100.0;
  c.tied = tied;
  c.init_std = 0.2;
  return c;
}

/// Biases on q, k and v.
inline ModelConfig small_qwen2() {
  ModelConfig c = small_llama(true);
  c.family = Family::qwen2;
  c.qkv_bias = true;
  return c;
}

/// Norms of query and key heads, heads wider than the stream over their number.
inline ModelConfig small_qwen3() {
  ModelConfig c = small_llama(true);
  c.family = Family::qwen3;
  c.qk_norm = true;
  return c;
}

/// With heads of 64, as attention in bf16 wants them on a GPU.
inline ModelConfig with_heads_of_64(ModelConfig c) {
  c.head_dim = 64;
  c.hidden = c.heads * c.head_dim;
  c.ffn = 64;
  c.vocab_size = 300;
  c.max_positions = 64;
  return c;
}

inline std::vector<int32_t> random_ids(int64_t count, int64_t vocab, uint64_t seed) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<int32_t>(philox(seed, 77, i).v[0] % static_cast<uint32_t>(vocab));
  return ids;
}

}  // namespace kinoe
