// The rates of schedule.h: ends by comparing integers, what lies between by formula.
#include "trainer/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/common/check.h"
#include "kernels/common/nearest.h"

namespace kinoe {
namespace {

// wsd: a decay of a fifth of the run is enough to match cosine; A. Haegele et al., "Scaling laws and compute-optimal
// training beyond fixed training durations", 2024, section 3 (arXiv:2405.18392).
int64_t wsd_decay_start(const Schedule& s) {
  const auto decay = std::llround(s.wsd_decay_frac * static_cast<double>(s.total_tokens));
  return std::max(s.warmup_tokens, s.total_tokens - static_cast<int64_t>(decay));
}

}  // namespace

double Schedule::at(int64_t tokens) const {
  const bool all_warmup = warmup_tokens >= total_tokens;
  // The ends are picked by comparing integers, never by rounding a formula.
  if (tokens < warmup_tokens)
    return tokens <= 0 ? 0.0 : lr * (static_cast<double>(tokens) / static_cast<double>(warmup_tokens));
  if (all_warmup || kind == ScheduleKind::constant) return lr;
  if (tokens >= total_tokens) return lr * min_lr_frac;

  const int64_t start = kind == ScheduleKind::wsd ? wsd_decay_start(*this) : warmup_tokens;
  if (tokens <= start) return lr;
  const double p = static_cast<double>(tokens - start) / static_cast<double>(total_tokens - start);
  const double height = kind == ScheduleKind::cosine ? 0.5 * (1.0 + std::cos(std::numbers::pi * p)) : 1.0 - p;
  return lr * (min_lr_frac + (1.0 - min_lr_frac) * height);
}

void validate(const Schedule& s) {
  const auto fraction = [](double x) { return x >= 0.0 && x <= 1.0; };  // false for NaN
  if (!std::isfinite(s.lr) || s.lr <= 0.0)
    fail(ExitCode::usage, "learning rate: expected a finite number above 0, got ", s.lr);
  if (!fraction(s.min_lr_frac))
    fail(ExitCode::usage, "min-lr-frac: expected a fraction in [0, 1], got ", s.min_lr_frac);
  if (!fraction(s.wsd_decay_frac))
    fail(ExitCode::usage, "wsd decay: expected a fraction in [0, 1], got ", s.wsd_decay_frac);
  if (s.total_tokens < 1)
    fail(ExitCode::usage, "schedule: expected a run of at least 1 token, got ", s.total_tokens);
  if (s.warmup_tokens < 0 || s.warmup_tokens > s.total_tokens)
    fail(ExitCode::usage, "warm-up of ", s.warmup_tokens, " tokens: expected 0 to the run's ", s.total_tokens,
         "; shorten --warmup-tokens or --warmup-steps");
}

const std::vector<std::string>& schedule_names() {
  // In the order of the enum.
  static const std::vector<std::string> kNames = {"cosine", "linear", "wsd", "constant"};
  return kNames;
}

ScheduleKind schedule_kind(const std::string& name) {
  const auto& names = schedule_names();
  const auto it = std::find(names.begin(), names.end(), name);
  if (it == names.end())
    fail(ExitCode::usage, "unknown schedule '", name, "'; nearest known: ", nearest_name(name, names));
  return static_cast<ScheduleKind>(it - names.begin());
}

const char* name_of(ScheduleKind kind) { return schedule_names()[static_cast<size_t>(kind)].c_str(); }

}  // namespace kinoe
