// Data parallelism: where the gradients of a step are added up, over micro-batches and over ranks, and how every rank comes by
// all weights again. The layer hooks of training, with one rank as with many.
//
// ZeRO 0: a bucket's gradient is all-reduced as soon as its last micro-batch has added to it, beside the backward pass of
// the layers before it. ZeRO 1: it is reduce-scattered, every rank updates what it owns, and weights are all-gathered, beside the
// forward pass of the next step. Both run on the collectives' own stream.
//
// With sums in fixed point (--determinism topology) each micro-batch's gradient is computed alone and added as 64-bit integers:
// integer addition has no order, so the sum is the same whoever adds what. With floats it is the same for one number of
// ranks.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "kernels/common/arena.h"
#include "kernels/common/device.h"
#include "trainer/collectives.h"
#include "trainer/layer_hooks.h"
#include "trainer/parameters.h"

namespace kinoe {

enum class GradientSum : uint8_t { floating, fixed_point };

struct GradientMemory {
  Tensor whole;  // [layout.whole_size()] sums over micro-batches: fp32 (fp64), or int64 in fixed point
  /// Fixed point only: fp32 (fp64), one micro-batch's gradient of a bucket, with room for the embedding's beside it.
  Tensor slot;
  Tensor sums;  // fixed point only: [layout.size()] int64, the sum over ranks of what this rank holds
  /// [layout.size()] fp32 (fp64): what the optimizer reads; `whole` itself where nothing differs.
  Tensor shard;
};

/// `accumulator`: fp32, or fp64.
GradientMemory take_gradients(Arena& arena, const ParameterTable& table, const ShardLayout& layout,
                              GradientSum sum, DType accumulator);

/// All weights in the compute type, and this rank's part as the optimizer writes it.
struct WeightMemory {
  Tensor whole;  // [layout.whole_size()]
  Tensor shard;  // [layout.size()] where sharded; else absent: the optimizer writes to `whole`
};

/// What a step adds up beside gradients, as it lies in StepState.
struct StepSums {
  Tensor all;       // int64, added over ranks
  Tensor overflow;  // [1] int64 in it: a gradient that fixed point cannot hold
};

class Sharding {
 public:
  /// Everything given must outlive the object. `collectives` has the rank and ranks of `layout`.
  Sharding(const Context& ctx, const ParameterTable& table, const ShardLayout& layout,
           Collectives& collectives, GradientMemory gradients, WeightMemory weights, StepSums step);

  LayerHooks hooks() { return {weight_hooks_, gradient_hooks_}; }

  /// Step `number`, of whose `slots` micro-batches this rank runs `mine`.
  void begin_step(int64_t number, int64_t mine, int64_t slots);
  void begin_micro_batch();
  /// After the last micro-batch: gradients.shard and the step's sums are over all ranks in what is queued from here on.
  void finish_gradients();
  /// A sum over ranks, and parts gathered from them, for which the device waits at once.
  void add_up(const Tensor& buffer);
  void gather(const Tensor& all, const Tensor& mine);
  /// Brings the updated weights to all ranks. They are waited for where they are used.
  void publish_weights();

  /// Milliseconds the device (the host on the CPU) waited for other ranks in step `number`, which has ended.
  [[nodiscard]] double wait_ms(int64_t number) const;

 private:
  class Weights : public WeightHooks {
   public:
    explicit Weights(Sharding& sharding) : sharding_(sharding) {}
    Tensor acquire(int bucket) override { return sharding_.acquire(bucket); }
    void release(int) override {}

   private:
    Sharding& sharding_;
  };
  class Gradients : public GradientHooks {
   public:
    explicit Gradients(Sharding& sharding) : sharding_(sharding) {}
    GradientTarget begin(int bucket) override { return sharding_.target(bucket); }
    void ready(int bucket) override { sharding_.ready(bucket); }

   private:
    Sharding& sharding_;
  };
  /// Places in two streams between which the device waited.
  struct Waits {
    int64_t step = 0;
    size_t used = 0;
    std::vector<std::pair<Event, Event>> events;
  };
  struct Run {
    int64_t begin = 0, end = 0;
  };

  Tensor acquire(int bucket);
  GradientTarget target(int bucket);
  void ready(int bucket);
  void reduce(int bucket);
  void await(Collectives::Mark mark);
  [[nodiscard]] bool alone() const { return layout_.ranks() == 1; }
  [[nodiscard]] bool fixed_point() const { return static_cast<bool>(gradients_.slot); }
  /// A bucket of `flat` with the room its shares need together.
  [[nodiscard]] Tensor shares_of(const Tensor& flat, int bucket) const;
  [[nodiscard]] Tensor slot(int bucket) const;

  Context ctx_;
  const ParameterTable& table_;
  const ShardLayout& layout_;
  Collectives& collectives_;
  GradientMemory gradients_;
  WeightMemory weights_;
  StepSums step_;
  Weights weight_hooks_{*this};
  Gradients gradient_hooks_{*this};
  /// By bucket: elements of parameters, relative to the bucket, without the gaps.
  std::vector<std::vector<Run>> runs_;

  std::vector<Collectives::Mark> published_;  // by bucket: when its weights are there; kNow: they are
  std::array<Waits, 2> waits_;                // of the last two steps
  size_t timed_ = 0;                          // the step at hand
  int64_t mine_ = 0, slots_ = 0;
  int64_t micro_batch_ = 0;  // 1 is this rank's first of the step
};

}  // namespace kinoe
