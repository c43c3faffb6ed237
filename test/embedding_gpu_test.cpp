// Token and position embedding on the GPU against the CPU in fp64.
#include "kernels/embedding.h"

#include "test/gpu_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;

enum class Tokens : uint8_t { uniform, equal, skewed };

struct Problem {
  Problem(const EmbeddingCase& c, DType type, Tokens kind, Random& random)
      : shape(c),
        table_rows(c.vocab + 3),
        tokens(random.integers(c.batch * c.length, 0, static_cast<int32_t>(c.vocab))),
        token_table(random.normal(table_rows * c.channels, 1, type)),
        position_table(random.normal((c.length + 2) * c.channels, 1, type)),
        d_out(random.normal(c.batch * c.length * c.channels, 1, type)) {
    const Values u = random.uniform(static_cast<int64_t>(tokens.size()), 0, 1);
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (kind == Tokens::equal) tokens[i] = static_cast<int32_t>(c.vocab / 2);
      // About as text has them: the first few make up most of it.
      if (kind == Tokens::skewed)
        tokens[i] = static_cast<int32_t>(std::pow(static_cast<double>(c.vocab), u[i] * u[i])) - 1;
    }
  }

  /// {out, bad_token}
  [[nodiscard]] Outputs forward(const Context& ctx, DType type) const {
    const TensorOn out(ctx, type, {shape.batch, shape.length, shape.channels}),
        ids = TensorOn::of(ctx, {shape.batch, shape.length}, tokens);
    const TensorOn token(ctx, type, {table_rows, shape.channels}, token_table);
    const TensorOn position = shape.positions
                                  ? TensorOn(ctx, type, {shape.length + 2, shape.channels}, position_table)
                                  : TensorOn();
    const TensorOn flag = TensorOn::of<int64_t>(ctx, {1}, {0});
    embedding_forward(ctx, {out, ids, token, position, shape.vocab, flag});
    ids.expect_unchanged("tokens");
    token.expect_unchanged("token_table");
    return {{"out", out, 1e-30}, {"bad_token", flag}};
  }

  /// {d_token_table, d_position_table}; a start other than 0 is accumulated onto.
  [[nodiscard]] Outputs backward(const Context& ctx, DType type, double start_tokens = 0,
                                 double start_positions = 0) const {
    const DType sums = accumulator_of(type);
    const auto table = [&](int64_t rows, double start) {
      TensorOn t(ctx, sums, {rows, shape.channels});
      if (start != 0) t.set(Values(static_cast<size_t>(rows * shape.channels), start));
      return t;
    };
    const TensorOn d_token = table(table_rows, start_tokens),
                   d_position = shape.positions ? table(shape.length + 2, start_positions) : TensorOn();
    const TensorOn d(ctx, type, {shape.batch, shape.length, shape.channels}, d_out),
        ids = TensorOn::of(ctx, {shape.batch, shape.length}, tokens);
    const TensorOn scratch =
        TensorOn::scratch(ctx, embedding_backward_scratch_bytes(ctx.backend, shape.batch * shape.length,
                                                                shape.channels, shape.vocab));
    embedding_backward(
        ctx, {d_token, d_position, d, ids, shape.vocab, start_tokens != 0, start_positions != 0, scratch});
    d.expect_unchanged("d_out");
    ids.expect_unchanged("tokens");
    return {{"d_token_table", d_token}, {"d_position_table", d_position}};
  }

  /// Both directions; sums of up to n terms of size 1.
  void compare(const Context& gpu, DType type, Precision& precision) const {
    const Outputs f = forward(gpu, type), exact_f = forward(kCpu, DType::f64);
    precision.expect({f[0]}, {exact_f[0]}, {0, 1e-7});
    EXPECT_EQ(f[1].tensor.raw<int64_t>(), exact_f[1].tensor.raw<int64_t>());
    const double n = static_cast<double>(tokens.size());
    precision.expect(backward(gpu, type), backward(kCpu, DType::f64),
                     {1e-6 * std::sqrt(n) + 1e-6, 1e-5, 2e-6});
  }

  EmbeddingCase shape;
  int64_t table_rows;
  std::vector<int32_t> tokens;
  Values token_table, position_table, d_out;
};

TEST(EmbeddingGpu, EqualsTheCpuAtAllShapes) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const DType type : {DType::f32, DType::bf16}) {
    Precision precision("embedding", type);
    for (const EmbeddingCase& c : cases_for(embedding_cases(), kCompare)) {
      SCOPED_TRACE(cat(c.label(), " ", name_of(type)));
      Problem(c, type, Tokens::uniform, random).compare(device->context(), type, precision);
    }
  }
}

// Around the lengths of pieces and tiles, and the vocabularies where the sort needs one pass more.
TEST(EmbeddingGpu, EqualsTheCpuAroundTheSortsLimits) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  Precision precision("embedding, sort", DType::bf16);
  for (const int64_t n : {127, 128, 129, 255, 256, 257, 383, 2047, 2048, 2049, 20000})
    for (const int64_t vocab : {1, 2, 255, 256, 65535, 65536})
      for (const Tokens kind : {Tokens::uniform, Tokens::equal, Tokens::skewed}) {
        if (vocab > 256 && n != 2049) continue;
        const EmbeddingCase c{kCompare, 1, n, 16, vocab, false};
        SCOPED_TRACE(cat(c.label(), kind == Tokens::equal    ? " equal"
                                    : kind == Tokens::skewed ? " skewed"
                                                             : ""));
        Problem(c, DType::bf16, kind, random).compare(device->context(), DType::bf16, precision);
      }
}

// Integers: every order of summation gives the same bits, so a place that is lost, doubled or misplaced shows.
TEST(EmbeddingGpu, SumsOfIntegersAreExact) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const Tokens kind : {Tokens::uniform, Tokens::equal, Tokens::skewed})
    for (const int64_t channels : {3, 264}) {
      const EmbeddingCase c{kCompare, 3, 3001, channels, 777, true};
      Problem p(c, DType::bf16, kind, random);
      const std::vector<int32_t> numbers = random.integers(static_cast<int64_t>(p.d_out.size()), -100, 101);
      std::copy(numbers.begin(), numbers.end(), p.d_out.begin());
      for (const double start : {0.0, 5.0}) {
        SCOPED_TRACE(cat(c.label(), " start ", start));
        const Outputs actual = p.backward(device->context(), DType::bf16, start, start),
                      exact = p.backward(kCpu, DType::f64, start, start);
        for (size_t i = 0; i < 2; ++i) {
          actual[i].tensor.expect_written(actual[i].name);
          expect_close(actual[i].name, actual[i].tensor.values(), exact[i].tensor.values(), {0, 0, 0});
        }
      }
    }
}

TEST(EmbeddingGpu, BadTokensGiveZeroRowsNoGradientAndAreReported) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const int64_t vocab : {256, 1000}) {
    Problem p({kCompare, 2, 700, 24, vocab, true}, DType::bf16, Tokens::skewed, random);
    p.tokens[3] = static_cast<int32_t>(vocab);
    p.tokens[900] = -1;
    p.tokens[1200] = std::numeric_limits<int32_t>::max();
    p.tokens[1201] = std::numeric_limits<int32_t>::min();
    SCOPED_TRACE(cat("V = ", vocab));
    const Outputs f = p.forward(gpu, DType::bf16);
    EXPECT_EQ(f[1].tensor.raw<int64_t>()[0], 1202);
    const Values out = f[0].tensor.values();
    for (const size_t n : {size_t{3}, size_t{900}, size_t{1200}, size_t{1201}})
      for (size_t c = 0; c < 24; ++c) ASSERT_EQ(out[n * 24 + c], 0) << "place " << n;
    Precision precision("embedding, bad tokens", DType::bf16);
    p.compare(gpu, DType::bf16, precision);
  }
}

TEST(EmbeddingGpu, AddressesThatAllowNoVectors) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const DType type : {DType::f32, DType::bf16}) {
    const EmbeddingCase c{kCompare, 2, 300, 40, 5, true};
    const Problem p(c, type, Tokens::uniform, random);
    const TensorOn ids = TensorOn::of(gpu, {2, 300}, p.tokens), flag = TensorOn::of<int64_t>(gpu, {1}, {0});
    const ShiftedTensor out(gpu, type, {2, 300, 40}, 1), token(gpu, type, {8, 40}, 1, p.token_table),
        position(gpu, type, {302, 40}, 1, p.position_table), d(gpu, type, {2, 300, 40}, 1, p.d_out),
        d_token(gpu, DType::f32, {8, 40}, 1), d_position(gpu, DType::f32, {302, 40}, 1);
    embedding_forward(gpu, {out, ids, token, position, 5, flag});
    expect_close("out", out.values(), p.forward(gpu, type)[0].tensor.values(), {0, 0, 0});
    const TensorOn scratch =
        TensorOn::scratch(gpu, embedding_backward_scratch_bytes(Backend::cuda, 600, 40, 5));
    embedding_backward(gpu, {d_token, d_position, d, ids, 5, false, false, scratch});
    const Outputs aligned = p.backward(gpu, type);
    // Columns are summed in the same order, whatever a lane holds of them.
    expect_close("d_token_table", d_token.values(), aligned[0].tensor.values(), {0, 0, 0});
    expect_close("d_position_table", d_position.values(), aligned[1].tensor.values(), {0, 0, 0});
  }
}

TEST(EmbeddingGpu, NanReachesItsTokenAndItsPosition) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  Problem p({kCompare, 3, 500, 8, 3, true}, DType::f32, Tokens::uniform, random);
  p.d_out[static_cast<size_t>(700 * 8 + 5)] = std::nan("");
  const Outputs actual = p.backward(device->context(), DType::f32), exact = p.backward(kCpu, DType::f32);
  for (size_t i = 0; i < 2; ++i)
    expect_close(actual[i].name, actual[i].tensor.values(), exact[i].tensor.values(), {1e-4, 1e-5});
}

// 64 Ki places as a training step has them, and the worst: all the same token.
TEST(EmbeddingGpu, RepeatsAtTrainingShapes) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const Tokens kind : {Tokens::skewed, Tokens::equal}) {
    const Problem p({kCompare, 64, 1024, 32, 50257, true}, DType::bf16, kind, random);
    Precision precision("embedding, 65536", DType::bf16);
    p.compare(gpu, DType::bf16, precision);
    expect_repeats(
        "backward", [&] { return p.backward(gpu, DType::bf16); }, 3);
  }
}

TEST(EmbeddingGpu, MoreThanTwoToThe31Elements) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  constexpr int64_t kLength = 1031, kBatch = 2720, kChannels = 768, kVocab = 500;  // 2.15 G
  if (!enough_memory(*device, size_t{2} * kBatch * kLength * kChannels)) GTEST_SKIP() << "too little memory";
  Random random;
  const Problem p({kCompare, 1, kLength, kChannels, kVocab, true}, DType::bf16, Tokens::skewed, random);
  const Values block = p.forward(gpu, DType::bf16)[0].tensor.values();
  Values ids_block(p.tokens.begin(), p.tokens.end());
  const BigTensor ids(gpu, DType::i32, {kBatch, kLength}, ids_block),
      out(gpu, DType::bf16, {kBatch, kLength, kChannels});
  const TensorOn token(gpu, DType::bf16, {p.table_rows, kChannels}, p.token_table),
      position(gpu, DType::bf16, {kLength + 2, kChannels}, p.position_table),
      flag = TensorOn::of<int64_t>(gpu, {1}, {0});
  embedding_forward(gpu, {out, ids, token, position, kVocab, flag});
  for (const int64_t row : telling_rows(kBatch * kLength, kChannels)) {
    const auto from = block.begin() + row % kLength * kChannels;
    expect_close(cat("place ", row), out.values(row * kChannels, kChannels), Values(from, from + kChannels),
                 {0, 0, 0});
  }

  // Backward with integers, so that the sums of all repetitions are exact: 2,720 times those of one sequence.
  Problem whole = p;
  const std::vector<int32_t> numbers = random.integers(static_cast<int64_t>(p.d_out.size()), -2, 3);
  std::copy(numbers.begin(), numbers.end(), whole.d_out.begin());
  const Outputs one = whole.backward(kCpu, DType::f64);
  const BigTensor d(gpu, DType::bf16, {kBatch, kLength, kChannels}, whole.d_out);
  const TensorOn d_token(gpu, DType::f32, {p.table_rows, kChannels}),
      d_position(gpu, DType::f32, {kLength + 2, kChannels});
  const TensorOn scratch = TensorOn::scratch(
      gpu, embedding_backward_scratch_bytes(Backend::cuda, kBatch * kLength, kChannels, kVocab));
  embedding_backward(gpu, {d_token, d_position, d, ids, kVocab, false, false, scratch});
  Values expected = one[0].tensor.values();
  for (double& x : expected) x *= kBatch;
  expect_close("d_token_table", d_token.values(), expected, {0, 0, 0});
  expected = one[1].tensor.values();
  for (double& x : expected) x *= kBatch;
  expect_close("d_position_table", d_position.values(), expected, {0, 0, 0});
}

}  // namespace
}  // namespace kinoe::optest
