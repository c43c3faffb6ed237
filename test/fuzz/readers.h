// Every reader of files that others made, as one function each that takes the file's bytes.
//
// A reader must either accept or throw kinoe::Error of its class with one short line. Whatever else happens with any
// bytes (another exception, another class, a sanitizer's report, seconds of work) is a fault of the reader. libFuzzer looks for
// such bytes (test/fuzz/fuzz.cpp, `make fuzz`); what it kept is replayed by test/fuzz_test.cpp.
#pragma once

#include <span>
#include <string_view>

namespace kinoe::fuzz {

struct Reader {
  std::string_view name;  // its corpus is test/fuzz/corpus/<name>
  void (*read)(std::string_view bytes);
};

std::span<const Reader> readers();

}  // namespace kinoe::fuzz
