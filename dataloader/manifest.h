// manifest.json beside prepared shards: which tokenizer made them, and what they should be (dev/FORMATS.md, "Manifests").
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace kinoe {

struct Manifest {
  struct File {
    std::string split;  // "train" or "val"
    int64_t bytes = 0;
    int64_t tokens = 0;
    int64_t documents = 0;
    std::string hash;  // XXH3-128 of all bytes, as ContentHash::hex()
  };
  std::string path;
  std::string tokenizer_file;
  std::string tokenizer_hash;
  int64_t vocab_size = 0;
  int64_t end_token = -1;             // ends each document; -1: none
  std::map<std::string, File> files;  // by name
};

/// Reads a manifest. A JSON object without our "format" belongs to another program: nullopt. Anything else that is not as stated in
/// dev/FORMATS.md is a data error that names file and key.
std::optional<Manifest> read_manifest(const std::string& path);

/// The manifests beside data files, each read once.
class Manifests {
 public:
  /// The manifest in the directory of `file` if it lists that file, else nullptr.
  const Manifest* of(const std::string& file);

 private:
  std::map<std::string, std::optional<Manifest>> by_path_;
};

/// The part of a path after its last slash.
std::string file_name(const std::string& path);

}  // namespace kinoe
