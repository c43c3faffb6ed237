// What a run says: metrics.jsonl (the truth), the console, the progress bar, the loss curve, the record of the run.
//
// Nothing here may stop a training run: a full log disk or a closed pipe is said once and training goes on.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/common/check.h"

namespace kinoe {

// ---- Records -------------------------------------------------------------------------------------------------------

/// One optimizer step of the whole run. Names are the keys of metrics.jsonl.
struct StepRecord {
  int64_t step = 0;     // 1 is the first
  int64_t samples = 0;  // sequences consumed since the start of training, this step included
  int64_t tokens = 0;
  double loss = 0;       // nats per target token
  double grad_norm = 0;  // before clipping
  double lr = 0;
  int64_t global_batch = 0;  // sequences
  int64_t seq_len = 0;
  double step_ms = 0;
  double compute_ms = 0;
  double data_wait_ms = 0;
  double comm_wait_ms = 0;
  int64_t comm_bytes = 0;  // sent by this rank, as rings move them
  double tokens_per_s = 0;
  double tokens_per_s_per_gpu = 0;
  double tflops_per_gpu = 0;       // model FLOPs, causal attention halved
  std::optional<double> mfu;       // of the device's peak, attention halved; absent: peak unknown
  std::optional<double> mfu_full;  // attention counted in full
  int64_t mem_bytes = 0;           // of the device, held by this program
  int64_t mem_peak_bytes = 0;
  uint64_t weights_hash = 0;
  bool applied = true;  // false: the update was not applied, for whatever reason

  // Set by Monitor::record().
  int64_t skipped = 0;  // steps of this run so far whose update was not applied
  int64_t nan = 0;      // steps of this run so far whose loss or norm was not finite
};

struct EvalRecord {
  int64_t step = 0;
  int64_t samples = 0;
  int64_t tokens = 0;
  double val_loss = 0;     // nats per target token
  int64_t val_tokens = 0;  // target tokens evaluated
  double eval_ms = 0;
};

/// A checkpoint that was written, or was not.
struct SaveRecord {
  int64_t step = 0;
  std::string path;
  std::string error;         // why it was not written; "" if it was
  double save_stall_ms = 0;  // training waited
  double save_ms = 0;        // until all of it was on the disk
  int64_t save_bytes = 0;
};

/// JSON objects on one line, without the newline. Floats are the shortest text that reads back to the same bits; JSON has
/// no NaN or infinity, so those are null. The hash is 16 hexadecimal digits in a string (a JSON number is a double to many
/// readers).
std::string to_json(const StepRecord& record);
std::string to_json(const EvalRecord& record);
std::string to_json(const SaveRecord& record);

/// One line for people. `total_steps` 0: unknown.
std::string to_line(const StepRecord& record, int64_t total_steps);
std::string to_line(const EvalRecord& record, int64_t total_steps);
std::string to_line(const SaveRecord& record, int64_t total_steps);

/// One line as Megatron-DeepSpeed prints it, for its parsers. As there, the two last counters are of this line (0 or 1),
/// not of the run.
std::string to_megatron(const StepRecord& record, int64_t total_steps);
std::string to_megatron(const EvalRecord& record, int64_t total_steps);

// ---- Monitor -------------------------------------------------------------------------------------------------------

enum class LogFormat : uint8_t { line, megatron, json };
std::optional<LogFormat> parse_log_format(std::string_view name);

/// Reports steps as they happen. Rank 0 has one.
class Monitor {
 public:
  struct Options {
    std::string metrics_path;  // appended to; "" : no file
    LogFormat format = LogFormat::line;
    int64_t total_steps = 0;
    int64_t first_step = 1;  // of this process: more than 1 after a resume
    int64_t skipped = 0;     // counters of the run so far
    int64_t nan = 0;
    int out = 1;  // file descriptors; not closed
    int warnings = 2;
    int bar = kAutoBar;  // where the progress bar is drawn
  };
  static constexpr int kNoBar = -1;
  static constexpr int kAutoBar = -2;  // standard error or output if it is a terminal, else nowhere

  /// Throws ExitCode::usage if metrics_path cannot be opened. A line torn by a crash at its end is cut off.
  explicit Monitor(const Options& options);
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  /// Counts, writes and shows a step; returns it with the counters set.
  StepRecord record(StepRecord record);
  void record(const EvalRecord& record);
  /// Written to metrics.jsonl and, for people, as a line in every format but json.
  void record(const SaveRecord& record);
  /// What has been recorded is on the disk when it returns, so that no step before a checkpoint can be missing after it.
  void sync();
  /// A line for people between the steps (a sample, a warning) that leaves the bar intact. Goes to standard error under
  /// LogFormat::json, where standard output holds records only.
  void note(const std::string& text);
  /// Removes the bar and writes what a full disk had held back.
  void finish();

  [[nodiscard]] int64_t skipped() const { return skipped_; }
  [[nodiscard]] int64_t nan() const { return nan_; }

 private:
  /// One descriptor that may fail: the first failure is said, later ones are silent.
  struct Stream {
    int fd = -1;
    std::string name;
    bool warned = false;
    bool keeps = false;  // what could not be written is kept and tried again, in order
    std::string pending;
    uint64_t dropped = 0;  // bytes, once `pending` is full
  };
  void write(Stream& stream, const std::string& text);
  void print(Stream& stream, const std::string& line);
  void draw_bar();
  void clear_bar();

  Options options_;
  Stream metrics_, out_, warnings_, bar_;
  bool bar_drawn_ = false;
  int64_t step_ = 0;
  int64_t skipped_ = 0;
  int64_t nan_ = 0;
  double last_loss_ = 0;
  std::chrono::steady_clock::time_point first_done_;  // when the first step of this process ended
};

/// The bar's text, `width` columns at most: "[=====>    ]  45% 450/1000 | loss 2.3100 | 1m02s left". Negative
/// seconds_left: not known.
std::string progress_bar(int width, int64_t done, int64_t total, double loss, double seconds_left);
std::string duration_text(double seconds);  // "42s", "3m05s", "2h07m", "3d04h"

// ---- Loss curve ----------------------------------------------------------------------------------------------------

struct LossPoint {
  int64_t step = 0;
  double loss = 0;
};

struct LossHistory {
  std::vector<LossPoint> train;
  std::vector<LossPoint> validation;
};

/// The losses in a metrics.jsonl, ordered by step. A step that was repeated after a resume counts as last written; lines
/// that are not whole are left out. Throws ExitCode::usage if the file cannot be read.
LossHistory read_loss_history(const std::string& metrics_path);

struct LossCurveStyle {
  std::string title = "Training loss";
  std::string y_label = "loss (nats per token)";
  std::optional<double> reference;  // a horizontal line, for instance the entropy of the data
  std::string reference_label;      // "entropy of the stories 1.234"
};

/// Makes metrics.jsonl end with `last_step`, so that a run that goes on from there writes no step twice. Returns how many records
/// of later steps were cut off. No file: nothing to do. Throws ExitCode::usage.
int64_t cut_metrics(const std::string& metrics_path, int64_t last_step);

/// A picture as SVG: training loss as it was (faint) and smoothed, validation points, the reference.
std::string loss_curve_svg(const LossHistory& given, const LossCurveStyle& style);
/// Writes it (atomically) to a path ending in .svg. Throws ExitCode::usage with the reason.
void write_loss_curve(const std::string& path, const LossHistory& history, const LossCurveStyle& style);

// ---- The run -------------------------------------------------------------------------------------------------------

using NameValue = std::pair<std::string, std::string>;

/// What produced a run: run.json. Text throughout, in this order.
struct RunRecord {
  std::string started;               // ISO 8601, UTC
  std::vector<std::string> command;  // argv
  std::string commit;                // of the build; "unknown" if it was not built from a git checkout
  std::string compiler;
  std::vector<NameValue> libraries;  // name, version
  std::string device;                // "NVIDIA H200 x 8", or the CPU's name
  std::string driver;                // "" without a GPU
  std::vector<NameValue> gpu;        // its temperature, clocks, power at the start, as far as known
  std::vector<std::string> hosts;
  std::string system;             // kernel and machine
  std::vector<NameValue> config;  // the resolved configuration: option, value
};

/// A record with what the build and this process know: start time, commit, compiler, host, C library and kernel.
RunRecord make_run_record(int argc, const char* const* argv);
std::string to_json(const RunRecord& record);

}  // namespace kinoe
