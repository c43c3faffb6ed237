// The linear layer on the GPU against the CPU in fp64: cuBLASLt's products, called with every layout, and our bias gradient.
//
// The library has algorithms for widths that are multiples of 8, which all models have; other cases are left out.
#include "kernels/matmul.h"

#include <array>
#include <cmath>

#include "test/gpu_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;

struct Problem {
  Problem(const MatmulCase& c, DType type, Random& random)
      : shape(c),
        x(random.normal(c.rows * c.inputs, 1, type)),
        weight(random.normal(c.outputs * c.inputs, 1 / std::sqrt(static_cast<double>(c.inputs)), type)),
        bias(random.normal(c.bias ? c.outputs : 0, 1, type)),
        dy(random.normal(c.rows * c.outputs, 1 / std::sqrt(static_cast<double>(c.rows)), type)) {}

  /// {y, dx, d_weight, d_bias}; the gradients of weight and bias are added to `start`.
  [[nodiscard]] Outputs run(const Context& ctx, DType type, double start = 0) const {
    const MatmulCase& c = shape;
    const std::vector<int64_t> weight_dims = c.layout == WeightLayout::out_in
                                                 ? std::vector<int64_t>{c.outputs, c.inputs}
                                                 : std::vector<int64_t>{c.inputs, c.outputs};
    const TensorOn in(ctx, type, {c.rows, c.inputs}, x), w(ctx, type, weight_dims, weight),
        d(ctx, type, {c.rows, c.outputs}, dy), y(ctx, type, {c.rows, c.outputs}),
        dx(ctx, type, {c.rows, c.inputs});
    const TensorOn b = c.bias ? TensorOn(ctx, type, {c.outputs}, bias) : TensorOn();
    const auto sums = [&](const std::vector<int64_t>& dims, int64_t size) {
      if (start == 0) return TensorOn(ctx, accumulator_of(type), dims);
      return TensorOn(ctx, accumulator_of(type), dims, Values(static_cast<size_t>(size), start));
    };
    const TensorOn d_weight = sums(weight_dims, c.outputs * c.inputs);
    const TensorOn d_bias = c.bias ? sums({c.outputs}, c.outputs) : TensorOn();
    const TensorOn scratch =
        TensorOn::scratch(ctx, matmul_wgrad_scratch_bytes(ctx.backend, c.rows, c.outputs, c.bias));
    matmul_forward(ctx, {.y = y, .x = in, .weight = w, .bias = b, .layout = c.layout});
    matmul_dgrad(ctx, {.dx = dx, .dy = d, .weight = w, .layout = c.layout});
    matmul_wgrad(ctx, {.d_weight = d_weight,
                       .d_bias = d_bias,
                       .accumulate = start != 0,
                       .dy = d,
                       .x = in,
                       .layout = c.layout,
                       .scratch = scratch});
    in.expect_unchanged("x");
    w.expect_unchanged("weight");
    d.expect_unchanged("dy");
    if (b) b.expect_unchanged("bias");
    return {{"y", y, 2e-5}, {"dx", dx, 2e-5}, {"d_weight", d_weight}, {"d_bias", d_bias}};
  }

  MatmulCase shape;
  Values x, weight, bias, dy;
};

void compare(const Context& gpu, DType type, const std::vector<MatmulCase>& cases) {
  Random random;
  Precision precision("matmul", type);
  for (const MatmulCase& c : cases)
    for (const double start : {0.0, 3.0}) {
      SCOPED_TRACE(cat(c.label(), " ", name_of(type), start == 0 ? "" : " accumulating"));
      const Problem p(c, type, random);
      precision.expect(p.run(gpu, type, start), p.run(kCpu, DType::f64, start), {2e-5, 1e-5, 1e-5});
    }
}

TEST(MatmulGpu, EqualsTheCpuAtAllShapes) {
  KINOE_GPU_OR_SKIP(device);
  std::vector<MatmulCase> cases;
  for (const MatmulCase& c : cases_for(matmul_cases(), kCompare))
    if (c.outputs % 8 == 0 && c.inputs % 8 == 0) cases.push_back(c);
  for (const DType type : {DType::f32, DType::bf16}) compare(device->context(), type, cases);
}

/// Around the number of row groups, which is 264, and the 8 rows that a group takes at a time.
TEST(MatmulGpu, BiasGradientsOfAnyNumberOfRows) {
  KINOE_GPU_OR_SKIP(device);
  std::vector<MatmulCase> cases;
  for (const auto& [rows, outputs] : {std::pair<int64_t, int64_t>{1, 264}, {265, 8}, {2113, 264}})
    cases.push_back({kCompare, rows, outputs, 64, true, WeightLayout::in_out});
  for (const DType type : {DType::f32, DType::bf16}) compare(device->context(), type, cases);
}

/// dx = gelu'(gelu_input) * (dy W), all of them about 1. With `shift`, gelu_input lies where the library's epilogue cannot
/// read it, so the kernel after the product is what runs.
struct ThroughGelu {
  ThroughGelu(const MatmulCase& c, DType type, Random& random)
      : shape(c),
        before(random.normal(c.rows * c.inputs, 1.5, type)),
        weight(random.normal(c.outputs * c.inputs, 1 / std::sqrt(static_cast<double>(c.outputs)), type)),
        dy(random.normal(c.rows * c.outputs, 1, type)) {}

  [[nodiscard]] Outputs run(const Context& ctx, DType type, int64_t shift = 0) const {
    const MatmulCase& c = shape;
    const bool out_in = c.layout == WeightLayout::out_in;
    const TensorOn w(ctx, type, {out_in ? c.outputs : c.inputs, out_in ? c.inputs : c.outputs}, weight),
        d(ctx, type, {c.rows, c.outputs}, dy), dx(ctx, type, {c.rows, c.inputs});
    const ShiftedTensor x(ctx, type, {c.rows, c.inputs}, shift, before);
    matmul_dgrad(ctx, {.dx = dx, .dy = d, .weight = w, .layout = c.layout, .gelu_input = x});
    EXPECT_EQ(x.values(), before);
    dx.expect_written("dx");
    return {{"dx", dx}};
  }

  MatmulCase shape;
  Values before, weight, dy;
};

TEST(MatmulGpu, EqualsTheCpuThroughGelu) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const WeightLayout layout : {WeightLayout::out_in, WeightLayout::in_out})
    for (const auto& [rows, outputs, inputs] :
         {std::array<int64_t, 3>{1, 8, 16}, {257, 72, 136}, {130, 200, 1600}, {512, 768, 3072}})
      for (const DType type : {DType::f32, DType::bf16})
        for (const int64_t shift : {1, 0}) {
          const MatmulCase c{kCompare, rows, outputs, inputs, false, layout};
          SCOPED_TRACE(cat(c.label(), " ", name_of(type), shift == 0 ? "" : " unaligned"));
          const ThroughGelu p(c, type, random);
          // In bf16 our kernel rounds twice. The library rounds once, but may take tanh from the special function unit, 2^-11
          // off: with products of 4 standard deviations that is 2^-6 even where GELU's slope is almost 0.
          const Tolerance tolerance = type == DType::bf16
                                          ? Tolerance{0x1p-6, 0x1p-7, rows == 1 ? 0x1p-7 : 0x1p-8}
                                          : Tolerance{2e-5, 1e-5, 1e-5};
          const Errors errors = expect_close("dx", p.run(device->context(), type, shift)[0].tensor.values(),
                                             p.run(kCpu, DType::f64)[0].tensor.values(), tolerance);
          if (rows == 512)
            std::printf("             %s%s: relative L2 %.3g, largest error %.3g\n", name_of(type),
                        shift == 0 ? "" : " unaligned", errors.relative_l2, errors.max_abs);
        }
}

/// The epilogue has a key of its own: its algorithm must not become that of the plain product, or the reverse.
TEST(MatmulGpu, TheGeluEpilogueIsAProductOfItsOwn) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  const MatmulCase c{kCompare, 256, 128, 512, false, WeightLayout::in_out};
  const ThroughGelu p(c, DType::bf16, random);
  const Outputs first = p.run(device->context(), DType::bf16);
  ASSERT_EQ(device->gemm_choices().size(), 1U);
  EXPECT_NE(device->gemm_choices().front().shape.find("dgelu"), std::string::npos)
      << "the library has this epilogue on all GPUs from sm_80";
  const Outputs apart = p.run(device->context(), DType::bf16, 1);
  ASSERT_EQ(device->gemm_choices().size(), 2U);
  expect_same_outputs("after the plain product", p.run(device->context(), DType::bf16), first);

  expect_close("dx", apart[0].tensor.values(), first[0].tensor.values(), {0x1p-6, 0x1p-6, 0x1p-7});

  const auto another = Device::gpu(0);
  another->pin_gemm_choices(device->gemm_choices());
  expect_same_outputs("with pinned algorithms", p.run(another->context(), DType::bf16), first);
  ASSERT_EQ(another->gemm_choices().size(), 1U);
}

TEST(MatmulGpu, Repeats) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const WeightLayout layout : {WeightLayout::out_in, WeightLayout::in_out}) {
    const Problem p({kCompare, 4096, 2304, 768, true, layout}, DType::bf16, random);
    expect_repeats(
        "matmul", [&] { return p.run(device->context(), DType::bf16); }, 3);
  }
}

}  // namespace
}  // namespace kinoe::optest
