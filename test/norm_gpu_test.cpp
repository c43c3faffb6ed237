// LayerNorm and RMSNorm on the GPU against the CPU in fp64.
#include "kernels/norm.h"

#include "test/gpu_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;
constexpr float kEps = 1e-5F;

struct Problem {
  Problem(const NormCase& c, DType type, Random& random)
      : shape(c),
        residual(random.normal(c.rows * c.columns, 1, type)),
        branch(random.normal(c.branch ? c.rows * c.columns : 0, 0.5, type)),
        weight(random.normal(c.columns, 1, type)),
        bias(random.normal(c.bias ? c.columns : 0, 1, type)),
        d_out(random.normal(c.rows * c.columns, 1, type)),
        d_residual_in(random.normal(c.rows * c.columns, 1, type)) {}

  [[nodiscard]] TensorOn matrix(const Context& ctx, DType type, const Values& v = {}) const {
    if (v.empty()) return {ctx, type, {shape.rows, shape.columns}};
    return {ctx, type, {shape.rows, shape.columns}, v};
  }
  [[nodiscard]] TensorOn row(const Context& ctx, DType type, const Values& v = {}) const {
    if (v.empty()) return {ctx, type, {shape.columns}};
    return {ctx, type, {shape.columns}, v};
  }

  /// {out, r, mean, rstd}. `in_place`: residual_out is the memory of residual.
  [[nodiscard]] Outputs forward(const Context& ctx, DType type, bool in_place = false) const {
    const DType statistics = accumulator_of(type);
    const TensorOn out = matrix(ctx, type), r = matrix(ctx, type, residual);
    const TensorOn b = shape.branch ? matrix(ctx, type, branch) : TensorOn();
    const TensorOn sum = !shape.branch ? TensorOn() : in_place ? r : matrix(ctx, type);
    const TensorOn w = row(ctx, type, weight), add = shape.bias ? row(ctx, type, bias) : TensorOn();
    const TensorOn mean = shape.rms ? TensorOn() : TensorOn(ctx, statistics, {shape.rows});
    const TensorOn rstd(ctx, statistics, {shape.rows});
    norm_forward(ctx, {out, sum, r, b, w, add, mean, rstd, kEps});
    if (!in_place) r.expect_unchanged("residual");
    if (b) b.expect_unchanged("branch");
    w.expect_unchanged("weight");
    return {{"out", out, 1e-5}, {"residual_out", sum}, {"mean", mean}, {"rstd", rstd}};
  }

  /// {d_residual, d_weight, d_bias} from a stored forward pass.
  [[nodiscard]] Outputs backward(const Context& ctx, DType type, const Values& r_values, const Values& means,
                                 const Values& rstds, bool in_place = false, double start = 0,
                                 bool with_residual_in = true) const {
    const DType statistics = accumulator_of(type);
    const TensorOn d_in = with_residual_in ? matrix(ctx, type, d_residual_in) : TensorOn();
    const TensorOn d_residual = in_place ? d_in : matrix(ctx, type);
    const bool accumulate = start != 0;
    const Values starts(accumulate ? static_cast<size_t>(shape.columns) : 0, start);
    const TensorOn d_weight = row(ctx, statistics, starts);
    const TensorOn d_bias = shape.bias ? row(ctx, statistics, starts) : TensorOn();
    const TensorOn d = matrix(ctx, type, d_out), r = matrix(ctx, type, r_values), w = row(ctx, type, weight);
    const TensorOn mean = shape.rms ? TensorOn() : TensorOn(ctx, statistics, {shape.rows}, means);
    const TensorOn rstd(ctx, statistics, {shape.rows}, rstds);
    const TensorOn scratch =
        TensorOn::scratch(ctx, norm_backward_scratch_bytes(ctx.backend, shape.rows, shape.columns));
    norm_backward(ctx, {d_residual, d_in, d_weight, d_bias, accumulate, d, r, w, mean, rstd, scratch});
    d.expect_unchanged("d_out");
    r.expect_unchanged("residual");
    if (d_in && !in_place) d_in.expect_unchanged("d_residual_in");
    return {{"d_residual", d_residual, 1e-5}, {"d_weight", d_weight}, {"d_bias", d_bias}};
  }

  /// Forward and backward on `gpu` against the CPU in fp64, from the same stored r and statistics.
  void compare(const Context& gpu, DType type, Precision& precision) const {
    const Outputs f = forward(gpu, type);
    Problem plain = *this;
    plain.shape.branch = false;
    if (shape.branch) {
      // One addition and one rounding: exact.
      for (size_t i = 0; i < residual.size(); ++i)
        plain.residual[i] =
            representable(static_cast<double>(static_cast<float>(residual[i] + branch[i])), type);
      expect_close("residual_out", f[1].tensor.values(), plain.residual, {0, 0, 0});
    }
    const Outputs exact = plain.forward(kCpu, DType::f64);
    const Tolerance tolerance = tight();
    precision.expect({f[0], f[2], f[3]}, {exact[0], exact[2], exact[3]}, tolerance);
    if (testing::Test::HasFailure()) return;

    const Values means = shape.rms ? Values{} : f[2].tensor.values(), rstds = f[3].tensor.values();
    const Outputs b = backward(gpu, type, plain.residual, means, rstds);
    precision.expect(b, backward(kCpu, DType::f64, plain.residual, means, rstds), tolerance);
  }

  /// Two columns may be close to each other, which divides the rounding of their mean by a small deviation.
  [[nodiscard]] Tolerance tight() const {
    if (shape.columns == 2) return {1e-3, 1e-3, 1e-3};
    // Absolute: the sums of the weight gradients grow with the rows.
    return {1e-5 * std::max(1.0, static_cast<double>(shape.rows) / 500), 1e-5, 5e-6};
  }

  NormCase shape;
  Values residual, branch, weight, bias, d_out, d_residual_in;
};

/// Widths of both sides of every row of the launch tables, in accesses of 16 bytes.
std::vector<int64_t> table_accesses() {
  std::vector<int64_t> all = {1};
  for (const int64_t edge :
       {8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 384, 512, 768, 1024, 1536, 2048, 4096}) {
    all.push_back(edge);
    all.push_back(edge + 1);
  }
  return all;
}

TEST(NormGpu, EqualsTheCpuAtAllShapes) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const DType type : {DType::f32, DType::bf16}) {
    Precision precision("norm", type);
    for (const NormCase& c : cases_for(norm_cases(), kCompare)) {
      SCOPED_TRACE(cat(c.label(), " ", name_of(type)));
      Problem(c, type, random).compare(device->context(), type, precision);
    }
  }
}

TEST(NormGpu, EqualsTheCpuAtEveryLaunchShape) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const DType type : {DType::f32, DType::bf16}) {
    Precision precision("norm, all widths", type);
    for (const int64_t accesses : table_accesses())
      for (const int64_t odd : {int64_t{0}, int64_t{1}}) {
        if (odd == 1 && accesses > 256 && accesses != 1536) continue;
        const int64_t columns = accesses * (type == DType::f32 ? 4 : 8) + odd;
        const bool rms = accesses % 2 == 0;
        const NormCase c{kCompare, accesses < 300 ? 301 : 5, columns, rms, true, !rms};
        if (accesses < 300 && accesses > 64 && odd == 1) continue;
        SCOPED_TRACE(cat(c.label(), " ", name_of(type)));
        Problem(c, type, random).compare(device->context(), type, precision);
      }
  }
}

// So many rows that every block's ring of rows in shared memory goes round more than once.
TEST(NormGpu, ManyRowsPerGroup) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  Precision precision("norm, many rows", DType::bf16);
  for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{{60000, 64},
                                                                              {15000, 256},
                                                                              {9000, 512},
                                                                              {6500, 768},
                                                                              {3500, 1024},
                                                                              {2700, 2048},
                                                                              {1100, 4096},
                                                                              {900, 6144}}) {
    const NormCase c{kCompare, 53, columns, columns % 512 == 0, true, columns % 512 != 0};
    Problem p(c, DType::bf16, random);
    p.shape.rows = rows;
    for (Values* v : {&p.residual, &p.branch, &p.d_out, &p.d_residual_in}) {
      const size_t block = v->size();
      v->resize(static_cast<size_t>(rows * columns));
      for (size_t i = block; i < v->size(); ++i) (*v)[i] = (*v)[i - block];
    }
    SCOPED_TRACE(p.shape.label());
    p.compare(device->context(), DType::bf16, precision);
  }
}

TEST(NormGpu, InPlaceGivesTheSameBits) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const DType type : {DType::f32, DType::bf16})
    for (const int64_t columns : {7, 768, 4096}) {
      const NormCase c{kCompare, 37, columns, false, true, true};
      SCOPED_TRACE(cat(c.label(), " ", name_of(type)));
      const Problem p(c, type, random);
      const Outputs f = p.forward(gpu, type);
      expect_same_outputs("forward", p.forward(gpu, type, true), f);
      const Values r = f[1].tensor.values(), mean = f[2].tensor.values(), rstd = f[3].tensor.values();
      expect_same_outputs("backward", p.backward(gpu, type, r, mean, rstd, true),
                          p.backward(gpu, type, r, mean, rstd));
    }
}

TEST(NormGpu, AccumulatesOntoWhatIsThere) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const DType type : {DType::f32, DType::bf16}) {
    const NormCase c{kCompare, 301, 1600, false, true, true};
    const Problem p(c, type, random);
    const Outputs f = p.forward(gpu, type);
    const Values r = f[1].tensor.values(), mean = f[2].tensor.values(), rstd = f[3].tensor.values();
    const Outputs fresh = p.backward(gpu, type, r, mean, rstd),
                  added = p.backward(gpu, type, r, mean, rstd, false, 3);
    for (const size_t i : {size_t{1}, size_t{2}}) {
      Values expected = fresh[i].tensor.values();
      for (double& x : expected) x = static_cast<double>(static_cast<float>(x + 3));
      expect_close(cat(fresh[i].name, " ", name_of(type)), added[i].tensor.values(), expected, {0, 0, 0});
    }
  }
}

TEST(NormGpu, WithoutAnIncomingGradientItIsZero) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const int64_t columns : {33, 768}) {
    Problem p({kCompare, 19, columns, true, false, false}, DType::bf16, random);
    const Values rstd = p.forward(gpu, DType::bf16)[3].tensor.values();
    const Outputs absent = p.backward(gpu, DType::bf16, p.residual, {}, rstd, false, 0, false);
    std::fill(p.d_residual_in.begin(), p.d_residual_in.end(), 0.0);
    expect_same_outputs(cat(columns, " columns"), absent, p.backward(gpu, DType::bf16, p.residual, {}, rstd));
  }
}

TEST(NormGpu, AddressesThatAllowNoVectorsGiveTheSameValues) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const DType type : {DType::f32, DType::bf16}) {
    const NormCase c{kCompare, 9, 1024, false, true, true};
    SCOPED_TRACE(name_of(type));
    const Problem p(c, type, random);
    const auto matrix = [&](const Values& v) { return ShiftedTensor(gpu, type, {c.rows, c.columns}, 1, v); };
    const auto row = [&](const Values& v) { return ShiftedTensor(gpu, type, {c.columns}, 1, v); };
    const ShiftedTensor out = matrix({}), sum = matrix({}), r = matrix(p.residual), b = matrix(p.branch),
                        w = row(p.weight), add = row(p.bias), d_residual = matrix({}),
                        d_in = matrix(p.d_residual_in), d = matrix(p.d_out);
    const TensorOn mean(gpu, DType::f32, {c.rows}), rstd(gpu, DType::f32, {c.rows});
    norm_forward(gpu, {out, sum, r, b, w, add, mean, rstd, kEps});
    const Outputs f = p.forward(gpu, type);
    // The sums run in another order, which may turn a rounding.
    const Tolerance near = type == DType::bf16 ? Tolerance{1e-5, 0x1p-7, 1e-3} : Tolerance{1e-5, 1e-5, 1e-6};
    expect_close("out", out.values(), f[0].tensor.values(), near);
    expect_close("residual_out", sum.values(), f[1].tensor.values(), {0, 0, 0});

    const ShiftedTensor d_weight(gpu, DType::f32, {c.columns}, 1), d_bias(gpu, DType::f32, {c.columns}, 1);
    const TensorOn scratch =
        TensorOn::scratch(gpu, norm_backward_scratch_bytes(Backend::cuda, c.rows, c.columns));
    norm_backward(gpu, {d_residual, d_in, d_weight, d_bias, false, d, sum, w, mean, rstd, scratch});
    const Outputs g = p.backward(gpu, type, f[1].tensor.values(), f[2].tensor.values(), f[3].tensor.values());
    expect_close("d_residual", d_residual.values(), g[0].tensor.values(), near);
    expect_close("d_weight", d_weight.values(), g[1].tensor.values(), {1e-5, 1e-5, 1e-6});
    expect_close("d_bias", d_bias.values(), g[2].tensor.values(), {1e-5, 1e-5, 1e-6});
  }
}

TEST(NormGpu, NanAndInfReachTheirRowAndTheWeightGradients) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const int64_t columns : {5, 128, 768, 4096})
    for (const bool rms : {false, true})
      for (const double bad : {std::nan(""), kInf, -kInf}) {
        Problem p({kCompare, 11, columns, rms, false, !rms}, DType::f32, random);
        p.residual[static_cast<size_t>(4 * columns + 3)] = bad;
        SCOPED_TRACE(cat(p.shape.label(), " with ", bad));
        // In fp32 on both sides: what overflows there does not in fp64.
        const Outputs f = p.forward(gpu, DType::f32), exact = p.forward(kCpu, DType::f32);
        for (const size_t i : {size_t{0}, size_t{2}, size_t{3}})
          if (f[i].tensor)
            expect_close(f[i].name, f[i].tensor.values(), exact[i].tensor.values(), {1e-4, 1e-4});
        const Values mean = rms ? Values{} : exact[2].tensor.values(), rstd = exact[3].tensor.values();
        const Outputs g = p.backward(gpu, DType::f32, p.residual, mean, rstd);
        const Outputs exact_g = p.backward(kCpu, DType::f32, p.residual, mean, rstd);
        for (size_t i = 0; i < 3; ++i)
          if (g[i].tensor)
            expect_close(g[i].name, g[i].tensor.values(), exact_g[i].tensor.values(), {1e-4, 1e-4});
      }
}

// At the shapes of a training step the weight gradients add up all row groups: twice the same bits, and as many times
// the sums of the rows that repeat.
TEST(NormGpu, WeightGradientsRepeatAtTrainingShapes) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const NormCase& c : cases_for(norm_cases(), kBench)) {
    SCOPED_TRACE(c.label());
    constexpr int64_t kRepeats = 64;
    NormCase block_case = c;
    block_case.rows = c.rows / kRepeats;
    block_case.branch = false;
    const Problem p(block_case, DType::bf16, random);
    const Outputs f = p.forward(gpu, DType::bf16);
    const Values mean = c.rms ? Values{} : f[2].tensor.values(), rstd = f[3].tensor.values();
    const Outputs exact = p.backward(kCpu, DType::f64, p.residual, mean, rstd);

    const BigTensor d_out(gpu, DType::bf16, {c.rows, c.columns}, p.d_out),
        r(gpu, DType::bf16, {c.rows, c.columns}, p.residual),
        d_in(gpu, DType::bf16, {c.rows, c.columns}, p.d_residual_in),
        means(gpu, DType::f32, {c.rows}, c.rms ? Values{0} : mean), rstds(gpu, DType::f32, {c.rows}, rstd);
    const TensorOn weight = p.row(gpu, DType::bf16, p.weight);
    std::vector<char> first_d_residual;
    expect_repeats("weight gradients", [&]() -> Outputs {
      const BigTensor d_residual(gpu, DType::bf16, {c.rows, c.columns});
      const TensorOn d_weight(gpu, DType::f32, {c.columns}), d_bias(gpu, DType::f32, {c.columns});
      const TensorOn scratch =
          TensorOn::scratch(gpu, norm_backward_scratch_bytes(Backend::cuda, c.rows, c.columns));
      norm_backward(gpu, {d_residual, d_in, d_weight, d_bias, false, d_out, r, weight,
                          c.rms ? Tensor{} : means.tensor(), rstds, scratch});
      const std::vector<char> bytes = d_residual.bytes();
      if (first_d_residual.empty()) first_d_residual = bytes;
      EXPECT_TRUE(bytes == first_d_residual) << "d_residual differs between two runs";
      Values times = exact[1].tensor.values();
      for (double& x : times) x *= kRepeats;
      // A repeated row meets the same partial sums again and again, so roundings add up instead of averaging out.
      const double typical = kRepeats * std::sqrt(static_cast<double>(block_case.rows));
      expect_close("d_weight", d_weight.values(), times, {2e-6 * typical, 1e-5, 2e-6});
      return {{"d_weight", d_weight}, {"d_bias", d_bias}};
    });
  }
}

TEST(NormGpu, MoreThanTwoToThe31Elements) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  constexpr int64_t kRows = 2800003, kColumns = 768, kBlock = 61;
  if (!enough_memory(*device, size_t{6} * kRows * kColumns * 2)) GTEST_SKIP() << "too little memory";
  Random random;
  const Problem p({kCompare, kBlock, kColumns, true, true, false}, DType::bf16, random);
  const Outputs f = p.forward(gpu, DType::bf16);
  const Values sums = f[1].tensor.values(), rstds = f[3].tensor.values();
  const Values d_block = p.backward(gpu, DType::bf16, sums, {}, rstds)[0].tensor.values();

  const TensorOn weight = p.row(gpu, DType::bf16, p.weight);
  const BigTensor residual(gpu, DType::bf16, {kRows, kColumns}, p.residual),
      branch(gpu, DType::bf16, {kRows, kColumns}, p.branch), out(gpu, DType::bf16, {kRows, kColumns}),
      sum(gpu, DType::bf16, {kRows, kColumns}), rstd(gpu, DType::f32, {kRows});
  norm_forward(gpu, {out, sum, residual, branch, weight, {}, {}, rstd, kEps});
  const auto expect_rows = [&](const char* name, const BigTensor& actual, const Values& block) {
    for (const int64_t row : telling_rows(kRows, kColumns)) {
      const auto from = block.begin() + row % kBlock * kColumns;
      expect_close(cat(name, " row ", row), actual.values(row * kColumns, kColumns),
                   Values(from, from + kColumns), {0, 0, 0});
    }
  };
  expect_rows("out", out, f[0].tensor.values());
  expect_rows("residual_out", sum, sums);

  const BigTensor d_in(gpu, DType::bf16, {kRows, kColumns}, p.d_residual_in);
  const TensorOn d_weight(gpu, DType::f32, {kColumns});
  const TensorOn scratch =
      TensorOn::scratch(gpu, norm_backward_scratch_bytes(Backend::cuda, kRows, kColumns));
  const BigTensor d_out(gpu, DType::bf16, {kRows, kColumns}, p.d_out);
  norm_backward(gpu, {d_in, d_in, d_weight, {}, false, d_out, sum, weight, {}, rstd, scratch});
  // A row's place among the threads does not change its bits.
  expect_rows("d_residual", d_in, d_block);
}

}  // namespace
}  // namespace kinoe::optest
