// Checkpoints: what was saved by any number of ranks is read by any other, and the directory is a Hugging Face model.
#include "trainer/checkpoint.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "test/checkpoint_harness.h"
#include "trainer/import.h"
#include "trainer/safetensors.h"

namespace kinoe {
namespace {

namespace fs = std::filesystem;

class CheckpointTest : public testing::Test {
 protected:
  std::unique_ptr<Files> files = std::make_unique<FaultyFiles>();
  FreshDirectory run;
};

TEST_F(CheckpointTest, ReadsBackToTheSameBits) {
  for (const ModelConfig& config : {small_gpt2(), small_llama(false), small_llama(true), prime_llama()})
    for (const DType weights : {DType::f32, DType::bf16}) {
      const StoredModel model(config);
      const std::string directory = model.save(*files, run.path(), 12, weights);
      EXPECT_EQ(directory, run / "checkpoints/step_00000012");
      EXPECT_FALSE(fs::exists(directory + ".tmp"));
      expect_holds(*files, directory, model);
      CheckpointReader(*files, directory).verify();
    }
}

TEST_F(CheckpointTest, SavedUnderPRanksLoadsUnderQ) {
  const StoredModel model(prime_llama());
  std::string first;                               // of the bytes of all files
  for (const int p : {1, 2, 3, 4, 5, 7, 8, 64}) {  // 64: more than a bucket has chunks
    const std::string directory = model.save(*files, run.path(), 5, DType::bf16, p);
    for (const int q : {1, 2, 3, 4, 5, 7, 8, 64}) expect_holds(*files, directory, model, q);
    std::string bytes;
    for (const char* name :
         {"model.safetensors", "trainer/optimizer-master.safetensors", "trainer/optimizer-m.safetensors",
          "trainer/optimizer-v.safetensors", "trainer/manifest.json", "trainer/state.json"})
      bytes += read_file(*files, directory + "/" + name);
    if (first.empty()) first = bytes;
    EXPECT_TRUE(bytes == first) << "the files depend on the number of ranks: " << p;
  }
}

TEST_F(CheckpointTest, OwnedRangesCoverEverythingOnce) {
  const ParameterTable table(prime_llama());
  for (const int ranks : {1, 2, 3, 5, 8, 64}) {
    std::vector<int> owners(static_cast<size_t>(table.flat_size() / kChunk));
    for (int rank = 0; rank < ranks; ++rank)
      for (const HeldRange& range : owned_by(table, rank, ranks))
        for (int64_t i = range.begin; i < range.end; i += kChunk) ++owners[static_cast<size_t>(i / kChunk)];
    EXPECT_EQ(owners, std::vector<int>(owners.size(), 1)) << ranks;
  }
}

TEST_F(CheckpointTest, LargeModelsInSeveralFiles) {
  const StoredModel model(prime_llama());
  const std::string directory = model.save(*files, run.path(), 3, DType::bf16, 3, 200'000);
  EXPECT_TRUE(fs::exists(directory + "/model.safetensors.index.json"));
  EXPECT_TRUE(fs::exists(directory + "/trainer/optimizer-v.safetensors.index.json"));
  expect_holds(*files, directory, model, 2);
  std::vector<float> weights(static_cast<size_t>(model.table.flat_size()));
  read_weights(*files, directory, model.table, weights.data());  // as any other reader of the format
  for (size_t i = 0; i < weights.size(); ++i) ASSERT_EQ(weights[i], to_float(to_bf16(model.masters[i]))) << i;
}

TEST_F(CheckpointTest, PaddingOfTheVocabularyNeverReachesAFile) {
  const SafetensorsReader reader(*files, StoredModel(small_llama(false)).save(*files, run.path(), 1));
  EXPECT_EQ(reader.find("model.embed_tokens.weight")->info.shape, (std::vector<int64_t>{29, 20}));
  EXPECT_EQ(reader.find("lm_head.weight")->info.shape, (std::vector<int64_t>{29, 20}));
  const SafetensorsReader tied(*files, StoredModel(small_llama(true)).save(*files, run.path(), 1));
  EXPECT_EQ(tied.find("lm_head.weight"), nullptr);
}

TEST_F(CheckpointTest, SizeIsKnownBeforehand) {
  const StoredModel model(prime_llama());
  const std::string directory = model.save(*files, run.path(), 1);
  uint64_t bytes = 0;
  for (const auto& entry : fs::recursive_directory_iterator(directory))
    if (entry.is_regular_file()) bytes += entry.file_size();
  const uint64_t planned = model.plan(1, DType::f32).bytes();
  EXPECT_GT(bytes, planned);
  EXPECT_LT(bytes, planned + (1 << 20));
}

TEST_F(CheckpointTest, TheNewestCompleteOneIsFound) {
  const StoredModel model(small_gpt2());
  model.save(*files, run.path(), 9);
  const std::string newest = model.save(*files, run.path(), 100);
  fs::create_directories(run / "checkpoints/step_00000200.tmp");
  fs::create_directories(run / "checkpoints/step_00000300");  // empty: not one
  EXPECT_EQ(checkpoint_steps(*files, run.path()), (std::vector<int64_t>{9, 100}));
  EXPECT_EQ(find_checkpoint(*files, run.path()), newest);
  EXPECT_EQ(find_checkpoint(*files, newest), newest);
  fs::remove_all(run / "checkpoints");
  expect_error(ExitCode::checkpoint, {"no checkpoint in"}, [&] { find_checkpoint(*files, run.path()); });
  expect_error(ExitCode::checkpoint, {"typo"}, [&] { find_checkpoint(*files, run / "typo"); });
}

TEST_F(CheckpointTest, LatestIsAHint) {
  const StoredModel model(small_gpt2());
  model.save(*files, run.path(), 9);
  model.save(*files, run.path(), 10);
  const std::string latest = run / "checkpoints/latest";
  EXPECT_EQ(read_file(*files, latest), "step_00000010\n");
  EXPECT_EQ(check_latest(*files, run.path()), "");
  for (const std::string& said :
       {std::string(), std::string("\x01\x02garbage\xff"), std::string("step_00000099\n")}) {
    put_file(latest, said);
    EXPECT_NE(check_latest(*files, run.path()).find("step_00000010"), std::string::npos);
    EXPECT_EQ(find_checkpoint(*files, run.path()), run / "checkpoints/step_00000010");
  }
}

TEST_F(CheckpointTest, AStepWrittenTwiceIsReplaced) {
  StoredModel(small_gpt2()).save(*files, run.path(), 5);
  const StoredModel second(small_llama(true));
  expect_holds(*files, second.save(*files, run.path(), 5), second);
  EXPECT_EQ(fs::directory_iterator(run / "checkpoints")->path().filename().string().find(".tmp"),
            std::string::npos);
}

TEST_F(CheckpointTest, OldOnesGoExceptMilestones) {
  const StoredModel model(small_gpt2());
  for (const int64_t step : {10, 20, 30, 40, 50}) model.save(*files, run.path(), step);
  remove_old_checkpoints(*files, run.path(), {.newest = 0, .every = 0});
  EXPECT_EQ(checkpoint_steps(*files, run.path()).size(), 5);
  remove_old_checkpoints(*files, run.path(), {.newest = 2, .every = 20});
  EXPECT_EQ(checkpoint_steps(*files, run.path()), (std::vector<int64_t>{20, 40, 50}));
  remove_old_checkpoints(*files, run.path(), {.newest = 1, .every = 0});
  EXPECT_EQ(checkpoint_steps(*files, run.path()), (std::vector<int64_t>{50}));
}

TEST_F(CheckpointTest, AnotherModelIsDescribedFieldByField) {
  const CheckpointReader reader(*files, StoredModel(small_llama(false)).save(*files, run.path(), 1));
  ModelConfig other = small_llama(false);
  other.layers = 3;
  other.ffn = 16;
  expect_error(ExitCode::checkpoint, {"num_hidden_layers", "3", "2", "intermediate_size", "16", "14"},
               [&] { reader.check_model(other, ParameterTable(other)); });
}

TEST_F(CheckpointTest, MissingExtraAndDifferentTensorsOfWeightsAreListed) {
  const std::string directory = StoredModel(small_qwen2()).save(*files, run.path(), 1);
  ModelConfig other = small_llama(true);  // no biases: extra in the file
  other.layers = 3;                       // layer 2 is missing
  other.ffn = 16;                         // MLP of another shape
  const ParameterTable table(other);
  std::vector<float> read(static_cast<size_t>(table.flat_size()));
  expect_error(ExitCode::checkpoint,
               {"not known to the model: model.layers.0.self_attn.q_proj.bias", "model.layers.2.",
                "[14, 20] instead of [16, 20]"},
               [&] { read_weights(*files, directory, table, read.data()); });
}

TEST_F(CheckpointTest, StateReadsBack) {
  TrainingState state = StoredModel(small_gpt2()).state(7);
  state.first_sample = 11;
  state.skipped = 2;
  state.nan = 1;
  EXPECT_EQ(training_state_from_json(to_json(state), "state.json").ranks,
            0);  // as older ones, without the key
  state.ranks = 24;
  state.weights_hash = 0xfedcba9876543210;
  state.settings = {{"lr", "0.001"}, {"model", "\"a \\\"b\\\"\""}};
  state.changes = {{3, "lr", "0.1", "0.001"}};
  const TrainingState read = training_state_from_json(to_json(state), "state.json");
  EXPECT_EQ(read.step, 7);
  EXPECT_EQ(read.samples, state.samples);
  EXPECT_EQ(read.tokens, state.tokens);
  EXPECT_EQ(read.first_sample, 11);
  EXPECT_EQ(read.schedule_tokens, state.schedule_tokens);
  EXPECT_EQ(read.skipped, 2);
  EXPECT_EQ(read.nan, 1);
  EXPECT_EQ(read.ranks, 24);
  EXPECT_EQ(read.weights_hash, state.weights_hash);
  EXPECT_EQ(read.settings, state.settings);
  EXPECT_EQ(read.changes.size(), 1);
  EXPECT_EQ(read.changes[0].to, "0.001");
  EXPECT_EQ(read.data, state.data);
}

}  // namespace
}  // namespace kinoe
