// `train_gpt inspect`: what a data file, a model directory or a checkpoint holds, and with --full whether all of it is
// sound; of two checkpoints or runs, the first difference.
#pragma once

#include "trainer/config.h"

namespace kinoe {

/// Prints what config.path is: token files (also Megatron names and globs) a Hugging Face directory, a
/// checkpoint or a run (its newest checkpoint). With config.second: what differs. Whatever is wrong is an
/// error at the end, after everything has been printed: exit code 3 for data, 4 for a model directory.
int inspect(const InspectConfig& config);

}  // namespace kinoe
