// AdamW and its gate on the GPU against the CPU.
#include "kernels/adamw.h"

#include "test/gpu_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;

/// Segments of 0 to 40 elements with gaps of 0 to 3: a block meets hundreds of them.
std::vector<AdamWSegment> many_segments(int64_t n, Random& random) {
  std::vector<AdamWSegment> list;
  const std::vector<int32_t> lengths = random.integers(n, 0, 41), gaps = random.integers(n, 0, 4);
  int64_t at = 1;
  for (size_t i = 0; at + lengths[i] < n; ++i) {
    list.push_back({.begin = at,
                    .end = at + lengths[i],
                    .tensor_key = mix64(i),
                    .first_index = static_cast<int64_t>(i % 7),
                    .weight_decay = i % 2 == 0 ? 0.1F : 0.0F});
    at += lengths[i] + gaps[i];
  }
  return list;
}

struct Problem {
  Problem(const AdamWCase& c, std::vector<AdamWSegment> list, Random& random)
      : shape(c),
        segments(std::move(list)),
        masters(random.normal(c.n)),
        m(random.normal(c.n, 0.1, DType::bf16)),
        v(random.uniform(c.n, 0, 0.1, DType::bf16)),
        gradients(random.normal(c.n)) {
    state.grad_scale = 0.5F;
    state.weights_hash = 11;
  }

  /// {masters, m, v, weights, state} after one update.
  [[nodiscard]] Outputs run(const Context& ctx, int64_t t = 3, uint64_t seed = 99) const {
    const DType moments = shape.bf16_moments ? DType::bf16 : DType::f32;
    const TensorOn p(ctx, DType::f32, {shape.n}, masters), m_on(ctx, moments, {shape.n}, m),
        v_on(ctx, moments, {shape.n}, v), g(ctx, DType::f32, {shape.n}, gradients);
    const TensorOn w = shape.bf16_weights ? TensorOn(ctx, DType::bf16, {shape.n}) : TensorOn();
    const TensorOn list = TensorOn::structs(ctx, segments),
                   status = TensorOn::structs<StepState>(ctx, {state});
    adamw(ctx, {p, m_on, v_on, g, w, list, static_cast<int64_t>(segments.size()), status, lr, beta1, beta2,
                eps, t, seed});
    g.expect_unchanged("gradients");
    list.expect_unchanged("segments");
    return {{"masters", p}, {"m", m_on}, {"v", v_on}, {"weights", w}, {"state", status}};
  }

  [[nodiscard]] std::vector<bool> inside() const {
    std::vector<bool> in(static_cast<size_t>(shape.n));
    for (const AdamWSegment& s : segments)
      std::fill(in.begin() + static_cast<std::ptrdiff_t>(s.begin),
                in.begin() + static_cast<std::ptrdiff_t>(s.end), true);
    return in;
  }

  /// The hash by its definition, from the bits of the masters.
  [[nodiscard]] uint64_t hash_of(const std::vector<uint32_t>& bits) const {
    uint64_t sum = 0;
    for (const AdamWSegment& s : segments)
      for (int64_t i = s.begin; i < s.end; ++i)
        sum += master_hash(s.tensor_key, s.first_index + i - s.begin, bits[static_cast<size_t>(i)]);
    return sum;
  }

  AdamWCase shape;
  std::vector<AdamWSegment> segments;
  Values masters, m, v, gradients;
  StepState state;
  float lr = 0.01F, beta1 = 0.9F, beta2 = 0.95F, eps = 1e-8F;
};

/// Everything but the bits of sums: those of masters and moments may differ in the last place.
void expect_equals_cpu(const Problem& p, const Context& gpu, Precision& precision) {
  const Outputs actual = p.run(gpu), exact = p.run(kCpu);
  const std::vector<bool> inside = p.inside();
  precision.expect("masters", actual[0].tensor.values(), DType::f32, exact[0].tensor.values(),
                   {2e-7, 1e-6, 1e-6}, 0);
  // The same random bits: all but those next to a boundary are rounded the same way, the others differ by one place.
  const Tolerance moments =
      p.shape.bf16_moments ? Tolerance{1e-30, 0x1p-7, 1e-3} : Tolerance{1e-8, 1e-6, 1e-6};
  for (const size_t i : {size_t{1}, size_t{2}}) {
    const Values a = actual[i].tensor.values(), e = exact[i].tensor.values();
    expect_close(actual[i].name, a, e, moments);
    size_t different = 0;
    for (size_t k = 0; k < a.size(); ++k)
      if (a[k] != e[k]) ++different;
    if (p.shape.bf16_moments) {
      EXPECT_LE(different, 5 + a.size() / 500) << actual[i].name << " rounded another way";
    }
  }
  const auto bits = actual[0].tensor.raw<uint32_t>();
  const auto state = actual[4].tensor.raw<StepState>()[0];
  EXPECT_EQ(state.weights_hash, 11 + p.hash_of(bits));
  const auto before = pack(p.masters, DType::f32);
  for (size_t i = 0; i < inside.size(); ++i) {
    if (inside[i]) continue;
    ASSERT_EQ(std::memcmp(&bits[i], before.data() + 4 * i, 4), 0)
        << "padding element " << i << " was changed";
  }
  if (!p.shape.bf16_weights) return;
  const auto weights = actual[3].tensor.raw<bf16>();
  for (size_t i = 0; i < inside.size(); ++i)
    ASSERT_EQ(weights[i].bits, inside[i] ? to_bf16(std::bit_cast<float>(bits[i])).bits : kPoison)
        << "weight " << i;
}

TEST(AdamWGpu, EqualsTheCpuAtAllShapes) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  Precision precision("adamw", DType::f32);
  for (const AdamWCase& c : cases_for(adamw_cases(), kCompare)) {
    SCOPED_TRACE(c.label());
    expect_equals_cpu(Problem(c, adamw_segments(c.n), random), device->context(), precision);
  }
}

TEST(AdamWGpu, ManySmallSegments) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  Precision precision("adamw, many segments", DType::f32);
  for (const bool bf16_moments : {false, true}) {
    const AdamWCase c{kCompare, 70001, bf16_moments, true};
    SCOPED_TRACE(c.label());
    expect_equals_cpu(Problem(c, many_segments(c.n, random), random), device->context(), precision);
  }
}

// With halves as coefficients and short significands all sums are exact, so the stochastic rounding must agree bit for
// bit.
TEST(AdamWGpu, StochasticRoundingIsTheCpusBitForBit) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  const AdamWCase c{kCompare, 50000, true, true};
  for (const bool many : {false, true}) {
    Problem p(c, many ? many_segments(c.n, random) : adamw_segments(c.n), random);
    p.beta1 = p.beta2 = 0.5F;
    for (double& g : p.gradients) g = std::nearbyint(g * 256) / 256;
    const Outputs actual = p.run(device->context()), exact = p.run(kCpu);
    expect_same_bits("m", actual[1].tensor, exact[1].tensor);
    expect_same_bits("v", actual[2].tensor, exact[2].tensor);
    // And they depend on the seed.
    EXPECT_NE(p.run(device->context(), 3, 100)[1].tensor.bytes(), actual[1].tensor.bytes());
  }
}

TEST(AdamWGpu, HaltedAndSkippedStepsChangeNothingButTheHash) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const bool halted : {false, true}) {
    Problem p({kCompare, 100003, true, true}, adamw_segments(100003), random);
    p.gradients[50] = std::nan("");
    p.state.halted = halted ? 1 : 0;
    p.state.skipped = halted ? 0 : 1;
    const Outputs r = p.run(device->context());
    for (size_t i = 0; i < 3; ++i) r[i].tensor.expect_unchanged(r[i].name);
    const std::vector<bool> poisoned = r[3].tensor.poisoned();
    EXPECT_TRUE(std::all_of(poisoned.begin(), poisoned.end(), [](bool x) { return x; }))
        << "weights were written";
    EXPECT_EQ(r[4].tensor.raw<StepState>()[0].weights_hash, 11 + p.hash_of(r[0].tensor.raw<uint32_t>()));
  }
}

TEST(AdamWGpu, AddressesThatAllowNoVectors) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  const int64_t n = 20000;
  const Problem p({kCompare, n, true, true}, adamw_segments(n), random);
  const ShiftedTensor masters(gpu, DType::f32, {n}, 1, p.masters), m(gpu, DType::bf16, {n}, 1, p.m),
      v(gpu, DType::bf16, {n}, 1, p.v), g(gpu, DType::f32, {n}, 1, p.gradients),
      w(gpu, DType::bf16, {n}, 1, p.masters);
  const TensorOn list = TensorOn::structs(gpu, p.segments),
                 status = TensorOn::structs<StepState>(gpu, {p.state});
  adamw(gpu, {masters, m, v, g, w, list, static_cast<int64_t>(p.segments.size()), status, p.lr, p.beta1,
              p.beta2, p.eps, 3, 99});
  const Outputs aligned = p.run(gpu);
  expect_close("masters", masters.values(), aligned[0].tensor.values(), {0, 0, 0});
  expect_close("m", m.values(), aligned[1].tensor.values(), {0, 0, 0});
  expect_close("v", v.values(), aligned[2].tensor.values(), {0, 0, 0});
  EXPECT_EQ(status.raw<StepState>()[0].weights_hash, aligned[4].tensor.raw<StepState>()[0].weights_hash);
}

TEST(AdamWGpu, Repeats) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  const Problem p({kCompare, 3000001, true, true}, adamw_segments(3000001), random);
  expect_repeats(
      "adamw", [&] { return p.run(device->context()); }, 3);
}

TEST(AdamWGpu, MoreThanTwoToThe31Elements) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  constexpr int64_t kN = (int64_t{1} << 31) + 40003, kBlock = 1 << 20, kTail = 50000, kFirst = 7;
  if (!enough_memory(*device, size_t{14} * kN)) GTEST_SKIP() << "too little memory";
  Random random;
  const Problem p({kCompare, kBlock, true, true}, {}, random);
  const std::vector<AdamWSegment> list = {
      {.begin = 0, .end = kN, .tensor_key = 5, .first_index = kFirst, .weight_decay = 0.1F}};
  const BigTensor masters(gpu, DType::f32, {kN}, p.masters), m(gpu, DType::bf16, {kN}, p.m),
      v(gpu, DType::bf16, {kN}, p.v), g(gpu, DType::f32, {kN}, p.gradients), w(gpu, DType::bf16, {kN});
  const TensorOn segments = TensorOn::structs(gpu, list),
                 status = TensorOn::structs<StepState>(gpu, {p.state});
  adamw(gpu, {masters, m, v, g, w, segments, 1, status, p.lr, p.beta1, p.beta2, p.eps, 3, 99});

  for (const int64_t begin : {int64_t{0}, (int64_t{1} << 31) - kTail / 2, kN - kTail}) {
    SCOPED_TRACE(cat("from element ", begin));
    const auto part = [&](const Values& block) {
      Values x;
      for (int64_t i = begin; i < begin + kTail; ++i) x.push_back(block[static_cast<size_t>(i % kBlock)]);
      return x;
    };
    Problem tail = p;
    tail.shape.n = kTail;
    tail.segments = {
        {.begin = 0, .end = kTail, .tensor_key = 5, .first_index = kFirst + begin, .weight_decay = 0.1F}};
    tail.masters = part(p.masters);
    tail.m = part(p.m);
    tail.v = part(p.v);
    tail.gradients = part(p.gradients);
    const Outputs alone = tail.run(gpu);
    const BigTensor* big[] = {&masters, &m, &v, &w};
    for (size_t i = 0; i < 4; ++i)
      expect_close(alone[i].name, big[i]->values(begin, kTail), alone[i].tensor.values(), {0, 0, 0});
  }
}

TEST(StepGateGpu, DecidesAsTheCpuDoes) {
  KINOE_GPU_OR_SKIP(device);
  constexpr double kInf = std::numeric_limits<double>::infinity(),
                   kNan = std::numeric_limits<double>::quiet_NaN();
  int cases = 0;
  for (const int64_t overflow : {0, 1, 3})
    for (const double norm : {0.0, 0.3, 7.5, kNan, kInf})
      for (const int64_t tokens : {0, 1, 900, 1024})
        for (const int64_t bad : {0, 17})
          for (const int halted : {0, 1})
            for (const double clip : {0.0, 1.0}) {
              StepState s;
              s.loss_sum = 123 << 24;
              s.target_tokens = tokens;
              s.bad_token = bad;
              s.overflow = overflow;
              s.halted = halted;
              s.skipped = 1;
              s.weights_hash = 42;
              std::vector<StepState> after;
              for (const Context& ctx : {device->context(), kCpu}) {
                const TensorOn state = TensorOn::structs<StepState>(ctx, {s}),
                               raw(ctx, DType::f64, {1}, {norm});
                step_gate(ctx, {state, raw, 1024, clip});
                raw.expect_unchanged("raw_norm");
                after.push_back(state.raw<StepState>()[0]);
              }
              const auto same = [](auto a, auto b) { return a == b || (std::isnan(a) && std::isnan(b)); };
              EXPECT_TRUE(same(after[0].grad_norm, after[1].grad_norm) &&
                          same(after[0].grad_scale, after[1].grad_scale) &&
                          after[0].halted == after[1].halted && after[0].skipped == after[1].skipped &&
                          after[0].weights_hash == 42 && after[0].target_tokens == tokens &&
                          after[0].bad_token == bad && after[0].loss_sum == 123 << 24 &&
                          after[0].overflow == overflow)
                  << "overflow " << overflow << ", norm " << norm << ", tokens " << tokens << ", bad " << bad
                  << ", halted " << halted << ", clip " << clip << ": norm " << after[0].grad_norm
                  << " expected " << after[1].grad_norm << ", scale " << after[0].grad_scale << " expected "
                  << after[1].grad_scale << ", halted " << after[0].halted << " expected " << after[1].halted;
              ++cases;
            }
  EXPECT_EQ(cases, 480);
}

}  // namespace
}  // namespace kinoe::optest
