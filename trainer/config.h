// Everything a user can choose: the options of the command line and of --config files, their defaults and ranges.
//
// One table (config_options.cpp) holds each option's name, help, reader and writer; the parser, --help, the TOML file and the
// nearest-name suggestions all come from it. Options whose default depends on the model or the machine are
// std::optional here and filled in by resolve(), so that the recorded configuration says what was really used.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/common/device.h"

namespace kinoe {

enum class DeviceChoice : uint8_t { automatic, cpu, cuda };

/// Options of `train_gpt` itself, which trains.
struct RunConfig {
  // Data
  std::vector<std::string> data;      // as dataloader/data_spec reads them; empty: the stories
  std::vector<std::string> val_data;  // empty: the stories' own validation part, or no evaluation
  bool document_mask = false;         // attention stops where documents end
  // Model
  std::string model;  // preset, Hugging Face directory or config.json; empty: chosen by the kind of data
  std::string
      init_from;  // Hugging Face directory, run, checkpoint or llm.c model file; empty: random weights
  std::string tokenizer;  // directory whose tokenizer files go into the checkpoints
  // Run directory
  std::string out;                    // empty: a new runs/<time>, chosen by the caller
  std::optional<int64_t> save_every;  // steps; 0: only at the end
  bool no_checkpoints = false;        // none at all, for measuring
  int64_t keep = 0;                   // newest checkpoints that stay; 0: all
  int64_t keep_every = 0;             // and those whose step is a multiple of this; 0: none
  // Going on
  std::string resume = "never";        // never, auto, must, latest-valid, or a path
  std::vector<std::string> override_;  // options whose recorded value may be replaced
  std::optional<int64_t> stop_after;   // step
  std::string data_start = "fresh";    // fresh or continue
  // Length and batch
  std::optional<int64_t> steps;         // optimizer steps; set by resolve()
  std::optional<int64_t> tokens;        // as the user's other way to say it; turned into steps by resolve()
  std::optional<int64_t> global_batch;  // sequences per step, over all ranks
  std::optional<int64_t> micro_batch;   // sequences per forward pass of one rank
  std::optional<int64_t> seq_len;       // tokens per sequence
  int64_t seed = 1;
  // Optimizer
  std::optional<double> lr;
  std::string schedule = "cosine";       // a name of trainer/schedule
  std::optional<int64_t> warmup_tokens;  // set by resolve()
  std::optional<int64_t> warmup_steps;   // turned into warmup_tokens by resolve()
  double min_lr_frac = 0.1;
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double grad_clip = 1.0;         // 0: no clipping
  DType adam_state = DType::f32;  // f32 or bf16
  // Evaluation
  std::optional<int64_t> eval_every;    // steps; 0: never
  int64_t eval_batches = 20;            // micro-batches per evaluation; 0: all of the validation data
  std::optional<int64_t> sample_every;  // steps; 0: never
  // Hardware and numbers
  DeviceChoice device = DeviceChoice::automatic;  // resolve() leaves cpu or cuda
  std::optional<DType> dtype;                     // f32 or bf16
  std::string recompute = "none";                 // none, light or block
  std::string determinism = "run";                // run or topology
  // Ranks
  int64_t zero = 1;              // ZeRO stage: 0 or 1
  int64_t launch_timeout = 120;  // seconds until every rank must have arrived
  int64_t hang_timeout = 40;     // seconds without progress that mean a rank hangs
  std::optional<int64_t> expect_ranks;
  // Reports
  std::string log_format = "line";  // a name of trainer/monitor
  bool gemm_trace = false;
  bool dry_run = false;

  // Only after resolve():
  [[nodiscard]] int64_t tokens_per_step() const { return global_batch.value() * seq_len.value(); }
  [[nodiscard]] int64_t total_tokens() const { return steps.value() * tokens_per_step(); }

  bool operator==(const RunConfig&) const = default;
};

/// Options of `train_gpt sample DIR`.
struct SampleConfig {
  std::string directory;        // run or checkpoint
  std::string prompt = "\n\n";  // where a paragraph or a story begins
  std::string prompt_ids = {};  // instead of it: token ids, and ids are printed
  int64_t max_tokens = 256;
  double temperature = 1.0;  // 0: the most probable token, always
  int64_t top_k = 0;         // 0: all
  double top_p = 1.0;        // 1: all
  int64_t seed = 1;
  DeviceChoice device = DeviceChoice::automatic;
  std::optional<DType> dtype;  // f32 or bf16

  bool operator==(const SampleConfig&) const = default;
};

/// Options of `train_gpt eval DIR`.
struct EvalConfig {
  std::string directory;              // run or checkpoint
  std::vector<std::string> val_data;  // empty: the stories' validation part
  bool document_mask = false;         // attention stops where documents end
  std::optional<int64_t> seq_len;     // default: the model's positions, at most 1024
  std::optional<int64_t> micro_batch;
  int64_t eval_batches = 0;  // micro-batches; 0: all of the validation data
  DeviceChoice device = DeviceChoice::automatic;
  std::optional<DType> dtype;  // f32 or bf16

  bool operator==(const EvalConfig&) const = default;
};

/// Options of `train_gpt inspect PATH [PATH2]`.
struct InspectConfig {
  std::string path;               // data file, Megatron name, glob, Hugging Face directory, checkpoint or run
  std::string second;             // another checkpoint or run, to compare with
  bool full = false;              // look at everything instead of a part
  std::optional<int64_t> offset;  // show tokens from here on
  std::optional<int64_t> vocab;   // ids must be below it; default: the manifest's

  bool operator==(const InspectConfig&) const = default;
};

/// An option as somebody gave it.
struct GivenOption {
  std::string name;  // without "--"
  std::vector<std::string> values;
  std::string what;  // names it in messages: "--lr", or "run.toml line 3: lr"
};

enum class Action : uint8_t { train, sample, eval, inspect, help };

struct CommandLine {
  Action action = Action::train;
  RunConfig run;                   // train
  std::vector<GivenOption> given;  // train: what `run` was made from, the command line's after the file's
  SampleConfig sample;             // sample
  EvalConfig eval;                 // eval
  InspectConfig inspect;           // inspect
  std::string text;                // help: print it and exit 0
};

/// Reads the command line and the --config file it may name (the command line wins). Every mistake throws
/// Error(usage) with one line; nothing is printed.
CommandLine parse_command_line(int argc, const char* const* argv);

/// Without the options that belong to one start and not to the run: resume, override, stop-after, dry-run, gemm-trace,
/// launch-timeout, hang-timeout, expect-ranks.
RunConfig without_start_options(RunConfig config);

/// The configuration of a run that goes on: as recorded in a checkpoint (option, TOML value), and what the command line says
/// on top. Throws Error(checkpoint) for a record this program cannot read, named by `source`.
RunConfig resumed_config(const std::vector<std::pair<std::string, std::string>>& recorded,
                         const std::string& source, const std::vector<GivenOption>& given);

/// Every option that has a value, and that value as TOML.
std::vector<std::pair<std::string, std::string>> settings_of(const RunConfig& config);

/// What there is to compute on. `built` is false in a build without CUDA.
struct GpuFacts {
  bool built = false;
  int count = 0;
  int compute_capability = 0;  // of the first one, 90 for sm_90
  std::string name = {};
  std::string problem = {};  // why there is none, where more is known than that
};

GpuFacts find_gpus();

/// bf16 tensor-core instructions start with Ampere.
inline constexpr int kMinComputeCapability = 80;

struct DeviceDecision {
  Backend backend = Backend::cpu;
  std::string note;  // one sentence for the user where `auto` had to take the CPU, else empty
};

/// Throws Error(usage) where --device cuda asks for what there is not.
DeviceDecision choose_device(DeviceChoice wanted, const GpuFacts& gpus);
/// The default of the device (GPU bf16, CPU fp32), or the wish; throws Error(usage) for bf16 on the CPU.
DType choose_dtype(std::optional<DType> wanted, Backend backend);

/// What defaults depend on. Known when --model and --data have been opened.
struct RunFacts {
  int64_t parameters = 0;
  int64_t max_positions = 0;
  bool byte_tokens = true;     // text or stories: a sample can be printed without a tokenizer
  bool has_validation = true;  // there is something to evaluate on
  GpuFacts gpus = {};
  // Where the schedule of a run that goes on ends; 0: a new run, its steps say it.
  int64_t schedule_tokens = 0;
  int64_t ranks = 1;
};

/// Fills in every optional (except `out`), turns tokens into steps and warmup_steps into warmup_tokens, and checks what
/// could not be checked before: sequence within the model's positions, warm-up within the run, options the device does
/// not have. Idempotent. Returns sentences the user should read. Throws Error(usage).
std::vector<std::string> resolve(RunConfig& config, const RunFacts& facts);
/// The same for `eval`: seq_len, micro_batch, device and dtype.
std::vector<std::string> resolve(EvalConfig& config, const RunFacts& facts);

/// The cheapest way to make a resolved configuration smaller: options to change, and the bytes it then needs.
struct Fitting {
  bool fits = false;    // false: `options` is the smallest there is, and still too large
  std::string options;  // "--micro-batch 4 --recompute light"; "" when nothing can be made smaller
  size_t bytes = 0;
};
/// Tries smaller micro-batches, more recomputation and 16-bit Adam states; `bytes_of` tells what each needs.
Fitting find_fitting(const RunConfig& config, const std::function<size_t(const RunConfig&)>& bytes_of,
                     size_t limit);

/// TOML that --config reads back to an equal RunConfig. Values not set are left out.
std::string to_toml(const RunConfig& config);
/// The configuration of a TOML text; what --config does. `source` names the file in messages.
RunConfig run_config_from_toml(const std::string& text, const std::string& source);

/// A count: "1000", "64k", "1.5M", "600B", "600e9"; k = 1e3, M = 1e6, B = G = 1e9, T = 1e12. Exact: no rounding.
/// Throws Error(usage) naming `what` unless the value is an integer in [lowest, 2^63 - 1]; of a count of
/// something the message says of what.
int64_t parse_count(const std::string& text, const std::string& what, int64_t lowest,
                    const std::string& of = "");

/// The value of a setting in settings_of(), "not set" where it has none.
std::string setting(const std::vector<std::pair<std::string, std::string>>& settings, std::string_view name);

const char* name_of(DeviceChoice value);

}  // namespace kinoe
