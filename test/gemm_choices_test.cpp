// The files of GEMM choices: merged, read back, and never trusted further than they can be read.
#include "trainer/gemm_choices.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace kinoe {
namespace {

class GemmChoices : public testing::Test {
 protected:
  GemmChoices()
      : files(posix_files()),
        path(testing::TempDir() + "gemm_" + std::to_string(getpid()) + "/a/gemm.json") {}
  ~GemmChoices() override {
    std::filesystem::remove_all(std::filesystem::path(path).parent_path().parent_path());
  }
  void put(const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path) << text;
  }
  std::unique_ptr<Files> files;
  std::string path;
};

TEST_F(GemmChoices, AreMergedAndReadBack) {
  EXPECT_TRUE(read_gemm_choices(*files, path, "H200").empty());
  write_gemm_choices(*files, path, "H200", {{"1x2x3", "00ff", 12.5, 600.25}});
  write_gemm_choices(*files, path, "A100", {{"1x2x3", "aaaa", 1, 2}});
  write_gemm_choices(*files, path, "H200", {{"4x5x6", "0001", 3, 4}, {"1x2x3", "0002", 5, 6}});
  const auto choices = read_gemm_choices(*files, path, "H200");
  ASSERT_EQ(choices.size(), 2U);
  EXPECT_EQ(choices[0].shape, "1x2x3");
  EXPECT_EQ(choices[0].algorithm, "0002");
  EXPECT_EQ(choices[1].us, 3);
  EXPECT_EQ(read_gemm_choices(*files, path, "A100").front().algorithm, "aaaa");
  EXPECT_TRUE(read_gemm_choices(*files, path, "H100").empty());
}

TEST_F(GemmChoices, ADamagedFileIsNoneAndIsReplaced) {
  for (const char* text : {"", "{", "[1]", "{\"H200\": 3}", "{\"H200\": {\"1x2x3\": {\"algorithm\": 7}}}"}) {
    put(text);
    EXPECT_TRUE(read_gemm_choices(*files, path, "H200").empty()) << text;
    write_gemm_choices(*files, path, "H200", {{"1x2x3", "00ff", 1, 2}});
    EXPECT_EQ(read_gemm_choices(*files, path, "H200").size(), 1U) << text;
  }
}

TEST_F(GemmChoices, APathThatCannotBeWrittenIsAFileError) {
  EXPECT_THROW(write_gemm_choices(*files, "/proc/kinoe/gemm.json", "H200", {}), FileError);
}

}  // namespace
}  // namespace kinoe
