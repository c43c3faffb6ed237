// How a process says why it ends, and ends.
#pragma once

#include <exception>
#include <string>

#include "kernels/common/check.h"

namespace kinoe {

/// What a user is told of an exception: an Error as it is; a lack of memory and a limit of threads are the machine's; all
/// else is a bug.
Error error_of(const std::exception& exception);
/// Prints "train_gpt: error: " and the text, one line, in one write.
void print_error(const std::string& text) noexcept;
/// Ends the process whatever state it is in; what stands in stdio's buffers is written if that goes quickly.
[[noreturn]] void end_process(ExitCode code) noexcept;

}  // namespace kinoe
