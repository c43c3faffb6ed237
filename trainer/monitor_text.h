// printf into a std::string, for the monitor's lines and pictures: with g++ 12 there is no std::format.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <string>

namespace kinoe {

/// At most 511 characters; what is longer is cut off.
__attribute__((format(printf, 1, 2))) inline std::string format(const char* pattern, ...) {
  char text[512];
  va_list args;
  va_start(args, pattern);
  std::vsnprintf(text, sizeof text, pattern, args);
  va_end(args);
  return text;
}

}  // namespace kinoe
