#include "dataloader/shard.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "dataloader/file_kind.h"
#include "dataloader/utf8.h"
#include "kernels/common/check.h"

namespace kinoe {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and read in place");

constexpr int64_t kWhole = int64_t{256}
                           << 20;  // text up to this size is checked from end to end, larger text in windows
constexpr int64_t kWindow = int64_t{1} << 20;

int64_t token_bytes(TokenFormat format) {
  switch (format) {
    case TokenFormat::llmc_uint16: return 2;
    case TokenFormat::llmc_uint32: return 4;
    case TokenFormat::text: return 1;
  }
  return 0;
}

int64_t header_bytes(TokenFormat format) { return format == TokenFormat::text ? 0 : kLlmcHeaderBytes; }

template <class Word>
std::optional<BadToken> first_bad(const unsigned char* payload, int64_t first, int64_t count,
                                  int64_t vocab_size) {
  constexpr int64_t kBlock = 4096;
  const auto word = [&](int64_t i) {
    Word value;
    std::memcpy(&value, payload + static_cast<size_t>(i) * sizeof(Word), sizeof(Word));
    return value;
  };
  for (int64_t begin = first; begin < first + count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, first + count);
    Word largest = 0;
    for (int64_t i = begin; i < end; ++i) largest = std::max(largest, word(i));
    if (static_cast<int64_t>(largest) < vocab_size) continue;
    for (int64_t i = begin; i < end; ++i)
      if (static_cast<int64_t>(word(i)) >= vocab_size) return BadToken{i, static_cast<int64_t>(word(i))};
  }
  return std::nullopt;
}

template <class Word>
void widen(const unsigned char* payload, int64_t first, int64_t count, int32_t* out) {
  const unsigned char* from = payload + static_cast<size_t>(first) * sizeof(Word);
  for (int64_t i = 0; i < count; ++i) {
    Word value;
    std::memcpy(&value, from + static_cast<size_t>(i) * sizeof(Word), sizeof(Word));
    out[i] = static_cast<int32_t>(value);
  }
}

// Up to `budget` positions of [0, total) as at most `windows` ranges, the first at the start, the last at the end.
template <class Visit>
void spread(int64_t total, int64_t budget, int64_t windows, Visit visit) {
  if (total <= budget) {
    visit(int64_t{0}, total);
    return;
  }
  const int64_t length = std::max<int64_t>(budget / windows, 1);
  for (int64_t w = 0; w < windows; ++w) {
    const auto begin = static_cast<int64_t>(static_cast<double>(total - length) * static_cast<double>(w) /
                                            static_cast<double>(windows - 1));
    visit(begin, length);
  }
}

struct TextCheck {
  int64_t invalid = 0;
  int64_t first_invalid = -1;
};

void check_text(const std::string& name, const unsigned char* data, int64_t total, int64_t begin,
                int64_t length, TextCheck& check) {
  std::string_view all(reinterpret_cast<const char*>(data) + begin, static_cast<size_t>(length));
  if (const size_t nul = all.find('\0'); nul != std::string_view::npos)
    fail(ExitCode::data, "'", name, "' is no text: NUL byte at offset ", begin + static_cast<int64_t>(nul),
         looks_like_utf16(data, total) ? "; it looks like UTF-16, convert it with iconv -t UTF-8"
                                       : "; expected UTF-8 text or an llm.c shard");
  // A window may begin and end inside a character.
  size_t i = 0;
  while (begin > 0 && i < 3 && i < all.size() && (static_cast<unsigned char>(all[i]) & 0xC0) == 0x80) ++i;
  while (i < all.size()) {
    uint64_t eight = 0;
    while (i + 8 <= all.size() &&
           (std::memcpy(&eight, all.data() + i, 8), (eight & 0x8080808080808080ULL) == 0))
      i += 8;
    if (i >= all.size()) break;
    const std::string_view rest = all.substr(i);
    const int step = utf8_length(rest);
    if (step == 0 && begin + length < total && utf8_cut_off(rest)) break;
    if (step == 0 && check.invalid++ == 0) check.first_invalid = begin + static_cast<int64_t>(i);
    i += static_cast<size_t>(std::max(step, 1));
  }
}

}  // namespace

const char* name_of(TokenFormat format) {
  switch (format) {
    case TokenFormat::llmc_uint16: return "llm.c uint16";
    case TokenFormat::llmc_uint32: return "llm.c uint32";
    case TokenFormat::text: return "text";
  }
  return "?";
}

// --- MappedFile ---

MappedFile::MappedFile(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail(ExitCode::data, "cannot open data file '", path, "': ", std::strerror(errno));
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    fail(ExitCode::data, "'", path, "' is ", S_ISDIR(info.st_mode) ? "a directory" : "no regular file",
         ", expected a file of tokens or text");
  }
  bytes_ = info.st_size;
  void* mapping = nullptr;
  if (bytes_ > 0) mapping = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, fd, 0);
  const int error = errno;
  ::close(fd);
  if (mapping == MAP_FAILED)
    fail(ExitCode::data, "cannot map data file '", path, "' (", bytes_, " bytes): ", std::strerror(error));
  data_ = static_cast<const unsigned char*>(mapping);
  // Samples are read in random order: read-ahead around each would only crowd the page cache; will_need() asks for what comes.
  if (data_) ::madvise(mapping, static_cast<size_t>(bytes_), MADV_RANDOM);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<unsigned char*>(data_), static_cast<size_t>(bytes_));
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

// --- Shard ---

Shard Shard::open(const std::string& path) {
  Shard shard;
  shard.name_ = path;
  shard.file_ = MappedFile(path);
  shard.file_bytes_ = shard.file_.bytes();
  const unsigned char* data = shard.file_.data();
  if (shard.file_bytes_ == 0) fail(ExitCode::data, "'", path, "' is empty; expected an llm.c shard or text");
  shard.format_ = identify(path, data, shard.file_bytes_);
  if (shard.format_ != TokenFormat::text) {
    shard.tokens_ = llmc_token_count(path, data, shard.file_bytes_, token_bytes(shard.format_));
    return shard;
  }
  shard.tokens_ = shard.file_bytes_;
  TextCheck check;
  spread(shard.tokens_, kWhole, kWhole / kWindow, [&](int64_t begin, int64_t length) {
    check_text(path, data, shard.file_bytes_, begin, length, check);
  });
  if (check.invalid > 0)
    shard.warnings_.push_back(cat(
        "'", path, "' has ", check.invalid, " bytes that are no UTF-8",
        shard.tokens_ > kWhole ? " in the part checked" : "", ", the first at offset ", check.first_invalid,
        "; they are trained on as they are (for Latin-1 text: iconv -f LATIN1 -t UTF-8)"));
  return shard;
}

Shard Shard::from_text(std::string name, std::string text) {
  CHECK(!text.empty(), "a shard of no text");
  Shard shard;
  shard.name_ = std::move(name);
  shard.memory_ = std::move(text);
  shard.tokens_ = shard.file_bytes_ = static_cast<int64_t>(shard.memory_.size());
  return shard;
}

const unsigned char* Shard::payload() const {
  if (!file_.data()) return reinterpret_cast<const unsigned char*>(memory_.data());
  return file_.data() + header_bytes(format_);
}

void Shard::read(int64_t first, int64_t count, int32_t* tokens) const {
  CHECK(first >= 0 && count >= 0 && first <= tokens_ - count, "tokens [", first, ", ", first + count, ") of ",
        tokens_, " in ", name_);
  switch (format_) {
    case TokenFormat::llmc_uint16: return widen<uint16_t>(payload(), first, count, tokens);
    case TokenFormat::llmc_uint32: return widen<uint32_t>(payload(), first, count, tokens);
    case TokenFormat::text: return widen<unsigned char>(payload(), first, count, tokens);
  }
}

void Shard::will_need(int64_t first, int64_t count) const {
  if (!file_.data()) return;
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto width = static_cast<uint64_t>(token_bytes(format_)),
             header = static_cast<uint64_t>(header_bytes(format_));
  const uint64_t begin = (header + static_cast<uint64_t>(first) * width) / page * page;
  const uint64_t end = header + static_cast<uint64_t>(first + count) * width;
  ::madvise(const_cast<unsigned char*>(file_.data()) + begin, end - begin, MADV_WILLNEED);
}

std::optional<BadToken> Shard::find_bad_token(int64_t first, int64_t count, int64_t vocab_size) const {
  CHECK(first >= 0 && count >= 0 && first <= tokens_ - count, "tokens [", first, ", ", first + count, ") of ",
        tokens_, " in ", name_);
  switch (format_) {
    case TokenFormat::llmc_uint16: return first_bad<uint16_t>(payload(), first, count, vocab_size);
    case TokenFormat::llmc_uint32: return first_bad<uint32_t>(payload(), first, count, vocab_size);
    case TokenFormat::text: return first_bad<unsigned char>(payload(), first, count, vocab_size);
  }
  return std::nullopt;
}

std::string Shard::scan(int64_t vocab_size, int64_t budget) const {
  if (format_ == TokenFormat::llmc_uint16 && vocab_size > 65536)
    fail(ExitCode::data, "'", name_, "' has 16-bit tokens, too small for a vocabulary of ", vocab_size,
         "; expected an llm.c shard of version 7 (uint32), or a model with the vocabulary the shard was made "
         "with");
  std::optional<BadToken> bad;
  int64_t pairs = 0, low_only = 0;    // uint16 read in pairs: (x, 0) is what a small uint32 looks like
  int64_t words = 0, two_tokens = 0;  // uint32 read as two halves, both of them possible ids
  spread(tokens_, budget, 16, [&](int64_t begin, int64_t length) {
    if (!bad) bad = find_bad_token(begin, length, vocab_size);
    const int64_t looked = std::min<int64_t>(length, 4096);
    std::vector<int32_t> ids(static_cast<size_t>(looked));
    read(begin, looked, ids.data());
    for (size_t i = begin % 2 == 0 ? 0 : 1; i + 1 < ids.size(); i += 2) {
      ++pairs;
      low_only += ids[i] != 0 && ids[i + 1] == 0;
    }
    for (const int32_t id : ids) {
      ++words;
      const uint32_t u = static_cast<uint32_t>(id);
      two_tokens +=
          static_cast<int64_t>(u >> 16) < vocab_size && static_cast<int64_t>(u & 0xFFFFU) < vocab_size;
    }
  });
  if (bad) {
    const bool halves = format_ == TokenFormat::llmc_uint32 && two_tokens == words && words > 1;
    fail(ExitCode::data, "'", name_, "' has token id ", bad->id, " at token ", bad->position,
         ", but the vocabulary has ", vocab_size, " ids; ",
         halves ? "the words look like pairs of uint16 tokens under a uint32 header: write the shard again "
                  "with 32-bit tokens or with magic 20240520"
                : "use the tokenizer and model these tokens were made for");
  }
  if (format_ == TokenFormat::llmc_uint16 && pairs >= 64 && low_only * 20 > pairs * 19)
    return cat("'", name_,
               "' looks like 32-bit tokens under a uint16 header: every second token is 0; if so, write it "
               "with magic 20240801 version 7");
  return "";
}

TokenFormat detect_format(const std::string& path) {
  const MappedFile file(path);
  if (file.bytes() == 0) fail(ExitCode::data, "'", path, "' is empty; expected an llm.c shard or text");
  return identify(path, file.data(), file.bytes());
}

}  // namespace kinoe
