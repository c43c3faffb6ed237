// A hand-written reader: what is left of TOML without sections needs no library, and its errors name the line.
#include "trainer/config_toml.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <string_view>
#include <unordered_map>

#include "kernels/common/check.h"
#include "kernels/common/untrusted.h"

namespace kinoe {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_key_char(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '-';
}

class Reader {
 public:
  Reader(const std::string& text, const std::string& source) : text_(text), source_(source) {}

  std::vector<TomlEntry> read() {
    std::vector<TomlEntry> entries;
    std::unordered_map<std::string, int> lines;      // of the keys so far
    if (text_.starts_with("\xEF\xBB\xBF")) at_ = 3;  // the byte order mark some editors write
    for (;;) {
      skip(/*newlines=*/true);
      if (at_end()) return entries;
      TomlEntry entry = read_entry();
      if (const auto [other, fresh] = lines.emplace(entry.key, entry.line); !fresh)
        error(cat("'", entry.key, "' was already set in line ", other->second, "; keep one of them"));
      entries.push_back(std::move(entry));
    }
  }

 private:
  [[nodiscard]] bool at_end() const { return at_ >= text_.size(); }
  [[nodiscard]] char peek() const { return at_end() ? '\0' : text_[at_]; }
  [[noreturn]] void error(const std::string& message) const {
    fail(ExitCode::usage, source_, " line ", line_, ": ", one_line(message));
  }

  /// Blanks and comments; line ends too where they mean nothing.
  void skip(bool newlines) {
    while (!at_end()) {
      const char c = peek();
      if (c == '#') {
        while (!at_end() && peek() != '\n') ++at_;
      } else if (c == '\n' && newlines) {
        ++line_;
        ++at_;
      } else if (c == ' ' || c == '\t' || c == '\r') {
        ++at_;
      } else {
        return;
      }
    }
  }

  TomlEntry read_entry() {
    if (peek() == '[') error("expected 'name = value'; this file has no [sections]");
    TomlEntry entry;
    entry.line = line_;
    if (peek() == '"' || peek() == '\'') {
      entry.key = read_string();
    } else {
      while (is_key_char(peek())) entry.key += text_[at_++];
    }
    skip(false);
    if (entry.key.empty() || peek() != '=') error("expected 'name = value'");
    ++at_;
    skip(false);
    if (peek() == '[') {
      entry.array = true;
      read_array(entry.values);
    } else {
      entry.values.push_back(read_scalar(entry.key));
    }
    skip(false);
    if (!at_end() && peek() != '\n') error(cat("unexpected text after the value of '", entry.key, "'"));
    return entry;
  }

  void read_array(std::vector<std::string>& values) {
    const int first_line = line_;
    ++at_;
    for (;;) {
      skip(true);
      if (at_end()) error(cat("the array that starts in line ", first_line, " has no ']'"));
      if (peek() == ']') break;
      values.push_back(read_scalar("array"));
      skip(true);
      if (peek() == ',') {
        ++at_;
      } else if (peek() != ']') {
        error("expected ',' or ']' in an array");
      }
    }
    ++at_;
  }

  std::string read_scalar(const std::string& key) {
    if (peek() == '"' || peek() == '\'') return read_string();
    std::string word;
    while (!at_end() && std::string_view(" \t\r\n#,]").find(peek()) == std::string_view::npos)
      word += text_[at_++];
    if (word.empty()) error(cat("expected a value for '", key, "'"));
    if (word == "true" || word == "false") return word;
    if (const std::string number = as_number(word); !number.empty()) return number;
    error(cat("expected a number, true, false or a quoted string, got ", word, "; write \"", word, "\""));
  }

  /// The word without '_' if it is a TOML number (nan and inf are), else "".
  static std::string as_number(const std::string& word) {
    std::string result;
    size_t i = word[0] == '+' || word[0] == '-' ? 1 : 0;
    if (word[0] == '-') result = "-";
    if (word.substr(i) == "nan" || word.substr(i) == "inf") return result + word.substr(i);
    // digits ['.' digits] [('e' | 'E') ['+' | '-'] digits], '_' only between digits
    const auto digits = [&] {
      const size_t begin = i;
      while (i < word.size() && (is_digit(word[i]) || (word[i] == '_' && i > begin && word[i - 1] != '_'))) {
        if (word[i] != '_') result += word[i];
        ++i;
      }
      return i > begin && word[i - 1] != '_';
    };
    if (!digits()) return "";
    if (i < word.size() && word[i] == '.') {
      result += word[i++];
      if (!digits()) return "";
    }
    if (i < word.size() && (word[i] == 'e' || word[i] == 'E')) {
      result += 'e';
      if (++i < word.size() && (word[i] == '+' || word[i] == '-')) {
        if (word[i] == '-') result += '-';
        ++i;
      }
      if (!digits()) return "";
    }
    return i == word.size() ? result : "";
  }

  std::string read_string() {
    const char quote = text_[at_++];
    if (text_.compare(at_, 2, std::string(2, quote)) == 0)
      error("multi-line strings are not supported; use one line");
    std::string result;
    for (;;) {
      if (at_end() || peek() == '\n') error(cat("a string has no closing ", quote));
      const char c = text_[at_++];
      if (c == quote) return result;
      if (c == '\\' && quote == '"') {
        read_escape(result);
      } else {
        result += c;
      }
    }
  }

  void read_escape(std::string& out) {
    const char c = at_end() ? '\0' : text_[at_++];
    switch (c) {
      case 'b': out += '\b'; return;
      case 't': out += '\t'; return;
      case 'n': out += '\n'; return;
      case 'f': out += '\f'; return;
      case 'r': out += '\r'; return;
      case '"': out += '"'; return;
      case '\\': out += '\\'; return;
      case 'u': append_utf8(out, read_hex(4)); return;
      case 'U': append_utf8(out, read_hex(8)); return;
      default: error(cat("unknown escape \\", c, " in a string; in '...' a backslash is only itself"));
    }
  }

  uint32_t read_hex(size_t digits) {
    uint32_t value = 0;
    const char* begin = text_.data() + at_;
    const char* end = begin + std::min(digits, text_.size() - at_);
    const auto [stop, problem] = std::from_chars(begin, end, value, 16);
    if (problem != std::errc() || stop != begin + digits || value > 0x10FFFF ||
        (value >= 0xD800 && value < 0xE000))
      error(cat("expected ", digits, " hexadecimal digits of a Unicode character after \\u or \\U"));
    at_ += digits;
    return value;
  }

  static void append_utf8(std::string& out, uint32_t c) {
    const auto byte = [&](uint32_t b) { out += static_cast<char>(static_cast<unsigned char>(b)); };
    if (c < 0x80) {
      byte(c);
    } else if (c < 0x800) {
      byte(0xC0 | c >> 6);
      byte(0x80 | (c & 0x3F));
    } else if (c < 0x10000) {
      byte(0xE0 | c >> 12);
      byte(0x80 | (c >> 6 & 0x3F));
      byte(0x80 | (c & 0x3F));
    } else {
      byte(0xF0 | c >> 18);
      byte(0x80 | (c >> 12 & 0x3F));
      byte(0x80 | (c >> 6 & 0x3F));
      byte(0x80 | (c & 0x3F));
    }
  }

  const std::string& text_;
  const std::string& source_;
  size_t at_ = 0;
  int line_ = 1;
};

}  // namespace

std::vector<TomlEntry> parse_toml(const std::string& text, const std::string& source) {
  return Reader(text, source).read();
}

std::string toml_string(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (c == '\n') {
      result += "\\n";
    } else if (byte < 0x20 || byte == 0x7F) {
      constexpr std::string_view kHex = "0123456789abcdef";
      result += "\\u00";
      result += kHex[byte >> 4];
      result += kHex[byte & 15];
    } else {
      result += c;
    }
  }
  return result + "\"";
}

std::string toml_float(double value) {
  std::array<char, 32> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  std::string text(buffer.data(), end);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

}  // namespace kinoe
