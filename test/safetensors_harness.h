// What the tests of safetensors share: bytes to write, and a file by the reference writer.
#pragma once

#include <string>
#include <string_view>

#include "trainer/safetensors.h"

namespace kinoe {

/// Byte i of tensor t, as the tests write it.
inline char byte_of(size_t t, uint64_t i) { return static_cast<char>(t * 131 + i * 7 + (i >> 8)); }

inline void test_bytes(size_t t, uint64_t offset, void* to, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) static_cast<char*>(to)[i] = byte_of(t, offset + i);
}

/// What save() of the Python package safetensors 0.5 writes for these three tensors and metadata {"format": "pt"}.
inline constexpr std::string_view kReferenceHex =
    "c8000000000000007b225f5f6d657461646174615f5f223a7b22666f726d6174223a227074227d2c2262223a7b22647479706522"
    "3a2249363422"
    "2c227368617065223a5b335d2c22646174615f6f666673657473223a5b302c32345d7d2c2277223a7b226474797065223a224633"
    "32222c227368"
    "617065223a5b322c325d2c22646174615f6f666673657473223a5b32342c34305d7d2c2268223a7b226474797065223a22463136"
    "222c22736861"
    "7065223a5b315d2c22646174615f6f666673657473223a5b34302c34325d7d7d20200100000000000000ffffffffffffffff0700"
    "000000000000"
    "0000c03f000000c000000000000050400038";

inline std::string reference_file() {
  std::string bytes;
  for (size_t i = 0; i < kReferenceHex.size(); i += 2)
    bytes += static_cast<char>(std::stoi(std::string(kReferenceHex.substr(i, 2)), nullptr, 16));
  return bytes;
}

}  // namespace kinoe
