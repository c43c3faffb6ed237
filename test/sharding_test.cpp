// Training on several ranks, each of them a thread: what must not depend on how many there are.
#include "trainer/sharding.h"

#include <gtest/gtest.h>

#include <omp.h>

#include <cmath>
#include <map>
#include <mutex>
#include <thread>

#include "kernels/global_norm.h"
#include "test/local_collectives.h"
#include "test/model_harness.h"
#include "trainer/batch_plan.h"

namespace kinoe {
namespace {

constexpr int64_t kLength = 6;
constexpr double kRate = 1e-2;

struct Layout {
  int ranks = 1;
  int zero = 0;
};
struct Work {
  ModelConfig config;
  GradientSum sum = GradientSum::fixed_point;
  int64_t global_batch = 7;
  int64_t micro_batch = 2;
  int64_t steps = 4;
};

struct Step {
  double loss = 0, norm = 0;
  uint64_t hash = 0;
  bool operator==(const Step&) const = default;
};
struct Outcome {
  std::vector<Step> steps;           // as rank 0 saw them
  std::vector<float> masters, m, v;  // [flat] after the last step
  std::vector<double> gradient;      // [flat] summed gradient of the last step
  std::vector<float> weights;        // [flat] as the last rank has them
  std::vector<int64_t> sequences;    // by rank, in one step
  std::vector<int64_t> bytes;        // by rank, in one step
};

std::vector<int32_t> sample(int64_t index, int64_t vocabulary) {
  return random_ids(kLength + 1, vocabulary, static_cast<uint64_t>(index) + 1);
}

/// What one rank does, as Training::step() in train_gpt.cu.
class Rank {
 public:
  Rank(const Work& work, const Layout& at, Collectives& collectives)
      : work_(work),
        collectives_(collectives),
        model_(work.config, Backend::cpu, DType::f32),
        layout_(model_.table, collectives.rank(), at.ranks, at.zero > 0 && at.ranks > 1),
        plan_(work.global_batch, work.micro_batch, collectives.rank(), at.ranks) {
    Arena planned;
    take(planned);
    arena_memory_ = Memory::on(Backend::cpu, planned.used());
    Arena arena(arena_memory_.data());
    take(arena);
    upload_constants(ctx_, model_);
    fill_zero(ctx_, acts_.state.data, acts_.state.bytes());
  }

  void train(Outcome& outcome, std::mutex& mutex) {
    const OptimizerSettings settings{.grad_clip = 0.5};
    Sharding sharding(ctx_, model_.table, layout_, collectives_, parameters_.gradients, parameters_.weights,
                      {acts_.sums, acts_.overflow});
    Optimizer optimizer(model_, parameters_, settings, layout_, sharding);
    optimizer.prepare(ctx_);
    optimizer.initialize(ctx_, 7);
    sharding.publish_weights();
    int64_t sequences = 0;
    Collectives::Traffic before;
    std::vector<Step> steps;
    for (int64_t step = 1; step <= work_.steps; ++step) {
      sequences = 0;
      before = collectives_.traffic();
      begin_step(ctx_, acts_);
      sharding.begin_step(step, plan_.my_slots(), plan_.slots());
      const auto nominal = static_cast<double>(work_.global_batch * kLength);
      for (const MicroBatch& mb : plan_.mine((step - 1) * work_.global_batch)) {
        put(mb);
        sequences += mb.valid;
        sharding.begin_micro_batch();
        forward(ctx_, model_, acts_, sharding.hooks());
        backward(ctx_, model_, acts_, sharding.hooks(), nominal);
      }
      sharding.finish_gradients();
      optimizer.update(ctx_, acts_, kRate, step, nominal);
      sharding.publish_weights();
      StepState state;
      std::memcpy(&state, acts_.state.data, sizeof(state));
      EXPECT_EQ(state.halted, 0);
      EXPECT_EQ(state.target_tokens, work_.global_batch * kLength);
      steps.push_back({loss_of(state), state.grad_norm, state.weights_hash});
    }
    const int64_t sent = collectives_.traffic().bytes - before.bytes;
    for (int b = 0; b < static_cast<int>(model_.table.buckets().size()); ++b)
      sharding.hooks().weights.acquire(b);

    const std::lock_guard lock(mutex);
    const auto flat = static_cast<size_t>(model_.table.flat_size());
    outcome.masters.resize(flat);
    outcome.m.resize(flat);
    outcome.v.resize(flat);
    outcome.gradient.resize(flat);
    for (const HeldRange& held : layout_.held())
      for (int64_t i = held.begin; i < held.end; ++i) {
        const auto to = static_cast<size_t>(i);
        const int64_t from = held.local + i - held.begin;
        outcome.masters[to] = parameters_.masters.as<float>()[from];
        outcome.m[to] = parameters_.m.as<float>()[from];
        outcome.v[to] = parameters_.v.as<float>()[from];
        outcome.gradient[to] = static_cast<double>(parameters_.gradients.shard.as<float>()[from]);
      }
    outcome.sequences[static_cast<size_t>(layout_.rank())] = sequences;
    outcome.bytes[static_cast<size_t>(layout_.rank())] = sent;
    if (layout_.rank() == 0) outcome.steps = steps;
    EXPECT_TRUE(outcome.steps.empty() || outcome.steps == steps)
        << "rank " << layout_.rank() << " saw other steps";
    const auto* weights = parameters_.weights.whole.as<float>();
    outcome.weights.assign(weights, weights + flat);
  }

 private:
  void take(Arena& arena) {
    take_constants(arena, model_);
    parameters_ = take_parameters(arena, model_, {}, layout_, work_.sum);
    acts_ = take_activations(arena, model_, {.batch = work_.micro_batch, .length = kLength});
  }
  /// Rows that the portion does not fill are padding.
  void put(const MicroBatch& mb) {
    auto* tokens = acts_.batch.tokens.as<int32_t>();
    auto* targets = acts_.batch.targets.as<int32_t>();
    for (int64_t row = 0; row < work_.micro_batch; ++row) {
      const std::vector<int32_t> ids =
          sample(row < mb.valid ? mb.first_sample + row : 0, work_.config.vocab_size);
      for (int64_t t = 0; t < kLength; ++t) {
        tokens[row * kLength + t] = ids[static_cast<size_t>(t)];
        targets[row * kLength + t] = row < mb.valid ? ids[static_cast<size_t>(t) + 1] : -1;
      }
    }
  }

  Context ctx_;
  const Work& work_;
  Collectives& collectives_;
  Model model_;
  ShardLayout layout_;
  BatchPlan plan_;
  ParameterMemory parameters_;
  Activations acts_;
  Memory arena_memory_;
};

Outcome train(const Work& work, const Layout& at) {
  Outcome outcome;
  outcome.sequences.resize(static_cast<size_t>(at.ranks));
  outcome.bytes.resize(static_cast<size_t>(at.ranks));
  const auto group = std::make_shared<LocalGroup>(at.ranks);
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < at.ranks; ++rank)
    threads.emplace_back([&, rank] {
      omp_set_num_threads(1);  // of this rank
      LocalCollectives collectives(group, rank);
      Rank(work, at, collectives).train(outcome, mutex);
    });
  for (std::thread& thread : threads) thread.join();
  return outcome;
}

const std::vector<Layout> kLayouts = {{1, 0}, {2, 0}, {2, 1}, {3, 0}, {3, 1}, {4, 0}, {4, 1},
                                      {5, 0}, {5, 1}, {7, 0}, {7, 1}, {8, 0}, {8, 1}};

std::map<std::string, ModelConfig> models() {
  // In the small ones a bucket is a chunk, which one rank owns; in the wide one it is several, which do not divide.
  ModelConfig wide = small_llama(false);
  wide.vocab_size = 1023;
  wide.hidden = 80;
  wide.ffn = 190;
  wide.head_dim = 20;
  return {{"gpt2", small_gpt2()},
          {"llama tied", small_llama(true)},
          {"llama untied", small_llama(false)},
          {"wide", wide}};
}

double relative(const std::vector<double>& a, const std::vector<double>& b, int64_t begin, int64_t size) {
  double difference = 0, norm = 0;
  for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(begin + size); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference) / std::max(std::sqrt(norm), 1e-30);
}

TEST(Sharding, TopologyGivesTheSameBitsOnAnyRanks) {
  for (const auto& [name, config] : models()) {
    const Work work{.config = config};
    const Outcome one = train(work, {});
    EXPECT_EQ(one.masters, one.weights);
    for (const Layout& layout : kLayouts) {
      SCOPED_TRACE(cat(name, ", ", layout.ranks, " ranks, ZeRO ", layout.zero));
      const Outcome many = train(work, layout);
      EXPECT_EQ(many.steps, one.steps);
      EXPECT_EQ(many.masters, one.masters);
      EXPECT_EQ(many.m, one.m);
      EXPECT_EQ(many.v, one.v);
      EXPECT_EQ(many.weights, one.weights);
      int64_t all = 0;
      for (const int64_t mine : many.sequences) all += mine;
      EXPECT_EQ(all, work.global_batch);
    }
  }
}

TEST(Sharding, InTopologyTheMicroBatchIsPartOfTheResultAndNothingElse) {
  Work work{.config = small_gpt2()};
  work.global_batch = 12;
  work.micro_batch = 3;
  const Outcome three = train(work, {}), again = train(work, {4, 1});
  EXPECT_EQ(three.steps, again.steps);
}

TEST(Sharding, FixedPointAgreesWithFloats) {
  for (const auto& [name, config] : models()) {
    Work work{.config = config, .steps = 1};
    const Outcome fixed = train(work, {3, 1});
    work.sum = GradientSum::floating;
    const Outcome floats = train(work, {3, 1});
    const ParameterTable table(config);
    for (const Parameter& p : table.parameters())
      EXPECT_LT(relative(fixed.gradient, floats.gradient, p.offset, p.size), 1e-6) << name << " " << p.name;
  }
}

TEST(Sharding, WithFloatsEveryLayoutIsOneRankWithinRounding) {
  for (const auto& [name, config] : models()) {
    Work work{.config = config, .sum = GradientSum::floating, .steps = 1};
    const Outcome one = train(work, {});
    for (const Layout& layout : kLayouts) {
      SCOPED_TRACE(cat(name, ", ", layout.ranks, " ranks, ZeRO ", layout.zero));
      const Outcome many = train(work, layout);
      EXPECT_NEAR(many.steps[0].loss, one.steps[0].loss, 1e-6 * one.steps[0].loss);
      EXPECT_NEAR(many.steps[0].norm, one.steps[0].norm, 1e-6 * one.steps[0].norm);
      const ParameterTable table(config);
      for (const Parameter& p : table.parameters()) {
        EXPECT_LT(relative(many.gradient, one.gradient, p.offset, p.size), 2e-6) << p.name;
        // AdamW's first update is lr times the gradient's sign, wherever the gradient is more than rounding.
        for (auto i = static_cast<size_t>(p.offset); i < static_cast<size_t>(p.offset + p.size); ++i)
          if (std::abs(one.gradient[i]) > 1e-6) {
            ASSERT_NEAR(many.masters[i], one.masters[i], 1e-3 * kRate) << p.name;
          }
      }
      EXPECT_EQ(many.masters, many.weights);
      EXPECT_EQ(train(work, layout).steps, many.steps) << "the same layout twice";
    }
  }
}

TEST(Sharding, EveryRankRunsFloorOrCeilOfItsShare) {
  Work work{.config = small_gpt2()};
  work.global_batch = 8;
  work.micro_batch = 1;
  work.steps = 1;
  EXPECT_EQ(train(work, {3, 1}).sequences, (std::vector<int64_t>{3, 3, 2}));
  EXPECT_EQ(train(work, {5, 0}).sequences, (std::vector<int64_t>{2, 2, 2, 1, 1}));
  work.global_batch = 2;
  EXPECT_EQ(train(work, {5, 0}).sequences, (std::vector<int64_t>{1, 1, 0, 0, 0}));
}

/// As a ring moves them, from the model's size alone.
TEST(Sharding, BytesSentAreTheFormula) {
  const ParameterTable table(small_llama(false));
  for (const GradientSum sum : {GradientSum::floating, GradientSum::fixed_point})
    for (const Layout& layout : kLayouts) {
      if (layout.ranks == 1) continue;
      SCOPED_TRACE(cat(layout.ranks, " ranks, ZeRO ", layout.zero));
      const Outcome outcome = train({.config = small_llama(false), .sum = sum, .steps = 2}, layout);
      const int64_t gradient = sum == GradientSum::fixed_point ? 8 : 4, r = layout.ranks;
      int64_t bytes = 2 * (r - 1) * (kStepSums * 8) / r;
      for (const Bucket& bucket : table.buckets()) {
        const int64_t chunks = bucket.size / kChunk, share = (chunks + r - 1) / r * kChunk;
        bytes += layout.zero == 0 ? 2 * (r - 1) * (bucket.size * gradient) / r
                                  : (r - 1) * share * (gradient + 4) + (r - 1) * share / kChunk * 8;
      }
      if (layout.zero > 0) bytes += 2 * (r - 1) * 8 / r;  // the hash
      for (const int64_t sent : outcome.bytes) EXPECT_EQ(sent, bytes);
    }
}

TEST(Sharding, AGradientBeyondFixedPointStopsTheStepEverywhere) {
  // A loss scale that no gradient of the model can bear: one rank's overflow closes all gates.
  const auto group = std::make_shared<LocalGroup>(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      LocalCollectives collectives(group, rank);
      const Context ctx;
      const Model model(small_gpt2(), Backend::cpu, DType::f32);
      const ShardLayout layout(model.table, rank, 2, true);
      Arena planned;
      take_parameters(planned, model, {}, layout, GradientSum::fixed_point);
      const Memory memory = Memory::on(Backend::cpu, planned.used());
      Arena arena(memory.data());
      const ParameterMemory p = take_parameters(arena, model, {}, layout, GradientSum::fixed_point);
      StepState state;
      const Tensor sums(&state, DType::i64, {kStepSums}), overflow(&state.overflow, DType::i64, {1});
      Sharding sharding(ctx, model.table, layout, collectives, p.gradients, p.weights, {sums, overflow});
      Optimizer(model, p, {}, layout, sharding).prepare(ctx);
      sharding.begin_step(1, 1, 2);
      sharding.begin_micro_batch();
      for (int b = model.table.head_bucket(); b >= 0; --b) {
        const GradientTarget target = sharding.hooks().grads.begin(b);
        std::fill_n(target.bucket.as<float>(), target.bucket.size(), rank == 1 && b == 1 ? 3000.0F : 1.0F);
        sharding.hooks().grads.ready(b);
      }
      sharding.finish_gradients();
      EXPECT_GT(state.overflow, 0) << "rank " << rank;
      EXPECT_TRUE(std::isnan(loss_of(state)));
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace kinoe
