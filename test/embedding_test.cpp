// Embedding on the CPU against plain loops, finite differences and the promises of its contract.
#include "kernels/embedding.h"

#include "test/op_cases.h"
#include "test/op_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;

struct Problem {
  explicit Problem(const EmbeddingCase& c, DType dtype, Random& random)
      : shape(c),
        type(dtype),
        table_rows(c.vocab + 3),
        tokens(random.integers(c.batch * c.length, 0, static_cast<int32_t>(c.vocab))),
        token_table(random.uniform(table_rows * c.channels, -1, 1)),
        position_table(random.uniform((c.length + 2) * c.channels, -1, 1)),
        d_out(random.uniform(c.batch * c.length * c.channels, -1, 1)) {}

  [[nodiscard]] TensorOn tokens_on() const { return TensorOn::of(kCpu, {shape.batch, shape.length}, tokens); }

  Values forward(const Values& token_values, const Values& position_values, int64_t* bad = nullptr) const {
    const TensorOn out(kCpu, type, {shape.batch, shape.length, shape.channels}), ids = tokens_on();
    const TensorOn token(kCpu, type, {table_rows, shape.channels}, token_values);
    const TensorOn position = shape.positions
                                  ? TensorOn(kCpu, type, {shape.length + 2, shape.channels}, position_values)
                                  : TensorOn();
    const TensorOn flag = TensorOn::of<int64_t>(kCpu, {1}, {0});
    cpu::embedding_forward(kCpu, {out, ids, token, position, shape.vocab, flag});
    out.expect_written("out");
    ids.expect_unchanged("tokens");
    token.expect_unchanged("token_table");
    if (bad)
      *bad = flag.raw<int64_t>()[0];
    else
      flag.expect_unchanged("bad_token");
    return out.values();
  }

  /// {d_token_table, d_position_table}; with `start` values the gradients are added to those.
  std::vector<Values> backward(double start = 0, bool add_tokens = false, bool add_positions = false) const {
    TensorOn d_token(kCpu, type, {table_rows, shape.channels}), d_position;
    if (shape.positions) d_position = TensorOn(kCpu, type, {shape.length + 2, shape.channels});
    if (add_tokens) d_token.set(Values(static_cast<size_t>(table_rows * shape.channels), start));
    if (add_positions && shape.positions)
      d_position.set(Values(static_cast<size_t>((shape.length + 2) * shape.channels), start));
    const TensorOn d(kCpu, type, {shape.batch, shape.length, shape.channels}, d_out), ids = tokens_on();
    const TensorOn scratch =
        TensorOn::scratch(kCpu, embedding_backward_scratch_bytes(Backend::cpu, shape.batch * shape.length,
                                                                 shape.channels, shape.vocab));
    cpu::embedding_backward(kCpu,
                            {d_token, d_position, d, ids, shape.vocab, add_tokens, add_positions, scratch});
    d_token.expect_written("d_token_table");
    if (shape.positions) d_position.expect_written("d_position_table");
    d.expect_unchanged("d_out");
    return {d_token.values(), shape.positions ? d_position.values() : Values{}};
  }

  /// The same in plain loops.
  [[nodiscard]] std::vector<Values> expected_gradients(double start_tokens, double start_positions) const {
    Values d_token(static_cast<size_t>(table_rows * shape.channels), start_tokens);
    Values d_position(shape.positions ? static_cast<size_t>((shape.length + 2) * shape.channels) : 0,
                      start_positions);
    for (int64_t n = 0; n < shape.batch * shape.length; ++n) {
      const int32_t token = tokens[static_cast<size_t>(n)];
      if (token < 0 || token >= shape.vocab) continue;
      for (int64_t c = 0; c < shape.channels; ++c) {
        const double d = d_out[static_cast<size_t>(n * shape.channels + c)];
        d_token[static_cast<size_t>(token * shape.channels + c)] += d;
        if (shape.positions) d_position[static_cast<size_t>(n % shape.length * shape.channels + c)] += d;
      }
    }
    return {d_token, d_position};
  }

  EmbeddingCase shape;
  DType type;
  int64_t table_rows;
  std::vector<int32_t> tokens;
  Values token_table, position_table, d_out;
};

TEST(Embedding, ForwardIsTheSumOfTwoRows) {
  Random random;
  for (const EmbeddingCase& c : cases_for(embedding_cases(), kCompare)) {
    SCOPED_TRACE(c.label());
    const Problem p(c, DType::f32, random);
    const Values out = p.forward(p.token_table, p.position_table);
    for (size_t i = 0; i < out.size(); ++i) {
      const size_t channels = static_cast<size_t>(c.channels), n = i / channels, k = i % channels;
      const float token = static_cast<float>(p.token_table[static_cast<size_t>(p.tokens[n]) * channels + k]);
      const float position =
          static_cast<float>(p.position_table[n % static_cast<size_t>(c.length) * channels + k]);
      ASSERT_EQ(out[i], static_cast<double>(c.positions ? token + position : token)) << "element " << i;
    }
  }
}

TEST(Embedding, BackwardMatchesPlainLoops) {
  Random random;
  for (const EmbeddingCase& c : cases_for(embedding_cases(), kCompare)) {
    SCOPED_TRACE(c.label());
    const Problem p(c, DType::f32, random);
    const std::vector<Values> fresh = p.backward(), expected = p.expected_gradients(0, 0);
    const double limit = 1e-6 * static_cast<double>(c.batch * c.length);
    expect_close("d_token_table", fresh[0], expected[0], {limit, 1e-6, 1e-6});
    if (c.positions) expect_close("d_position_table", fresh[1], expected[1], {limit, 1e-6, 1e-6});
  }
}

TEST(Embedding, EachGradientIsAddedOrOverwrittenAsAsked) {
  Random random;
  const Problem p({kCompare, 3, 5, 6, 4, true}, DType::f64, random);
  for (const bool tokens : {false, true})
    for (const bool positions : {false, true}) {
      const std::vector<Values> d = p.backward(2.5, tokens, positions);
      const std::vector<Values> expected = p.expected_gradients(tokens ? 2.5 : 0, positions ? 2.5 : 0);
      expect_close("d_token_table", d[0], expected[0], tolerance_for(DType::f64));
      expect_close("d_position_table", d[1], expected[1], tolerance_for(DType::f64));
    }
}

TEST(Embedding, GradientsAreThoseOfFiniteDifferences) {
  Random random;
  for (const EmbeddingCase& c : cases_for(embedding_cases(), kGradient)) {
    SCOPED_TRACE(c.label());
    const Problem p(c, DType::f64, random);
    const std::vector<Values> d = p.backward();
    expect_gradient(
        "token_table", [&](const Values& x) { return p.forward(x, p.position_table); }, p.token_table,
        p.d_out, d[0]);
    if (c.positions)
      expect_gradient(
          "position_table", [&](const Values& x) { return p.forward(p.token_table, x); }, p.position_table,
          p.d_out, d[1]);
  }
}

TEST(Embedding, PlacesAreAddedInTheirOrder) {
  // In fp32 1e8 + 1 - 1e8 is 0 from left to right and 1 in another order.
  Random random;
  Problem p({kCompare, 1, 4, 1, 1, false}, DType::f32, random);
  p.d_out = {1e8, 1, -1e8, 0.5};
  EXPECT_EQ(p.backward()[0][0], 0.5);
  p.d_out = {1e8, -1e8, 1, 0.5};
  EXPECT_EQ(p.backward()[0][0], 1.5);
}

TEST(Embedding, IdsOutOfRangeAreFlaggedAndTakeNoPart) {
  Random random;
  Problem p({kCompare, 2, 4, 3, 5, true}, DType::f32, random);
  const Values good = p.forward(p.token_table, p.position_table);
  p.tokens[1] = 5;  // a row that the padded table has
  p.tokens[6] = -1;
  int64_t bad = 0;
  const Values out = p.forward(p.token_table, p.position_table, &bad);
  EXPECT_EQ(bad, 7);  // 1 + the largest place
  for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], i / 3 == 1 || i / 3 == 6 ? 0 : good[i]) << i;
  const std::vector<Values> d = p.backward(), expected = p.expected_gradients(0, 0);
  expect_close("d_token_table", d[0], expected[0], tolerance_for(DType::f32));
  expect_close("d_position_table", d[1], expected[1], tolerance_for(DType::f32));
}

TEST(Embedding, TheFlagIsOnlyRaised) {
  const TensorOn out(kCpu, DType::f32, {1, 2, 2}), table = TensorOn::full(kCpu, DType::f32, {3, 2}, 1);
  const TensorOn tokens = TensorOn::of<int32_t>(kCpu, {1, 2}, {0, 7});
  const TensorOn flag = TensorOn::of<int64_t>(kCpu, {1}, {5});
  cpu::embedding_forward(kCpu, {out, tokens, table, {}, 3, flag});
  EXPECT_EQ(flag.raw<int64_t>()[0], 5);
}

TEST(Embedding, NanReachesItsOwnElementsOnly) {
  Random random;
  Problem p({kCompare, 2, 3, 4, 6, true}, DType::f32, random);
  p.tokens = {0, 1, 2, 3, 1, 0};
  p.token_table[1 * 4 + 2] = std::nan("");
  const Values out = p.forward(p.token_table, p.position_table);
  for (size_t i = 0; i < out.size(); ++i)
    EXPECT_EQ(std::isnan(out[i]), i == 1 * 4 + 2 || i == 4 * 4 + 2) << i;
  p.d_out[5 * 4 + 3] = std::nan("");  // token 0, position 2
  const std::vector<Values> d = p.backward();
  for (size_t i = 0; i < d[0].size(); ++i) EXPECT_EQ(std::isnan(d[0][i]), i == 3) << i;
  for (size_t i = 0; i < d[1].size(); ++i) EXPECT_EQ(std::isnan(d[1][i]), i == 2 * 4 + 3) << i;
}

TEST(Embedding, BitsDoNotDependOnThreads) {
  const EmbeddingCase c{kCompare, 5, 101, 67, 19, true};
  expect_independent_of_threads("embedding", [&] {
    Random random;
    const Problem p(c, DType::f32, random);
    std::vector<Values> all = p.backward();
    all.push_back(p.forward(p.token_table, p.position_table));
    std::vector<char> bytes;
    for (const Values& v : all) {
      const std::vector<char> more = pack(v, DType::f64);
      bytes.insert(bytes.end(), more.begin(), more.end());
    }
    return bytes;
  });
}

TEST(Embedding, WrongArgumentsAreNamed) {
  const TensorOn out(kCpu, DType::f32, {1, 2, 4}), table(kCpu, DType::f32, {3, 4}),
      narrow(kCpu, DType::f32, {3, 3});
  const TensorOn tokens = TensorOn::of<int32_t>(kCpu, {1, 2}, {0, 1}),
                 flag = TensorOn::of<int64_t>(kCpu, {1}, {0});
  expect_rejected("token_table must have at least 3 rows of 4", [&] {
    cpu::embedding_forward(kCpu, {out, tokens, narrow, {}, 3, flag});
  });
  expect_rejected("at least 4 rows", [&] {
    cpu::embedding_forward(kCpu, {out, tokens, table, {}, 4, flag});
  });
  expect_rejected("tokens must be int32", [&] {
    cpu::embedding_forward(kCpu, {out, out, table, {}, 3, flag});
  });
  expect_rejected("bad_token is absent", [&] {
    cpu::embedding_forward(kCpu, {out, tokens, table, {}, 3, {}});
  });
  expect_rejected("scratch is absent", [&] {
    cpu::embedding_backward(kCpu, {table, {}, out, tokens, 3, false, false, {}});
  });
}

}  // namespace
}  // namespace kinoe::optest
