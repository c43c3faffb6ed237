// The index of a Megatron data set: NAME.idx, which says where in NAME.bin the tokens are and where documents begin.
//
// Layout (Megatron-LM, megatron/core/datasets/indexed_dataset.py; little-endian, nothing aligned):
//
//   9 bytes  "MMIDIDX\0\0"         1 byte   type of a token        int32[n]  tokens of each sequence
//   uint64   version, 1            uint64   n, sequences           int64[n]  where each begins in the .bin, in bytes
//                                  uint64   d + 1                  int64[d + 1]  first sequence of each document, and n
//
// The sequences, in this order, are one stream of tokens. They need not lie back to back: the stream is a list of runs that do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dataloader/mapped_file.h"
#include "dataloader/token_format.h"

namespace kinoe {

/// "NAME.idx" beside "NAME.bin".
std::string megatron_index_of(const std::string& bin_path);
/// Whether there is a file NAME.idx beside "NAME.bin".
bool has_megatron_index(const std::string& bin_path);
/// The type of the tokens, from the index's first bytes. Data error for anything but version 1 and an integer type.
TokenFormat megatron_format(const std::string& index_path);

class MegatronIndex {
 public:
  /// Reads all of NAME.idx and checks it against itself and against `bin_bytes`, the size of NAME.bin: counts against the file's
  /// size, every sequence within the .bin and after the one before it, documents in order and to the last sequence.
  MegatronIndex(const std::string& bin_path, int64_t bin_bytes);

  [[nodiscard]] const MappedFile& file() const { return file_; }
  [[nodiscard]] TokenFormat format() const { return format_; }
  [[nodiscard]] int64_t tokens() const { return tokens_; }
  [[nodiscard]] int64_t sequences() const { return sequences_; }
  [[nodiscard]] int64_t documents() const { return documents_; }
  [[nodiscard]] int64_t used_bytes() const {
    return used_bytes_;
  }  // of the .bin, before the last token's end

  /// Tokens that lie back to back in the .bin from `position` on: where, and how many.
  struct Run {
    int64_t offset = 0;  // bytes
    int64_t tokens = 0;
  };
  [[nodiscard]] Run at(int64_t position) const;

  /// Calls visit(position) for each document that begins in [first, end), in order; an empty document begins where the next one does.
  template <class Visit>
  void each_document_start(int64_t first, int64_t end, Visit visit) const {
    const MappedRead guard(file_);
    for (int64_t d = first_document(first); d < documents_; ++d) {
      const int64_t start = document_start(d);
      if (start >= end) return;
      visit(start);
    }
  }

 private:
  [[nodiscard]] int64_t first_document(
      int64_t position) const;  // the first that begins at or after `position`
  [[nodiscard]] int64_t document_start(int64_t document) const;    // its first token's position
  [[nodiscard]] int64_t size_of_sequence(int64_t sequence) const;  // tokens
  [[nodiscard]] int64_t pointer(int64_t sequence) const;           // bytes
  [[nodiscard]] int64_t first_sequence(int64_t document) const;

  struct Piece {
    int64_t position = 0;  // of its first token in the stream
    int64_t offset = 0;    // in the .bin
  };
  MappedFile file_;
  TokenFormat format_ = TokenFormat::text;
  int64_t sequences_ = 0;
  int64_t documents_ = 0;
  int64_t tokens_ = 0;
  int64_t used_bytes_ = 0;
  std::vector<Piece> pieces_;
};

}  // namespace kinoe
