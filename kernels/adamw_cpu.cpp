// AdamW on the CPU: chunks of the flat range in parallel; each walks the segments that it meets, so padding between
// them is never touched. The hash is a wrapping integer sum: threads add to it in any order.
//
// The moments are stored after the update has used them: with bf16 moments the master moves by the unrounded values, and
// their stochastic rounding keeps the small increments of v, which rounding to nearest would lose once v has grown.
#include "kernels/adamw.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/common/arguments.h"
#include "kernels/common/cpu.h"
#include "kernels/common/simd.h"

namespace kinoe {

void check(const StepGate& a) {
  require_size({"step_gate", "state", a.state}, DType::i32, sizeof(StepState) / 4);
  require_size({"step_gate", "raw_norm", a.raw_norm}, DType::f64, 1);
  CHECK(a.nominal_tokens > 0, "step_gate: nominal_tokens is ", a.nominal_tokens);
  CHECK(a.grad_clip >= 0, "step_gate: grad_clip is ", a.grad_clip);
}

void check(const AdamW& a) {
  const char* op = "adamw";
  const int64_t n = a.masters.size();
  const DType type = accumulator_of(a.masters.dtype);
  require_size({op, "masters", a.masters}, type, n);
  require_size({op, "gradients", a.gradients}, type, n);
  const DType moments = type == DType::f32 && a.m.dtype == DType::bf16 ? DType::bf16 : type;
  require_size({op, "m", a.m}, moments, n);
  require_size({op, "v", a.v}, moments, n);
  if (a.weights) require_size({op, "weights", a.weights}, DType::bf16, n);
  CHECK(!a.weights || type == DType::f32, op, ": bf16 weights beside fp64 masters would be rounded twice");
  CHECK(a.segment_count >= 0, op, ": segment_count is ", a.segment_count);
  if (a.segment_count > 0)
    require_size({op, "segments", a.segments}, DType::i32,
                 a.segment_count * static_cast<int64_t>(sizeof(AdamWSegment) / 4));
  require_size({op, "state", a.state}, DType::i32, sizeof(StepState) / 4);
  CHECK(a.t >= 1, op, ": t is ", a.t, ", the first update is 1");
}

namespace {

constexpr int64_t kBlock = 16384;

template <class T>
struct Coefficients {
  T lr, beta1, beta2, eps, grad_scale;
  T m_correction, v_correction;  // 1 / (1 - beta^t)
};

/// Elements [0, n) of one segment, from logical index `first`.
template <class T>
KINOE_SIMD void update(T* p, T* m, T* v, const T* gradient, const Coefficients<T>& c, T decay, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const T g = gradient[i] * c.grad_scale;
    const T mi = c.beta1 * m[i] + (T{1} - c.beta1) * g;
    const T vi = c.beta2 * v[i] + (T{1} - c.beta2) * g * g;
    m[i] = mi;
    v[i] = vi;
    p[i] -= c.lr * (mi * c.m_correction / (std::sqrt(vi * c.v_correction) + c.eps) + decay * p[i]);
  }
}

/// A segment's elements that lie in one block, with what is needed to round and to name them.
struct Piece {
  int64_t at;  // offset in the flat tensors
  int64_t n;
  int64_t index;  // logical index of the first within its tensor
  uint64_t key;
  float decay;
};

/// Moments in the type of the masters.
template <class T, class M>
void update_piece(const AdamW& a, const Coefficients<T>& c, const Piece& piece) {
  T* p = a.masters.as<T>() + piece.at;
  M* m = a.m.as<M>() + piece.at;
  M* v = a.v.as<M>() + piece.at;
  const T* g = a.gradients.as<T>() + piece.at;
  if constexpr (std::is_same_v<T, M>) {
    update(p, m, v, g, c, static_cast<T>(piece.decay), piece.n);
  } else {
    constexpr int64_t kTile = 256;
    T wide_m[kTile], wide_v[kTile];
    for (int64_t begin = 0; begin < piece.n; begin += kTile) {
      const int64_t n = std::min(kTile, piece.n - begin);
      for (int64_t i = 0; i < n; ++i) {
        wide_m[i] = to_float(m[begin + i]);
        wide_v[i] = to_float(v[begin + i]);
      }
      update(p + begin, wide_m, wide_v, g + begin, c, static_cast<T>(piece.decay), n);
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t word = rounding_word(a.rounding_seed, piece.key, piece.index + begin + i);
        m[begin + i] = to_bf16_stochastic(wide_m[i], word);
        v[begin + i] = to_bf16_stochastic(wide_v[i], word >> 16);
      }
    }
  }
}

template <class T>
KINOE_SIMD uint64_t hash_piece(const T* p, const Piece& piece) {
  uint64_t hash = 0;
  for (int64_t i = 0; i < piece.n; ++i)
    hash += master_hash(piece.key, piece.index + i, std::bit_cast<uint32_t>(static_cast<float>(p[i])));
  return hash;
}

template <class T>
KINOE_SIMD void round_weights(bf16* weights, const T* p, int64_t n) {
  for (int64_t i = 0; i < n; ++i) weights[i] = to_bf16(static_cast<float>(p[i]));
}

template <class T, class M>
void run(const AdamW& a) {
  const int64_t n = a.masters.size();
  const auto* segments = static_cast<const AdamWSegment*>(a.segments.data);
  const AdamWSegment* segments_end = segments + a.segment_count;
  int64_t previous = 0;
  for (const AdamWSegment* s = segments; s != segments_end; ++s) {
    CHECK(s->begin >= previous && s->end >= s->begin && s->end <= n, "adamw: segment ", s - segments, " [",
          s->begin, ", ", s->end, ") after ", previous, " in a range of ", n);
    previous = s->end;
  }

  auto& state = *static_cast<StepState*>(a.state.data);
  const bool apply = state.halted == 0 && state.skipped == 0;
  const auto correction = [&](float beta) {
    return static_cast<T>(1.0 / (1.0 - std::pow(static_cast<double>(beta), static_cast<double>(a.t))));
  };
  const Coefficients<T> c{static_cast<T>(a.lr),  static_cast<T>(a.beta1),          static_cast<T>(a.beta2),
                          static_cast<T>(a.eps), static_cast<T>(state.grad_scale), correction(a.beta1),
                          correction(a.beta2)};
  uint64_t hash = 0;
#pragma omp parallel for reduction(+ : hash) if (n > 2 * kBlock)
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, n);
    const AdamWSegment* s =
        std::partition_point(segments, segments_end, [&](const AdamWSegment& x) { return x.end <= begin; });
    for (; s != segments_end && s->begin < end; ++s) {
      const int64_t at = std::max(s->begin, begin);
      const Piece piece{at, std::min(s->end, end) - at, s->first_index + (at - s->begin), s->tensor_key,
                        s->weight_decay};
      if (apply) {
        update_piece<T, M>(a, c, piece);
        if (a.weights) round_weights(a.weights.as<bf16>() + at, a.masters.as<T>() + at, piece.n);
      }
      hash += hash_piece(a.masters.as<T>() + at, piece);
    }
  }
  state.weights_hash += hash;
}

}  // namespace

void cpu::step_gate(const Context& /*ctx*/, const StepGate& args) {
  check(args);
  auto& state = *static_cast<StepState*>(args.state.data);
  const double raw_norm = *args.raw_norm.as<double>();
  if (!std::isfinite(raw_norm) || state.overflow != 0 || state.bad_token != 0) state.halted = 1;
  state.skipped = state.target_tokens == 0 ? 1 : 0;
  // The backward pass divided by the nominal number of tokens; the mean is over the true one.
  const double to_mean =
      state.target_tokens == 0 ? 0.0 : args.nominal_tokens / static_cast<double>(state.target_tokens);
  state.grad_norm = raw_norm * to_mean;
  const bool clip = args.grad_clip > 0 && state.grad_norm > args.grad_clip;
  state.grad_scale = static_cast<float>(clip ? to_mean * (args.grad_clip / state.grad_norm) : to_mean);
}

void cpu::adamw(const Context& /*ctx*/, const AdamW& args) {
  check(args);
  if (args.masters.dtype == DType::f64) return run<double, double>(args);
  if (args.m.dtype == DType::bf16) return run<float, bf16>(args);
  run<float, float>(args);
}

}  // namespace kinoe
