// Dataset: all sources of a run as one endless list of samples, addressed by one integer.
//
// A sample is a window of seq_len + 1 tokens that starts at a multiple of seq_len within its shard: seq_len inputs and, shifted by
// one, seq_len targets; every token but a shard's first is a target at most once an epoch. Windows never cross shards.
//
//   sample index -> Mixture -> (source, index in it) -> epoch and position -> Permutation -> shard and window
//
// Every step is O(1) or a binary search, and constant: reading is safe from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dataloader/data_spec.h"
#include "dataloader/data_state.h"
#include "dataloader/manifest.h"
#include "dataloader/sampler.h"
#include "dataloader/shard.h"
#include "dataloader/stories.h"

namespace kinoe {

struct DatasetOptions {
  int64_t seq_len = 0;
  int64_t vocab_size = 0;
  uint64_t seed = 0;
  int64_t min_samples = 1;  // one global batch for training, 1 for validation
  bool shuffle = true;      // false: validation, natural order, no weights, every sample once
  bool document_mask = false;
  int64_t end_token = -1;  // ends a document where no manifest says which token does; -1: not known
};

class Dataset {
 public:
  /// Opens every file, compares it with the manifest beside it, skips shards of fewer than seq_len + 1 tokens with a counted
  /// warning, scans a sample of the tokens for ids >= vocab_size. Faults are data errors; weights of a validation set
  /// and a document mask where nobody knows where documents end are usage errors.
  static Dataset open(const std::vector<DataSource>& sources, const DatasetOptions& options);

  /// The built-in stories, `bytes` long at least, made in memory; one token a byte.
  static Dataset stories(StorySplit split, int64_t bytes, const DatasetOptions& options);

  [[nodiscard]] int64_t seq_len() const { return state_.seq_len; }
  [[nodiscard]] int64_t vocab_size() const { return vocab_size_; }
  [[nodiscard]] int64_t samples() const { return samples_; }  // of one epoch, all sources
  [[nodiscard]] int64_t tokens() const { return tokens_; }    // in all files, skipped ones included
  [[nodiscard]] bool document_mask() const { return state_.document_mask; }
  [[nodiscard]] bool byte_tokens() const { return byte_tokens_; }  // plain text or stories: id = byte
  /// For the user, one line each: skipped shards, invalid UTF-8, a suspicious token width.
  [[nodiscard]] const std::vector<std::string>& warnings() const { return warnings_; }
  [[nodiscard]] const DataState& state() const { return state_; }

  /// How often each source has been gone through after the first `samples` samples.
  [[nodiscard]] std::vector<double> epochs(int64_t samples) const;

  /// Where sample `index` lies. Without shuffle, index must be below samples().
  struct Place {
    int source = 0;
    int64_t epoch = 0;   // of the source
    int64_t sample = 0;  // within the source, before permutation undone: [0, source's samples)
    const Shard* shard = nullptr;
    int64_t first_token = 0;
  };
  [[nodiscard]] Place place(int64_t index) const;

  /// Token ids of sample `index`, [seq_len + 1]. An id >= vocab_size is a data error that names shard and offset.
  void read(int64_t index, int32_t* tokens) const;
  /// The documents of sample `index`, whose ids read() gave: start[t], end[t] for its seq_len inputs (Shard::find_documents).
  void find_documents(int64_t index, const int32_t* tokens, int32_t* start, int32_t* end) const;
  /// Starts reading sample `index` from disk.
  void will_need(int64_t index) const;

 private:
  struct Source {
    std::vector<Shard> shards;          // those that hold at least one sample
    std::vector<int64_t> first_sample;  // of each shard, and one past the end
    [[nodiscard]] int64_t samples() const { return first_sample.back(); }
  };
  explicit Dataset(const DatasetOptions& options);
  void add_source(std::string name, double weight, std::vector<Shard> shards, int64_t scan_budget);
  void check_manifest(const Shard& shard, const Manifest& manifest);
  void prepare_documents(Shard& shard, const Manifest* manifest, int64_t scan_budget);
  void finish(const DatasetOptions& options);

  DataState state_;
  int64_t vocab_size_ = 0;
  int64_t samples_ = 0;
  int64_t tokens_ = 0;
  bool byte_tokens_ = false;
  std::vector<Source> sources_;
  std::vector<std::string> warnings_;
  Manifests manifests_;
  int64_t end_token_ = -1;
  std::string tokenizer_from_;  // the manifest that state_.tokenizer is from
  int64_t without_end_ = 0;     // files in which no end token was seen
  std::string first_without_end_;
  Mixture mixture_{{1.0}};
};

}  // namespace kinoe
