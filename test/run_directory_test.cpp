// A run directory that the ranks of a run have to share.
#include "trainer/run_directory.h"

#include <gtest/gtest.h>

#include <thread>

#include "test/faulty_files.h"
#include "test/local_channel.h"

namespace kinoe {
namespace {

/// What check_shared() does on each of three ranks, of which rank 2 has these files: "" or "code: text".
std::vector<std::string> shared(const std::string& directory,
                                const std::function<void(FaultyFiles&)>& spoil) {
  const std::vector<std::unique_ptr<Channel>> channels = make_local_channels(3);
  std::vector<std::string> said(3);
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < said.size(); ++rank)
    threads.emplace_back([&, rank] {
      FaultyFiles files;
      if (rank == 2) spoil(files);
      try {
        check_shared(files, *channels[rank], directory);
      } catch (const Error& error) {
        said[rank] = cat(static_cast<int>(error.code), ": ", error.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
  return said;
}

TEST(SharedRunDirectory, EveryRankSeesAndWritesAndNothingIsLeft) {
  const FreshDirectory run;
  EXPECT_EQ(shared(run.path(), [](FaultyFiles&) {}), std::vector<std::string>(3));
  EXPECT_TRUE(posix_files()->list(run.path()).empty());
}

TEST(SharedRunDirectory, OneThatARankCannotWriteIsTheSameErrorOnAllRanks) {
  const FreshDirectory run;
  int calls = 0;
  for (int call = 1; call <= 4; ++call) {
    const std::vector<std::string> said =
        shared(run.path(), [&](FaultyFiles& files) { files.fail_at(call, EROFS); });
    calls += said[0].empty() ? 0 : 1;
    for (const std::string& text : said) {
      EXPECT_EQ(text, said[0]);
      EXPECT_EQ(text.find("2: rank 2 ("), 0U) << text;
      EXPECT_NE(text.find(cat("): run directory ", run.path(), " (working directory /")), std::string::npos)
          << text;
      EXPECT_NE(text.find("Read-only file system"), std::string::npos) << text;
    }
  }
  EXPECT_EQ(calls, 4) << "create, write, sync, remove";
  for (const std::string& name : posix_files()->list(run.path()))
    EXPECT_TRUE(name.ends_with(".tmp")) << "only what could not be removed: " << name;
}

}  // namespace
}  // namespace kinoe
