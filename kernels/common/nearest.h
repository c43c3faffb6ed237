// The nearest known name, for messages about a mistyped one.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kinoe {

/// Edits (insert, delete, replace, swap of neighbours) that turn `a` into `b`: the optimal string alignment distance.
inline size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  std::iota(above.begin(), above.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] == b[j - 1] ? 0U : 1U)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, above);
    std::swap(above, row);
  }
  return above[b.size()];
}

/// "--warmup-steps" and "warmup_steps" are of the same words.
inline std::vector<std::string> words_of(std::string_view name) {
  std::vector<std::string> words(1);
  for (const char c : name)
    if (c == '-' || c == '_')
      words.emplace_back();
    else
      words.back() += c;
  std::erase(words, "");
  return words;
}

/// What somebody may mean who writes --batch-size or --learning-rate: a word in common, or the words' initials.
inline bool related(const std::vector<std::string>& words, const std::string& candidate) {
  std::string initials;
  for (const std::string& word : words) initials += word[0];
  for (const std::string& theirs : words_of(candidate))
    if ((words.size() > 1 && theirs == initials) ||
        std::find(words.begin(), words.end(), theirs) != words.end())
      return true;
  return false;
}

/// The candidate with the fewest edits (the first of equals); empty only without candidates. Where more than half of the
/// name would have to be edited it was not mistyped, and the first candidate related to it comes before.
inline std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates) {
  std::string best;
  size_t best_distance = std::string::npos;
  for (const std::string& candidate : candidates)
    if (const size_t d = edit_distance(name, candidate); d < best_distance) {
      best_distance = d;
      best = candidate;
    }
  if (2 * best_distance > name.size()) {
    const std::vector<std::string> words = words_of(name);
    const auto other = std::find_if(candidates.begin(), candidates.end(),
                                    [&](const std::string& candidate) { return related(words, candidate); });
    if (other != candidates.end()) return *other;
  }
  return best;
}

}  // namespace kinoe
