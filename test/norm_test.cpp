// LayerNorm and RMSNorm on the CPU against formulas in long double, finite differences and the promises of the contract.
#include "kernels/norm.h"

#include "test/op_cases.h"
#include "test/op_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;
constexpr double kEps = 1e-5F;

struct Forward {
  Values out, residual_out, mean, rstd;
};

struct Problem {
  Problem(const NormCase& c, DType dtype, Random& random)
      : shape(c),
        type(dtype),
        residual(random.normal(c.rows * c.columns)),
        branch(random.normal(c.branch ? c.rows * c.columns : 0, 0.5)),
        weight(random.normal(c.columns)),
        bias(random.normal(c.bias ? c.columns : 0)),
        d_out(random.normal(c.rows * c.columns)),
        d_residual_in(random.normal(c.rows * c.columns)) {}

  [[nodiscard]] TensorOn matrix(const Values& v) const {
    return {kCpu, type, {shape.rows, shape.columns}, v};
  }
  [[nodiscard]] TensorOn matrix() const { return {kCpu, type, {shape.rows, shape.columns}}; }
  [[nodiscard]] TensorOn row(const Values& v) const { return {kCpu, type, {shape.columns}, v}; }
  [[nodiscard]] TensorOn row() const { return {kCpu, type, {shape.columns}}; }
  [[nodiscard]] TensorOn statistics() const { return {kCpu, type, {shape.rows}}; }
  [[nodiscard]] TensorOn statistics(const Values& v) const { return {kCpu, type, {shape.rows}, v}; }

  /// `in_place`: residual_out is the memory of residual.
  [[nodiscard]] Forward forward(bool in_place = false) const {
    const TensorOn out = matrix(), r = matrix(residual), b = shape.branch ? matrix(branch) : TensorOn();
    const TensorOn sum = !shape.branch ? TensorOn() : in_place ? r : matrix();
    const TensorOn w = row(weight), add = shape.bias ? row(bias) : TensorOn();
    const TensorOn mean = shape.rms ? TensorOn() : statistics(), rstd = statistics();
    cpu::norm_forward(kCpu, {out, sum, r, b, w, add, mean, rstd, static_cast<float>(kEps)});
    out.expect_written("out");
    rstd.expect_written("rstd");
    if (mean) mean.expect_written("mean");
    if (sum) sum.expect_written("residual_out");
    if (!in_place) r.expect_unchanged("residual");
    w.expect_unchanged("weight");
    return {out.values(), sum ? sum.values() : residual, mean ? mean.values() : Values{}, rstd.values()};
  }

  struct Gradients {
    Values residual, weight, bias;
  };

  [[nodiscard]] Gradients backward(const Forward& f, bool accumulate = false, double start = 0,
                                   bool in_place = false, bool with_residual_in = true) const {
    const TensorOn d_in = with_residual_in ? matrix(d_residual_in) : TensorOn();
    const TensorOn d_residual = in_place ? d_in : matrix();
    TensorOn d_weight = row(), d_bias = shape.bias ? row() : TensorOn();
    if (accumulate) {
      d_weight.set(Values(static_cast<size_t>(shape.columns), start));
      if (d_bias) d_bias.set(Values(static_cast<size_t>(shape.columns), start));
    }
    const TensorOn d = matrix(d_out), r = matrix(f.residual_out), w = row(weight);
    const TensorOn mean = shape.rms ? TensorOn() : statistics(f.mean), rstd = statistics(f.rstd);
    const TensorOn scratch =
        TensorOn::scratch(kCpu, norm_backward_scratch_bytes(Backend::cpu, shape.rows, shape.columns));
    cpu::norm_backward(kCpu, {d_residual, d_in, d_weight, d_bias, accumulate, d, r, w, mean, rstd, scratch});
    d_residual.expect_written("d_residual");
    d_weight.expect_written("d_weight");
    if (d_bias) d_bias.expect_written("d_bias");
    d.expect_unchanged("d_out");
    r.expect_unchanged("residual");
    if (d_in && !in_place) d_in.expect_unchanged("d_residual_in");
    return {d_residual.values(), d_weight.values(), d_bias ? d_bias.values() : Values{}};
  }

  /// From the definition, in long double.
  [[nodiscard]] Forward expected() const {
    const auto columns = static_cast<size_t>(shape.columns);
    Forward f{residual, residual, {}, {}};
    for (size_t n = 0; n < static_cast<size_t>(shape.rows); ++n) {
      long double mean = 0, variance = 0;
      for (size_t c = 0; c < columns; ++c) {
        double& r = f.residual_out[n * columns + c];
        if (shape.branch) r = representable(r + branch[n * columns + c], type);
        mean += r;
      }
      mean = shape.rms ? 0 : mean / columns;
      for (size_t c = 0; c < columns; ++c) {
        const long double d = f.residual_out[n * columns + c] - mean;
        variance += d * d / columns;
      }
      const long double rstd = 1 / std::sqrt(variance + static_cast<long double>(kEps));
      for (size_t c = 0; c < columns; ++c)
        f.out[n * columns + c] = static_cast<double>(
            (f.residual_out[n * columns + c] - mean) * rstd * weight[c] + (shape.bias ? bias[c] : 0));
      if (!shape.rms) f.mean.push_back(static_cast<double>(mean));
      f.rstd.push_back(static_cast<double>(rstd));
    }
    return f;
  }

  NormCase shape;
  DType type;
  Values residual, branch, weight, bias, d_out, d_residual_in;
};

void expect_forward(const Forward& f, const Forward& expected, Tolerance tolerance) {
  expect_close("out", f.out, expected.out, tolerance);
  expect_close("residual_out", f.residual_out, expected.residual_out, {0, 0, 0});
  expect_close("mean", f.mean, expected.mean, tolerance);
  expect_close("rstd", f.rstd, expected.rstd, tolerance);
}

TEST(Norm, ForwardIsItsFormula) {
  Random random;
  for (const NormCase& c : cases_for(norm_cases(), kCompare)) {
    SCOPED_TRACE(c.label());
    const Problem p(c, DType::f32, random);
    // Two values may be close to each other, which divides the rounding of the mean by a small deviation.
    expect_forward(p.forward(), p.expected(),
                   c.columns == 2 ? Tolerance{1e-4, 1e-4, 1e-4} : Tolerance{1e-5, 1e-5, 4e-6});
    if (c.columns > 100) continue;
    const Problem in_double(c, DType::f64, random);
    expect_forward(in_double.forward(), in_double.expected(), {1e-11, 1e-11, 1e-11});
  }
}

TEST(Norm, GradientsAreThoseOfFiniteDifferences) {
  Random random;
  for (const NormCase& c : cases_for(norm_cases(), kGradient)) {
    SCOPED_TRACE(c.label());
    Problem p(c, DType::f64, random);
    const Problem::Gradients d = p.backward(p.forward());
    // The objective sees the normalised values and, through later layers, the stream itself.
    Values weights = p.d_out;
    weights.insert(weights.end(), p.d_residual_in.begin(), p.d_residual_in.end());
    const auto outputs_with = [&](Values Problem::*input) {
      return [&p, input](const Values& x) {
        Problem moved = p;
        moved.*input = x;
        const Forward f = moved.forward();
        Values all = f.out;
        all.insert(all.end(), f.residual_out.begin(), f.residual_out.end());
        return all;
      };
    };
    const double tolerance = c.columns == 2 ? 1e-5 : 1e-8;  // differences of two neighbours bend sharply
    expect_gradient("residual", outputs_with(&Problem::residual), p.residual, weights, d.residual, 400,
                    tolerance);
    if (c.branch)
      expect_gradient("branch", outputs_with(&Problem::branch), p.branch, weights, d.residual, 400,
                      tolerance);
    expect_gradient("weight", outputs_with(&Problem::weight), p.weight, weights, d.weight);
    if (c.bias) expect_gradient("bias", outputs_with(&Problem::bias), p.bias, weights, d.bias);
  }
}

TEST(Norm, BackwardInFloatAgreesWithDouble) {
  Random random;
  for (const NormCase& c : cases_for(norm_cases(), kCompare)) {
    if (c.columns == 2) continue;
    SCOPED_TRACE(c.label());
    const Problem p(c, DType::f32, random);
    Problem q = p;
    q.type = DType::f64;
    const Problem::Gradients d = p.backward(p.forward()), e = q.backward(q.forward());
    expect_close("d_residual", d.residual, e.residual, {2e-5, 2e-5, 2e-6});
    expect_close("d_weight", d.weight, e.weight, {2e-4, 2e-5, 2e-6});
    if (c.bias) expect_close("d_bias", d.bias, e.bias, {2e-4, 2e-5, 2e-6});
  }
}

TEST(Norm, ALargeMeanDoesNotSwallowTheVariance) {
  Random random;
  Problem p({kCompare, 5, 768, false, false, true}, DType::f32, random);
  for (double& r : p.residual) r = representable(1000 + r, DType::f32);
  expect_close("rstd", p.forward().rstd, p.expected().rstd, {1e-5, 1e-5, 1e-5});
}

TEST(Norm, AccumulateAdds) {
  Random random;
  for (const bool rms : {false, true}) {
    const Problem p({kCompare, 50, 24, rms, true, true}, DType::f64, random);
    const Forward f = p.forward();
    const Problem::Gradients fresh = p.backward(f), added = p.backward(f, true, 3);
    for (size_t i = 0; i < fresh.weight.size(); ++i) {
      EXPECT_NEAR(added.weight[i], fresh.weight[i] + 3, 1e-12);
      EXPECT_NEAR(added.bias[i], fresh.bias[i] + 3, 1e-12);
    }
  }
}

TEST(Norm, MemoryMayBeSharedAsPromised) {
  Random random;
  for (const bool rms : {false, true}) {
    const Problem p({kCompare, 7, 130, rms, true, !rms}, DType::f32, random);
    const Forward f = p.forward(), g = p.forward(true);
    EXPECT_EQ(f.out, g.out);
    EXPECT_EQ(f.residual_out, g.residual_out);
    const Problem::Gradients apart = p.backward(f), shared = p.backward(f, false, 0, true);
    EXPECT_EQ(apart.residual, shared.residual);
    EXPECT_EQ(apart.weight, shared.weight);
  }
}

TEST(Norm, AnAbsentIncomingGradientIsZero) {
  Random random;
  Problem p({kCompare, 7, 33, false, true, true}, DType::f32, random);
  const Forward f = p.forward();
  const Values absent = p.backward(f, false, 0, false, false).residual;
  p.d_residual_in.assign(p.d_residual_in.size(), 0.0);
  EXPECT_EQ(absent, p.backward(f).residual);
}

TEST(Norm, RecomputedFromTheStoredSumTheBitsAreTheSame) {
  Random random;
  for (const bool rms : {false, true})
    for (const int64_t columns : {33, 768, 1600}) {
      Problem p({kCompare, 9, columns, rms, true, true}, DType::f32, random);
      const Forward first = p.forward();
      p.residual = first.residual_out;
      p.shape.branch = false;
      const Forward again = p.forward();
      EXPECT_EQ(first.out, again.out);
      EXPECT_EQ(first.mean, again.mean);
      EXPECT_EQ(first.rstd, again.rstd);
    }
}

TEST(Norm, NanFillsItsRowAndNoOther) {
  Random random;
  for (const bool rms : {false, true}) {
    Problem p({kCompare, 4, 19, rms, true, true}, DType::f32, random);
    p.branch[2 * 19 + 7] = std::nan("");
    const Forward f = p.forward();
    for (size_t i = 0; i < f.out.size(); ++i) EXPECT_EQ(std::isnan(f.out[i]), i / 19 == 2) << i;
    const Problem::Gradients d = p.backward(f);
    for (size_t i = 0; i < d.residual.size(); ++i) EXPECT_EQ(std::isnan(d.residual[i]), i / 19 == 2) << i;
    for (const double w : d.weight) EXPECT_TRUE(std::isnan(w));
  }
}

TEST(Norm, BitsDoNotDependOnThreads) {
  for (const bool rms : {false, true})
    expect_independent_of_threads("norm", [&] {
      Random random;
      const Problem p({kCompare, 131, 97, rms, true, !rms}, DType::f32, random);
      const Forward f = p.forward();
      const Problem::Gradients d = p.backward(f);
      std::vector<char> bytes;
      for (const Values& v : {f.out, f.residual_out, f.mean, f.rstd, d.residual, d.weight, d.bias}) {
        const std::vector<char> more = pack(v, DType::f64);
        bytes.insert(bytes.end(), more.begin(), more.end());
      }
      return bytes;
    });
}

TEST(Norm, WrongArgumentsAreNamed) {
  const TensorOn x(kCpu, DType::f32, {2, 4}), w(kCpu, DType::f32, {4}), s(kCpu, DType::f32, {2}),
      d(kCpu, DType::f64, {2});
  expect_rejected("branch and residual_out come together", [&] {
    cpu::norm_forward(kCpu, {x, {}, x, x, w, w, s, s, 1e-5F});
  });
  expect_rejected("weight must have 4 elements", [&] {
    cpu::norm_forward(kCpu, {x, {}, x, {}, s, w, s, s, 1e-5F});
  });
  expect_rejected("rstd must be fp32, is fp64", [&] {
    cpu::norm_forward(kCpu, {x, {}, x, {}, w, w, s, d, 1e-5F});
  });
  expect_rejected("scratch is absent", [&] {
    cpu::norm_backward(kCpu, {x, {}, w, w, false, x, x, w, s, s, {}});
  });
  const TensorOn half(kCpu, DType::bf16, {2, 4}), half_w(kCpu, DType::bf16, {4});
  expect_rejected("on the CPU computes in fp32 or fp64", [&] {
    cpu::norm_forward(kCpu, {half, {}, half, {}, half_w, {}, {}, s, 1e-5F});
  });
}

}  // namespace
}  // namespace kinoe::optest
