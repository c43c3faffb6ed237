// A configuration of the same run that needs less memory: which options to give up first.

#include <algorithm>
#include <cmath>

#include "trainer/config.h"

namespace kinoe {
namespace {

constexpr int64_t kEnoughTokens = 8192;  // of a micro-batch: fewer leave a device idle

/// Roughly the percentage of speed a choice costs; 16-bit moments cost none but change the numbers, so they come last.
double cost(const RunConfig& c, Backend backend) {
  double cost = c.recompute == "block" ? 25 : c.recompute == "light" ? 3 : 0;
  const int64_t tokens = *c.micro_batch * *c.seq_len;
  if (backend == Backend::cuda && tokens < kEnoughTokens)
    cost += 10 * std::log2(static_cast<double>(kEnoughTokens) / static_cast<double>(tokens));
  return cost + (c.adam_state == DType::bf16 ? 40 : 0);
}

}  // namespace

Fitting find_fitting(const RunConfig& config, const std::function<size_t(const RunConfig&)>& bytes_of,
                     size_t limit) {
  const Backend backend = config.device == DeviceChoice::cuda ? Backend::cuda : Backend::cpu;
  std::optional<RunConfig> best, least;
  double best_cost = 0;
  size_t least_bytes = 0;
  const std::string modes[] = {"none", "light", "block"};
  size_t mode = config.recompute == "block" ? 2 : config.recompute == "light" ? 1 : 0;
  for (; mode < 3; ++mode)
    for (const DType moments : {DType::f32, DType::bf16}) {
      if (moments != config.adam_state && (moments == DType::f32 || backend == Backend::cpu)) continue;
      for (int64_t batch = std::min(*config.micro_batch, *config.global_batch); batch > 0; batch /= 2) {
        RunConfig c = config;
        c.recompute = modes[mode];
        c.adam_state = moments;
        c.micro_batch = batch;
        const size_t bytes = bytes_of(c);
        if (!least || bytes < least_bytes) {
          least = c;
          least_bytes = bytes;
        }
        if (bytes > limit) continue;
        if (!best || cost(c, backend) < best_cost) {
          best = c;
          best_cost = cost(c, backend);
        }
        break;  // smaller ones cost more
      }
    }
  const RunConfig& chosen = best ? *best : *least;
  Fitting result;
  result.fits = best.has_value();
  result.bytes = bytes_of(chosen);
  const auto add = [&](const std::string& option) {
    result.options += (result.options.empty() ? "" : " ") + option;
  };
  if (chosen.micro_batch != config.micro_batch) add(cat("--micro-batch ", *chosen.micro_batch));
  if (chosen.recompute != config.recompute) add("--recompute " + chosen.recompute);
  if (chosen.adam_state != config.adam_state) add("--adam-state bf16");
  return result;
}

}  // namespace kinoe
