// GELU and SwiGLU on the GPU against the CPU in fp64, bf16 over all of its 65,536 values.
#include "kernels/activation.h"

#include "test/gpu_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;

/// What a test needs of one of the four operations. Matrices are [rows, f], or [rows, 2 f] where they hold gates and ups.
struct Operation {
  const char* name;
  bool backward, gated;

  [[nodiscard]] int64_t in_width() const { return gated ? 2 : 1; }               // of x, in F
  [[nodiscard]] int64_t out_width() const { return gated && backward ? 2 : 1; }  // of the result

  void call(const Context& ctx, Tensor result, Tensor x, Tensor d_out) const {
    if (gated && backward) return swiglu_backward(ctx, {result, d_out, x});
    if (gated) return swiglu_forward(ctx, {result, x});
    if (backward) return gelu_backward(ctx, {result, d_out, x});
    gelu_forward(ctx, {result, x});
  }

  /// The result; d_out is [rows, f] and used by the backward operations.
  [[nodiscard]] TensorOn run(const Context& ctx, DType type, int64_t rows, int64_t f, const Values& x_values,
                             const Values& d_values) const {
    const TensorOn x(ctx, type, {rows, in_width() * f}, x_values), d_out(ctx, type, {rows, f}, d_values);
    const TensorOn result(ctx, type, {rows, out_width() * f});
    call(ctx, result, x, d_out);
    x.expect_unchanged("x");
    d_out.expect_unchanged("d_out");
    return result;
  }
};

constexpr Operation kOperations[] = {{"gelu_forward", false, false},
                                     {"gelu_backward", true, false},
                                     {"swiglu_forward", false, true},
                                     {"swiglu_backward", true, true}};

TEST(ActivationGpu, EqualsTheCpuAtAllShapes) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const Operation& op : kOperations)
    for (const DType type : {DType::f32, DType::bf16}) {
      Precision precision(op.name, type);
      for (const ActivationCase& c : cases_for(activation_cases(), kCompare)) {
        SCOPED_TRACE(cat(op.name, " ", c.label(), " ", name_of(type)));
        const Values x = random.normal(c.rows * op.in_width() * c.columns, 2, type);
        const Values d = random.normal(c.rows * c.columns, 1, type);
        const TensorOn actual = op.run(device->context(), type, c.rows, c.columns, x, d);
        const TensorOn exact = op.run(kCpu, DType::f64, c.rows, c.columns, x, d);
        precision.expect({{"result", actual, 2e-6}}, {{"result", exact}}, {2e-6, 1e-5, 1e-6});
      }
    }
}

// Every finite bf16 number as x, or as gate. The smallest results may be flushed to zero.
TEST(ActivationGpu, EveryBf16NumberIsRight) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  constexpr int64_t kRows = 256, kF = 256;
  for (const Operation& op : kOperations) {
    Precision precision(op.name, DType::bf16);
    SCOPED_TRACE(op.name);
    const Values d = random.uniform(kRows * kF, -1, 1, DType::bf16),
                 up = random.uniform(kRows * kF, -1, 1, DType::bf16);
    Values x;
    for (size_t row = 0; row < kRows; ++row) {
      for (size_t i = 0; i < kF; ++i) {
        const auto value = static_cast<double>(to_float(bf16{static_cast<uint16_t>(row * kF + i)}));
        // The gradient of what overflows anyway is left out: x * x has no room in fp32.
        x.push_back(std::isfinite(value) ? value : 0);
      }
      if (op.gated)
        x.insert(x.end(), up.begin() + static_cast<std::ptrdiff_t>(row * kF),
                 up.begin() + static_cast<std::ptrdiff_t>((row + 1) * kF));
    }
    const TensorOn actual = op.run(device->context(), DType::bf16, kRows, kF, x, d);
    const TensorOn exact = op.run(kCpu, DType::f64, kRows, kF, x, d);
    precision.expect({{"result", actual, 1e-6}}, {{"result", exact}}, {});
  }
}

TEST(ActivationGpu, Fp32IsRightFromTinyToHuge) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  Values sweep;
  for (int i = -4000; i <= 4000; ++i) sweep.push_back(static_cast<double>(static_cast<float>(i * 0.005)));
  for (double magnitude = 1e-30; magnitude < 1e18; magnitude *= 3)
    for (const double sign : {-1.0, 1.0})
      sweep.push_back(static_cast<double>(static_cast<float>(sign * magnitude)));
  const auto f = static_cast<int64_t>(sweep.size());
  for (const Operation& op : kOperations) {
    Precision precision(op.name, DType::f32);
    SCOPED_TRACE(op.name);
    Values x = sweep;
    if (op.gated) {
      const Values up = random.normal(f);
      x.insert(x.end(), up.begin(), up.end());
    }
    const Values d = random.normal(f);
    const TensorOn actual = op.run(device->context(), DType::f32, 1, f, x, d);
    const TensorOn exact = op.run(kCpu, DType::f64, 1, f, x, d);
    precision.expect({{"result", actual}}, {{"result", exact}}, {2e-6, 1e-5, 1e-6});
  }
}

TEST(ActivationGpu, NanAndInfFollowTheCpu) {
  KINOE_GPU_OR_SKIP(device);
  constexpr double kInf = std::numeric_limits<double>::infinity(),
                   kNan = std::numeric_limits<double>::quiet_NaN();
  const Values specials = {kNan, kInf, -kInf, 1, -1, 0, 200, -200};
  for (const Operation& op : kOperations)
    for (const DType type : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(cat(op.name, " ", name_of(type)));
      Values x, d;
      for (const double a : specials)
        for (const double b : specials) {
          x.push_back(a);
          d.push_back(b);
        }
      const auto f = static_cast<int64_t>(d.size());
      if (op.gated) {
        Values up = d;
        std::reverse(up.begin(), up.end());
        x.insert(x.end(), up.begin(), up.end());
      }
      expect_close("result", op.run(device->context(), type, 1, f, x, d).values(),
                   op.run(kCpu, DType::f32, 1, f, x, d).values(), {1e-5, 0x1p-7});
    }
}

TEST(ActivationGpu, InPlaceGivesTheSameBits) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const Operation& op : kOperations) {
    if (op.gated && !op.backward) continue;  // out is half of gate_up
    for (const DType type : {DType::f32, DType::bf16})
      for (const int64_t f : {33, 1024}) {
        const int64_t rows = 50;
        const Values x = random.normal(rows * op.in_width() * f, 2, type),
                     d = random.normal(rows * f, 1, type);
        const TensorOn apart = op.run(gpu, type, rows, f, x, d);
        TensorOn x_on(gpu, type, {rows, op.in_width() * f}, x), d_on(gpu, type, {rows, f}, d);
        // gelu: out is x, dx is d_out; swiglu: d_gate_up is gate_up.
        const TensorOn shared = op.backward && !op.gated ? d_on : x_on;
        op.call(gpu, shared, x_on, d_on);
        expect_same_bits(cat(op.name, " ", name_of(type), " F=", f), shared, apart);
      }
  }
}

TEST(ActivationGpu, AddressesThatAllowNoVectorsGiveTheSameBits) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const Operation& op : kOperations)
    for (const DType type : {DType::f32, DType::bf16}) {
      const int64_t rows = 7, f = 520;
      const Values x = random.normal(rows * op.in_width() * f, 2, type), d = random.normal(rows * f, 1, type);
      const ShiftedTensor x_on(gpu, type, {rows, op.in_width() * f}, 1, x), d_on(gpu, type, {rows, f}, 1, d),
          result(gpu, type, {rows, op.out_width() * f}, 1);
      op.call(gpu, result, x_on, d_on);
      // Element by element: the same arithmetic.
      expect_close(cat(op.name, " ", name_of(type)), result.values(),
                   op.run(gpu, type, rows, f, x, d).values(), {0, 0, 0});
    }
}

TEST(ActivationGpu, MoreThanTwoToThe31Elements) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  constexpr int64_t kF = 14336, kBlock = 67, kRows = 150001;  // 2.15 G per F
  for (const Operation& op : kOperations) {
    const int64_t rows = op.gated ? kRows / 2 : kRows;
    const auto size = static_cast<size_t>(rows * kF) * 2;
    if (!enough_memory(*device,
                       size * static_cast<size_t>(op.in_width() + op.out_width() + (op.backward ? 1 : 0))))
      continue;
    SCOPED_TRACE(op.name);
    const Values x = random.normal(kBlock * op.in_width() * kF, 2, DType::bf16),
                 d = random.normal(kBlock * kF, 1, DType::bf16);
    const Values block = op.run(gpu, DType::bf16, kBlock, kF, x, d).values();
    const BigTensor x_on(gpu, DType::bf16, {rows, op.in_width() * kF}, x),
        d_on = op.backward ? BigTensor(gpu, DType::bf16, {rows, kF}, d) : BigTensor(),
        result(gpu, DType::bf16, {rows, op.out_width() * kF});
    op.call(gpu, result, x_on, d_on);
    const int64_t width = op.out_width() * kF;
    for (const int64_t row : telling_rows(rows, width)) {
      const auto from = block.begin() + row % kBlock * width;
      expect_close(cat("row ", row), result.values(row * width, width), Values(from, from + width),
                   {0, 0, 0});
    }
  }
}

}  // namespace
}  // namespace kinoe::optest
