// The built-in stories: short tales from a probabilistic grammar whose entropy is known exactly, so that a first
// training run has a finish line. The grammar is in stories_grammar.cpp; nobody else's text is in it.
//
// Every text has one derivation at most: at each choice no alternative is a prefix of another. Therefore
// -log p(story) is the sum over its choices, and H = E[-log p(story)] / E[bytes(story)] is the entropy per byte of the stories in
// a row: no model that does not know the split rule below can have a lower expected loss.
//
// Split: the indices of a story's choices are summed modulo 16; stories of sum 0 are validation, all others training. Two of the
// choices that every story makes are uniform over lists whose sizes are multiples of 16; given the sum, all choices but one of
// these two therefore keep exactly their joint distribution, and with it E[-log p] and E[bytes], hence H, are
// exactly the same in both splits (the proof is in dev/FORMATS.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kinoe {

enum class StorySplit : uint8_t { training, validation };

/// What follows every story.
inline constexpr std::string_view kStorySeparator = "\n\n";
inline constexpr int64_t kValidationStoryBytes =
    256 << 10;  // of the text that models of stories are evaluated on

struct Story {
  std::string text;            // without the separator
  double log_probability = 0;  // natural logarithm, <= 0
};

/// The same bits on every platform.
Story generate_story(uint64_t seed, uint64_t index, StorySplit split);

/// Stories 0, 1, 2, ... of the split, each followed by the separator, until there are at least `bytes` bytes.
std::string stories_text(StorySplit split, int64_t bytes);

/// H in nats per byte, the separator counted, computed from the grammar.
double entropy_per_byte();

/// Standard error of an empirical -log p per byte over a text of `bytes` bytes of stories: how far chance may
/// move the best possible loss of such a text from H. Computed from the grammar.
double entropy_standard_error(int64_t bytes);

/// Expected bytes of a story, its separator counted.
double story_mean_bytes();

/// Number of different stories.
double story_count();

/// Natural logarithm of the probability of `text` (without separator); nothing if the grammar does not produce it.
std::optional<double> story_log_probability(std::string_view text);

/// Whether the grammar produces `text` (without separator).
bool parse_story(std::string_view text);

/// The split a story belongs to; nothing if it is none.
std::optional<StorySplit> story_split(std::string_view text);

}  // namespace kinoe
