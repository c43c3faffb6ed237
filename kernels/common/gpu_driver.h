// Why the CUDA runtime sees no GPU.
#pragma once

#include <string>

namespace kinoe {

/// "" when it sees one, or when the machine simply has none that is visible; otherwise what is wrong in words, such as a driver that
/// is older than the runtime this program was built with.
std::string gpu_driver_problem();

}  // namespace kinoe
