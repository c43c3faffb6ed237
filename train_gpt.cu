// train_gpt: trains, evaluates and samples GPT-class models. Host code only; the kernels are behind kernels/*.h.
//
// Reading order: main() -> train() -> Training::step(), which is the mathematics of one optimizer step in a page.

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "dataloader/dataset.h"
#include "dataloader/loader.h"
#include "dataloader/mapped_file.h"
#include "dataloader/stories.h"
#include "dataloader/tokenizer.h"
#include "trainer/backward.h"
#include "trainer/batch_plan.h"
#include "trainer/checkpoint.h"
#include "trainer/checkpoint_saver.h"
#include "trainer/config.h"
#include "trainer/feed.h"
#include "trainer/files.h"
#include "trainer/flops.h"
#include "trainer/forward.h"
#include "trainer/gemm_choices.h"
#include "trainer/import.h"
#include "trainer/inference.h"
#include "trainer/inspect.h"
#include "trainer/model.h"
#include "trainer/model_config.h"
#include "trainer/monitor.h"
#include "trainer/monitor_device.h"
#include "trainer/one_rank.h"
#include "trainer/optimizer.h"
#include "trainer/resume.h"
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

Data open_data(const RunConfig& config, int64_t schedule_tokens, const std::vector<DataSource>& training,
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
    if (config.tokens_per_step() > kLargestStories / 2)
      fail(ExitCode::usage, "a step of ", config.tokens_per_step(),
           " tokens: on the built-in stories at most ", kLargestStories / 2,
           " are possible; use a smaller --global-batch, or --data");
    const int64_t wanted = std::max(config.tokens_per_step() * 2, std::min(schedule_tokens, kLargestStories));
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
  /// `start`: the state after the last step done.
  Training(const RunConfig& config, const Context& ctx, const Model& model, RunMemory& memory,
           const OptimizerSettings& settings, const Data& data, const TrainingState& start)
      : config_(config),
        ctx_(ctx),
        model_(model),
        memory_(memory),
        plan_(config.global_batch.value(), config.micro_batch.value()),
        weights_(model.table, memory.parameters.weights),
        gradients_(model.table, memory.parameters.gradients),
        optimizer_(model, memory.parameters, settings),
        schedule_{schedule_kind(config.schedule), config.lr.value(), config.min_lr_frac,
                  config.warmup_tokens.value(), start.schedule_tokens},
        start_(start),
        feed_(ctx, *data.training, config.micro_batch.value()),
        results_{StepResult(ctx.backend), StepResult(ctx.backend)} {
    validate(schedule_);
    fill_zero(ctx, memory.acts.state.data, memory.acts.state.bytes());
  }

  /// Random weights from the run's seed, or weights that are put there by somebody else.
  void initialize() const { optimizer_.initialize(ctx_, static_cast<uint64_t>(config_.seed)); }
  void prepare() const { optimizer_.prepare(ctx_); }

  /// Queues one optimizer step on the device. The step before the last must have been finished.
  PendingStep step(int64_t number) {
    PendingStep pending{{}, &results_[static_cast<size_t>(number) % results_.size()]};
    StepRecord& record = pending.record;
    const int64_t consumed = consumed_before(number);
    const auto nominal_tokens = static_cast<double>(config_.tokens_per_step());
    pending.result->began.record(ctx_);

    begin_step(ctx_, memory_.acts);
    const std::vector<MicroBatch> slots = plan_.mine(start_.first_sample + consumed);
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

  /// The hash of the masters as they lie in the device's memory: an update that is gated off writes nothing else.
  uint64_t weights_hash() {
    StepState state;
    state.halted = 1;
    upload(ctx_, memory_.acts.state.data, &state, sizeof(state));
    optimizer_.hash(ctx_, memory_.acts);
    download(ctx_, &state, memory_.acts.state.data, sizeof(state));
    synchronize(ctx_);
    fill_zero(ctx_, memory_.acts.state.data, memory_.acts.state.bytes());
    return state.weights_hash;
  }

 private:
  /// Sequences consumed by this training before step `number`.
  [[nodiscard]] int64_t consumed_before(int64_t number) const {
    return start_.samples + (number - 1 - start_.step) * plan_.global_batch();
  }

  /// Lets the loader's thread prepare what follows slot `i` of `slots`.
  void announce_after(int64_t number, const std::vector<MicroBatch>& slots, size_t i) {
    if (i + 1 < slots.size()) {
      feed_.announce(slots[i + 1].first_sample, slots[i + 1].valid);
    } else if (number < config_.steps.value()) {
      const MicroBatch next = plan_.mine(start_.first_sample + consumed_before(number + 1)).front();
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
  const TrainingState& start_;
  Feed feed_;
  std::array<StepResult, 2> results_;
};

void complete_speed(StepRecord& record, const TokenFlops& flops, const std::optional<Peak>& peak) {
  record.tflops_per_gpu = record.tokens_per_s_per_gpu * flops.causal / 1e12;
  if (peak) {
    record.mfu = record.tokens_per_s_per_gpu * flops.causal / peak->flops;
    record.mfu_full = record.tokens_per_s_per_gpu * flops.full / peak->flops;
  }
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Ends with the memory table printed and a configuration that fits, where this one does not.
void require_memory(const RunConfig& config, const DeviceInfo& device,
                    const std::function<size_t(const RunConfig&)>& bytes_of) {
  const size_t needed = bytes_of(config);
  if (needed <= device.free_bytes) return;
  const Fitting fitting = find_fitting(config, bytes_of, device.free_bytes);
  const std::string begin = cat("this run needs ", mebibytes(needed), " and ", device.name, " has ",
                                mebibytes(device.free_bytes), " free; ");
  if (fitting.fits)
    fail(ExitCode::usage, begin, "it fits with ", fitting.options, " (", mebibytes(fitting.bytes), ")");
  fail(ExitCode::usage, begin,
       fitting.options.empty() ? "it cannot be made smaller"
                               : cat("even with ", fitting.options, " it needs ", mebibytes(fitting.bytes)),
       "; use a smaller model or --seq-len, or a device with more memory");
}

/// The algorithms of matrix products: taken from the user's cache, and kept there and in the run directory.
class GemmRecord {
 public:
  /// `checkpoint`: what a run goes on from, whose choices count more than the cache's; "" for a new run.
  GemmRecord(Files& files, Device& device, std::string run, const std::string& checkpoint)
      : files_(files), device_(device), run_(std::move(run)) {
    if (device.gemm_key().empty()) return;
    std::vector<GemmChoice> known;
    if (!checkpoint.empty())
      known = read_gemm_choices(files, join_path(checkpoint, "trainer/gemm.json"), device.gemm_key());
    if (!gemm_cache_path().empty())
      for (const GemmChoice& cached : read_gemm_choices(files, gemm_cache_path(), device.gemm_key()))
        if (std::none_of(known.begin(), known.end(),
                         [&](const GemmChoice& k) { return k.shape == cached.shape; }))
          known.push_back(cached);
    device.pin_gemm_choices(known);
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

  void print(std::FILE* out) const {
    if (device_.gemm_key().empty()) {
      std::fprintf(out, "matrix products: on a CPU there is one algorithm, nothing is chosen\n");
      return;
    }
    std::fprintf(out, "matrix products, column-major m x n x k, as measured when chosen\n");
    for (const GemmChoice& choice : device_.gemm_choices())
      std::fprintf(out, "  %-64s %9.1f us %7.1f TFLOP/s\n", choice.shape.c_str(), choice.us, choice.tflops);
  }

 private:
  Files& files_;
  Device& device_;
  std::string run_;
  size_t saved_ = 0;
};

/// The checkpoints of a run: what goes into them, and what becomes of each.
class Saving {
 public:
  Saving(Files& files, const Context& ctx, const Model& model, const RunConfig& config,
         const ParameterMemory& memory, size_t buffer_bytes, Monitor& monitor)
      : files_(files),
        run_(config.out),
        monitor_(monitor),
        saver_(files, ctx, model.table, source(memory),
               {.run_directory = config.out,
                .weights = model.dtype,
                .buffer_bytes = buffer_bytes,
                .ranges = {FlatRange{0, model.table.flat_size()}},
                .writers = std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 4, 1, 4),
                .keep = {config.keep, config.keep_every}}) {
    small_files_.push_back(
        {"config.json",
         model_config_to_json(model.config, model.dtype == DType::bf16 ? "bfloat16" : "float32")});
    small_files_.push_back({"generation_config.json", generation_config_json(model.config)});
  }

  static CheckpointSource source(const ParameterMemory& memory) {
    return {memory.masters, memory.m, memory.v};
  }

  /// Files that every checkpoint carries as they are.
  void carry(const std::vector<SmallFile>& more) {
    small_files_.insert(small_files_.end(), more.begin(), more.end());
  }

  void begin(const TrainingState& state) {
    monitor_.sync();
    std::vector<SmallFile> small = small_files_;
    if (const std::string gemms = join_path(run_, "gemm.json"); files_.kind(gemms) == Files::Kind::file)
      small.push_back({"trainer/gemm.json", read_file(files_, gemms)});
    saver_.save(state, small);
  }

  /// Reports what has ended. Three failures in a row end the run: then nobody is looking after its disk.
  void report() {
    while (const std::optional<SaveResult> result = saver_.poll()) report(*result);
  }
  /// The same for a save that must succeed: the last one of the run.
  void finish() {
    while (const std::optional<SaveResult> result = saver_.wait()) report(*result);
    if (failures_ > 0)
      fail(ExitCode::checkpoint, "the last checkpoint could not be written: ", last_error_,
           "; the one before it, if any, is in ", join_path(run_, "checkpoints"));
  }

 private:
  static constexpr int kMostFailures = 3;

  void report(const SaveResult& result) {
    monitor_.record(SaveRecord{.step = result.step,
                               .path = checkpoint_path(run_, result.step),
                               .error = result.error,
                               .save_stall_ms = result.stall_ms,
                               .save_ms = result.write_ms,
                               .save_bytes = static_cast<int64_t>(result.bytes)});
    if (!result.warning.empty()) monitor_.note("warning: " + result.warning);
    failures_ = result.error.empty() ? 0 : failures_ + 1;
    last_error_ = result.error;
    if (failures_ == kMostFailures)
      fail(ExitCode::checkpoint, kMostFailures, " checkpoints in a row could not be written: ", last_error_,
           "; the last good one is in ", join_path(run_, "checkpoints"));
  }

  Files& files_;
  std::string run_;
  Monitor& monitor_;
  CheckpointSaver saver_;
  std::vector<SmallFile> small_files_;
  int failures_ = 0;
  std::string last_error_;
};

OptimizerSettings optimizer_settings(const RunConfig& config) {
  OptimizerSettings settings;
  settings.beta1 = static_cast<float>(config.beta1);
  settings.beta2 = static_cast<float>(config.beta2);
  settings.eps = static_cast<float>(config.eps);
  settings.weight_decay = static_cast<float>(config.weight_decay);
  settings.grad_clip = config.grad_clip;
  settings.moments = config.adam_state;
  settings.seed = static_cast<uint64_t>(config.seed);
  return settings;
}

void print_notes(const std::vector<std::string>& notes) {
  for (const std::string& note : notes) std::fprintf(stderr, "train_gpt: %s\n", note.c_str());
}

void print_warnings(const Data& data, const RunConfig& config) {
  for (const Dataset* d : {&*data.training, data.validation ? &*data.validation : nullptr})
    if (d != nullptr)
      for (const std::string& warning : d->warnings())
        std::fprintf(stderr, "train_gpt: warning: %s\n", warning.c_str());
  const std::vector<double> epochs =
      data.training->epochs(config.steps.value() * config.global_batch.value());
  for (size_t s = 0; s < epochs.size(); ++s)
    if (epochs[s] == 0)
      std::fprintf(stderr,
                   "train_gpt: warning: nothing of '%s' is trained on in this run: its weight of %g is too "
                   "small a share\n",
                   data.training->state().sources[s].name.c_str(), data.training->state().sources[s].weight);
  if (data.validation && data.validation->samples() < config.micro_batch.value())
    std::fprintf(
        stderr, "train_gpt: validation data has %s, fewer than one batch of %s: all of it is evaluated\n",
        counted(data.validation->samples(), "sequence").c_str(), grouped(config.micro_batch.value()).c_str());
}

/// The run directory with what produced the run in it. `from`: the step after which it goes on, 0 for a new run.
void record_run(Files& files, const RunConfig& config, const Device& device, int64_t from, int argc,
                char** argv) {
  in_class(ExitCode::usage, [&] {
    write_file_durably(files, join_path(config.out, "config.toml"), to_toml(without_start_options(config)));
    RunRecord record = make_run_record(argc, argv);
    const DeviceInfo info = device.info();
    record.device = info.name;
    record.driver = info.driver;
    if (const std::optional<GpuHealth> health = device.health()) record.gpu = health_facts(*health);
    record.config = settings_of(config);
    write_file_durably(files,
                       join_path(config.out, from == 0 ? "run.json" : cat("run_from_step_", from, ".json")),
                       to_json(record));
  });
}

/// Of --tokenizer, else those that lie beside the weights the run starts or goes on from.
std::vector<SmallFile> tokenizer_files(Files& files, const std::string& wanted, const std::string& source,
                                       const ResumePoint& from) {
  const std::string beside = from.checkpoint ? from.checkpoint->directory() : source;
  if (wanted.empty()) return beside.empty() ? std::vector<SmallFile>{} : read_tokenizer_files(files, beside);
  std::vector<SmallFile> found = read_tokenizer_files(files, wanted);
  if (found.empty())
    fail(ExitCode::usage, "--tokenizer ", wanted,
         ": holds none of the files of a tokenizer, such as tokenizer.json");
  return found;
}

/// The model of the weights at `source`, where --init-from leads; --model, if given, must be the same.
ModelConfig model_of_weights(Files& files, const std::string& source, const RunConfig& config) {
  const ModelConfig theirs = source_config(files, source);
  if (config.model == config.init_from) return theirs;
  std::string difference = describe_difference(load_model_config(config.model), theirs);
  for (size_t i; (i = difference.find('\n')) != std::string::npos;) difference.replace(i, 1, "; ");
  if (!difference.empty())
    fail(ExitCode::checkpoint, "--model ", config.model, " (here) is not the model of --init-from ",
         config.init_from, " (there): ", difference, "; leave --model out to take theirs");
  return theirs;
}

/// Begins where the run of `checkpoint` had come to in the order of the same data.
void continue_data(const CheckpointReader& checkpoint, TrainingState& state) {
  std::string all;
  for (const std::string& line : describe_change(checkpoint.state().data, state.data))
    all += (all.empty() ? "" : "; ") + line;
  if (!all.empty())
    fail(ExitCode::checkpoint, "--data-start continue: the training data is not that of ",
         checkpoint.directory(), ": ", all, "; leave --data-start out to begin this data anew");
  state.first_sample = checkpoint.state().first_sample + checkpoint.state().samples;
}

/// Weights made elsewhere, from `source` to `flat`, and where in the data's order to begin.
void read_initial_weights(Files& files, const RunConfig& config, const std::string& source,
                          const ParameterTable& table, std::vector<float>& flat, TrainingState& state) {
  flat.resize(static_cast<size_t>(table.flat_size()));
  read_weights(files, source, table, flat.data());
  if (config.data_start != "continue" &&
      files.kind(join_path(source, "trainer/manifest.json")) != Files::Kind::file)
    return;
  // A checkpoint of this program: the masters, which the weights are rounded from, each number checked.
  const CheckpointReader checkpoint(files, source);
  checkpoint.check_tensors(table);
  checkpoint.read(Section::masters, table, 0, table.flat_size(), flat.data());
  if (config.data_start == "continue") continue_data(checkpoint, state);
}

int train(const CommandLine& command, int argc, char** argv) {
  const std::unique_ptr<Files> files = posix_files();
  const ResumePoint from = find_resume_point(*files, command.run);
  TrainingState state;
  RunConfig config = command.run;
  if (from.checkpoint) {
    state = from.checkpoint->state();
    config = resumed_config(state.settings, join_path(from.checkpoint->directory(), "trainer/state.json"),
                            command.given);
  }
  config.out = from.run_directory;

  // Model and data decide the defaults.
  const std::vector<DataSource> training_files = expand_data(config.data);
  const bool model_given = !command.run.model.empty();
  const std::string source =
      from.checkpoint || config.init_from.empty() ? "" : find_weights(*files, config.init_from);
  if (config.model.empty() && !config.init_from.empty()) config.model = config.init_from;
  if (config.model.empty()) {
    if (!byte_tokens(training_files))
      fail(ExitCode::usage,
           "token shards need a model of their vocabulary: give --model, for instance gpt2-124m");
    config.model = on_stories(config) ? "tiny" : "small";
  }
  const ModelConfig model_config = from.checkpoint && !model_given ? from.checkpoint->model()
                                   : !source.empty()               ? model_of_weights(*files, source, config)
                                                                   : load_model_config(config.model);
  validate(model_config);
  if (from.checkpoint) from.checkpoint->check_model(model_config, ParameterTable(model_config));
  const std::vector<DataSource> validation_files = expand_data(config.val_data);
  check_validation_apart(training_files, validation_files);
  RunFacts facts;
  facts.parameters = model_config.parameter_count();
  facts.max_positions = model_config.max_positions;
  facts.byte_tokens = byte_tokens(training_files);
  facts.has_validation = on_stories(config) || !validation_files.empty();
  facts.gpus = find_gpus();
  facts.schedule_tokens = state.schedule_tokens;
  std::vector<std::string> notes = from.notes;
  for (const std::string& note : resolve(config, facts)) notes.push_back(note);
  if (from.checkpoint)
    reconcile(config, state, notes);
  else
    state.schedule_tokens = config.total_tokens();
  const Data data = open_data(config, state.schedule_tokens, training_files, validation_files, model_config);
  if (from.checkpoint)
    reconcile_data(config, state, data.training->state(), notes);
  else
    state.data = data.training->state();
  state.settings = settings_of(config);

  const std::unique_ptr<Device> device =
      Device::open(config.device == DeviceChoice::cuda ? Backend::cuda : Backend::cpu);
  Context ctx = device->context();
  const DeviceInfo info = device->info();
  const size_t held_before = device->memory_use().bytes;
  Model model(model_config, ctx.backend, config.dtype.value());
  const OptimizerSettings optimizer = optimizer_settings(config);

  // The plan, before anything large exists.
  const bool with_eval = data.validation.has_value();
  Arena planned;
  const RunMemory planned_memory = take_memory(planned, model, config, optimizer, with_eval);
  const size_t save_bytes = CheckpointSaver::planned_buffer_bytes(
      Saving::source(planned_memory.parameters), ctx.backend == Backend::cpu ? planned.used() : 0);
  const auto feed_bytes = [&](const RunConfig& c) {
    return Loader::buffer_bytes(c.micro_batch.value(), c.seq_len.value(), c.document_mask) *
           (with_eval ? 2 : 1);
  };
  // In JSON, standard output is for records alone.
  std::FILE* tables = config.log_format == "json" ? stderr : stdout;
  print_run(tables, config, model_config, info, *data.training, with_eval ? &*data.validation : nullptr);
  const MemoryPlan memory_plan =
      plan_memory(planned, *device, held_before,
                  {{"data buffers (host)", feed_bytes(config)}, {"checkpoint buffers (host)", save_bytes}});
  print_memory(tables, memory_plan);
  print_warnings(data, config);
  print_notes(notes);
  require_memory(config, info, [&](const RunConfig& other) {
    Arena arena;
    OptimizerSettings settings = optimizer;
    settings.moments = other.adam_state;
    take_memory(arena, model, other, settings, with_eval);
    return arena.used() + (ctx.backend == Backend::cpu ? feed_bytes(other) : 0);
  });
  std::fflush(stdout);
  const std::vector<SmallFile> tokenizers = tokenizer_files(*files, command.run.tokenizer, source, from);
  for (const Dataset* d : {&*data.training, with_eval ? &*data.validation : nullptr})
    if (d != nullptr)
      check_tokenizers(*d, tokenizers,
                       !command.run.tokenizer.empty() ? command.run.tokenizer
                       : from.checkpoint              ? from.checkpoint->directory()
                                                      : source);
  if (config.dry_run) return 0;

  std::vector<float> initial;  // read before anything is written: it may not fit
  if (!source.empty()) read_initial_weights(*files, config, source, model.table, initial, state);
  const uint64_t checkpoint_bytes =
      plan_checkpoint(model.table, model.dtype, planned_memory.parameters.m.dtype, 0).bytes();
  config.out = prepare_run_directory(*files, {.path = config.out,
                                              .resume = command.run.resume != "never",
                                              .needed_bytes = checkpoint_bytes + (uint64_t{1} << 20)});
  const RunLock lock(config.out);
  print_notes(claim_run(*files, config.out, from));
  record_run(*files, config, *device, state.step, argc, argv);
  remove_unfinished_checkpoints(*files, config.out);

  GemmRecord gemms(*files, *device, config.out, from.checkpoint ? from.checkpoint->directory() : "");
  const Memory memory = Memory::on(ctx.backend, planned.used());
  Arena arena(memory.data());
  RunMemory run_memory = take_memory(arena, model, config, optimizer, with_eval);
  const std::unique_ptr<Graphs> graphs = Graphs::on(ctx);
  ctx.graphs = graphs.get();
  upload_constants(ctx, model);
  Training training(config, ctx, model, run_memory, optimizer, data, state);
  if (from.checkpoint) {
    training.prepare();
    const auto began = std::chrono::steady_clock::now();
    load_parameters(ctx, *from.checkpoint, model.table, run_memory.parameters);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    print_notes({cat("going on from ", from.checkpoint->directory(), ": ", mebibytes(checkpoint_bytes),
                     " read and checked in ", std::round(took.count() * 100) / 100, " s")});
    if (training.weights_hash() != state.weights_hash)
      fail(ExitCode::checkpoint, from.checkpoint->directory(),
           ": the weights in memory are not those of step ", state.step, " (their hash differs)");
  } else if (!source.empty()) {
    training.prepare();
    set_parameters(ctx, run_memory.parameters, initial.data());
    synchronize(ctx);
    std::vector<float>().swap(initial);
  } else {
    training.initialize();
  }
  std::optional<Feed> eval_feed;
  if (with_eval) eval_feed.emplace(ctx, *data.validation, config.micro_batch.value());

  const TokenFlops flops = training_flops(model_config, config.seq_len.value());
  const std::optional<Peak> peak = peak_flops(info.name, model.dtype);
  const int64_t steps = config.steps.value(), stop = std::min(steps, config.stop_after.value_or(steps));
  Monitor::Options options;
  options.metrics_path = join_path(config.out, "metrics.jsonl");
  options.format = parse_log_format(config.log_format).value();
  options.total_steps = steps;
  options.first_step = state.step + 1;
  options.skipped = state.skipped;
  options.nan = state.nan;
  if (const int64_t cut = cut_metrics(options.metrics_path, state.step); cut > 0)
    print_notes({cat("records of steps after ", state.step, " are cut off metrics.jsonl: ", cut,
                     "; those steps are run again")});
  Monitor monitor(options);
  Saving saving(*files, ctx, model, config, run_memory.parameters, save_bytes, monitor);
  saving.carry(tokenizers);
  DeviceWatch watch(*device, memory_plan.total);

  const auto report = [&](const PendingStep& pending) {
    StepRecord record = training.finish(pending);
    complete_speed(record, flops, peak);
    watch.look(now_seconds());
    record.mem_bytes = static_cast<int64_t>(watch.memory().bytes);
    record.mem_peak_bytes = static_cast<int64_t>(watch.memory().peak_bytes);
    record = monitor.record(record);
    if (!record.applied && record.nan > state.nan) {
      monitor.finish();
      fail(ExitCode::diverged, "step ", record.step, ": loss ", record.loss, ", gradient norm ",
           record.grad_norm,
           ": not finite, so the update was not applied and the run ends; try a lower --lr or a longer "
           "warm-up; checkpoints are in ",
           join_path(config.out, "checkpoints"));
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
  const auto save = [&](const StepRecord& at) {
    TrainingState now = state;
    now.step = at.step;
    now.samples = at.samples;
    now.tokens = at.tokens;
    now.skipped = at.skipped;
    now.nan = at.nan;
    now.weights_hash = at.weights_hash;
    saving.begin(now);
  };

  const auto due = [](int64_t every, int64_t step) { return every > 0 && step % every == 0; };
  std::deque<PendingStep> pending;
  for (int64_t step = state.step + 1; step <= stop; ++step) {
    pending.push_back(training.step(step));
    if (step == state.step + 1) {
      gemms.save();
      if (config.gemm_trace) gemms.print(tables);
    }
    const bool stop_here = step == stop || due(*config.eval_every, step) || due(*config.save_every, step) ||
                           due(*config.sample_every, step);
    StepRecord last;
    while (pending.size() > (stop_here ? 0 : 1)) {
      last = report(pending.front());
      pending.pop_front();
    }
    if (due(*config.save_every, step) || step == stop) save(last);
    if (due(*config.eval_every, step) && step < steps) evaluate(last, config.eval_batches);
    if (due(*config.sample_every, step))
      monitor.note("sample: " + sample_text(device->context(), model, training.hooks(), run_memory.sampling,
                                            config.seq_len.value(), static_cast<uint64_t>(step),
                                            on_stories(config)));
    if (step == steps && with_eval) {
      const EvalResult result = evaluate(last, on_stories(config) ? 0 : config.eval_batches);
      monitor.finish();
      if (on_stories(config)) {
        std::fprintf(tables, "validation loss %.4f  entropy %.4f  nats/byte\n", result.loss,
                     entropy_per_byte());
      } else {
        std::fprintf(tables, "validation loss %.4f nats per token\n", result.loss);
      }
    }
    saving.report();
  }
  gemms.save();
  saving.finish();
  for (const std::string& finding : watch.findings()) monitor.note(finding);
  monitor.finish();
  if (stop < steps) {
    const int64_t done = std::max(stop, state.step);  // asked for what had been done: nothing to do
    std::fprintf(tables, "stopped after step %lld of %lld; checkpoint %s\n", static_cast<long long>(done),
                 static_cast<long long>(steps), checkpoint_path(config.out, done).c_str());
    return static_cast<int>(ExitCode::stopped);
  }

  LossCurveStyle style;
  style.title = cat(config.model, ", ", grouped(config.total_tokens()), " tokens");
  if (facts.byte_tokens) style.y_label = "loss (nats per byte)";
  if (on_stories(config)) {
    style.reference = entropy_per_byte();
    char label[64];
    std::snprintf(label, sizeof(label), "entropy of the stories %.3f", entropy_per_byte());
    style.reference_label = label;
  }
  const std::string picture = join_path(config.out, "loss.svg");
  write_loss_curve(picture, read_loss_history(options.metrics_path), style);
  std::fprintf(tables, "checkpoint %s\nloss curve %s\n", checkpoint_path(config.out, steps).c_str(),
               picture.c_str());
  return 0;
}

int run(int argc, char** argv) {
  const CommandLine command = parse_command_line(argc, argv);
  int code = 0;
  switch (command.action) {
    case Action::help: std::printf("%s", command.text.c_str()); break;
    case Action::sample: code = sample(command.sample); break;
    case Action::eval: code = eval(command.eval); break;
    case Action::inspect: code = inspect(command.inspect); break;
    case Action::train: return train(command, argc, argv);
  }
  // What was asked for is on standard output alone. That its reader has seen enough (a closed pipe) is no fault.
  errno = 0;
  if (code == 0 && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) && errno != EPIPE)
    fail(ExitCode::usage, "standard output cannot be written: ", std::generic_category().message(errno),
         "; give it another place");
  return code;
}

}  // namespace
}  // namespace kinoe

int main(int argc, char** argv) {
  kinoe::end_on_truncation();
  std::signal(SIGPIPE, SIG_IGN);  // a closed pipe must not end a run: train_gpt | head
  std::signal(SIGXFSZ, SIG_IGN);  // nor a file beyond ulimit -f: the write fails and says so
  try {
    return kinoe::run(argc, argv);
  } catch (const kinoe::Error& error) {
    std::fflush(stdout);  // what was said before the error comes before it
    std::fprintf(stderr, "train_gpt: error: %s\n", kinoe::one_line(error.what()).c_str());
    return static_cast<int>(error.code);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr,
                 "train_gpt: error: out of host memory; use a smaller model, batch or sequence length\n");
    return static_cast<int>(kinoe::ExitCode::usage);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt: internal error: %s\n", error.what());
    return static_cast<int>(kinoe::ExitCode::internal);
  }
}
