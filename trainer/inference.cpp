// The commands `sample` and `eval`, and what they share with training.
#include "trainer/inference.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>
#include <vector>

#include "dataloader/data_spec.h"
#include "dataloader/dataset.h"
#include "dataloader/fingerprint.h"
#include "dataloader/stories.h"
#include "dataloader/tokenizer.h"
#include "trainer/checkpoint.h"
#include "trainer/checkpoint_read.h"
#include "trainer/feed.h"
#include "trainer/import.h"
#include "trainer/one_rank.h"
#include "trainer/sample.h"
#include "trainer/tables.h"

namespace kinoe {
namespace {

constexpr int64_t kSampleTokens = 256;  // of a text shown during training

std::vector<int32_t> sample_prompt(const std::string& prompt) {
  return byte_tokenizer()->encode(prompt.empty() ? std::string(kStorySeparator) : prompt);
}

/// "1,2,3" -> {1, 2, 3}, each below `vocab_size`.
std::vector<int32_t> parse_ids(const std::string& text, int64_t vocab_size) {
  std::vector<int32_t> ids;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) {
    const int64_t id = parse_count(word, "--prompt-ids", 0);
    if (id >= vocab_size)
      fail(ExitCode::usage, "--prompt-ids: expected ids below the vocabulary of ", vocab_size, ", got ", id);
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

/// Inference needs weights only; asking for gradients is a bug.
class NoGradients : public GradientHooks {
 public:
  GradientTarget begin(int) override { fail(ExitCode::internal, "gradients asked for in inference"); }
  void ready(int) override {}
};

}  // namespace

std::string sample_text(const Context& ctx, const Model& model, LayerHooks hooks, const Tensor& memory,
                        int64_t window, uint64_t seed, bool stories) {
  SampleOptions options;
  options.max_tokens = kSampleTokens;
  options.seed = seed;
  options.allowed = byte_tokenizer()->vocab_size();
  const auto ended = [&](const std::vector<int32_t>& ids) {
    return stories && byte_tokenizer()->decode(ids).ends_with(kStorySeparator);
  };
  const Sampler sampler(model, 1, window, memory.data);
  return printable(
      byte_tokenizer()->decode(sampler.generate(ctx, hooks, sample_prompt(""), options, ended).front()));
}

std::string find_weights(Files& files, const std::string& path) {
  return is_llmc_model(files, path) ? path : find_checkpoint(files, path);
}

LoadedModel load_model(const std::string& path, DeviceChoice choice, std::optional<DType> dtype) {
  const DeviceDecision decision = choose_device(choice, find_gpus());
  if (!decision.note.empty()) std::fprintf(stderr, "train_gpt: %s\n", decision.note.c_str());
  const std::unique_ptr<Files> files = posix_files();
  LoadedModel loaded;
  loaded.directory = find_weights(*files, path);
  ModelConfig config;
  try {
    config = source_config(*files, loaded.directory);
    validate(config);
  } catch (const Error& error) {
    fail(ExitCode::checkpoint, error.what());
  }
  loaded.device = Device::open(decision.backend);
  loaded.model = std::make_unique<Model>(config, decision.backend, choose_dtype(dtype, decision.backend));

  Arena planned;
  take_constants(planned, *loaded.model);
  take_weights(planned, *loaded.model);
  loaded.memory = Memory::on(decision.backend, planned.used());
  Arena arena(loaded.memory.data());
  take_constants(arena, *loaded.model);
  loaded.parameters = take_weights(arena, *loaded.model);
  std::vector<float> flat(static_cast<size_t>(loaded.model->table.flat_size()));
  read_weights(*files, loaded.directory, loaded.model->table, flat.data());
  set_weights(loaded.device->context(), loaded.parameters, flat.data());
  upload_constants(loaded.device->context(), *loaded.model);
  return loaded;
}

int sample(const SampleConfig& config) {
  const LoadedModel loaded = load_model(config.directory, config.device, config.dtype);
  const ModelConfig& m = loaded.model->config;
  const bool by_ids = !config.prompt_ids.empty();
  if (!by_ids && m.vocab_size != byte_tokenizer()->vocab_size())
    fail(ExitCode::usage,
         "only models of bytes (vocabulary 256) can print text; this one has a vocabulary of ", m.vocab_size,
         ": give --prompt-ids");
  const Context ctx = loaded.device->context();
  SampleOptions options;
  options.max_tokens = config.max_tokens;
  options.temperature = config.temperature;
  options.top_k = config.top_k;
  options.top_p = config.top_p;
  options.seed = static_cast<uint64_t>(config.seed);
  OneRankWeights weights(loaded.model->table, loaded.parameters.weights.whole);
  NoGradients gradients;
  const std::vector<int32_t> prompt =
      by_ids ? parse_ids(config.prompt_ids, m.vocab_size) : sample_prompt(config.prompt);
  const int64_t window = Sampler::window(
      m.max_positions, static_cast<int64_t>(prompt.size()) + std::min(options.max_tokens, m.max_positions));
  const Memory memory = Memory::on(ctx.backend, Sampler::bytes(*loaded.model, 1, window));
  const Sampler sampler(*loaded.model, 1, window, memory.data());
  const std::vector<int32_t> ids = sampler.generate(ctx, {weights, gradients}, prompt, options).front();
  if (by_ids) {
    for (size_t i = 0; i < ids.size(); ++i) std::printf("%s%d", i > 0 ? " " : "", ids[i]);
    std::printf("\n");
    return 0;
  }
  std::printf("%s%s\n", config.prompt.c_str(), printable(byte_tokenizer()->decode(ids)).c_str());
  return 0;
}

void check_tokenizers(const Dataset& data, const std::vector<SmallFile>& tokenizers,
                      const std::string& directory) {
  for (const SmallFile& file : tokenizers) {
    if (file.name != "tokenizer.json") continue;
    ContentHash hash;
    hash.add(file.contents.data(), static_cast<int64_t>(file.contents.size()));
    check_tokenizer(data.state(), hash.hex(), directory);
  }
}

namespace {

/// What to evaluate on where the command does not say: the validation data that the run of a checkpoint had, else what it
/// was trained on. Returns a name for it.
std::string own_data(Files& files, const std::string& directory, EvalConfig& config) {
  if (files.kind(join_path(directory, "trainer/manifest.json")) != Files::Kind::file)
    fail(ExitCode::usage, directory,
         " does not record what it was trained on: say with --val-data on what to evaluate");
  const std::string state = join_path(directory, "trainer/state.json");
  const RunConfig run = resumed_config(CheckpointReader(files, directory).state().settings, state, {});
  config.document_mask |= run.document_mask;
  config.val_data = run.val_data.empty() ? run.data : run.val_data;
  if (config.val_data.empty()) return "the validation stories";
  return run.val_data.empty() ? "what it was trained on" : "the run's validation data";
}

}  // namespace

int eval(EvalConfig config) {
  const std::unique_ptr<Files> files = posix_files();
  std::string name;
  if (config.val_data.empty()) name = own_data(*files, find_weights(*files, config.directory), config);
  const std::vector<DataSource> sources = expand_data(config.val_data);
  for (size_t i = 0; i < config.val_data.size(); ++i)
    name += (name.empty() ? "" : i == 0 ? ", " : " ") + config.val_data[i];
  const LoadedModel loaded = load_model(config.directory, config.device, config.dtype);
  const ModelConfig& m = loaded.model->config;
  RunFacts facts;
  facts.parameters = m.parameter_count();
  facts.max_positions = m.max_positions;
  facts.gpus = find_gpus();
  resolve(config, facts);
  DatasetOptions options;
  options.seq_len = config.seq_len.value();
  options.vocab_size = m.vocab_size;
  options.shuffle = false;
  options.document_mask = config.document_mask;
  options.end_token = m.eos_token;
  const Dataset dataset = sources.empty()
                              ? Dataset::stories(StorySplit::validation, kValidationStoryBytes, options)
                              : Dataset::open(sources, options);
  check_tokenizers(dataset, read_tokenizer_files(*files, loaded.directory), loaded.directory);
  for (const std::string& warning : dataset.warnings())
    std::fprintf(stderr, "train_gpt: warning: %s\n", warning.c_str());

  Context ctx = loaded.device->context();
  const std::unique_ptr<Graphs> graphs = Graphs::on(ctx);
  ctx.graphs = graphs.get();
  const int64_t rows = config.micro_batch.value();
  const WorkShape shape{.batch = rows,
                        .length = options.seq_len,
                        .recompute = Recompute::none,
                        .document_mask = options.document_mask,
                        .training = false,
                        .head_rows = 0};
  Arena planned;
  take_activations(planned, *loaded.model, shape);
  const Memory memory = Memory::on(ctx.backend, planned.used());
  Arena arena(memory.data());
  Activations acts = take_activations(arena, *loaded.model, shape);
  OneRankWeights weights(loaded.model->table, loaded.parameters.weights.whole);
  NoGradients gradients;
  Feed feed(ctx, dataset, rows);
  const EvalResult result = evaluate_dataset(ctx, *loaded.model, acts, {weights, gradients}, feed, dataset,
                                             config.eval_batches, *collectives_self());
  std::printf("%s: validation loss %.6f nats per token over %s tokens of %s (perplexity %.3f)\n",
              loaded.directory.c_str(), result.loss, grouped(result.target_tokens).c_str(), name.c_str(),
              std::exp(result.loss));
  return 0;
}

}  // namespace kinoe
