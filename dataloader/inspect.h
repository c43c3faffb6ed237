// What is in a data file: counts, a histogram of ids, documents, what its manifest says, and whatever is wrong with it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dataloader/manifest.h"
#include "dataloader/shard.h"

namespace kinoe {

struct InspectOptions {
  bool full =
      false;  // every token, and the manifest's hash of the whole file; else tokens spread over the file
  int64_t vocab = 0;    // ids must be below it; 0: the manifest's vocabulary, if there is one
  int64_t offset = -1;  // show some tokens from here on; -1: none
};

/// How often each id occurs. Ids of kTable or more (no vocabulary is that large) and negative ones are only counted.
class Histogram {
 public:
  static constexpr int64_t kTable = int64_t{1} << 22;
  void add(const std::vector<int32_t>& ids);
  [[nodiscard]] int64_t count(int64_t id) const;
  [[nodiscard]] int64_t total() const { return total_; }
  [[nodiscard]] int64_t different() const;           // ids below kTable that occur
  [[nodiscard]] int64_t lowest() const;              // -1: none
  [[nodiscard]] int64_t highest() const;             // below kTable; -1: none
  [[nodiscard]] int64_t at_least(int64_t id) const;  // tokens whose id is negative or >= id
  /// The `n` most frequent ids with their counts; of equal counts the smaller id first.
  [[nodiscard]] std::vector<std::pair<int64_t, int64_t>> most_frequent(size_t n) const;
  void add(const Histogram& other);

 private:
  std::vector<int64_t> counts_;
  int64_t total_ = 0;
  int64_t beyond_ = 0;
};

struct DataReport {
  std::string path;
  TokenFormat format = TokenFormat::text;
  int64_t bytes = 0;
  int64_t tokens = 0;
  Histogram histogram;
  int64_t vocab = 0;       // what ids were compared with; 0: nothing
  int64_t sequences = 0;   // of a Megatron index
  int64_t documents = -1;  // of a Megatron index, or end tokens counted in a full look; -1: not known
  int64_t end_token = -1;  // from the manifest
  std::optional<Manifest> manifest;  // that lists the file
  bool hash_compared = false;
  std::string fingerprint;
  std::vector<int32_t> shown;  // ids from options.offset on
  std::vector<std::string> warnings;
  std::vector<std::string> problems;  // one line each; empty: nothing is wrong with what was looked at
};

/// Opens the file as a run would (its faults are data errors) and looks into it. An offset beyond the end is a usage error.
DataReport inspect_data(const std::string& file, const InspectOptions& options);

}  // namespace kinoe
