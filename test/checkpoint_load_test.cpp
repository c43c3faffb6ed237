// Loading by several threads: the same numbers and the same error whatever their number, memory as planned.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <set>
#include <thread>

#include "test/checkpoint_harness.h"
#include "trainer/resume.h"

namespace kinoe {
namespace {

namespace fs = std::filesystem;

TEST(ShareOut, EachOnceOnNoMoreThreadsThanAskedFor) {
  for (const int threads : {1, 2, 5, 16})
    for (const size_t count : {size_t{0}, size_t{1}, size_t{3}, size_t{200}}) {
      std::vector<std::atomic<int>> done(count);
      std::vector<std::atomic<int>> busy(static_cast<size_t>(threads));
      share_out(threads, count, [&](int thread, size_t i) {
        EXPECT_EQ(busy.at(static_cast<size_t>(thread))++, 0) << "two at once as thread " << thread;
        ++done.at(i);
        std::this_thread::yield();
        --busy[static_cast<size_t>(thread)];
      });
      for (const std::atomic<int>& times : done) EXPECT_EQ(times, 1);
    }
}

TEST(ShareOut, TheFirstFailureByPositionIsThrown) {
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> begun = 0;
    try {
      share_out(4, 1000, [&](int, size_t i) {
        ++begun;
        if (i == 10)
          std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the others are there before it
        if (i >= 10) fail(ExitCode::checkpoint, i);
      });
      FAIL();
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "10");
      EXPECT_LE(begun, 14) << "it went on after a failure";
    }
  }
}

TEST(ShareOut, ThreadsAreThisRanksShare) {
  EXPECT_GE(reading_threads(1), 2);
  EXPECT_LE(reading_threads(1), 8);
  EXPECT_EQ(reading_threads(1 << 20), 2);
  EXPECT_LE(reading_threads(2), reading_threads(1));
}

class CheckpointLoad : public testing::Test {
 protected:
  static constexpr int kCounts[] = {1, 2, 7, 100};  // 100: more than there are blocks

  static LoadOptions by(int threads) { return {threads, kChunk}; }
  uint64_t load(const std::string& directory, const ShardLayout& layout, const LoadOptions& options,
                DType moments = DType::f32) {
    const auto n = static_cast<size_t>(layout.size());
    masters.assign(n, NAN);
    m.assign(n * size_of(moments), 'x');
    v = m;
    const auto shape = {layout.size()};
    return load_parameters(device->context(), CheckpointReader(*files, directory), model.table, layout,
                           {masters.data(), DType::f32, shape}, {m.data(), moments, shape},
                           {v.data(), moments, shape}, options);
  }
  /// What verifying and loading say, with any number of threads.
  std::string error_of(const std::string& directory) {
    std::set<std::string> said;
    const auto attempt = [&](auto work) {
      try {
        work();
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.code, ExitCode::checkpoint);
        said.insert(error.what());
      }
    };
    for (const int threads : kCounts) {
      attempt([&] { CheckpointReader(*files, directory).verify(threads, kChunk); });
      attempt([&] { load(directory, ShardLayout(model.table, 0, 1, false), by(threads)); });
    }
    EXPECT_EQ(said.size(), 1U) << testing::PrintToString(said);
    return said.empty() ? "" : *said.begin();
  }
  /// Flips a byte of element `element` of a tensor. Returns the file's name.
  std::string flip(const std::string& directory, Section section, const std::string& tensor,
                   int64_t element) {
    const CheckpointManifest manifest = CheckpointReader(*files, directory).manifest();
    for (const TensorRecord& t : manifest.sections[static_cast<size_t>(section)]) {
      if (t.name != tensor) continue;
      const std::string& name = manifest.files[t.file].name;
      std::string bytes = read_file(*files, join_path(directory, name));
      char& byte = bytes[static_cast<size_t>(t.offset + element * static_cast<int64_t>(size_of(t.type)))];
      byte = static_cast<char>(byte ^ 1);
      put_file(join_path(directory, name), bytes);
      return name;
    }
    ADD_FAILURE() << tensor << " is not there";
    return "";
  }

  StoredModel model{prime_llama()};
  std::unique_ptr<Device> device = Device::cpu();
  std::unique_ptr<Files> files = posix_files();
  std::vector<float> masters;
  std::vector<char> m, v;
  FreshDirectory run;
};

TEST_F(CheckpointLoad, TheSameNumbersByAnyNumberOfThreads) {
  for (const DType weights : {DType::bf16, DType::f32}) {
    const std::string directory = model.save(*files, run.path(), 5, weights);
    for (const int threads : kCounts)
      for (const DType moments : {DType::f32, DType::bf16}) {
        EXPECT_EQ(load(directory, ShardLayout(model.table, 0, 1, false), by(threads), moments), model.hash());
        EXPECT_TRUE(masters == model.masters);
        for (size_t i = 0; i < model.m.size(); ++i)
          for (const auto& [bytes, flat] : {std::pair(&m, &model.m), std::pair(&v, &model.v)}) {
            const float wide = (*flat)[i];
            const bf16 narrow = to_bf16(wide);
            const void* expected = moments == DType::bf16 ? static_cast<const void*>(&narrow) : &wide;
            const size_t size = size_of(moments);
            ASSERT_EQ(std::memcmp(bytes->data() + i * size, expected, size), 0) << i;
          }
      }
    fs::remove_all(directory);
  }
}

TEST_F(CheckpointLoad, DamageIsNamedAlikeByAnyNumberOfThreads) {
  for (const Section section : kSections) {
    const std::string directory = model.save(*files, run.path(), 5, DType::bf16, 1, 100'000);
    const std::string& tensor = model.table.parameters().back().name;
    const std::string file = flip(directory, section, tensor, 40);
    const std::string error = error_of(directory);
    for (const std::string& part : {file, "tensor " + tensor, std::string("checksum")})
      EXPECT_NE(error.find(part), std::string::npos) << error;
    fs::remove_all(directory);
  }
}

TEST_F(CheckpointLoad, OfSeveralDamagesTheFirstIsNamed) {
  const std::string directory = model.save(*files, run.path(), 5, DType::bf16);
  const auto& all = model.table.parameters();
  // Many, so that threads meet them at the same time; of the tensor that comes first its second chunk.
  for (size_t i = all.size() - 1; i > 3; --i) flip(directory, Section::v, all[i].name, 0);
  for (size_t i = all.size() - 1; i > 3; --i) flip(directory, Section::m, all[i].name, 0);
  const std::string m_error = error_of(directory);
  EXPECT_NE(m_error.find("optimizer-m"), std::string::npos) << m_error;
  EXPECT_NE(m_error.find("tensor " + all[4].name + ":"), std::string::npos) << m_error;
  for (size_t i = all.size() - 1; i > 0; --i) flip(directory, Section::weights, all[i].name, 0);
  const std::string w_error = error_of(directory);
  EXPECT_NE(w_error.find("model.safetensors"), std::string::npos) << w_error;
  EXPECT_NE(w_error.find("tensor " + all[1].name + ":"), std::string::npos) << w_error;
}

TEST_F(CheckpointLoad, AFileThatIsCutWhileItIsRead) {
  const std::string directory = model.save(*files, run.path(), 5, DType::bf16);
  const CheckpointReader reader(*files, directory);
  std::string name;
  for (const FileRecord& file : reader.manifest().files)
    if (file.name.starts_with("trainer/optimizer-v")) name = file.name;
  fs::resize_file(join_path(directory, name), 5000);
  std::set<std::string> said;
  for (const int threads : kCounts) try {
      reader.verify(threads, kChunk);
    } catch (const Error& error) {
      said.insert(error.what());
    }
  ASSERT_EQ(said.size(), 1U) << testing::PrintToString(said);
  EXPECT_NE(said.begin()->find(name + ": cannot read"), std::string::npos) << *said.begin();
}

TEST_F(CheckpointLoad, MemoryIsThatOfTheThreadsThatWork) {
  const ShardLayout whole(model.table, 0, 1, false);
  const size_t block = kChunk * sizeof(float);
  EXPECT_EQ(load_buffer_bytes(whole, DType::f32, by(3)), 3 * 2 * block);
  EXPECT_EQ(load_buffer_bytes(whole, DType::bf16, by(3)), 3 * 3 * block);
  // Blocks end with buckets; no thread without a block.
  size_t largest = 0, ranges = whole.owned().size();
  for (const HeldRange& range : whole.owned())
    largest = std::max(largest, static_cast<size_t>(range.end - range.begin));
  EXPECT_EQ(load_buffer_bytes(whole, DType::f32, {1000, model.table.flat_size() * 2}),
            3 * ranges * 2 * largest * sizeof(float));
}

TEST_F(CheckpointLoad, ARankThatHoldsNothing) {
  const std::string directory = model.save(*files, run.path(), 5);
  const ShardLayout nothing(model.table, 63, 64, true);
  ASSERT_TRUE(nothing.held().empty());
  EXPECT_EQ(load_buffer_bytes(nothing, DType::f32), 0U);
  for (const int threads : kCounts) EXPECT_EQ(load(directory, nothing, by(threads)), 0U);
  EXPECT_TRUE(std::all_of(masters.begin(), masters.end(), [](float x) { return std::isnan(x); }));
}

TEST_F(CheckpointLoad, GpuMemoryHasTheSameNumbers) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  const std::unique_ptr<Device> gpu = Device::gpu(0);
  const Context ctx = gpu->context();
  const std::string directory = model.save(*files, run.path(), 5, DType::bf16);
  const ShardLayout layout(model.table, 0, 1, false);
  const int64_t n = layout.size();
  const size_t bytes = static_cast<size_t>(n) * sizeof(float);
  for (const int threads : kCounts) {
    const Memory memory = Memory::on(Backend::cuda, 3 * bytes);
    fill_zero(ctx, memory.data(), memory.bytes());
    const auto section = [&](size_t i) {
      return Tensor(static_cast<char*>(memory.data()) + i * bytes, DType::f32, {n});
    };
    EXPECT_EQ(load_parameters(ctx, CheckpointReader(*files, directory), model.table, layout, section(0),
                              section(1), section(2), by(threads)),
              model.hash());
    std::vector<float> read(static_cast<size_t>(n));
    size_t i = 0;
    for (const std::vector<float>* expected : {&model.masters, &model.m, &model.v}) {
      download(ctx, read.data(), section(i++).data, bytes);
      synchronize(ctx);
      EXPECT_TRUE(read == *expected) << threads << " threads";
    }
  }
}

}  // namespace
}  // namespace kinoe
