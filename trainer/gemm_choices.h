// Which matrix-product algorithms a run uses, kept in files: in the run directory, so that a run can be repeated to the bit,
// and in the user's cache, so that the next start does not measure again.
//
// A file is JSON: { "<GPU>, <library version>": { "<shape>": { "algorithm": hex, "us": n, "tflops": n } } }.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "kernels/common/device.h"
#include "trainer/files.h"

namespace kinoe {

/// $XDG_CACHE_HOME/kinoe/gemm.json, else ~/.cache/kinoe/gemm.json; "" where neither is known.
std::string gemm_cache_path();

/// Choices stored under `key`. None if the file is absent or damaged: what is missing is measured again.
std::vector<GemmChoice> read_gemm_choices(Files& files, const std::string& path, const std::string& key);

/// Stores choices under `key`, beside what the file has for other keys and shapes. Throws FileError.
void write_gemm_choices(Files& files, const std::string& path, const std::string& key,
                        const std::vector<GemmChoice>& choices);

/// Choices as text and back, for other ranks.
std::string to_text(const std::vector<GemmChoice>& choices);
std::vector<GemmChoice> gemm_choices_from_text(const std::string& text);

/// The algorithms of one run: taken from what the run goes on from and from the user's cache, kept in the run directory and in
/// the cache. On the CPU there are none and nothing happens.
class GemmRecord {
 public:
  /// `checkpoint`: what a run goes on from, whose choices count more than the cache's; "" for a new run.
  GemmRecord(Files& files, Device& device, std::string run, const std::string& checkpoint);

  /// Writes what is new. A cache that cannot be written costs the next start some seconds, no more.
  void save();
  void print(std::FILE* out) const;

 private:
  Files& files_;
  Device& device_;
  std::string run_;
  size_t saved_ = 0;
};

}  // namespace kinoe
