// Replays the fuzzer's corpus: bytes that once reached something new in a reader, and those that once broke one.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "test/fuzz/readers.h"

namespace kinoe {
namespace {

std::vector<std::filesystem::path> corpus_of(std::string_view reader) {
  const auto folder = std::filesystem::path(__FILE__).parent_path() / "fuzz" / "corpus" / reader;
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

std::string contents(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class FuzzCorpusTest : public testing::TestWithParam<fuzz::Reader> {};

TEST_P(FuzzCorpusTest, EveryFileIsReadOrRefused) {
  const auto files = corpus_of(GetParam().name);
  ASSERT_FALSE(files.empty());
  for (const auto& file : files) {
    SCOPED_TRACE(file.string());
    EXPECT_NO_THROW(GetParam().read(contents(file)));
  }
}

// Seeds are files that are whole; here they are cut off.
TEST_P(FuzzCorpusTest, EveryBeginningOfASeed) {
  bool any = false;
  for (const auto& file : corpus_of(GetParam().name)) {
    if (!file.filename().string().starts_with("seed")) continue;
    any = true;
    SCOPED_TRACE(file.string());
    const std::string bytes = contents(file);
    for (size_t length = 0; length <= bytes.size(); length += length < 100 ? 1 : 17)
      ASSERT_NO_THROW(GetParam().read(std::string_view(bytes).substr(0, length))) << length;
  }
  EXPECT_TRUE(any);
}

// What is nested deeply can be parsed without recursion, but not printed, compared or copied.
TEST_P(FuzzCorpusTest, DeepNesting) {
  const std::string deep = std::string(200000, '[') + std::string(200000, ']');
  for (const std::string& text :
       {deep, "{\"model_type\":" + deep + "}", "{\"format\":" + deep + "}", "data = " + deep})
    EXPECT_NO_THROW(GetParam().read(text));
}

INSTANTIATE_TEST_SUITE_P(Readers, FuzzCorpusTest,
                         testing::ValuesIn(fuzz::readers().begin(), fuzz::readers().end()),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace kinoe
