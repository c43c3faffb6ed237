// AdamW and its gate on the CPU: the formula in long double over several steps, segments and padding, the gate, bf16
// moments bit by bit, and what the hash of the masters promises.
#include "kernels/adamw.h"

#include <cstring>

#include "test/op_cases.h"
#include "test/op_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;

struct Problem {
  Problem(const AdamWCase& c, DType scalar, Random& random)
      : shape(c),
        type(scalar),
        segments(adamw_segments(c.n)),
        masters(kCpu, type, {c.n}, random.normal(c.n)),
        m(kCpu, moment_type(), {c.n}, random.normal(c.n, 0.1, DType::bf16)),
        v(kCpu, moment_type(), {c.n}, random.uniform(c.n, 0, 0.1, DType::bf16)),
        gradients(kCpu, type, {c.n}, random.normal(c.n)) {
    if (c.bf16_weights) weights = TensorOn(kCpu, DType::bf16, {c.n});
    state.grad_scale = 0.5F;
    state.weights_hash = 11;
  }

  [[nodiscard]] DType moment_type() const { return shape.bf16_moments ? DType::bf16 : type; }

  /// One update; returns the state after it.
  StepState update(int64_t t, uint64_t seed = 99) const {
    const TensorOn list = TensorOn::structs(kCpu, segments),
                   status = TensorOn::structs<StepState>(kCpu, {state});
    const auto count = static_cast<int64_t>(segments.size());
    cpu::adamw(kCpu,
               {masters, m, v, gradients, weights, list, count, status, kLr, kBeta1, kBeta2, kEps, t, seed});
    gradients.expect_unchanged("gradients");
    list.expect_unchanged("segments");
    return status.raw<StepState>()[0];
  }

  [[nodiscard]] bool inside(int64_t i) const {
    return std::any_of(segments.begin(), segments.end(),
                       [&](const AdamWSegment& s) { return i >= s.begin && i < s.end; });
  }

  /// The hash by its definition, from the bits in memory, elements taken backwards.
  [[nodiscard]] uint64_t hash() const {
    const Values p = masters.values();
    uint64_t sum = 0;
    for (const AdamWSegment& s : segments)
      for (int64_t i = s.end - 1; i >= s.begin; --i) {
        const auto bits = std::bit_cast<uint32_t>(static_cast<float>(p[static_cast<size_t>(i)]));
        sum += mix64(mix64(s.tensor_key + static_cast<uint64_t>(s.first_index + i - s.begin)) + bits);
      }
    return sum;
  }

  static constexpr float kLr = 0.01F, kBeta1 = 0.9F, kBeta2 = 0.95F, kEps = 1e-8F;
  AdamWCase shape;
  DType type;
  std::vector<AdamWSegment> segments;
  TensorOn masters, m, v, gradients, weights;
  StepState state;
};

/// The formula, in long double, for one element.
struct Reference {
  long double p, m, v;
  void update(long double gradient, int64_t t, float scale, float decay) {
    const long double b1 = Problem::kBeta1, b2 = Problem::kBeta2, g = gradient * scale;
    m = b1 * m + (1 - b1) * g;
    v = b2 * v + (1 - b2) * g * g;
    const long double mean = m / (1 - std::pow(b1, static_cast<long double>(t)));
    const long double square = v / (1 - std::pow(b2, static_cast<long double>(t)));
    p -= Problem::kLr * (mean / (std::sqrt(square) + Problem::kEps) + decay * p);
  }
};

std::vector<Reference> references(const Problem& q) {
  const Values p = q.masters.values(), m = q.m.values(), v = q.v.values();
  std::vector<Reference> r;
  for (size_t i = 0; i < p.size(); ++i) r.push_back({p[i], m[i], v[i]});
  return r;
}

TEST(AdamW, FollowsItsFormulaOverSeveralSteps) {
  Random random;
  for (const AdamWCase& c : cases_for(adamw_cases(), kCompare))
    for (const DType type : {DType::f32, DType::f64}) {
      if (c.bf16_moments || (type == DType::f64 && c.bf16_weights)) continue;
      SCOPED_TRACE(c.label());
      const Problem q(c, type, random);
      std::vector<Reference> expected = references(q);
      const Values g = q.gradients.values();
      for (int64_t t = 1; t <= 3; ++t) {
        q.update(t);
        for (const AdamWSegment& s : q.segments)
          for (int64_t i = s.begin; i < s.end; ++i)
            expected[static_cast<size_t>(i)].update(g[static_cast<size_t>(i)], t, q.state.grad_scale,
                                                    s.weight_decay);
      }
      Values p, m, v;
      for (const Reference& r : expected) {
        p.push_back(static_cast<double>(r.p));
        m.push_back(static_cast<double>(r.m));
        v.push_back(static_cast<double>(r.v));
      }
      const Tolerance tolerance =
          type == DType::f64 ? Tolerance{1e-14, 1e-13, 1e-14} : Tolerance{3e-7, 1e-6, 1e-6};
      expect_close("masters", q.masters.values(), p, tolerance);
      expect_close("m", q.m.values(), m, tolerance);
      expect_close("v", q.v.values(), v, tolerance);
    }
}

TEST(AdamW, TheFirstStepIsTheSignOfTheGradient) {
  Random random;
  Problem q({kCompare, 3, false, false}, DType::f64, random);
  for (const TensorOn* t : {&q.m, &q.v}) std::memset(t->tensor().data, 0, t->tensor().bytes());
  q.masters.set({1, 1, 1});
  q.gradients.set({1e-3, -7, 1000});
  q.segments[0].weight_decay = 0;
  q.update(1);
  const Values p = q.masters.values();
  const double lr = static_cast<double>(Problem::kLr);
  EXPECT_NEAR(p[0], 1 - lr, 1e-6);
  EXPECT_NEAR(p[1], 1 + lr, 1e-6);
  EXPECT_NEAR(p[2], 1 - lr, 1e-6);
}

TEST(AdamW, PaddingIsNeverTouched) {
  Random random;
  for (const bool moments : {false, true}) {
    Problem q({kCompare, 16400, moments, true}, DType::f32, random);
    const std::vector<TensorOn> all = {q.masters, q.m, q.v};
    std::vector<Values> before;
    for (const TensorOn& t : all) before.push_back(t.values());
    q.update(1);
    const std::vector<bool> unwritten = q.weights.poisoned();
    for (size_t k = 0; k < all.size(); ++k) {
      const Values after = all[k].values();
      for (size_t i = 0; i < after.size(); ++i) {
        const bool inside = q.inside(static_cast<int64_t>(i));
        if (!inside) {
          ASSERT_EQ(after[i], before[k][i]) << "tensor " << k << ", element " << i;
        }
        ASSERT_EQ(unwritten[i], !inside) << i;
      }
    }
  }
}

TEST(AdamW, WeightsAreTheNearestBf16OfTheMasters) {
  Random random;
  Problem q({kCompare, 1003, false, true}, DType::f32, random);
  q.update(2);
  const std::vector<float> p = q.masters.raw<float>();
  const std::vector<bf16> w = q.weights.raw<bf16>();
  for (int64_t i = 0; i < 1003; ++i)
    if (q.inside(i)) {
      EXPECT_EQ(w[static_cast<size_t>(i)].bits, to_bf16(p[static_cast<size_t>(i)]).bits) << i;
    }
}

TEST(AdamW, Bf16MomentsAreRoundedAsDefined) {
  // The same update with fp32 moments that start from the same bf16 values: masters agree bit by bit, since they move by
  // unrounded moments, and each moment is the fp32 one rounded by the word that its key and index give.
  for (const int64_t n : {7, 1000, 40000}) {
    Random one, two;
    const Problem narrow({kCompare, n, true, false}, DType::f32, one),
        wide({kCompare, n, false, false}, DType::f32, two);
    narrow.update(3, 12345);
    wide.update(3, 12345);
    expect_same_bits("masters", narrow.masters, wide.masters);
    const std::vector<bf16> m = narrow.m.raw<bf16>(), v = narrow.v.raw<bf16>();
    const std::vector<float> exact_m = wide.m.raw<float>(), exact_v = wide.v.raw<float>();
    for (const AdamWSegment& s : narrow.segments)
      for (int64_t at = s.begin; at < s.end; ++at) {
        const auto i = static_cast<size_t>(at);
        const int64_t index = s.first_index + at - s.begin;
        const uint32_t word = philox(12345, s.tensor_key, static_cast<uint64_t>(index / 4)).v[index % 4];
        ASSERT_EQ(m[i].bits, to_bf16_stochastic(exact_m[i], word & 0xffff).bits) << at;
        ASSERT_EQ(v[i].bits, to_bf16_stochastic(exact_v[i], word >> 16).bits) << at;
      }
  }
}

TEST(AdamW, StochasticRoundingIsUnbiasedAndKeepsWhatBf16Holds) {
  for (const float x : {1.0F + 0x1p-9F, -3.14159F, 1e-20F, 123.4F}) {
    double sum = 0;
    constexpr int kDraws = 65536;
    for (uint32_t r = 0; r < kDraws; ++r) sum += static_cast<double>(to_float(to_bf16_stochastic(x, r)));
    EXPECT_NEAR(sum / kDraws, static_cast<double>(x),
                std::abs(static_cast<double>(x)) * 1e-9);  // every word once: exact
  }
  for (const float held : {1.0F, -0.5F, 0.0F, 0x1p-130F})
    for (const uint32_t r : {0U, 1U, 0xffffU}) EXPECT_EQ(to_float(to_bf16_stochastic(held, r)), held);
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_float(to_bf16_stochastic(inf, 0xffff)), inf);
  EXPECT_EQ(to_float(to_bf16_stochastic(-inf, 0xffff)), -inf);
  EXPECT_EQ(to_bf16_stochastic(std::bit_cast<float>(0x7f800001U), 0).bits, 0x7fff);
}

TEST(AdamW, AHaltedOrSkippedStepWritesTheHashAlone) {
  Random random;
  for (const bool halted : {true, false}) {
    Problem q({kCompare, 20000, true, true}, DType::f32, random);
    q.state.halted = halted ? 1 : 0;
    q.state.skipped = halted ? 0 : 1;
    q.gradients.set(Values(20000, std::nan("")));
    const StepState after = q.update(1);
    q.masters.expect_unchanged("masters");
    q.m.expect_unchanged("m");
    q.v.expect_unchanged("v");
    for (const bool poisoned : q.weights.poisoned()) ASSERT_TRUE(poisoned);
    EXPECT_EQ(after.weights_hash, 11 + q.hash());
  }
}

TEST(AdamW, NanGradientsReachTheirOwnElements) {
  // What the gate exists to prevent; without it a NaN must show, not vanish.
  Random random;
  Problem q({kCompare, 19, false, false}, DType::f32, random);
  Values g = q.gradients.values();
  g[5] = std::nan("");
  q.gradients.set(g);
  q.update(1);
  for (const TensorOn& t : {q.masters, q.m, q.v}) {
    const Values after = t.values();
    for (size_t i = 0; i < after.size(); ++i) EXPECT_EQ(std::isnan(after[i]), i == 5) << i;
  }
}

TEST(AdamW, HashIsItsDefinitionWhateverTheOrderAndTheCut) {
  Random random;
  for (const AdamWCase& c : cases_for(adamw_cases(), kCompare)) {
    SCOPED_TRACE(c.label());
    Problem q(c, DType::f32, random);
    const uint64_t together = q.update(1).weights_hash;
    EXPECT_EQ(together, 11 + q.hash());
    // The same masters from two ranks' halves, each with its own state: their sums are the whole.
    q.state.skipped = 1;
    q.state.weights_hash = 0;
    const std::vector<AdamWSegment> all = q.segments;
    uint64_t parts = 11;
    for (const int64_t half : {0, 1}) {
      q.segments.clear();
      for (const AdamWSegment& s : all) {
        AdamWSegment part = s;
        const int64_t middle = s.begin + (s.end - s.begin) / 3;
        part.begin = half == 0 ? s.begin : middle;
        part.end = half == 0 ? middle : s.end;
        part.first_index = s.first_index + part.begin - s.begin;
        if (part.begin < part.end) q.segments.push_back(part);
      }
      if (!q.segments.empty()) parts += q.update(1).weights_hash;
    }
    EXPECT_EQ(parts, together);
  }
}

TEST(AdamW, HashSeesBitsPlacesAndNames) {
  Random random;
  Problem q({kCompare, 1000, false, false}, DType::f32, random);
  q.state.skipped = 1;
  const auto hash_with =
      [&](const std::function<void(std::vector<float>&, std::vector<AdamWSegment>&)>& change) {
        Problem copy = q;
        std::vector<float> p = q.masters.raw<float>();
        change(p, copy.segments);
        copy.masters = TensorOn::of(kCpu, {1000}, p);
        return copy.update(1).weights_hash;
      };
  const uint64_t same = hash_with([](auto&, auto&) {});
  EXPECT_EQ(same, q.update(1).weights_hash);
  EXPECT_NE(same, hash_with([](auto& p, auto&) { p[400] = std::nextafter(p[400], 9.0F); }));
  EXPECT_NE(same, hash_with([](auto& p, auto&) { p[400] = -p[400]; }));
  EXPECT_NE(same, hash_with([](auto& p, auto&) { std::swap(p[400], p[401]); }));
  EXPECT_NE(same, hash_with([](auto&, auto& s) { s[2].tensor_key += 1; }));
  EXPECT_NE(same, hash_with([](auto&, auto& s) { s[2].first_index += 1; }));
  EXPECT_EQ(same, hash_with([](auto& p, auto&) { p[999] = 5; }));  // padding has no part in it
}

TEST(AdamW, BitsDoNotDependOnThreads) {
  for (const bool moments : {false, true})
    expect_independent_of_threads("adamw", [&] {
      Random random;
      const Problem q({kCompare, 150001, moments, true}, DType::f32, random);
      const StepState state = q.update(1);
      std::vector<char> bytes = bytes_of({q.masters, q.m, q.v, q.weights});
      const std::vector<char> more = bytes_of({TensorOn::structs<StepState>(kCpu, {state})});
      bytes.insert(bytes.end(), more.begin(), more.end());
      return bytes;
    });
}

TEST(AdamW, WrongArgumentsAreNamed) {
  Random random;
  Problem q({kCompare, 100, false, false}, DType::f32, random);
  expect_rejected("the first update is 1", [&] { q.update(0); });
  Problem overlapping = q;
  overlapping.segments[1].begin -= 3;
  expect_rejected("segment 1", [&] { overlapping.update(1); });
  Problem beyond = q;
  beyond.segments[2].end = 101;
  expect_rejected("segment 2", [&] { beyond.update(1); });
  Problem mixed = q;
  mixed.v = TensorOn(kCpu, DType::bf16, {100});
  expect_rejected("v must be fp32", [&] { mixed.update(1); });
  Problem wide({kCompare, 100, false, true}, DType::f64, random);
  expect_rejected("rounded twice", [&] { wide.update(1); });
}

// ---- The gate -------------------------------------------------------------------------------------------------------

StepState gate(const StepState& state, double raw_norm, double nominal_tokens, double clip) {
  const TensorOn s = TensorOn::structs<StepState>(kCpu, {state}), norm(kCpu, DType::f64, {1}, {raw_norm});
  cpu::step_gate(kCpu, {s, norm, nominal_tokens, clip});
  norm.expect_unchanged("raw_norm");
  return s.raw<StepState>()[0];
}

StepState good_state() {
  StepState s;
  s.loss_sum = int64_t{300} << 24;
  s.target_tokens = 100;
  s.weights_hash = 7;
  return s;
}

TEST(StepGate, ScalesToTheMeanOverTheTrueTokens) {
  const StepState s = gate(good_state(), 0.5, 400, 0);
  EXPECT_EQ(s.grad_norm, 2);
  EXPECT_EQ(s.grad_scale, 4);
  EXPECT_EQ(s.halted, 0);
  EXPECT_EQ(s.skipped, 0);
  EXPECT_EQ(loss_of(s), 300);
  EXPECT_EQ(s.target_tokens, 100);
  EXPECT_EQ(s.weights_hash, 7U);
}

TEST(StepGate, ClipsTheMeanGradientAboveTheLimitOnly) {
  EXPECT_FLOAT_EQ(gate(good_state(), 0.5, 400, 1).grad_scale, 2);  // norm 2, limit 1
  EXPECT_FLOAT_EQ(gate(good_state(), 0.5, 400, 2).grad_scale, 4);  // at the limit
  EXPECT_FLOAT_EQ(gate(good_state(), 0.5, 400, 5).grad_scale, 4);  // below
  EXPECT_FLOAT_EQ(gate(good_state(), 0, 400, 1).grad_scale, 4);    // nothing to clip, nothing divided by zero
  EXPECT_EQ(gate(good_state(), 0.5, 400, 1).grad_norm, 2);         // reported before clipping
}

TEST(StepGate, HaltsOnAnythingNotFinite) {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  for (const double bad : {nan, inf, -inf}) EXPECT_EQ(gate(good_state(), bad, 100, 1).halted, 1) << bad;
  StepState s = good_state();
  s.bad_token = 3;
  EXPECT_EQ(gate(s, 1, 100, 1).halted, 1);
  // Flags of ranks are added up.
  for (const int64_t ranks : {1, 2, 1000}) {
    s = good_state();
    s.overflow = ranks;
    const StepState after = gate(s, 1, 100, 1);
    EXPECT_EQ(after.halted, 1) << ranks;
    EXPECT_TRUE(std::isnan(loss_of(after))) << ranks;
  }
}

TEST(StepGate, HaltIsStickyAndSkipIsNot) {
  StepState s = good_state();
  s.halted = 1;
  EXPECT_EQ(gate(s, 1, 100, 1).halted, 1);
  s = good_state();
  s.skipped = 1;
  EXPECT_EQ(gate(s, 1, 100, 1).skipped, 0);
}

TEST(StepGate, AStepWithoutTargetsIsSkippedNotHalted) {
  StepState s = good_state();
  s.loss_sum = 0;
  s.target_tokens = 0;
  const StepState after = gate(s, 0, 100, 1);
  EXPECT_EQ(after.skipped, 1);
  EXPECT_EQ(after.halted, 0);
  EXPECT_EQ(after.grad_norm, 0);
  EXPECT_EQ(after.grad_scale, 0);
}

}  // namespace
}  // namespace kinoe::optest
