// RMSNorm of query and key heads on the GPU against the CPU in fp64.
#include "kernels/qk_norm.h"

#include "test/gpu_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;
constexpr float kEps = 1e-6F;

struct Problem {
  Problem(const QkNormCase& c, DType type, Random& random)
      : shape(c),
        pitch((c.heads + 2 * c.kv_heads) * c.head_dim),
        saved((c.heads + c.kv_heads) * c.head_dim),
        qkv(random.normal(c.tokens * pitch, 1, type)),
        q_weight(random.normal(c.head_dim, 1, type)),
        k_weight(random.normal(c.head_dim, 1, type)),
        d_out(random.normal(c.tokens * pitch, 1, type)) {}

  [[nodiscard]] TensorOn head(const Context& ctx, DType type, const Values& v) const {
    return {ctx, type, {shape.head_dim}, v};
  }

  /// {qkv, raw}; raw is absent unless `save`.
  [[nodiscard]] Outputs forward(const Context& ctx, DType type, bool save = true) const {
    const TensorOn x(ctx, type, {shape.tokens, pitch}, qkv);
    const TensorOn raw = save ? TensorOn(ctx, type, {shape.tokens, saved}) : TensorOn();
    const TensorOn wq = head(ctx, type, q_weight), wk = head(ctx, type, k_weight);
    qk_norm_forward(ctx, {x, raw, wq, wk, shape.heads, shape.kv_heads, kEps});
    wq.expect_unchanged("q_weight");
    wk.expect_unchanged("k_weight");
    return {{"qkv", x, 1e-5}, {"raw", raw}};
  }

  /// {d_qkv, d_q_weight, d_k_weight} from what the forward pass kept.
  [[nodiscard]] Outputs backward(const Context& ctx, DType type, const Values& raw_values,
                                 double start = 0) const {
    const TensorOn d(ctx, type, {shape.tokens, pitch}, d_out),
        raw(ctx, type, {shape.tokens, saved}, raw_values);
    const DType sum = accumulator_of(type);
    const Values starts(static_cast<size_t>(shape.head_dim), start);
    const TensorOn dq = start != 0 ? head(ctx, sum, starts) : TensorOn(ctx, sum, {shape.head_dim});
    const TensorOn dk = start != 0 ? head(ctx, sum, starts) : TensorOn(ctx, sum, {shape.head_dim});
    const TensorOn scratch =
        TensorOn::scratch(ctx, qk_norm_backward_scratch_bytes(ctx.backend, shape.tokens, shape.head_dim));
    qk_norm_backward(ctx, {d, dq, dk, start != 0, raw, head(ctx, type, q_weight), head(ctx, type, k_weight),
                           shape.heads, shape.kv_heads, kEps, scratch});
    raw.expect_unchanged("raw");
    return {{"d_qkv", d, 2e-5}, {"d_q_weight", dq}, {"d_k_weight", dk}};
  }

  QkNormCase shape;
  int64_t pitch, saved;
  Values qkv, q_weight, k_weight, d_out;
};

/// Heads of both sides of every row of the launch table, and some that are not made of whole accesses.
std::vector<QkNormCase> table_cases(DType type) {
  const int64_t vector = type == DType::f32 ? 4 : 8;
  std::vector<QkNormCase> cases;
  for (const int64_t accesses : {1, 7, 8, 9, 16, 17, 32, 33, 64, 65})
    for (const int64_t odd : {0, 1}) cases.push_back({kCompare, 301, 3, 2, accesses * vector + odd});
  return cases;
}

TEST(QkNormGpu, EqualsTheCpuAtAllShapes) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const DType type : {DType::f32, DType::bf16}) {
    Precision precision("qk_norm", type);
    std::vector<QkNormCase> cases = cases_for(qk_norm_cases(), kCompare);
    for (const QkNormCase& c : table_cases(type)) cases.push_back(c);
    for (const QkNormCase& c : cases) {
      SCOPED_TRACE(cat(c.label(), " ", name_of(type)));
      const Problem p(c, type, random);
      // The norm of two values may be small, which magnifies their rounding.
      const Tolerance tolerance = c.head_dim == 2 ? Tolerance{1e-3, 1e-3, 1e-3} : Tolerance{1e-5, 1e-5, 5e-6};
      const Outputs f = p.forward(gpu, type);
      precision.expect(f, p.forward(kCpu, DType::f64), tolerance);
      expect_close("raw keeps what came", f[1].tensor.values(),
                   p.forward(kCpu, DType::f64)[1].tensor.values(), {0, 0, 0});
      expect_same_bits("inference", p.forward(gpu, type, false)[0].tensor, f[0].tensor);
      const Values raw = f[1].tensor.values();
      if (c.head_dim == 2 && type == DType::bf16) continue;  // its gradient is all cancellation
      precision.expect(p.backward(gpu, type, raw), p.backward(kCpu, DType::f64, raw), tolerance);
    }
  }
}

TEST(QkNormGpu, ValuesKeepTheirBits) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const int64_t d : {17, 128}) {
    const Problem p({kCompare, 19, 4, 2, d}, DType::bf16, random);
    const Outputs f = p.forward(device->context(), DType::bf16);
    const Values after = f[0].tensor.values();
    const Values d_after =
        p.backward(device->context(), DType::bf16, f[1].tensor.values())[0].tensor.values();
    for (size_t i = 0; i < after.size(); ++i)
      if (static_cast<int64_t>(i) % p.pitch >= p.saved) {
        ASSERT_EQ(after[i], p.qkv[i]) << i;
        ASSERT_EQ(d_after[i], p.d_out[i]) << i;
      }
  }
}

TEST(QkNormGpu, AccumulatesOntoWhatIsThere) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  const Problem p({kCompare, 301, 5, 2, 64}, DType::bf16, random);
  const Values raw = p.forward(gpu, DType::bf16)[1].tensor.values();
  const Outputs fresh = p.backward(gpu, DType::bf16, raw), added = p.backward(gpu, DType::bf16, raw, 3);
  for (const size_t i : {size_t{1}, size_t{2}}) {
    Values expected = fresh[i].tensor.values();
    for (double& x : expected) x = static_cast<double>(static_cast<float>(x + 3));
    expect_close(fresh[i].name, added[i].tensor.values(), expected, {0, 0, 0});
  }
}

TEST(QkNormGpu, NanAndInfReachTheirHeadAndItsWeightGradient) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const int64_t d : {10, 64, 128})
    for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
      Problem p({kCompare, 5, 3, 2, d}, DType::f32, random);
      p.qkv[static_cast<size_t>(2 * p.pitch + 3 * d + 5)] = bad;  // the first key head of token 2
      SCOPED_TRACE(cat(p.shape.label(), " with ", bad));
      const Outputs f = p.forward(gpu, DType::f32), exact = p.forward(kCpu, DType::f32);
      expect_close("qkv", f[0].tensor.values(), exact[0].tensor.values(), {1e-4, 1e-4});
      const Values raw = exact[1].tensor.values();
      const Outputs g = p.backward(gpu, DType::f32, raw), exact_g = p.backward(kCpu, DType::f32, raw);
      for (size_t i = 0; i < 3; ++i)
        expect_close(g[i].name, g[i].tensor.values(), exact_g[i].tensor.values(), {1e-4, 1e-4});
    }
}

TEST(QkNormGpu, AddressesThatAllowNoVectorsGiveTheSameValues) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const DType type : {DType::f32, DType::bf16}) {
    const QkNormCase c{kCompare, 33, 6, 2, 64};
    const Problem p(c, type, random);
    const auto matrix = [&](int64_t columns, const Values& v) {
      return ShiftedTensor(gpu, type, {c.tokens, columns}, 1, v);
    };
    const ShiftedTensor x = matrix(p.pitch, p.qkv), raw = matrix(p.saved, {}), d = matrix(p.pitch, p.d_out);
    const TensorOn wq = p.head(gpu, type, p.q_weight), wk = p.head(gpu, type, p.k_weight);
    qk_norm_forward(gpu, {x, raw, wq, wk, c.heads, c.kv_heads, kEps});
    const Outputs f = p.forward(gpu, type);
    // The sums run in another order, which may turn a rounding.
    const Tolerance near = type == DType::bf16 ? Tolerance{1e-5, 0x1p-7, 1e-3} : Tolerance{1e-5, 1e-5, 1e-6};
    expect_close("qkv", x.values(), f[0].tensor.values(), near);
    expect_close("raw", raw.values(), f[1].tensor.values(), {0, 0, 0});
    const TensorOn dq(gpu, DType::f32, {c.head_dim}), dk(gpu, DType::f32, {c.head_dim});
    const TensorOn scratch =
        TensorOn::scratch(gpu, qk_norm_backward_scratch_bytes(Backend::cuda, c.tokens, c.head_dim));
    qk_norm_backward(gpu, {d, dq, dk, false, raw, wq, wk, c.heads, c.kv_heads, kEps, scratch});
    const Outputs g = p.backward(gpu, type, f[1].tensor.values());
    expect_close("d_qkv", d.values(), g[0].tensor.values(), near);
    expect_close("d_q_weight", dq.values(), g[1].tensor.values(), {1e-4, 1e-5, 1e-6});
    expect_close("d_k_weight", dk.values(), g[2].tensor.values(), {1e-4, 1e-5, 1e-6});
  }
}

// At the shapes of a training step: twice the same bits, and as many times the sums of the tokens that repeat.
TEST(QkNormGpu, WeightGradientsRepeatAtTrainingShapes) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const QkNormCase& c : cases_for(qk_norm_cases(), kBench)) {
    SCOPED_TRACE(c.label());
    constexpr int64_t kRepeats = 64;
    QkNormCase block = c;
    block.tokens = c.tokens / kRepeats;
    const Problem p(block, DType::bf16, random);
    const Values raw_values = p.forward(gpu, DType::bf16)[1].tensor.values();
    const Outputs exact = p.backward(kCpu, DType::f64, raw_values);
    const BigTensor raw(gpu, DType::bf16, {c.tokens, p.saved}, raw_values);
    const TensorOn wq = p.head(gpu, DType::bf16, p.q_weight), wk = p.head(gpu, DType::bf16, p.k_weight);
    std::vector<char> first_d_qkv;
    expect_repeats("weight gradients", [&]() -> Outputs {
      const BigTensor d(gpu, DType::bf16, {c.tokens, p.pitch}, p.d_out);
      const TensorOn dq(gpu, DType::f32, {c.head_dim}), dk(gpu, DType::f32, {c.head_dim});
      const TensorOn scratch =
          TensorOn::scratch(gpu, qk_norm_backward_scratch_bytes(Backend::cuda, c.tokens, c.head_dim));
      qk_norm_backward(gpu, {d, dq, dk, false, raw, wq, wk, c.heads, c.kv_heads, kEps, scratch});
      const std::vector<char> bytes = d.bytes();
      if (first_d_qkv.empty()) first_d_qkv = bytes;
      EXPECT_TRUE(bytes == first_d_qkv) << "d_qkv differs between two runs";
      for (const auto& [name, got, i] :
           {std::tuple("d_q_weight", dq, size_t{1}), std::tuple("d_k_weight", dk, size_t{2})}) {
        Values times = exact[i].tensor.values();
        for (double& x : times) x *= kRepeats;
        expect_close(name, got.values(), times, {1e-1, 1e-5, 5e-6});
      }
      return {{"d_q_weight", dq}, {"d_k_weight", dk}};
    });
  }
}

TEST(QkNormGpu, MoreThanTwoToThe31Elements) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  constexpr int64_t kTokens = 530017, kBlock = 61;  // 4096 elements each
  const QkNormCase c{kCompare, kBlock, 16, 8, 128};
  Random random;
  const Problem p(c, DType::bf16, random);
  if (!enough_memory(*device, static_cast<size_t>(kTokens * (2 * p.pitch + p.saved)) * 2))
    GTEST_SKIP() << "too little memory";
  const Outputs f = p.forward(gpu, DType::bf16);
  const Values normed = f[0].tensor.values(), kept = f[1].tensor.values();
  const Values d_block = p.backward(gpu, DType::bf16, kept)[0].tensor.values();

  const BigTensor x(gpu, DType::bf16, {kTokens, p.pitch}, p.qkv), raw(gpu, DType::bf16, {kTokens, p.saved}),
      d(gpu, DType::bf16, {kTokens, p.pitch}, p.d_out);
  const TensorOn wq = p.head(gpu, DType::bf16, p.q_weight), wk = p.head(gpu, DType::bf16, p.k_weight);
  const TensorOn dq(gpu, DType::f32, {c.head_dim}), dk(gpu, DType::f32, {c.head_dim});
  const TensorOn scratch =
      TensorOn::scratch(gpu, qk_norm_backward_scratch_bytes(Backend::cuda, kTokens, c.head_dim));
  qk_norm_forward(gpu, {x, raw, wq, wk, c.heads, c.kv_heads, kEps});
  qk_norm_backward(gpu, {d, dq, dk, false, raw, wq, wk, c.heads, c.kv_heads, kEps, scratch});
  const auto expect_rows = [&](const char* name, const BigTensor& actual, const Values& block,
                               int64_t columns) {
    for (const int64_t row : telling_rows(kTokens, columns)) {
      const auto from = block.begin() + row % kBlock * columns;
      expect_close(cat(name, " token ", row), actual.values(row * columns, columns),
                   Values(from, from + columns), {0, 0, 0});
    }
  };
  expect_rows("qkv", x, normed, p.pitch);
  expect_rows("raw", raw, kept, p.saved);
  expect_rows("d_qkv", d, d_block, p.pitch);
}

}  // namespace
}  // namespace kinoe::optest
