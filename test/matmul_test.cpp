// The linear layer against three nested loops in fp64, finite differences, and the promises about order of sums.
#include "kernels/matmul.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <limits>

#include "kernels/activation.h"
#include "test/op_cases.h"
#include "test/op_harness.h"

namespace kinoe {
namespace {

using namespace optest;

/// Element of output o and input c.
size_t weight_index(const MatmulCase& m, int64_t o, int64_t c) {
  return static_cast<size_t>(m.layout == WeightLayout::out_in ? o * m.inputs + c : c * m.outputs + o);
}

std::vector<int64_t> weight_dims(const MatmulCase& m) {
  return m.layout == WeightLayout::out_in ? std::vector<int64_t>{m.outputs, m.inputs}
                                          : std::vector<int64_t>{m.inputs, m.outputs};
}

/// Host data, scaled so that all results are about 1.
struct Data {
  Values x, weight, bias, dy, d_weight_before, d_bias_before;

  Data(const MatmulCase& m, DType type) {
    Random random;
    x = random.normal(m.rows * m.inputs, 1.0, type);
    weight = random.normal(m.outputs * m.inputs, 1 / std::sqrt(static_cast<double>(m.inputs)), type);
    bias = random.normal(m.bias ? m.outputs : 0, 1.0, type);
    dy = random.normal(m.rows * m.outputs, 1 / std::sqrt(static_cast<double>(m.rows)), type);
    d_weight_before = random.normal(m.outputs * m.inputs, 1.0, type);
    d_bias_before = random.normal(m.bias ? m.outputs : 0, 1.0, type);
  }
};

struct Results {
  Values y, dx, d_weight, d_bias;
};

Results oracle(const MatmulCase& m, const Data& in) {
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  Values weight(in.weight.size()), d_weight(in.weight.size());  // [O, C]
  for (int64_t o = 0; o < m.outputs; ++o)
    for (int64_t c = 0; c < m.inputs; ++c) weight[size(o * m.inputs + c)] = in.weight[weight_index(m, o, c)];
  Results r{Values(size(m.rows * m.outputs)), Values(size(m.rows * m.inputs)), Values(in.weight.size()),
            Values(in.bias.size())};
  for (int64_t n = 0; n < m.rows; ++n)
    for (int64_t o = 0; o < m.outputs; ++o) {
      const double dy = in.dy[size(n * m.outputs + o)];
      const double* x = in.x.data() + n * m.inputs;
      const double* w = weight.data() + o * m.inputs;
      double* dx = r.dx.data() + n * m.inputs;
      double* dw = d_weight.data() + o * m.inputs;
      double y = m.bias ? in.bias[size(o)] : 0;
      for (int64_t c = 0; c < m.inputs; ++c) y += x[c] * w[c];
      for (int64_t c = 0; c < m.inputs; ++c) dx[c] += dy * w[c];
      for (int64_t c = 0; c < m.inputs; ++c) dw[c] += dy * x[c];
      r.y[size(n * m.outputs + o)] = y;
      if (m.bias) r.d_bias[size(o)] += dy;
    }
  for (int64_t o = 0; o < m.outputs; ++o)
    for (int64_t c = 0; c < m.inputs; ++c)
      r.d_weight[weight_index(m, o, c)] = d_weight[size(o * m.inputs + c)];
  return r;
}

/// All products of a case on the CPU, in guarded memory.
struct Linear {
  TensorOn x, weight, bias, dy, y, dx, d_weight, d_bias;

  Linear(const MatmulCase& m, const Data& in, DType type, bool accumulate = false) {
    const Context ctx;
    x = TensorOn(ctx, type, {m.rows, m.inputs}, in.x);
    weight = TensorOn(ctx, type, weight_dims(m), in.weight);
    if (m.bias) bias = TensorOn(ctx, type, {m.outputs}, in.bias);
    dy = TensorOn(ctx, type, {m.rows, m.outputs}, in.dy);
    y = TensorOn(ctx, type, {m.rows, m.outputs});
    dx = TensorOn(ctx, type, {m.rows, m.inputs});
    d_weight = TensorOn(ctx, type, weight_dims(m));
    if (m.bias) d_bias = TensorOn(ctx, type, {m.outputs});
    if (accumulate) {
      d_weight.set(in.d_weight_before);
      if (m.bias) d_bias.set(in.d_bias_before);
    }
    matmul_forward(ctx, {.y = y, .x = x, .weight = weight, .bias = bias, .layout = m.layout});
    matmul_dgrad(ctx, {.dx = dx, .dy = dy, .weight = weight, .layout = m.layout});
    const TensorOn scratch =
        TensorOn::scratch(ctx, matmul_wgrad_scratch_bytes(ctx.backend, m.rows, m.outputs, m.bias));
    matmul_wgrad(ctx, {.d_weight = d_weight,
                       .d_bias = d_bias,
                       .accumulate = accumulate,
                       .dy = dy,
                       .x = x,
                       .layout = m.layout,
                       .scratch = scratch});
  }

  void expect_only_outputs_written() const {
    y.expect_written("y");
    dx.expect_written("dx");
    d_weight.expect_written("d_weight");
    if (d_bias) d_bias.expect_written("d_bias");
    x.expect_unchanged("x");
    weight.expect_unchanged("weight");
    dy.expect_unchanged("dy");
    if (bias) bias.expect_unchanged("bias");
  }

  void expect_results(const std::string& name, const Results& expected, Tolerance tolerance) const {
    expect_close(name + " y", y.values(), expected.y, tolerance);
    expect_close(name + " dx", dx.values(), expected.dx, tolerance);
    expect_close(name + " d_weight", d_weight.values(), expected.d_weight, tolerance);
    if (d_bias) expect_close(name + " d_bias", d_bias.values(), expected.d_bias, tolerance);
  }

  void expect_same(const std::string& name, const Linear& other) const {
    expect_same_bits(name + " y", y, other.y);
    expect_same_bits(name + " dx", dx, other.dx);
    expect_same_bits(name + " d_weight", d_weight, other.d_weight);
    if (d_bias) expect_same_bits(name + " d_bias", d_bias, other.d_bias);
  }
};

void add(Values& to, const Values& from) {
  for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
}

TEST(Matmul, MatchesLoopsInFp64) {
  for (const MatmulCase& m : cases_for(matmul_cases(), kCompare)) {
    SCOPED_TRACE(m.label());
    const Data in(m, DType::f32);  // representable in both types
    Results expected = oracle(m, in);
    for (const DType type : {DType::f32, DType::f64}) {
      const Linear run(m, in, type);
      run.expect_only_outputs_written();
      run.expect_results(name_of(type), expected, tolerance_for(type));
    }
    add(expected.d_weight, in.d_weight_before);
    add(expected.d_bias, in.d_bias_before);
    Linear(m, in, DType::f32, true).expect_results("accumulated", expected, tolerance_for(DType::f32));
  }
}

// Sizes at the edges of every level of the blocking: tiles of 6 x 16 and 6 x 8, 96 rows, 256 steps of depth, and panels
// of B that do not fit at once (more than 256 columns at full depth).
TEST(Matmul, MatchesLoopsAtTheEdgesOfBlocks) {
  const int64_t sizes[][3] = {{95, 16, 256},  {96, 17, 257}, {97, 15, 255}, {6, 8, 512},   {5, 7, 513},
                              {12, 257, 300}, {7, 300, 511}, {13, 1, 700},  {513, 9, 12},  {257, 33, 16},
                              {1, 600, 300},  {700, 1, 1},   {2, 2, 1025},  {300, 270, 3}, {768, 6, 96}};
  for (const auto& s : sizes)
    for (const WeightLayout layout : {WeightLayout::out_in, WeightLayout::in_out}) {
      const MatmulCase m{kCompare, s[0], s[1], s[2], true, layout};
      SCOPED_TRACE(m.label());
      const Data in(m, DType::f32);
      const Results expected = oracle(m, in);
      for (const DType type : {DType::f32, DType::f64}) {
        const Linear run(m, in, type);
        run.expect_only_outputs_written();
        Tolerance tolerance = tolerance_for(type);
        tolerance.l2 *= 10;  // of a single sum, where most of it may cancel
        run.expect_results(name_of(type), expected, tolerance);
      }
    }
}

TEST(Matmul, GradientsMatchFiniteDifferences) {
  const Context ctx;
  for (const MatmulCase& m : cases_for(matmul_cases(), kGradient)) {
    SCOPED_TRACE(m.label());
    const Data in(m, DType::f64);
    const Linear run(m, in, DType::f64);
    const auto forward = [&](const Values& x, const Values& weight, const Values& bias) {
      const TensorOn y(ctx, DType::f64, {m.rows, m.outputs});
      matmul_forward(ctx, {.y = y,
                           .x = TensorOn(ctx, DType::f64, {m.rows, m.inputs}, x),
                           .weight = TensorOn(ctx, DType::f64, weight_dims(m), weight),
                           .bias = m.bias ? TensorOn(ctx, DType::f64, {m.outputs}, bias) : TensorOn(),
                           .layout = m.layout});
      return y.values();
    };
    expect_gradient(
        "x", [&](const Values& x) { return forward(x, in.weight, in.bias); }, in.x, in.dy, run.dx.values());
    expect_gradient(
        "weight", [&](const Values& w) { return forward(in.x, w, in.bias); }, in.weight, in.dy,
        run.d_weight.values());
    if (m.bias)
      expect_gradient(
          "bias", [&](const Values& b) { return forward(in.x, in.weight, b); }, in.bias, in.dy,
          run.d_bias.values());
  }
}

// With gelu_input, dx is the gradient of what GELU was given: to the bit that of the product and gelu_backward, and that of
// finite differences of both forward passes.
TEST(Matmul, DgradThroughGelu) {
  const Context ctx;
  const auto gradient = [&](const MatmulCase& m, const Data& in, DType type) {
    const TensorOn gelu_input(ctx, type, {m.rows, m.inputs}, in.x), dx(ctx, type, {m.rows, m.inputs});
    const TensorOn dy(ctx, type, {m.rows, m.outputs}, in.dy), weight(ctx, type, weight_dims(m), in.weight);
    matmul_dgrad(ctx, {.dx = dx, .dy = dy, .weight = weight, .layout = m.layout, .gelu_input = gelu_input});
    dx.expect_written("dx");
    gelu_input.expect_unchanged("gelu_input");
    return dx;
  };
  for (const MatmulCase& m : cases_for(matmul_cases(), kCompare)) {
    if (m.rows * m.outputs * m.inputs > 3'000'000) continue;  // presets' widths: nothing new, only time
    SCOPED_TRACE(m.label());
    const Data in(m, DType::f32);
    for (const DType type : {DType::f32, DType::f64}) {
      const Linear apart(m, in, type);
      const TensorOn expected(ctx, type, {m.rows, m.inputs});
      gelu_backward(ctx, {.dx = expected, .d_out = apart.dx, .x = apart.x});
      expect_same_bits(name_of(type), gradient(m, in, type), expected);
    }
  }
  for (const MatmulCase& m : cases_for(matmul_cases(), kGradient)) {
    SCOPED_TRACE(m.label());
    const Data in(m, DType::f64);
    const auto forward = [&](const Values& before) {
      const TensorOn x(ctx, DType::f64, {m.rows, m.inputs}), y(ctx, DType::f64, {m.rows, m.outputs});
      gelu_forward(ctx, {.out = x, .x = TensorOn(ctx, DType::f64, {m.rows, m.inputs}, before)});
      matmul_forward(ctx, {.y = y,
                           .x = x,
                           .weight = TensorOn(ctx, DType::f64, weight_dims(m), in.weight),
                           .bias = {},
                           .layout = m.layout});
      return y.values();
    };
    expect_gradient("gelu_input", forward, in.x, in.dy, gradient(m, in, DType::f64).values());
  }
}

TEST(Matmul, BitsDoNotDependOnTheNumberOfThreads) {
  const int before = omp_get_max_threads();
  for (const auto& [rows, outputs, inputs] : {std::array<int64_t, 3>{257, 72, 129},
                                              {1030, 384, 128},
                                              {67, 1003, 259},
                                              {7, 2000, 600},
                                              {900, 33, 30}})
    for (const WeightLayout layout : {WeightLayout::out_in, WeightLayout::in_out}) {
      const MatmulCase m{kCompare, rows, outputs, inputs, true, layout};
      SCOPED_TRACE(m.label());
      const Data in(m, DType::f32);
      omp_set_num_threads(1);
      const Linear alone(m, in, DType::f32, true);
      for (const int threads : {2, 3, 5}) {
        omp_set_num_threads(threads);
        Linear(m, in, DType::f32, true).expect_same(cat(threads, " threads"), alone);
      }
    }
  omp_set_num_threads(before);
}

// So a micro-batch may be split anywhere, and a chunk of rows of the head gives the logits of the whole.
TEST(Matmul, ARowHasTheSameBitsWhateverRowsItIsComputedWith) {
  const Context ctx;
  const MatmulCase m{kCompare, 259, 70, 300, true, WeightLayout::out_in};
  const Data in(m, DType::f32);
  const Linear whole(m, in, DType::f32);
  const TensorOn y(ctx, DType::f32, {m.rows, m.outputs}), dx(ctx, DType::f32, {m.rows, m.inputs});
  int64_t begin = 0;
  for (const int64_t count : {1, 2, 3, 4, 5, 7, 97, 140}) {
    matmul_forward(ctx, {y.tensor().slice(begin, count), whole.x.tensor().slice(begin, count), whole.weight,
                         whole.bias});
    matmul_dgrad(ctx, {dx.tensor().slice(begin, count), whole.dy.tensor().slice(begin, count), whole.weight});
    begin += count;
    const std::vector<bool> untouched = y.poisoned();
    for (int64_t i = begin * m.outputs; i < m.rows * m.outputs; ++i)
      ASSERT_TRUE(untouched[static_cast<size_t>(i)])
          << "rows up to " << begin << ", written at element " << i;
  }
  ASSERT_EQ(begin, m.rows);
  expect_same_bits("y", y, whole.y);
  expect_same_bits("dx", dx, whole.dx);
}

// The same must hold for a column: the padded vocabulary of the head may not change the logits.
TEST(Matmul, AColumnHasTheSameBitsWhateverColumnsItIsComputedWith) {
  const MatmulCase wide{kCompare, 50, 1024, 128, true, WeightLayout::out_in};
  const MatmulCase narrow{kCompare, 50, 1001, 128, true, WeightLayout::out_in};
  Data in(wide, DType::f32);
  const Linear padded(wide, in, DType::f32);
  in.weight.resize(static_cast<size_t>(narrow.outputs * narrow.inputs));
  in.bias.resize(static_cast<size_t>(narrow.outputs));
  in.dy.resize(static_cast<size_t>(narrow.rows * narrow.outputs));
  const Values of_padded = padded.y.values(), of_narrow = Linear(narrow, in, DType::f32).y.values();
  for (int64_t n = 0; n < narrow.rows; ++n)
    for (int64_t o = 0; o < narrow.outputs; ++o)
      ASSERT_EQ(of_narrow[static_cast<size_t>(n * narrow.outputs + o)],
                of_padded[static_cast<size_t>(n * wide.outputs + o)])
          << "row " << n << ", column " << o;
}

// Padding: rows of the weight beyond the vocabulary are zero, ignored tokens have a zero gradient. Neither may leave
// anything but zeros behind.
TEST(Matmul, ZeroRowsStayZero) {
  for (const WeightLayout layout : {WeightLayout::out_in, WeightLayout::in_out}) {
    const MatmulCase m{kCompare, 40, 40, 24, true, layout};
    Data in(m, DType::f32);
    const int64_t true_outputs = 33, true_rows = 29;
    for (int64_t o = true_outputs; o < m.outputs; ++o) {
      in.bias[static_cast<size_t>(o)] = 0;
      for (int64_t c = 0; c < m.inputs; ++c) in.weight[weight_index(m, o, c)] = 0;
      for (int64_t n = 0; n < m.rows; ++n) in.dy[static_cast<size_t>(n * m.outputs + o)] = 0;
    }
    for (int64_t n = true_rows; n < m.rows; ++n)
      for (int64_t o = 0; o < m.outputs; ++o) in.dy[static_cast<size_t>(n * m.outputs + o)] = 0;
    const Linear run(m, in, DType::f32);
    run.expect_results("padded", oracle(m, in), tolerance_for(DType::f32));
    const Values y = run.y.values(), dx = run.dx.values(), dw = run.d_weight.values(),
                 db = run.d_bias.values();
    for (int64_t o = true_outputs; o < m.outputs; ++o) {
      EXPECT_EQ(db[static_cast<size_t>(o)], 0);
      for (int64_t n = 0; n < m.rows; ++n) EXPECT_EQ(y[static_cast<size_t>(n * m.outputs + o)], 0);
      for (int64_t c = 0; c < m.inputs; ++c) EXPECT_EQ(dw[weight_index(m, o, c)], 0);
    }
    for (int64_t n = true_rows; n < m.rows; ++n)
      for (int64_t c = 0; c < m.inputs; ++c) EXPECT_EQ(dx[static_cast<size_t>(n * m.inputs + c)], 0);
  }
}

// A NaN or Inf reaches exactly the elements whose sum it is in.
TEST(Matmul, NanAndInfGoWhereTheyBelong) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  for (const WeightLayout layout : {WeightLayout::out_in, WeightLayout::in_out})
    for (const double bad : {nan, inf, -inf})
      for (int where = 0; where < 3; ++where) {
        const MatmulCase m{kCompare, 20, 37, 290, true, layout};
        SCOPED_TRACE(cat(m.label(), " ", bad, " in ", where == 0 ? "x" : where == 1 ? "weight" : "dy"));
        Data in(m, DType::f32);
        (where == 0 ? in.x : where == 1 ? in.weight : in.dy)[321] = bad;
        const Results expected = oracle(m, in);
        EXPECT_FALSE(
            std::all_of(expected.y.begin(), expected.y.end(), [](double v) { return std::isfinite(v); }) &&
            std::all_of(expected.dx.begin(), expected.dx.end(), [](double v) { return std::isfinite(v); }));
        Linear(m, in, DType::f32).expect_results("fp32", expected, tolerance_for(DType::f32));
      }
}

// 65536 equal terms: one running fp32 sum would lose three digits, sums over pieces do not.
TEST(Matmul, LongSumsKeepTheirDigits) {
  const MatmulCase m{kCompare, 65536, 3, 2, true, WeightLayout::out_in};
  Data in(m, DType::f32);
  std::fill(in.x.begin(), in.x.end(), representable(0.7, DType::f32));
  std::fill(in.dy.begin(), in.dy.end(), representable(1.1, DType::f32));
  const Results expected = oracle(m, in);
  const Linear run(m, in, DType::f32);
  expect_close("d_weight", run.d_weight.values(), expected.d_weight, {0, 1e-5, 1e-5});
  expect_close("d_bias", run.d_bias.values(), expected.d_bias, {0, 1e-5, 1e-5});
}

TEST(Matmul, LeadingDimensionsCountAsRows) {
  const Context ctx;
  const MatmulCase m{kCompare, 12, 10, 8, false, WeightLayout::in_out};
  const Data in(m, DType::f32);
  const Linear flat(m, in, DType::f32);
  const TensorOn y(ctx, DType::f32, {3, 4, 10});
  matmul_forward(ctx, {.y = y,
                       .x = TensorOn(ctx, DType::f32, {2, 6, 8}, in.x),
                       .weight = flat.weight,
                       .bias = {},
                       .layout = m.layout});
  expect_same_bits("y", y, flat.y);
}

TEST(Matmul, RefusesWrongArguments) {
  const Context ctx;
  const auto tensor = [&](const std::vector<int64_t>& shape, DType type = DType::f32) {
    return TensorOn(ctx, type, shape);
  };
  const TensorOn x = tensor({4, 6}), w = tensor({5, 6}), y = tensor({4, 5}), b = tensor({5});
  EXPECT_NO_THROW(matmul_forward(ctx, {y, x, w, b}));
  EXPECT_THROW(matmul_forward(ctx, {y, x, w, b, WeightLayout::in_out}), Error);
  EXPECT_THROW(matmul_forward(ctx, {tensor({3, 5}), x, w, b}), Error);
  EXPECT_THROW(matmul_forward(ctx, {y, x, w, tensor({6})}), Error);
  EXPECT_THROW(matmul_forward(ctx, {y, tensor({4, 6}, DType::f64), w, b}), Error);
  EXPECT_THROW(matmul_forward(ctx, {y, x, tensor({30}), b}), Error);
  EXPECT_THROW(matmul_forward(ctx, {tensor({4, 5}, DType::bf16), tensor({4, 6}, DType::bf16),
                                    tensor({5, 6}, DType::bf16), Tensor{}}),
               Error);
  EXPECT_NO_THROW(matmul_dgrad(ctx, {x, y, w}));
  EXPECT_THROW(matmul_dgrad(ctx, {x, y, tensor({6, 5})}), Error);
  EXPECT_THROW(matmul_dgrad(ctx, {x, tensor({5, 5}), w}), Error);
  const auto out_in = WeightLayout::out_in;
  EXPECT_NO_THROW(matmul_dgrad(ctx, {x, y, w, out_in, tensor({4, 6})}));
  EXPECT_THROW(matmul_dgrad(ctx, {x, y, w, out_in, tensor({4, 5})}), Error);
  EXPECT_THROW(matmul_dgrad(ctx, {x, y, w, out_in, tensor({4, 6}, DType::f64)}), Error);
  EXPECT_THROW(matmul_dgrad(ctx, {x, y, w, out_in, x}), Error);
  EXPECT_NO_THROW(matmul_wgrad(ctx, {.d_weight = w, .d_bias = b, .dy = y, .x = x, .scratch = {}}));
  EXPECT_THROW(matmul_wgrad(ctx, {.d_weight = w, .d_bias = tensor({4}), .dy = y, .x = x, .scratch = {}}),
               Error);
  EXPECT_THROW(
      matmul_wgrad(ctx,
                   {.d_weight = tensor({5, 6}, DType::f64), .d_bias = b, .dy = y, .x = x, .scratch = {}}),
      Error);
  EXPECT_THROW(matmul_wgrad(ctx, {.d_weight = w, .d_bias = b, .dy = tensor({3, 5}), .x = x, .scratch = {}}),
               Error);
  try {
    matmul_forward(ctx, {tensor({3, 5}), x, w, b});
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ExitCode::internal);
    EXPECT_NE(std::string(e.what()).find("matmul_forward: x must be 3 rows of 6, is [4, 6]"),
              std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace kinoe
