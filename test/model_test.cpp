// The whole model: gradients by finite differences in fp64, recomputation to the bit, gradient accumulation.
#include "trainer/model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "kernels/global_norm.h"
#include "test/model_gradients.h"

namespace kinoe {
namespace {

constexpr Context kCpu;

struct Case {
  const char* name;
  ModelConfig config;
};

std::vector<Case> cases() {
  return {{"gpt2", small_gpt2()},
          {"llama_untied", small_llama(false)},
          {"llama_tied", small_llama(true)},
          {"qwen2", small_qwen2()},
          {"qwen3", small_qwen3()}};
}

// ---- Parameter table -------------------------------------------------------------------------------------------------

TEST(Parameters, EveryTensorIsInItsBucketAndNoneOverlap) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const ParameterTable table(c.config);
    std::map<int64_t, int64_t> ranges;
    std::set<std::string> names;
    int64_t total = 0;
    for (const Parameter& p : table.parameters()) {
      const Bucket& b = table.buckets()[static_cast<size_t>(p.bucket)];
      EXPECT_GE(p.offset, b.offset) << p.name;
      EXPECT_LE(p.offset + p.size, b.offset + b.size) << p.name;
      EXPECT_TRUE(names.insert(p.name).second) << p.name;
      ranges[p.offset] = p.offset + p.size;
      total += p.size;
      EXPECT_EQ(p.decay, p.shape.size() > 1) << p.name;
    }
    EXPECT_EQ(total, c.config.parameter_count());
    int64_t end = 0;
    for (const auto& [begin, stop] : ranges) {
      EXPECT_GE(begin, end);
      end = stop;
    }
    for (const Bucket& b : table.buckets()) EXPECT_EQ(b.size % kChunk, 0) << b.name;
    EXPECT_EQ(table.buckets().size(), static_cast<size_t>(c.config.layers) + 2);
  }
}

TEST(Parameters, FusedTensorsAreConsecutiveRows) {
  const ParameterTable table(small_llama(false));
  std::map<std::string, const Parameter*> by_name;
  for (const Parameter& p : table.parameters()) by_name[p.name] = &p;
  const auto end = [&](const char* name) { return by_name.at(name)->offset + by_name.at(name)->size; };
  EXPECT_EQ(end("model.layers.1.self_attn.q_proj.weight"),
            by_name.at("model.layers.1.self_attn.k_proj.weight")->offset);
  EXPECT_EQ(end("model.layers.1.self_attn.k_proj.weight"),
            by_name.at("model.layers.1.self_attn.v_proj.weight")->offset);
  EXPECT_EQ(end("model.layers.1.mlp.gate_proj.weight"),
            by_name.at("model.layers.1.mlp.up_proj.weight")->offset);
}

TEST(Parameters, ViewsPointAtTheirParameters) {
  const ModelConfig config = small_llama(false);
  const ParameterTable table(config);
  std::vector<float> flat(static_cast<size_t>(table.flat_size()));
  const Tensor all(flat.data(), DType::f32, {table.flat_size()});
  std::map<std::string, int64_t> offset;
  for (const Parameter& p : table.parameters()) offset[p.name] = p.offset;
  const auto at = [&](const Tensor& t) { return t.as<float>() - flat.data(); };
  const LayerTensors layer = table.layer(table.bucket(all, ParameterTable::layer_bucket(1)));
  EXPECT_EQ(at(layer.qkv_weight), offset.at("model.layers.1.self_attn.q_proj.weight"));
  EXPECT_EQ(at(layer.proj_weight), offset.at("model.layers.1.mlp.down_proj.weight"));
  EXPECT_EQ(at(layer.norm2_weight), offset.at("model.layers.1.post_attention_layernorm.weight"));
  EXPECT_FALSE(layer.qkv_bias);
  const EmbeddingTensors embedding = table.embedding(table.bucket(all, ParameterTable::embedding_bucket()));
  EXPECT_EQ(at(embedding.token), offset.at("model.embed_tokens.weight"));
  EXPECT_EQ(embedding.token.dim(0), 128);
  EXPECT_FALSE(embedding.position);
  const HeadTensors head = table.head(table.bucket(all, table.head_bucket()));
  EXPECT_EQ(at(head.lm_head), offset.at("lm_head.weight"));
}

TEST(Parameters, InitialValuesAreAPureFunctionOfTheIndex) {
  const ParameterTable table(small_gpt2());
  for (const Parameter& p : table.parameters()) {
    std::vector<float> whole(static_cast<size_t>(p.size)), part(static_cast<size_t>(p.size));
    initial_values(p, 3, 0, p.size, whole.data());
    for (int64_t begin = 0; begin < p.size; begin += 7)
      initial_values(p, 3, begin, std::min<int64_t>(7, p.size - begin), part.data() + begin);
    EXPECT_EQ(whole, part) << p.name;
  }
}

TEST(Parameters, PiecesOfTheFlatRangeAreThoseOfTheWhole) {
  ModelConfig config = small_llama(false);
  config.hidden = 200;
  config.ffn = 300;
  const ParameterTable table(config);
  const int64_t n = table.flat_size();
  ASSERT_GT(n / kChunk, 10);
  std::vector<float> whole(static_cast<size_t>(n), -1), part(whole), expected(static_cast<size_t>(n), 0);
  initialize(table, 5, whole.data());
  for (const Parameter& p : table.parameters()) initial_values(p, 5, 0, p.size, expected.data() + p.offset);
  EXPECT_EQ(whole, expected);
  for (int64_t begin = 0; begin < n; begin += 3 * kChunk)
    initialize(table, 5, begin, std::min(begin + 3 * kChunk, n), part.data() + begin);
  EXPECT_EQ(part, expected);
}

TEST(Parameters, InitialValuesHaveTheirDeviationAndDependOnSeedAndName) {
  ModelConfig config = small_gpt2();
  config.hidden = 120;
  config.heads = config.kv_heads = 2;
  config.head_dim = 60;
  config.ffn = 240;
  const ParameterTable table(config);
  std::vector<float> a(static_cast<size_t>(table.flat_size())), b(a.size());
  initialize(table, 1, a.data());
  initialize(table, 2, b.data());
  std::map<std::string, std::vector<float>> values;
  for (const Parameter& p : table.parameters()) {
    const auto begin = a.begin() + p.offset;
    values[p.name].assign(begin, begin + p.size);
    if (p.init_std == 0) continue;
    double sum = 0, squares = 0;
    for (const float x : values[p.name]) {
      sum += static_cast<double>(x);
      squares += static_cast<double>(x) * static_cast<double>(x);
    }
    const auto n = static_cast<double>(p.size);
    EXPECT_NEAR(sum / n, 0, 5 * p.init_std / std::sqrt(n)) << p.name;
    EXPECT_NEAR(std::sqrt(squares / n), p.init_std, 5 * p.init_std / std::sqrt(2 * n)) << p.name;
    EXPECT_NE(0, std::memcmp(a.data() + p.offset, b.data() + p.offset, static_cast<size_t>(p.size) * 4))
        << p.name;
  }
  EXPECT_NE(values.at("transformer.h.0.mlp.c_fc.weight"), values.at("transformer.h.1.mlp.c_fc.weight"));
  EXPECT_EQ(values.at("transformer.ln_f.weight"), std::vector<float>(120, 1.0F));
}

TEST(Parameters, ShardsCoverEveryElementOnce) {
  const ParameterTable table(small_llama(true));
  const int64_t chunks = table.flat_size() / kChunk;
  for (const int ranks : {1, 2, 3, 5, 7, 8, 64}) {
    SCOPED_TRACE(ranks);
    std::map<uint64_t, int64_t> covered;
    std::vector<int64_t> chunk_at(
        static_cast<size_t>(ShardLayout(table, 0, ranks, true).size() / kChunk * ranks), -1);
    for (int rank = 0; rank < ranks; ++rank) {
      const ShardLayout layout(table, rank, ranks, true);
      for (const HeldRange& range : layout.held())
        for (int64_t i = 0; i < range.end - range.begin; i += kChunk)
          chunk_at[static_cast<size_t>((rank * layout.size() + range.local + i) / kChunk)] =
              (range.begin + i) / kChunk;
      for (const AdamWSegment& s : table.segments(layout.held(), 0.1F)) {
        covered[s.tensor_key] += s.end - s.begin;
        // The chunk in which the segment begins is the one that holds its first element.
        const auto p = std::find_if(table.parameters().begin(), table.parameters().end(),
                                    [&](const Parameter& q) { return q.key == s.tensor_key; });
        const auto at = static_cast<size_t>((rank * layout.size() + s.begin) / kChunk);
        EXPECT_EQ(chunk_at[at], (p->offset + s.first_index) / kChunk);
        EXPECT_EQ(s.begin % kChunk, (p->offset + s.first_index) % kChunk);
      }
      EXPECT_LE(layout.whole_size(), table.flat_size() + ranks * kChunk);
    }
    for (const Parameter& p : table.parameters()) EXPECT_EQ(covered[p.key], p.size) << p.name;
    const std::vector<int64_t> places = ShardLayout(table, 0, ranks, true).gathered_chunks();
    ASSERT_EQ(static_cast<int64_t>(places.size()), chunks);
    for (int64_t i = 0; i < chunks; ++i)
      EXPECT_EQ(chunk_at[static_cast<size_t>(places[static_cast<size_t>(i)])], i);
  }
}

// ---- Gradients of the whole model ------------------------------------------------------------------------------------

TEST(Model, GradientsAgreeWithFiniteDifferences) {
  constexpr int64_t kBatch = 2, kLength = 5;
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    ModelRun run(kCpu, c.config, DType::f64, {.batch = kBatch, .length = kLength, .head_rows = 3});
    const auto tokens = random_ids(kBatch * kLength, c.config.vocab_size, 1);
    auto targets = random_ids(kBatch * kLength, c.config.vocab_size, 2);
    targets[4] = -1;
    stir(run);
    const auto loss = [&] {
      begin_step(kCpu, run.acts);
      run.set_batch(tokens, targets);
      forward(kCpu, run.model, run.acts, run.hooks());
      head_loss(kCpu, run.model, run.acts, run.hooks());
      return run.exact_loss() / (kBatch * kLength);
    };
    run.micro_batch(tokens, targets, true, kBatch * kLength);
    const double trained = run.exact_loss() / (kBatch * kLength);
    EXPECT_EQ(run.state().target_tokens, kBatch * kLength - 1);
    EXPECT_DOUBLE_EQ(trained, loss());
    expect_gradients_of(run, loss);
  }
}

TEST(Model, PaddingOfTheGradientStaysZero) {
  ModelRun run(kCpu, small_gpt2(), DType::f32, {.batch = 1, .length = 7});
  run.micro_batch(random_ids(7, 29, 1), random_ids(7, 29, 2), true, 7);
  const auto gradient = run.host<float>(run.parameters.gradients.whole);
  std::vector<bool> used(gradient.size(), false);
  for (const Parameter& p : run.model.table.parameters()) std::fill_n(used.begin() + p.offset, p.size, true);
  for (size_t i = 0; i < gradient.size(); ++i) {
    if (!used[i]) {
      ASSERT_EQ(gradient[i], 0.0F) << i;
    }
  }
}

TEST(Model, RecomputationChangesNoBit) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    std::vector<float> first;
    size_t largest = 0;
    for (const Recompute mode : {Recompute::none, Recompute::light, Recompute::block}) {
      ModelRun run(kCpu, c.config, DType::f32, {.batch = 3, .length = 11, .recompute = mode});
      run.micro_batch(random_ids(33, 29, 1), random_ids(33, 29, 2), true, 33);
      run.micro_batch(random_ids(33, 29, 3), random_ids(33, 29, 4), false, 33);
      const auto gradient = run.host<float>(run.parameters.gradients.whole);
      if (mode == Recompute::none) {
        first = gradient;
        largest = run.planned_bytes;
      } else {
        EXPECT_EQ(0, std::memcmp(first.data(), gradient.data(), first.size() * sizeof(float)));
        EXPECT_LT(run.planned_bytes, largest);
        largest = run.planned_bytes;
      }
    }
  }
}

/// One step with this many sequences at a time, from the same eight sequences.
std::vector<float> gradient_by(int64_t micro_batch, int64_t head_rows) {
  constexpr int64_t kLength = 6, kSequences = 8;
  const auto tokens = random_ids(kSequences * kLength, 29, 5);
  auto targets = random_ids(kSequences * kLength, 29, 6);
  for (size_t i = 0; i < 10; ++i) targets[i] = -1;  // unequal numbers of targets: a mean of means would show
  ModelRun run(kCpu, small_llama(false), DType::f32,
               {.batch = micro_batch, .length = kLength, .head_rows = head_rows});
  for (int64_t s = 0; s < kSequences; s += micro_batch) {
    std::vector<int32_t> x(static_cast<size_t>(micro_batch * kLength), 0),
        y(x.size(), -1);  // partial: padding
    const int64_t valid = std::min(micro_batch, kSequences - s);
    std::copy_n(tokens.begin() + s * kLength, valid * kLength, x.begin());
    std::copy_n(targets.begin() + s * kLength, valid * kLength, y.begin());
    run.micro_batch(x, y, s == 0, kSequences * kLength);
  }
  EXPECT_EQ(run.state().target_tokens, kSequences * kLength - 10);
  return run.host<float>(run.parameters.gradients.whole);
}

TEST(Model, TheSplitIntoMicroBatchesDoesNotMatter) {
  const auto whole = gradient_by(8, 0);
  double norm = 0;
  for (const float x : whole) norm += static_cast<double>(x) * static_cast<double>(x);
  ASSERT_GT(norm, 0);
  for (const int64_t micro_batch : {1, 2, 3, 4}) {
    const auto split = gradient_by(micro_batch, micro_batch == 2 ? 5 : 0);
    double difference = 0;
    for (size_t i = 0; i < whole.size(); ++i) {
      const double d = static_cast<double>(whole[i]) - static_cast<double>(split[i]);
      difference += d * d;
    }
    EXPECT_LT(std::sqrt(difference / norm), 1e-6) << "micro-batch " << micro_batch;
  }
}

// ---- The optimizer's gate --------------------------------------------------------------------------------------------

TEST(Optimizer, AStepWithoutTargetsIsSkippedAndTheNextIsApplied) {
  ModelRun run(kCpu, small_gpt2(), DType::f32, {.batch = 2, .length = 6});
  const auto before = run.host<float>(run.parameters.masters);
  run.micro_batch(random_ids(12, 29, 1), std::vector<int32_t>(12, -1), true, 12);
  run.optimizer->update(kCpu, run.acts, 1e-2, 1, 12);
  EXPECT_EQ(run.state().skipped, 1);
  EXPECT_EQ(run.state().halted, 0);
  EXPECT_EQ(before, run.host<float>(run.parameters.masters));
  run.micro_batch(random_ids(12, 29, 1), random_ids(12, 29, 2), true, 12);
  run.optimizer->update(kCpu, run.acts, 1e-2, 1, 12);
  EXPECT_EQ(run.state().skipped, 0);
  EXPECT_NE(before, run.host<float>(run.parameters.masters));
}

TEST(Optimizer, ANonFiniteStepIsNeverAppliedAndTheGateIsSticky) {
  ModelRun run(kCpu, small_gpt2(), DType::f32, {.batch = 2, .length = 6});
  const auto tokens = random_ids(12, 29, 1), targets = random_ids(12, 29, 2);
  float& poisoned = run.parameters.masters.as<float>()[run.model.table.parameters()[3].offset];
  const float kept = poisoned;
  poisoned = NAN;
  run.micro_batch(tokens, targets, true, 12);
  run.optimizer->update(kCpu, run.acts, 1e-2, 1, 12);
  EXPECT_EQ(run.state().halted, 1);
  poisoned = kept;
  const auto before = run.host<float>(run.parameters.masters);
  const auto moments = run.host<float>(run.parameters.m);
  run.micro_batch(tokens, targets, true, 12);
  run.optimizer->update(kCpu, run.acts, 1e-2, 2, 12);
  EXPECT_EQ(run.state().halted, 1) << "the host has not cleared it";
  EXPECT_EQ(before, run.host<float>(run.parameters.masters));
  EXPECT_EQ(moments, run.host<float>(run.parameters.m));
}

TEST(Optimizer, ATokenOutsideTheVocabularyIsFlaggedAndNotApplied) {
  ModelRun run(kCpu, small_gpt2(), DType::f32, {.batch = 2, .length = 6});
  auto tokens = random_ids(12, 29, 1);
  tokens[7] = 29;
  const auto before = run.host<float>(run.parameters.masters);
  run.micro_batch(tokens, random_ids(12, 29, 2), true, 12);
  run.optimizer->update(kCpu, run.acts, 1e-2, 1, 12);
  EXPECT_EQ(run.state().bad_token, 8);
  EXPECT_EQ(before, run.host<float>(run.parameters.masters));
}

}  // namespace
}  // namespace kinoe
