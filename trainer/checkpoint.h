// The checkpoints of a run: which there are, which one a path means.
//
// A checkpoint is a Hugging Face model directory, RUN/checkpoints/step_00001000, that loads in transformers as it stands;
// what training needs besides lies in its folder trainer/. Nothing is ever converted. The rest of the module:
// checkpoint_plan.h (layout), checkpoint_write.h, checkpoint_read.h, checkpoint_saver.h (in the background).
#pragma once

#include <string>
#include <vector>

#include "trainer/files.h"

namespace kinoe {

/// "RUN/checkpoints/step_00001000".
std::string checkpoint_path(const std::string& run_directory, int64_t step);

/// Steps of the complete checkpoints (those with a manifest), ascending.
std::vector<int64_t> checkpoint_steps(Files& files, const std::string& run_directory);

/// The directory of weights that `path` means: itself if it holds config.json, or the newest complete checkpoint of a run
/// directory. Throws ExitCode::checkpoint if there is none.
std::string find_checkpoint(Files& files, const std::string& path);

/// What RUN/checkpoints/latest says when it is not the newest complete checkpoint: a sentence for the user, "" when it is.
/// The file is a hint for people and scripts; this program goes by the manifests.
std::string check_latest(Files& files, const std::string& run_directory);

}  // namespace kinoe
