// Shard: one file of tokens, or the built-in stories, seen as an array of token ids with 64-bit positions.
//
// Formats (dev/FORMATS.md, "Token data"): llm.c shards of both versions and plain UTF-8 text, whose tokens are its bytes. The first
// bytes decide, never the name alone: a .bin without a known magic is refused, because training for days on a
// misread file looks like training.
//
// Files are mapped read-only. All reads of the mapping go through read(), will_need() and the scans, so that a file truncated under
// the mapping has one place to be noticed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kinoe {

enum class TokenFormat : uint8_t { llmc_uint16, llmc_uint32, text };

/// "llm.c uint16", "llm.c uint32", "text".
const char* name_of(TokenFormat format);

/// A read-only mapping of a whole file.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] const unsigned char* data() const { return data_; }
  [[nodiscard]] int64_t bytes() const { return bytes_; }

 private:
  const unsigned char* data_ = nullptr;
  int64_t bytes_ = 0;
};

/// A token that does not belong: its position in the shard and its id.
struct BadToken {
  int64_t position = 0;
  int64_t id = 0;
};

class Shard {
 public:
  /// Maps the file and checks header, size and, for text, that it is text. Any fault is a data error that says what was
  /// expected, what was there and what the file looks like.
  static Shard open(const std::string& path);

  /// Tokens made in memory (the built-in stories): the bytes of `text` under `name`.
  static Shard from_text(std::string name, std::string text);

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] TokenFormat format() const { return format_; }
  [[nodiscard]] int64_t tokens() const { return tokens_; }
  [[nodiscard]] int64_t file_bytes() const { return file_bytes_; }  // with the header
  /// What was noticed on opening and is no error: invalid UTF-8 with its count.
  [[nodiscard]] const std::vector<std::string>& warnings() const { return warnings_; }

  /// tokens[i] = id at first + i. Ids above 2^31 - 1 (possible only in a damaged uint32 shard) come out negative.
  void read(int64_t first, int64_t count, int32_t* tokens) const;

  /// Tells the kernel that [first, first + count) is read soon; returns at once.
  void will_need(int64_t first, int64_t count) const;

  /// First token in [first, first + count) whose id is >= vocab_size, if any.
  [[nodiscard]] std::optional<BadToken> find_bad_token(int64_t first, int64_t count,
                                                       int64_t vocab_size) const;

  /// Looks at up to `budget` tokens, spread evenly over the shard with both ends included: data error if an id is
  /// >= vocab_size or the token width cannot hold the vocabulary. Returns a warning or "".
  std::string scan(int64_t vocab_size, int64_t budget) const;

 private:
  [[nodiscard]] const unsigned char* payload() const;

  std::string name_;
  TokenFormat format_ = TokenFormat::text;
  int64_t tokens_ = 0;
  int64_t file_bytes_ = 0;
  MappedFile file_;
  std::string memory_;  // of from_text
  std::vector<std::string> warnings_;
};

/// Reads the first bytes only. Data error where Shard::open would refuse the file for what it is.
TokenFormat detect_format(const std::string& path);

}  // namespace kinoe
