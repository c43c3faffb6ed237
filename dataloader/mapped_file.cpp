// Mapping a file read-only, and saying which one it was when its pages vanish.
#include "dataloader/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <utility>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

// SIGBUS comes to the thread that reads, so its own note of what it reads is the file at fault. A signal handler has no
// other way to be told.
// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables)
thread_local const char* reading = nullptr;
// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables)
std::atomic<int> last_words = -1;

/// A line in one write, put together without anything a signal handler may not use.
class Line {
 public:
  Line& add(const char* part) {
    while (*part != '\0' && size_ < text_.size()) text_[size_++] = *part++;
    return *this;
  }
  [[nodiscard]] bool write_to(int fd) const { return ::write(fd, text_.data(), size_) > 0; }

 private:
  std::array<char, PIPE_BUF> text_{};
  size_t size_ = 0;
};

void on_bus_error(int signal) {
  const char* path = reading;
  if (path == nullptr) {  // not ours: as if there were no handler
    std::signal(signal, SIG_DFL);
    std::raise(signal);
    return;
  }
  const auto line = [path](const char* before) {
    return Line().add(before).add("'").add(path).add(
        "' was cut off, or its disk failed, while it was read; restore the file and start again\n");
  };
  if (const int told = last_words; told >= 0 && line("3").write_to(told)) ::sleep(10);
  if (!line("train_gpt: error: ").write_to(STDERR_FILENO)) ::_exit(static_cast<int>(ExitCode::data));
  ::_exit(static_cast<int>(ExitCode::data));
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail(ExitCode::data, "cannot open data file '", path, "': ", std::strerror(errno));
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    fail(ExitCode::data, "'", path, "' is ", S_ISDIR(info.st_mode) ? "a directory" : "no regular file",
         ", expected a file of tokens or text");
  }
  bytes_ = info.st_size;
  device_ = info.st_dev;
  inode_ = info.st_ino;
  void* mapping = nullptr;
  if (bytes_ > 0) mapping = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, fd, 0);
  const int error = errno;
  ::close(fd);
  if (mapping == MAP_FAILED)
    fail(ExitCode::data, "cannot map data file '", path, "' (", bytes_, " bytes): ", std::strerror(error));
  data_ = static_cast<const unsigned char*>(mapping);
  // Samples are read in random order: read-ahead around each would only crowd the page cache; will_need() asks for what comes.
  advise_sequential(false);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<unsigned char*>(data_), static_cast<size_t>(bytes_));
}

MappedFile::MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  std::swap(inode_, other.inode_);
  return *this;
}

void MappedFile::will_need(int64_t first, int64_t count) const {
  if (!data_) return;
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const uint64_t begin = static_cast<uint64_t>(first) / page * page;
  const auto end = static_cast<uint64_t>(first + count);
  ::madvise(const_cast<unsigned char*>(data_) + begin, end - begin, MADV_WILLNEED);
}

void MappedFile::advise_sequential(bool sequential) const {
  if (data_)
    ::madvise(const_cast<unsigned char*>(data_), static_cast<size_t>(bytes_),
              sequential ? MADV_SEQUENTIAL : MADV_RANDOM);
}

void MappedFile::check_whole() const {
  struct stat info {};
  if (!data_ || ::stat(path_.c_str(), &info) != 0 || info.st_dev != device_ || info.st_ino != inode_) return;
  if (info.st_size < bytes_)
    fail(ExitCode::data, "'", path_, "' had ", bytes_, " bytes when it was opened and has ", info.st_size,
         " now: it was cut off while it was in use; restore the file and start again");
}

MappedRead::MappedRead(const MappedFile& file) : outer_(reading) {
  file.check_whole();
  reading = file.path().c_str();
}

MappedRead::~MappedRead() { reading = outer_; }

void end_on_truncation(int told) {
  last_words = told;
  std::signal(SIGBUS, on_bus_error);
}

}  // namespace kinoe
