// The built-in stories: their grammar, their entropy, their split.
#include "dataloader/stories.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "dataloader/stories_grammar.h"
#include "kernels/common/rng.h"

namespace kinoe {
namespace {

constexpr uint64_t kStories = 20000;

TEST(StoriesTest, GrammarIsUnambiguous) { EXPECT_EQ(Grammar(story_rules()).ambiguity(), ""); }

TEST(StoriesTest, AmbiguityIsFound) {
  const RuleText words[] = {{"s", "{w}."}, {"w", "ring|rings"}};
  EXPECT_NE(Grammar(words).ambiguity(), "");
  const RuleText phrases[] = {{"s", "{a} x|the cat y"}, {"a", "a dog|the"}};
  EXPECT_NE(Grammar(phrases).ambiguity(), "");
  const RuleText equal[] = {{"s", "a|b|a"}};
  EXPECT_NE(Grammar(equal).ambiguity(), "");
  const RuleText fine[] = {{"s", "{a} x|then y"}, {"a", "a dog|the cat"}};
  EXPECT_EQ(Grammar(fine).ambiguity(), "");
}

// A grammar small enough to write out: every text, its probability, the sums by hand.
TEST(StoriesTest, MomentsOfASmallGrammar) {
  const RuleText rules[] = {{"s", "3*{name} sat. {She=name} {=name}|no {name}"}, {"name", "Al/m|2*Eva/f"}};
  const Grammar grammar(rules);
  EXPECT_EQ(grammar.ambiguity(), "");
  const struct {
    const char* text;
    double p;
  } all[] = {{"Al sat. He Al", 0.75 / 3},
             {"Eva sat. She Eva", 0.75 * 2 / 3},
             {"no Al", 0.25 / 3},
             {"no Eva", 0.25 * 2 / 3}};
  double nats = 0, bytes = 0, mean = 0, square = 0;
  const double rate = 0.37;
  for (const auto& [text, p] : all) {
    const auto choices = grammar.parse(text);
    ASSERT_TRUE(choices.has_value()) << text;
    EXPECT_NEAR(grammar.log_probability(*choices), std::log(p), 1e-12);
    EXPECT_EQ(grammar.render(*choices), text);
    const double length = static_cast<double>(std::string_view(text).size()),
                 excess = -std::log(p) - rate * length;
    nats -= p * std::log(p);
    bytes += p * length;
    mean += p * excess;
    square += p * excess * excess;
  }
  const Grammar::Moments moments = grammar.moments(rate);
  EXPECT_NEAR(moments.nats, nats, 1e-12);
  EXPECT_NEAR(moments.bytes, bytes, 1e-12);
  EXPECT_NEAR(moments.variance, square - mean * mean, 1e-12);
  EXPECT_EQ(moments.texts, 4);
  for (const char* text :
       {"Al sat. She Al", "Al sat. He Eva", "Al sat. He Al ", "", "no", "no Al sat. He Al"})
    EXPECT_FALSE(grammar.parse(text).has_value()) << text;
}

TEST(StoriesTest, ParseGivesBackWhatWasGenerated) {
  for (const StorySplit split : {StorySplit::training, StorySplit::validation})
    for (uint64_t i = 0; i < 2000; ++i) {
      const Story story = generate_story(11, i, split);
      const auto log_probability = story_log_probability(story.text);
      ASSERT_TRUE(log_probability.has_value()) << story.text;
      ASSERT_NEAR(*log_probability, story.log_probability, 1e-9);
      ASSERT_EQ(story.text.find('\n'), std::string::npos);
    }
}

// In both splits the mean of -log p over the mean of bytes is H, within 4 standard errors of the errors' own estimate; and
// the standard error computed from the grammar is the one observed.
TEST(StoriesTest, EntropyIsWhatTheGrammarSays) {
  const double h = entropy_per_byte();
  EXPECT_GT(h, 0.3);
  EXPECT_LT(h, 0.6);
  for (const StorySplit split : {StorySplit::training, StorySplit::validation}) {
    double nats = 0, bytes = 0, square = 0, bytes_square = 0;
    for (uint64_t i = 0; i < kStories; ++i) {
      const Story story = generate_story(12, i, split);
      const double length = static_cast<double>(story.text.size() + kStorySeparator.size()),
                   excess = -story.log_probability - h * length;
      nats -= story.log_probability;
      bytes += length;
      bytes_square += length * length;
      square += excess * excess;
    }
    const double observed = std::sqrt(square) / bytes;
    EXPECT_NEAR(nats / bytes, h, 4 * observed);
    EXPECT_NEAR(entropy_standard_error(static_cast<int64_t>(bytes)), observed, 0.05 * observed);
    const double n = static_cast<double>(kStories), mean = bytes / n;
    EXPECT_NEAR(mean, story_mean_bytes(), 4 * std::sqrt((bytes_square / n - mean * mean) / n));
    EXPECT_LT(observed, 0.01 * h) << "or this test would see nothing";
  }
}

// The split's condition leaves the distribution of the hero, the thing and every other word list uniform.
TEST(StoriesTest, SplitLeavesTheChoicesUniform) {
  const Grammar grammar(story_rules());
  for (const StorySplit split : {StorySplit::training, StorySplit::validation}) {
    std::vector<std::vector<double>> counts;
    for (uint64_t i = 0; i < kStories; ++i) {
      const auto choices = grammar.parse(generate_story(13, i, split).text);
      for (const Grammar::Choice& choice : *choices) {
        counts.resize(std::max(counts.size(), static_cast<size_t>(choice.rule) + 1));
        auto& rule = counts[static_cast<size_t>(choice.rule)];
        rule.resize(static_cast<size_t>(grammar.alternatives(choice.rule)));
        ++rule[static_cast<size_t>(choice.alternative)];
      }
    }
    for (size_t r = 0; r < counts.size(); ++r) {
      double all = 0, chi2 = 0;
      for (const double count : counts[r]) all += count;
      const auto rule = static_cast<int>(r);
      for (size_t a = 0; a < counts[r].size(); ++a) {
        const double expected = all * grammar.weight(rule, static_cast<int>(a)) / grammar.total_weight(rule);
        chi2 += (counts[r][a] - expected) * (counts[r][a] - expected) / expected;
      }
      const double freedom = std::max(1.0, static_cast<double>(counts[r].size()) - 1);
      EXPECT_LT(chi2, freedom + 5 * std::sqrt(2 * freedom) + 5) << "rule " << r;
    }
  }
}

TEST(StoriesTest, SplitsAreDisjoint) {
  std::set<std::string> training;
  for (uint64_t i = 0; i < 5000; ++i) {
    const std::string text = generate_story(14, i, StorySplit::training).text;
    ASSERT_EQ(story_split(text), StorySplit::training);
    training.insert(text);
  }
  EXPECT_EQ(training.size(), 5000U) << "no story twice among so few of so many";
  for (uint64_t i = 0; i < 5000; ++i) {
    const std::string text = generate_story(14, i, StorySplit::validation).text;
    ASSERT_EQ(story_split(text), StorySplit::validation);
    ASSERT_EQ(training.count(text), 0U);
  }
  EXPECT_FALSE(story_split("No story.").has_value());
}

// What the exactness of H in both splits rests on.
TEST(StoriesTest, SplitRulesHold) {
  const Grammar grammar(story_rules());
  for (const char* name : {"hero", "adj", "thing"}) {
    const int rule = grammar.rule_index(name);
    EXPECT_EQ(grammar.alternatives(rule) % 16, 0) << name;
    EXPECT_EQ(grammar.total_weight(rule), grammar.alternatives(rule)) << name << " is not uniform";
    for (uint64_t i = 0; i < 2000; ++i) {
      const auto choices = grammar.parse(generate_story(15, i, StorySplit::training).text);
      const auto uses =
          std::count_if(choices->begin(), choices->end(), [&](const auto& c) { return c.rule == rule; });
      if (std::string_view(name) == "hero") {
        ASSERT_EQ(uses, 1);
      } else {
        ASSERT_GE(uses, 1) << name;
      }
    }
  }
}

TEST(StoriesTest, ManyStories) { EXPECT_GT(story_count(), 1e12); }

TEST(StoriesTest, TextIsWholeStories) {
  const std::string text = stories_text(StorySplit::validation, 5000);
  EXPECT_GE(text.size(), 5000U);
  EXPECT_LT(text.size(), 5000U + 400);
  EXPECT_EQ(text, stories_text(StorySplit::validation, 5000));
  EXPECT_TRUE(stories_text(StorySplit::validation, 9000).starts_with(text));
  size_t stories = 0;
  for (size_t begin = 0, end; begin < text.size(); begin = end + kStorySeparator.size()) {
    end = text.find(kStorySeparator, begin);
    ASSERT_NE(end, std::string::npos);
    ASSERT_EQ(story_split(std::string_view(text).substr(begin, end - begin)), StorySplit::validation);
    ++stories;
  }
  EXPECT_GT(stories, 20U);
  EXPECT_EQ(stories_text(StorySplit::training, 0), "");
}

// Every deletion, and a changed letter or swapped pair at every place, of a story that stays none.
TEST(StoriesTest, PerturbedStoriesAreRefused) {
  size_t perturbed = 0, accepted = 0;
  for (uint64_t i = 0; i < 200; ++i) {
    const std::string text = generate_story(16, i, StorySplit::training).text;
    for (size_t at = 0; at < text.size(); ++at) {
      std::string shorter = text, changed = text, swapped = text;
      shorter.erase(at, 1);
      changed[at] = '#';
      EXPECT_FALSE(parse_story(changed)) << changed;
      ++perturbed;
      accepted += parse_story(shorter);
      if (at + 1 < text.size() && text[at] != text[at + 1]) {
        std::swap(swapped[at], swapped[at + 1]);
        ++perturbed;
        accepted += parse_story(swapped);
      }
    }
    EXPECT_FALSE(parse_story(text + " "));
    EXPECT_FALSE(parse_story(text + text));
    EXPECT_FALSE(parse_story(text + "\n\n"));
  }
  // Swapping the digits of a number gives another story; little else does.
  EXPECT_LT(static_cast<double>(accepted), 0.03 * static_cast<double>(perturbed));
}

// Agreement across sentences is part of the grammar: another pronoun in any place is refused, and so is the end of another plot.
TEST(StoriesTest, DisagreementIsRefused) {
  int refused = 0;
  std::string other;
  for (uint64_t i = 0; i < 500; ++i) {
    const std::string text = generate_story(17, i, StorySplit::training).text;
    for (const auto& [from, to] : {std::pair{" he ", " she "}, std::pair{" she ", " he "}})
      for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + 1)) {
        std::string wrong = text;
        wrong.replace(at, std::string_view(from).size(), to);
        EXPECT_FALSE(parse_story(wrong)) << wrong;
        ++refused;
      }
    // The second sentence of a story belongs to the way its first one ends.
    const size_t end = text.find(". ");
    ASSERT_NE(end, std::string::npos) << text;
    const bool made = text.find(" for the ") < end;
    if (made) {
      other = text.substr(end);
    } else if (!other.empty()) {
      const std::string wrong = text.substr(0, end) + other;
      EXPECT_FALSE(parse_story(wrong)) << wrong;
      ++refused;
    }
  }
  EXPECT_GT(refused, 500);
}

// Pinned: the demo's data are the same bits everywhere.
TEST(StoriesTest, IsTheSameEverywhere) {
  EXPECT_EQ(stable_key(stories_text(StorySplit::training, 100000)), 2659474547776521505U);
  EXPECT_EQ(stable_key(stories_text(StorySplit::validation, 100000)), 1266144202111747126U);
}

}  // namespace
}  // namespace kinoe
