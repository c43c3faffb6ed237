// Checkpoints of weights: written, found, read back; what does not fit is named.
#include "trainer/checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "test/model_harness.h"
#include "trainer/import.h"
#include "trainer/safetensors.h"

namespace kinoe {
namespace {

constexpr Context kCpu;
namespace fs = std::filesystem;

class CheckpointTest : public testing::Test {
 protected:
  CheckpointTest()
      : files(posix_files()),
        run_directory(testing::TempDir() + "checkpoint_test_" + std::to_string(getpid())) {
    fs::remove_all(run_directory);
    fs::create_directories(run_directory);
  }
  ~CheckpointTest() override { fs::remove_all(run_directory); }

  std::string write(const ModelConfig& config, int64_t step, std::vector<float>& flat) {
    const ParameterTable table(config);
    flat.assign(static_cast<size_t>(table.flat_size()), 0.0F);
    initialize(table, static_cast<uint64_t>(step), flat.data());
    return write_checkpoint(*files, run_directory, step, kCpu, config, table,
                            Tensor(flat.data(), DType::f32, {table.flat_size()}));
  }
  template <class Work>
  static std::string error_of(ExitCode code, Work work) {
    try {
      work();
    } catch (const Error& error) {
      EXPECT_EQ(error.code, code) << error.what();
      return error.what();
    }
    ADD_FAILURE() << "nothing was thrown";
    return "";
  }

  std::unique_ptr<Files> files;
  std::string run_directory;
};

TEST_F(CheckpointTest, ReadsBackToTheSameBits) {
  for (const ModelConfig& config : {small_gpt2(), small_llama(false), small_llama(true)}) {
    std::vector<float> written;
    const std::string directory = write(config, 12, written);
    EXPECT_EQ(directory, run_directory + "/checkpoints/step_00000012");
    EXPECT_FALSE(fs::exists(directory + ".tmp"));
    const ParameterTable table(load_model_config(directory));
    std::vector<float> read(static_cast<size_t>(table.flat_size()), NAN);
    read_weights(*files, directory, table, read.data());
    EXPECT_EQ(0, std::memcmp(written.data(), read.data(), read.size() * sizeof(float)));
  }
}

TEST_F(CheckpointTest, PaddingOfTheVocabularyNeverReachesAFile) {
  std::vector<float> flat;
  const SafetensorsReader reader(*files, write(small_llama(false), 1, flat));
  EXPECT_EQ(reader.find("model.embed_tokens.weight")->info.shape, (std::vector<int64_t>{29, 20}));
  EXPECT_EQ(reader.find("lm_head.weight")->info.shape, (std::vector<int64_t>{29, 20}));
  const SafetensorsReader tied(*files, write(small_llama(true), 1, flat));
  EXPECT_EQ(tied.find("lm_head.weight"), nullptr);
}

TEST_F(CheckpointTest, SizeIsKnownBeforehand) {
  std::vector<float> flat;
  const std::string directory = write(small_gpt2(), 1, flat);
  uint64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(directory)) bytes += entry.file_size();
  const uint64_t planned = checkpoint_bytes(ParameterTable(small_gpt2()), DType::f32);
  EXPECT_LE(bytes, planned);
  EXPECT_GE(bytes + 8192, planned);
}

TEST_F(CheckpointTest, TheNewestFinishedOneIsFound) {
  std::vector<float> flat;
  write(small_gpt2(), 9, flat);
  const std::string newest = write(small_gpt2(), 100, flat);
  fs::create_directories(run_directory + "/checkpoints/step_00000200.tmp");
  fs::create_directories(run_directory + "/checkpoints/step_00000300");  // empty: not one
  EXPECT_EQ(find_checkpoint(*files, run_directory), newest);
  EXPECT_EQ(find_checkpoint(*files, newest), newest);
  fs::remove_all(run_directory + "/checkpoints");
  EXPECT_NE(
      error_of(ExitCode::checkpoint, [&] { find_checkpoint(*files, run_directory); }).find("no checkpoint"),
      std::string::npos);
  EXPECT_NE(
      error_of(ExitCode::checkpoint, [&] { find_checkpoint(*files, run_directory + "/typo"); }).find("typo"),
      std::string::npos);
}

TEST_F(CheckpointTest, AStepWrittenTwiceIsReplaced) {
  std::vector<float> first, second;
  write(small_gpt2(), 5, first);
  const std::string directory = write(small_llama(true), 5, second);
  EXPECT_EQ(load_model_config(directory), small_llama(true));
}

TEST_F(CheckpointTest, MissingExtraAndDifferentTensorsAreListed) {
  std::vector<float> flat;
  const std::string directory = write(small_llama(false), 1, flat);
  ModelConfig other = small_llama(true);  // no lm_head: extra in the file
  other.layers = 3;                       // layer 2 is missing
  other.ffn = 16;                         // MLP of another shape
  const ParameterTable table(other);
  std::vector<float> read(static_cast<size_t>(table.flat_size()));
  const std::string message =
      error_of(ExitCode::checkpoint, [&] { read_weights(*files, directory, table, read.data()); });
  EXPECT_NE(message.find("not known to the model: lm_head.weight"), std::string::npos) << message;
  EXPECT_NE(message.find("model.layers.2."), std::string::npos) << message;
  EXPECT_NE(message.find("[14, 20] instead of [16, 20]"), std::string::npos) << message;
}

TEST_F(CheckpointTest, NaNInStoredWeightsIsNamed) {
  const ModelConfig config = small_gpt2();
  const ParameterTable table(config);
  std::vector<float> flat(static_cast<size_t>(table.flat_size()));
  initialize(table, 1, flat.data());
  const Parameter& p = table.parameters()[5];
  flat[static_cast<size_t>(p.offset)] = NAN;
  const std::string directory = write_checkpoint(*files, run_directory, 1, kCpu, config, table,
                                                 Tensor(flat.data(), DType::f32, {table.flat_size()}));
  std::vector<float> read(flat.size());
  const std::string message =
      error_of(ExitCode::checkpoint, [&] { read_weights(*files, directory, table, read.data()); });
  EXPECT_NE(message.find(p.name), std::string::npos) << message;
}

TEST_F(CheckpointTest, Bf16WeightsReadBackExactly) {
  const ModelConfig config = small_llama(false);
  const ParameterTable table(config);
  std::vector<float> flat(static_cast<size_t>(table.flat_size()));
  initialize(table, 4, flat.data());
  std::vector<bf16> narrow(flat.size());
  for (size_t i = 0; i < flat.size(); ++i) narrow[i] = to_bf16(flat[i]);
  const std::string directory = write_checkpoint(*files, run_directory, 2, kCpu, config, table,
                                                 Tensor(narrow.data(), DType::bf16, {table.flat_size()}));
  std::vector<float> read(flat.size());
  read_weights(*files, directory, table, read.data());
  for (size_t i = 0; i < read.size(); ++i) ASSERT_EQ(read[i], to_float(narrow[i])) << i;
  std::ifstream in(directory + "/config.json");
  const std::string json((std::istreambuf_iterator<char>(in)), {});
  EXPECT_NE(json.find("\"torch_dtype\": \"bfloat16\""), std::string::npos);
}

}  // namespace
}  // namespace kinoe
