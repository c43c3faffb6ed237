// A small probabilistic grammar with memory: rules, choices, and words that come back later in the same story.
//
// A rule is written as its alternatives, separated by '|'. In an alternative
//   {rule}      is a choice from that rule;
//   {=rule}     repeats the words last chosen from it;
//   {she=rule}  is a pronoun for it (she, She, her, him), by the gender of the alternative chosen;
// everything else stands for itself. "3*" before an alternative is its weight (1 without), "/f" or "/m" behind it its
// gender. A rule without braces is a word list; only word lists can be repeated.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kinoe {

struct RuleText {
  std::string_view name;
  std::string_view alternatives;
};

class Grammar {
 public:
  /// rules[0] is the start. The views must outlive the grammar. A malformed rule is an internal error.
  explicit Grammar(std::span<const RuleText> rules);

  struct Choice {
    int rule = 0;
    int alternative = 0;
  };

  /// Calls `pick(rule)` at each choice, in the order of the text, for the index of an alternative.
  template <class Pick>
  [[nodiscard]] std::vector<Choice> derive(Pick pick) const;

  [[nodiscard]] std::string render(std::span<const Choice> choices) const;
  [[nodiscard]] double log_probability(std::span<const Choice> choices) const;

  /// The choices that give exactly `text`; nothing if there are none.
  [[nodiscard]] std::optional<std::vector<Choice>> parse(std::string_view text) const;

  /// Why some text might have two derivations, or "": at every choice, the words the alternatives can begin with must be
  /// such that none is a prefix of another. Then a text determines each choice in turn.
  [[nodiscard]] std::string ambiguity() const;

  /// Moments of X = -log p and Y = bytes of a text, exact: sums over all sentence structures, and within one over its
  /// word lists, which are independent.
  struct Moments {
    double nats = 0;   // E[X]
    double bytes = 0;  // E[Y]
    double texts = 0;  // number of different texts
    /// E[(X - rate Y)^2] - E[X - rate Y]^2 for the rate given.
    double variance = 0;
  };
  [[nodiscard]] Moments moments(double rate) const;

  [[nodiscard]] int rule_index(std::string_view name) const;
  [[nodiscard]] int alternatives(int rule) const {
    return static_cast<int>(at(rules_, rule).alternatives.size());
  }
  [[nodiscard]] int weight(int rule, int alternative) const {
    return at(at(rules_, rule).alternatives, alternative).weight;
  }
  [[nodiscard]] int total_weight(int rule) const { return at(rules_, rule).total_weight; }
  /// The words of a word list's alternative.
  [[nodiscard]] std::string_view word(int rule, int alternative) const {
    return at(at(rules_, rule).alternatives, alternative).items[0].text;
  }

 private:
  enum class ItemKind : uint8_t { literal, choice, repeat };
  struct Item {
    ItemKind kind = ItemKind::literal;
    std::string_view text;  // of a literal; of a repeat the pronoun, or "" for the words themselves
    int rule = -1;
  };
  struct Alternative {
    int weight = 1;
    char gender = 0;
    std::vector<Item> items;
  };
  struct Rule {
    std::string_view name;
    std::vector<Alternative> alternatives;
    int total_weight = 0;
    bool words = true;
  };
  struct Frame;
  struct Cursor;

  template <class T>
  static const T& at(const std::vector<T>& v, int i) {
    return v[static_cast<size_t>(i)];
  }
  Alternative read_alternative(std::string_view text) const;
  [[nodiscard]] std::string_view repeat_text(const Item& item, int alternative) const;
  bool parse_rule(int rule, Cursor& cursor) const;
  void first_words(int rule, std::vector<std::string_view>& out) const;
  void first_words(const Alternative& alternative, std::vector<std::string_view>& out) const;
  void add_frames(std::vector<Item> ahead, Frame frame, double rate, Moments& sum) const;
  void add_frame(const Frame& frame, double rate, Moments& sum) const;

  std::vector<Rule> rules_;
};

template <class Pick>
std::vector<Grammar::Choice> Grammar::derive(Pick pick) const {
  std::vector<Choice> choices;
  std::vector<int> ahead{0};  // rules to choose from, the next one last
  while (!ahead.empty()) {
    const int rule = ahead.back();
    ahead.pop_back();
    choices.push_back({rule, pick(rule)});
    const std::vector<Item>& items = at(at(rules_, rule).alternatives, choices.back().alternative).items;
    for (auto item = items.rbegin(); item != items.rend(); ++item)
      if (item->kind == ItemKind::choice) ahead.push_back(item->rule);
  }
  return choices;
}

/// The rules of the built-in stories.
std::span<const RuleText> story_rules();

}  // namespace kinoe
