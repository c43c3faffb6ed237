// Reading a checkpoint: nothing is used before it is checked.
//
// Opening it checks what is small: the manifest's own checksum, that every file is there with its size and no other, the headers,
// state.json, config.json. Reading a part of the flat range checks the checksums of the chunks it touches and the
// numbers themselves, so that every byte has been checked when all ranks have read what they own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "trainer/checkpoint_state.h"
#include "trainer/files.h"
#include "trainer/files_threads.h"
#include "trainer/model_config.h"
#include "trainer/parameters.h"

namespace kinoe {

/// What to do about a damaged one, at the end of a message.
inline constexpr const char* kUseOlder = "; use an older checkpoint, or --resume latest-valid";

class CheckpointReader {
 public:
  /// Throws ExitCode::checkpoint with file and reason, as everything here does.
  CheckpointReader(Files& files, std::string directory);

  [[nodiscard]] const std::string& directory() const { return directory_; }
  [[nodiscard]] const TrainingState& state() const { return state_; }
  [[nodiscard]] const ModelConfig& model() const { return model_; }
  [[nodiscard]] const CheckpointManifest& manifest() const { return manifest_; }
  /// Contents of a small file of the checkpoint ("trainer/gemm.json"); "" where there is none.
  [[nodiscard]] std::string small_file(const std::string& name) const;

  /// The model that training wants is the one stored: every differing field, and every tensor by name and shape.
  void check_model(const ModelConfig& wanted, const ParameterTable& table) const;
  /// The tensors alone.
  void check_tensors(const ParameterTable& table) const;

  /// Elements [begin, begin + count) of the flat range of a section as fp32, zeros in the padding. Masters are those of
  /// Section::weights where that is fp32; otherwise the bf16 weights are checked to be their rounding. Finite all,
  /// and v not negative. Returns, for masters, the sum of the elements' hashes (kernels/adamw.h): over all ranges it is
  /// the state's weights_hash. Any number of threads may read at once.
  uint64_t read(Section section, const ParameterTable& table, int64_t begin, int64_t count, float* out) const;

  /// What read() is asked for.
  struct Block {
    Section section = Section::masters;
    int64_t begin = 0, count = 0;
  };
  static constexpr int64_t kBlockElements = kChunk << 7;  // 8 MiB of fp32

  /// Calls work(thread, i) for each block as share_out() does, and asks the disk ahead for the blocks that come next. What it throws
  /// is the first damage in the order of the blocks.
  void share_out_blocks(const ParameterTable& table, const std::vector<Block>& blocks, int threads,
                        const std::function<void(int, size_t)>& work) const;
  /// read() of a whole section by `threads` threads. `out` has flat_size() elements.
  uint64_t read_all(Section section, const ParameterTable& table, int threads, float* out) const;

  /// Reads everything once and compares the masters' hash with the state's.
  void verify(int threads = reading_threads(1), int64_t block_elements = kBlockElements) const;

 private:
  struct Piece;  // consecutive chunks of one tensor
  void check_files() const;
  [[nodiscard]] Section stored(Section section) const;
  void expect(const ParameterTable& table, const Block& block) const;
  uint64_t read_piece(Section section, const Piece& piece, std::vector<char>& scratch) const;
  void read_checked(const TensorRecord& tensor, int64_t first, int64_t last, char* bytes) const;
  [[nodiscard]] const TensorRecord& record(Section section, const Parameter& parameter) const;
  [[noreturn]] void damaged(const TensorRecord& tensor, const std::string& what) const;

  std::string directory_;
  CheckpointManifest manifest_;
  TrainingState state_;
  ModelConfig model_;
  Files& all_files_;
  std::vector<std::unique_ptr<File>> files_;  // by index of the manifest
  std::array<std::vector<std::pair<std::string, size_t>>, kSections.size()> by_name_;  // sorted
};

}  // namespace kinoe
