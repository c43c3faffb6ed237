// The entry points of libFuzzer. One program serves all readers: KINOE_FUZZ_READER in the environment names one.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "test/fuzz/readers.h"

namespace {

const kinoe::fuzz::Reader* chosen = nullptr;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  const char* name = std::getenv("KINOE_FUZZ_READER");
  for (const kinoe::fuzz::Reader& reader : kinoe::fuzz::readers())
    if (name != nullptr && reader.name == name) chosen = &reader;
  if (chosen != nullptr) return 0;
  std::fprintf(stderr, "KINOE_FUZZ_READER must be one of:");
  for (const kinoe::fuzz::Reader& reader : kinoe::fuzz::readers())
    std::fprintf(stderr, " %.*s", static_cast<int>(reader.name.size()), reader.name.data());
  std::fprintf(stderr, "\n");
  std::exit(2);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  chosen->read({reinterpret_cast<const char*>(data), size});
  return 0;
}
