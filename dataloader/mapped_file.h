// A file mapped read-only, and what happens when somebody cuts it off while it is mapped.
//
// Reading a page that the file no longer has is SIGBUS, which ends a program without a word. So every read of a mapping is
// inside a MappedRead: it looks at the file's size first (one stat), which catches all but a truncation within
// the read itself; for that one, the handler of end_on_truncation() knows the name to report.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace kinoe {

class MappedFile {
 public:
  MappedFile() = default;
  /// Data error unless `path` is a regular file that can be mapped. Advises random access.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] const unsigned char* data() const { return data_; }
  [[nodiscard]] int64_t bytes() const { return bytes_; }

  /// Whole pages around [first, first + count) are read soon; returns at once.
  void will_need(int64_t first, int64_t count) const;
  /// From now on reads are mostly in order (true), or anywhere (false, as after opening).
  void advise_sequential(bool sequential) const;
  /// Data error if the file has become shorter since it was mapped. A file removed or replaced under its name is
  /// still whole in the mapping.
  void check_whole() const;

 private:
  std::string path_;
  const unsigned char* data_ = nullptr;
  int64_t bytes_ = 0;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

/// The scope of a read of `file`; scopes nest.
class MappedRead {
 public:
  explicit MappedRead(const MappedFile& file);
  ~MappedRead();
  MappedRead(const MappedRead&) = delete;
  MappedRead& operator=(const MappedRead&) = delete;

 private:
  const char* outer_;
};

/// For main(): from now on a read beyond the end of a mapped file, in any thread, ends the program with exit code 3 and one line
/// that names the file. `told`: where the line is written first, "3" and the text, for a reader that says it and ends the
/// process; only if that takes more than ten seconds the handler does so. -1: there is none.
void end_on_truncation(int told = -1);

}  // namespace kinoe
