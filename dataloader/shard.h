// Shard: one file of tokens, or the built-in stories, seen as an array of token ids with 64-bit positions.
//
// Formats (dev/FORMATS.md, "Token data"): llm.c shards of both versions, Megatron's NAME.bin with its NAME.idx, and plain UTF-8
// text, whose tokens are its bytes. The first bytes decide, never the name alone: a .bin with neither a known magic nor an
// index is refused, because training for days on a misread file looks like training.
//
// Files are mapped read-only, and every read of the mapping is a MappedRead, so that a file cut off meanwhile is noticed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dataloader/mapped_file.h"
#include "dataloader/megatron.h"
#include "dataloader/token_format.h"

namespace kinoe {

/// A token that does not belong: its position in the shard and its id.
struct BadToken {
  int64_t position = 0;
  int64_t id = 0;
};

class Shard {
 public:
  /// Maps the file and checks header or index, size and, for text, that it is text. Any fault is a data error that says what was
  /// expected, what was there and what the file looks like. A Megatron data set is given as NAME.bin.
  static Shard open(const std::string& path);

  /// Tokens made in memory (the built-in stories): the bytes of `text` under `name`.
  static Shard from_text(std::string name, std::string text);

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] bool in_memory() const { return file_.data() == nullptr; }
  [[nodiscard]] TokenFormat format() const { return format_; }
  [[nodiscard]] int64_t tokens() const { return tokens_; }
  [[nodiscard]] int64_t file_bytes() const { return file_bytes_; }  // with the header
  /// Of a Megatron data set.
  [[nodiscard]] const MegatronIndex* index() const { return index_ ? &*index_ : nullptr; }
  /// What was noticed on opening and is no error: invalid UTF-8 with its count, bytes that no sequence holds.
  [[nodiscard]] const std::vector<std::string>& warnings() const { return warnings_; }

  /// tokens[i] = id at first + i. Ids above 2^31 - 1 (possible only in a damaged file) come out negative.
  void read(int64_t first, int64_t count, int32_t* tokens) const;

  /// Tells the kernel that [first, first + count) is read soon; returns at once.
  void will_need(int64_t first, int64_t count) const;

  /// First token in [first, first + count) whose id is negative or >= vocab_size, if any.
  [[nodiscard]] std::optional<BadToken> find_bad_token(int64_t first, int64_t count,
                                                       int64_t vocab_size) const;

  /// The token that ends each document; -1: none is known. Set once, before reading from several threads.
  [[nodiscard]] int64_t end_token() const { return end_token_; }
  void set_end_token(int64_t id) { end_token_ = id; }
  /// Whether documents can be told apart: by the end token, or by a Megatron index.
  [[nodiscard]] bool knows_documents() const { return end_token_ >= 0 || index_; }
  /// The documents of a window whose ids [count] have been read: start[t] is the first position in the window of t's document, end[t]
  /// one past its last. An end token belongs to the document that it ends.
  void find_documents(int64_t first, int64_t count, const int32_t* tokens, int32_t* start,
                      int32_t* end) const;
  /// Whether `id` is among up to `budget` tokens, spread as scan() does.
  [[nodiscard]] bool holds_token(int64_t id, int64_t budget) const;

  /// dataloader/fingerprint.h; of a Megatron data set that of .bin and .idx in a row.
  [[nodiscard]] std::string fingerprint() const;

  /// Looks at up to `budget` tokens, spread evenly over the shard with both ends included: data error if an id is
  /// >= vocab_size or the token width cannot hold the vocabulary. Returns a warning or "".
  std::string scan(int64_t vocab_size, int64_t budget) const;

 private:
  /// visit(first byte, position, tokens) for each stretch of [first, first + count) that lies back to back.
  template <class Visit>
  void each_run(int64_t first, int64_t count, Visit visit) const;

  std::string name_;
  TokenFormat format_ = TokenFormat::text;
  int64_t tokens_ = 0;
  int64_t file_bytes_ = 0;
  int64_t end_token_ = -1;
  MappedFile file_;
  std::optional<MegatronIndex> index_;
  std::string memory_;  // of from_text
  std::vector<std::string> warnings_;
};

/// Reads the first bytes only. Data error where Shard::open would refuse the file for what it is.
TokenFormat detect_format(const std::string& path);

}  // namespace kinoe
