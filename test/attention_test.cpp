// Attention against the formula in fp64 over whole rows of scores, finite differences, and what it may not see.
#include "kernels/attention.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <utility>

#include "test/op_cases.h"
#include "test/op_harness.h"

namespace kinoe {
namespace {

using namespace optest;

/// Document lengths of each sequence; they sum to T. Empty: no documents.
using Documents = std::vector<std::vector<int64_t>>;

/// Documents of length 1 and around the size of a tile, other ones in each sequence.
Documents some_documents(const AttentionCase& a) {
  if (!a.documents) return {};
  const std::vector<int64_t> lengths = {1, 63, 1, 64, 2, 1, 61, 130, 3, 17, 65};
  Documents documents(static_cast<size_t>(a.batch));
  for (size_t b = 0; b < documents.size(); ++b)
    for (int64_t left = a.length, i = static_cast<int64_t>(3 * b); left > 0; ++i) {
      const int64_t n = std::min(left, lengths[static_cast<size_t>(i) % lengths.size()]);
      documents[b].push_back(n);
      left -= n;
    }
  return documents;
}

struct Bounds {
  std::vector<int32_t> start, end;
};

Bounds bounds_of(const Documents& documents) {
  Bounds bounds;
  for (const std::vector<int64_t>& sequence : documents) {
    int64_t begin = 0;
    for (const int64_t n : sequence) {
      for (int64_t t = 0; t < n; ++t) {
        bounds.start.push_back(static_cast<int32_t>(begin));
        bounds.end.push_back(static_cast<int32_t>(begin + n));
      }
      begin += n;
    }
  }
  return bounds;
}

/// Index arithmetic of qkv [B, T, (H + 2 Hkv) * D] and of [B, T, H * D].
struct Layout {
  const AttentionCase& a;
  [[nodiscard]] size_t packed(int64_t b, int64_t t, int64_t head) const {
    return static_cast<size_t>(((b * a.length + t) * (a.heads + 2 * a.kv_heads) + head) * a.head_dim);
  }
  [[nodiscard]] size_t q(int64_t b, int64_t t, int64_t h) const { return packed(b, t, h); }
  [[nodiscard]] size_t k(int64_t b, int64_t t, int64_t kv) const { return packed(b, t, a.heads + kv); }
  [[nodiscard]] size_t v(int64_t b, int64_t t, int64_t kv) const {
    return packed(b, t, a.heads + a.kv_heads + kv);
  }
  [[nodiscard]] size_t out(int64_t b, int64_t t, int64_t h) const {
    return static_cast<size_t>(((b * a.length + t) * a.heads + h) * a.head_dim);
  }
  [[nodiscard]] size_t lse(int64_t b, int64_t h, int64_t t) const {
    return static_cast<size_t>((b * a.heads + h) * a.length + t);
  }
};

struct Results {
  Values out, lse, d_qkv;
};

double dot(const double* x, const double* y, int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}
void add_scaled(double* to, double factor, const double* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += factor * from[i];
}

/// Row by row; the gradient through the softmax is taken from its Jacobian, ds_j = p_j (dp_j - sum_k p_k dp_k).
Results oracle(const AttentionCase& a, double scale, const Documents& documents, const Values& qkv,
               const Values& d_out) {
  const Layout at{a};
  const Bounds bounds = bounds_of(documents);
  const int64_t d = a.head_dim;
  Results r{Values(d_out.size()), Values(static_cast<size_t>(a.batch * a.heads * a.length)),
            Values(qkv.size())};
#pragma omp parallel for collapse(2)
  for (int64_t b = 0; b < a.batch; ++b)
    for (int64_t kv = 0; kv < a.kv_heads; ++kv) {
      Values p(static_cast<size_t>(a.length)), dp(p.size());
      for (int64_t h = 0; h < a.heads; ++h) {
        if (h * a.kv_heads / a.heads != kv) continue;  // heads in equal groups, one group after the other
        for (int64_t i = 0; i < a.length; ++i) {
          const int64_t first = documents.empty() ? 0 : bounds.start[static_cast<size_t>(b * a.length + i)];
          const double* q = &qkv[at.q(b, i, h)];
          double largest = -std::numeric_limits<double>::infinity(), sum = 0;
          for (int64_t j = first; j <= i; ++j) {
            const double s = scale * dot(q, &qkv[at.k(b, j, kv)], d);
            p[static_cast<size_t>(j)] = s;
            largest = s > largest ? s : largest;
          }
          for (int64_t j = first; j <= i; ++j) {
            double& weight = p[static_cast<size_t>(j)];
            weight = std::exp(weight - largest);
            sum += weight;
          }
          r.lse[at.lse(b, h, i)] = largest + std::log(sum);
          double mean = 0;
          for (int64_t j = first; j <= i; ++j) {
            const size_t n = static_cast<size_t>(j);
            p[n] /= sum;
            add_scaled(&r.out[at.out(b, i, h)], p[n], &qkv[at.v(b, j, kv)], d);
            dp[n] = dot(&d_out[at.out(b, i, h)], &qkv[at.v(b, j, kv)], d);
            mean += p[n] * dp[n];
          }
          for (int64_t j = first; j <= i; ++j) {
            const size_t n = static_cast<size_t>(j);
            const double ds = scale * p[n] * (dp[n] - mean);
            add_scaled(&r.d_qkv[at.q(b, i, h)], ds, &qkv[at.k(b, j, kv)], d);
            add_scaled(&r.d_qkv[at.k(b, j, kv)], ds, q, d);
            add_scaled(&r.d_qkv[at.v(b, j, kv)], p[n], &d_out[at.out(b, i, h)], d);
          }
        }
      }
    }
  return r;
}

/// Forward and backward on the CPU, in guarded memory.
struct Attention {
  TensorOn qkv, d_out, out, lse, d_qkv;
  TensorOn doc_start, doc_end;

  Attention(const AttentionCase& a, float scale, const Documents& documents, const Values& qkv_values,
            const Values& d_out_values, DType type) {
    const Context ctx;
    const int64_t b = a.batch, t = a.length;
    qkv = TensorOn(ctx, type, {b, t, (a.heads + 2 * a.kv_heads) * a.head_dim}, qkv_values);
    d_out = TensorOn(ctx, type, {b, t, a.heads * a.head_dim}, d_out_values);
    out = TensorOn(ctx, type, {b, t, a.heads * a.head_dim});
    lse = TensorOn(ctx, type, {b, a.heads, t});
    d_qkv = TensorOn(ctx, type, {b, t, (a.heads + 2 * a.kv_heads) * a.head_dim});
    if (!documents.empty()) {
      const Bounds bounds = bounds_of(documents);
      doc_start = TensorOn::of(ctx, {b, t}, bounds.start);
      doc_end = TensorOn::of(ctx, {b, t}, bounds.end);
    }
    attention_forward(ctx, {.out = out,
                            .lse = lse,
                            .qkv = qkv,
                            .doc_start = doc_start,
                            .heads = a.heads,
                            .kv_heads = a.kv_heads,
                            .scale = scale});
    const TensorOn scratch = TensorOn::scratch(
        ctx, attention_backward_scratch_bytes(ctx.backend, type, b, t, a.heads, a.kv_heads, a.head_dim));
    attention_backward(ctx, {.d_qkv = d_qkv,
                             .d_out = d_out,
                             .out = out,
                             .lse = lse,
                             .qkv = qkv,
                             .doc_start = doc_start,
                             .doc_end = doc_end,
                             .heads = a.heads,
                             .kv_heads = a.kv_heads,
                             .scale = scale,
                             .scratch = scratch});
  }

  void expect_only_outputs_written() const {
    out.expect_written("out");
    lse.expect_written("lse");
    d_qkv.expect_written("d_qkv");
    qkv.expect_unchanged("qkv");
    d_out.expect_unchanged("d_out");
    if (doc_start) doc_start.expect_unchanged("doc_start");
    if (doc_end) doc_end.expect_unchanged("doc_end");
  }

  void expect_results(const Results& expected, Tolerance tolerance) const {
    const std::string type = name_of(out.dtype());
    expect_close(type + " out", out.values(), expected.out, tolerance);
    expect_close(type + " lse", lse.values(), expected.lse, tolerance);
    expect_close(type + " d_qkv", d_qkv.values(), expected.d_qkv, tolerance);
  }
};

struct Data {
  float scale;
  Documents documents;
  Values qkv, d_out;

  explicit Data(const AttentionCase& a, DType type = DType::f32, double size = 1.0)
      : scale(1 / std::sqrt(static_cast<float>(a.head_dim))), documents(some_documents(a)) {
    Random random;
    qkv = random.normal(a.batch * a.length * (a.heads + 2 * a.kv_heads) * a.head_dim, size, type);
    d_out = random.normal(a.batch * a.length * a.heads * a.head_dim, 1.0, type);
  }

  [[nodiscard]] Attention run(const AttentionCase& a, DType type = DType::f32) const {
    return {a, scale, documents, qkv, d_out, type};
  }
  [[nodiscard]] Results expected(const AttentionCase& a) const {
    return oracle(a, static_cast<double>(scale), documents, qkv, d_out);
  }
};

/// Attention chains about ten roundings (score, exponential, sum, quotient; backward twice that), some on sums of T terms.
Tolerance attention_tolerance(DType type) {
  Tolerance tolerance = tolerance_for(type);
  tolerance.l2 *= 3;
  if (type == DType::f32) tolerance.abs *= 2;
  return tolerance;
}

void expect_oracle(const AttentionCase& a, const Data& in) {
  SCOPED_TRACE(a.label());
  const Results expected = in.expected(a);
  for (const DType type : {DType::f32, DType::f64}) {
    const Attention got = in.run(a, type);
    got.expect_only_outputs_written();
    got.expect_results(expected, attention_tolerance(type));
  }
}

TEST(Attention, MatchesTheFormulaInFp64) {
  for (const AttentionCase& a : cases_for(attention_cases(), kCompare))
    if (a.batch * a.heads * a.length * a.length * a.head_dim < int64_t{130} << 20)  // the loops take a while
      expect_oracle(a, Data(a));
}

// Head sizes that are no multiple of a vector or larger than what is packed at a time; lengths around the size of a tile.
TEST(Attention, MatchesTheFormulaAtTheEdgesOfTiles) {
  const int64_t shapes[][5] = {{1, 64, 2, 1, 1},   {1, 129, 1, 1, 3},   {2, 62, 3, 3, 17}, {1, 130, 2, 1, 33},
                               {1, 66, 2, 2, 131}, {1, 90, 2, 1, 257},  {3, 127, 4, 1, 8}, {1, 191, 5, 5, 24},
                               {2, 193, 6, 2, 16}, {1, 70, 32, 8, 128}, {1, 2, 1, 1, 128}, {1, 61, 8, 2, 7}};
  for (const auto& [b, t, h, kv, d] : shapes)
    for (const bool documents : {false, true}) {
      const AttentionCase a{kCompare, b, t, h, kv, d, documents};
      expect_oracle(a, Data(a));
    }
}

TEST(Attention, DocumentsMayEndAnywhere) {
  const std::vector<std::vector<int64_t>> splits = {std::vector<int64_t>(130, 1),
                                                    {64, 64, 2},
                                                    {63, 67},
                                                    {65, 65},
                                                    {1, 129},
                                                    {129, 1},
                                                    {62, 1, 1, 66},
                                                    {127, 1, 2},
                                                    {64, 1, 63, 2},
                                                    {130}};
  const AttentionCase a{kCompare, 1, 130, 4, 2, 20, true};
  for (const std::vector<int64_t>& split : splits) {
    Data in(a);
    in.documents = {split};
    ASSERT_EQ(std::accumulate(split.begin(), split.end(), int64_t{0}), a.length);
    expect_oracle(a, in);
  }
}

TEST(Attention, GradientsMatchFiniteDifferences) {
  const Context ctx;
  std::vector<AttentionCase> cases = cases_for(attention_cases(), kGradient);
  cases.push_back({kGradient, 1, 70, 2, 1, 3, true});  // more than one tile
  for (const AttentionCase& a : cases) {
    const Data in(a, DType::f64);
    const Values gradient = in.run(a, DType::f64).d_qkv.values();
    expect_gradient(
        a.label(),
        [&](const Values& qkv) {
          return Attention(a, in.scale, in.documents, qkv, in.d_out, DType::f64).out.values();
        },
        in.qkv, in.d_out, gradient);
  }
}

void expect_same(const Attention& got, const Attention& expected) {
  expect_same_bits("out", got.out, expected.out);
  expect_same_bits("lse", got.lse, expected.lse);
  expect_same_bits("d_qkv", got.d_qkv, expected.d_qkv);
}

TEST(Attention, BitsDoNotDependOnTheNumberOfThreads) {
  const int before = omp_get_max_threads();
  for (const AttentionCase& a :
       {AttentionCase{kCompare, 3, 150, 4, 4, 32, false}, {kCompare, 1, 300, 6, 2, 20, true}}) {
    SCOPED_TRACE(a.label());
    const Data in(a);
    omp_set_num_threads(1);
    const Attention alone = in.run(a);
    for (const int threads : {2, 3, 5}) {
      SCOPED_TRACE(cat(threads, " threads"));
      omp_set_num_threads(threads);
      expect_same(in.run(a), alone);
    }
  }
  omp_set_num_threads(before);
}

/// Rows [begin, end) of the first dimension but one of [B, T, columns] data.
Values positions(const Values& values, int64_t batch, int64_t length, int64_t b, int64_t begin, int64_t end) {
  const int64_t columns = static_cast<int64_t>(values.size()) / (batch * length);
  const auto first = values.begin() + (b * length + begin) * columns;
  return {first, first + (end - begin) * columns};
}

TEST(Attention, ASequenceHasTheSameBitsAloneAndInAnyBatch) {
  for (const bool documents : {false, true}) {
    const AttentionCase a{kCompare, 3, 100, 4, 2, 32, documents};
    const Data in(a);
    const Attention together = in.run(a);
    for (int64_t b = 0; b < a.batch; ++b) {
      const AttentionCase one{kCompare, 1, a.length, a.heads, a.kv_heads, a.head_dim, documents};
      Data alone(one);
      alone.qkv = positions(in.qkv, a.batch, a.length, b, 0, a.length);
      alone.d_out = positions(in.d_out, a.batch, a.length, b, 0, a.length);
      if (documents) alone.documents = {in.documents[static_cast<size_t>(b)]};
      const Attention got = alone.run(one);
      EXPECT_EQ(got.out.values(), positions(together.out.values(), a.batch, a.length, b, 0, a.length));
      EXPECT_EQ(got.d_qkv.values(), positions(together.d_qkv.values(), a.batch, a.length, b, 0, a.length));
    }
  }
}

TEST(Attention, APrefixHasTheSameBitsWhateverFollows) {
  const AttentionCase whole{kCompare, 1, 200, 2, 1, 32, false};
  const Data in(whole);
  const Values out = in.run(whole).out.values();
  for (const int64_t length : {1, 63, 64, 65, 130, 199}) {
    const AttentionCase prefix{kCompare, 1, length, 2, 1, 32, false};
    Data part(prefix);
    part.qkv = positions(in.qkv, 1, whole.length, 0, 0, length);
    EXPECT_EQ(part.run(prefix).out.values(), positions(out, 1, whole.length, 0, 0, length)) << length;
  }
}

/// Everything of positions [begin, end) becomes `value`.
void poison(Values& values, const AttentionCase& a, int64_t begin, int64_t end, double value) {
  const int64_t columns = static_cast<int64_t>(values.size()) / (a.batch * a.length);
  std::fill(values.begin() + begin * columns, values.begin() + end * columns, value);
}

// Not even NaN gets through the mask. Position 40 lies inside a tile, 64 begins one, 100 lies inside the second.
TEST(Attention, TheFutureIsNotSeen) {
  const AttentionCase a{kCompare, 1, 150, 4, 2, 24, false};
  const Data in(a);
  const Attention clean = in.run(a);
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), 1e30})
    for (const int64_t from : {40, 64, 100, 149}) {
      SCOPED_TRACE(cat(bad, " from ", from));
      Data in_future = in;
      poison(in_future.qkv, a, from, a.length, bad);
      const Attention got = in_future.run(a);
      EXPECT_EQ(positions(got.out.values(), 1, a.length, 0, 0, from),
                positions(clean.out.values(), 1, a.length, 0, 0, from));
      const Values out = positions(got.out.values(), 1, a.length, 0, from, a.length);
      const auto is_finite = [](double v) { return std::isfinite(v); };
      EXPECT_TRUE(std::isfinite(bad) || std::none_of(out.begin(), out.end(), is_finite));
      // The query's part of the gradient: the first H * D columns.
      const int64_t columns = a.heads * a.head_dim, pitch = (a.heads + 2 * a.kv_heads) * a.head_dim;
      const Values d_got = got.d_qkv.values(), d_clean = clean.d_qkv.values();
      for (int64_t t = 0; t < from; ++t)
        for (int64_t c = 0; c < columns; ++c)
          ASSERT_EQ(d_got[static_cast<size_t>(t * pitch + c)], d_clean[static_cast<size_t>(t * pitch + c)])
              << "position " << t << ", column " << c;
    }
}

TEST(Attention, AnotherDocumentIsNotSeen) {
  const AttentionCase a{kCompare, 1, 150, 4, 2, 24, true};
  for (const std::vector<int64_t>& split : {std::vector<int64_t>{30, 50, 70}, {64, 1, 85}, {63, 65, 22}})
    for (size_t bad_document = 0; bad_document < split.size(); ++bad_document)
      for (const double bad :
           {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        SCOPED_TRACE(cat("documents ", split[0], " ", split[1], " ", split[2], ": ", bad, " in number ",
                         bad_document));
        Data in(a);
        in.documents = {split};
        const Attention clean = in.run(a);
        const int64_t begin = std::accumulate(
            split.begin(), split.begin() + static_cast<std::ptrdiff_t>(bad_document), int64_t{0});
        const int64_t end = begin + split[bad_document];
        poison(in.qkv, a, begin, end, bad);
        poison(in.d_out, a, begin, end, bad);
        const Attention got = in.run(a);
        for (const auto& [x, y] : {std::pair{got.out.values(), clean.out.values()},
                                   std::pair{got.d_qkv.values(), clean.d_qkv.values()}}) {
          EXPECT_EQ(positions(x, 1, a.length, 0, 0, begin), positions(y, 1, a.length, 0, 0, begin));
          EXPECT_EQ(positions(x, 1, a.length, 0, end, a.length), positions(y, 1, a.length, 0, end, a.length));
          const Values inside = positions(x, 1, a.length, 0, begin, end);
          EXPECT_TRUE(std::none_of(inside.begin(), inside.end(), [](double v) { return std::isfinite(v); }));
        }
      }
}

// One NaN in q, k or v, or in the gradient, reaches what the formula says and nothing is swallowed.
TEST(Attention, NanGoesWhereItBelongs) {
  for (const bool documents : {false, true}) {
    const AttentionCase a{kCompare, 1, 140, 2, 1, 20, documents};
    const Layout at{a};
    const Data clean(a);
    for (const int64_t t : {0, 50, 64, 100, 139})
      for (int where = 0; where < 4; ++where) {
        SCOPED_TRACE(cat(a.label(), " position ", t, " of ",
                         std::array{"q", "k", "v", "d_out"}[static_cast<size_t>(where)]));
        Data in = clean;
        const size_t packed = where == 0 ? at.q(0, t, 1) : where == 1 ? at.k(0, t, 0) : at.v(0, t, 0);
        (where == 3 ? in.d_out[at.out(0, t, 1) + 3] : in.qkv[packed + 3]) =
            std::numeric_limits<double>::quiet_NaN();
        in.run(a).expect_results(in.expected(a), attention_tolerance(DType::f32));
      }
  }
}

// Scores of thousands: without subtracting the largest one, exp would overflow; with it, one key gets all.
TEST(Attention, LargeScoresDoNotOverflow) {
  const AttentionCase a{kCompare, 1, 150, 2, 2, 16, false};
  for (const double size : {30.0, 1e-4}) {
    const Data in(a, DType::f32, size);
    const Attention got = in.run(a);
    const Results expected = in.expected(a);
    // A score of 1e4 is known to 1e-3 in fp32, and its exponential to the same relative error.
    const double relative = size > 1 ? 1e-2 : 1e-5;
    expect_close("out", got.out.values(), expected.out, {relative * size, relative, relative});
    expect_close("lse", got.lse.values(), expected.lse, {relative, 1e-5, 1e-5});
    expect_close("d_qkv", got.d_qkv.values(), expected.d_qkv, {1, 1, size > 1 ? 1e-2 : 1e-5});
  }
}

// Equal scores: out is the mean of all values so far, and lse the log of their number.
TEST(Attention, EqualScoresAverage) {
  const AttentionCase a{kCompare, 1, 200, 2, 1, 4, false};
  Data in(a);
  const Layout at{a};
  for (int64_t t = 0; t < a.length; ++t)
    std::fill_n(in.qkv.begin() + static_cast<std::ptrdiff_t>(at.q(0, t, 0)), 8, 0.0);
  const Attention got = in.run(a);
  const Values out = got.out.values(), lse = got.lse.values();
  double sum = 0;
  for (int64_t t = 0; t < a.length; ++t) {
    sum += in.qkv[at.v(0, t, 0)];
    EXPECT_NEAR(out[at.out(0, t, 0)], sum / static_cast<double>(t + 1), 2e-6) << t;
    EXPECT_NEAR(lse[at.lse(0, 0, t)], std::log(static_cast<double>(t + 1)), 1e-6) << t;
  }
}

TEST(Attention, RefusesWrongArguments) {
  const Context ctx;
  const auto tensor = [&](const std::vector<int64_t>& shape, DType type = DType::f32) {
    return TensorOn(ctx, type, shape);
  };
  const TensorOn qkv = TensorOn::full(ctx, DType::f32, {2, 3, 32}, 0.5),
                 out = TensorOn::full(ctx, DType::f32, {2, 3, 16}, 1),
                 lse = TensorOn::full(ctx, DType::f32, {2, 4, 3}, 1);
  const TensorOn starts = TensorOn::of(ctx, {2, 3}, std::vector<int32_t>{0, 0, 2, 0, 1, 1});
  const AttentionForward good{out, lse, qkv, Tensor{}, 4, 2, 0.5F};  // D = 4
  EXPECT_NO_THROW(attention_forward(ctx, good));
  const auto refuses = [&](auto change) {
    AttentionForward args = good;
    change(args);
    EXPECT_THROW(attention_forward(ctx, args), Error);
  };
  refuses([](AttentionForward& x) { x.kv_heads = 3; });
  refuses([](AttentionForward& x) { x.kv_heads = 0; });
  refuses([](AttentionForward& x) { x.heads = 8; });
  refuses([&](AttentionForward& x) { x.out = tensor({2, 3, 12}); });
  refuses([&](AttentionForward& x) { x.lse = tensor({2, 3, 3}); });
  refuses([&](AttentionForward& x) { x.lse = tensor({2, 4, 3}, DType::f64); });
  refuses([&](AttentionForward& x) { x.qkv = tensor({2, 4, 32}); });
  refuses([&](AttentionForward& x) { x.doc_start = tensor({2, 3}); });
  refuses([&](AttentionForward& x) { x.out = x.qkv = x.lse = tensor({2, 3, 32}, DType::bf16); });

  const TensorOn d_qkv = tensor({2, 3, 32});
  const TensorOn scratch =
      TensorOn::scratch(ctx, attention_backward_scratch_bytes(ctx.backend, DType::f32, 2, 3, 4, 2, 4));
  const AttentionBackward good_backward{d_qkv, out, out, lse, qkv, starts, starts, 4, 2, 0.5F, scratch};
  const auto refuses_backward = [&](auto change) {
    AttentionBackward args = good_backward;
    change(args);
    EXPECT_THROW(attention_backward(ctx, args), Error);
  };
  refuses_backward([](AttentionBackward& x) { x.doc_end = Tensor{}; });
  refuses_backward([](AttentionBackward& x) { x.doc_start = Tensor{}; });
  refuses_backward([](AttentionBackward& x) { x.scratch = Tensor{}; });
  refuses_backward([&](AttentionBackward& x) { x.scratch = tensor({5}, DType::i32); });
  refuses_backward([&](AttentionBackward& x) { x.d_qkv = tensor({2, 3, 16}); });
  refuses_backward([&](AttentionBackward& x) { x.d_out = tensor({2, 3, 32}); });
}

}  // namespace
}  // namespace kinoe
