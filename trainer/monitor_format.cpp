// Records as text: JSON lines, lines for people, lines for Megatron's parsers, the progress bar.
#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <cmath>
#include <nlohmann/json.hpp>

#include "trainer/monitor.h"
#include "trainer/monitor_text.h"

namespace kinoe {
namespace {

/// A JSON object on one line, its keys in the order they are added.
class JsonLine {
 public:
  void add(const char* key, int64_t value) { put(key, std::to_string(value)); }
  void add(const char* key, double value) { put(key, number(value)); }
  void add(const char* key, std::optional<double> value) { put(key, value ? number(*value) : "null"); }
  void add_text(const char* key, const std::string& plain) { put(key, '"' + plain + '"'); }
  void add_any_text(const char* key, const std::string& text) {
    put(key, nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
  [[nodiscard]] std::string text() const { return text_ + "}"; }

 private:
  void put(const char* key, const std::string& value) {
    text_ += text_.size() > 1 ? ",\"" : "\"";
    text_ += key;
    text_ += "\":";
    text_ += value;
  }

  /// Always with a point or an exponent: readers take "-0" and "3" for integers, and an integer has no negative zero.
  static std::string number(double value) {
    if (!std::isfinite(value)) return "null";
    char digits[40];
    const std::to_chars_result end = std::to_chars(digits, digits + sizeof digits, value);
    std::string text(digits, end.ptr);
    if (text.find_first_of(".e") == std::string::npos) text += ".0";
    return text;
  }

  std::string text_ = "{";
};

/// Three significant digits without an exponent: "0.0512", "4.21", "61.5", "392".
std::string three_digits(double value) {
  if (!std::isfinite(value)) return "nan";
  const double size = std::fabs(value);
  return format("%.*f", size >= 99.95 ? 0 : size >= 9.995 ? 1 : size >= 0.9995 ? 2 : 3, value);
}

/// "812", "64.0k", "1.52M".
std::string si(double value) {
  if (!std::isfinite(value)) return "nan";
  if (value >= 999.5e6) return three_digits(value * 1e-9) + "G";
  if (value >= 999.5e3) return three_digits(value * 1e-6) + "M";
  if (value >= 999.5) return three_digits(value * 1e-3) + "k";
  return format("%.0f", value);
}

std::string progress_text(int64_t step, int64_t total) {
  if (total <= 0) return format("step %6" PRId64, step);
  const int width = static_cast<int>(std::to_string(total).size());
  return format("step %*" PRId64 "/%" PRId64, width, step, total);
}

}  // namespace

std::string to_json(const StepRecord& record) {
  JsonLine line;
  line.add("step", record.step);
  line.add("samples", record.samples);
  line.add("tokens", record.tokens);
  line.add("loss", record.loss);
  line.add("grad_norm", record.grad_norm);
  line.add("lr", record.lr);
  line.add("global_batch", record.global_batch);
  line.add("seq_len", record.seq_len);
  line.add("step_ms", record.step_ms);
  line.add("compute_ms", record.compute_ms);
  line.add("data_wait_ms", record.data_wait_ms);
  line.add("comm_wait_ms", record.comm_wait_ms);
  line.add("comm_bytes", record.comm_bytes);
  line.add("tokens_per_s", record.tokens_per_s);
  line.add("tokens_per_s_per_gpu", record.tokens_per_s_per_gpu);
  line.add("tflops_per_gpu", record.tflops_per_gpu);
  line.add("mfu", record.mfu);
  line.add("mfu_full", record.mfu_full);
  line.add("mem_bytes", record.mem_bytes);
  line.add("mem_peak_bytes", record.mem_peak_bytes);
  line.add("skipped", record.skipped);
  line.add("nan", record.nan);
  line.add_text("weights_hash", format("%016" PRIx64, record.weights_hash));
  return line.text();
}

std::string to_json(const EvalRecord& record) {
  JsonLine line;
  line.add("step", record.step);
  line.add("samples", record.samples);
  line.add("tokens", record.tokens);
  line.add("val_loss", record.val_loss);
  line.add("val_tokens", record.val_tokens);
  line.add("eval_ms", record.eval_ms);
  return line.text();
}

std::string to_json(const SaveRecord& record) {
  JsonLine line;
  line.add("step", record.step);
  line.add_any_text("checkpoint", record.path);
  if (!record.error.empty()) line.add_any_text("save_error", record.error);
  line.add("save_stall_ms", record.save_stall_ms);
  line.add("save_ms", record.save_ms);
  line.add("save_bytes", record.save_bytes);
  return line.text();
}

std::string to_line(const StepRecord& record, int64_t total_steps) {
  std::string line = progress_text(record.step, total_steps);
  line += format(" | loss %7.4f | norm %6.3f | lr %.2e | %7.1f ms | ", record.loss, record.grad_norm,
                 record.lr, record.step_ms);
  line += si(record.tokens_per_s) + " tok/s";
  if (record.tflops_per_gpu > 0) line += " | " + three_digits(record.tflops_per_gpu) + " TFLOP/s";
  if (record.mfu) line += format(" | MFU %.1f%%", *record.mfu * 100);
  if (!record.applied) line += " | NOT APPLIED";
  return line;
}

std::string to_line(const EvalRecord& record, int64_t total_steps) {
  return progress_text(record.step, total_steps) + format(" | validation loss %.4f | ", record.val_loss) +
         si(static_cast<double>(record.val_tokens)) + " tokens | " + duration_text(record.eval_ms * 1e-3);
}

std::string to_line(const SaveRecord& record, int64_t total_steps) {
  if (!record.error.empty())
    return progress_text(record.step, total_steps) + " | warning: no checkpoint: " + record.error +
           "; training goes on";
  return progress_text(record.step, total_steps) + " | saved " + si(static_cast<double>(record.save_bytes)) +
         "B in " + duration_text(record.save_ms * 1e-3) +
         format(", training waited %.0f ms", record.save_stall_ms);
}

std::string to_megatron(const StepRecord& record, int64_t total_steps) {
  const double samples_per_s =
      record.step_ms > 0 ? static_cast<double>(record.global_batch) * 1000 / record.step_ms : 0;
  const bool finite = std::isfinite(record.loss) && std::isfinite(record.grad_norm);
  std::string line = format(" iteration %8" PRId64 "/%8" PRId64 " |", record.step, total_steps);
  line += format(" consumed samples: %12" PRId64 " |", record.samples);
  line += format(" consumed tokens: %12" PRId64 " |", record.tokens);
  line += format(" elapsed time per iteration (ms): %.1f |", record.step_ms);
  line += format(" learning rate: %.3E |", record.lr);
  line += format(" global batch size: %5" PRId64 " |", record.global_batch);
  line += format(" lm loss: %.6E |", record.loss);
  line += " loss scale: 1.0 |";  // bf16 and fp32 need none
  line += format(" curriculum seqlen: %5" PRId64 " |", record.seq_len);
  line += format(" actual seqlen: %5" PRId64 " |", record.seq_len);
  line += format(" number of skipped iterations: %3d |", record.applied && finite ? 0 : 1);
  line += format(" number of nan iterations: %3d |", finite ? 0 : 1);
  line += format(" samples per second: %.3f |", samples_per_s);
  line += format(" tokens per gpu per second (tgs): %.3f |", record.tokens_per_s_per_gpu);
  line += format(" TFLOPs: %.2f |", record.tflops_per_gpu);
  return line;
}

std::string to_megatron(const EvalRecord& record, int64_t /*total_steps*/) {
  return format(" validation loss at iteration %" PRId64 " | lm loss value: %.6E | lm loss PPL: %.6E |",
                record.step, record.val_loss, std::exp(record.val_loss));
}

std::optional<LogFormat> parse_log_format(std::string_view name) {
  if (name == "line") return LogFormat::line;
  if (name == "megatron") return LogFormat::megatron;
  if (name == "json") return LogFormat::json;
  return std::nullopt;
}

std::string duration_text(double seconds) {
  if (!(seconds >= 0) || seconds > 1e12) return "?";
  if (seconds < 9.95) return format("%.1fs", seconds);
  const int64_t s = std::llround(seconds);
  if (s < 60) return format("%" PRId64 "s", s);
  if (s < 3600) return format("%" PRId64 "m%02" PRId64 "s", s / 60, s % 60);
  if (s < 86400) return format("%" PRId64 "h%02" PRId64 "m", s / 3600, s % 3600 / 60);
  return format("%" PRId64 "d%02" PRId64 "h", s / 86400, s % 86400 / 3600);
}

std::string progress_bar(int width, int64_t done, int64_t total, double loss, double seconds_left) {
  constexpr int kLongest = 48, kShortest = 8;  // cells of the bar
  if (width <= 0) return "";
  std::string tail;
  double share = 0;
  if (total > 0) {
    share = std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0);
    // Rounded down: 100% only at the end.
    tail = format("%3d%% %" PRId64 "/%" PRId64, static_cast<int>(share * 100), done, total);
  } else {
    tail = format("step %" PRId64, done);
  }
  const std::string left =
      total > 0 && seconds_left >= 0 ? " | " + duration_text(seconds_left) + " left" : "";
  const std::string loss_text = format(" | loss %.4f", loss);
  const size_t columns = static_cast<size_t>(width);
  if (tail.size() + left.size() <= columns) {
    if (tail.size() + left.size() + loss_text.size() <= columns) tail += loss_text;
    tail += left;
  }
  tail = tail.substr(0, columns);

  const int cells = std::min(kLongest, width - static_cast<int>(tail.size()) - 3);  // "[", "]", " "
  if (total <= 0 || cells < kShortest) return tail;
  const int full = static_cast<int>(share * cells);
  std::string bar(static_cast<size_t>(full), '=');
  if (full < cells) bar += '>';
  bar.resize(static_cast<size_t>(cells), ' ');
  return "[" + bar + "] " + tail;
}

}  // namespace kinoe
