// Which checkpoint, which settings may differ, and its numbers into memory.
#include "trainer/resume.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <string_view>

#include "kernels/common/nearest.h"
#include "trainer/checkpoint.h"

namespace kinoe {
namespace {

/// Options whose value is part of the result.
constexpr std::array<std::string_view, 16> kRecorded = {
    "steps",       "global-batch", "seed",          "lr",         "schedule", "warmup-tokens",
    "min-lr-frac", "weight-decay", "beta1",         "beta2",      "eps",      "grad-clip",
    "adam-state",  "dtype",        "document-mask", "determinism"};
/// Part of the result with --determinism topology: gradients are rounded micro-batch by micro-batch.
constexpr std::string_view kMicroBatch = "micro-batch";
constexpr const char* kTopology = "topology";
constexpr const char* kLastBits = ": sums are added in another order, the last bits may differ";
/// One that has no meaning in the middle of a run: the same number of samples would be other tokens.
constexpr std::string_view kFixed = "seq-len";
constexpr std::string_view kData = "data";  // compared by content, not by path

/// What a name given to --override covers.
std::string canonical(const std::string& name) {
  if (name == "tokens") return "steps";
  if (name == "warmup-steps") return "warmup-tokens";
  return name;
}

constexpr const char* kOtherSettings = "not the settings the checkpoint recorded: ";
constexpr const char* kHowToChange = "; leave them out, or name what may change with --override";

bool contains(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// What the checkpoint's run had. One that is older than an option had what is its default.
std::string recorded(const TrainingState& state, std::string_view name) {
  const std::string value = setting(state.settings, name);
  return value == "not set" ? setting(settings_of(RunConfig{}), name) : value;
}

std::vector<std::string> overridden(const RunConfig& config) {
  std::vector<std::string> names = {std::string(kData), std::string(kMicroBatch)}, result;
  for (const std::string_view name : kRecorded) names.emplace_back(name);
  for (const std::string& given : config.override_) {
    const std::string name = canonical(given);
    if (name == kFixed)
      fail(ExitCode::usage, "--override ", given,
           ": the length of sequences cannot change within a run; start a new one with --init-from");
    if (!contains(names, name))
      fail(ExitCode::usage, "--override ", given,
           ": not an option that needs it; nearest: ", nearest_name(name, names));
    result.push_back(name);
  }
  return result;
}

/// A directory that somebody copied or renamed would count as another step.
std::unique_ptr<CheckpointReader> open_step(Files& files, const std::string& run, int64_t step) {
  auto checkpoint = std::make_unique<CheckpointReader>(files, checkpoint_path(run, step));
  if (checkpoint->state().step != step)
    fail(ExitCode::checkpoint, checkpoint->directory(), ": holds the checkpoint of step ",
         checkpoint->state().step, ", not of step ", step, "; give it its own name back, or remove it");
  return checkpoint;
}

std::unique_ptr<CheckpointReader> newest_valid(Files& files, const std::string& run, ResumePoint& point) {
  std::vector<int64_t> steps = checkpoint_steps(files, run);
  for (; !steps.empty(); steps.pop_back()) {
    try {
      auto checkpoint = open_step(files, run, steps.back());
      checkpoint->verify();
      return checkpoint;
    } catch (const Error& error) {
      const std::string why = error.what();
      point.notes.push_back(cat("passed over: ", why.substr(0, why.find(kUseOlder))));
      point.passed_over.push_back(steps.back());
    }
  }
  return nullptr;
}

/// RUN of RUN/checkpoints/step_00001000; "" for a checkpoint that lies elsewhere.
std::string run_of(const std::string& checkpoint) {
  const std::string checkpoints = parent_directory(checkpoint);
  return checkpoints == "checkpoints" || checkpoints.ends_with("/checkpoints") ? parent_directory(checkpoints)
                                                                               : "";
}

bool same_directory(const std::string& a, const std::string& b) {
  std::error_code error;
  return a == b || (std::filesystem::equivalent(a, b, error) && !error);
}

/// A directory that is there and is no run must not become one. (A start that was killed early may have left a lock.)
void check_is_run(Files& files, const std::string& path) {
  if (files.kind(path) != Files::Kind::directory) return;
  const std::vector<std::string> names = files.list(path);
  if (std::all_of(names.begin(), names.end(),
                  [](const std::string& name) { return name == "lock" || name.ends_with(".tmp"); }))
    return;
  if (files.kind(join_path(path, "config.toml")) != Files::Kind::file)
    fail(ExitCode::usage, "run directory ", path,
         " exists and is not a run (it has no config.toml): nothing was changed; choose another --out");
}

/// A part of what a rank holds, to be read at once.
struct LoadBlock {
  HeldRange range;
  bool owned = false;  // all of it, or nothing
};

/// What `layout` holds, cut where owning begins and ends and into blocks of `most` elements.
std::vector<LoadBlock> blocks_of(const ShardLayout& layout, int64_t most) {
  std::vector<LoadBlock> blocks;
  const auto add = [&](const HeldRange& held, int64_t begin, int64_t end, bool owned) {
    for (int64_t at = begin; at < end; at += most)
      blocks.push_back({{at, std::min(at + most, end), held.local + (at - held.begin)}, owned});
  };
  for (const HeldRange& held : layout.held()) {
    int64_t at = held.begin;
    for (const HeldRange& mine : layout.owned()) {
      if (mine.end <= held.begin || mine.begin >= held.end) continue;
      add(held, at, mine.begin, false);
      add(held, mine.begin, mine.end, true);
      at = mine.end;
    }
    add(held, at, held.end, false);
  }
  return blocks;
}

/// What threads that load `parts` of masters, m and v need.
struct LoadBuffers {
  LoadBuffers(const std::vector<LoadBlock>& parts, DType moments, int most_threads)
      : narrowed(moments == DType::bf16),
        threads(static_cast<int>(std::min(static_cast<size_t>(most_threads), 3 * parts.size()))) {
    for (const LoadBlock& part : parts) elements = std::max(elements, part.range.end - part.range.begin);
  }
  /// Of one thread.
  [[nodiscard]] size_t bytes() const {
    return static_cast<size_t>(elements) * sizeof(float) * (kSlots + (narrowed ? 1 : 0));
  }
  static constexpr size_t kSlots = 2;

  bool narrowed;  // moments that become bf16 are read into memory of their own
  int threads;
  int64_t elements = 0;  // of the largest block
};

/// One thread's memory: while a slot is on its way to the device the other is filled.
struct LoadThread {
  struct Slot {
    Memory memory;
    Event passed;  // the copy out of it
  };
  LoadThread(Backend backend, const LoadBuffers& sizes)
      : wide(sizes.narrowed ? static_cast<size_t>(sizes.elements) : 0) {
    for (size_t i = 0; i < LoadBuffers::kSlots; ++i)
      slots.push_back(
          {Memory::pinned(backend, static_cast<size_t>(sizes.elements) * sizeof(float)), Event(backend)});
  }
  Slot& next() { return slots[used++ % slots.size()]; }

  std::vector<Slot> slots;
  std::vector<float> wide;
  size_t used = 0;
};

}  // namespace

ResumePoint find_resume_point(Files& files, const RunConfig& config) {
  ResumePoint point;
  const std::string& mode = config.resume;
  point.run_directory = config.out;
  if (mode == "never") {
    if (!config.override_.empty())
      fail(ExitCode::usage,
           "--override goes with --resume; without it nothing is recorded that could be replaced");
    return point;
  }
  const bool named = mode == "auto" || mode == "must" || mode == "latest-valid";
  if (named) {
    if (config.out.empty())
      fail(ExitCode::usage, "--resume ", mode, " needs --out RUN_DIR, the run to go on with");
    check_is_run(files, config.out);
    if (const std::string note = check_latest(files, config.out); !note.empty()) point.notes.push_back(note);
    const std::vector<int64_t> steps = checkpoint_steps(files, config.out);
    if (mode == "latest-valid")
      point.checkpoint = newest_valid(files, config.out, point);
    else if (!steps.empty())
      point.checkpoint = open_step(files, config.out, steps.back());
    if (!point.checkpoint && mode != "auto")
      fail(ExitCode::checkpoint, "--resume ", mode, ": no ", mode == "must" ? "" : "undamaged ",
           "checkpoint in ", join_path(config.out, "checkpoints"),
           point.notes.empty() ? "" : "; " + point.notes.back());
    return point;
  }

  if (files.kind(mode) != Files::Kind::directory)
    fail(ExitCode::checkpoint, "--resume ", mode,
         ": no such directory; expected never, auto, must, latest-valid, "
         "a run directory or a checkpoint");
  point.checkpoint = std::make_unique<CheckpointReader>(files, find_checkpoint(files, mode));
  const std::string run = run_of(point.checkpoint->directory());
  if (point.run_directory.empty()) point.run_directory = run;
  if (!run.empty() && same_directory(point.run_directory, run)) {
    const std::vector<int64_t> steps = checkpoint_steps(files, run);
    if (steps.back() > point.checkpoint->state().step)
      fail(ExitCode::checkpoint, "--resume ", mode, ": ", run, " has a later checkpoint, of step ",
           steps.back(), "; give another --out to branch off, or remove the later ones");
  } else if (!point.run_directory.empty() && !checkpoint_steps(files, point.run_directory).empty()) {
    fail(ExitCode::usage, "--out ", point.run_directory, " has checkpoints of its own; choose another --out");
  }
  return point;
}

std::vector<std::string> claim_run(Files& files, const std::string& run_directory, const ResumePoint& from) {
  std::vector<std::string> notes;
  const int64_t step = from.checkpoint ? from.checkpoint->state().step : 0;
  for (const int64_t later : checkpoint_steps(files, run_directory)) {
    if (later <= step) continue;
    const std::string path = checkpoint_path(run_directory, later);
    if (std::find(from.passed_over.begin(), from.passed_over.end(), later) == from.passed_over.end())
      fail(ExitCode::usage, path, " was not there when this process started: another one was going on with ",
           run_directory, "; start this one again");
    std::string aside = path + ".damaged";
    for (int i = 2; files.kind(aside) != Files::Kind::absent; ++i) aside = cat(path, ".damaged-", i);
    files.rename(path, aside);
    notes.push_back(cat(path, " is damaged and now called ", aside));
  }
  return notes;
}

void reconcile(RunConfig& config, TrainingState& state, std::vector<std::string>& notes) {
  const std::vector<std::string> allowed = overridden(config);
  const auto now = settings_of(config);
  if (recorded(state, kFixed) != setting(now, kFixed))
    fail(ExitCode::checkpoint, "seq-len: ", recorded(state, kFixed), " in the checkpoint, ",
         setting(now, kFixed), " here; it cannot change within a run: start a new one with --init-from");
  for (const char* name : {"init-from", "data-start"})
    if (const std::string from = recorded(state, name), to = setting(now, name); from != to)
      fail(ExitCode::checkpoint, name, ": ", from, " in the checkpoint, ", to,
           " here; it says how a run begins, and this one goes on: leave it out, or start a new run");
  const bool topology = config.determinism == kTopology;
  std::vector<std::string_view> decisive(kRecorded.begin(), kRecorded.end());
  if (topology) decisive.push_back(kMicroBatch);
  std::string refused;
  bool other_length = false;
  for (const std::string_view name : decisive) {
    const std::string from = recorded(state, name), to = setting(now, name);
    if (from == to) continue;
    if (!contains(allowed, name)) {
      refused += cat(refused.empty() ? "" : "; ", name, ": ", from, " in the checkpoint, ", to, " here");
      continue;
    }
    other_length |= name == "steps";
    state.changes.push_back({state.step, std::string(name), from, to});
    notes.push_back(cat("from step ", state.step + 1, " on ", name, " is ", to, ", was ", from));
  }
  if (!refused.empty()) fail(ExitCode::checkpoint, kOtherSettings, refused, kHowToChange);

  const int64_t per_step = config.tokens_per_step();
  if (other_length) {
    if (*config.steps < state.step)
      fail(ExitCode::checkpoint, "--steps ", *config.steps, ": the checkpoint is of step ", state.step,
           " already");
    state.schedule_tokens = state.tokens + (*config.steps - state.step) * per_step;
  } else {
    const int64_t left = std::max<int64_t>(0, state.schedule_tokens - state.tokens);
    const int64_t steps = state.step + (left + per_step - 1) / per_step;
    if (steps != *config.steps)
      notes.push_back(cat("the schedule ends at ", state.schedule_tokens, " tokens as before: at step ",
                          steps, " with this batch"));
    config.steps = steps;
  }
  for (const std::string_view name : {kMicroBatch, std::string_view("device")})
    if (const std::string from = recorded(state, name), to = setting(now, name);
        from != to && !(topology && name == kMicroBatch))
      notes.push_back(cat(name, " is ", to, ", was ", from, kLastBits));
}

void check_stop_after(const RunConfig& config, const TrainingState& state) {
  if (config.stop_after && *config.stop_after <= state.step && state.step < config.steps.value())
    fail(ExitCode::usage, "--stop-after ", *config.stop_after, ": the checkpoint is already at step ",
         state.step, "; give a later step or leave it out");
}

void reconcile_data(const RunConfig& config, TrainingState& state, const DataState& now,
                    std::vector<std::string>& notes) {
  const std::string all = joined(describe_change(state.data, now));
  if (!all.empty() && !contains(overridden(config), kData))
    fail(ExitCode::checkpoint, "the training data is not the checkpoint's: ", all, kHowToChange);
  if (!all.empty()) {
    state.changes.push_back({state.step, std::string(kData), all, "accepted"});
    notes.push_back(cat("from step ", state.step + 1, " on the data is other: ", all));
  }
  state.data = now;
}

void reconcile_ranks(const RunConfig& config, TrainingState& state, int ranks,
                     std::vector<std::string>& notes) {
  const auto now = settings_of(config);
  const bool other_numbers = recorded(state, "device") != setting(now, "device") ||
                             std::any_of(state.changes.begin(), state.changes.end(),
                                         [&](const auto& change) { return change.step == state.step; });
  // What else changes the numbers has been said.
  const char* effect = config.determinism != kTopology ? kLastBits
                       : other_numbers                 ? ""
                                                       : ": the same numbers";
  if (const std::string from = recorded(state, "zero"), to = setting(now, "zero"); from != to)
    notes.push_back(cat("zero is ", to, ", was ", from, effect));
  if (state.ranks != 0 && state.ranks != ranks)
    notes.push_back(cat("saved by ", state.ranks, state.ranks == 1 ? " rank" : " ranks", ", going on with ",
                        ranks, effect));
  state.ranks = ranks;
}

size_t load_buffer_bytes(const ShardLayout& layout, DType moments, const LoadOptions& options) {
  const LoadBuffers buffers(blocks_of(layout, options.block_elements), moments, options.threads);
  return static_cast<size_t>(buffers.threads) * buffers.bytes();
}

uint64_t load_parameters(const Context& ctx, const CheckpointReader& checkpoint, const ParameterTable& table,
                         const ShardLayout& layout, const Tensor& masters, const Tensor& m, const Tensor& v,
                         const LoadOptions& options) {
  const std::vector<LoadBlock> parts = blocks_of(layout, options.block_elements);
  std::vector<CheckpointReader::Block> blocks;
  for (const Section section : {Section::masters, Section::m, Section::v})
    for (const LoadBlock& part : parts)
      blocks.push_back({section, part.range.begin, part.range.end - part.range.begin});
  const LoadBuffers sizes(parts, m.dtype, options.threads);
  std::vector<LoadThread> threads;
  for (int i = 0; i < sizes.threads; ++i) threads.emplace_back(ctx.backend, sizes);

  std::atomic<uint64_t> owned = 0;
  checkpoint.share_out_blocks(table, blocks, sizes.threads, [&](int thread, size_t i) {
    use_device(ctx);
    const CheckpointReader::Block& block = blocks[i];
    const LoadBlock& part = parts[i % parts.size()];
    const Tensor& to = block.section == Section::masters ? masters : block.section == Section::m ? m : v;
    const Tensor place = to.slice(part.range.local, block.count);
    LoadThread& mine = threads[static_cast<size_t>(thread)];
    LoadThread::Slot& slot = mine.next();
    slot.passed.wait();
    float* wide = place.dtype == DType::bf16 ? mine.wide.data() : static_cast<float*>(slot.memory.data());
    const uint64_t hash = checkpoint.read(block.section, table, block.begin, block.count, wide);
    if (part.owned) owned += hash;
    if (place.dtype == DType::bf16)
      std::transform(wide, wide + block.count, static_cast<bf16*>(slot.memory.data()), to_bf16);
    upload(ctx, place.data, slot.memory.data(), place.bytes());
    slot.passed.record(ctx);
  });
  synchronize(ctx);
  return owned;
}

}  // namespace kinoe
