// Tokens of every width as int32, and the scans that look for ids that cannot be.
#include "dataloader/shard.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "dataloader/file_kind.h"
#include "dataloader/fingerprint.h"
#include "dataloader/utf8.h"
#include "kernels/common/check.h"

namespace kinoe {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and read in place");

constexpr int64_t kWhole = int64_t{256}
                           << 20;  // text up to this size is checked from end to end, larger text in windows
constexpr int64_t kWindow = int64_t{1} << 20;

int64_t header_bytes(TokenFormat format) {
  const bool llmc = format == TokenFormat::llmc_uint16 || format == TokenFormat::llmc_uint32;
  return llmc ? kLlmcHeaderBytes : 0;
}

/// Of `count` tokens at `data`, the first that is negative or >= vocab_size.
template <class Word>
std::optional<BadToken> first_bad(const unsigned char* data, int64_t count, int64_t vocab_size) {
  // A negative id becomes a huge one, so that one comparison finds both.
  using Signed = std::conditional_t<sizeof(Word) <= 4, int32_t, int64_t>;
  using Id = std::make_unsigned_t<Signed>;
  constexpr int64_t kBlock = 4096;
  const auto word = [&](int64_t i) {
    Word value;
    std::memcpy(&value, data + static_cast<size_t>(i) * sizeof(Word), sizeof(Word));
    return value;
  };
  const auto id = [&](int64_t i) { return static_cast<Id>(static_cast<Signed>(word(i))); };
  const auto limit = static_cast<uint64_t>(vocab_size);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    Id largest = 0;
    for (int64_t i = begin; i < end; ++i) largest = std::max(largest, id(i));
    if (largest < limit) continue;
    for (int64_t i = begin; i < end; ++i)
      if (id(i) >= limit) return BadToken{i, static_cast<int64_t>(word(i))};
  }
  return std::nullopt;
}

template <class Word>
void widen(const unsigned char* data, int64_t count, int32_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    Word value;
    std::memcpy(&value, data + static_cast<size_t>(i) * sizeof(Word), sizeof(Word));
    if constexpr (sizeof(Word) > 4)
      out[i] = value >= 0 && value <= INT32_MAX ? static_cast<int32_t>(value) : -1;
    else
      out[i] = static_cast<int32_t>(value);  // NOLINT(bugprone-signed-char-misuse): int8 ids keep their sign
  }
}

/// How many ids the type of the tokens has.
int64_t ids_of(TokenFormat format) {
  return with_word(format, [](auto word) {
    using Word = decltype(word);
    return sizeof(Word) > 4 ? INT64_MAX : static_cast<int64_t>(std::numeric_limits<Word>::max()) + 1;
  });
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

Shard Shard::open(const std::string& path) {
  Shard shard;
  shard.name_ = path;
  shard.file_ = MappedFile(path);
  shard.file_bytes_ = shard.file_.bytes();
  const unsigned char* data = shard.file_.data();
  if (shard.file_bytes_ == 0) fail(ExitCode::data, "'", path, "' is empty; expected an llm.c shard or text");
  const MappedRead guard(shard.file_);
  shard.format_ = identify(path, data, shard.file_bytes_);
  if (is_megatron(shard.format_)) {
    const MegatronIndex& index = shard.index_.emplace(path, shard.file_bytes_);
    shard.tokens_ = index.tokens();
    if (index.used_bytes() < shard.file_bytes_)
      shard.warnings_.push_back(cat("'", path, "' has ", shard.file_bytes_, " bytes, its index uses ",
                                    index.used_bytes(), " of them; the tokens after that are not read"));
    return shard;
  }
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

template <class Visit>
void Shard::each_run(int64_t first, int64_t count, Visit visit) const {
  CHECK(first >= 0 && count >= 0 && first <= tokens_ - count, "tokens [", first, ", ", first + count, ") of ",
        tokens_, " in ", name_);
  const MappedRead guard(file_);
  const unsigned char* data =
      file_.data() ? file_.data() : reinterpret_cast<const unsigned char*>(memory_.data());
  if (!index_) {
    visit(data + header_bytes(format_) + first * token_bytes(format_), first, count);
    return;
  }
  while (count > 0) {
    const MegatronIndex::Run run = index_->at(first);
    const int64_t length = std::min(count, run.tokens);
    visit(data + run.offset, first, length);
    first += length;
    count -= length;
  }
}

void Shard::read(int64_t first, int64_t count, int32_t* tokens) const {
  with_word(format_, [&](auto word) {
    each_run(first, count, [&](const unsigned char* data, int64_t position, int64_t length) {
      widen<decltype(word)>(data, length, tokens + (position - first));
    });
  });
}

void Shard::will_need(int64_t first, int64_t count) const {
  if (!file_.data()) return;
  each_run(first, count, [&](const unsigned char* data, int64_t, int64_t length) {
    file_.will_need(data - file_.data(), length * token_bytes(format_));
  });
}

std::optional<BadToken> Shard::find_bad_token(int64_t first, int64_t count, int64_t vocab_size) const {
  std::optional<BadToken> bad;
  with_word(format_, [&](auto word) {
    each_run(first, count, [&](const unsigned char* data, int64_t position, int64_t length) {
      if (bad) return;
      bad = first_bad<decltype(word)>(data, length, vocab_size);
      if (bad) bad->position += position;
    });
  });
  return bad;
}

bool Shard::holds_token(int64_t id, int64_t budget) const {
  bool found = false;
  std::vector<int32_t> ids;
  spread(tokens_, budget, 16, [&](int64_t begin, int64_t length) {
    constexpr int64_t kBlock = 1 << 16;
    for (int64_t at = begin; at < begin + length && !found; at += kBlock) {
      ids.resize(static_cast<size_t>(std::min(kBlock, begin + length - at)));
      read(at, static_cast<int64_t>(ids.size()), ids.data());
      found = std::find(ids.begin(), ids.end(), id) != ids.end();
    }
  });
  return found;
}

void Shard::find_documents(int64_t first, int64_t count, const int32_t* tokens, int32_t* start,
                           int32_t* end) const {
  std::fill_n(start, count, 0);
  for (int64_t t = 1; t < count; ++t) start[t] = end_token_ >= 0 && tokens[t - 1] == end_token_;
  if (index_)
    index_->each_document_start(first + 1, first + count,
                                [&](int64_t position) { start[position - first] = 1; });
  int32_t begin = 0;
  for (int32_t t = 0; t < count; ++t) start[t] = begin = start[t] != 0 ? t : begin;
  auto past = static_cast<int32_t>(count);
  for (auto t = static_cast<int32_t>(count) - 1; t >= 0; --t) {
    end[t] = past;
    if (start[t] == t) past = t;
  }
}

std::string Shard::fingerprint() const {
  ContentHash hash;
  if (!file_.data()) {
    add_fingerprint(hash, reinterpret_cast<const unsigned char*>(memory_.data()), file_bytes_);
    return hash.hex();
  }
  for (const MappedFile* file : {&file_, index_ ? &index_->file() : nullptr}) {
    if (file == nullptr) continue;
    const MappedRead guard(*file);
    add_fingerprint(hash, file->data(), file->bytes());
  }
  return hash.hex();
}

std::string Shard::scan(int64_t vocab_size, int64_t budget) const {
  const int64_t representable = ids_of(format_);
  if (format_ != TokenFormat::text && representable < vocab_size)
    fail(ExitCode::data, "'", name_, "' has ", name_of(format_), " tokens, ids below ", representable,
         ", too small for a vocabulary of ", vocab_size, "; expected ",
         is_megatron(format_) ? "a wider type" : "an llm.c shard of version 7 (uint32)",
         ", or a model with the vocabulary the tokens were made with");
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
  const MappedRead guard(file);
  if (file.bytes() == 0) fail(ExitCode::data, "'", path, "' is empty; expected an llm.c shard or text");
  return identify(path, file.data(), file.bytes());
}

}  // namespace kinoe
