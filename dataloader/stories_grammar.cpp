// The grammar's machine: reading rules, rendering, parsing, the unambiguity check. Its entropy is in stories_entropy.cpp.
#include "dataloader/stories_grammar.h"

#include <array>
#include <charconv>
#include <cmath>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

struct Pronoun {
  std::string_view name, female, male;
};
constexpr std::array kPronouns = {Pronoun{"she", "she", "he"}, Pronoun{"She", "She", "He"},
                                  Pronoun{"her", "her", "his"}, Pronoun{"him", "her", "him"}};

template <class Visit>
void split(std::string_view text, char separator, Visit visit) {
  while (true) {
    const size_t end = text.find(separator);
    visit(text.substr(0, end));
    if (end == std::string_view::npos) return;
    text.remove_prefix(end + 1);
  }
}

}  // namespace

Grammar::Grammar(std::span<const RuleText> rules) {
  for (const RuleText& rule : rules) rules_.push_back({rule.name, {}, 0, true});
  for (size_t r = 0; r < rules.size(); ++r)
    split(rules[r].alternatives, '|', [&](std::string_view text) {
      Alternative alternative = read_alternative(text);
      rules_[r].total_weight += alternative.weight;
      if (alternative.items.size() != 1 || alternative.items[0].kind != ItemKind::literal)
        rules_[r].words = false;
      rules_[r].alternatives.push_back(std::move(alternative));
    });
  for (const Rule& rule : rules_)
    for (const Alternative& alternative : rule.alternatives)
      for (const Item& item : alternative.items)
        CHECK(item.kind != ItemKind::repeat || at(rules_, item.rule).words, "grammar rule '", rule.name,
              "' repeats a rule that is no word list");
}

Grammar::Alternative Grammar::read_alternative(std::string_view text) const {
  Alternative result;
  if (const size_t star = text.find('*'); star != std::string_view::npos) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + star, result.weight);
    CHECK(error == std::errc() && end == text.data() + star && result.weight > 0, "bad weight in '", text,
          "'");
    text.remove_prefix(star + 1);
  }
  if (text.size() > 2 && text[text.size() - 2] == '/') {
    result.gender = text.back();
    CHECK(result.gender == 'f' || result.gender == 'm', "bad gender in '", text, "'");
    text.remove_suffix(2);
  }
  while (!text.empty()) {
    if (text[0] != '{') {
      const size_t length = std::min(text.find('{'), text.size());
      result.items.push_back({ItemKind::literal, text.substr(0, length), -1});
      text.remove_prefix(length);
      continue;
    }
    const size_t close = text.find('}');
    CHECK(close != std::string_view::npos, "unclosed brace in '", text, "'");
    const std::string_view inside = text.substr(1, close - 1);
    text.remove_prefix(close + 1);
    const size_t equals = inside.find('=');
    if (equals == std::string_view::npos)
      result.items.push_back({ItemKind::choice, {}, rule_index(inside)});
    else
      result.items.push_back(
          {ItemKind::repeat, inside.substr(0, equals), rule_index(inside.substr(equals + 1))});
  }
  CHECK(!result.items.empty(), "a grammar rule has an empty alternative");
  return result;
}

int Grammar::rule_index(std::string_view name) const {
  for (size_t r = 0; r < rules_.size(); ++r)
    if (rules_[r].name == name) return static_cast<int>(r);
  CHECK(false, "no grammar rule is called '", name, "'");
  return -1;
}

std::string_view Grammar::repeat_text(const Item& item, int alternative) const {
  const Alternative& chosen = at(at(rules_, item.rule).alternatives, alternative);
  if (item.text.empty()) return chosen.items[0].text;
  for (const Pronoun& pronoun : kPronouns)
    if (pronoun.name == item.text) {
      CHECK(chosen.gender != 0, "pronoun '", item.text, "' for a word without gender");
      return chosen.gender == 'f' ? pronoun.female : pronoun.male;
    }
  CHECK(false, "unknown pronoun '", item.text, "'");
  return {};
}

std::string Grammar::render(std::span<const Choice> choices) const {
  std::string text;
  std::vector<int> latest(rules_.size(), -1);
  std::vector<Item> ahead{{ItemKind::choice, {}, 0}};
  size_t next = 0;
  while (!ahead.empty()) {
    const Item item = ahead.back();
    ahead.pop_back();
    switch (item.kind) {
      case ItemKind::literal: text += item.text; break;
      case ItemKind::repeat: text += repeat_text(item, at(latest, item.rule)); break;
      case ItemKind::choice: {
        CHECK(next < choices.size() && choices[next].rule == item.rule, "not a derivation of this grammar");
        const int alternative = latest[static_cast<size_t>(item.rule)] = choices[next++].alternative;
        const std::vector<Item>& items = at(at(rules_, item.rule).alternatives, alternative).items;
        ahead.insert(ahead.end(), items.rbegin(), items.rend());
        break;
      }
    }
  }
  return text;
}

double Grammar::log_probability(std::span<const Choice> choices) const {
  double sum = 0;
  for (const Choice& choice : choices)
    sum += std::log(static_cast<double>(weight(choice.rule, choice.alternative)) / total_weight(choice.rule));
  return sum;
}

// --- parsing ---

struct Grammar::Cursor {
  std::string_view rest;
  std::vector<Choice> choices;
  std::vector<int> latest;
};

// Takes the first alternative that can begin here; ambiguity() guarantees that no other one can.
bool Grammar::parse_rule(int rule, Cursor& cursor) const {
  const std::vector<Alternative>& alternatives = at(rules_, rule).alternatives;
  for (size_t a = 0; a < alternatives.size(); ++a) {
    std::vector<std::string_view> begins;
    first_words(alternatives[a], begins);
    bool can_begin = false;
    for (const std::string_view word : begins) can_begin = can_begin || cursor.rest.starts_with(word);
    if (!can_begin) continue;
    cursor.choices.push_back({rule, static_cast<int>(a)});
    cursor.latest[static_cast<size_t>(rule)] = static_cast<int>(a);
    for (const Item& item : alternatives[a].items) {
      if (item.kind == ItemKind::choice) {
        if (!parse_rule(item.rule, cursor)) return false;
        continue;
      }
      const std::string_view expected =
          item.kind == ItemKind::literal ? item.text : repeat_text(item, at(cursor.latest, item.rule));
      if (!cursor.rest.starts_with(expected)) return false;
      cursor.rest.remove_prefix(expected.size());
    }
    return true;
  }
  return false;
}

std::optional<std::vector<Grammar::Choice>> Grammar::parse(std::string_view text) const {
  Cursor cursor{text, {}, std::vector<int>(rules_.size(), -1)};
  if (!parse_rule(0, cursor) || !cursor.rest.empty()) return std::nullopt;
  return std::move(cursor.choices);
}

// --- unambiguity ---

void Grammar::first_words(const Alternative& alternative, std::vector<std::string_view>& out) const {
  const Item& first = alternative.items[0];
  CHECK(first.kind != ItemKind::repeat,
        "an alternative begins with a repetition, so what it begins with is not fixed");
  if (first.kind == ItemKind::literal)
    out.push_back(first.text);
  else
    first_words(first.rule, out);
}

void Grammar::first_words(int rule, std::vector<std::string_view>& out) const {
  for (const Alternative& alternative : at(rules_, rule).alternatives) first_words(alternative, out);
}

std::string Grammar::ambiguity() const {
  for (const Rule& rule : rules_) {
    std::vector<std::vector<std::string_view>> begins(rule.alternatives.size());
    for (size_t a = 0; a < begins.size(); ++a) first_words(rule.alternatives[a], begins[a]);
    for (size_t a = 0; a < begins.size(); ++a)
      for (size_t b = 0; b < begins.size(); ++b)
        for (const std::string_view one : begins[a])
          for (const std::string_view other : begins[b])
            if (a != b && other.starts_with(one))
              return cat("rule '", rule.name, "': '", one, "' begins '", other, "'");
  }
  return "";
}

}  // namespace kinoe
