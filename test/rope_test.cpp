// Rotary embedding on the CPU against angles computed directly, finite differences, and what a rotation must keep.
#include "kernels/rope.h"

#include "test/op_cases.h"
#include "test/op_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;

/// Llama's frequencies: base^(-2i/D).
std::vector<double> frequencies(int64_t head_dim, double base = 10000) {
  std::vector<double> w;
  for (int64_t i = 0; i < head_dim / 2; ++i)
    w.push_back(std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim)));
  return w;
}

struct Problem {
  Problem(const RopeCase& c, DType dtype, Random& random)
      : shape(c), type(dtype), qkv(random.normal(c.batch * c.length * pitch())) {}

  [[nodiscard]] int64_t pitch() const { return (shape.heads + 2 * shape.kv_heads) * shape.head_dim; }

  /// The table has more positions than are used.
  [[nodiscard]] Values run(const Values& in, bool backward) const {
    const TensorOn x(kCpu, type, {shape.batch, shape.length, pitch()}, in);
    const std::vector<double> table_values =
        make_rope_table<double>(shape.length + 3, frequencies(shape.head_dim));
    const TensorOn table(kCpu, type, {shape.length + 3, shape.head_dim}, table_values);
    cpu::rope(kCpu, {x, table, shape.heads, shape.kv_heads, backward});
    x.expect_written("qkv");
    table.expect_unchanged("table");
    return x.values();
  }

  /// Complex multiplication by e^(i t w), in long double, from the definition of the half-split layout.
  [[nodiscard]] Values expected(const Values& in) const {
    Values out = in;
    const std::vector<double> w = frequencies(shape.head_dim);
    const int64_t half = shape.head_dim / 2;
    for (int64_t n = 0; n < shape.batch * shape.length; ++n)
      for (int64_t h = 0; h < shape.heads + shape.kv_heads; ++h)
        for (int64_t i = 0; i < half; ++i) {
          const auto low = static_cast<size_t>(n * pitch() + h * shape.head_dim + i),
                     high = low + static_cast<size_t>(half);
          const long double angle = static_cast<long double>(n % shape.length) * w[static_cast<size_t>(i)];
          out[low] = static_cast<double>(in[low] * std::cos(angle) - in[high] * std::sin(angle));
          out[high] = static_cast<double>(in[high] * std::cos(angle) + in[low] * std::sin(angle));
        }
    return out;
  }

  RopeCase shape;
  DType type;
  Values qkv;
};

TEST(Rope, RotatesQueriesAndKeysByPosition) {
  Random random;
  for (const RopeCase& c : cases_for(rope_cases(), kCompare)) {
    SCOPED_TRACE(c.label());
    const Problem p(c, DType::f32, random);
    expect_close("qkv", p.run(p.qkv, false), p.expected(p.qkv), {2e-6, 0, 1e-6});
  }
}

TEST(Rope, ValuesAreLeftAlone) {
  Random random;
  const Problem p({kCompare, 2, 9, 4, 2, 6}, DType::f32, random);
  const Values out = p.run(p.qkv, false);
  const int64_t values_from = (p.shape.heads + p.shape.kv_heads) * p.shape.head_dim;
  for (size_t i = 0; i < out.size(); ++i) {
    const int64_t column = static_cast<int64_t>(i) % p.pitch(),
                  position = static_cast<int64_t>(i) / p.pitch() % 9;
    if (column >= values_from || position == 0)
      EXPECT_EQ(out[i], p.qkv[i]) << i;
    else
      EXPECT_NE(out[i], p.qkv[i]) << i;
  }
}

TEST(Rope, GradientsAreThoseOfFiniteDifferences) {
  Random random;
  for (const RopeCase& c : cases_for(rope_cases(), kGradient)) {
    SCOPED_TRACE(c.label());
    const Problem p(c, DType::f64, random);
    const Values d_out = random.normal(static_cast<int64_t>(p.qkv.size()));
    expect_gradient(
        "qkv", [&](const Values& x) { return p.run(x, false); }, p.qkv, d_out, p.run(d_out, true));
  }
}

TEST(Rope, ScoresDependOnTheDistanceAlone) {
  // q at position a + s, k at position b + s: the product is the same for every s. At s >= 512 a wrong pairing of the
  // halves or a wrong base would show.
  constexpr int64_t kLength = 700, kDim = 8;
  Random random;
  const Values q = random.normal(kDim), k = random.normal(kDim);
  Values qkv;
  for (int64_t t = 0; t < kLength; ++t) {
    qkv.insert(qkv.end(), q.begin(), q.end());
    qkv.insert(qkv.end(), k.begin(), k.end());
    qkv.insert(qkv.end(), k.begin(), k.end());
  }
  const Problem p({kCompare, 1, kLength, 1, 1, kDim}, DType::f64, random);
  const Values out = p.run(qkv, false);
  const auto score = [&](int64_t query, int64_t key) {
    double s = 0;
    for (int64_t i = 0; i < kDim; ++i)
      s += out[static_cast<size_t>(query * p.pitch() + i)] *
           out[static_cast<size_t>(key * p.pitch() + kDim + i)];
    return s;
  };
  for (const int64_t shift : {1, 100, 513, 680})
    EXPECT_NEAR(score(17, 4), score(17 + shift, 4 + shift), 1e-12);
  EXPECT_GT(std::abs(score(17, 4) - score(18, 4)), 1e-3);
}

TEST(Rope, TableHoldsCosinesThenSines) {
  const std::vector<double> w = {1.0, 0.25};
  const std::vector<float> table = make_rope_table<float>(3, w);
  ASSERT_EQ(table.size(), 12U);
  EXPECT_EQ(table[0], 1.0F);
  EXPECT_EQ(table[2], 0.0F);
  EXPECT_EQ(table[8], static_cast<float>(std::cos(2.0)));
  EXPECT_EQ(table[9], static_cast<float>(std::cos(0.5)));
  EXPECT_EQ(table[10], static_cast<float>(std::sin(2.0)));
  EXPECT_EQ(table[11], static_cast<float>(std::sin(0.5)));
}

TEST(Rope, NanStaysInItsPair) {
  Random random;
  Problem p({kCompare, 1, 3, 2, 1, 4}, DType::f32, random);
  const size_t at = static_cast<size_t>(2 * p.pitch() + 4 + 1);  // position 2, head 1, element 1
  p.qkv[at] = std::nan("");
  const Values out = p.run(p.qkv, false);
  for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(std::isnan(out[i]), i == at || i == at + 2) << i;
}

TEST(Rope, BitsDoNotDependOnThreads) {
  Random random;
  const Problem p({kCompare, 3, 41, 6, 2, 34}, DType::f32, random);
  expect_independent_of_threads("rope", [&] { return pack(p.run(p.qkv, false), DType::f64); });
}

TEST(Rope, WrongArgumentsAreNamed) {
  const TensorOn qkv(kCpu, DType::f32, {1, 4, 24}), short_table(kCpu, DType::f32, {3, 6}),
      odd(kCpu, DType::f32, {4, 5}), flat(kCpu, DType::f32, {4, 24}), table(kCpu, DType::f32, {4, 6});
  expect_rejected("at least 4 rows", [&] { cpu::rope(kCpu, {qkv, short_table, 2, 1, false}); });
  expect_rejected("D even", [&] { cpu::rope(kCpu, {qkv, odd, 2, 1, false}); });
  expect_rejected("qkv must be [B, T", [&] { cpu::rope(kCpu, {flat, table, 2, 1, false}); });
  expect_rejected("rows of (3 + 2 * 1)", [&] { cpu::rope(kCpu, {qkv, table, 3, 1, false}); });
}

}  // namespace
}  // namespace kinoe::optest
