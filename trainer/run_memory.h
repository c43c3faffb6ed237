// All device memory of a run, from one arena, and whether there is enough of it.
#pragma once

#include <cstdio>
#include <optional>

#include "trainer/model.h"
#include "trainer/optimizer.h"
#include "trainer/run_setup.h"
#include "trainer/tables.h"

namespace kinoe {

struct RunMemory {
  ParameterMemory parameters;
  Activations acts;
  std::optional<Activations> eval;
  Tensor sampling;
};

OptimizerSettings optimizer_settings(const RunConfig& config);

RunMemory take_run_memory(Arena& arena, Model& model, const RunConfig& config, const ShardLayout& layout,
                          bool with_eval);

/// Prints the run and its memory to `out`, and ends with a configuration that fits where this one does not (ExitCode::usage).
/// `held_before`: what the program held before; `checkpoint_bytes`: host memory for saving and loading checkpoints;
/// on CPUs the ranks of a host share its memory. All ranks of a host ask before any of them takes its own.
MemoryPlan check_memory(std::FILE* out, const RunSetup& setup, Model& model, const ShardLayout& layout,
                        const Device& device, size_t held_before, const Arena& planned,
                        size_t checkpoint_bytes, const RankCounts& ranks);

}  // namespace kinoe
