// A file layer in front of the real disk whose n-th changing call fails, or is the last thing the process does. Syncs are
// counted and nothing more: a test asks for thousands of them, and what it wrote need not outlive the machine.
//
// Use: run the work once with nothing armed, read calls(), then run it again for every n in 1..calls().
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trainer/files.h"

namespace kinoe {

/// An empty directory of its own for each test, removed at its end.
class FreshDirectory {
 public:
  FreshDirectory() {
    const testing::TestInfo* test = testing::UnitTest::GetInstance()->current_test_info();
    path_ = std::filesystem::path(testing::TempDir()) /
            cat("kinoe_", test->test_suite_name(), "_", test->name(), "_", ::getpid());
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~FreshDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  FreshDirectory(const FreshDirectory&) = delete;
  FreshDirectory& operator=(const FreshDirectory&) = delete;

  [[nodiscard]] std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  [[nodiscard]] std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

inline void put_file(const std::string& path, std::string_view contents) {
  const std::unique_ptr<File> file = posix_files()->create(path);
  file->write_at(0, contents.data(), contents.size());
  file->close();
}

/// Expects kinoe::Error with this class and a one-line message that has every part.
template <class Work>
void expect_error(ExitCode code, const std::vector<std::string>& parts, Work work) {
  try {
    work();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(static_cast<int>(error.code), static_cast<int>(code)) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    for (const std::string& part : parts)
      EXPECT_NE(message.find(part), std::string::npos) << message << " lacks " << part;
    return;
  }
  ADD_FAILURE() << "no error, expected one with: " << testing::PrintToString(parts);
}

/// What a killed process does next: nothing. Not an Error, so that no handler of errors cleans up after it, and every
/// later call through the same FaultyFiles throws it again.
struct Killed {};

class FaultyFiles : public Files {
 public:
  FaultyFiles() : real_(posix_files()) {}

  /// Call number `call` (from 1) throws a FileError with this errno and does nothing.
  void fail_at(int call, int error_number) {
    fail_at_ = call;
    error_number_ = error_number;
  }
  /// Every call from number `call` on fails: a full disk.
  void fail_from(int call, int error_number) {
    fail_at(call, error_number);
    keep_failing_ = true;
  }
  /// Call number `call` throws Killed; a write has written its first half by then.
  void kill_at(int call) { kill_at_ = call; }

  [[nodiscard]] int calls() const { return static_cast<int>(log_.size()); }
  /// "create a", "write a", "sync a", "close a", "rename a b", "exchange a b", "syncdir d", "mkdir d", "remove a", "resize a".
  [[nodiscard]] const std::vector<std::string>& log() const { return log_; }

  std::unique_ptr<File> create(const std::string& path) override {
    before("create", path);
    return std::make_unique<FaultyFile>(*this, real_->create(path));
  }
  std::unique_ptr<File> open_write(const std::string& path) override {
    before("open", path);
    return std::make_unique<FaultyFile>(*this, real_->open_write(path));
  }
  std::unique_ptr<File> open_read(const std::string& path) override {
    check_alive();
    return real_->open_read(path);
  }
  void rename(const std::string& from, const std::string& to) override {
    before("rename", from + " " + to);
    real_->rename(from, to);
  }
  void exchange(const std::string& a, const std::string& b) override {
    before("exchange", a + " " + b);
    real_->exchange(a, b);
  }
  void sync_directory(const std::string& path) override { before("syncdir", path); }
  bool make_directory(const std::string& path) override {
    before("mkdir", path);
    return real_->make_directory(path);
  }
  void remove(const std::string& path) override {
    before("remove", path);
    real_->remove(path);
  }
  std::vector<std::string> list(const std::string& path) override {
    check_alive();
    return real_->list(path);
  }
  Kind kind(const std::string& path) override {
    check_alive();
    return real_->kind(path);
  }
  uint64_t free_bytes(const std::string& path) override {
    check_alive();
    return real_->free_bytes(path);
  }

 private:
  class FaultyFile : public File {
   public:
    FaultyFile(FaultyFiles& files, std::unique_ptr<File> real)
        : File(real->path()), files_(files), real_(std::move(real)) {}
    void write_at(uint64_t offset, const void* data, size_t bytes) override {
      files_.before("write", path(), [&] { real_->write_at(offset, data, bytes / 2); });
      real_->write_at(offset, data, bytes);
    }
    void read_at(uint64_t offset, void* data, size_t bytes) const override {
      files_.check_alive();
      real_->read_at(offset, data, bytes);
    }
    void resize(uint64_t bytes) override {
      files_.before("resize", path());
      real_->resize(bytes);
    }
    [[nodiscard]] uint64_t size() const override { return real_->size(); }
    void sync() override { files_.before("sync", path()); }
    void close() override {
      files_.before("close", path());
      real_->close();
    }

   private:
    FaultyFiles& files_;
    std::unique_ptr<File> real_;
  };

  void check_alive() const {
    if (killed_) throw Killed{};
  }

  void before(const char* operation, const std::string& path) {
    before(operation, path, [] {});
  }
  template <class HalfWrite>
  void before(const char* operation, const std::string& path, HalfWrite half_write) {
    check_alive();
    log_.push_back(cat(operation, " ", path));
    if (calls() == kill_at_) {
      half_write();
      killed_ = true;
      throw Killed{};
    }
    if (calls() == fail_at_ || (keep_failing_ && calls() > fail_at_))
      throw FileError(operation, path, error_number_);
  }

  std::unique_ptr<Files> real_;
  std::vector<std::string> log_;
  int fail_at_ = 0, kill_at_ = 0, error_number_ = 0;
  bool keep_failing_ = false, killed_ = false;
};

}  // namespace kinoe
