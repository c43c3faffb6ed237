// Safetensors: the bytes of the reference writer, round trips, shards, failing disks.
#include "trainer/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "test/faulty_files.h"
#include "test/safetensors_harness.h"

namespace kinoe {
namespace {

void expect_contents(const SafetensorsReader& reader, const std::vector<TensorInfo>& tensors) {
  ASSERT_EQ(reader.tensors().size(), tensors.size());
  for (size_t t = 0; t < tensors.size(); ++t) {
    const TensorPlace* place = reader.find(tensors[t].name);
    ASSERT_NE(place, nullptr) << tensors[t].name;
    EXPECT_EQ(place->info.dtype, tensors[t].dtype);
    EXPECT_EQ(place->info.shape, tensors[t].shape);
    ASSERT_EQ(place->bytes, byte_size(tensors[t]));
    std::string found(place->bytes, '\0'), expected(place->bytes, '\0');
    reader.read(*place, 0, found.data(), found.size());
    test_bytes(t, 0, expected.data(), expected.size());
    EXPECT_TRUE(found == expected) << tensors[t].name;
  }
}

TEST(Safetensors, WritesTheBytesOfTheReferenceWriter) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  const std::vector<float> w = {1.5F, -2.0F, 0.0F, 3.25F};
  const std::vector<int64_t> b = {1, -1, 7};
  const uint16_t h = 0x3800;
  // In this order: the format puts wider elements first, whatever was asked for.
  const std::vector<TensorInfo> tensors = {
      {"w", FileDType::f32, {2, 2}}, {"h", FileDType::f16, {1}}, {"b", FileDType::i64, {3}}};
  const std::vector<const void*> data = {w.data(), &h, b.data()};
  const SafetensorsPlan plan = plan_safetensors(tensors);
  write_safetensors(*files, dir.path(), plan, [&](size_t t, uint64_t offset, void* to, size_t bytes) {
    std::memcpy(to, static_cast<const char*>(data[t]) + offset, bytes);
  });
  const std::string written = read_file(*files, dir / "model.safetensors");
  EXPECT_TRUE(written == reference_file()) << written;
  EXPECT_EQ(plan.bytes(), written.size());
  EXPECT_EQ(plan.tensors[0].info.name, "w") << "the plan keeps the given order";
}

TEST(Safetensors, ReadsTheReferenceFile) {
  const FreshDirectory dir;
  put_file(dir / "x.safetensors", reference_file());
  const std::unique_ptr<Files> files = posix_files();
  const SafetensorsReader reader(*files, dir / "x.safetensors");
  ASSERT_EQ(reader.tensors().size(), 3U);
  EXPECT_EQ(reader.tensors()[0].info.name, "b");
  EXPECT_EQ(reader.tensors()[1].info.name, "w");
  EXPECT_EQ(reader.tensors()[2].info.name, "h");
  EXPECT_EQ(reader.metadata(), (std::vector<std::pair<std::string, std::string>>{{"format", "pt"}}));
  EXPECT_EQ(reader.find("none"), nullptr);
  float second = 0;
  reader.read(*reader.find("w"), 4, &second, 4);
  EXPECT_EQ(second, -2.0F);
  uint16_t half = 0;
  reader.read(*reader.find("h"), 0, &half, 2);
  EXPECT_EQ(half_to_float(half), 0.5F);
  EXPECT_THROW(reader.read(*reader.find("h"), 1, &half, 2), Error);
}

TEST(Safetensors, RoundTripOfEveryTypeScalarsAndEmptyTensors) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  std::vector<TensorInfo> tensors;
  for (const char* name : {"BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "U16", "I16", "F16", "BF16", "U32",
                           "I32", "F32", "U64", "I64", "F64"}) {
    const std::optional<FileDType> type = parse_file_dtype(name);
    ASSERT_TRUE(type) << name;
    EXPECT_STREQ(name_of(*type), name);
    tensors.push_back({cat("tensor.", name), *type, {3, 5}});
  }
  tensors.push_back({"scalar", FileDType::f32, {}});
  tensors.push_back({"empty", FileDType::bf16, {4, 0, 2}});
  tensors.push_back({"name with \"quotes\" and ü", FileDType::u8, {1}});
  const SafetensorsPlan plan = plan_safetensors(tensors);
  for (const TensorPlace& place : plan.tensors)
    EXPECT_EQ(place.offset % size_of(place.info.dtype), 0U)
        << place.info.name << " is not aligned to its elements";
  EXPECT_EQ(plan.files[0].head.size() % 8, 0U);
  write_safetensors(*files, dir.path(), plan, test_bytes);
  expect_contents(SafetensorsReader(*files, dir.path()), tensors);
  EXPECT_FALSE(parse_file_dtype("F4"));
  EXPECT_FALSE(parse_file_dtype("f32"));
}

TEST(Safetensors, TypesOfKernelsAndBack) {
  for (const DType type : {DType::f32, DType::bf16, DType::f64, DType::i32, DType::i64, DType::u64}) {
    EXPECT_EQ(to_dtype(to_file_dtype(type)), type);
    EXPECT_EQ(size_of(to_file_dtype(type)), size_of(type));
  }
  EXPECT_EQ(to_dtype(FileDType::f16), std::nullopt);
}

TEST(Safetensors, HalfToFloatIsExact) {
  EXPECT_EQ(half_to_float(0x0000), 0.0F);
  EXPECT_TRUE(std::signbit(half_to_float(0x8000)));
  EXPECT_EQ(half_to_float(0x3C00), 1.0F);
  EXPECT_EQ(half_to_float(0xC000), -2.0F);
  EXPECT_EQ(half_to_float(0x7BFF), 65504.0F);
  EXPECT_EQ(half_to_float(0x0001), 0x1p-24F);
  EXPECT_EQ(half_to_float(0x83FF), -0x1.ff8p-15F);
  EXPECT_EQ(half_to_float(0x0400), 0x1p-14F);
  EXPECT_EQ(half_to_float(0x7C00), std::numeric_limits<float>::infinity());
  EXPECT_EQ(half_to_float(0xFC00), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(half_to_float(0x7E01)));
}

TEST(Safetensors, StreamsBlocksOfWholeElements) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  const std::vector<TensorInfo> tensors = {
      {"big", FileDType::f64, {static_cast<int64_t>(kWriteBlock / 8) + 3}}};
  std::vector<std::pair<uint64_t, size_t>> ranges;
  const SafetensorsPlan plan = plan_safetensors(tensors);
  write_safetensors(*files, dir.path(), plan, [&](size_t t, uint64_t offset, void* to, size_t bytes) {
    ranges.emplace_back(offset, bytes);
    test_bytes(t, offset, to, bytes);
  });
  EXPECT_EQ(ranges, (std::vector<std::pair<uint64_t, size_t>>{{0, kWriteBlock}, {kWriteBlock, 24}}));
  expect_contents(SafetensorsReader(*files, dir.path()), tensors);
}

TEST(Safetensors, ShardsInOrderWithAnIndex) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  const std::vector<TensorInfo> tensors = {{"embed", FileDType::bf16, {300}},
                                           {"a", FileDType::bf16, {100}},
                                           {"b", FileDType::bf16, {112}},
                                           {"large", FileDType::bf16, {70, 10}},
                                           {"norm", FileDType::f32, {3}}};
  const SafetensorsPlan plan = plan_safetensors(tensors, "model", 1024);
  // 600 + 200 fit in 1024, 224 more fit exactly, 1400 is larger than a file and gets its own, 12 starts the next.
  ASSERT_EQ(plan.files.size(), 3U);
  EXPECT_EQ(plan.files[0].name, "model-00001-of-00003.safetensors");
  std::vector<size_t> file_of;
  for (const TensorPlace& place : plan.tensors) file_of.push_back(place.file);
  EXPECT_EQ(file_of, (std::vector<size_t>{0, 0, 0, 1, 2}));
  write_safetensors(*files, dir.path(), plan, test_bytes);
  EXPECT_EQ(files->list(dir.path()),
            (std::vector<std::string>{"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                                      "model-00003-of-00003.safetensors", "model.safetensors.index.json"}));
  uint64_t on_disk = 0;
  for (const std::string& name : files->list(dir.path())) on_disk += files->open_read(dir / name)->size();
  EXPECT_EQ(plan.bytes(), on_disk);
  const nlohmann::json index = nlohmann::json::parse(read_file(*files, dir / "model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 600 + 200 + 224 + 1400 + 12);
  EXPECT_EQ(index["weight_map"]["large"], "model-00002-of-00003.safetensors");
  EXPECT_EQ(index["weight_map"].size(), 5U);
  expect_contents(SafetensorsReader(*files, dir.path()), tensors);
  expect_contents(SafetensorsReader(*files, dir / "model.safetensors.index.json"), tensors);
}

TEST(Safetensors, NoTensorsIsAFile) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  write_safetensors(*files, dir.path(), plan_safetensors({}), test_bytes);
  EXPECT_TRUE(SafetensorsReader(*files, dir.path()).tensors().empty());
}

TEST(Safetensors, ReadsFromSeveralThreads) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  const std::vector<TensorInfo> tensors = {{"a", FileDType::u8, {100000}}, {"b", FileDType::u8, {100000}}};
  write_safetensors(*files, dir.path(), plan_safetensors(tensors), test_bytes);
  const SafetensorsReader reader(*files, dir.path());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { expect_contents(reader, tensors); });
  for (std::thread& thread : threads) thread.join();
}

TEST(Safetensors, EveryFailingCallIsReportedWithItsFile) {
  const FreshDirectory dir;
  const std::vector<TensorInfo> tensors = {{"a", FileDType::u8, {600}}, {"b", FileDType::u8, {600}}};
  const SafetensorsPlan plan = plan_safetensors(tensors, "model", 1024);
  FaultyFiles sound;
  write_safetensors(sound, dir.path(), plan, test_bytes);
  EXPECT_EQ(std::count_if(sound.log().begin(), sound.log().end(),
                          [](const std::string& c) { return c.starts_with("sync "); }),
            3)
      << "each file and the index is fsynced";
  for (int call = 1; call <= sound.calls(); ++call) {
    FaultyFiles files;
    files.fail_at(call, ENOSPC);
    expect_error(ExitCode::checkpoint, {dir / "model", "No space left"},
                 [&] { write_safetensors(files, dir.path(), plan, test_bytes); });
  }
}

}  // namespace
}  // namespace kinoe
