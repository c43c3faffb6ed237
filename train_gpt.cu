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
#include "kernels/cast.h"
#include "trainer/backward.h"
#include "trainer/batch_plan.h"
#include "trainer/channel.h"
#include "trainer/checkpoint.h"
#include "trainer/config.h"
#include "trainer/feed.h"
#include "trainer/files.h"
#include "trainer/flops.h"
#include "trainer/forward.h"
#include "trainer/gemm_choices.h"
#include "trainer/inference.h"
#include "trainer/inspect.h"
#include "trainer/model.h"
#include "trainer/model_config.h"
#include "trainer/monitor.h"
#include "trainer/monitor_device.h"
#include "trainer/one_rank.h"
#include "trainer/optimizer.h"
#include "trainer/resume.h"
#include "trainer/run_setup.h"
#include "trainer/sample.h"
#include "trainer/saving.h"
#include "trainer/schedule.h"
#include "trainer/tables.h"

namespace kinoe {
namespace {

// ---- Training --------------------------------------------------------------------------------------------------------

constexpr uint64_t kSmallFileBytes = uint64_t{1} << 20;  // of a checkpoint besides its tensors

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
    record.loss = loss_of(state) / static_cast<double>(std::max<int64_t>(1, state.target_tokens));
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

/// Memory of a run in the table's words, and whether it is there.
MemoryPlan check_memory(std::FILE* out, const RunSetup& setup, Model& model, const Device& device,
                        size_t held_before, const Arena& planned, size_t save_bytes) {
  const bool with_eval = setup.data.validation.has_value();
  const DeviceInfo info = device.info();
  const auto feed_bytes = [&](const RunConfig& c) {
    return Loader::buffer_bytes(c.micro_batch.value(), c.seq_len.value(), c.document_mask) *
           (with_eval ? 2 : 1);
  };
  print_run(out, setup.config, setup.model, info, *setup.data.training,
            with_eval ? &*setup.data.validation : nullptr);
  std::vector<Arena::Group> host = {{"data buffers (host)", feed_bytes(setup.config)}};
  if (save_bytes > 0) host.push_back({"checkpoint buffers (host)", save_bytes});
  MemoryPlan plan = plan_memory(planned, device, held_before, host);
  print_memory(out, plan);
  for (const std::string& warning : setup.warnings) print_notes({"warning: " + warning});
  print_notes(setup.notes);
  require_memory(setup.config, info, [&](const RunConfig& other) {
    Arena arena;
    take_memory(arena, model, other, optimizer_settings(other), with_eval);
    return arena.used() + (model.backend == Backend::cpu ? feed_bytes(other) : 0);
  });
  std::fflush(out);
  return plan;
}

/// Masters and moments of the last step done: of the checkpoint the run goes on from, of given weights (`initial`), or random.
void load_start(const Context& ctx, const RunSetup& setup, const Model& model, Training& training,
                const ParameterMemory& memory, const std::vector<float>& initial) {
  const CheckpointReader* checkpoint = setup.from.checkpoint.get();
  if (checkpoint == nullptr && initial.empty()) {
    training.initialize();
    return;
  }
  training.prepare();
  if (checkpoint == nullptr) {
    set_parameters(ctx, memory, initial.data());
    synchronize(ctx);
    return;
  }
  const double began = now_seconds();
  const uint64_t hash = load_parameters(ctx, *checkpoint, model.table, ShardLayout(model.table, 0, 1, false),
                                        memory.masters, memory.m, memory.v);
  if (memory.weights.data != memory.masters.data) cast(ctx, {memory.weights, memory.masters});
  synchronize(ctx);
  const double took = now_seconds() - began;
  const uint64_t bytes = plan_checkpoint(model.table, model.dtype, memory.m.dtype, 0).bytes();
  print_notes({cat("going on from ", checkpoint->directory(), ": ", mebibytes(bytes), " read and checked in ",
                   std::round(took * 100) / 100, " s")});
  if (hash != setup.state.weights_hash)
    fail(ExitCode::checkpoint, checkpoint->directory(),
         ": the weights are not those of the step its state.json names (their "
         "hash differs); use an older checkpoint, or --resume latest-valid");
  if (training.weights_hash() != setup.state.weights_hash)
    fail(ExitCode::checkpoint, checkpoint->directory(), ": the weights in memory are not those of step ",
         setup.state.step, " (their hash differs)");
}

Monitor::Options monitor_options(const RunSetup& setup) {
  Monitor::Options options;
  options.metrics_path = join_path(setup.config.out, "metrics.jsonl");
  options.format = parse_log_format(setup.config.log_format).value();
  options.total_steps = setup.config.steps.value();
  options.first_step = setup.state.step + 1;
  options.skipped = setup.state.skipped;
  options.nan = setup.state.nan;
  if (const int64_t cut = cut_metrics(options.metrics_path, setup.state.step); cut > 0)
    print_notes({cat("records of steps after ", setup.state.step, " are cut off metrics.jsonl: ", cut,
                     "; those steps are run again")});
  return options;
}

/// The state that a checkpoint of step `at` records.
TrainingState state_at(const TrainingState& start, const StepRecord& at) {
  TrainingState state = start;
  state.step = at.step;
  state.samples = at.samples;
  state.tokens = at.tokens;
  state.skipped = at.skipped;
  state.nan = at.nan;
  state.weights_hash = at.weights_hash;
  return state;
}

void draw_loss(const RunSetup& setup, const std::string& metrics, const std::string& picture) {
  LossCurveStyle style;
  style.title = cat(setup.config.model, ", ", grouped(setup.config.total_tokens()), " tokens");
  if (setup.byte_tokens) style.y_label = "loss (nats per byte)";
  if (on_stories(setup.config)) {
    style.reference = entropy_per_byte();
    char label[64];
    std::snprintf(label, sizeof(label), "entropy of the stories %.3f", entropy_per_byte());
    style.reference_label = label;
  }
  write_loss_curve(picture, read_loss_history(metrics), style);
}

int train(const CommandLine& command, int argc, char** argv) {
  const std::unique_ptr<Files> files = posix_files();
  RunSetup setup = set_up_run(*files, command, 1);
  RunConfig& config = setup.config;
  const TrainingState& state = setup.state;

  const std::unique_ptr<Device> device =
      Device::open(config.device == DeviceChoice::cuda ? Backend::cuda : Backend::cpu);
  Context ctx = device->context();
  const size_t held_before = device->memory_use().bytes;
  Model model(setup.model, ctx.backend, config.dtype.value());
  const OptimizerSettings optimizer = optimizer_settings(config);

  const ShardLayout layout(model.table, 0, 1, false);
  const std::unique_ptr<Channel> saving_line = alone();

  // The plan, before anything large exists.
  const bool with_eval = setup.data.validation.has_value();
  Arena planned;
  const ParameterMemory planned_parameters =
      take_memory(planned, model, config, optimizer, with_eval).parameters;
  const bool saves = !config.no_checkpoints;
  const size_t save_bytes = saves ? CheckpointSaver::planned_buffer_bytes(
                                        layout.owned(), ctx.backend == Backend::cpu ? planned.used() : 0, 1)
                                  : 0;
  std::FILE* tables =
      config.log_format == "json" ? stderr : stdout;  // in JSON, standard output is for records alone
  const MemoryPlan memory_plan =
      check_memory(tables, setup, model, *device, held_before, planned, save_bytes);
  if (config.dry_run) return 0;

  std::vector<float> initial;  // read before anything is written: it may not fit
  if (!setup.source.empty()) initial = read_initial_weights(*files, setup, model.table);
  config.out = prepare_run_directory(
      *files, {.path = config.out,
               .resume = command.run.resume != "never",
               .needed_bytes =
                   saves ? plan_checkpoint(model.table, model.dtype, planned_parameters.m.dtype, 0).bytes() +
                               kSmallFileBytes
                         : 0});
  const RunLock lock(config.out);
  print_notes(claim_run(*files, config.out, setup.from));
  record_run(*files, config, *device, state.step, argc, argv);
  remove_unfinished_checkpoints(*files, config.out);

  GemmRecord gemms(*files, *device, config.out,
                   setup.from.checkpoint ? setup.from.checkpoint->directory() : "");
  const Memory memory = Memory::on(ctx.backend, planned.used());
  Arena arena(memory.data());
  RunMemory run_memory = take_memory(arena, model, config, optimizer, with_eval);
  const std::unique_ptr<Graphs> graphs = Graphs::on(ctx);
  ctx.graphs = graphs.get();
  upload_constants(ctx, model);
  Training training(config, ctx, model, run_memory, optimizer, setup.data, state);
  load_start(ctx, setup, model, training, run_memory.parameters, initial);
  std::vector<float>().swap(initial);
  std::optional<Feed> eval_feed;
  if (with_eval) eval_feed.emplace(ctx, *setup.data.validation, config.micro_batch.value());

  const Monitor::Options options = monitor_options(setup);
  Monitor monitor(options);
  Saving saving(*files, ctx, model, config, run_memory.parameters, layout, *saving_line, save_bytes,
                setup.tokenizers, &monitor);
  DeviceWatch watch(*device, memory_plan.total);
  const TokenFlops flops = training_flops(setup.model, config.seq_len.value());
  const std::optional<Peak> peak = peak_flops(device->info().name, model.dtype);

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
                                               *setup.data.validation, batches);
    ended.record(ctx);
    ended.wait();
    monitor.record(EvalRecord{.step = at.step,
                              .samples = at.samples,
                              .tokens = at.tokens,
                              .val_loss = result.loss,
                              .val_tokens = result.target_tokens,
                              .eval_ms = ended.ms_since(began)});
    return result;
  };

  const int64_t steps = config.steps.value(), stop = std::min(steps, config.stop_after.value_or(steps));
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
    if (due(*config.eval_every, step) && step < steps) evaluate(last, config.eval_batches);
    if (due(*config.sample_every, step))
      monitor.note("sample: " + sample_text(device->context(), model, training.hooks(), run_memory.sampling,
                                            config.seq_len.value(), static_cast<uint64_t>(step),
                                            on_stories(config)));
    // After the step's evaluation, whose record then is on the disk as well; before the last one, which may take long.
    if (saves && (due(*config.save_every, step) || step == stop)) saving.begin(state_at(state, last));
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
  const auto checkpoint_at = [&](int64_t step) {
    return saves ? "checkpoint " + checkpoint_path(config.out, step) : std::string("no checkpoint, as asked");
  };
  if (stop < steps) {
    const int64_t done = std::max(stop, state.step);  // asked for what had been done: nothing to do
    std::fprintf(tables, "stopped after step %lld of %lld; %s\n", static_cast<long long>(done),
                 static_cast<long long>(steps), checkpoint_at(done).c_str());
    return static_cast<int>(ExitCode::stopped);
  }
  const std::string picture = join_path(config.out, "loss.svg");
  draw_loss(setup, options.metrics_path, picture);
  std::fprintf(tables, "%s\nloss curve %s\n", checkpoint_at(steps).c_str(), picture.c_str());
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
