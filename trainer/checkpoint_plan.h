// Where every byte of a checkpoint goes, decided before anything is written.
//
// A plan follows from the model, the number types and the step alone, never from the number of ranks: whoever holds a
// part of the flat range knows which bytes of which files are his. Checksums are kept per chunk, the unit of sharding
// (kChunk elements of the flat range, cut at the ends of tensors), so that each of them is computed by one rank.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "kernels/common/dtype.h"
#include "kernels/global_norm.h"
#include "trainer/parameters.h"
#include "trainer/safetensors.h"

namespace kinoe {

/// What is stored of every parameter.
enum class Section : uint8_t {
  weights,  // model.safetensors: bf16, or fp32 where the weights are the masters
  masters,  // trainer/optimizer-master: fp32; absent where the weights are the masters
  m,        // trainer/optimizer-m: fp32 or bf16
  v,        // trainer/optimizer-v
};
inline constexpr std::array<Section, 4> kSections = {Section::weights, Section::masters, Section::m,
                                                     Section::v};
const char* name_of(Section section);  // "weights", "masters", "m", "v"

/// The chunks of one tensor: `first` elements, then kChunk each, the last one whatever is left.
struct Chunks {
  int64_t size = 0;   // of the tensor
  int64_t first = 0;  // elements of the first chunk
  [[nodiscard]] int64_t count() const { return 1 + (size - first + kChunk - 1) / kChunk; }
  [[nodiscard]] int64_t begin(int64_t chunk) const { return chunk == 0 ? 0 : first + (chunk - 1) * kChunk; }
  [[nodiscard]] int64_t end(int64_t chunk) const { return std::min(size, first + chunk * kChunk); }
  [[nodiscard]] int64_t holding(int64_t element) const {
    return element < first ? 0 : 1 + (element - first) / kChunk;
  }
};
Chunks chunks_of(const Parameter& parameter);

struct CheckpointPlan {
  struct Part {
    Section section = Section::weights;
    FileDType type = FileDType::f32;
    std::string directory;   // "" or "trainer", below the checkpoint's
    SafetensorsPlan files;   // tensor i is parameter i of the table
    size_t first_chunk = 0;  // its tensors' chunks in the vector of all checksums
  };
  int64_t step = 0;
  std::vector<Part> parts;
  std::vector<size_t>
      chunk_of;  // parameter i's first chunk, relative to its part's; one more: chunks of a part

  [[nodiscard]] const Part* find(Section section) const;
  [[nodiscard]] size_t chunks() const { return parts.size() * chunk_of.back(); }
  [[nodiscard]] uint64_t bytes() const;  // of all tensors and headers
};

/// `weights`: bf16 or fp32, `moments`: fp32 or bf16.
CheckpointPlan plan_checkpoint(const ParameterTable& table, DType weights, DType moments, int64_t step,
                               uint64_t shard_bytes = kShardBytes);

uint64_t checksum(const void* data, size_t bytes);  // XXH3, 64 bits

}  // namespace kinoe
