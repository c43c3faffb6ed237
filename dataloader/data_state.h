// What a checkpoint records about the data: plain values, no behaviour. Together with the number of samples consumed it
// says which tokens a run has seen and which come next.
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
  int64_t samples = 0;  // 0: shorter than seq_len + 1, skipped
};

struct SourceState {
  std::string name;
  double weight = 1;
  int64_t tokens = 0;
  int64_t samples = 0;
  std::vector<FileState> files;
};

struct DataState {
  uint64_t seed = 0;
  int64_t seq_len = 0;
  bool shuffled = true;
  std::vector<SourceState> sources;
};

}  // namespace kinoe
