// Rotary position embedding on the GPU against the CPU in fp64.
#include "kernels/rope.h"

#include "test/gpu_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;

struct Problem {
  Problem(const RopeCase& c, DType type, Random& random)
      : shape(c),
        pitch((c.heads + 2 * c.kv_heads) * c.head_dim),
        qkv(random.normal(c.batch * c.length * pitch, 1, type)) {
    std::vector<double> frequencies;
    for (int64_t i = 0; i < c.head_dim / 2; ++i)
      frequencies.push_back(
          std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(c.head_dim)));
    const std::vector<float> floats = make_rope_table<float>(c.length + 3, frequencies);
    table.assign(floats.begin(), floats.end());
  }

  [[nodiscard]] TensorOn table_on(const Context& ctx, DType type) const {
    return {ctx, accumulator_of(type), {shape.length + 3, shape.head_dim}, table};
  }

  [[nodiscard]] TensorOn run(const Context& ctx, DType type, bool backward) const {
    TensorOn x(ctx, type, {shape.batch, shape.length, pitch}, qkv);
    const TensorOn angles = table_on(ctx, type);
    rope(ctx, {x, angles, shape.heads, shape.kv_heads, backward});
    angles.expect_unchanged("table");
    return x;
  }

  /// Value heads keep their bits.
  void expect_values_unchanged(const Values& after) const {
    const int64_t rotated = (shape.heads + shape.kv_heads) * shape.head_dim;
    for (int64_t i = 0; i < static_cast<int64_t>(after.size()); ++i)
      if (i % pitch >= rotated) {
        ASSERT_EQ(after[static_cast<size_t>(i)], qkv[static_cast<size_t>(i)]) << "value element " << i;
      }
  }

  RopeCase shape;
  int64_t pitch;
  Values qkv, table;
};

TEST(RopeGpu, EqualsTheCpuAtAllShapes) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  std::vector<RopeCase> cases = cases_for(rope_cases(), kCompare);
  cases.push_back({kCompare, 1, 19, 64, 64, 256});  // more work per token than a block has threads
  for (const DType type : {DType::f32, DType::bf16}) {
    Precision precision("rope", type);
    for (const RopeCase& c : cases)
      for (const bool backward : {false, true}) {
        SCOPED_TRACE(cat(c.label(), backward ? " backward " : " forward ", name_of(type)));
        const Problem p(c, type, random);
        const TensorOn actual = p.run(gpu, type, backward), exact = p.run(kCpu, DType::f64, backward);
        precision.expect({{"qkv", actual, 1e-6}}, {{"qkv", exact}}, {1e-6, 1e-5, 1e-6});
        p.expect_values_unchanged(actual.values());
      }
  }
}

TEST(RopeGpu, BackwardUndoesForward) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  Problem p({kCompare, 2, 100, 4, 2, 64}, DType::f32, random);
  const Values start = p.qkv;
  p.qkv = p.run(gpu, DType::f32, false).values();
  expect_close("there and back", p.run(gpu, DType::f32, true).values(), start, {2e-6, 2e-6, 1e-6});
}

TEST(RopeGpu, AddressesThatAllowNoVectorsGiveTheSameValues) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const DType type : {DType::f32, DType::bf16}) {
    const RopeCase c{kCompare, 2, 33, 6, 2, 64};
    const Problem p(c, type, random);
    const ShiftedTensor x(gpu, type, {c.batch, c.length, p.pitch}, 1, p.qkv);
    const TensorOn angles = p.table_on(gpu, type);
    rope(gpu, {x, angles, c.heads, c.kv_heads, false});
    expect_close(name_of(type), x.values(), p.run(gpu, type, false).values(),
                 type == DType::bf16 ? Tolerance{1e-6, 0x1p-7, 1e-4} : Tolerance{1e-6, 1e-6, 1e-6});
  }
}

TEST(RopeGpu, NanAndInfReachTheirPairOnly) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const int64_t d : {10, 64}) {
    Problem p({kCompare, 1, 5, 2, 1, d}, DType::f32, random);
    p.qkv[static_cast<size_t>(3 * p.pitch + 1)] = std::nan("");
    p.qkv[static_cast<size_t>(2 * p.pitch + d + d / 2)] = std::numeric_limits<double>::infinity();
    expect_close(cat("D = ", d), p.run(device->context(), DType::f32, false).values(),
                 p.run(kCpu, DType::f32, false).values(), {1e-6, 1e-5});
  }
}

TEST(RopeGpu, MoreThanTwoToThe31Elements) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  const RopeCase c{kCompare, 1, 1024, 32, 8, 128};  // one sequence, 352 times
  constexpr int64_t kBatch = 352;
  const int64_t pitch = (c.heads + 2 * c.kv_heads) * c.head_dim;
  if (!enough_memory(*device, static_cast<size_t>(kBatch * c.length * pitch) * 2))
    GTEST_SKIP() << "too little memory";
  Random random;
  const Problem p(c, DType::bf16, random);
  const Values block = p.run(gpu, DType::bf16, false).values();
  const BigTensor x(gpu, DType::bf16, {kBatch, c.length, p.pitch}, p.qkv);
  const TensorOn angles = p.table_on(gpu, DType::bf16);
  rope(gpu, {x, angles, c.heads, c.kv_heads, false});
  for (const int64_t row : telling_rows(kBatch * c.length, p.pitch)) {
    const auto from = block.begin() + row % c.length * p.pitch;
    expect_close(cat("token ", row), x.values(row * p.pitch, p.pitch), Values(from, from + p.pitch),
                 {0, 0, 0});
  }
}

}  // namespace
}  // namespace kinoe::optest
