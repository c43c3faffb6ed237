// Fingerprints of files: whether a data file is still the one that was trained on, without reading terabytes at every start.
//
// A fingerprint is XXH3-128 of the file's size (uint64, little-endian) followed by 16 blocks of 64 KiB: block i begins at byte
// floor(i (size - 64 KiB) / 15), so the first and the last are the file's ends. A file of up to 1 MiB is hashed whole. It sees files that were
// mixed up, cut off, written again or made anew; a change of a few bytes in a large file it sees only by luck, and
// `train_gpt inspect --full` for certain where there is a manifest.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

struct XXH3_state_s;

namespace kinoe {

/// XXH3-128, seed 0, of bytes that come in pieces.
class ContentHash {
 public:
  ContentHash();
  void add(const void* data, int64_t bytes);
  [[nodiscard]] std::string hex() const;  // 32 digits, lower case, canonical order

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

/// Adds size and blocks as above. Several files have the fingerprint of their sizes and blocks in a row.
void add_fingerprint(ContentHash& hash, const unsigned char* data, int64_t bytes);

}  // namespace kinoe
