// The file layer: every byte of a checkpoint goes through here, and every file of a run directory but those of the monitor,
// which has to live on when they fail.
//
// The calls are few and virtual, so that a test can put itself between the program and the disk and make any one of them
// fail, or end the process at it. Nothing else is abstracted: offsets are absolute, nothing is buffered, and what is
// durable is said by sync() and sync_directory() alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/common/check.h"

namespace kinoe {

/// A failed file operation: the call, the path, the system's reason and what to do. The layer does not know what the file
/// was for, so the class is `checkpoint` unless in_class() says otherwise.
class FileError : public Error {
 public:
  FileError(const std::string& operation, const std::string& path, int error_number);
  int error_number;  // errno
};

/// Runs `work` and gives its FileErrors the exit code of the caller's purpose (usage for a run directory, ...).
template <class Work>
auto in_class(ExitCode code, Work&& work) -> decltype(work()) {
  try {
    return std::forward<Work>(work)();
  } catch (FileError& error) {
    error.code = code;
    throw;
  }
}

/// An open file. Closing in the destructor ignores errors; a writer calls close() to see them.
class File {
 public:
  virtual ~File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  /// Writes all bytes or throws. Several ranks and threads may write disjoint ranges of one file.
  virtual void write_at(uint64_t offset, const void* data, size_t bytes) = 0;
  /// Reads all bytes or throws; the end of the file before `bytes` is an error.
  virtual void read_at(uint64_t offset, void* data, size_t bytes) const = 0;
  /// These bytes will be read soon: the disk may begin. A hint: nothing depends on it.
  virtual void expect(uint64_t /*offset*/, uint64_t /*bytes*/) const {}
  virtual void resize(uint64_t bytes) = 0;
  [[nodiscard]] virtual uint64_t size() const = 0;
  /// fsync: data and size are on the device when it returns.
  virtual void sync() = 0;
  virtual void close() = 0;
  [[nodiscard]] const std::string& path() const { return path_; }

 protected:
  explicit File(std::string path) : path_(std::move(path)) {}

 private:
  std::string path_;
};

/// The file system. posix_files() is the real one; a test derives from Files or wraps another.
class Files {
 public:
  enum class Kind : uint8_t { absent, file, directory, other };

  Files() = default;
  virtual ~Files() = default;
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;

  virtual std::unique_ptr<File> create(const std::string& path) = 0;      // truncates what is there
  virtual std::unique_ptr<File> open_write(const std::string& path) = 0;  // must exist; contents kept
  virtual std::unique_ptr<File> open_read(const std::string& path) = 0;

  virtual void rename(const std::string& from, const std::string& to) = 0;  // replaces a file at `to`
  /// Swaps what two names lead to, so that at no moment either of them is missing (where the file system can).
  virtual void exchange(const std::string& a, const std::string& b) = 0;
  virtual void sync_directory(const std::string& path) = 0;  // makes names in it durable
  /// One level. False if something of that name is there already.
  virtual bool make_directory(const std::string& path) = 0;
  virtual void remove(const std::string& path) = 0;  // a file or an empty directory; absent is an error
  /// Names in a directory, sorted, without "." and "..".
  virtual std::vector<std::string> list(const std::string& path) = 0;
  /// What a path leads to. A link that leads nowhere is absent.
  virtual Kind kind(const std::string& path) = 0;
  /// Bytes an unprivileged process may still write on the file system of an existing path.
  virtual uint64_t free_bytes(const std::string& path) = 0;
};

/// The real file system. Stateless; may be shared between threads.
std::unique_ptr<Files> posix_files();

/// "a/b" of "a/b/c", "." of "c", "/" of "/c".
std::string parent_directory(const std::string& path);
/// "a/b", whether or not `directory` ends with a slash.
std::string join_path(const std::string& directory, std::string_view name);

void make_directories(Files& files, const std::string& path);  // like mkdir -p
void remove_tree(Files& files, const std::string& path);       // like rm -r; links are removed, not followed
/// All of a small file.
std::string read_file(Files& files, const std::string& path);

/// Replaces a small file so that after any crash it is whole, the old one or the new one: path.tmp, fsync, rename, fsync
/// of the parent directory.
void write_file_durably(Files& files, const std::string& path, std::string_view contents);

/// Writes, syncs and removes a file of this name: permission bits say nothing to root, and quotas are in no bit at all.
void probe_write(Files& files, const std::string& directory, const std::string& name);

/// Throws ExitCode::usage where a new run's directory exists and is not an empty directory. `instead` ends the message.
void check_unused(Files& files, const std::string& path, const std::string& instead = "");

struct RunDirectoryRequest {
  std::string path;           // "" : a new runs/<YYYYmmdd-HHMMSS> below the current directory
  bool resume = false;        // an existing run may be continued
  uint64_t needed_bytes = 0;  // one checkpoint
};

/// Creates or checks the directory of a run and returns its path. An existing one that is not empty without `resume`, one
/// that cannot be written (found by a probe file, since permission bits do not stop root), and one with too little space
/// end with ExitCode::usage before anything in it is changed.
std::string prepare_run_directory(Files& files, const RunDirectoryRequest& request,
                                  std::time_t now = std::time(nullptr));

/// Holds a run directory for this process: RUN/lock with host, process and job, locked for as long as the object lives. The lock
/// goes with the process, however that ends. Throws ExitCode::usage with what the file says where another process
/// holds it; a file system without locks is let pass.
class RunLock {
 public:
  explicit RunLock(const std::string& run_directory);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int fd_ = -1;
};

}  // namespace kinoe
