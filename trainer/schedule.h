// The learning rate as a pure function of tokens.
//
// Nothing is stored and nothing is stepped: a resumed run, another batch size or another rank count gets the same
// rate at the same token count, to the last bit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kinoe {

enum class ScheduleKind : uint8_t { cosine, linear, wsd, constant };

/// With t = tokens, W = warmup_tokens, E = total_tokens, f = min_lr_frac:
///   t <= W         lr t / W                                            all kinds: linear warm-up
///   W < t < E      p = (t - W) / (E - W)
///     cosine       lr (f + (1 - f) (1 + cos(pi p)) / 2)
///     linear       lr (f + (1 - f) (1 - p))
///     wsd          lr until S = max(W, E - round(wsd_decay_frac E)), then linear to lr f over the rest
///     constant     lr
///   t >= E         lr f  (constant: lr)
/// at(W) == lr and at(E) == lr * f exactly. W == E is a run that is all warm-up: it ends, and stays, at lr.
struct Schedule {
  ScheduleKind kind = ScheduleKind::cosine;
  double lr = 0;              // the peak
  double min_lr_frac = 0.1;   // f: the last rate as a fraction of the peak
  int64_t warmup_tokens = 0;  // W; 0 starts at the peak
  int64_t total_tokens = 0;   // E
  double wsd_decay_frac = 0.2;

  /// `tokens` counts those consumed *including* the step about to be applied: the first step of a run asks for
  /// at(tokens_per_step), the last one for at(total_tokens).
  [[nodiscard]] double at(int64_t tokens) const;

  bool operator==(const Schedule&) const = default;
};

/// Throws Error(usage): a rate that is not finite and positive, fractions outside [0, 1], W outside [0, E], E < 1.
void validate(const Schedule& schedule);

/// What --schedule accepts, in the order of ScheduleKind.
const std::vector<std::string>& schedule_names();
/// Throws Error(usage) for a name that is not one of schedule_names().
ScheduleKind schedule_kind(const std::string& name);
const char* name_of(ScheduleKind kind);

}  // namespace kinoe
