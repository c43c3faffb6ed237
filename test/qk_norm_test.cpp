// RMSNorm of query and key heads on the CPU against its formula in long double, finite differences and the contract.
#include "kernels/qk_norm.h"

#include "test/op_cases.h"
#include "test/op_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;
constexpr double kEps = 1e-6F;

struct Problem {
  Problem(const QkNormCase& c, DType dtype, Random& random)
      : shape(c),
        type(dtype),
        pitch((c.heads + 2 * c.kv_heads) * c.head_dim),
        qkv(random.normal(c.tokens * pitch)),
        q_weight(random.normal(c.head_dim)),
        k_weight(random.normal(c.head_dim)),
        d_out(random.normal(c.tokens * pitch)) {}

  [[nodiscard]] int64_t normed() const { return shape.heads + shape.kv_heads; }
  [[nodiscard]] TensorOn head(const Values& v) const { return {kCpu, type, {shape.head_dim}, v}; }

  struct Result {
    Values qkv, raw;
  };
  [[nodiscard]] Result forward(bool save = true) const {
    const TensorOn x(kCpu, type, {shape.tokens, pitch}, qkv);
    const TensorOn raw = save ? TensorOn(kCpu, type, {shape.tokens, normed() * shape.head_dim}) : TensorOn();
    const TensorOn wq = head(q_weight), wk = head(k_weight);
    cpu::qk_norm_forward(kCpu, {x, raw, wq, wk, shape.heads, shape.kv_heads, static_cast<float>(kEps)});
    wq.expect_unchanged("q_weight");
    wk.expect_unchanged("k_weight");
    if (save) raw.expect_written("raw");
    return {x.values(), save ? raw.values() : Values{}};
  }

  struct Gradients {
    Values qkv, q_weight, k_weight;
  };
  [[nodiscard]] Gradients backward(const Values& raw_values, double start = 0) const {
    const TensorOn d(kCpu, type, {shape.tokens, pitch}, d_out);
    const TensorOn raw(kCpu, type, {shape.tokens, normed() * shape.head_dim}, raw_values);
    TensorOn dq(kCpu, type, {shape.head_dim}), dk(kCpu, type, {shape.head_dim});
    if (start != 0) {
      dq.set(Values(static_cast<size_t>(shape.head_dim), start));
      dk.set(Values(static_cast<size_t>(shape.head_dim), start));
    }
    const TensorOn scratch =
        TensorOn::scratch(kCpu, qk_norm_backward_scratch_bytes(Backend::cpu, shape.tokens, shape.head_dim));
    cpu::qk_norm_backward(kCpu, {d, dq, dk, start != 0, raw, head(q_weight), head(k_weight), shape.heads,
                                 shape.kv_heads, static_cast<float>(kEps), scratch});
    raw.expect_unchanged("raw");
    dq.expect_written("d_q_weight");
    dk.expect_written("d_k_weight");
    return {d.values(), dq.values(), dk.values()};
  }

  /// From the definition, in long double.
  [[nodiscard]] Result expected() const {
    Result r{qkv, {}};
    const auto d = static_cast<size_t>(shape.head_dim);
    for (int64_t n = 0; n < shape.tokens; ++n)
      for (int64_t h = 0; h < normed(); ++h) {
        const auto at = static_cast<size_t>(n * pitch + h * shape.head_dim);
        long double squares = 0;
        for (size_t i = 0; i < d; ++i)
          squares += static_cast<long double>(qkv[at + i]) * static_cast<long double>(qkv[at + i]);
        const long double rstd =
            1 / std::sqrt(squares / static_cast<long double>(d) + static_cast<long double>(kEps));
        for (size_t i = 0; i < d; ++i) {
          const double weight = h < shape.heads ? q_weight[i] : k_weight[i];
          r.raw.push_back(qkv[at + i]);
          r.qkv[at + i] = static_cast<double>(qkv[at + i] * rstd * weight);
        }
      }
    return r;
  }

  QkNormCase shape;
  DType type;
  int64_t pitch;
  Values qkv, q_weight, k_weight, d_out;
};

TEST(QkNorm, ForwardIsItsFormulaAndKeepsWhatCame) {
  Random random;
  for (const QkNormCase& c : cases_for(qk_norm_cases(), kCompare)) {
    SCOPED_TRACE(c.label());
    const Problem p(c, DType::f32, random);
    const Problem::Result got = p.forward(), expected = p.expected();
    expect_close("qkv", got.qkv, expected.qkv, {1e-5, 1e-5, 1e-6});
    EXPECT_EQ(got.raw, expected.raw);
    EXPECT_EQ(p.forward(false).qkv, got.qkv) << "inference keeps nothing and computes the same bits";
  }
}

TEST(QkNorm, ValuesKeepTheirBits) {
  Random random;
  const Problem p({kCompare, 9, 4, 2, 16}, DType::f32, random);
  const Values after = p.forward().qkv, d_after = p.backward(p.forward().raw).qkv;
  for (size_t i = 0; i < after.size(); ++i)
    if (static_cast<int64_t>(i) % p.pitch >= p.normed() * 16) {
      EXPECT_EQ(after[i], p.qkv[i]);
      EXPECT_EQ(d_after[i], p.d_out[i]);
    }
}

TEST(QkNorm, GradientsAreThoseOfFiniteDifferences) {
  Random random;
  for (const QkNormCase& c : cases_for(qk_norm_cases(), kGradient)) {
    SCOPED_TRACE(c.label());
    Problem p(c, DType::f64, random);
    if (c.head_dim > 4) p.q_weight[1] = 0;  // a weight may be zero: nothing may be divided by it
    const Problem::Gradients d = p.backward(p.forward().raw);
    const auto output_with = [&](Values Problem::*input) {
      return [&p, input](const Values& x) {
        Problem moved = p;
        moved.*input = x;
        return moved.forward().qkv;
      };
    };
    const double tolerance =
        c.head_dim == 2 ? 1e-5 : 1e-8;  // the norm of two values may be small: it bends sharply
    expect_gradient("qkv", output_with(&Problem::qkv), p.qkv, p.d_out, d.qkv, 400, tolerance);
    expect_gradient("q_weight", output_with(&Problem::q_weight), p.q_weight, p.d_out, d.q_weight);
    expect_gradient("k_weight", output_with(&Problem::k_weight), p.k_weight, p.d_out, d.k_weight);
  }
}

TEST(QkNorm, BackwardInFloatAgreesWithDouble) {
  Random random;
  for (const QkNormCase& c : cases_for(qk_norm_cases(), kCompare)) {
    SCOPED_TRACE(c.label());
    const Problem p(c, DType::f32, random);
    Problem q = p;
    q.type = DType::f64;
    const Problem::Gradients d = p.backward(p.forward().raw), e = q.backward(q.forward().raw);
    const double tolerance = c.head_dim == 2 ? 1e-4 : 2e-6;
    expect_close("d_qkv", d.qkv, e.qkv, {2e-5, 1e-4, tolerance});
    expect_close("d_q_weight", d.q_weight, e.q_weight, {2e-4, 2e-5, tolerance});
    expect_close("d_k_weight", d.k_weight, e.k_weight, {2e-4, 2e-5, tolerance});
  }
}

TEST(QkNorm, AccumulateAdds) {
  Random random;
  const Problem p({kCompare, 50, 3, 1, 24}, DType::f64, random);
  const Values raw = p.forward().raw;
  const Problem::Gradients fresh = p.backward(raw), added = p.backward(raw, 3);
  for (size_t i = 0; i < fresh.q_weight.size(); ++i) {
    EXPECT_NEAR(added.q_weight[i], fresh.q_weight[i] + 3, 1e-12);
    EXPECT_NEAR(added.k_weight[i], fresh.k_weight[i] + 3, 1e-12);
  }
}

TEST(QkNorm, NanFillsItsHeadAndNoOther) {
  Random random;
  Problem p({kCompare, 4, 3, 2, 8}, DType::f32, random);
  const int64_t head = 2 * p.pitch + 3 * 8;  // the first key head of token 2
  p.qkv[static_cast<size_t>(head + 5)] = std::nan("");
  const Problem::Result f = p.forward();
  const Problem::Gradients d = p.backward(f.raw);
  for (size_t i = 0; i < f.qkv.size(); ++i) {
    const bool in_head = static_cast<int64_t>(i) >= head && static_cast<int64_t>(i) < head + 8;
    EXPECT_EQ(std::isnan(f.qkv[i]), in_head) << i;
    EXPECT_EQ(std::isnan(d.qkv[i]), in_head) << i;
  }
  for (const double w : d.k_weight) EXPECT_TRUE(std::isnan(w));
  for (const double w : d.q_weight) EXPECT_FALSE(std::isnan(w));
}

TEST(QkNorm, BitsDoNotDependOnThreads) {
  expect_independent_of_threads("qk_norm", [] {
    Random random;
    const Problem p({kCompare, 131, 5, 2, 32}, DType::f32, random);
    const Problem::Result f = p.forward();
    const Problem::Gradients d = p.backward(f.raw);
    std::vector<char> bytes;
    for (const Values& v : {f.qkv, f.raw, d.qkv, d.q_weight, d.k_weight}) {
      const std::vector<char> more = pack(v, DType::f64);
      bytes.insert(bytes.end(), more.begin(), more.end());
    }
    return bytes;
  });
}

TEST(QkNorm, WrongArgumentsAreNamed) {
  const TensorOn qkv(kCpu, DType::f32, {2, 16}), raw(kCpu, DType::f32, {2, 12}), w(kCpu, DType::f32, {4}),
      odd(kCpu, DType::f32, {3});
  expect_rejected("k_weight must have 4 elements", [&] {
    cpu::qk_norm_forward(kCpu, {qkv, raw, w, odd, 2, 1, 1e-6F});
  });
  expect_rejected("qkv must be 2 rows of 20", [&] {
    cpu::qk_norm_forward(kCpu, {qkv, raw, w, w, 3, 1, 1e-6F});
  });
  expect_rejected("raw must be 2 rows of 12", [&] {
    cpu::qk_norm_forward(kCpu, {qkv, qkv, w, w, 2, 1, 1e-6F});
  });
  expect_rejected("raw is absent", [&] {
    cpu::qk_norm_backward(kCpu, {qkv, w, w, false, {}, w, w, 2, 1, 1e-6F, {}});
  });
  expect_rejected("scratch is absent", [&] {
    cpu::qk_norm_backward(kCpu, {qkv, w, w, false, raw, w, w, 2, 1, 1e-6F, {}});
  });
}

}  // namespace
}  // namespace kinoe::optest
