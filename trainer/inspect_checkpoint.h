// What `train_gpt inspect` says about checkpoints and runs: what one holds, and where two of a kind begin to differ.
#pragma once

#include <string>

#include "trainer/files.h"

namespace kinoe {

/// Prints where the run was, its settings and what is stored. `full`: reads everything, checks every checksum and number. Throws
/// ExitCode::checkpoint where something is wrong.
void inspect_checkpoint(Files& files, const std::string& directory, bool full);

/// Prints, for weights, masters and both moments, the first element that differs and how many do. Reads and checks all of both.
/// Returns whether they are equal.
bool compare_checkpoints(Files& files, const std::string& first, const std::string& second);

/// Prints the first step whose loss or hash of the weights differs in the metrics.jsonl of two runs. Returns whether the runs
/// have the same steps, all equal.
bool compare_runs(Files& files, const std::string& first, const std::string& second);

}  // namespace kinoe
