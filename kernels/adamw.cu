// AdamW on the GPU: one pass over the flat range of parameters.
//
// Bytes per parameter with bf16 weights: fp32 moments 16 read + 14 written = 30, bf16 moments 12 + 10 = 22. The hash of
// the new masters and the stochastic rounding ride along in the integer units: about 60 instructions for two mix64 of
// each element and 25 for a quarter of a Philox block, where 4.2 TB/s leave a multiprocessor time for 200 (30 bytes)
// or 145 (22 bytes). Measured on an H200 (2026-11-30): 93 % of the copy bandwidth, and with bf16 moments 85 % before
// root and quotient were left to the special function unit.
//
// A block takes a chunk of the range, finds the first segment in it by binary search, and then only moves on; a thread
// takes 4 elements at a time (16 bytes of fp32). Four that lie in one segment go by vector accesses, those at the ends
// of segments one by one; padding between segments is never touched. The hash is a wrapping sum, so the blocks add
// theirs atomically in any order.
#include "kernels/adamw.h"

#include <cmath>

#include "kernels/common/cuda_util.cuh"

namespace kinoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kQuad = 4;          // elements of one access
constexpr int64_t kBlock = 8192;  // elements of one block

template <class M>
struct Pointers {
  float* masters;
  M* m;
  M* v;
  const float* gradients;
  bf16* weights;  // or null
  const AdamWSegment* segments;
  StepState* state;
  int64_t n;
  int segment_count;
  bool vectors;  // all addresses allow vector accesses
};

struct Coefficients {
  float lr, beta1, beta2, eps;
  float m_correction, v_correction;  // 1 / (1 - beta^t)
  uint64_t rounding_seed;
};

/// The new values of one element. m and v are rounded only after they have been used. Every rounding is spelled out:
/// left to itself the compiler fuses differently in the vector and the single path, and bits would depend on alignment.
/// Root and quotient come from the special function unit, 1 ulp each: the exact ones are 25 instructions longer, with
/// branches that keep the four elements of a thread from overlapping, and made arithmetic the limit.
__device__ __forceinline__ void update(float& p, float& m, float& v, float g, const Coefficients& c,
                                       float decay) {
  m = __fmaf_rn(c.beta1, m, __fmul_rn(1.0F - c.beta1, g));
  v = __fmaf_rn(c.beta2, v, __fmul_rn(__fmul_rn(1.0F - c.beta2, g), g));
  const float scale = __fadd_rn(sqrt_fast(__fmul_rn(v, c.v_correction)), c.eps);
  const float step = __fmul_rn(__fmul_rn(m, c.m_correction), reciprocal_fast(scale));
  p = __fmaf_rn(-c.lr, __fmaf_rn(decay, p, step), p);
}

/// `bits`: 16 of them are used; none for fp32.
__device__ __forceinline__ void round_moment(float& to, float value, uint32_t) { to = value; }
__device__ __forceinline__ void round_moment(bf16& to, float value, uint32_t bits) {
  to = to_bf16_stochastic(value, bits);
}
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return to_float(x); }

/// Element i of segment s; returns its hash.
template <class M>
__device__ __forceinline__ uint64_t update_one(const Pointers<M>& a, const Coefficients& c, float grad_scale,
                                               const AdamWSegment& s, int64_t i, bool apply) {
  const int64_t index = s.first_index + (i - s.begin);
  float p = a.masters[i];
  if (apply) {
    float m = widen(a.m[i]), v = widen(a.v[i]);
    update(p, m, v, __fmul_rn(a.gradients[i], grad_scale), c, s.weight_decay);
    uint32_t word = 0;
    if constexpr (sizeof(M) == 2) word = rounding_word(c.rounding_seed, s.tensor_key, index);
    a.masters[i] = p;
    round_moment(a.m[i], m, word);
    round_moment(a.v[i], v, word >> 16);
    if (a.weights != nullptr) a.weights[i] = to_bf16(p);
  }
  return master_hash(s.tensor_key, index, __float_as_uint(p));
}

/// The random words of 4 consecutive elements: one Philox block when they begin at a multiple of 4, else two.
__device__ __forceinline__ void rounding_words(uint64_t seed, uint64_t key, int64_t index,
                                               uint32_t (&words)[kQuad]) {
  const auto block = static_cast<uint64_t>(index) >> 2;
  const int skip = static_cast<int>(index & 3);
  const Philox4 low = philox(seed, key, block);
  if (skip == 0) {
#pragma unroll
    for (int j = 0; j < kQuad; ++j) words[j] = low.v[j];
    return;
  }
  const Philox4 high = philox(seed, key, block + 1);
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      if (j + skip == k) words[j] = low.v[k];
      if (j + skip == k + kQuad) words[j] = high.v[k];
    }
  }
}

/// Elements i to i + 3, all in segment s.
template <class M>
__device__ __forceinline__ uint64_t update_quad(const Pointers<M>& a, const Coefficients& c, float grad_scale,
                                                const AdamWSegment& s, int64_t i) {
  const Raw<float, kQuad> raw_p = load_once<float, kQuad>(a.masters + i);
  const Raw<float, kQuad> raw_g = load_once<float, kQuad>(a.gradients + i);
  const Raw<M, kQuad> raw_m = load_once<M, kQuad>(a.m + i);
  const Raw<M, kQuad> raw_v = load_once<M, kQuad>(a.v + i);
  float p[kQuad], g[kQuad], m[kQuad], v[kQuad];
  to_floats<float, kQuad>(raw_p, p);
  to_floats<float, kQuad>(raw_g, g);
  to_floats<M, kQuad>(raw_m, m);
  to_floats<M, kQuad>(raw_v, v);

  const int64_t index = s.first_index + (i - s.begin);
  uint64_t hash = 0;
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    update(p[j], m[j], v[j], __fmul_rn(g[j], grad_scale), c, s.weight_decay);
    hash += master_hash(s.tensor_key, index + j, __float_as_uint(p[j]));
  }
  store<float, kQuad>(a.masters + i, from_floats<float, kQuad>(p));
  if (a.weights != nullptr) store<bf16, kQuad>(a.weights + i, from_floats<bf16, kQuad>(p));
  if constexpr (sizeof(M) == 2) {
    uint32_t words[kQuad];
    rounding_words(c.rounding_seed, s.tensor_key, index, words);
    uint32_t rm[kQuad], rv[kQuad];
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      rm[j] = to_bf16_stochastic(m[j], words[j]).bits;
      rv[j] = to_bf16_stochastic(v[j], words[j] >> 16).bits;
    }
    store<M, kQuad>(a.m + i, make_uint2(rm[0] | rm[1] << 16, rm[2] | rm[3] << 16));
    store<M, kQuad>(a.v + i, make_uint2(rv[0] | rv[1] << 16, rv[2] | rv[3] << 16));
  } else {
    store<M, kQuad>(a.m + i, from_floats<M, kQuad>(m));
    store<M, kQuad>(a.v + i, from_floats<M, kQuad>(v));
  }
  return hash;
}

/// The hash of elements i to i + 3 as they are.
template <class M>
__device__ __forceinline__ uint64_t hash_quad(const Pointers<M>& a, const AdamWSegment& s, int64_t i) {
  float p[kQuad];
  to_floats<float, kQuad>(load_once<float, kQuad>(a.masters + i), p);
  const int64_t index = s.first_index + (i - s.begin);
  uint64_t hash = 0;
#pragma unroll
  for (int j = 0; j < kQuad; ++j) hash += master_hash(s.tensor_key, index + j, __float_as_uint(p[j]));
  return hash;
}

/// The first segment that ends behind `at`.
__device__ __forceinline__ int first_segment(const AdamWSegment* segments, int count, int64_t at) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (segments[middle].end <= at)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

template <class M>
__global__ void __launch_bounds__(kThreads, 4) adamw_kernel(Pointers<M> a, Coefficients c) {
  __shared__ unsigned long long shared[kThreads / 32];
  const bool apply = a.state->halted == 0 && a.state->skipped == 0;
  const float grad_scale = a.state->grad_scale;
  const int64_t block_begin = static_cast<int64_t>(blockIdx.x) * kBlock;
  const int64_t block_end = block_begin + kBlock < a.n ? block_begin + kBlock : a.n;

  unsigned long long hash = 0;
  int at = first_segment(a.segments, a.segment_count, block_begin);
  if (at < a.segment_count) {
    AdamWSegment s = a.segments[at];
    for (int64_t i = block_begin + static_cast<int64_t>(threadIdx.x) * kQuad; i < block_end;
         i += kThreads * kQuad) {
      while (s.end <= i && at + 1 < a.segment_count) s = a.segments[++at];
      if (s.end <= i) break;
      if (a.vectors && s.begin <= i && i + kQuad <= s.end) {
        hash += apply ? update_quad(a, c, grad_scale, s, i) : hash_quad(a, s, i);
        continue;
      }
      const int64_t stop = i + kQuad < block_end ? i + kQuad : block_end;
      for (int64_t j = i; j < stop; ++j) {
        while (s.end <= j && at + 1 < a.segment_count) s = a.segments[++at];
        if (s.begin <= j && j < s.end) hash += update_one(a, c, grad_scale, s, j, apply);
      }
    }
  }
  hash = block_sum<kThreads>(hash, shared);
  if (threadIdx.x == 0 && hash != 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(&a.state->weights_hash), hash);
}

__global__ void step_gate_kernel(StepState* state, const double* raw_norm, double nominal_tokens,
                                 double grad_clip) {
  StepState s = *state;
  const double norm = *raw_norm;
  if (!isfinite(norm) || s.overflow != 0 || s.bad_token != 0) s.halted = 1;
  s.skipped = s.target_tokens == 0 ? 1 : 0;
  // The backward pass divided by the nominal number of tokens; the mean is over the true one.
  const double to_mean = s.target_tokens == 0 ? 0.0 : nominal_tokens / static_cast<double>(s.target_tokens);
  s.grad_norm = norm * to_mean;
  const bool clip = grad_clip > 0 && s.grad_norm > grad_clip;
  s.grad_scale = static_cast<float>(clip ? to_mean * (grad_clip / s.grad_norm) : to_mean);
  *state = s;
}

template <class M>
void launch(const Context& ctx, const AdamW& args, const Coefficients& coefficients) {
  Pointers<M> a{.masters = args.masters.as<float>(),
                .m = args.m.as<M>(),
                .v = args.v.as<M>(),
                .gradients = args.gradients.as<float>(),
                .weights = args.weights ? args.weights.as<bf16>() : nullptr,
                .segments = static_cast<const AdamWSegment*>(args.segments.data),
                .state = static_cast<StepState*>(args.state.data),
                .n = args.masters.size(),
                .segment_count = static_cast<int>(args.segment_count),
                .vectors = false};
  a.vectors = aligned_to(kQuad * sizeof(float), a.masters, a.gradients) &&
              aligned_to(kQuad * sizeof(M), a.m, a.v) && aligned_to(kQuad * sizeof(bf16), a.weights);
  adamw_kernel<M><<<grid_of(ceil_div(a.n, kBlock)), kThreads, 0, stream_of(ctx)>>>(a, coefficients);
  CUDA_CHECK_LAUNCH(adamw);
}

}  // namespace

void step_gate(const Context& ctx, const StepGate& args) {
  check(args);
  step_gate_kernel<<<1, 1, 0, stream_of(ctx)>>>(static_cast<StepState*>(args.state.data),
                                                args.raw_norm.as<double>(), args.nominal_tokens,
                                                args.grad_clip);
  CUDA_CHECK_LAUNCH(step_gate);
}

void adamw(const Context& ctx, const AdamW& args) {
  check(args);
  CHECK(args.masters.dtype == DType::f32, "adamw: the GPU's masters are fp32, not ",
        name_of(args.masters.dtype));
  CHECK(args.segment_count < int64_t{1} << 31, "adamw: fewer than 2^31 segments, here ", args.segment_count);
  if (args.masters.size() == 0 || args.segment_count == 0) return;
  const auto correction = [&](float beta) {
    return static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(beta), static_cast<double>(args.t))));
  };
  const Coefficients coefficients{.lr = args.lr,
                                  .beta1 = args.beta1,
                                  .beta2 = args.beta2,
                                  .eps = args.eps,
                                  .m_correction = correction(args.beta1),
                                  .v_correction = correction(args.beta2),
                                  .rounding_seed = args.rounding_seed};
  if (args.m.dtype == DType::bf16)
    launch<bf16>(ctx, args, coefficients);
  else
    launch<float>(ctx, args, coefficients);
}

}  // namespace kinoe::cuda
