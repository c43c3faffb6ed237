// Where UTF-8 is well formed (Unicode 15, table 3-7: no overlong forms, no surrogates, nothing above U+10FFFF).
#pragma once

#include <cstdint>
#include <string_view>

namespace kinoe {

/// Bytes of the character `text` begins with, 1 to 4; 0 if it begins with none, which includes one cut off by the end.
inline int utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  const auto within = [&](size_t i, unsigned low, unsigned high) {
    return byte(i) >= low && byte(i) <= high;
  };
  const unsigned first = byte(0);
  if (text.empty()) return 0;
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  if (first < 0xE0) return within(1, 0x80, 0xBF) ? 2 : 0;
  if (first < 0xF0) {
    const unsigned low = first == 0xE0 ? 0xA0 : 0x80, high = first == 0xED ? 0x9F : 0xBF;
    return within(1, low, high) && within(2, 0x80, 0xBF) ? 3 : 0;
  }
  const unsigned low = first == 0xF0 ? 0x90 : 0x80, high = first == 0xF4 ? 0x8F : 0xBF;
  return within(1, low, high) && within(2, 0x80, 0xBF) && within(3, 0x80, 0xBF) ? 4 : 0;
}

/// Whether `text` is the beginning of a character that its end cuts off.
inline bool utf8_cut_off(std::string_view text) {
  if (text.empty() || text.size() > 3 || utf8_length(text) != 0) return false;
  // Completed with the smallest or the largest continuation bytes it must become a character.
  for (const char fill : {'\x80', '\x90', '\xA0', '\xBF'}) {
    char whole[4] = {text[0], '\x80', '\x80', '\x80'};
    for (size_t i = 1; i < text.size(); ++i) whole[i] = text[i];
    if (text.size() == 1) whole[1] = fill;
    if (utf8_length({whole, 4}) > static_cast<int>(text.size())) return true;
  }
  return false;
}

}  // namespace kinoe
