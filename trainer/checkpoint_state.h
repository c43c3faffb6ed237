// What a checkpoint says about the run besides its numbers: trainer/state.json and trainer/manifest.json.
//
// state.json is for people and for the resume: where the run was and with which settings. manifest.json says which
// bytes belong to the checkpoint; it is written last, carries its own checksum, and a directory without it is none.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dataloader/data_state.h"
#include "trainer/checkpoint_plan.h"

namespace kinoe {

inline constexpr int kCheckpointVersion = 1;  // of state.json and manifest.json

/// A setting that a resumed run changed on purpose.
struct SettingChange {
  int64_t step = 0;  // the last step with the old value
  std::string name, from, to;
};

struct TrainingState {
  int64_t step = 0;     // optimizer steps done
  int64_t samples = 0;  // sequences consumed: the position in the schedule's and the data's order
  int64_t tokens = 0;
  // Where in the data's order this training began (a run continued from weights: not 0).
  int64_t first_sample = 0;
  int64_t schedule_tokens = 0;  // at which the schedule ends
  int64_t skipped = 0;          // steps so far that were not applied
  int64_t nan = 0;
  int64_t ranks = 0;          // that saved it, for people; 0: not known
  uint64_t weights_hash = 0;  // of the masters, as the step's record has it
  std::vector<std::pair<std::string, std::string>>
      settings;  // option -> value, as the configuration file has it
  std::vector<SettingChange> changes;
  DataState data;
};

std::string to_json(const TrainingState& state);
/// Throws ExitCode::checkpoint: not JSON, a newer version, a value that is missing or absurd.
TrainingState training_state_from_json(std::string_view text, const std::string& source);

/// A file of the checkpoint: its size and a checksum of its first `covered` bytes (all of a small file, the header of
/// a safetensors file; the rest of that is covered by chunks).
struct FileRecord {
  std::string name;  // relative to the checkpoint
  int64_t bytes = 0;
  int64_t covered = 0;
  uint64_t checksum = 0;
};
struct TensorRecord {
  std::string name;
  std::vector<int64_t> shape;
  FileDType type = FileDType::f32;
  size_t file = 0;     // index into files
  int64_t offset = 0;  // of its first byte in the file
  Chunks chunks;
  std::vector<uint64_t> checksums;  // one per chunk
};
struct CheckpointManifest {
  int64_t step = 0;
  std::vector<FileRecord> files;
  std::array<std::vector<TensorRecord>, kSections.size()> sections;  // by Section; empty: absent
};

std::string to_json(const CheckpointManifest& manifest);
/// Throws ExitCode::checkpoint as above, and where it contradicts itself or its own checksum.
CheckpointManifest checkpoint_manifest_from_json(std::string_view text, const std::string& source);

}  // namespace kinoe
