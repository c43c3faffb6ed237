// Checkpoints: a Hugging Face model directory, RUN/checkpoints/step_00001000.
//
// Nothing is ever converted: the directory loads in transformers as it stands. A checkpoint appears under its name only
// when all of it is on the disk: it is written beside it as .tmp, synced, and renamed.
#pragma once

#include <string>

#include "kernels/common/device.h"
#include "trainer/files.h"
#include "trainer/parameters.h"

namespace kinoe {

/// "RUN/checkpoints/step_00001000".
std::string checkpoint_path(const std::string& run_directory, int64_t step);

/// Bytes that write_checkpoint() will put on the disk, to a few KB.
uint64_t checkpoint_bytes(const ParameterTable& table, DType weights);

/// Writes config.json and model.safetensors (in 5 GB files with an index if larger) from the flat weights on the
/// device, fp32 or bf16. Returns the directory. Waits for the device. Throws FileError (ExitCode::checkpoint).
std::string write_checkpoint(Files& files, const std::string& run_directory, int64_t step, const Context& ctx,
                             const ModelConfig& config, const ParameterTable& table, const Tensor& weights);

/// The directory that `path` means: itself if it holds config.json, or the newest complete checkpoint of a run directory.
/// Throws ExitCode::checkpoint if there is none.
std::string find_checkpoint(Files& files, const std::string& path);

}  // namespace kinoe
