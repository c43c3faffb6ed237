// What goes over heartbeat lines, as bytes.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "kernels/common/check.h"
#include "trainer/launch_judge.h"

namespace kinoe {

/// The kind of a message.
enum Kind : uint32_t { kBeat = 1, kError, kVerdict, kGoodbye };

/// Of a kBeat: numbers, `what`, a 0, `saving`. What is too short is no progress at all.
std::string pack(const Progress& progress);
Progress unpack_progress(const std::string& body);

/// Of a kError or kVerdict. What is too short is an internal error.
std::string pack(ExitCode code, const std::string& text);
std::pair<ExitCode, std::string> unpack_error(const std::string& body);

}  // namespace kinoe
