// Weights made elsewhere, or by an earlier run, into the flat range of the parameter table.
//
// Two kinds of source: a Hugging Face directory (checkpoints of this program are such directories), and a model file of
// llm.c (GPT-2 in one flat file behind a header of 256 integers). Nothing in a source is skipped in silence: what is not a
// parameter is either known by name to be no weight, or an error.
#pragma once

#include <string>

#include "trainer/files.h"
#include "trainer/model_config.h"
#include "trainer/parameters.h"

namespace kinoe {

/// Whether `path` is a file that begins with the magic of llm.c's model files.
bool is_llmc_model(Files& files, const std::string& path);

/// The model a source holds: a directory's config.json, an llm.c file's header. Throws ExitCode::checkpoint for a header that
/// can not be, ExitCode::usage for a config.json that is not understood.
ModelConfig source_config(Files& files, const std::string& source);

/// Reads all parameters into a flat fp32 range in host memory, padding zero. F32, BF16 and F16 become fp32 exactly. Missing and
/// extra tensors, other shapes and other types are one error that lists them (ExitCode::checkpoint).
void read_weights(Files& files, const std::string& source, const ParameterTable& table, float* flat);

}  // namespace kinoe
