// The file layer on the real disk, with injected failures, and the run directory.
#include "trainer/files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>

#include "test/faulty_files.h"

namespace kinoe {
namespace {

namespace fs = std::filesystem;

TEST(Files, WritesAtOffsetsAndReadsBack) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  {
    const std::unique_ptr<File> file = files->create(dir / "f");
    file->write_at(6, "world", 5);
    file->write_at(0, "hello ", 6);
    file->sync();
    EXPECT_EQ(file->size(), 11U);
    char text[5];
    file->read_at(6, text, 5);
    EXPECT_EQ(std::string_view(text, 5), "world");
    file->close();
  }
  EXPECT_EQ(read_file(*files, dir / "f"), "hello world");
  {
    const std::unique_ptr<File> file = files->open_write(dir / "f");
    file->write_at(0, "J", 1);
    file->resize(5);
    file->close();
  }
  EXPECT_EQ(read_file(*files, dir / "f"), "Jello");
  files->create(dir / "f")->close();
  EXPECT_EQ(files->open_read(dir / "f")->size(), 0U) << "create() truncates";
}

TEST(Files, OffsetsBeyondFourGiB) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  const std::unique_ptr<File> file = files->create(dir / "sparse");
  const uint64_t offset = (uint64_t{1} << 33) + 7;
  file->write_at(offset, "tail", 4);
  EXPECT_EQ(file->size(), offset + 4);
  char text[4];
  files->open_read(dir / "sparse")->read_at(offset, text, 4);
  EXPECT_EQ(std::string_view(text, 4), "tail");
}

TEST(Files, AMissingFileIsNamed) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  expect_error(ExitCode::checkpoint, {dir / "none", "No such file", "check the path"},
               [&] { files->open_read(dir / "none"); });
}

TEST(Files, NamesKindsAndLists) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  put_file(dir / "b", "");
  EXPECT_TRUE(files->make_directory(dir / "a"));
  EXPECT_FALSE(files->make_directory(dir / "a"));
  EXPECT_FALSE(files->make_directory(dir / "b"));
  fs::create_symlink("nowhere", dir / "dangling");
  EXPECT_EQ(files->list(dir.path()), (std::vector<std::string>{"a", "b", "dangling"}));
  EXPECT_EQ(files->kind(dir / "a"), Files::Kind::directory);
  EXPECT_EQ(files->kind(dir / "b"), Files::Kind::file);
  EXPECT_EQ(files->kind(dir / "dangling"), Files::Kind::absent);
  EXPECT_EQ(files->kind(dir / "b/below"), Files::Kind::absent);
  EXPECT_EQ(files->kind("/dev/null"), Files::Kind::other);
  EXPECT_GT(files->free_bytes(dir.path()), 0U);
  files->sync_directory(dir.path());
  put_file(dir / "c", "new");
  files->rename(dir / "c", dir / "b");
  EXPECT_EQ(read_file(*files, dir / "b"), "new");
  EXPECT_EQ(files->kind(dir / "c"), Files::Kind::absent);
}

TEST(Files, PathParts) {
  EXPECT_EQ(parent_directory("a/b/c"), "a/b");
  EXPECT_EQ(parent_directory("a/b//"), "a");
  EXPECT_EQ(parent_directory("a//b"), "a");
  EXPECT_EQ(parent_directory("c"), ".");
  EXPECT_EQ(parent_directory("/c"), "/");
  EXPECT_EQ(parent_directory("/"), "/");
  EXPECT_EQ(join_path("a", "b"), "a/b");
  EXPECT_EQ(join_path("a/", "b"), "a/b");
}

TEST(Files, ErrorsSayPathReasonAndRemedy) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  put_file(dir / "f", "abc");
  expect_error(ExitCode::checkpoint, {dir / "none", "open", "No such file or directory", "check the path"},
               [&] { files->open_read(dir / "none"); });
  expect_error(ExitCode::checkpoint, {dir / "f/x", "Not a directory", "a part of the path is a file"},
               [&] { files->create(dir / "f/x"); });
  expect_error(ExitCode::checkpoint, {dir.path(), "Is a directory", "a file is needed"},
               [&] { files->open_read(dir.path()); });
  expect_error(ExitCode::checkpoint, {dir / "f", "read 1 bytes at offset 3", "end of file", "truncated"},
               [&] {
                 char text[3];
                 files->open_read(dir / "f")->read_at(1, text, 3);
               });
  expect_error(ExitCode::checkpoint, {"/dev/full", "write 1 bytes", "No space left", "free some space"},
               [&] { files->open_write("/dev/full")->write_at(0, "x", 1); });
  expect_error(ExitCode::checkpoint, {dir / "none", "rename"},
               [&] { files->rename(dir / "none", dir / "to"); });
  expect_error(ExitCode::checkpoint, {dir / "none", "remove"}, [&] { files->remove(dir / "none"); });
  expect_error(ExitCode::checkpoint, {dir / "none", "list"}, [&] { files->list(dir / "none"); });
  expect_error(ExitCode::checkpoint, {dir / "none", "free space"}, [&] { files->free_bytes(dir / "none"); });
  expect_error(ExitCode::usage, {dir / "none"},
               [&] { in_class(ExitCode::usage, [&] { files->open_read(dir / "none"); }); });
}

TEST(Files, WriteStopsAtALimitInTheMiddle) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  rlimit small = old;
  small.rlim_cur = 100;  // write() returns 100 of 200 bytes, then fails with EFBIG
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const std::unique_ptr<File> file = files->create(dir / "f");
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string message;
  try {
    file->write_at(0, std::string(200, 'x').data(), 200);
  } catch (const FileError& error) {
    message = error.what();
    EXPECT_EQ(error.error_number, EFBIG);
  }
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_NE(message.find(dir / "f"), std::string::npos) << message;
  EXPECT_EQ(file->size(), 100U);
}

TEST(Files, DescriptorsStayClearOfStandardStreams) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  const int saved = ::dup(0);
  ::close(0);
  const std::unique_ptr<File> file = files->create(dir / "f");
  const bool free = ::fcntl(0, F_GETFD) == -1;
  ::dup2(saved, 0);
  ::close(saved);
  EXPECT_TRUE(free) << "the file took the place of the closed standard input";
}

TEST(Files, MakesAndRemovesTrees) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  make_directories(*files, dir / "a/b/c");
  make_directories(*files, dir / "a/b/c/");
  put_file(dir / "a/b/c/f", "x");
  put_file(dir / "kept", "x");
  fs::create_directory_symlink(dir.path(), dir / "a/b/link");
  expect_error(ExitCode::checkpoint, {dir / "kept"}, [&] { make_directories(*files, dir / "kept/x"); });
  remove_tree(*files, dir / "a");
  EXPECT_EQ(files->list(dir.path()), std::vector<std::string>{"kept"}) << "links are removed, not followed";
}

TEST(Files, DurableWriteOrder) {
  const FreshDirectory dir;
  FaultyFiles files;
  write_file_durably(files, dir / "f", "new");
  const std::string f = dir / "f", tmp = f + ".tmp";
  EXPECT_EQ(files.log(),
            (std::vector<std::string>{"create " + tmp, "write " + tmp, "sync " + tmp, "close " + tmp,
                                      "rename " + tmp + " " + f, "syncdir " + dir.path()}));
  EXPECT_EQ(read_file(files, f), "new");
}

TEST(Files, DurableWriteIsOldOrNewWhenKilledAnywhere) {
  const FreshDirectory dir;
  int finished = 0;
  for (int call = 1; finished == 0; ++call) {
    put_file(dir / "f", "the old contents");
    FaultyFiles files;
    files.kill_at(call);
    try {
      write_file_durably(files, dir / "f", "the new contents, longer");
      finished = call;
    } catch (const Killed&) {
    }
    const std::string found = read_file(*posix_files(), dir / "f");
    const bool renamed = call > 5;
    EXPECT_EQ(found, renamed ? "the new contents, longer" : "the old contents") << "killed at call " << call;
  }
  EXPECT_EQ(finished, 7);
}

TEST(Files, DurableWriteLeavesNothingWhenACallFails) {
  const FreshDirectory dir;
  for (int call = 1; call <= 5; ++call) {
    put_file(dir / "f", "old");
    FaultyFiles files;
    files.fail_at(call, ENOSPC);
    expect_error(ExitCode::checkpoint, {dir / "f", "No space left", "free some space"},
                 [&] { write_file_durably(files, dir / "f", "new"); });
    EXPECT_EQ(read_file(*posix_files(), dir / "f"), "old");
    EXPECT_EQ(posix_files()->list(dir.path()), std::vector<std::string>{"f"}) << "failed at call " << call;
  }
}

// ---- Run directory -------------------------------------------------------------------------------------------------

TEST(RunDirectory, IsCreatedWithItsParents) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  EXPECT_EQ(prepare_run_directory(*files, {.path = dir / "a/b/run/"}), dir / "a/b/run");
  EXPECT_TRUE(files->list(dir / "a/b/run").empty()) << "the probe is removed";
  EXPECT_EQ(prepare_run_directory(*files, {.path = dir / "a/b/run"}), dir / "a/b/run")
      << "an empty one is taken";
}

TEST(RunDirectory, DefaultNameIsTheTimeAndNeverShared) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  const fs::path before = fs::current_path();
  fs::current_path(dir.path());
  std::tm local{};
  local.tm_year = 126, local.tm_mon = 1, local.tm_mday = 3, local.tm_hour = 4, local.tm_min = 5,
  local.tm_sec = 6;
  local.tm_isdst = -1;
  const std::time_t now = std::mktime(&local);
  EXPECT_EQ(prepare_run_directory(*files, {}, now), "runs/20260203-040506");
  EXPECT_EQ(prepare_run_directory(*files, {}, now), "runs/20260203-040506-2");
  EXPECT_EQ(prepare_run_directory(*files, {}, now), "runs/20260203-040506-3");
  fs::current_path(before);
}

TEST(RunDirectory, ExistingRunIsNotTouchedWithoutResume) {
  const FreshDirectory dir;
  FaultyFiles files;
  put_file(dir / "metrics.jsonl", "{}");
  expect_error(ExitCode::usage, {dir.path(), "not empty", "1 entry, metrics.jsonl", "--out"},
               [&] { prepare_run_directory(files, {.path = dir.path()}); });
  EXPECT_EQ(read_file(files, dir / "metrics.jsonl"), "{}");
  for (const std::string& call : files.log()) EXPECT_EQ(call.substr(0, 5), "mkdir") << call;
  EXPECT_EQ(prepare_run_directory(files, {.path = dir.path(), .resume = true}), dir.path());
  EXPECT_EQ(files.list(dir.path()), std::vector<std::string>{"metrics.jsonl"});
}

TEST(RunDirectory, AFileIsNotARunDirectory) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  put_file(dir / "f", "x");
  fs::create_symlink("nowhere", dir / "dangling");
  expect_error(ExitCode::usage, {dir / "f", "not a directory", "--out"},
               [&] { prepare_run_directory(*files, {.path = dir / "f"}); });
  expect_error(ExitCode::usage, {dir / "f", "--out"},
               [&] { prepare_run_directory(*files, {.path = dir / "f", .resume = true}); });
  expect_error(ExitCode::usage, {dir / "f"}, [&] { prepare_run_directory(*files, {.path = dir / "f/run"}); });
  expect_error(ExitCode::usage, {dir / "dangling"},
               [&] { prepare_run_directory(*files, {.path = dir / "dangling"}); });
  EXPECT_EQ(read_file(*files, dir / "f"), "x");
}

TEST(RunDirectory, UnwritableIsFoundByTheProbe) {
  const std::unique_ptr<Files> files = posix_files();
  expect_error(ExitCode::usage, {"/proc/run"}, [&] { prepare_run_directory(*files, {.path = "/proc/run"}); });
  // An existing directory that refuses files even from root, with and without entries in it.
  expect_error(ExitCode::usage, {"/proc/"},
               [&] { prepare_run_directory(*files, {.path = "/proc", .resume = true}); });
}

TEST(RunDirectory, PermissionBitsStopAnOrdinaryUser) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  ASSERT_EQ(::chmod(dir.path().c_str(), 0555), 0);
  const bool was_root = ::geteuid() == 0;
  if (was_root && ::seteuid(65534) != 0) GTEST_SKIP() << "root is not stopped by permission bits";
  expect_error(ExitCode::usage, {dir / "run", "Permission denied", "permission"},
               [&] { prepare_run_directory(*files, {.path = dir / "run"}); });
  ASSERT_TRUE(!was_root || ::seteuid(0) == 0);
  ::chmod(dir.path().c_str(), 0755);
}

TEST(RunDirectory, TooLittleSpaceForACheckpoint) {
  const FreshDirectory dir;
  const std::unique_ptr<Files> files = posix_files();
  expect_error(
      ExitCode::usage, {dir / "run", "one checkpoint takes 1152921.5 TB", "free there", "--out"},
      [&] { prepare_run_directory(*files, {.path = dir / "run", .needed_bytes = uint64_t{1} << 60}); });
  EXPECT_EQ(files->kind(dir / "run"), Files::Kind::absent) << "a directory made in vain is taken away";
}

TEST(RunDirectory, AnyFailingCallIsAUsageErrorThatLeavesNothing) {
  const FreshDirectory dir;
  FaultyFiles sound;
  prepare_run_directory(sound, {.path = dir / "sound"});
  ASSERT_GE(sound.calls(), 6) << testing::PrintToString(sound.log());
  const std::vector<std::string> names = sound.list(dir.path());
  for (int call = 1; call <= sound.calls(); ++call) {
    FaultyFiles files;
    files.fail_at(call, ENOSPC);
    expect_error(ExitCode::usage, {dir.path(), "No space left"},
                 [&] { prepare_run_directory(files, {.path = dir / "run"}); });
    const bool removal_failed = files.log()[static_cast<size_t>(call) - 1].starts_with("remove");
    if (!removal_failed) {
      EXPECT_EQ(files.list(dir.path()), names) << files.log()[static_cast<size_t>(call) - 1];
    }
    fs::remove_all(dir / "run");
  }
}

}  // namespace
}  // namespace kinoe
