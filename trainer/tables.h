// The tables a run prints before it starts: what will be trained on what, and the memory it takes.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "dataloader/dataset.h"
#include "kernels/common/arena.h"
#include "kernels/common/device.h"
#include "trainer/config.h"
#include "trainer/model_config.h"

namespace kinoe {

std::string grouped(int64_t n);                           // "1,234,567"
std::string counted(int64_t n, const std::string& noun);  // "1 sequence", "2,000 sequences"
void print_row(const std::string& name, const std::string& value);
std::string mebibytes(size_t bytes);   // "12.3 MiB"
std::string duration(double seconds);  // "0.42 ms", "420 ms", "42.1 s"

/// How many processes a run has.
struct RankCounts {
  int ranks = 1;
  int here = 1;  // on this host
  int hosts = 1;
};

/// `config` is resolved. `validation` may be null. Ranks are mentioned where there are several, or might be.
void print_run(std::FILE* out, const RunConfig& config, const ModelConfig& model, const DeviceInfo& device,
               const RankCounts& ranks, const Dataset& training, const Dataset* validation);

/// The memory a run will hold on its device, row by row.
struct MemoryPlan {
  std::vector<Arena::Group> rows;
  size_t total = 0;
  std::vector<Arena::Group> host;  // page-locked buffers, where those are not the device's memory
};
/// `held`: what the program holds before the plan is carried out (context and libraries; the program itself on the CPU).
MemoryPlan plan_memory(const Arena& plan, const Device& device, size_t held,
                       const std::vector<Arena::Group>& host);
/// `ranks`: of the run; what is shown is one rank's memory.
void print_memory(std::FILE* out, const MemoryPlan& plan, int ranks);

}  // namespace kinoe
