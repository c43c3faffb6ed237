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
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "dataloader/dataset.h"
#include "dataloader/loader.h"
#include "dataloader/mapped_file.h"
#include "dataloader/tokenizer.h"
#include "trainer/backward.h"
#include "trainer/batch_plan.h"
#include "trainer/checkpoint.h"
#include "trainer/collectives.h"
#include "trainer/config.h"
#include "trainer/feed.h"
#include "trainer/files.h"
#include "trainer/forward.h"
#include "trainer/gemm_choices.h"
#include "trainer/inference.h"
#include "trainer/inspect.h"
#include "trainer/launch.h"
#include "trainer/launch_end.h"
#include "trainer/launch_limits.h"
#include "trainer/model.h"
#include "trainer/model_config.h"
#include "trainer/monitor.h"
#include "trainer/optimizer.h"
#include "trainer/ranks.h"
#include "trainer/resume.h"
#include "trainer/run_directory.h"
#include "trainer/run_memory.h"
#include "trainer/run_reports.h"
#include "trainer/run_setup.h"
#include "trainer/sample.h"
#include "trainer/saving.h"
#include "trainer/schedule.h"
#include "trainer/sharding.h"
#include "trainer/step_limit.h"
#include "trainer/tables.h"

namespace kinoe {
namespace {

// ---- Training --------------------------------------------------------------------------------------------------------

constexpr uint64_t kSmallFileBytes = uint64_t{1} << 20;  // of a checkpoint besides its tensors

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
  /// `start`: the state after the last step done. `passed`: Feed's.
  Training(const RunConfig& config, const Context& ctx, const Model& model, RunMemory& memory,
           const ShardLayout& layout, Collectives& collectives, const Data& data, const TrainingState& start,
           std::function<void()> passed)
      : config_(config),
        ctx_(ctx),
        model_(model),
        memory_(memory),
        collectives_(collectives),
        plan_(config.global_batch.value(), config.micro_batch.value(), layout.rank(), layout.ranks()),
        sharding_(ctx, model.table, layout, collectives, memory.parameters.gradients,
                  memory.parameters.weights, {memory.acts.sums, memory.acts.overflow}),
        optimizer_(model, memory.parameters, optimizer_settings(config), layout, sharding_),
        schedule_{schedule_kind(config.schedule), config.lr.value(), config.min_lr_frac,
                  config.warmup_tokens.value(), start.schedule_tokens},
        start_(start),
        feed_(ctx, *data.training, config.micro_batch.value(), std::move(passed)),
        results_{StepResult(ctx.backend), StepResult(ctx.backend)} {
    validate(schedule_);
    fill_zero(ctx, memory.acts.state.data, memory.acts.state.bytes());
  }

  /// Random weights from the run's seed, given ones, or masters that somebody else puts into memory after prepare().
  void prepare() const { optimizer_.prepare(ctx_); }
  void initialize() {
    optimizer_.initialize(ctx_, static_cast<uint64_t>(config_.seed));
    sharding_.publish_weights();
  }
  void set_masters(const float* flat) {
    optimizer_.set_masters(ctx_, flat);
    sharding_.publish_weights();
  }
  void masters_loaded() {
    optimizer_.derive_weights(ctx_);
    sharding_.publish_weights();
  }

  /// Uses every matrix product of a step once, without a trace in anything that is trained.
  void rehearse() {
    for (const Tensor& t : {memory_.acts.batch.tokens, memory_.acts.batch.targets,
                            memory_.acts.batch.doc_start, memory_.acts.batch.doc_end})
      if (t) fill_zero(ctx_, t.data, t.bytes());
    sharding_.begin_step(0, 3, 3);  // a third micro-batch never comes: nothing is sent
    for (int i = 0; i < 2; ++i) {   // one stores, one accumulates
      sharding_.begin_micro_batch();
      forward(ctx_, model_, memory_.acts, hooks());
      backward(ctx_, model_, memory_.acts, hooks(), 1);
    }
    fill_zero(ctx_, memory_.acts.state.data, memory_.acts.state.bytes());
    synchronize(ctx_);
  }

  /// Queues one optimizer step on the device. The step before the last must have been finished.
  PendingStep step(int64_t number) {
    PendingStep pending{{}, &results_[static_cast<size_t>(number) % results_.size()]};
    StepRecord& record = pending.record;
    const int64_t consumed = consumed_before(number);
    const auto nominal_tokens = static_cast<double>(config_.tokens_per_step());
    const int64_t sent_before = collectives_.traffic().bytes;
    pending.result->began.record(ctx_);

    begin_step(ctx_, memory_.acts);
    const std::vector<MicroBatch> slots = plan_.mine(start_.first_sample + consumed);
    sharding_.begin_step(number, plan_.my_slots(), plan_.slots());
    for (size_t i = 0; i < slots.size(); ++i) {
      record.data_wait_ms += feed_.put(memory_.acts.batch, slots[i].first_sample, slots[i].valid);
      announce_after(number, slots, i);
      sharding_.begin_micro_batch();
      forward(ctx_, model_, memory_.acts, hooks());
      backward(ctx_, model_, memory_.acts, hooks(), nominal_tokens);
    }
    sharding_.finish_gradients();
    record.step = number;
    record.samples = consumed + plan_.global_batch();
    record.tokens = record.samples * config_.seq_len.value();
    record.lr = schedule_.at(record.tokens);
    optimizer_.update(ctx_, memory_.acts, record.lr, number, nominal_tokens);
    sharding_.publish_weights();
    record.comm_bytes = collectives_.traffic().bytes - sent_before;

    download(ctx_, pending.result->state.data(), memory_.acts.state.data, sizeof(StepState));
    pending.result->ended.record(ctx_);
    return pending;
  }

  /// Waits for a step and completes its record. A step that was not finite ends the run: nothing of it was applied.
  StepRecord finish(const PendingStep& pending) {
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
    record.comm_wait_ms = sharding_.wait_ms(record.step);
    record.compute_ms = record.step_ms - record.data_wait_ms - record.comm_wait_ms;
    record.tokens_per_s = static_cast<double>(config_.tokens_per_step()) / (record.step_ms / 1e3);
    record.tokens_per_s_per_gpu = record.tokens_per_s / collectives_.ranks();
    return record;
  }

  LayerHooks hooks() { return sharding_.hooks(); }

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
      const std::vector<MicroBatch> next = plan_.mine(start_.first_sample + consumed_before(number + 1));
      feed_.announce(next.front().first_sample, next.front().valid);
    }
  }

  const RunConfig& config_;
  Context ctx_;
  const Model& model_;
  RunMemory& memory_;
  Collectives& collectives_;
  BatchPlan plan_;
  Sharding sharding_;
  Optimizer optimizer_;
  Schedule schedule_;
  const TrainingState& start_;
  Feed feed_;
  std::array<StepResult, 2> results_;
};

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// What this rank found, as ranks compare it: each looks for itself. A file system that shows a rank the checkpoints of a while
/// ago would have it go on from another one; a directory of the same name may hold another model.
RankFacts found(const RunSetup& setup) {
  RankFacts facts;
  const CheckpointReader* checkpoint = setup.from.checkpoint.get();
  facts.checkpoints = checkpoint != nullptr ? parent_directory(checkpoint->directory())
                                            : join_path(setup.config.out, "checkpoints");
  facts.checkpoint =
      checkpoint != nullptr ? cat("step ", setup.state.step, ", hash ", setup.state.weights_hash) : "none";
  facts.passed_over = joined(setup.from.notes);
  const std::string model = model_config_to_json(setup.model, "float32");
  facts.same = {{"hash of config.json", cat(checksum(model.data(), model.size()))}};
  return facts;
}
std::vector<const DataState*> states_of(const RunSetup& setup) {
  std::vector<const DataState*> states = {&setup.state.data};
  if (setup.data.validation) states.push_back(&setup.data.validation->state());
  return states;
}

/// Masters and moments of the last step done: of the checkpoint the run goes on from, of given weights (`initial`), or random.
void load_start(const Context& ctx, const RunSetup& setup, const Model& model, const ShardLayout& layout,
                Team& team, Training& training, const ParameterMemory& memory,
                const std::vector<float>& initial, const LoadOptions& loading) {
  const CheckpointReader* checkpoint = setup.from.checkpoint.get();
  training.prepare();
  if (checkpoint == nullptr) {
    if (initial.empty())
      training.initialize();
    else
      training.set_masters(initial.data());
    return;
  }
  const double began = now_seconds();
  const std::vector<uint64_t> hash = {
      load_parameters(ctx, *checkpoint, model.table, layout, memory.masters, memory.m, memory.v, loading)};
  training.masters_loaded();
  const double took = now_seconds() - began;
  const uint64_t bytes = plan_checkpoint(model.table, model.dtype, memory.m.dtype, 0).bytes();
  print_notes(team, {cat("going on from ", checkpoint->directory(), ": ", mebibytes(bytes),
                         " read and checked in ", duration(took))});
  if (team.control().sum("hash of the weights", hash).front() != setup.state.weights_hash)
    fail(ExitCode::checkpoint, checkpoint->directory(),
         ": the weights are not those of the step its state.json names (their hash differs)", kUseOlder);
  if (training.weights_hash() != setup.state.weights_hash)
    fail(ExitCode::checkpoint, checkpoint->directory(), ": the weights in memory are not those of step ",
         setup.state.step, " (their hash differs)");
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

int train(const CommandLine& command, Team& team, int argc, char** argv) {
  const std::unique_ptr<Files> files = posix_files();
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> quiet(std::fopen("/dev/null", "w"), std::fclose);
  if (quiet == nullptr) {
    const int error = errno;
    check_open_files(error);
    fail(ExitCode::usage, "/dev/null cannot be opened: ", std::generic_category().message(error));
  }
  end_on_truncation(team.last_words());
  StepLimit limit(static_cast<double>(command.run.hang_timeout));
  // latest-valid reads whole checkpoints, on a file system that all ranks may share.
  team.at("reading the configuration and opening the data",
          command.run.resume == "latest-valid" ? std::max(6 * 3600.0, limit.unknown()) : limit.unknown());
  RunSetup setup = set_up_run(*files, command, team.control());
  RunConfig& config = setup.config;
  const TrainingState& state = setup.state;
  std::FILE* tables = !team.first() ? quiet.get()
                      : config.log_format == "json"
                          ? stderr
                          : stdout;  // in JSON, standard output is for records alone

  const std::unique_ptr<Device> device = open_device(config, team.place());
  Context ctx = device->context();
  std::fputs(compare_ranks(team, *device, config, states_of(setup), found(setup)).c_str(), tables);
  check_stop_after(config, state);
  if (team.first() && !config.dry_run) check_new_run(*files, config);
  std::vector<std::string> warnings = setup.warnings;
  for (const std::string& warning : host_warnings(team, ctx.backend == Backend::cuda))
    warnings.push_back(warning);
  team.at("connecting the ranks", limit.unknown());
  const std::unique_ptr<Collectives> collectives = connect(team, ctx);
  if (const double links = measure_links(ctx, *collectives); links > 0) {
    std::fprintf(tables, "links  %.3g GB/s in and out of each rank\n", links);
    warnings.push_back(link_warning(links, team.place().hosts));
  }
  const size_t held_before = device->memory_use().bytes;
  Model model(setup.model, ctx.backend, config.dtype.value());
  const ShardLayout layout(model.table, team.rank(), team.ranks(), config.zero > 0 && team.ranks() > 1);

  // The plan, before anything large exists.
  const bool with_eval = setup.data.validation.has_value();
  Arena planned;
  const ParameterMemory planned_parameters =
      take_run_memory(planned, model, config, layout, with_eval).parameters;
  const bool saves = !config.no_checkpoints;
  const size_t save_bytes =
      saves ? CheckpointSaver::planned_buffer_bytes(
                  layout.owned(), ctx.backend == Backend::cpu ? planned.used() : 0, team.place().ranks_here)
            : 0;
  LoadOptions loading;
  loading.threads = reading_threads(team.place().ranks_here);
  const size_t load_bytes =
      setup.from.checkpoint ? load_buffer_bytes(layout, planned_parameters.m.dtype, loading) : 0;
  for (const std::string& warning : warnings)
    if (!warning.empty()) print_notes(team, {"warning: " + warning});
  print_notes(team, setup.notes);
  // Loading has ended when saving takes its buffers.
  const MemoryPlan memory_plan = check_memory(tables, setup, model, layout, *device, held_before, planned,
                                              std::max(save_bytes, load_bytes),
                                              {team.ranks(), team.place().ranks_here, team.place().hosts});
  if (config.dry_run) return 0;

  const uint64_t checkpoint_bytes =
      plan_checkpoint(model.table, model.dtype, planned_parameters.m.dtype, 0).bytes();
  const double files_limit_s = limit.of_files(checkpoint_bytes);
  std::vector<float> initial;  // read before anything is written: it may not fit
  if (!setup.source.empty()) {
    team.at("reading the weights to start from", files_limit_s);
    initial = read_initial_weights(*files, setup, model.table, loading.threads);
    compare_weights(team.control(), team.place(), setup.source, initial);
  }
  const std::unique_ptr<RunLock> lock =
      take_run_directory(*files, team, setup, *device, command.run.resume != "never",
                         saves ? checkpoint_bytes + kSmallFileBytes : 0, argc, argv);

  GemmRecord gemms(*files, *device, config.out,
                   setup.from.checkpoint ? setup.from.checkpoint->directory() : "");
  const Memory memory = Memory::on(ctx.backend, planned.used());
  Arena arena(memory.data());
  RunMemory run_memory = take_run_memory(arena, model, config, layout, with_eval);
  const std::unique_ptr<Graphs> graphs = Graphs::on(ctx);
  ctx.graphs = graphs.get();
  upload_constants(ctx, model);
  team.at("loading weights", files_limit_s);
  const auto passed = [&team] { team.alive(); };
  Training training(config, ctx, model, run_memory, layout, *collectives, setup.data, state, passed);
  load_start(ctx, setup, model, layout, team, training, run_memory.parameters, initial, loading);
  std::vector<float>().swap(initial);
  share_gemm_choices(team, *device, [&] { training.rehearse(); });
  std::optional<Feed> eval_feed;
  if (with_eval) eval_feed.emplace(ctx, *setup.data.validation, config.micro_batch.value(), passed);

  Reports reports(team, setup, *device, model.dtype, memory_plan.total, quiet.get());
  Saving saving(*files, ctx, model, config, run_memory.parameters, layout, team.saving(), save_bytes,
                setup.tokenizers, reports.monitor());

  const auto report = [&](const PendingStep& pending) {
    const StepRecord record = training.finish(pending);
    limit.took(record.step_ms);
    return reports.step(record);
  };
  const auto evaluate = [&](const StepRecord& at, int64_t batches) {
    team.at(cat("evaluation after step ", at.step), limit.unknown());
    Event began(ctx.backend), ended(ctx.backend);
    began.record(ctx);
    const EvalResult result = evaluate_dataset(ctx, model, *run_memory.eval, training.hooks(), *eval_feed,
                                               *setup.data.validation, batches, *collectives);
    ended.record(ctx);
    ended.wait();
    reports.evaluation(at, result, ended.ms_since(began));
    return result;
  };

  // A run whose steps are all done is finished, wherever it was to stop.
  const int64_t steps = config.steps.value(),
                stop = std::max(state.step, std::min(steps, config.stop_after.value_or(steps)));
  const auto due = [](int64_t every, int64_t step) { return every > 0 && step % every == 0; };
  std::deque<PendingStep> pending;
  for (int64_t step = state.step + 1; step <= stop; ++step) {
    team.at(cat("step ", step), limit.seconds());
    pending.push_back(training.step(step));
    if (step == state.step + 1 && team.first()) {
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
    if (due(*config.sample_every, step)) team.at(cat("sample after step ", step), limit.unknown());
    if (due(*config.sample_every, step) && team.first())
      reports.sample(sample_text(device->context(), model, training.hooks(), run_memory.sampling,
                                 config.seq_len.value(), static_cast<uint64_t>(step), on_stories(config)));
    // After the step's evaluation, whose record then is on the disk as well; before the last one, which may take long.
    if (saves && (due(*config.save_every, step) || step == stop)) {
      team.at(cat("saving step ", step), files_limit_s);
      saving.begin(state_at(state, last));
    }
    if (step == steps && with_eval)
      reports.last_evaluation(tables, evaluate(last, on_stories(config) ? 0 : config.eval_batches));
    saving.report();
  }
  team.at("writing the last checkpoint", files_limit_s);
  if (team.first()) gemms.save();
  saving.finish();
  reports.finish();
  const auto checkpoint_at = [&](int64_t step) {
    return saves ? "checkpoint " + checkpoint_path(config.out, step) : std::string("no checkpoint, as asked");
  };
  if (stop < steps) {
    std::fprintf(tables, "stopped after step %lld of %lld; %s\n", static_cast<long long>(stop),
                 static_cast<long long>(steps), checkpoint_at(stop).c_str());
    return static_cast<int>(ExitCode::stopped);
  }
  std::fprintf(tables, "%s\n", checkpoint_at(steps).c_str());
  if (const std::string curve = reports.draw_loss(); !curve.empty())
    std::fprintf(tables, "loss curve %s\n", curve.c_str());
  return 0;
}

/// A launcher says that there is a rank 0 and that this is not it. One that says it badly matters to training alone.
bool started_as_another() {
  try {
    return find_place([](const char* name) { return std::getenv(name); }).rank > 0;
  } catch (const Error&) {
    return false;
  }
}

/// `team` is set as soon as there is one: an error from then on is one of all ranks.
int run(int argc, char** argv, std::unique_ptr<Team>& team) {
  CommandLine command;
  std::optional<Error> mistake;
  try {
    command = parse_command_line(argc, argv);
  } catch (const Error& error) {
    mistake = error;
  }
  // What is no training is the work of one process: of several that a launcher started, the first does it.
  if (!mistake && command.action != Action::train && started_as_another()) return 0;
  // A mistake in the command line is every rank's: together they say it once.
  if (mistake || command.action == Action::train) team = Team::join(launch_options(command.run));
  if (mistake) throw Error(*mistake);
  int code = 0;
  switch (command.action) {
    case Action::help: std::printf("%s", command.text.c_str()); break;
    case Action::sample: code = sample(command.sample); break;
    case Action::eval: code = eval(command.eval); break;
    case Action::inspect: code = inspect(command.inspect); break;
    case Action::train:
      code = train(command, *team, argc, argv);
      team->finish();
      return code;
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
  std::unique_ptr<kinoe::Team> team;
  const auto leave = [&team](const kinoe::Error& error) {
    return team ? team->leave(error) : kinoe::Team::report(error);
  };
  try {
    return kinoe::run(argc, argv, team);
  } catch (const kinoe::Error& error) {
    return leave(error);
  } catch (const std::exception& error) {
    return leave(kinoe::error_of(error));
  }
}
