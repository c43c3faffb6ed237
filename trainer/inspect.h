// `train_gpt inspect`: what a data file or a model directory holds, and with --full whether all of it is sound.
#pragma once

#include "trainer/config.h"

namespace kinoe {

/// Prints what config.path is: token files (also Megatron names and globs) or a Hugging Face directory. Whatever is wrong is an
/// error at the end, after everything has been printed: exit code 3 for data, 4 for a model directory.
int inspect(const InspectConfig& config);

}  // namespace kinoe
