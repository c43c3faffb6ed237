// Cross-entropy and the sum of losses on the GPU against the CPU in fp64.
#include "kernels/crossentropy.h"

#include "test/gpu_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

struct Problem {
  Problem(const CrossEntropyCase& c, DType type, Random& random)
      : shape(c),
        logits(random.normal(c.rows * c.pitch, 3, type)),
        targets(random.integers(c.rows, 0, static_cast<int32_t>(c.vocab))) {
    for (size_t i = 0; i < targets.size(); ++i)
      if (c.targets == Targets::none || (c.targets == Targets::some && i % 3 == 1)) targets[i] = -1;
    // Padding is never looked at, and neither is an ignored row.
    for (size_t i = 0; i < logits.size(); ++i) {
      const auto row = static_cast<int64_t>(i) / c.pitch, column = static_cast<int64_t>(i) % c.pitch;
      if (column >= c.vocab) logits[i] = column % 2 == 0 ? kNan : 1e4;
      if (targets[static_cast<size_t>(row)] == -1) logits[i] = kNan;
    }
  }

  /// {losses, the logits' memory afterwards, bad_target}
  [[nodiscard]] Outputs run(const Context& ctx, DType type, bool with_gradient, int64_t bad = 0) const {
    const TensorOn x(ctx, type, {shape.rows, shape.pitch}, logits),
        losses(ctx, accumulator_of(type), {shape.rows});
    const TensorOn ids = TensorOn::of(ctx, {shape.rows}, targets),
                   flag = TensorOn::of<int64_t>(ctx, {1}, {bad});
    cross_entropy(ctx, {x, ids, losses, shape.vocab, d_loss, with_gradient, flag});
    ids.expect_unchanged("targets");
    if (!with_gradient) x.expect_unchanged("logits");
    return {{"losses", losses}, {"d_logits", x, 1e-8}, {"bad_target", flag}};
  }

  CrossEntropyCase shape;
  Values logits;
  std::vector<int32_t> targets;
  float d_loss = 0.25F;
};

std::vector<CrossEntropyCase> all_cases() {
  std::vector<CrossEntropyCase> cases = cases_for(cross_entropy_cases(), kCompare);
  // One block per row, clusters of 2, 4 and 8, a row too long for them: by the bytes of a row, 112 KiB per block in shared
  // memory and 40 more in registers, in both types.
  for (const int64_t vocab : {28672, 28680, 38912, 38920, 57344, 57352, 77824, 77832, 114688, 114696, 151936,
                              155648, 155656, 229384, 311296, 311304, 622592, 622600})
    cases.push_back({kCompare, 3, vocab - 3, vocab, Targets::some});
  return cases;
}

TEST(CrossEntropyGpu, EqualsTheCpuAtAllShapes) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const DType type : {DType::f32, DType::bf16}) {
    Precision precision("cross_entropy", type);
    for (const CrossEntropyCase& c : all_cases()) {
      SCOPED_TRACE(cat(c.label(), " ", name_of(type)));
      const Problem p(c, type, random);
      const Outputs exact = p.run(kCpu, DType::f64, true), actual = p.run(gpu, type, true);
      precision.expect({actual[0]}, {exact[0]}, {2e-6, 1e-5, 1e-5});
      precision.expect({actual[1]}, {exact[1]}, {1e-8, 1e-5, 1e-5});
      EXPECT_EQ(actual[2].tensor.raw<int64_t>()[0], 0);
      // The loss has the same bits without the gradient.
      expect_same_bits("losses without gradient", p.run(gpu, type, false)[0].tensor, actual[0].tensor);
    }
  }
}

// Loss near 0: all weight on the target. Far apart logits neither overflow nor vanish.
TEST(CrossEntropyGpu, ConfidentAndFarApartRows) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const int64_t pitch : {3, 8, 1000, 131072})
    for (const double level : {0.0, 20000.0, -20000.0}) {
      Problem p({kCompare, 3, pitch, pitch, Targets::all}, DType::f32, random);
      std::fill(p.logits.begin(), p.logits.end(), level - 30000);
      for (size_t row = 0; row < 3; ++row) p.logits[row * static_cast<size_t>(pitch) + 1] = level;
      p.targets = {1, 2, 1};
      p.logits[static_cast<size_t>(2 * pitch)] = level;  // two equal ones
      SCOPED_TRACE(cat("V = ", pitch, ", level ", level));
      const Outputs r = p.run(device->context(), DType::f32, true);
      const Values losses = r[0].tensor.values(), d = r[1].tensor.values();
      EXPECT_EQ(losses[0], 0);
      EXPECT_EQ(losses[1], 30000);
      EXPECT_NEAR(losses[2], std::log(2.0), 1e-6);
      EXPECT_EQ(d[1], 0);
      EXPECT_EQ(d[static_cast<size_t>(pitch) + 1], 0.25);
      EXPECT_EQ(d[static_cast<size_t>(pitch) + 2], -0.25);
      EXPECT_EQ(d[2 * static_cast<size_t>(pitch)], 0.125);
      EXPECT_EQ(d[2 * static_cast<size_t>(pitch) + 1], -0.125);
    }
}

TEST(CrossEntropyGpu, EqualLogitsCostTheLogarithmOfTheVocabulary) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const int64_t vocab : {50257, 128256}) {
    Problem p({kCompare, 4, vocab, (vocab + 127) / 128 * 128, Targets::all}, DType::bf16, random);
    for (double& x : p.logits)
      if (!std::isnan(x)) x = 40;
    const Values losses = p.run(device->context(), DType::bf16, true)[0].tensor.values();
    for (const double loss : losses) EXPECT_NEAR(loss, std::log(static_cast<double>(vocab)), 2e-5);
  }
}

TEST(CrossEntropyGpu, NanAndInfFollowTheCpu) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const int64_t pitch : {13, 1024, 57352, 311304})
    for (const double bad : {kNan, kInf, -kInf}) {
      Problem p({kCompare, 4, pitch, pitch, Targets::all}, DType::f32, random);
      p.logits[static_cast<size_t>(pitch + pitch / 2)] = bad;  // row 1: one
      p.targets[1] = 0;
      std::fill_n(p.logits.begin() + 2 * pitch, pitch, bad);  // row 2: all
      SCOPED_TRACE(cat("V = ", pitch, " with ", bad));
      const Outputs actual = p.run(device->context(), DType::f32, true),
                    exact = p.run(kCpu, DType::f32, true);
      for (size_t i = 0; i < 2; ++i)
        expect_close(actual[i].name, actual[i].tensor.values(), exact[i].tensor.values(), {2e-6, 2e-5});
    }
}

TEST(CrossEntropyGpu, BadTargetsAreReportedAndIgnored) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const int64_t pitch : {1001, 1024, 65536, 131072}) {
    const int64_t vocab = pitch - 1;
    SCOPED_TRACE(cat("pitch ", pitch));
    Problem p({kCompare, 9, vocab, pitch, Targets::all}, DType::bf16, random);
    p.targets[2] = static_cast<int32_t>(vocab);  // the first column of padding
    p.targets[5] = std::numeric_limits<int32_t>::max();
    p.targets[7] = -2;
    p.targets[8] = -1;
    const Outputs r = p.run(gpu, DType::bf16, true);
    EXPECT_EQ(r[2].tensor.raw<int64_t>()[0], 8);
    const Values losses = r[0].tensor.values(), d = r[1].tensor.values();
    for (size_t row = 0; row < 9; ++row) {
      const auto from = d.begin() + static_cast<std::ptrdiff_t>(row * static_cast<size_t>(pitch));
      const bool zero = std::all_of(from, from + pitch, [](double x) { return x == 0; });
      const bool ignored = row == 2 || row == 5 || row >= 7;
      EXPECT_EQ(zero, ignored) << "row " << row;
      EXPECT_EQ(losses[row] == 0, ignored) << "row " << row;
    }
    // It is only ever raised.
    EXPECT_EQ(p.run(gpu, DType::bf16, false, 100)[2].tensor.raw<int64_t>()[0], 100);
    EXPECT_EQ(p.run(gpu, DType::bf16, false, 5)[2].tensor.raw<int64_t>()[0], 8);
  }
}

TEST(CrossEntropyGpu, AddressesThatAllowNoVectors) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const DType type : {DType::f32, DType::bf16}) {
    const Problem p({kCompare, 6, 2001, 2048, Targets::some}, type, random);
    const ShiftedTensor x(gpu, type, {6, 2048}, 1, p.logits);
    const TensorOn losses(gpu, DType::f32, {6}), ids = TensorOn::of(gpu, {6}, p.targets),
                                                 flag = TensorOn::of<int64_t>(gpu, {1}, {0});
    cross_entropy(gpu, {x, ids, losses, 2001, p.d_loss, true, flag});
    const Outputs exact = p.run(kCpu, DType::f64, true);
    expect_close("losses", losses.values(), exact[0].tensor.values(), {2e-6, 1e-5});
    Precision precision("cross_entropy shifted", type);
    precision.expect("d_logits", x.values(), type, exact[1].tensor.values(), {1e-8, 1e-5, 1e-5}, 1e-8);
  }
}

TEST(CrossEntropyGpu, RepeatsAtTrainingShapes) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const CrossEntropyCase& c : cases_for(cross_entropy_cases(), kBench)) {
    SCOPED_TRACE(c.label());
    constexpr int64_t kBlock = 8;
    const Values block = random.normal(kBlock * c.pitch, 3, DType::bf16);
    const TensorOn ids =
        TensorOn::of(gpu, {c.rows}, random.integers(c.rows, 0, static_cast<int32_t>(c.vocab)));
    std::vector<char> first;
    expect_repeats("cross_entropy", [&]() -> Outputs {
      const BigTensor x(gpu, DType::bf16, {c.rows, c.pitch}, block);
      const TensorOn losses(gpu, DType::f32, {c.rows}), flag = TensorOn::of<int64_t>(gpu, {1}, {0});
      cross_entropy(gpu, {x, ids, losses, c.vocab, 0.25F, true, flag});
      const std::vector<char> bytes = x.bytes();
      if (first.empty()) first = bytes;
      EXPECT_TRUE(bytes == first) << "d_logits differ between two runs";
      return {{"losses", losses}};
    });
  }
}

/// More than 2^31 logits: a few rows over and over, every row with a target of its own.
void check_beyond(const Device& device, int64_t rows, int64_t vocab, int64_t pitch) {
  const Context gpu = device.context();
  SCOPED_TRACE(cat("N=", rows, " V=", vocab, " pitch=", pitch));
  if (!enough_memory(device, static_cast<size_t>(rows * pitch) * 2)) return;
  Random random;
  constexpr int64_t kBlock = 16;
  const Values block = random.normal(kBlock * pitch, 3, DType::bf16);
  const std::vector<int32_t> targets = random.integers(rows, 0, static_cast<int32_t>(vocab));
  std::vector<double> log_sums;
  for (int64_t row = 0; row < kBlock; ++row) {
    double sum = 0;
    for (int64_t v = 0; v < vocab; ++v) sum += std::exp(block[static_cast<size_t>(row * pitch + v)]);
    log_sums.push_back(std::log(sum));
  }
  const BigTensor x(gpu, DType::bf16, {rows, pitch}, block);
  const TensorOn losses(gpu, DType::f32, {rows}), ids = TensorOn::of(gpu, {rows}, targets),
                                                  flag = TensorOn::of<int64_t>(gpu, {1}, {0});
  cross_entropy(gpu, {x, ids, losses, vocab, 1.0F, true, flag});

  const auto logit = [&](int64_t row, int64_t v) {
    return block[static_cast<size_t>(row % kBlock * pitch + v)];
  };
  Values expected;
  for (int64_t row = 0; row < rows; ++row)
    expected.push_back(log_sums[static_cast<size_t>(row % kBlock)] -
                       logit(row, targets[static_cast<size_t>(row)]));
  expect_close("losses", losses.values(), expected, {2e-6, 1e-5, 1e-5});
  Precision precision("beyond 2^31", DType::bf16);
  for (const int64_t row : telling_rows(rows, pitch)) {
    Values d;
    for (int64_t v = 0; v < pitch; ++v)
      d.push_back(v < vocab ? std::exp(logit(row, v) - log_sums[static_cast<size_t>(row % kBlock)]) -
                                  (v == targets[static_cast<size_t>(row)] ? 1 : 0)
                            : 0);
    precision.expect(cat("d_logits, row ", row), x.values(row * pitch, pitch), DType::bf16, d, {}, 1e-8);
  }
}

TEST(CrossEntropyGpu, MoreThanTwoToThe31Logits) {
  KINOE_GPU_OR_SKIP(device);
  check_beyond(*device, 43001, 50257, 50304);
  check_beyond(*device, 17001, 128256, 128256);
  check_beyond(*device, 43001, 50257, 50257);  // rows that start unaligned
}

TEST(LossSumGpu, EqualsTheCpuAndAdds) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const int64_t n : {1, 5, 1023, 1024, 1025, 8193, 65536, 500001}) {
    SCOPED_TRACE(cat("n = ", n));
    const Values losses = random.uniform(n, 0, 12);
    std::vector<int32_t> targets = random.integers(n, -1, 5);
    const auto run = [&](const Context& ctx) -> Outputs {
      const TensorOn l(ctx, DType::f32, {n}, losses),
          ids = TensorOn::of(ctx, {n}, targets), sum = TensorOn::of<int64_t>(ctx, {1}, {12345}),
          count = TensorOn::of<int64_t>(ctx, {1}, {int64_t{1} << 40}),
          overflow = TensorOn::of<int64_t>(ctx, {1}, {0});
      loss_sum(ctx, {sum, count, overflow, l, ids});
      return {{"sum", sum}, {"count", count}, {"overflow", overflow}};
    };
    const Outputs actual = run(device->context()), exact = run(kCpu);
    // The fp64 sums differ in their last bits, so the rounding to units may as well.
    EXPECT_NEAR(static_cast<double>(actual[0].tensor.raw<int64_t>()[0] - exact[0].tensor.raw<int64_t>()[0]),
                0, 1 + 1e-14 * static_cast<double>(n) * 12 / kLossUnit);
    EXPECT_EQ(actual[1].tensor.raw<int64_t>(), exact[1].tensor.raw<int64_t>());
    EXPECT_EQ(actual[2].tensor.raw<int64_t>()[0], 0);
    expect_repeats("loss_sum", [&] { return run(device->context()); });
  }
}

TEST(LossSumGpu, IgnoredLossesAreNotLookedAt) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  const TensorOn losses(gpu, DType::f32, {3}, {1.5, kNan, 2}),
      ids = TensorOn::of<int32_t>(gpu, {3}, {4, -1, 0}), sum = TensorOn::of<int64_t>(gpu, {1}, {0}),
      count = TensorOn::of<int64_t>(gpu, {1}, {0}), overflow = TensorOn::of<int64_t>(gpu, {1}, {0});
  loss_sum(gpu, {sum, count, overflow, losses, ids});
  EXPECT_EQ(sum.raw<int64_t>()[0], int64_t{7} << 23);
  EXPECT_EQ(count.raw<int64_t>()[0], 2);
  EXPECT_EQ(overflow.raw<int64_t>()[0], 0);
}

TEST(LossSumGpu, RoundsAndFlagsAsTheCpu) {
  KINOE_GPU_OR_SKIP(device);
  // Two equal losses: their sum is exact, in units a tie, beside one, at the limit, beyond it, not finite.
  for (const double each :
       {0.25 * kLossUnit, 0.75 * kLossUnit, 1.25 * kLossUnit, -0.75 * kLossUnit, (1.25 + 0x1p-21) * kLossUnit,
        12.0, kLossLimit, -kLossLimit, kLossLimit + 0x1p-9, 1e30, kInf, -kInf, kNan}) {
    std::vector<std::vector<int64_t>> results;
    for (const Context& ctx : {device->context(), kCpu}) {
      const TensorOn losses(ctx, DType::f32, {2}, {each, each}),
          ids = TensorOn::of<int32_t>(ctx, {2}, {1, 2}), sum = TensorOn::of<int64_t>(ctx, {1}, {77}),
          count = TensorOn::of<int64_t>(ctx, {1}, {0}), overflow = TensorOn::of<int64_t>(ctx, {1}, {0});
      for (int i = 0; i < 2; ++i) loss_sum(ctx, {sum, count, overflow, losses, ids});
      results.push_back({sum.raw<int64_t>()[0], count.raw<int64_t>()[0], overflow.raw<int64_t>()[0]});
    }
    EXPECT_EQ(results[0], results[1]) << "two losses of " << each;
  }
}

}  // namespace
}  // namespace kinoe::optest
