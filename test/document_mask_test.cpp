// --document-mask: which tokens form a document, and what the model makes of it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "dataloader/loader.h"
#include "kernels/global_norm.h"
#include "test/faulty_files.h"
#include "test/model_gradients.h"

namespace kinoe {
namespace {

constexpr Context kCpu;
constexpr int32_t kEnd = 9;

// ---- The model -------------------------------------------------------------------------------------------------------

struct Case {
  const char* name;
  ModelConfig config;
};

std::vector<Case> cases() {
  return {{"gpt2", small_gpt2()},
          {"llama", small_llama(false)},
          {"llama_tied", small_llama(true)},
          {"qwen2", small_qwen2()},
          {"qwen3", small_qwen3()}};
}

/// Losses of each position after a forward pass of the evaluation head.
template <class T = double>
std::vector<T> losses_of(ModelRun& run, const std::vector<int32_t>& tokens,
                         const std::vector<int32_t>& targets) {
  begin_step(run.ctx, run.acts);
  run.set_batch(tokens, targets);
  forward(run.ctx, run.model, run.acts, run.hooks());
  head_loss(run.ctx, run.model, run.acts, run.hooks());
  return run.host<T>(run.acts.losses);
}

const std::vector<std::vector<int32_t>> kRows = {{3, 4}, {1, 1, 5}};

TEST(DocumentMask, GradientsAgreeWithFiniteDifferences) {
  constexpr int64_t kBatch = 2, kLength = 7;
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    ModelRun run(kCpu, c.config, DType::f64,
                 {.batch = kBatch, .length = kLength, .document_mask = true, .head_rows = 3});
    stir(run);
    run.set_documents(kRows);
    const auto tokens = random_ids(kBatch * kLength, c.config.vocab_size, 1);
    const auto targets = random_ids(kBatch * kLength, c.config.vocab_size, 2);
    const auto loss = [&] {
      (void)losses_of(run, tokens, targets);
      return run.exact_loss() / (kBatch * kLength);
    };
    run.micro_batch(tokens, targets, true, kBatch * kLength);
    expect_gradients_of(run, loss);
  }
}

/// Packed into one sequence and as sequences of their own: each loss, and every gradient, to within `tolerance`.
template <class T>
void expect_packed_equals_separate(ModelConfig config, double tolerance) {
  const std::vector<int32_t> lengths = {50, 1, 82, 7};  // over several tiles of the kernels
  constexpr int64_t kLength = 140;
  config.max_positions = kLength;
  const auto tokens = random_ids(kLength, config.vocab_size, 3),
             targets = random_ids(kLength, config.vocab_size, 4);
  ModelRun packed(kCpu, config, dtype_of<T>, {.batch = 1, .length = kLength, .document_mask = true});
  stir<T>(packed);
  packed.set_documents({lengths});
  const auto losses = losses_of<T>(packed, tokens, targets);
  packed.micro_batch(tokens, targets, true, kLength);
  const auto gradient = packed.host<T>(packed.parameters.gradients.whole);

  std::vector<double> summed(gradient.size());
  int64_t at = 0;
  for (const int32_t length : lengths) {
    const std::vector<int32_t> x(tokens.begin() + at, tokens.begin() + at + length);
    const std::vector<int32_t> y(targets.begin() + at, targets.begin() + at + length);
    ModelRun alone(kCpu, config, dtype_of<T>, {.batch = 1, .length = length});
    stir<T>(alone);
    const auto own = losses_of<T>(alone, x, y);
    for (int32_t t = 0; t < length; ++t)
      EXPECT_NEAR(own[static_cast<size_t>(t)], losses[static_cast<size_t>(at + t)], tolerance) << at + t;
    alone.micro_batch(x, y, true, kLength);
    const auto part = alone.host<T>(alone.parameters.gradients.whole);
    for (size_t i = 0; i < part.size(); ++i) summed[i] += static_cast<double>(part[i]);
    at += length;
  }
  double difference = 0, norm = 0;
  for (size_t i = 0; i < gradient.size(); ++i) {
    const auto g = static_cast<double>(gradient[i]);
    difference += (g - summed[i]) * (g - summed[i]);
    norm += g * g;
  }
  EXPECT_GT(norm, 0);
  EXPECT_LT(std::sqrt(difference / norm), tolerance);

  ModelRun open(kCpu, config, dtype_of<T>, {.batch = 1, .length = kLength});
  stir<T>(open);
  const auto unmasked = losses_of<T>(open, tokens, targets);
  int64_t different = 0;
  for (size_t t = 50; t < kLength; ++t) different += std::abs(unmasked[t] - losses[t]) > static_cast<T>(1e-5);
  EXPECT_GT(different, 80) << "the mask does something";
}

// With RoPE only distances count. The kernels of fp32 are others than those of fp64.
TEST(DocumentMask, PackedDocumentsEqualSeparateSequences) {
  for (const Case& c : cases()) {
    if (c.config.position != PositionKind::rope) continue;
    SCOPED_TRACE(c.name);
    expect_packed_equals_separate<double>(c.config, 1e-12);
    expect_packed_equals_separate<float>(c.config, 5e-6);
  }
}

TEST(DocumentMask, OtherDocumentsChangeNoBit) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    ModelRun run(kCpu, c.config, DType::f64, {.batch = 2, .length = 7, .document_mask = true});
    stir(run);
    run.set_documents(kRows);
    auto tokens = random_ids(14, c.config.vocab_size, 5);
    const auto targets = random_ids(14, c.config.vocab_size, 6);
    const auto before = losses_of(run, tokens, targets);
    for (const size_t t : {0U, 1U, 2U, 7U, 8U})
      tokens[t] = (tokens[t] + 1) % static_cast<int32_t>(c.config.vocab_size);
    const auto after = losses_of(run, tokens, targets);
    for (size_t t = 0; t < 14; ++t) {
      const bool changed = t < 3 || t == 7 || t == 8;
      EXPECT_EQ(before[t] != after[t], changed) << t;
    }
  }
}

TEST(DocumentMask, RecomputationChangesNoBitAndOneDocumentIsNoMask) {
  const auto tokens = random_ids(14, 29, 1), targets = random_ids(14, 29, 2);
  const auto gradient_of = [&](const ModelConfig& config, const std::vector<std::vector<int32_t>>& documents,
                               Recompute mode) {
    ModelRun run(kCpu, config, DType::f32,
                 {.batch = 2, .length = 7, .recompute = mode, .document_mask = !documents.empty()});
    if (!documents.empty()) run.set_documents(documents);
    run.micro_batch(tokens, targets, true, 14);
    return run.host<float>(run.parameters.gradients.whole);
  };
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const auto masked = gradient_of(c.config, kRows, Recompute::none);
    EXPECT_EQ(masked, gradient_of(c.config, kRows, Recompute::light));
    EXPECT_EQ(masked, gradient_of(c.config, kRows, Recompute::block));
    const auto open = gradient_of(c.config, {}, Recompute::none);
    EXPECT_EQ(open, gradient_of(c.config, {{7}, {7}}, Recompute::none));
    EXPECT_NE(open, masked);
  }
}

TEST(DocumentMask, GpuAgreesWithCpu) {
  if (gpu_count() == 0 || gpu_info(0).compute_capability < 80)
    GTEST_SKIP() << "no GPU of compute capability 8.0 or later";
  const auto tokens = random_ids(280, 29, 1), targets = random_ids(280, 29, 2);
  const auto gradient_on = [&](Context ctx, ModelConfig config) {
    config.max_positions = 140;
    ModelRun run(ctx, config, DType::f32, {.batch = 2, .length = 140, .document_mask = true});
    run.set_documents({{50, 1, 82, 7}, {3, 137}});
    run.micro_batch(tokens, targets, true, 280);
    return run.host<float>(run.parameters.gradients.whole);
  };
  const std::unique_ptr<Device> gpu = Device::gpu(0);
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const auto expected = gradient_on(kCpu, c.config), got = gradient_on(gpu->context(), c.config);
    double difference = 0, norm = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const double e = static_cast<double>(expected[i]), d = static_cast<double>(got[i]) - e;
      difference += d * d;
      norm += e * e;
    }
    EXPECT_TRUE(std::sqrt(difference / norm) < 1e-5) << std::sqrt(difference / norm);
  }
}

TEST(DocumentMask, MemoryIsPlanned) {
  const auto planned = [](bool mask, bool training) {
    const Model model(small_gpt2(), Backend::cpu, DType::f32);
    Arena arena;
    take_activations(arena, model, {.batch = 4, .length = 1024, .document_mask = mask, .training = training});
    return arena.used();
  };
  EXPECT_EQ(planned(true, true) - planned(false, true), 2U * 4 * 1024 * 4);
  EXPECT_EQ(planned(true, false) - planned(false, false), 1U * 4 * 1024 * 4);
  EXPECT_EQ(Loader::buffer_bytes(4, 1024, true), 2 * Loader::buffer_bytes(4, 1024, false));
}

// ---- The data --------------------------------------------------------------------------------------------------------

class DocumentData : public testing::Test {
 protected:
  [[nodiscard]] std::string shard(const std::string& name, const std::vector<uint16_t>& tokens) const {
    std::vector<int32_t> header(256);
    header[0] = 20240520;
    header[1] = 1;
    header[2] = static_cast<int32_t>(tokens.size());
    std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
    bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2);
    put_file(directory / name, bytes);
    return directory / name;
  }
  static DatasetOptions options(int64_t end_token = kEnd) {
    DatasetOptions o;
    o.seq_len = 6;
    o.vocab_size = 300;
    o.shuffle = false;
    o.document_mask = true;
    o.end_token = end_token;
    return o;
  }
  static Dataset open(const std::string& path, const DatasetOptions& o) {
    return Dataset::open(expand_data(std::vector<std::string>{path}), o);
  }
  /// Start and end of each position of the first `rows` samples.
  static void expect_documents(const Dataset& data, const std::vector<std::vector<int32_t>>& starts,
                               const std::vector<std::vector<int32_t>>& ends) {
    const auto rows = static_cast<int64_t>(starts.size());
    Loader loader(data, rows, Memory::pinned(Backend::cpu, Loader::buffer_bytes(rows, data.seq_len(), true)));
    const Batch& batch = loader.fetch(0, rows);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t t = data.seq_len();
      EXPECT_EQ(std::vector<int32_t>(batch.doc_start + r * t, batch.doc_start + (r + 1) * t),
                starts[static_cast<size_t>(r)])
          << "row " << r;
      EXPECT_EQ(std::vector<int32_t>(batch.doc_end + r * t, batch.doc_end + (r + 1) * t),
                ends[static_cast<size_t>(r)])
          << "row " << r;
    }
  }

  FreshDirectory directory;
};

TEST_F(DocumentData, AnEndTokenBelongsToTheDocumentItEnds) {
  // Windows of 6 inputs: the end inside, at the last input, at the first, two in a row, none.
  const Dataset data = open(shard("a.bin", {1, 2, 9, 3, 4, 5,  //
                                            6, 7, 8, 1, 2, 9,  //
                                            3, 4, 9, 9, 1, 2,  //
                                            9, 1, 2, 3, 4, 5,  //
                                            6, 7, 8, 1, 2, 3, 4}),
                            options());
  ASSERT_EQ(data.samples(), 5);
  expect_documents(
      data,
      {{0, 0, 0, 3, 3, 3}, {0, 0, 0, 0, 0, 0}, {0, 0, 0, 3, 4, 4}, {0, 1, 1, 1, 1, 1}, {0, 0, 0, 0, 0, 0}},
      {{3, 3, 3, 6, 6, 6}, {6, 6, 6, 6, 6, 6}, {3, 3, 3, 4, 6, 6}, {1, 6, 6, 6, 6, 6}, {6, 6, 6, 6, 6, 6}});
  EXPECT_TRUE(data.warnings().empty());
  EXPECT_TRUE(data.state().document_mask);
}

TEST_F(DocumentData, PaddingRowsAreOneDocument) {
  const Dataset data = open(shard("a.bin", {1, 9, 2, 9, 3, 9, 4}), options());
  Loader loader(data, 3, Memory::pinned(Backend::cpu, Loader::buffer_bytes(3, 6, true)));
  for (int pass = 0; pass < 5; ++pass) {  // through all buffers: what the last batch left must not show
    const Batch& batch = loader.fetch(0, pass % 2);
    for (int64_t i = 6 * (pass % 2); i < 18; ++i) {
      ASSERT_EQ(batch.doc_start[i], 0);
      ASSERT_EQ(batch.doc_end[i], 6);
    }
    if (pass % 2 == 1) {
      EXPECT_EQ(batch.doc_start[5], 4);
    }
  }
}

TEST_F(DocumentData, WithoutTheMaskThereAreNone) {
  DatasetOptions o = options();
  o.document_mask = false;
  const Dataset data = open(shard("a.bin", {1, 9, 2, 9, 3, 9, 4}), o);
  Loader loader(data, 1, Memory::pinned(Backend::cpu, Loader::buffer_bytes(1, 6, false)));
  EXPECT_EQ(loader.fetch(0, 1).doc_start, nullptr);
  EXPECT_EQ(loader.fetch(0, 1).doc_end, nullptr);
}

TEST_F(DocumentData, AMegatronIndexBoundsDocumentsToo) {
  // Documents of 2, 7, 3 and 1 tokens, without end tokens but for one inside the second.
  std::string bin, idx("MMIDIDX\0\0\1\0\0\0\0\0\0\0\x08", 18);
  const auto put = [&](auto value) { idx.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  for (const uint16_t token : std::vector<uint16_t>{1, 2, 3, 4, 5, 9, 7, 8, 1, 2, 3, 4, 5})
    bin.append(reinterpret_cast<const char*>(&token), 2);
  put(int64_t{4});
  put(int64_t{5});
  for (const int32_t size : {2, 7, 3, 1}) put(size);
  for (const int64_t pointer : {0, 4, 18, 24}) put(pointer);
  for (const int64_t document : {0, 1, 2, 3, 4}) put(document);
  put_file(directory / "m.bin", bin);
  put_file(directory / "m.idx", idx);
  const Dataset data = open(directory / "m", options(-1));
  expect_documents(data, {{0, 0, 2, 2, 2, 2}, {0, 0, 0, 3, 3, 3}}, {{2, 2, 6, 6, 6, 6}, {3, 3, 3, 6, 6, 6}});
  expect_documents(open(directory / "m", options()), {{0, 0, 2, 2, 2, 2}, {0, 0, 0, 3, 3, 3}},
                   {{2, 2, 6, 6, 6, 6}, {3, 3, 3, 6, 6, 6}});
}

TEST_F(DocumentData, NobodyKnowsWhereDocumentsEnd) {
  const std::string a = shard("a.bin", {1, 9, 2, 9, 3, 9, 4});
  expect_error(ExitCode::usage, {"--document-mask", "a.bin", "eos_token_id", "manifest.json"},
               [&] { open(a, options(-1)); });
  expect_error(ExitCode::usage, {"--document-mask", "built-in stories"},
               [&] { Dataset::stories(StorySplit::training, 1000, options(-1)); });
  const Dataset none = open(shard("b.bin", {1, 2, 3, 4, 5, 6, 7}), options());
  ASSERT_EQ(none.warnings().size(), 1U);
  EXPECT_NE(none.warnings()[0].find("no end-of-text token"), std::string::npos) << none.warnings()[0];
}

}  // namespace
}  // namespace kinoe
