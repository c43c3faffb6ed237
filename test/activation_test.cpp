// GELU and SwiGLU on the CPU against their definitions in long double, finite differences and extreme inputs.
#include "kernels/activation.h"

#include "test/op_cases.h"
#include "test/op_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;

Values gelu(const Values& x, DType type, const std::vector<int64_t>& shape) {
  const TensorOn in(kCpu, type, shape, x), out(kCpu, type, shape);
  cpu::gelu_forward(kCpu, {out, in});
  out.expect_written("out");
  in.expect_unchanged("x");
  return out.values();
}

Values gelu_gradient(const Values& x, const Values& d, DType type, const std::vector<int64_t>& shape) {
  const TensorOn in(kCpu, type, shape, x), d_out(kCpu, type, shape, d), dx(kCpu, type, shape);
  cpu::gelu_backward(kCpu, {dx, d_out, in});
  dx.expect_written("dx");
  in.expect_unchanged("x");
  d_out.expect_unchanged("d_out");
  return dx.values();
}

Values swiglu(const Values& gate_up, DType type, int64_t rows, int64_t columns) {
  const TensorOn in(kCpu, type, {rows, 2 * columns}, gate_up), out(kCpu, type, {rows, columns});
  cpu::swiglu_forward(kCpu, {out, in});
  out.expect_written("out");
  in.expect_unchanged("gate_up");
  return out.values();
}

Values swiglu_gradient(const Values& gate_up, const Values& d, DType type, int64_t rows, int64_t columns) {
  const TensorOn in(kCpu, type, {rows, 2 * columns}, gate_up), d_out(kCpu, type, {rows, columns}, d);
  const TensorOn dx(kCpu, type, {rows, 2 * columns});
  cpu::swiglu_backward(kCpu, {dx, d_out, in});
  dx.expect_written("d_gate_up");
  in.expect_unchanged("gate_up");
  d_out.expect_unchanged("d_out");
  return dx.values();
}

double gelu_of(double value) {
  const long double x = value;
  return static_cast<double>(0.5L * x *
                             (1 + std::tanh(std::sqrt(2 / std::acos(-1.0L)) * (x + 0.044715L * x * x * x))));
}

double swiglu_of(double gate, double up) {
  return static_cast<double>(static_cast<long double>(gate) /
                             (1 + std::exp(-static_cast<long double>(gate))) * up);
}

TEST(Activation, GeluIsItsDefinition) {
  Random random;
  for (const ActivationCase& c : cases_for(activation_cases(), kCompare)) {
    SCOPED_TRACE(c.label());
    for (const DType type : {DType::f32, DType::f64}) {
      const Values x = random.normal(c.rows * c.columns, 2.0);
      Values expected;
      for (const double v : x) expected.push_back(gelu_of(v));
      // Relative all along the left tail, which the tanh form would lose.
      expect_close("gelu", gelu(x, type, {c.rows, c.columns}), expected,
                   type == DType::f64 ? Tolerance{1e-15, 1e-13, 1e-14} : Tolerance{1e-9, 2e-5, 1e-6});
    }
  }
}

TEST(Activation, SwigluIsItsDefinition) {
  Random random;
  for (const ActivationCase& c : cases_for(activation_cases(), kCompare)) {
    SCOPED_TRACE(c.label());
    for (const DType type : {DType::f32, DType::f64}) {
      const Values x = random.normal(c.rows * 2 * c.columns, 2.0);
      Values expected;
      for (int64_t n = 0; n < c.rows; ++n)
        for (int64_t i = 0; i < c.columns; ++i) {
          const auto gate = static_cast<size_t>(2 * n * c.columns + i);
          expected.push_back(swiglu_of(x[gate], x[gate + static_cast<size_t>(c.columns)]));
        }
      expect_close("swiglu", swiglu(x, type, c.rows, c.columns), expected,
                   type == DType::f64 ? Tolerance{1e-15, 1e-13, 1e-14} : Tolerance{1e-7, 2e-6, 1e-6});
    }
  }
}

TEST(Activation, GradientsAreThoseOfFiniteDifferences) {
  Random random;
  for (const ActivationCase& c : cases_for(activation_cases(), kGradient)) {
    SCOPED_TRACE(c.label());
    const Values x = random.normal(c.rows * c.columns, 2.0), d = random.normal(c.rows * c.columns);
    expect_gradient(
        "gelu",
        [&](const Values& v) {
          return gelu(v, DType::f64, {c.rows, c.columns});
        },
        x, d, gelu_gradient(x, d, DType::f64, {c.rows, c.columns}));
    const Values gate_up = random.normal(c.rows * 2 * c.columns, 2.0);
    expect_gradient(
        "swiglu", [&](const Values& v) { return swiglu(v, DType::f64, c.rows, c.columns); }, gate_up, d,
        swiglu_gradient(gate_up, d, DType::f64, c.rows, c.columns));
  }
}

TEST(Activation, BackwardInFloatAgreesWithDouble) {
  Random random;
  for (const ActivationCase& c : cases_for(activation_cases(), kCompare)) {
    SCOPED_TRACE(c.label());
    const Values x = random.normal(c.rows * c.columns, 2.0), d = random.normal(c.rows * c.columns);
    const Values gate_up = random.normal(c.rows * 2 * c.columns, 2.0);
    expect_close("gelu", gelu_gradient(x, d, DType::f32, {c.rows, c.columns}),
                 gelu_gradient(x, d, DType::f64, {c.rows, c.columns}), {3e-6, 2e-6, 1e-6});
    expect_close("swiglu", swiglu_gradient(gate_up, d, DType::f32, c.rows, c.columns),
                 swiglu_gradient(gate_up, d, DType::f64, c.rows, c.columns), {3e-6, 2e-6, 1e-6});
  }
}

TEST(Activation, LargeInputsTakeTheirLimits) {
  const Values x = {-1e30, -1e19, -1000, -20, 0, 20, 1000, 1e19, 1e30};
  const Values ones(x.size(), 1.0);
  for (const DType type : {DType::f32, DType::f64}) {
    const Values out = gelu(x, type, {1, 9}), dx = gelu_gradient(x, ones, type, {1, 9});
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_NEAR(out[i], x[i] > 0 ? representable(x[i], type) : 0, 1e-100) << x[i];
      EXPECT_NEAR(dx[i], x[i] > 0 ? 1 : x[i] < 0 ? 0 : 0.5, 1e-100) << x[i];
    }
    for (const double g : x) {
      const Values s = swiglu({g, 3}, type, 1, 1), ds = swiglu_gradient({g, 3}, {1}, type, 1, 1);
      EXPECT_TRUE(std::isfinite(s[0])) << g;
      EXPECT_TRUE(std::isfinite(ds[0]) && std::isfinite(ds[1])) << g;
      if (std::abs(g) >= 1000) {
        EXPECT_EQ(ds[0], g > 0 ? 3 : 0) << g;
      }
    }
  }
}

TEST(Activation, MemoryMayBeSharedAsPromised) {
  Random random;
  const Values x = random.normal(7 * 66), d = random.normal(7 * 66), half = random.normal(7 * 33);
  const TensorOn out(kCpu, DType::f32, {7, 66}, x);
  cpu::gelu_forward(kCpu, {out, out});
  EXPECT_EQ(out.values(), gelu(x, DType::f32, {7, 66}));
  const TensorOn dx(kCpu, DType::f32, {7, 66}, d), in(kCpu, DType::f32, {7, 66}, x);
  cpu::gelu_backward(kCpu, {dx, dx, in});
  EXPECT_EQ(dx.values(), gelu_gradient(x, d, DType::f32, {7, 66}));
  const TensorOn gate_up(kCpu, DType::f32, {7, 66}, x), d_out(kCpu, DType::f32, {7, 33}, half);
  cpu::swiglu_backward(kCpu, {gate_up, d_out, gate_up});
  EXPECT_EQ(gate_up.values(), swiglu_gradient(x, half, DType::f32, 7, 33));
}

TEST(Activation, NanReachesItsOwnElements) {
  Values x(40, 0.5), d(40, 1.0);
  x[17] = std::nan("");
  d[3] = std::nan("");
  const Values out = gelu(x, DType::f32, {1, 40}), dx = gelu_gradient(x, d, DType::f32, {1, 40});
  const Values s = swiglu(x, DType::f32, 1, 20);
  const Values ds = swiglu_gradient(x, Values(d.begin(), d.begin() + 20), DType::f32, 1, 20);
  for (size_t i = 0; i < 40; ++i) {
    EXPECT_EQ(std::isnan(out[i]), i == 17) << i;
    EXPECT_EQ(std::isnan(dx[i]), i == 17 || i == 3) << i;
    EXPECT_EQ(std::isnan(ds[i]), i % 20 == 17 || i % 20 == 3) << i;
  }
  for (size_t i = 0; i < 20; ++i) EXPECT_EQ(std::isnan(s[i]), i == 17) << i;
}

TEST(Activation, BitsDoNotDependOnThreads) {
  Random random;
  const Values x = random.normal(31 * 1002), d = random.normal(31 * 1002), half = random.normal(31 * 501);
  expect_independent_of_threads("activation", [&] {
    std::vector<char> bytes;
    for (const Values& v : {gelu(x, DType::f32, {31, 1002}), gelu_gradient(x, d, DType::f32, {31, 1002}),
                            swiglu(x, DType::f32, 31, 501), swiglu_gradient(x, half, DType::f32, 31, 501)}) {
      const std::vector<char> more = pack(v, DType::f64);
      bytes.insert(bytes.end(), more.begin(), more.end());
    }
    return bytes;
  });
}

TEST(Activation, WrongArgumentsAreNamed) {
  const TensorOn a(kCpu, DType::f32, {2, 4}), b(kCpu, DType::f32, {2, 5}), wide(kCpu, DType::f64, {2, 4});
  expect_rejected("x must be 2 rows of 4", [&] { cpu::gelu_forward(kCpu, {a, b}); });
  expect_rejected("d_out must be fp32", [&] { cpu::gelu_backward(kCpu, {a, wide, a}); });
  expect_rejected("gate_up must be 2 rows of 8", [&] { cpu::swiglu_forward(kCpu, {a, a}); });
  expect_rejected("d_gate_up must be 2 rows of 8", [&] { cpu::swiglu_backward(kCpu, {b, a, b}); });
}

}  // namespace
}  // namespace kinoe::optest
