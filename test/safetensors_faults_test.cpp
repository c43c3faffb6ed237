// Every way a safetensors file, its index or its directory can lie.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "test/faulty_files.h"
#include "test/safetensors_harness.h"

namespace kinoe {
namespace {

std::string file_of(const std::string& header, size_t data_bytes) {
  std::string bytes(8, '\0');
  const uint64_t length = header.size();
  std::memcpy(bytes.data(), &length, 8);
  return bytes + header + std::string(data_bytes, 'x');
}

void expect_refused(const std::string& contents, const std::vector<std::string>& parts) {
  const FreshDirectory dir;
  put_file(dir / "bad.safetensors", contents);
  std::vector<std::string> all = parts;
  all.push_back("bad.safetensors");
  SCOPED_TRACE(contents.substr(0, 200));
  const std::unique_ptr<Files> files = posix_files();
  expect_error(ExitCode::checkpoint, all, [&] { SafetensorsReader(*files, dir / "bad.safetensors"); });
}

/// A header with one tensor "w" of this description over 16 bytes of data.
void expect_entry_refused(const std::string& entry, const std::vector<std::string>& parts) {
  std::vector<std::string> all = parts;
  all.push_back("\"w\"");
  expect_refused(file_of("{\"w\":" + entry + "}", 16), all);
}

TEST(SafetensorsFaults, NotThisFormat) {
  expect_refused("", {"0 bytes", "truncated"});
  expect_refused("1234567", {"7 bytes"});
  expect_refused(file_of("", 0), {"no JSON header"});
  expect_refused("version https://git-lfs.github.com/spec/v1\n", {"Git LFS", "git lfs pull"});
  expect_refused("PK\x03\x04 and so on", {"zip archive"});
  expect_refused(std::string("\x93NUMPY\x01\x00 and some more text", 27), {"header is said to be"});
  expect_refused(file_of("[1,2]", 0), {"no JSON header"});
  expect_refused(file_of("{\"w\":", 0), {"not valid JSON"});
  expect_refused(file_of("{} x", 0), {"not valid JSON"});
  expect_refused(file_of("{\"\xff\":1}", 0), {"not valid JSON"});
}

TEST(SafetensorsFaults, AbsurdHeaderLengthIsNotAllocated) {
  for (const uint64_t length : {uint64_t{33}, uint64_t{1} << 40, ~uint64_t{0}, ~uint64_t{0} - 8}) {
    std::string bytes(40, ' ');
    std::memcpy(bytes.data(), &length, 8);
    bytes[8] = '{';
    expect_refused(bytes, {std::to_string(length), "holds 40"});
  }
}

TEST(SafetensorsFaults, HeaderOverTheLimitOfTheFormat) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  const std::unique_ptr<File> file = files->create(dir / "bad.safetensors");
  const uint64_t length = 100'000'001;
  file->write_at(0, &length, 8);
  file->resize(uint64_t{1} << 30);  // sparse
  expect_error(ExitCode::checkpoint, {"bad.safetensors", "limit"},
               [&] { SafetensorsReader(*files, dir / "bad.safetensors"); });
}

TEST(SafetensorsFaults, Entries) {
  expect_entry_refused("3", {"object"});
  expect_entry_refused(R"({"shape":[4],"data_offsets":[0,16]})", {"dtype is missing"});
  expect_entry_refused(R"({"dtype":"F32","data_offsets":[0,16]})", {"shape is missing"});
  expect_entry_refused(R"({"dtype":"F32","shape":[4]})", {"data_offsets is missing"});
  expect_entry_refused(R"({"dtype":"F31","shape":[4],"data_offsets":[0,16]})",
                       {"dtype \"F31\" is not known"});
  expect_entry_refused(R"({"dtype":7,"shape":[4],"data_offsets":[0,16]})", {"dtype"});
  expect_entry_refused(R"({"dtype":"F32","shape":[4],"data_offsets":[0,16],"stride":[1]})", {"stride"});
  expect_entry_refused(R"({"dtype":"F32","shape":4,"data_offsets":[0,16]})", {"shape must be an array"});
  expect_entry_refused(R"({"dtype":"F32","shape":[-4],"data_offsets":[0,16]})", {"shape", "-4"});
  expect_entry_refused(R"({"dtype":"F32","shape":[4.0],"data_offsets":[0,16]})", {"shape", "4.0"});
  expect_entry_refused(R"({"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,16]})", {"shape"});
  expect_entry_refused(R"({"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,16]})", {"shape"});
  expect_entry_refused(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,16]})",
                       {"4611686018427387904"});
  // 4 x (2^62 + 4) is 16 modulo 2^64, and 16 bytes are there.
  expect_entry_refused(R"({"dtype":"F32","shape":[4611686018427387908],"data_offsets":[0,16]})",
                       {"2^63 bytes"});
  expect_entry_refused(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,16]})",
                       {"4294967296"});
  expect_entry_refused(R"({"dtype":"F32","shape":[1000000000],"data_offsets":[0,4000000000]})",
                       {"not in the file", "16 bytes of data"});
  expect_entry_refused(R"({"dtype":"F32","shape":[5],"data_offsets":[0,16]})", {"takes 20 bytes", "16"});
  expect_entry_refused(R"({"dtype":"F32","shape":[3],"data_offsets":[0,16]})", {"takes 12 bytes", "16"});
  expect_entry_refused(R"({"dtype":"F32","shape":[4],"data_offsets":[0]})", {"data_offsets"});
  expect_entry_refused(R"({"dtype":"F32","shape":[4],"data_offsets":[16,0]})", {"data_offsets"});
  expect_entry_refused(R"({"dtype":"F32","shape":[4],"data_offsets":[1,17]})", {"not in the file"});
  expect_entry_refused(R"({"dtype":"F32","shape":[3],"data_offsets":[4,16]})", {"gap"});
}

TEST(SafetensorsFaults, GapsOverlapsAndLeftovers) {
  const std::string a = R"("a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]})";
  const auto b = [](int begin, int end) {
    return cat(R"("b":{"dtype":"U8","shape":[)", end - begin, R"(],"data_offsets":[)", begin, ",", end, "]}");
  };
  const std::unique_ptr<Files> files = posix_files();
  const FreshDirectory dir;
  put_file(dir / "good.safetensors", file_of("{" + b(8, 16) + "," + a + "}", 16));
  EXPECT_EQ(SafetensorsReader(*files, dir / "good.safetensors").tensors()[0].info.name, "a")
      << "in the order of the bytes";
  expect_refused(file_of("{" + a + "," + b(7, 16) + "}", 16), {"\"b\"", "inside the tensor before it"});
  expect_refused(file_of("{" + a + "," + b(0, 8) + "}", 16), {"inside the tensor before it"});
  expect_refused(file_of("{" + a + "," + b(9, 16) + "}", 16), {"\"b\"", "after a gap"});
  expect_refused(file_of("{" + a + "," + b(8, 16) + "}", 17), {"1 bytes after the last tensor"});
  expect_refused(file_of("{" + a + "," + b(8, 16) + "}", 15), {"\"b\"", "truncated"});
  expect_refused(file_of("{}", 1), {"1 bytes after"});
}

TEST(SafetensorsFaults, DuplicateKeysAtEveryLevel) {
  const std::string a = R"("a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]})";
  expect_refused(file_of("{" + a + "," + a + "}", 8), {"\"a\" occurs twice"});
  expect_refused(file_of(R"({"a":{"dtype":"U8","shape":[8],"shape":[8],"data_offsets":[0,8]}})", 8),
                 {"\"shape\" occurs twice"});
  expect_refused(file_of(R"({"__metadata__":{"x":"1","x":"2"}})", 0), {"\"x\" occurs twice"});
}

TEST(SafetensorsFaults, MetadataMustBeStrings) {
  expect_refused(file_of(R"({"__metadata__":{"x":1}})", 0), {"__metadata__", "\"x\""});
  expect_refused(file_of(R"({"__metadata__":[]})", 0), {"__metadata__"});
}

TEST(SafetensorsFaults, DeepNestingAndHugeNumbers) {
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "{\"a\":";
  expect_refused(file_of(deep, 0), {"nested"});
  expect_refused(file_of("{\"a\":" + std::string(100000, '['), 0), {"nested"});
  expect_refused(file_of("{\"a\":1e999}", 0), {"number"});
}

TEST(SafetensorsFaults, NamesInMessagesAreOneShortLine) {
  const FreshDirectory dir;
  put_file(dir / "bad.safetensors",
           file_of(R"({"evil\nname\u001b[31m)" + std::string(5000, 'z') + R"(":3})", 0));
  const std::unique_ptr<Files> files = posix_files();
  try {
    SafetensorsReader(*files, dir / "bad.safetensors");
    FAIL();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.find_first_of("\n\x1b"), std::string::npos) << message;
    EXPECT_NE(message.find("evil?name?[31m"), std::string::npos) << message;
    EXPECT_LT(message.size(), 500U);
  }
}

TEST(SafetensorsFaults, EveryTruncationIsRefused) {
  const std::string whole = reference_file();
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    put_file(dir / "cut.safetensors", whole.substr(0, bytes));
    expect_error(ExitCode::checkpoint, {"cut.safetensors"},
                 [&] { SafetensorsReader(*files, dir / "cut.safetensors"); });
  }
}

TEST(SafetensorsFaults, AnyDamagedHeaderByteIsRefusedOrHarmless) {
  // Whatever a flipped byte makes of the header, reading it either ends with exit code 4 or yields tensors inside the file.
  const std::string whole = reference_file();
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  int refused = 0;
  for (size_t i = 0; i < 208; ++i)
    for (const int mask : {0x01, 0x90}) {
      std::string damaged = whole;
      damaged[i] = static_cast<char>(damaged[i] ^ mask);
      put_file(dir / "damaged.safetensors", damaged);
      try {
        const SafetensorsReader reader(*files, dir / "damaged.safetensors");
        for (const TensorPlace& place : reader.tensors()) EXPECT_LE(place.offset + place.bytes, whole.size());
      } catch (const Error& error) {
        EXPECT_EQ(error.code, ExitCode::checkpoint) << error.what();
        ++refused;
      }
    }
  EXPECT_GT(refused, 300);
}

class SafetensorsDirectory : public testing::Test {
 protected:
  SafetensorsDirectory() : files(posix_files()) {
    const std::vector<TensorInfo> tensors = {{"a", FileDType::u8, {600}}, {"b", FileDType::u8, {600}}};
    write_safetensors(*files, dir.path(), plan_safetensors(tensors, "model", 1024), test_bytes);
  }
  void expect_index_refused(const std::string& contents, const std::vector<std::string>& parts) {
    put_file(dir / "model.safetensors.index.json", contents);
    expect_error(ExitCode::checkpoint, parts, [&] { SafetensorsReader(*files, dir.path()); });
  }
  FreshDirectory dir;
  std::unique_ptr<Files> files;
  const std::string one = "model-00001-of-00002.safetensors", two = "model-00002-of-00002.safetensors";
};

TEST_F(SafetensorsDirectory, IndexAndFilesMustAgree) {
  EXPECT_EQ(SafetensorsReader(*files, dir.path()).tensors().size(), 2U);
  const auto index = [](const std::vector<std::pair<std::string, std::string>>& entries) {
    nlohmann::json json;
    for (const auto& [tensor, file] : entries) json["weight_map"][tensor] = file;
    return json.dump();
  };
  expect_index_refused("{}", {"index.json", "weight_map"});
  expect_index_refused("[]", {"index.json", "object"});
  expect_index_refused("", {"index.json", "JSON"});
  expect_index_refused(R"({"weight_map":{"a":")" + one + R"(","a":")" + two + "\"}}", {"\"a\" occurs twice"});
  expect_index_refused(R"({"weight_map":{"a":7}})", {"\"a\"", "beside the index"});
  expect_index_refused(index({{"a", one}, {"b", two}, {"c", two}}), {two, "\"c\" is not in this file"});
  expect_index_refused(index({{"a", one}, {"b", one}}), {one, "\"b\" is not in this file"});
  expect_index_refused(index({{"b", two}, {"c", one}}), {one, "\"a\"", "does not know"});
  expect_index_refused(index({{"a", two}, {"b", one}}), {one, "\"a\"", "places in another file"});
  expect_index_refused(index({{"a", one}, {"b", "model-00003-of-00003.safetensors"}}),
                       {"model-00003", "missing"});
  expect_index_refused(index({{"a", "../" + one}}), {"\"a\"", "beside the index"});
  expect_index_refused(index({{"a", ".."}}), {"beside the index"});
  std::filesystem::copy(dir / one, dir / "z.safetensors");
  expect_index_refused(index({{"a", one}, {"c", "z.safetensors"}}), {"\"a\" is also in", one});
}

TEST_F(SafetensorsDirectory, WhatADirectoryMustHold) {
  std::filesystem::copy(dir / one, dir / "model.safetensors");
  expect_error(ExitCode::checkpoint, {dir.path(), "both"}, [&] { SafetensorsReader(*files, dir.path()); });
  EXPECT_EQ(SafetensorsReader(*files, dir / "model.safetensors").tensors().size(), 1U)
      << "a named file is read alone";
  std::filesystem::create_directory(dir / "empty");
  expect_error(ExitCode::checkpoint, {dir / "empty", "neither model.safetensors nor", "check the path"},
               [&] { SafetensorsReader(*files, dir / "empty"); });
  put_file(dir / "empty/pytorch_model.bin", "");
  expect_error(ExitCode::checkpoint, {dir / "empty", "pytorch_model.bin is not read", "safe_serialization"},
               [&] { SafetensorsReader(*files, dir / "empty"); });
  expect_error(ExitCode::checkpoint, {dir / "absent", "no such file"},
               [&] { SafetensorsReader(*files, dir / "absent"); });
  expect_error(ExitCode::checkpoint, {"/dev/null", "neither a file"},
               [&] { SafetensorsReader(*files, "/dev/null"); });
}

}  // namespace
}  // namespace kinoe
