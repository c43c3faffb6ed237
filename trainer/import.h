// Weights made elsewhere, or by an earlier run, into the flat range of the parameter table.
#pragma once

#include <string>

#include "trainer/files.h"
#include "trainer/parameters.h"

namespace kinoe {

/// Reads all parameters into a flat fp32 range in host memory, padding zero. Missing, extra and differently shaped tensors
/// are one error that lists them (ExitCode::checkpoint).
void read_weights(Files& files, const std::string& directory, const ParameterTable& table, float* flat);

}  // namespace kinoe
