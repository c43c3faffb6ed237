// Which tile shape suits a GPU: the attention kernels in the shapes of kernels/attention_forward.cuh and
// attention_backward.cuh (marked *) and in others that fit into the registers, so that the choice can be made again.
//
//   make build/cuda/bench_attention && build/cuda/bench_attention
//
// Timed as all benchmarks are (dev/bench/measure.h), at the shapes of GPT-2 124M and Llama 8B. TFLOP/s count the visible
// half of the scores: two products forward, three for dQ, four for dK and dV. "differs" is the relative L2 distance from
// the shape in use. Compiled for sm_90a alone; the Makefile's rule can name another.
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "dev/bench/measure.h"
#include "dev/bench/reference.h"
#include "kernels/attention_backward.cuh"
#include "kernels/attention_forward.cuh"

namespace kinoe::bench {
namespace {

struct Problem {
  Problem(Workspace& w, int64_t batch, int64_t length, int64_t heads, int64_t kv_heads, int64_t dim)
      : products(attention_forward_cost(batch, length, heads, kv_heads, dim, 2).flops / 2),
        queries(heads * dim),
        keys(kv_heads * dim),
        label(cat("D=", dim, " B=", batch, " T=", length, " H=", heads, ":", kv_heads)) {
    const auto type = DType::bf16;
    const int64_t columns = queries + 2 * keys;
    forward = {.out = w.output(type, {batch, length, queries}),
               .lse = w.output(DType::f32, {batch, heads, length}),
               .qkv = w.random(type, {batch, length, columns}),
               .doc_start = {},
               .heads = heads,
               .kv_heads = kv_heads,
               .scale = 1.0F / std::sqrt(static_cast<float>(dim))};
    backward = {
        .d_qkv = w.output(type, {batch, length, columns}),
        .d_out = w.random(type, {batch, length, queries}, normal(1e-3)),
        .out = forward.out,
        .lse = forward.lse,
        .qkv = forward.qkv,
        .doc_start = {},
        .doc_end = {},
        .heads = heads,
        .kv_heads = kv_heads,
        .scale = forward.scale,
        .scratch = w.scratch(cuda::attention_backward_scratch_bytes(batch, length, heads, kv_heads, dim))};
  }
  AttentionForward forward;
  AttentionBackward backward;
  double products;  // FLOPs of one product
  int64_t queries, keys;
  std::string label;
};

struct Candidate {
  std::string name;
  std::function<void(const Context&, const Problem&)> run;
};
using Candidates = std::vector<Candidate>;

/// The configurations in the order given; the first is the one in use.
template <class... Configs>
Candidates forward_candidates() {
  return {{cat(Configs::kM, "x16 rows, ", Configs::kWarps, " warps, N ", Configs::kBlockN, ", step ",
               Configs::kStep, Configs::kQueryInRegisters ? ", Q in registers, " : ", ",
               Configs::kBlocksPerSm, " a multiprocessor"),
           [](const Context& ctx, const Problem& p) {
             cuda::run_attention_forward<Configs>(ctx, p.forward);
           }}...};
}
template <class... Configs>
Candidates query_candidates() {
  return {
      {cat(Configs::kM, "x16 rows, ", Configs::kWarps, " warps, N ", Configs::kBlockN, ", step ",
           Configs::kStep, " x ", Configs::kUnroll, Configs::kInRegisters ? ", Q dO in registers, " : ", ",
           Configs::kBlocksPerSm, " a multiprocessor"),
       [](const Context& ctx, const Problem& p) { cuda::run_attention_dq<Configs>(ctx, p.backward); }}...};
}
template <class... Configs>
Candidates key_candidates() {
  return {
      {cat(Configs::kM, "x16 rows, ", Configs::kWarps, " warps, M ", Configs::kBlockM, ", step ",
           Configs::kStep, " x ", Configs::kUnroll, Configs::kKeysInRegisters ? ", K" : ",",
           Configs::kValuesInRegisters ? " V in registers, " : " ", Configs::kBlocksPerSm,
           " a multiprocessor"),
       [](const Context& ctx, const Problem& p) { cuda::run_attention_dk_dv<Configs>(ctx, p.backward); }}...};
}

class Bench {
 public:
  explicit Bench(const Context& ctx) : work_(ctx), timer_(ctx, 9) {}

  template <int kHeadDim>
  void run(int64_t batch, int64_t length, int64_t heads, int64_t kv_heads, const Candidates& forward,
           const Candidates& query, const Candidates& key) {
    const Problem p(work_, batch, length, heads, kv_heads, kHeadDim);
    std::printf("%s\n", p.label.c_str());
    rows("forward", p, 2, forward, p.forward.out, {{0, p.queries}});
    forward[0].run(work_.context(), p);
    rows("dQ", p, 3, query, p.backward.d_qkv, {{0, p.queries}});
    query[0].run(work_.context(), p);  // the statistics that dK and dV need
    rows("dK, dV", p, 4, key, p.backward.d_qkv, {{p.queries, 2 * p.keys}});
    work_.clear();
  }

 private:
  void rows(const char* kernel, const Problem& p, double products, const Candidates& candidates,
            const Tensor& result, const std::vector<Span>& columns) {
    const Span positions{0, 512};
    Part chosen(1, 1);
    for (const Candidate& c : candidates) {
      const bool first = &c == candidates.data();
      fill_zero(work_.context(), result.data, result.bytes());
      const double us = timer_.median_us([&] { c.run(work_.context(), p); });
      const Part now = Part::of(work_, result, positions, columns);
      if (first) chosen = now;
      std::printf("  %-8s %9.1f us %6.1f TFLOP/s  differs %.1e  %s %s\n", kernel, us,
                  products * p.products / us / 1e6, now.error_against(chosen), first ? "*" : " ",
                  c.name.c_str());
      std::fflush(stdout);
    }
  }

  Workspace work_;
  Timer timer_;
};

void run() {
  using cuda::ForwardChoice, cuda::ForwardConfig, cuda::KeyChoice, cuda::KeyConfig, cuda::QueryChoice,
      cuda::QueryConfig;
  const std::unique_ptr<Device> device = Device::gpu(0);
  Bench bench(device->context());
  bench.run<64>(
      64, 1024, 12, 12,
      forward_candidates<ForwardChoice<64>, ForwardConfig<64, 2, 4, 64, 64, false, 2>,
                         ForwardConfig<64, 2, 4, 64, 32, true, 2>, ForwardConfig<64, 1, 4, 64, 64, true, 3>,
                         ForwardConfig<64, 1, 8, 64, 64, true, 2>>(),
      query_candidates<QueryChoice<64>, QueryConfig<64, 2, 4, 64, 16, 1, true, 2>,
                       QueryConfig<64, 2, 4, 64, 32, 1, true, 2>, QueryConfig<64, 2, 4, 64, 32, 2, false, 2>,
                       QueryConfig<64, 1, 4, 64, 32, 2, true, 3>>(),
      key_candidates<KeyChoice<64>, KeyConfig<64, 2, 4, 64, 32, 1, false, false, 2>,
                     KeyConfig<64, 1, 4, 64, 64, 1, true, true, 2>,
                     KeyConfig<64, 1, 4, 64, 32, 2, true, true, 3>>());
  bench.run<128>(
      4, 4096, 32, 8,
      forward_candidates<ForwardChoice<128>, ForwardConfig<128, 2, 4, 64, 32, false, 2>,
                         ForwardConfig<128, 1, 4, 64, 64, true, 2>, ForwardConfig<128, 1, 4, 64, 32, true, 2>,
                         ForwardConfig<128, 1, 4, 32, 32, true, 3>,
                         ForwardConfig<128, 1, 8, 64, 64, true, 1>>(),
      query_candidates<QueryChoice<128>, QueryConfig<128, 1, 4, 64, 32, 2, true, 2>,
                       QueryConfig<128, 1, 4, 64, 16, 4, true, 2>, QueryConfig<128, 1, 4, 64, 64, 1, true, 2>,
                       QueryConfig<128, 1, 8, 32, 32, 1, true, 1>>(),
      key_candidates<KeyChoice<128>, KeyConfig<128, 1, 4, 64, 32, 1, true, false, 2>,
                     KeyConfig<128, 1, 4, 64, 64, 1, true, false, 2>,
                     KeyConfig<128, 1, 4, 64, 64, 1, false, false, 2>>());
}

}  // namespace
}  // namespace kinoe::bench

int main() {
  try {
    kinoe::bench::run();
    return 0;
  } catch (const kinoe::Error& error) {
    std::fprintf(stderr, "bench_attention: error: %s\n", error.what());
    return static_cast<int>(error.code);
  }
}
