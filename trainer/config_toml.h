// The part of TOML a flat configuration needs: `name = value` lines, strings, numbers, booleans, arrays of these.
//
// Values keep their text, so that the reader of each option gives the same message for a file as for the command line.
// Sections, inline tables, dates and multi-line strings mean nothing here and are errors.
#pragma once

#include <string>
#include <vector>

namespace kinoe {

struct TomlEntry {
  std::string key;
  std::vector<std::string> values;  // strings unquoted, numbers without '_'; one value unless `array`
  bool array = false;
  int line = 0;
};

/// Throws Error(usage) with source and line for what is not this subset, and for a key that comes twice.
std::vector<TomlEntry> parse_toml(const std::string& text, const std::string& source);

/// A basic string: quoted, with escapes.
std::string toml_string(const std::string& text);
/// Shortest text that reads back to the same bits, with the point or exponent that makes it a TOML float.
std::string toml_float(double value);

}  // namespace kinoe
