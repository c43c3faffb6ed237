// train_gpt: trains, evaluates and samples GPT-class models. Host code only; the kernels are behind kernels/*.h.
//
// Reading order: main() -> train() -> Training::step(), which is the mathematics of one optimizer step in a page.

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dataloader/dataset.h"
#include "dataloader/mapped_file.h"
#include "dataloader/stories.h"
#include "trainer/backward.h"
#include "trainer/batch_plan.h"
#include "trainer/checkpoint.h"
#include "trainer/config.h"
#include "trainer/feed.h"
#include "trainer/files.h"
#include "trainer/flops.h"
#include "trainer/forward.h"
#include "trainer/gemm_choices.h"
#include "trainer/inference.h"
#include "trainer/model.h"
#include "trainer/model_config.h"
#include "trainer/monitor.h"
#include "trainer/one_rank.h"
#include "trainer/optimizer.h"
#include "trainer/sample.h"
#include "trainer/schedule.h"
#include "trainer/tables.h"

namespace kinoe {
namespace {

constexpr int64_t kLargestStories = int64_t{64} << 20;  // a longer run on the stories sees them again

// ---- Data ------------------------------------------------------------------------------------------------------------

struct Data {
  std::optional<Dataset> training;
  std::optional<Dataset> validation;
};

bool on_stories(const RunConfig& config) { return config.data.empty(); }

/// Plain text and the stories have byte tokens: what the model writes can be printed.
bool byte_tokens(const std::vector<DataSource>& sources) {
  if (sources.empty()) return true;
  return detect_format(sources.front().files.front()) == TokenFormat::text;
}

Data open_data(const RunConfig& config, const std::vector<DataSource>& training,
               const std::vector<DataSource>& validation, const ModelConfig& model) {
  DatasetOptions options;
  options.seq_len = config.seq_len.value();
  options.vocab_size = model.vocab_size;
  options.seed = static_cast<uint64_t>(config.seed);
  options.min_samples = config.global_batch.value();
  options.document_mask = config.document_mask;
  options.end_token = model.eos_token;
  DatasetOptions held_out = options;
  held_out.min_samples = 1;
  held_out.shuffle = false;

  Data data;
  if (on_stories(config)) {
    const int64_t wanted =
        std::max(config.tokens_per_step() * 2, std::min(config.total_tokens(), kLargestStories));
    data.training = Dataset::stories(StorySplit::training, wanted, options);
  } else {
    data.training = Dataset::open(training, options);
  }
  if (!validation.empty())
    data.validation = Dataset::open(validation, held_out);
  else if (on_stories(config))
    data.validation = Dataset::stories(StorySplit::validation, kValidationStoryBytes, held_out);
  return data;
}

// ---- Training --------------------------------------------------------------------------------------------------------

/// All device memory of a run, from one arena.
struct RunMemory {
  ParameterMemory parameters;
  Activations acts;
  std::optional<Activations> eval;
  Tensor sampling;
};

RunMemory take_memory(Arena& arena, Model& model, const RunConfig& config, const OptimizerSettings& optimizer,
                      bool with_eval) {
  RunMemory memory;
  take_constants(arena, model);
  memory.parameters = take_parameters(arena, model, &optimizer);
  WorkShape shape;
  shape.batch = config.micro_batch.value();
  shape.length = config.seq_len.value();
  shape.recompute = config.recompute == "block"   ? Recompute::block
                    : config.recompute == "light" ? Recompute::light
                                                  : Recompute::none;
  shape.document_mask = config.document_mask;
  memory.acts = take_activations(arena, model, shape);
  if (with_eval) {
    shape.training = false;
    memory.eval = take_activations(arena, model, shape);
  }
  if (config.sample_every.value() > 0)
    memory.sampling = arena.take(
        "sampling", DType::i32, {static_cast<int64_t>(Sampler::bytes(model, 1, config.seq_len.value()) / 4)});
  return memory;
}

/// What comes back from the device about a step. Made once: page-locking and freeing memory wait for the device.
struct StepResult {
  explicit StepResult(Backend backend)
      : began(backend), ended(backend), state(Memory::pinned(backend, sizeof(StepState))) {}
  Event began, ended;
  Memory state;
};

/// A step on its way; read one step late, so that the device never waits for the host.
struct PendingStep {
  StepRecord record;
  StepResult* result = nullptr;
};

class Training {
 public:
  Training(const RunConfig& config, const Context& ctx, const Model& model, RunMemory& memory,
           const OptimizerSettings& settings, const Data& data)
      : config_(config),
        ctx_(ctx),
        model_(model),
        memory_(memory),
        plan_(config.global_batch.value(), config.micro_batch.value()),
        weights_(model.table, memory.parameters.weights),
        gradients_(model.table, memory.parameters.gradients),
        optimizer_(model, memory.parameters, settings),
        schedule_{schedule_kind(config.schedule), config.lr.value(), config.min_lr_frac,
                  config.warmup_tokens.value(), config.total_tokens()},
        feed_(ctx, *data.training, config.micro_batch.value()),
        results_{StepResult(ctx.backend), StepResult(ctx.backend)} {
    validate(schedule_);
    optimizer_.initialize(ctx, static_cast<uint64_t>(config.seed));
    fill_zero(ctx, memory.acts.state.data, memory.acts.state.bytes());
  }

  /// Queues one optimizer step on the device. The step before the last must have been finished.
  PendingStep step(int64_t number) {
    PendingStep pending{{}, &results_[static_cast<size_t>(number) % results_.size()]};
    StepRecord& record = pending.record;
    const int64_t consumed = (number - 1) * plan_.global_batch();
    const auto nominal_tokens = static_cast<double>(config_.tokens_per_step());
    pending.result->began.record(ctx_);

    begin_step(ctx_, memory_.acts);
    const std::vector<MicroBatch> slots = plan_.mine(consumed);
    for (size_t i = 0; i < slots.size(); ++i) {
      record.data_wait_ms += feed_.put(memory_.acts.batch, slots[i].first_sample, slots[i].valid);
      announce_after(number, slots, i);
      gradients_.begin_micro_batch(i == 0);
      forward(ctx_, model_, memory_.acts, hooks());
      backward(ctx_, model_, memory_.acts, hooks(), nominal_tokens);
    }
    record.step = number;
    record.samples = consumed + plan_.global_batch();
    record.tokens = record.samples * config_.seq_len.value();
    record.lr = schedule_.at(record.tokens);
    optimizer_.update(ctx_, memory_.acts, record.lr, number, nominal_tokens);

    download(ctx_, pending.result->state.data(), memory_.acts.state.data, sizeof(StepState));
    pending.result->ended.record(ctx_);
    return pending;
  }

  /// Waits for a step and completes its record. A step that was not finite ends the run: nothing of it was applied.
  StepRecord finish(const PendingStep& pending) const {
    const StepResult& result = *pending.result;
    result.ended.wait();
    StepState state;
    std::memcpy(&state, result.state.data(), sizeof(state));
    StepRecord record = pending.record;
    if (state.bad_token != 0)
      fail(ExitCode::data, "step ", record.step, ": a token id is not below the vocabulary size of ",
           model_.config.vocab_size, "; use data made with this model's tokenizer");
    record.loss = state.loss_sum / static_cast<double>(std::max<int64_t>(1, state.target_tokens));
    record.grad_norm = state.grad_norm;
    record.weights_hash = state.weights_hash;
    record.applied = state.halted == 0 && state.skipped == 0;
    record.global_batch = plan_.global_batch();
    record.seq_len = config_.seq_len.value();
    record.step_ms = result.ended.ms_since(result.began);
    record.compute_ms = record.step_ms - record.data_wait_ms;
    record.tokens_per_s = static_cast<double>(config_.tokens_per_step()) / (record.step_ms / 1e3);
    record.tokens_per_s_per_gpu = record.tokens_per_s;
    return record;
  }

  LayerHooks hooks() { return {weights_, gradients_}; }
  [[nodiscard]] const ParameterMemory& parameters() const { return memory_.parameters; }

 private:
  /// Lets the loader's thread prepare what follows slot `i` of `slots`.
  void announce_after(int64_t number, const std::vector<MicroBatch>& slots, size_t i) {
    if (i + 1 < slots.size()) {
      feed_.announce(slots[i + 1].first_sample, slots[i + 1].valid);
    } else if (number < config_.steps.value()) {
      const MicroBatch next = plan_.mine(number * plan_.global_batch()).front();
      feed_.announce(next.first_sample, next.valid);
    }
  }

  const RunConfig& config_;
  Context ctx_;
  const Model& model_;
  RunMemory& memory_;
  BatchPlan plan_;
  OneRankWeights weights_;
  OneRankGradients gradients_;
  Optimizer optimizer_;
  Schedule schedule_;
  Feed feed_;
  std::array<StepResult, 2> results_;
};

void complete_speed(StepRecord& record, const TokenFlops& flops, const std::optional<Peak>& peak,
                    size_t bytes) {
  record.tflops_per_gpu = record.tokens_per_s_per_gpu * flops.causal / 1e12;
  if (peak) {
    record.mfu = record.tokens_per_s_per_gpu * flops.causal / peak->flops;
    record.mfu_full = record.tokens_per_s_per_gpu * flops.full / peak->flops;
  }
  record.mem_bytes = static_cast<int64_t>(bytes);
  record.mem_peak_bytes = static_cast<int64_t>(bytes);
}

/// The algorithms of matrix products: taken from the user's cache, and kept there and in the run directory.
class GemmRecord {
 public:
  GemmRecord(Files& files, Device& device, std::string run)
      : files_(files), device_(device), run_(std::move(run)) {
    if (device.gemm_key().empty() || gemm_cache_path().empty()) return;
    device.pin_gemm_choices(read_gemm_choices(files, gemm_cache_path(), device.gemm_key()));
  }

  /// Writes what is new. A cache that cannot be written costs the next start some seconds, no more.
  void save() {
    const std::vector<GemmChoice> choices = device_.gemm_choices();
    if (choices.size() == saved_) return;
    saved_ = choices.size();
    write_gemm_choices(files_, join_path(run_, "gemm.json"), device_.gemm_key(), choices);
    try {
      if (!gemm_cache_path().empty())
        write_gemm_choices(files_, gemm_cache_path(), device_.gemm_key(), choices);
    } catch (const FileError& error) {
      std::fprintf(stderr, "train_gpt: warning: the cache of matrix-product algorithms was not written: %s\n",
                   error.what());
    }
  }

  void print() const {
    std::printf("matrix products, column-major m x n x k, as measured when chosen\n");
    for (const GemmChoice& choice : device_.gemm_choices())
      std::printf("  %-64s %9.1f us %7.1f TFLOP/s\n", choice.shape.c_str(), choice.us, choice.tflops);
  }

 private:
  Files& files_;
  Device& device_;
  std::string run_;
  size_t saved_ = 0;
};

int train(RunConfig config, int argc, char** argv) {
  // Model and data decide the defaults.
  const std::vector<DataSource> training_files = expand_data(config.data);
  if (config.model.empty()) {
    if (!byte_tokens(training_files))
      fail(ExitCode::usage,
           "token shards need a model of their vocabulary: give --model, for instance gpt2-124m");
    config.model = on_stories(config) ? "tiny" : "small";
  }
  const ModelConfig model_config = load_model_config(config.model);
  validate(model_config);
  const std::vector<DataSource> validation_files = expand_data(config.val_data);
  check_validation_apart(training_files, validation_files);
  RunFacts facts;
  facts.parameters = model_config.parameter_count();
  facts.max_positions = model_config.max_positions;
  facts.byte_tokens = byte_tokens(training_files);
  facts.has_validation = on_stories(config) || !validation_files.empty();
  facts.gpus = find_gpus();
  const std::vector<std::string> notes = resolve(config, facts);
  const Data data = open_data(config, training_files, validation_files, model_config);

  const std::unique_ptr<Device> device =
      Device::open(config.device == DeviceChoice::cuda ? Backend::cuda : Backend::cpu);
  Context ctx = device->context();
  const DeviceInfo info = device->info();
  Model model(model_config, ctx.backend, config.dtype.value());
  OptimizerSettings optimizer;
  optimizer.beta1 = static_cast<float>(config.beta1);
  optimizer.beta2 = static_cast<float>(config.beta2);
  optimizer.eps = static_cast<float>(config.eps);
  optimizer.weight_decay = static_cast<float>(config.weight_decay);
  optimizer.grad_clip = config.grad_clip;
  optimizer.moments = config.adam_state;
  optimizer.seed = static_cast<uint64_t>(config.seed);

  // The plan, before anything large exists.
  const bool with_eval = data.validation.has_value();
  Arena planned;
  take_memory(planned, model, config, optimizer, with_eval);
  const size_t host_bytes =
      Loader::buffer_bytes(config.micro_batch.value(), config.seq_len.value(), config.document_mask) *
      (with_eval ? 2 : 1);
  print_run(config, model_config, info, *data.training, with_eval ? &*data.validation : nullptr);
  print_memory(planned, host_bytes);
  for (const Dataset* d : {&*data.training, with_eval ? &*data.validation : nullptr})
    if (d != nullptr)
      for (const std::string& warning : d->warnings())
        std::fprintf(stderr, "train_gpt: warning: %s\n", warning.c_str());
  for (const std::string& note : notes) std::fprintf(stderr, "train_gpt: %s\n", note.c_str());
  if (with_eval && data.validation->samples() < config.micro_batch.value())
    std::fprintf(
        stderr, "train_gpt: validation data has %s, fewer than one batch of %s: all of it is evaluated\n",
        counted(data.validation->samples(), "sequence").c_str(), grouped(config.micro_batch.value()).c_str());
  if (planned.used() > info.free_bytes)
    fail(ExitCode::usage, "this run needs ", mebibytes(planned.used()), " and ", info.name, " has ",
         mebibytes(info.free_bytes),
         " free; use a smaller --micro-batch, --recompute block, or a smaller model");
  std::fflush(stdout);
  if (config.dry_run) return 0;

  const std::unique_ptr<Files> files = posix_files();
  const std::string run = prepare_run_directory(
      *files,
      {.path = config.out, .resume = false, .needed_bytes = checkpoint_bytes(model.table, model.dtype)});
  config.out = run;
  in_class(ExitCode::usage, [&] {
    write_file_durably(*files, join_path(run, "config.toml"), to_toml(config));
    RunRecord record = make_run_record(argc, argv);
    record.device = info.name;
    record.driver = info.driver;
    write_file_durably(*files, join_path(run, "run.json"), to_json(record));
  });

  GemmRecord gemms(*files, *device, run);
  const Memory memory = Memory::on(ctx.backend, planned.used());
  Arena arena(memory.data());
  RunMemory run_memory = take_memory(arena, model, config, optimizer, with_eval);
  const std::unique_ptr<Graphs> graphs = Graphs::on(ctx);
  ctx.graphs = graphs.get();
  upload_constants(ctx, model);
  Training training(config, ctx, model, run_memory, optimizer, data);
  std::optional<Feed> eval_feed;
  if (with_eval) eval_feed.emplace(ctx, *data.validation, config.micro_batch.value());

  const TokenFlops flops = training_flops(model_config, config.seq_len.value());
  const std::optional<Peak> peak = peak_flops(info.name, model.dtype);
  Monitor::Options options;
  options.metrics_path = join_path(run, "metrics.jsonl");
  options.format = parse_log_format(config.log_format).value();
  options.total_steps = config.steps.value();
  Monitor monitor(options);

  const auto report = [&](const PendingStep& pending) {
    StepRecord record = training.finish(pending);
    complete_speed(record, flops, peak, planned.used());
    record = monitor.record(record);
    if (!record.applied && record.nan > 0) {
      monitor.finish();
      fail(ExitCode::diverged, "step ", record.step, ": loss ", record.loss, ", gradient norm ",
           record.grad_norm,
           ": not finite, so the update was not applied and the run ends; try a lower --lr or a longer "
           "warm-up, the last "
           "checkpoint is in ",
           run);
    }
    return record;
  };
  const auto evaluate = [&](const StepRecord& at, int64_t batches) {
    Event began(ctx.backend), ended(ctx.backend);
    began.record(ctx);
    const EvalResult result = evaluate_dataset(ctx, model, *run_memory.eval, training.hooks(), *eval_feed,
                                               *data.validation, batches);
    ended.record(ctx);
    ended.wait();
    EvalRecord record;
    record.step = at.step;
    record.samples = at.samples;
    record.tokens = at.tokens;
    record.val_loss = result.loss;
    record.val_tokens = result.target_tokens;
    record.eval_ms = ended.ms_since(began);
    monitor.record(record);
    return result;
  };

  const int64_t steps = config.steps.value();
  const auto due = [](int64_t every, int64_t step) { return every > 0 && step % every == 0; };
  std::deque<PendingStep> pending;
  for (int64_t step = 1; step <= steps; ++step) {
    pending.push_back(training.step(step));
    if (step == 1) {
      gemms.save();
      if (config.gemm_trace) gemms.print();
    }
    const bool stop_here = step == steps || due(*config.eval_every, step) || due(*config.save_every, step) ||
                           due(*config.sample_every, step);
    StepRecord last;
    while (pending.size() > (stop_here ? 0 : 1)) {
      last = report(pending.front());
      pending.pop_front();
    }
    if (due(*config.eval_every, step) && step < steps) evaluate(last, config.eval_batches);
    if (due(*config.sample_every, step))
      monitor.note("sample: " + sample_text(device->context(), model, training.hooks(), run_memory.sampling,
                                            config.seq_len.value(), static_cast<uint64_t>(step),
                                            on_stories(config)));
    if (due(*config.save_every, step) || step == steps)
      write_checkpoint(*files, run, step, ctx, model_config, model.table, training.parameters().weights);
    if (step == steps && with_eval) {
      const EvalResult result = evaluate(last, on_stories(config) ? 0 : config.eval_batches);
      monitor.finish();
      if (on_stories(config)) {
        std::printf("validation loss %.4f  entropy %.4f  nats/byte\n", result.loss, entropy_per_byte());
      } else {
        std::printf("validation loss %.4f nats per token\n", result.loss);
      }
    }
  }
  monitor.finish();
  gemms.save();

  LossCurveStyle style;
  style.title = cat(config.model, ", ", grouped(config.total_tokens()), " tokens");
  if (facts.byte_tokens) style.y_label = "loss (nats per byte)";
  if (on_stories(config)) {
    style.reference = entropy_per_byte();
    char label[64];
    std::snprintf(label, sizeof(label), "entropy of the stories %.3f", entropy_per_byte());
    style.reference_label = label;
  }
  const std::string picture = join_path(run, "loss.svg");
  write_loss_curve(picture, read_loss_history(options.metrics_path), style);
  std::printf("checkpoint %s\nloss curve %s\n", checkpoint_path(run, steps).c_str(), picture.c_str());
  return 0;
}

int run(int argc, char** argv) {
  const CommandLine command = parse_command_line(argc, argv);
  switch (command.action) {
    case Action::help: std::printf("%s", command.text.c_str()); return 0;
    case Action::sample: return sample(command.sample);
    case Action::eval: return eval(command.eval);
    case Action::train: return train(command.run, argc, argv);
  }
  return 0;
}

}  // namespace
}  // namespace kinoe

int main(int argc, char** argv) {
  kinoe::end_on_truncation();
  std::signal(SIGPIPE, SIG_IGN);  // a closed pipe must not end a run: train_gpt | head
  try {
    return kinoe::run(argc, argv);
  } catch (const kinoe::Error& error) {
    std::fprintf(stderr, "train_gpt: error: %s\n", error.what());
    return static_cast<int>(error.code);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt: internal error: %s\n", error.what());
    return static_cast<int>(kinoe::ExitCode::internal);
  }
}
