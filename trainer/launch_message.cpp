// Messages stay between ranks that run the same binary: numbers go as they lie in memory.
#include "trainer/launch_message.h"

#include <algorithm>
#include <cstring>

namespace kinoe {
namespace {

struct Beat {
  uint64_t operations, phases, saves;
  double idle_s, limit_s;
};

}  // namespace

std::string pack(const Progress& progress) {
  const Beat beat{progress.operations, progress.phases, progress.saves, progress.idle_s, progress.limit_s};
  return std::string(reinterpret_cast<const char*>(&beat), sizeof(beat)) + progress.what + '\0' +
         progress.saving;
}

Progress unpack_progress(const std::string& body) {
  Beat beat{};
  if (body.size() < sizeof(beat)) return {};
  std::memcpy(&beat, body.data(), sizeof(beat));
  const size_t end = std::min(body.find('\0', sizeof(beat)), body.size());
  return {beat.operations,
          beat.phases,
          beat.idle_s,
          beat.limit_s,
          body.substr(sizeof(beat), end - sizeof(beat)),
          beat.saves,
          body.substr(std::min(end + 1, body.size()))};
}

std::string pack(ExitCode code, const std::string& text) {
  const auto number = static_cast<int32_t>(code);
  return std::string(reinterpret_cast<const char*>(&number), sizeof(number)) + text;
}

std::pair<ExitCode, std::string> unpack_error(const std::string& body) {
  int32_t number = static_cast<int32_t>(ExitCode::internal);
  if (body.size() < sizeof(number)) return {ExitCode::internal, ""};
  std::memcpy(&number, body.data(), sizeof(number));
  return {static_cast<ExitCode>(number), body.substr(sizeof(number))};
}

}  // namespace kinoe
