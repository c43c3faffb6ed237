// The real file system, and what is built from the file layer's calls alone (so that tests reach it too).
#include "trainer/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>

namespace kinoe {
namespace {

const char* advice(int error_number) {
  switch (error_number) {
    case ENOSPC:
    case EDQUOT: return "free some space there, or choose another directory";
    case EACCES:
    case EPERM: return "give this user permission, or choose another path";
    case EROFS: return "choose a directory on a file system that is mounted for writing";
    case ENOENT: return "check the path";
    case ENOTDIR: return "a part of the path is a file: check the path";
    case EISDIR: return "a file is needed here, not a directory: check the path";
    case ENODATA: return "the file is shorter than it should be: it was truncated, or is still being written";
    case EMFILE:
    case ENFILE: return "raise the limit of open files (ulimit -n)";
    case EFBIG: return "this file system or a limit (ulimit -f) does not allow so large a file";
    case ESPIPE: return "a regular file is needed here, not a pipe: check the path";
    case EIO: return "the device failed: look at the kernel log (dmesg)";
    case ENAMETOOLONG: return "choose a shorter path";
    case ELOOP: return "the links of this path lead in a circle: check the path";
    default: return "check the path and the file system";
  }
}

std::string describe(const std::string& operation, const std::string& path, int error_number) {
  const std::string reason =
      error_number == ENODATA ? "end of file" : std::generic_category().message(error_number);
  return cat(path, ": cannot ", operation, ": ", reason, "; ", advice(error_number));
}

/// Repeats a system call that a signal interrupted.
template <class Call>
auto retry(Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

/// Closes a descriptor that is only needed within a function.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  [[nodiscard]] int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

constexpr off_t kLargeWrite = off_t{1} << 20;  // bytes

class PosixFile : public File {
 public:
  PosixFile(int fd, const std::string& path) : File(path), fd_(fd) {}
  ~PosixFile() override {
    if (fd_ >= 0) ::close(fd_);
  }

  void write_at(uint64_t offset, const void* data, size_t bytes) override {
    const char* from = static_cast<const char*>(data);
    const auto begin = static_cast<off_t>(offset);
    const auto total = static_cast<off_t>(bytes);
    // The kernel writes at most 2 GiB a call, and less when a signal or a full disk stops it.
    while (bytes > 0) {
      const ssize_t n = retry([&] { return ::pwrite(fd_, from, bytes, static_cast<off_t>(offset)); });
      if (n < 0) throw FileError(cat("write ", bytes, " bytes at offset ", offset), path(), errno);
      if (n == 0) throw FileError(cat("write ", bytes, " bytes at offset ", offset), path(), EIO);
      from += n;
      offset += static_cast<uint64_t>(n);
      bytes -= static_cast<size_t>(n);
    }
    // The disk begins now and not when gigabytes wait for sync(). A hint: nothing depends on it.
    if (total >= kLargeWrite) ::sync_file_range(fd_, begin, total, SYNC_FILE_RANGE_WRITE);
  }

  void read_at(uint64_t offset, void* data, size_t bytes) const override {
    char* to = static_cast<char*>(data);
    while (bytes > 0) {
      const ssize_t n = retry([&] { return ::pread(fd_, to, bytes, static_cast<off_t>(offset)); });
      if (n < 0) throw FileError(cat("read ", bytes, " bytes at offset ", offset), path(), errno);
      if (n == 0) throw FileError(cat("read ", bytes, " bytes at offset ", offset), path(), ENODATA);
      to += n;
      offset += static_cast<uint64_t>(n);
      bytes -= static_cast<size_t>(n);
    }
  }

  void expect(uint64_t offset, uint64_t bytes) const override {
    ::posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);
  }

  void resize(uint64_t bytes) override {
    if (retry([&] { return ::ftruncate(fd_, static_cast<off_t>(bytes)); }) != 0)
      throw FileError(cat("set the size to ", bytes, " bytes"), path(), errno);
  }

  [[nodiscard]] uint64_t size() const override {
    struct stat status {};
    if (::fstat(fd_, &status) != 0) throw FileError("read the size", path(), errno);
    return static_cast<uint64_t>(status.st_size);
  }

  void sync() override {
    if (retry([&] { return ::fsync(fd_); }) != 0) throw FileError("fsync", path(), errno);
  }

  void close() override {
    // Never repeated: Linux has freed the descriptor even when close() was interrupted.
    if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) throw FileError("close", path(), errno);
  }

 private:
  int fd_;
};

class PosixFiles : public Files {
 public:
  std::unique_ptr<File> create(const std::string& path) override {
    return open(path, O_RDWR | O_CREAT | O_TRUNC, "create");
  }
  std::unique_ptr<File> open_write(const std::string& path) override {
    return open(path, O_RDWR, "open for writing");
  }
  std::unique_ptr<File> open_read(const std::string& path) override { return open(path, O_RDONLY, "open"); }

  void rename(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) throw FileError("rename to " + to, from, errno);
  }

  void exchange(const std::string& a, const std::string& b) override {
    if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return;
    if (errno != EINVAL && errno != ENOSYS) throw FileError("exchange with " + b, a, errno);
    const std::string aside = b + ".aside.tmp";  // NFS and others cannot
    rename(b, aside);
    rename(a, b);
    rename(aside, a);
  }

  void sync_directory(const std::string& path) override {
    const Descriptor fd(open_descriptor(path, O_RDONLY | O_DIRECTORY, "open"));
    // EINVAL: a file system whose directories need no fsync.
    if (retry([&] { return ::fsync(fd.get()); }) != 0 && errno != EINVAL)
      throw FileError("fsync the directory", path, errno);
  }

  bool make_directory(const std::string& path) override {
    if (::mkdir(path.c_str(), 0777) == 0) return true;
    if (errno == EEXIST) return false;
    throw FileError("create the directory", path, errno);
  }

  void remove(const std::string& path) override {
    if (std::remove(path.c_str()) != 0) throw FileError("remove", path, errno);
  }

  std::vector<std::string> list(const std::string& path) override {
    DIR* directory = ::opendir(path.c_str());
    if (directory == nullptr) throw FileError("list the directory", path, errno);
    std::vector<std::string> names;
    errno = 0;
    while (const dirent* entry = ::readdir(directory)) {
      const std::string_view name = entry->d_name;
      if (name != "." && name != "..") names.emplace_back(name);
    }
    const int error_number = errno;
    ::closedir(directory);
    if (error_number != 0) throw FileError("list the directory", path, error_number);
    std::sort(names.begin(), names.end());
    return names;
  }

  Kind kind(const std::string& path) override {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) {
      if (errno == ENOENT || errno == ENOTDIR) return Kind::absent;
      throw FileError("look at", path, errno);
    }
    if (S_ISREG(status.st_mode)) return Kind::file;
    return S_ISDIR(status.st_mode) ? Kind::directory : Kind::other;
  }

  uint64_t free_bytes(const std::string& path) override {
    struct statvfs status {};
    if (retry([&] { return ::statvfs(path.c_str(), &status); }) != 0)
      throw FileError("read the free space", path, errno);
    return uint64_t{status.f_bavail} * uint64_t{status.f_frsize};
  }

 private:
  static int open_descriptor(const std::string& path, int flags, const char* operation) {
    // O_NONBLOCK: opening a named pipe would wait for somebody at its other end.
    int fd = retry([&] { return ::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, 0666); });
    // Started with a standard stream closed: what is printed must not land in this file.
    if (fd >= 0 && fd <= 2) {
      const Descriptor low(fd);
      fd = ::fcntl(low.get(), F_DUPFD_CLOEXEC, 3);
    }
    if (fd < 0) throw FileError(operation, path, errno);
    Descriptor opened(fd);
    struct stat status {};
    if (::fstat(fd, &status) != 0) throw FileError("look at", path, errno);
    if (S_ISFIFO(status.st_mode)) throw FileError(operation, path, ESPIPE);
    return opened.release();
  }

  static std::unique_ptr<File> open(const std::string& path, int flags, const char* operation) {
    Descriptor fd(open_descriptor(path, flags, operation));
    struct stat status {};
    if (::fstat(fd.get(), &status) != 0) throw FileError("look at", path, errno);
    if (S_ISDIR(status.st_mode)) throw FileError(operation, path, EISDIR);
    return std::make_unique<PosixFile>(fd.release(), path);
  }
};

/// Runs a clean-up after a failure: what it cannot do must not hide the failure itself.
template <class Work>
void attempt(Work work) {
  try {
    work();
  } catch (const FileError&) {
  }
}

std::string without_trailing_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string bytes_text(uint64_t bytes) {
  const double value = static_cast<double>(bytes);
  char text[40];
  if (value < 1e9)
    std::snprintf(text, sizeof text, "%.1f MB", value * 1e-6);
  else if (value < 1e12)
    std::snprintf(text, sizeof text, "%.1f GB", value * 1e-9);
  else
    std::snprintf(text, sizeof text, "%.1f TB", value * 1e-12);
  return text;
}

/// The directory of a new run that was not named: two runs started in the same second get different ones.
std::string make_default_run_directory(Files& files, std::time_t now) {
  std::tm local{};
  ::localtime_r(&now, &local);
  char stamp[32];
  std::strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", &local);
  make_directories(files, "runs");
  std::string path = cat("runs/", stamp);
  for (int i = 2; !files.make_directory(path); ++i) path = cat("runs/", stamp, "-", i);
  return path;
}

}  // namespace

FileError::FileError(const std::string& operation, const std::string& path, int error)
    : Error(ExitCode::checkpoint, describe(operation, path, error)), error_number(error) {}

std::unique_ptr<Files> posix_files() { return std::make_unique<PosixFiles>(); }

std::string parent_directory(const std::string& path) {
  const std::string clean = without_trailing_slashes(path);
  const size_t slash = clean.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : without_trailing_slashes(clean.substr(0, slash));
}

std::string join_path(const std::string& directory, std::string_view name) {
  if (directory.empty()) return std::string(name);
  return cat(directory, directory.back() == '/' ? "" : "/", name);
}

void make_directories(Files& files, const std::string& path) {
  if (files.kind(path) == Files::Kind::directory) return;
  const std::string parent = parent_directory(path);
  if (parent != path) make_directories(files, parent);
  if (!files.make_directory(path) && files.kind(path) != Files::Kind::directory)
    throw FileError("create the directory", path, EEXIST);
}

void remove_tree(Files& files, const std::string& path) {
  try {
    files.remove(path);  // first, so that a link to a directory is removed and never entered
    return;
  } catch (const FileError& error) {
    if (error.error_number != ENOTEMPTY && error.error_number != EEXIST) throw;
  }
  for (const std::string& name : files.list(path)) remove_tree(files, join_path(path, name));
  files.remove(path);
}

std::string read_file(Files& files, const std::string& path) {
  const std::unique_ptr<File> file = files.open_read(path);
  std::string contents(file->size(), '\0');
  file->read_at(0, contents.data(), contents.size());
  return contents;
}

void write_file_durably(Files& files, const std::string& path, std::string_view contents) {
  const std::string temporary = path + ".tmp";
  const std::unique_ptr<File> file = files.create(temporary);
  try {
    file->write_at(0, contents.data(), contents.size());
    file->sync();
    file->close();
    files.rename(temporary, path);
  } catch (const FileError&) {
    attempt([&] { files.remove(temporary); });
    throw;
  }
  files.sync_directory(parent_directory(path));
}

void probe_write(Files& files, const std::string& directory, const std::string& name) {
  const std::string path = join_path(directory, name);
  const std::string block(4096, '\0');
  const std::unique_ptr<File> file = files.create(path);
  try {
    file->write_at(0, block.data(), block.size());
    file->sync();
    file->close();
  } catch (const FileError&) {
    attempt([&] { files.remove(path); });
    throw;
  }
  files.remove(path);
}

void check_unused(Files& files, const std::string& path, const std::string& instead) {
  const Files::Kind kind = files.kind(path);
  if (kind == Files::Kind::absent) return;
  if (kind != Files::Kind::directory)
    fail(ExitCode::usage, "run directory ", path, " exists and is not a directory; choose another --out");
  const std::vector<std::string> names = files.list(path);
  if (!names.empty())
    fail(ExitCode::usage, "run directory ", path, " exists and is not empty (", names.size(),
         names.size() == 1 ? " entry, " : " entries, such as ", names.front(),
         "): nothing was changed; choose another --out", instead);
}

std::string prepare_run_directory(Files& files, const RunDirectoryRequest& request, std::time_t now) {
  return in_class(ExitCode::usage, [&] {
    bool created = true;
    std::string path = without_trailing_slashes(request.path);
    if (path.empty()) {
      path = make_default_run_directory(files, now);
    } else {
      make_directories(files, parent_directory(path));
      created = files.make_directory(path);
    }

    if (!created) {
      if (files.kind(path) != Files::Kind::directory)
        fail(ExitCode::usage, "run directory ", path, " exists and is not a directory; choose another --out");
      if (!request.resume) check_unused(files, path);
    }

    try {
      probe_write(files, path, cat(".probe-", ::getpid(), ".tmp"));
      const uint64_t free = files.free_bytes(path);
      if (free < request.needed_bytes)
        fail(ExitCode::usage, "run directory ", path, ": one checkpoint takes ",
             bytes_text(request.needed_bytes), " and only ", bytes_text(free),
             " are free there; free some space, or choose another --out");
      files.sync_directory(parent_directory(path));
    } catch (const Error&) {
      if (created) attempt([&] { files.remove(path); });
      throw;
    }
    return path;
  });
}

RunLock::RunLock(const std::string& run_directory) {
  const std::string path = join_path(run_directory, "lock");
  fd_ = retry([&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666); });
  if (fd_ < 0) in_class(ExitCode::usage, [&] { throw FileError("open", path, errno); });
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    char text[256] = "";
    const ssize_t got = ::pread(fd_, text, sizeof text - 1, 0);
    std::string holder(text, static_cast<size_t>(std::max<ssize_t>(0, got)));
    holder.erase(holder.find_last_not_of('\n') + 1);
    std::replace(holder.begin(), holder.end(), '\n', ' ');
    ::close(fd_);
    fail(ExitCode::usage, "run directory ", run_directory, " is in use by another process (", holder,
         "): wait for it to end, or choose another --out");
  }
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  const char* job = std::getenv("SLURM_JOB_ID");
  const std::string text =
      cat("host ", host, "\npid ", ::getpid(), "\n", job != nullptr ? cat("job ", job, "\n") : "");
  // For people only: the lock itself is what counts.
  if (::ftruncate(fd_, 0) != 0 || ::pwrite(fd_, text.data(), text.size(), 0) < 0) return;
}

RunLock::~RunLock() { ::close(fd_); }

}  // namespace kinoe
