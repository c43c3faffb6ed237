// The sections of a checkpoint laid out as safetensors files.
#include "trainer/checkpoint_plan.h"

#include <xxhash.h>

#include <algorithm>

namespace kinoe {

const char* name_of(Section section) {
  switch (section) {
    case Section::weights: return "weights";
    case Section::masters: return "masters";
    case Section::m: return "m";
    case Section::v: return "v";
  }
  return "?";
}

Chunks chunks_of(const Parameter& parameter) {
  return {parameter.size, std::min(parameter.size, kChunk - parameter.offset % kChunk)};
}

const CheckpointPlan::Part* CheckpointPlan::find(Section section) const {
  const auto found =
      std::find_if(parts.begin(), parts.end(), [&](const Part& part) { return part.section == section; });
  return found == parts.end() ? nullptr : &*found;
}

uint64_t CheckpointPlan::bytes() const {
  uint64_t total = 0;
  for (const Part& part : parts) total += part.files.bytes();
  return total;
}

CheckpointPlan plan_checkpoint(const ParameterTable& table, DType weights, DType moments, int64_t step,
                               uint64_t shard_bytes) {
  CheckpointPlan plan;
  plan.step = step;
  size_t chunk = 0;
  for (const Parameter& p : table.parameters()) {
    plan.chunk_of.push_back(chunk);
    chunk += static_cast<size_t>(chunks_of(p).count());
  }
  plan.chunk_of.push_back(chunk);

  const auto add = [&](Section section, DType type, const std::string& directory, const std::string& stem) {
    std::vector<TensorInfo> tensors;
    for (const Parameter& p : table.parameters()) tensors.push_back({p.name, to_file_dtype(type), p.shape});
    plan.parts.push_back({section, to_file_dtype(type), directory,
                          plan_safetensors(tensors, stem, shard_bytes, {{"step", std::to_string(step)}}),
                          plan.parts.size() * chunk});
  };
  add(Section::weights, weights, "", "model");
  if (weights != DType::f32) add(Section::masters, DType::f32, "trainer", "optimizer-master");
  add(Section::m, moments, "trainer", "optimizer-m");
  add(Section::v, moments, "trainer", "optimizer-v");
  return plan;
}

uint64_t checksum(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }

}  // namespace kinoe
