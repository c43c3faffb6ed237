// Text from files that others made: what may be said of it in a message, and whether it may be handed to recursive code.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace kinoe {

/// Line ends and tabs are spelled "\\n" and "\\t", other control characters become '?'; of more than `limit` bytes the two
/// ends remain.
inline std::string one_line(std::string text, size_t limit = 1000) {
  if (text.size() > limit) text = text.substr(0, limit / 2) + " ... " + text.substr(text.size() - limit / 2);
  std::string line;
  for (const char c : text) {
    if (c == '\n' || c == '\t')
      line += c == '\n' ? "\\n" : "\\t";
    else
      line += static_cast<unsigned char>(c) < 0x20 || c == 0x7F ? '?' : c;
  }
  return line;
}

/// Whether arrays and objects of a JSON text are nested deeper than `levels`. Deep ones can be parsed, but printing, comparing and
/// copying them recurses.
inline bool nested_deeper(std::string_view json, int levels) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > levels) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

}  // namespace kinoe
