// Stories from random numbers, and back: a text parsed by the same grammar.
#include "dataloader/stories.h"

#include <cmath>
#include <vector>

#include "dataloader/stories_grammar.h"
#include "kernels/common/check.h"
#include "kernels/common/rng.h"

namespace kinoe {
namespace {

constexpr int kSplitModulus = 16;                // one story in 16 is a validation story
constexpr uint64_t kTextSeed = 0x4B696E6F65ULL;  // of stories_text: everybody's built-in stories are the same

const Grammar& grammar() {
  static const Grammar instance(story_rules());
  return instance;
}

// Uniform in [0, n): the high half of a 64-bit product; its bias is below n / 2^64.
int below(int n, uint64_t seed, uint64_t stream, uint64_t index) {
  const Philox4 bits = philox(seed, stream, index);
  const uint64_t word = uint64_t{bits.v[0]} << 32 | bits.v[1];
  return static_cast<int>(static_cast<unsigned __int128>(word) * static_cast<unsigned>(n) >> 64);
}

int residue(const std::vector<Grammar::Choice>& choices) {
  int sum = 0;
  for (const Grammar::Choice& choice : choices) sum += choice.alternative;
  return sum % kSplitModulus;
}

Grammar::Moments moments() {
  const Grammar::Moments plain = grammar().moments(0);
  const double rate = plain.nats / (plain.bytes + static_cast<double>(kStorySeparator.size()));
  return grammar().moments(rate);
}

}  // namespace

Story generate_story(uint64_t seed, uint64_t index, StorySplit split) {
  const uint64_t stream =
      stable_key(split == StorySplit::training ? "stories training" : "stories validation") ^ mix64(index);
  uint64_t draws = 0;
  const Grammar& g = grammar();
  std::vector<Grammar::Choice> choices = g.derive([&](int rule) {
    int ticket = below(g.total_weight(rule), seed, stream, draws++);
    int alternative = 0;
    while (ticket >= g.weight(rule, alternative)) ticket -= g.weight(rule, alternative++);
    return alternative;
  });
  // Turn the story's hero, uniform over a multiple of 16 names, until the sum of all choices is of the split wanted.
  // The name stays uniform given all other choices and the sum's class.
  const int hero = g.rule_index("hero");
  const int wanted =
      split == StorySplit::validation ? 0 : 1 + below(kSplitModulus - 1, seed, stream, draws++);
  const int turn = (wanted - residue(choices) + kSplitModulus) % kSplitModulus;
  for (Grammar::Choice& choice : choices)
    if (choice.rule == hero) choice.alternative = (choice.alternative + turn) % g.alternatives(hero);
  return {g.render(choices), g.log_probability(choices)};
}

std::string stories_text(StorySplit split, int64_t bytes) {
  std::string text;
  text.reserve(static_cast<size_t>(bytes) + 512);
  for (uint64_t index = 0; static_cast<int64_t>(text.size()) < bytes; ++index) {
    text += generate_story(kTextSeed, index, split).text;
    text += kStorySeparator;
  }
  return text;
}

double entropy_per_byte() {
  const Grammar::Moments m = moments();
  return m.nats / story_mean_bytes();
}

double entropy_standard_error(int64_t bytes) {
  CHECK(bytes > 0, "a text of ", bytes, " bytes");
  // sum(X) / sum(Y) over n stories, n E[Y] = bytes: its deviation is that of sum(X - H Y) / (n E[Y]).
  return std::sqrt(moments().variance / (static_cast<double>(bytes) * story_mean_bytes()));
}

double story_mean_bytes() { return moments().bytes + static_cast<double>(kStorySeparator.size()); }

double story_count() { return moments().texts; }

std::optional<double> story_log_probability(std::string_view text) {
  const auto choices = grammar().parse(text);
  if (!choices) return std::nullopt;
  return grammar().log_probability(*choices);
}

bool parse_story(std::string_view text) { return grammar().parse(text).has_value(); }

std::optional<StorySplit> story_split(std::string_view text) {
  const auto choices = grammar().parse(text);
  if (!choices) return std::nullopt;
  return residue(*choices) == 0 ? StorySplit::validation : StorySplit::training;
}

}  // namespace kinoe
