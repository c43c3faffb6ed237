// Text from a model: choose the next token, append it, again.
#pragma once

#include <functional>
#include <vector>

#include "trainer/layer_hooks.h"
#include "trainer/model.h"

namespace kinoe {

struct SampleOptions {
  int64_t max_tokens = 256;
  double temperature = 1.0;  // 0: always the most probable token (the lowest id among equals)
  int64_t top_k = 0;         // only the k most probable; 0: all
  double top_p = 1.0;        // only the smallest set of most probable tokens that reaches this probability
  uint64_t seed = 1;
  int64_t allowed = 0;  // only ids below this one, where the tokenizer has fewer than the model; 0: all
};

/// Picks one of `vocab_size` tokens. `uniform` in (0, 1) decides; equal inputs give equal tokens.
int32_t pick_token(const float* logits, int64_t vocab_size, const SampleOptions& options, double uniform);

/// Continues `count` copies of `prompt` (at least one token) at once, each with its own random numbers, keyed by (seed,
/// row, position). Rows end after max_tokens or when `stop(row's new tokens)` says so. Returns the new tokens of each row.
///
/// Works in any memory of bytes(); sequences longer than `window` see their last `window` tokens only.
class Sampler {
 public:
  Sampler(const Model& model, int64_t count, int64_t window, void* memory)
      : model_(model), count_(count), window_(window), memory_(memory) {}

  static size_t bytes(const Model& model, int64_t count, int64_t window);
  /// The window that gives a model of so many positions all it can see of `longest` tokens: long contexts cost memory.
  static int64_t window(int64_t positions, int64_t longest);

  [[nodiscard]] std::vector<std::vector<int32_t>> generate(
      const Context& ctx, LayerHooks hooks, const std::vector<int32_t>& prompt, const SampleOptions& options,
      const std::function<bool(const std::vector<int32_t>&)>& stop = nullptr) const;

 private:
  const Model& model_;
  int64_t count_;
  int64_t window_;
  void* memory_;
};

}  // namespace kinoe
