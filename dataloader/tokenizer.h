// Text <-> token ids. One implementation: every byte is a token, so any text has ids and any ids have a text.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kinoe {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  [[nodiscard]] virtual std::string name() const = 0;    // recorded with checkpoints and data
  [[nodiscard]] virtual int64_t vocab_size() const = 0;  // ids are in [0, vocab_size)
  [[nodiscard]] virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  /// An id outside the vocabulary is a data error.
  [[nodiscard]] virtual std::string decode(std::span<const int32_t> ids) const = 0;
};

/// "bytes", 256 ids.
std::unique_ptr<Tokenizer> byte_tokenizer();

/// `bytes` made safe for a terminal: invalid UTF-8 becomes U+FFFD, control characters but newline and tab become '?'.
std::string printable(std::string_view bytes);

/// The same in one line: newlines and tabs, which file names may hold, are written as \n and \t.
std::string one_line(std::string_view bytes);

}  // namespace kinoe
