// Choosing tokens, and generating with the whole model.
#include "trainer/sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "test/model_harness.h"

namespace kinoe {
namespace {

constexpr Context kCpu;
const std::vector<float> kLogits{std::log(0.1F), std::log(0.4F), std::log(0.2F), std::log(0.3F)};

std::map<int32_t, double> frequencies(const SampleOptions& options) {
  std::map<int32_t, double> counts;
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i)
    counts[pick_token(kLogits.data(), 4, options, (i + 0.5) / kDraws)] += 1.0 / kDraws;
  return counts;
}

TEST(PickToken, FollowsTheProbabilities) {
  auto f = frequencies({});
  EXPECT_NEAR(f[0], 0.1, 1e-3);
  EXPECT_NEAR(f[1], 0.4, 1e-3);
  EXPECT_NEAR(f[2], 0.2, 1e-3);
  EXPECT_NEAR(f[3], 0.3, 1e-3);
}

TEST(PickToken, TemperatureSharpens) {
  auto f = frequencies({.temperature = 0.5});  // p^2, normalised
  EXPECT_NEAR(f[1], 0.16 / 0.30, 1e-3);
  EXPECT_NEAR(f[0], 0.01 / 0.30, 1e-3);
}

TEST(PickToken, TemperatureZeroIsTheLowestOfTheMostProbable) {
  const std::vector<float> equal{1, 3, 3, 2};
  for (const double u : {0.001, 0.5, 0.999}) EXPECT_EQ(pick_token(equal.data(), 4, {.temperature = 0}, u), 1);
}

TEST(PickToken, TopKKeepsTheKMostProbable) {
  auto f = frequencies({.top_k = 2});
  EXPECT_NEAR(f[1], 0.4 / 0.7, 1e-3);
  EXPECT_NEAR(f[3], 0.3 / 0.7, 1e-3);
  EXPECT_EQ(f.count(0) + f.count(2), 0U);
}

TEST(PickToken, TopPKeepsTheSmallestSetThatReachesIt) {
  auto f = frequencies({.top_p = 0.75});  // 0.4 + 0.3 < 0.75 <= 0.4 + 0.3 + 0.2
  EXPECT_EQ(f.count(0), 0U);
  EXPECT_NEAR(f[2], 0.2 / 0.9, 1e-3);
  f = frequencies({.top_p = 0.3});
  EXPECT_EQ(f.size(), 1U);
  EXPECT_NEAR(f[1], 1.0, 1e-9);
}

class SamplerTest : public testing::Test {
 protected:
  SamplerTest() : run(kCpu, small_llama(false), DType::f32, {.batch = 1, .length = 13}) {}

  std::vector<std::vector<int32_t>> generate(
      int64_t count, int64_t window, const SampleOptions& options,
      const std::function<bool(const std::vector<int32_t>&)>& stop = nullptr) {
    const Memory memory = Memory::on(Backend::cpu, Sampler::bytes(run.model, count, window));
    return Sampler(run.model, count, window, memory.data())
        .generate(kCpu, run.hooks(), {1, 2, 3}, options, stop);
  }
  ModelRun run;
};

TEST_F(SamplerTest, GreedyTextIsWhatAForwardPassOverItPredicts) {
  const auto text = generate(1, 13, {.max_tokens = 8, .temperature = 0}).front();
  ASSERT_EQ(text.size(), 8U);
  std::vector<int32_t> all{1, 2, 3};
  all.insert(all.end(), text.begin(), text.end());
  all.resize(13, 0);
  run.set_batch(all, std::vector<int32_t>(13, -1));
  begin_step(kCpu, run.acts);
  forward(kCpu, run.model, run.acts, run.hooks());
  for (size_t i = 0; i < text.size(); ++i) {
    const Tensor logits = head_logits(kCpu, run.model, run.acts, run.hooks(), {static_cast<int64_t>(i) + 2});
    EXPECT_EQ(pick_token(logits.as<float>(), 29, {.temperature = 0}, 0.5), text[i]) << i;
  }
}

TEST_F(SamplerTest, TheSeedDecidesAndARowDoesNotDependOnTheOthers) {
  const SampleOptions options{.max_tokens = 12, .seed = 5};
  const auto three = generate(3, 13, options);
  EXPECT_EQ(three, generate(3, 13, options));
  EXPECT_EQ(three.front(), generate(1, 13, options).front());
  EXPECT_NE(three[0], three[1]);
  EXPECT_NE(three, generate(3, 13, {.max_tokens = 12, .seed = 6}));
}

TEST_F(SamplerTest, LongTextSeesItsLastWindow) {
  const auto text = generate(1, 5, {.max_tokens = 30, .temperature = 0}).front();
  EXPECT_EQ(text.size(), 30U);
}

TEST_F(SamplerTest, OnlyAllowedIdsAreChosen) {
  const auto any = generate(1, 13, {.max_tokens = 60, .seed = 5}).front();
  EXPECT_TRUE(std::any_of(any.begin(), any.end(), [](int32_t id) { return id >= 7; }));
  const auto few = generate(1, 13, {.max_tokens = 60, .seed = 5, .allowed = 7}).front();
  EXPECT_TRUE(std::all_of(few.begin(), few.end(), [](int32_t id) { return id < 7; }));
}

TEST_F(SamplerTest, RowsStopAlone) {
  const auto rows = generate(2, 13, {.max_tokens = 9, .seed = 5},
                             [](const std::vector<int32_t>& ids) { return ids.size() >= 4; });
  EXPECT_EQ(rows[0].size(), 4U);
  EXPECT_EQ(rows[1].size(), 4U);
}

}  // namespace
}  // namespace kinoe
