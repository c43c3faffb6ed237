// The shapes at which operations are tested and measured: one list per operation, for the gradient check on the CPU,
// the comparison of the GPU with the CPU, and the benchmark.
//
// Small lists hold what breaks kernels: one row, one position, one head, odd and prime sizes, sizes around a vector or
// a warp, every remainder of the vocabulary modulo 8, all targets ignored. Large ones hold every width of the presets:
// kernels tuned at one width have failed at 1600.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/common/check.h"
#include "kernels/matmul.h"

namespace kinoe::optest {

/// What a case is for; a list is filtered with `cases_for`.
enum Use : unsigned {
  kGradient = 1,  // small enough for finite differences in fp64
  kCompare = 2,   // backend against backend
  kBench = 4,     // a shape of a training step
};

template <class Case>
std::vector<Case> cases_for(const std::vector<Case>& all, Use use) {
  std::vector<Case> result;
  for (const Case& c : all)
    if (c.uses & use) result.push_back(c);
  return result;
}

/// Model widths of all presets.
inline const std::vector<int64_t>& preset_widths() {
  static const std::vector<int64_t> widths = {128,  768,  896,  1024, 1280, 1536,
                                              1600, 2048, 2560, 3072, 3584, 4096};
  return widths;
}

/// Lengths of flat ranges: around a vector, a warp, a block and a chunk of 16 Ki.
inline const std::vector<int64_t>& flat_sizes() {
  static const std::vector<int64_t> sizes = {1,   2,   3,    7,     8,     9,     31,    33,
                                             255, 257, 1000, 16383, 16384, 16385, 100003};
  return sizes;
}

// ---- embedding ------------------------------------------------------------------------------------------------------

struct EmbeddingCase {
  unsigned uses;
  int64_t batch, length, channels, vocab;
  bool positions;
  [[nodiscard]] std::string label() const {
    return cat("embedding B=", batch, " T=", length, " C=", channels, " V=", vocab,
               positions ? " positions" : "");
  }
};

inline std::vector<EmbeddingCase> embedding_cases() {
  constexpr unsigned kSmall = kGradient | kCompare;
  std::vector<EmbeddingCase> cases = {
      {kSmall, 1, 1, 1, 1, true},           {kSmall, 1, 1, 8, 5, false},
      {kSmall, 3, 1, 5, 2, true},           {kSmall, 2, 7, 3, 11, true},
      {kSmall, 2, 5, 17, 4, false},         {kCompare, 4, 64, 40, 3, true},
      {kCompare, 2, 257, 33, 1, true},      {kCompare, 3, 333, 24, 50257, true},
      {kBench, 64, 1024, 768, 50257, true}, {kBench, 1, 4096, 4096, 128256, false},
  };
  for (const int64_t c : preset_widths()) cases.push_back({kCompare, 2, 65, c, 257, c % 128 == 0});
  return cases;
}

// ---- norm -----------------------------------------------------------------------------------------------------------

struct NormCase {
  unsigned uses;
  int64_t rows, columns;
  bool rms, branch, bias;
  [[nodiscard]] std::string label() const {
    return cat(rms ? "rmsnorm" : "layernorm", " N=", rows, " C=", columns, branch ? " branch" : "",
               bias ? " bias" : "");
  }
};

inline std::vector<NormCase> norm_cases() {
  std::vector<NormCase> cases;
  for (const bool rms : {false, true})
    for (const bool branch : {false, true}) {
      constexpr unsigned kSmall = kGradient | kCompare;
      const bool bias = !rms;
      cases.push_back({kSmall, 1, 2, rms, branch, bias});
      cases.push_back({kSmall, 1, 8, rms, branch, bias});
      cases.push_back({kSmall, 3, 7, rms, branch, bias});
      cases.push_back({kSmall, 5, 33, rms, branch, bias});
      cases.push_back({kSmall, 7, 16, rms, branch, !bias});  // LayerNorm without, RMSNorm with a bias
      cases.push_back({kCompare, 129, 65, rms, branch, bias});
      cases.push_back({kCompare, 1000, 96, rms, branch, bias});
      for (const int64_t c : preset_widths()) cases.push_back({kCompare, 13, c, rms, branch, bias});
    }
  cases.push_back({kCompare, 301, 1600, false, true, true});  // wide, and more rows than row groups
  cases.push_back({kBench, 65536, 768, false, true, true});
  cases.push_back({kBench, 16384, 1600, false, true, true});
  cases.push_back({kBench, 16384, 2048, true, true, false});
  cases.push_back({kBench, 4096, 4096, true, true, false});
  return cases;
}

// ---- matmul ---------------------------------------------------------------------------------------------------------

struct MatmulCase {
  unsigned uses;
  int64_t rows, outputs, inputs;  // N, O, C
  bool bias;
  WeightLayout layout;
  [[nodiscard]] std::string label() const {
    return cat("matmul N=", rows, " O=", outputs, " C=", inputs, bias ? " bias" : "",
               layout == WeightLayout::in_out ? " [C,O]" : " [O,C]");
  }
};

inline std::vector<MatmulCase> matmul_cases() {
  std::vector<MatmulCase> cases;
  for (const WeightLayout layout : {WeightLayout::out_in, WeightLayout::in_out})
    for (const bool bias : {false, true}) {
      constexpr unsigned kSmall = kGradient | kCompare;
      cases.push_back({kSmall, 1, 1, 1, bias, layout});
      cases.push_back({kSmall, 1, 8, 16, bias, layout});
      cases.push_back({kSmall, 3, 5, 7, bias, layout});
      cases.push_back({kSmall, 9, 4, 17, bias, layout});
      cases.push_back({kSmall, 17, 33, 2, bias, layout});
      cases.push_back({kCompare, 64, 64, 64, bias, layout});
      cases.push_back({kCompare, 67, 131, 259, bias, layout});
      cases.push_back({kCompare, 257, 72, 129, bias, layout});
      for (const int64_t c : preset_widths()) cases.push_back({kCompare, 34, 136, c, bias, layout});
      for (int64_t v = 1000; v < 1008; ++v) cases.push_back({kCompare, 18, v, 128, bias, layout});
    }
  const auto in_out = WeightLayout::in_out, out_in = WeightLayout::out_in;
  cases.push_back({kBench, 65536, 2304, 768, true, in_out});  // GPT-2 124M, micro-batch 64
  cases.push_back({kBench, 65536, 768, 768, true, in_out});
  cases.push_back({kBench, 65536, 3072, 768, true, in_out});
  cases.push_back({kBench, 65536, 768, 3072, true, in_out});
  cases.push_back({kBench, 16384, 50304, 768, false, out_in});
  cases.push_back({kBench, 16384, 4800, 1600, true, in_out});  // GPT-2 1558M
  cases.push_back({kBench, 16384, 6400, 1600, true, in_out});
  cases.push_back({kBench, 4096, 6144, 4096, false, out_in});  // Llama 8B
  cases.push_back({kBench, 4096, 28672, 4096, false, out_in});
  cases.push_back({kBench, 4096, 4096, 14336, false, out_in});
  return cases;
}

// ---- rope -----------------------------------------------------------------------------------------------------------

struct RopeCase {
  unsigned uses;
  int64_t batch, length, heads, kv_heads, head_dim;
  [[nodiscard]] std::string label() const {
    return cat("rope B=", batch, " T=", length, " H=", heads, ":", kv_heads, " D=", head_dim);
  }
};

inline std::vector<RopeCase> rope_cases() {
  constexpr unsigned kSmall = kGradient | kCompare;
  return {
      {kSmall, 1, 1, 1, 1, 2},        {kSmall, 2, 3, 1, 1, 6},      {kSmall, 1, 5, 3, 1, 4},
      {kSmall, 2, 4, 4, 2, 10},       {kCompare, 1, 1, 32, 8, 128}, {kCompare, 2, 33, 32, 8, 64},
      {kCompare, 3, 129, 12, 12, 80}, {kCompare, 2, 257, 7, 1, 96}, {kBench, 4, 4096, 32, 8, 64},
      {kBench, 1, 4096, 32, 8, 128},
  };
}

// ---- QK-norm --------------------------------------------------------------------------------------------------------

struct QkNormCase {
  unsigned uses;
  int64_t tokens, heads, kv_heads, head_dim;
  [[nodiscard]] std::string label() const {
    return cat("qk_norm N=", tokens, " H=", heads, ":", kv_heads, " D=", head_dim);
  }
};

inline std::vector<QkNormCase> qk_norm_cases() {
  constexpr unsigned kSmall = kGradient | kCompare;
  return {
      {kSmall, 1, 1, 1, 2},        {kSmall, 3, 2, 1, 5},       {kSmall, 5, 4, 2, 8},
      {kSmall, 2, 3, 3, 17},       {kCompare, 1, 16, 8, 128},  {kCompare, 129, 7, 1, 64},
      {kCompare, 1000, 4, 2, 80},  {kCompare, 77, 12, 12, 96}, {kCompare, 33, 6, 2, 256},
      {kCompare, 41, 2, 1, 600},   {kCompare, 301, 5, 1, 33},  {kBench, 16384, 16, 8, 128},
      {kBench, 16384, 32, 8, 128},
  };
}

// ---- attention ------------------------------------------------------------------------------------------------------

struct AttentionCase {
  unsigned uses;
  int64_t batch, length, heads, kv_heads, head_dim;
  bool documents;
  [[nodiscard]] std::string label() const {
    return cat("attention B=", batch, " T=", length, " H=", heads, ":", kv_heads, " D=", head_dim,
               documents ? " documents" : "");
  }
};

inline std::vector<AttentionCase> attention_cases() {
  std::vector<AttentionCase> cases;
  for (const bool documents : {false, true}) {
    constexpr unsigned kSmall = kGradient | kCompare;
    cases.push_back({kSmall, 1, 1, 1, 1, 2, documents});
    cases.push_back({kSmall, 2, 3, 1, 1, 4, documents});
    cases.push_back({kSmall, 1, 9, 4, 2, 6, documents});
    cases.push_back({kSmall, 2, 13, 3, 1, 5, documents});
    for (const int64_t d : {64, 80, 96, 128}) {
      cases.push_back({kCompare, 2, 1, 2, 2, d, documents});
      cases.push_back({kCompare, 1, 63, 4, 2, d, documents});
      cases.push_back({kCompare, 2, 65, 2, 1, d, documents});
      cases.push_back({kCompare, 1, 128, 1, 1, d, documents});
      cases.push_back({kCompare, 1, 257, 6, 3, d, documents});
      cases.push_back({kCompare, 1, 1000, 2, 2, d, documents});
    }
    cases.push_back({kCompare, 1, 300, 32, 8, 128, documents});
    cases.push_back({kCompare, 2, 192, 25, 25, 64, documents});  // GPT-2 1558M: an odd number of heads
  }
  cases.push_back({kBench, 64, 1024, 12, 12, 64, false});
  cases.push_back({kBench, 16, 1024, 25, 25, 64, false});
  cases.push_back({kBench, 4, 4096, 32, 8, 64, false});
  cases.push_back({kBench, 1, 4096, 32, 8, 128, false});
  return cases;
}

// ---- activation -----------------------------------------------------------------------------------------------------

/// columns: F. GELU reads [rows, F], SwiGLU [rows, 2 F].
struct ActivationCase {
  unsigned uses;
  int64_t rows, columns;
  [[nodiscard]] std::string label() const { return cat("activation N=", rows, " F=", columns); }
};

inline std::vector<ActivationCase> activation_cases() {
  constexpr unsigned kSmall = kGradient | kCompare;
  std::vector<ActivationCase> cases = {
      {kSmall, 1, 1},        {kSmall, 1, 8},        {kSmall, 3, 7},
      {kSmall, 5, 33},       {kCompare, 129, 65},   {kCompare, 77, 512},
      {kBench, 65536, 3072}, {kBench, 16384, 6400}, {kBench, 4096, 14336},
  };
  for (const int64_t c : preset_widths()) cases.push_back({kCompare, 9, 4 * c});
  return cases;
}

// ---- cross-entropy --------------------------------------------------------------------------------------------------

enum class Targets : uint8_t { all, some, none };  // rows that have a target; the others are ignored (-1)

struct CrossEntropyCase {
  unsigned uses;
  int64_t rows, vocab, pitch;  // columns [vocab, pitch) are padding
  Targets targets;
  [[nodiscard]] std::string label() const {
    return cat("cross-entropy N=", rows, " V=", vocab, " pitch=", pitch,
               targets == Targets::none   ? " all ignored"
               : targets == Targets::some ? " some ignored"
                                          : "");
  }
};

inline std::vector<CrossEntropyCase> cross_entropy_cases() {
  constexpr unsigned kSmall = kGradient | kCompare;
  std::vector<CrossEntropyCase> cases = {
      {kSmall, 1, 1, 1, Targets::all},
      {kSmall, 1, 2, 8, Targets::all},
      {kSmall, 3, 11, 16, Targets::some},
      {kSmall, 4, 9, 9, Targets::none},
      {kSmall, 5, 33, 128, Targets::some},
      {kCompare, 1, 257, 384, Targets::all},
      {kCompare, 7, 65535, 65536, Targets::some},
      {kCompare, 9, 50257, 50304, Targets::some},
      {kCompare, 3, 128256, 128256, Targets::all},
      {kCompare, 64, 1000, 1024, Targets::none},
      {kBench, 16384, 50257, 50304, Targets::all},
      {kBench, 4096, 128256, 128256, Targets::all},
  };
  for (int64_t v = 1000; v < 1008; ++v) {
    cases.push_back({kCompare, 13, v, v, Targets::some});     // rows that start unaligned
    cases.push_back({kCompare, 13, v, 1024, Targets::some});  // padded to a multiple of 128
  }
  return cases;
}

// ---- adamw ----------------------------------------------------------------------------------------------------------

struct AdamWCase {
  unsigned uses;
  int64_t n;  // elements of the flat range, padding included
  bool bf16_moments, bf16_weights;
  [[nodiscard]] std::string label() const {
    return cat("adamw n=", n, bf16_moments ? " bf16 moments" : "", bf16_weights ? " bf16 weights" : "");
  }
};

/// A range of n elements: two tensors, the first cut in two pieces (as a rank's share is), padding before, between and
/// after; short ranges are one tensor. Logical indices begin at 1000 and at 0, so that they meet multiples of 4 at other
/// places than the flat range does.
inline std::vector<AdamWSegment> adamw_segments(int64_t n) {
  const uint64_t a = stable_key("a.weight"), b = stable_key("b.bias");
  if (n < 20) return {{.begin = 0, .end = n, .tensor_key = a, .first_index = 5, .weight_decay = 0.1F}};
  const int64_t third = n / 3;
  return {{.begin = 2, .end = third, .tensor_key = a, .first_index = 1000, .weight_decay = 0.1F},
          {.begin = third, .end = third + 4, .tensor_key = a, .first_index = 7, .weight_decay = 0.1F},
          {.begin = third + 9, .end = n - 1, .tensor_key = b, .first_index = 0, .weight_decay = 0}};
}

inline std::vector<AdamWCase> adamw_cases() {
  std::vector<AdamWCase> cases;
  for (const bool moments : {false, true})
    for (const bool weights : {false, true}) {
      for (const int64_t n : flat_sizes()) cases.push_back({kCompare, n, moments, weights});
      cases.push_back({kBench, 124 * 1000 * 1000, moments, weights});
    }
  return cases;
}

}  // namespace kinoe::optest
