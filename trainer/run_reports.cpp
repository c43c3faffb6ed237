// A step's record is made in three places: training knows its numbers, the device its memory, the monitor its counters.
#include "trainer/run_reports.h"

#include <chrono>

#include "dataloader/stories.h"
#include "trainer/tables.h"

namespace kinoe {

void print_notes(const Team& team, const std::vector<std::string>& notes) {
  if (!team.first()) return;
  for (const std::string& note : notes) std::fprintf(stderr, "train_gpt: %s\n", note.c_str());
}

Reports::Reports(const Team& team, const RunSetup& setup, Device& device, DType compute, size_t planned_bytes,
                 std::FILE* quiet)
    : setup_(setup),
      first_(team.first()),
      metrics_(join_path(setup.config.out, "metrics.jsonl")),
      monitor_(options(team, setup, quiet)),
      watch_(device, planned_bytes),
      flops_(training_flops(setup.model, setup.config.seq_len.value())),
      peak_(peak_flops(device.info().name, compute)) {}

Monitor::Options Reports::options(const Team& team, const RunSetup& setup, std::FILE* quiet) {
  Monitor::Options options;
  options.format = parse_log_format(setup.config.log_format).value();
  options.total_steps = setup.config.steps.value();
  options.first_step = setup.state.step + 1;
  options.skipped = setup.state.skipped;
  options.nan = setup.state.nan;
  if (!team.first()) {
    options.out = options.warnings = fileno(quiet);
    options.bar = Monitor::kNoBar;
    return options;
  }
  options.metrics_path = join_path(setup.config.out, "metrics.jsonl");
  if (const int64_t cut = cut_metrics(options.metrics_path, setup.state.step); cut > 0)
    print_notes(team, {cat("records of steps after ", setup.state.step, " are cut off metrics.jsonl: ", cut,
                           "; those steps are run again")});
  return options;
}

StepRecord Reports::step(StepRecord record) {
  record.tflops_per_gpu = record.tokens_per_s_per_gpu * flops_.causal / 1e12;
  if (peak_) {
    record.mfu = record.tokens_per_s_per_gpu * flops_.causal / peak_->flops;
    record.mfu_full = record.tokens_per_s_per_gpu * flops_.full / peak_->flops;
  }
  watch_.look(std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count());
  record.mem_bytes = static_cast<int64_t>(watch_.memory().bytes);
  record.mem_peak_bytes = static_cast<int64_t>(watch_.memory().peak_bytes);
  record = monitor_.record(record);
  if (!record.applied && record.nan > setup_.state.nan) {
    monitor_.finish();
    fail(ExitCode::diverged, "step ", record.step, ": loss ", record.loss, ", gradient norm ",
         record.grad_norm,
         ": not finite, so the update was not applied and the run ends; try a lower --lr or a longer "
         "warm-up; checkpoints are in ",
         join_path(setup_.config.out, "checkpoints"));
  }
  return record;
}

void Reports::evaluation(const StepRecord& at, const EvalResult& result, double ms) {
  monitor_.record(EvalRecord{.step = at.step,
                             .samples = at.samples,
                             .tokens = at.tokens,
                             .val_loss = result.loss,
                             .val_tokens = result.target_tokens,
                             .eval_ms = ms});
}

void Reports::last_evaluation(std::FILE* out, const EvalResult& result) {
  monitor_.finish();
  if (on_stories(setup_.config)) {
    std::fprintf(out, "validation loss %.4f  entropy %.4f  nats/byte\n", result.loss, entropy_per_byte());
  } else {
    std::fprintf(out, "validation loss %.4f nats per token\n", result.loss);
  }
}

void Reports::finish() {
  for (const std::string& finding : watch_.findings()) monitor_.note(finding);
  monitor_.finish();
}

std::string Reports::draw_loss() const {
  std::string picture = join_path(setup_.config.out, "loss.svg");
  if (!first_) return picture;
  LossCurveStyle style;
  style.title = cat(setup_.config.model, ", ", grouped(setup_.config.total_tokens()), " tokens");
  if (setup_.byte_tokens) style.y_label = "loss (nats per byte)";
  if (on_stories(setup_.config)) {
    style.reference = entropy_per_byte();
    char label[64];
    std::snprintf(label, sizeof(label), "entropy of the stories %.3f", entropy_per_byte());
    style.reference_label = label;
  }
  try {
    write_loss_curve(picture, read_loss_history(metrics_), style);
  } catch (const Error& error) {
    std::fprintf(stderr, "train_gpt: warning: the loss curve is not drawn: %s\n", error.what());
    return "";
  }
  return picture;
}

}  // namespace kinoe
