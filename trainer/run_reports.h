// What a run says of itself: sentences at its start, a record of every step and evaluation, the picture of its loss.
//
// Rank 0 has the console and metrics.jsonl. The others make the same calls: they count the same steps and say nothing.
#pragma once

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "trainer/eval.h"
#include "trainer/flops.h"
#include "trainer/launch.h"
#include "trainer/monitor.h"
#include "trainer/monitor_device.h"
#include "trainer/run_setup.h"

namespace kinoe {

/// Sentences for the user; of ranks that all have the same to say, the first says it.
void print_notes(const Team& team, const std::vector<std::string>& notes);

class Reports {
 public:
  /// `setup.config.out` is the run's directory. `planned_bytes`: of device memory, as printed. `quiet`: where the lines of other
  /// ranks than the first go. All that is given must outlive the object.
  Reports(const Team& team, const RunSetup& setup, Device& device, DType compute, size_t planned_bytes,
          std::FILE* quiet);

  /// Completes and records a step. One whose numbers are not finite ends the run (ExitCode::diverged, on every rank).
  StepRecord step(StepRecord record);
  /// An evaluation after step `at` that took so long.
  void evaluation(const StepRecord& at, const EvalResult& result, double ms);
  /// The evaluation at the end of a run, in a line of its own on `out`.
  void last_evaluation(std::FILE* out, const EvalResult& result);
  /// The text of a model, between two steps.
  void sample(const std::string& text) { monitor_.note("sample: " + text); }
  /// After the last step; what is printed from then on has the console to itself.
  void finish();
  /// Draws loss.svg into the run's directory (on rank 0) and returns its path; "" where that fails, which is a warning: the
  /// run has been saved.
  [[nodiscard]] std::string draw_loss() const;

  /// For the records of saves: null on a rank that reports nothing.
  [[nodiscard]] Monitor* monitor() { return first_ ? &monitor_ : nullptr; }

 private:
  static Monitor::Options options(const Team& team, const RunSetup& setup, std::FILE* quiet);

  const RunSetup& setup_;
  bool first_;
  std::string metrics_;
  Monitor monitor_;
  DeviceWatch watch_;
  TokenFlops flops_;
  std::optional<Peak> peak_;
};

}  // namespace kinoe
