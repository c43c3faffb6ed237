// Sampling. No keys and values are kept between tokens: the window runs through the model again for each new one, with
// training's own kernels. It shows what a model has learned; serving one is another program's work.
#include "trainer/sample.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/common/rng.h"
#include "trainer/forward.h"

namespace kinoe {
namespace {

// A window grows in steps of this many positions: few different shapes, so that few matrix products are measured.
constexpr int64_t kLengthStep = 32;

/// Logits of one token per row are asked for.
WorkShape work_shape(int64_t count, int64_t length) {
  return {
      .batch = count, .length = length, .recompute = Recompute::none, .training = false, .head_rows = count};
}

std::vector<float> to_host(const Context& ctx, const Tensor& logits) {
  const auto n = static_cast<size_t>(logits.size());
  std::vector<float> values(n);
  if (logits.dtype == DType::f32) {
    download(ctx, values.data(), logits.data, logits.bytes());
    synchronize(ctx);
  } else if (logits.dtype == DType::bf16) {
    std::vector<bf16> narrow(n);
    download(ctx, narrow.data(), logits.data, logits.bytes());
    synchronize(ctx);
    std::transform(narrow.begin(), narrow.end(), values.begin(), [](bf16 x) { return to_float(x); });
  } else {
    const auto* wide = logits.as<double>();
    std::transform(wide, wide + n, values.begin(), [](double x) { return static_cast<float>(x); });
  }
  return values;
}

}  // namespace

int32_t pick_token(const float* logits, int64_t vocab_size, const SampleOptions& options, double uniform) {
  const auto best = static_cast<int32_t>(std::max_element(logits, logits + vocab_size) - logits);
  if (options.temperature == 0) return best;

  std::vector<double> p(static_cast<size_t>(vocab_size));
  const double top = static_cast<double>(logits[best]);
  for (size_t i = 0; i < p.size(); ++i)
    p[i] = std::exp((static_cast<double>(logits[i]) - top) / options.temperature);

  const bool all = (options.top_k == 0 || options.top_k >= vocab_size) && options.top_p >= 1.0;
  if (!all) {
    std::vector<int32_t> order(p.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return p[static_cast<size_t>(a)] > p[static_cast<size_t>(b)];
    });
    size_t keep =
        options.top_k == 0 ? order.size() : std::min(order.size(), static_cast<size_t>(options.top_k));
    const double total = std::accumulate(p.begin(), p.end(), 0.0);
    double sum = 0;
    for (size_t i = 0; i < keep; ++i) {
      sum += p[static_cast<size_t>(order[i])];
      if (sum >= options.top_p * total) keep = i + 1;
    }
    for (size_t i = keep; i < order.size(); ++i) p[static_cast<size_t>(order[i])] = 0;
  }

  double left = uniform * std::accumulate(p.begin(), p.end(), 0.0);
  int32_t last = best;
  for (size_t i = 0; i < p.size(); ++i) {
    if (p[i] == 0) continue;
    last = static_cast<int32_t>(i);
    left -= p[i];
    if (left <= 0) break;
  }
  return last;
}

size_t Sampler::bytes(const Model& model, int64_t count, int64_t window) {
  Arena plan;
  take_activations(plan, model, work_shape(count, window));
  return plan.used();
}

int64_t Sampler::window(int64_t positions, int64_t longest) {
  if (longest >= positions) return positions;
  return std::min(positions, (longest + kLengthStep - 1) / kLengthStep * kLengthStep);
}

std::vector<std::vector<int32_t>> Sampler::generate(
    const Context& ctx, LayerHooks hooks, const std::vector<int32_t>& prompt, const SampleOptions& options,
    const std::function<bool(const std::vector<int32_t>&)>& stop) const {
  CHECK(!prompt.empty(), "a prompt has at least one token");
  const auto rows = static_cast<size_t>(count_);
  std::vector<std::vector<int32_t>> fresh(rows);
  std::vector<bool> done(rows, false);
  const int64_t vocab = model_.config.vocab_size;
  const int64_t ids = options.allowed > 0 ? std::min(options.allowed, vocab) : vocab;

  for (int64_t position = 0; position < options.max_tokens; ++position) {
    if (std::find(done.begin(), done.end(), false) == done.end()) break;
    const int64_t total = static_cast<int64_t>(prompt.size()) + position;
    const int64_t seen = std::min(total, window_);
    // Positions behind the last token are padding: causal attention never looks at them.
    const int64_t length = std::min(window_, (seen + kLengthStep - 1) / kLengthStep * kLengthStep);
    Arena arena(memory_);
    Activations acts = take_activations(arena, model_, work_shape(count_, length));

    std::vector<int32_t> tokens(rows * static_cast<size_t>(length), 0);
    for (size_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < seen; ++i) {
        const auto at = static_cast<size_t>(total - seen + i);
        // A row that has ended repeats its last token; nobody reads what follows.
        const std::vector<int32_t>& mine = fresh[r];
        const int32_t token = at < prompt.size()                 ? prompt[at]
                              : at - prompt.size() < mine.size() ? mine[at - prompt.size()]
                                                                 : mine.back();
        tokens[r * static_cast<size_t>(length) + static_cast<size_t>(i)] = token;
      }
    begin_step(ctx, acts);
    upload(ctx, acts.batch.tokens.data, tokens.data(), acts.batch.tokens.bytes());
    forward(ctx, model_, acts, hooks);
    std::vector<int64_t> last(rows);
    for (size_t r = 0; r < rows; ++r) last[r] = static_cast<int64_t>(r) * length + seen - 1;
    const Tensor logits = head_logits(ctx, model_, acts, hooks, last);
    const std::vector<float> values = to_host(ctx, logits);

    for (size_t r = 0; r < rows; ++r) {
      if (done[r]) continue;
      const uint32_t bits = philox(options.seed, r, static_cast<uint64_t>(position)).v[0];
      fresh[r].push_back(pick_token(values.data() + r * static_cast<size_t>(logits.columns()), ids, options,
                                    static_cast<double>(uniform01(bits))));
      if (stop && stop(fresh[r])) done[r] = true;
    }
  }
  return fresh;
}

}  // namespace kinoe
