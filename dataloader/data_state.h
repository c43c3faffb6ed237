// What a checkpoint records about the data: plain values, their JSON, and what differs between two of them. Together with the
// number of samples consumed it says which tokens a run has seen and which come next.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kinoe {

struct FileState {
  std::string path;
  std::string format;  // "llm.c uint16", ...
  int64_t bytes = 0;
  int64_t tokens = 0;
  int64_t samples = 0;      // 0: shorter than seq_len + 1, skipped
  std::string fingerprint;  // dataloader/fingerprint.h

  bool operator==(const FileState&) const = default;
};

struct SourceState {
  std::string name;
  double weight = 1;
  int64_t tokens = 0;
  int64_t samples = 0;
  std::vector<FileState> files;

  bool operator==(const SourceState&) const = default;
};

struct DataState {
  uint64_t seed = 0;
  int64_t seq_len = 0;
  bool shuffled = true;
  bool document_mask = false;
  std::string tokenizer;  // hash of the tokenizer's file as the data's manifest has it; "": no manifest
  std::vector<SourceState> sources;

  bool operator==(const DataState&) const = default;
};

/// JSON that data_state_from_json reads back to an equal state.
std::string to_json(const DataState& state);

/// Strict: every key, no other, each of its type and possible. Throws Error(checkpoint); `where` names the file in the message.
DataState data_state_from_json(const std::string& text, const std::string& where);

/// What differs, one line each ("data/a.bin: 2048 bytes in the checkpoint, 1024 here"); empty if a run that saw `before` can go
/// on with `now`. Where files lie and what they are called does not matter: their contents and their order do.
/// `before_is` and `now_is` are the words for the two: "in the checkpoint" and "here", or two nodes' names.
std::vector<std::string> describe_change(const DataState& before, const DataState& now,
                                         const std::string& before_is = "in the checkpoint",
                                         const std::string& now_is = "here");

/// Data error if both hashes of a tokenizer's file are known and differ. `model_tokenizer` is that of the checkpoint's tokenizer, ""
/// where it has none; `directory` names the checkpoint.
void check_tokenizer(const DataState& data, const std::string& model_tokenizer, const std::string& directory);

}  // namespace kinoe
