// What this program computes from a model directory, for test/parity/parity.py to compare with PyTorch.
//
//   parity_dump SOURCE INPUT RESULT [greedy|train]
//
// INPUT (safetensors): tokens [B, T] int32; for `greedy` prompt [P] int32; for `train` targets [B, T] int32 (-1: ignored).
// RESULT: a directory; result.safetensors is written there. logits [B T, V]; with `greedy` the 200 ids that follow the prompt; with
// `train` the mean loss [1], grad.NAME of that mean for every parameter, losses [10] before each of ten AdamW steps on the
// batch, after.NAME once they are made.
#include <cstdio>
#include <cstring>

#include "test/model_harness.h"
#include "trainer/import.h"
#include "trainer/safetensors.h"
#include "trainer/sample.h"

namespace kinoe {
namespace {

constexpr int64_t kSteps = 10, kGreedy = 200;
constexpr double kLearningRate = 1e-3;

/// The tensors of RESULT, in order.
class Result {
 public:
  template <class T>
  void add(const std::string& name, std::vector<int64_t> shape, const T* values, int64_t count) {
    infos_.push_back({name, to_file_dtype(dtype_of<T>), std::move(shape)});
    const char* from = reinterpret_cast<const char*>(values);
    bytes_.emplace_back(from, from + static_cast<size_t>(count) * sizeof(T));
  }
  void write(Files& files, const std::string& directory) const {
    make_directories(files, directory);
    write_safetensors(files, directory, plan_safetensors(infos_, "result"),
                      [&](size_t t, uint64_t offset, void* to, size_t bytes) {
                        std::memcpy(to, bytes_[t].data() + offset, bytes);
                      });
  }

 private:
  std::vector<TensorInfo> infos_;
  std::vector<std::vector<char>> bytes_;
};

std::vector<int32_t> read_ids(const SafetensorsReader& reader, const std::string& name) {
  const TensorPlace* place = reader.find(name);
  if (place == nullptr || place->info.dtype != FileDType::i32)
    fail(ExitCode::usage, "the input must hold '", name, "' as int32");
  std::vector<int32_t> ids(place->bytes / sizeof(int32_t));
  reader.read(*place, 0, ids.data(), place->bytes);
  return ids;
}

void add_logits(ModelRun& run, const std::vector<int32_t>& tokens, Result& result) {
  run.set_batch(tokens, tokens);
  begin_step(run.ctx, run.acts);
  forward(run.ctx, run.model, run.acts, run.hooks());
  const auto n = static_cast<int64_t>(tokens.size());
  const int64_t vocab = run.model.config.vocab_size;
  std::vector<float> all;
  for (int64_t first = 0; first < n; first += run.acts.shape.head_rows) {
    std::vector<int64_t> rows;
    for (int64_t i = first; i < std::min(first + run.acts.shape.head_rows, n); ++i) rows.push_back(i);
    const Tensor logits = head_logits(run.ctx, run.model, run.acts, run.hooks(), rows);
    const std::vector<float> values = run.host<float>(logits);
    for (int64_t i = 0; i < logits.rows(); ++i) {
      const float* row = values.data() + i * logits.columns();
      all.insert(all.end(), row, row + vocab);
    }
  }
  result.add("logits", {n, vocab}, all.data(), n * vocab);
}

void add_greedy(ModelRun& run, const std::vector<int32_t>& prompt, Result& result) {
  const int64_t window = run.model.config.max_positions;
  const Memory memory = Memory::on(run.ctx.backend, Sampler::bytes(run.model, 1, window));
  SampleOptions options;
  options.max_tokens = kGreedy;
  options.temperature = 0;
  const Sampler sampler(run.model, 1, window, memory.data());
  const std::vector<int32_t> ids = sampler.generate(run.ctx, run.hooks(), prompt, options).front();
  result.add("greedy", {static_cast<int64_t>(ids.size())}, ids.data(), static_cast<int64_t>(ids.size()));
}

void add_training(ModelRun& run, const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets,
                  Result& result) {
  const auto nominal = static_cast<double>(tokens.size());
  std::vector<double> losses;
  for (int64_t step = 1; step <= kSteps; ++step) {
    run.micro_batch(tokens, targets, true, nominal);
    const StepState state = run.state();
    const auto counted = static_cast<double>(state.target_tokens);
    losses.push_back(loss_of(state) / counted);
    if (step == 1) {
      // Ours are of the sum over nominal tokens, PyTorch's of the mean over targets.
      std::vector<float> gradient = run.host<float>(run.parameters.gradients.whole);
      for (float& g : gradient) g = static_cast<float>(static_cast<double>(g) * nominal / counted);
      result.add("loss", {1}, losses.data(), 1);
      for (const Parameter& p : run.model.table.parameters())
        result.add("grad." + p.name, p.shape, gradient.data() + p.offset, p.size);
    }
    run.optimizer->update(run.ctx, run.acts, kLearningRate, step, nominal);
  }
  result.add("losses", {kSteps}, losses.data(), kSteps);
  const std::vector<float> masters = run.host<float>(run.parameters.masters);
  for (const Parameter& p : run.model.table.parameters())
    result.add("after." + p.name, p.shape, masters.data() + p.offset, p.size);
}

void dump(const std::string& source, const std::string& input, const std::string& output,
          const std::string& mode) {
  const auto files = posix_files();
  const SafetensorsReader reader(*files, input);
  const std::vector<int32_t> tokens = read_ids(reader, "tokens");
  const std::vector<int64_t>& shape = reader.find("tokens")->info.shape;
  if (shape.size() != 2) fail(ExitCode::usage, "tokens must be [B, T]");
  ModelRun run(Context{}, source_config(*files, source), DType::f32,
               {.batch = shape[0], .length = shape[1], .head_rows = 256},
               {.beta1 = 0.9F, .beta2 = 0.95F, .eps = 1e-8F, .weight_decay = 0.1F, .grad_clip = 1.0});
  std::vector<float> flat(static_cast<size_t>(run.model.table.flat_size()));
  read_weights(*files, source, run.model.table, flat.data());
  run.optimizer->set_masters(run.ctx, flat.data());
  Result result;
  add_logits(run, tokens, result);
  if (mode == "greedy") add_greedy(run, read_ids(reader, "prompt"), result);
  if (mode == "train") add_training(run, tokens, read_ids(reader, "targets"), result);
  result.write(*files, output);
}

}  // namespace
}  // namespace kinoe

int main(int argc, char** argv) {
  try {
    const std::string mode = argc == 5 ? argv[4] : "";
    if (argc < 4 || argc > 5 || (!mode.empty() && mode != "greedy" && mode != "train"))
      kinoe::fail(kinoe::ExitCode::usage, "usage: parity_dump SOURCE INPUT RESULT_DIRECTORY [greedy|train]");
    kinoe::dump(argv[1], argv[2], argv[3], mode);
    return 0;
  } catch (const kinoe::Error& error) {
    std::fprintf(stderr, "parity_dump: %s\n", error.what());
    return static_cast<int>(error.code);
  }
}
