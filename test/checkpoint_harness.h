// Checkpoints for tests: a model in host memory whose numbers are all different, saved by any number of ranks.
#pragma once

#include <cmath>
#include <vector>

#include "test/faulty_files.h"
#include "test/model_harness.h"
#include "trainer/checkpoint.h"
#include "trainer/checkpoint_read.h"
#include "trainer/checkpoint_write.h"

namespace kinoe {

/// Tensors of prime and odd sizes, several chunks long, some of them smaller than a chunk.
inline ModelConfig prime_llama() {
  ModelConfig config = small_llama(false);
  config.vocab_size = 1009;
  config.hidden = 118;
  config.heads = config.kv_heads = 2;
  config.head_dim = 58;
  config.ffn = 251;
  return config;
}

/// What a rank writes of memory that holds everything.
inline std::vector<HeldRange> owned_by(const ParameterTable& table, int rank, int ranks) {
  return ShardLayout(table, rank, ranks, false).owned();
}

/// Masters and moments of a model as they lie in the flat range.
struct StoredModel {
  ModelConfig config;
  ParameterTable table;
  std::vector<float> masters, m, v;

  explicit StoredModel(const ModelConfig& model, uint64_t seed = 1) : config(model), table(model) {
    for (std::vector<float>* flat : {&masters, &m, &v}) {
      flat->assign(static_cast<size_t>(table.flat_size()), 0.0F);
      initialize(table, seed++, flat->data());
    }
    // The padding stays zero, norms included differ from element to element.
    for (const Parameter& p : table.parameters())
      for (int64_t i = p.offset; i < p.offset + p.size; ++i) {
        const auto at = static_cast<size_t>(i);
        masters[at] += static_cast<float>(i % 97) * 1e-3F;
        m[at] += static_cast<float>(i % 89) * 1e-4F;
        v[at] = std::abs(v[at]) + static_cast<float>(i % 83) * 1e-5F;
      }
  }

  [[nodiscard]] uint64_t hash() const {
    uint64_t sum = 0;
    for (const Parameter& p : table.parameters())
      for (int64_t i = 0; i < p.size; ++i)
        sum += master_hash(p.key, i, std::bit_cast<uint32_t>(masters[static_cast<size_t>(p.offset + i)]));
    return sum;
  }
  [[nodiscard]] TrainingState state(int64_t step) const {
    TrainingState state;
    state.step = step;
    state.samples = step * 4;
    state.tokens = step * 4 * 16;
    state.schedule_tokens = 1 << 20;
    state.weights_hash = hash();
    state.settings = {{"lr", "0.001"}};
    state.data.seq_len = 16;
    state.data.sources = {{"text", 1, 1000, 62, {{"a.txt", "text", 1000, 1000, 62, ""}}}};
    return state;
  }
  [[nodiscard]] CheckpointPlan plan(int64_t step, DType weights, uint64_t shard_bytes = kShardBytes) const {
    return plan_checkpoint(table, weights, DType::f32, step, shard_bytes);
  }
  [[nodiscard]] std::vector<SmallFile> small_files(DType weights) const {
    return {{"config.json", model_config_to_json(config, weights == DType::bf16 ? "bfloat16" : "float32")}};
  }

  /// What `ranks` ranks do, one after the other. Returns the directory.
  std::string save(Files& files, const std::string& run, int64_t step, DType weights = DType::f32,
                   int ranks = 1, uint64_t shard_bytes = kShardBytes) const {
    const CheckpointPlan planned = plan(step, weights, shard_bytes);
    begin_checkpoint(files, run, planned);
    std::vector<uint64_t> checksums(planned.chunks());
    for (int rank = 0; rank < ranks; ++rank) {
      CheckpointPart part(files, run, table, planned);
      for (const HeldRange& range : owned_by(table, rank, ranks)) {
        const int64_t count = range.end - range.begin;
        part.write(weights == DType::f32 ? Section::weights : Section::masters, range.begin, count,
                   masters.data() + range.begin);
        part.write(Section::m, range.begin, count, m.data() + range.begin);
        part.write(Section::v, range.begin, count, v.data() + range.begin);
      }
      const std::vector<uint64_t> mine = part.finish();
      for (size_t i = 0; i < mine.size(); ++i) checksums[i] += mine[i];
    }
    return publish_checkpoint(files, run, table, planned, checksums, state(step), small_files(weights));
  }
};

/// Everything a checkpoint holds, read by `ranks` ranks, equals `expected`.
inline void expect_holds(Files& files, const std::string& directory, const StoredModel& expected,
                         int ranks = 1) {
  const CheckpointReader reader(files, directory);
  reader.check_model(expected.config, expected.table);
  uint64_t hash = 0;
  for (const auto& [section, flat] :
       {std::pair(Section::masters, &expected.masters), std::pair(Section::m, &expected.m),
        std::pair(Section::v, &expected.v)}) {
    std::vector<float> read(flat->size(), NAN);
    for (int rank = 0; rank < ranks; ++rank)
      for (const HeldRange& range : owned_by(expected.table, rank, ranks))
        hash += reader.read(section, expected.table, range.begin, range.end - range.begin,
                            read.data() + range.begin);
    ASSERT_EQ(read, *flat) << name_of(section) << " by " << ranks << " ranks";
  }
  EXPECT_EQ(hash, reader.state().weights_hash);
}

}  // namespace kinoe
