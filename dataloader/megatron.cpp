// The index of a Megatron data set, checked as a whole before one number of it is used.
#include "dataloader/megatron.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

using namespace std::string_view_literals;

constexpr std::string_view kMagic = "MMIDIDX\0\0"sv;
constexpr int64_t kHeaderBytes = 9 + 8 + 1 + 8 + 8;
constexpr int64_t kSequenceBytes = 4 + 8;

template <class T>
T value_at(const unsigned char* data, int64_t offset) {
  T value;
  std::memcpy(&value, data + offset, sizeof(T));
  return value;
}

TokenFormat format_of(const std::string& path, const unsigned char* data, int64_t bytes) {
  if (bytes < kHeaderBytes)
    fail(ExitCode::data, "'", path, "' is shorter than the header of a Megatron index: expected ",
         kHeaderBytes, " bytes and more, found ", bytes, "; copy it again or make the data set again");
  if (std::memcmp(data, kMagic.data(), kMagic.size()) != 0)
    fail(ExitCode::data, "'", path, "' is no Megatron index: expected it to begin with MMIDIDX",
         std::memcmp(data, "TNTIDX", 6) == 0 ? ", found TNTIDX, the older format that is not memory-mapped; "
                                               "make the data set again with --dataset-impl mmap"
                                             : "; make the data set again");
  const auto version = value_at<uint64_t>(data, 9);
  if (version != 1)
    fail(ExitCode::data, "'", path, "' is a Megatron index of version ", version, "; expected 1",
         version == uint64_t{1} << 56 ? " (it looks byte-swapped)" : "");
  switch (data[17]) {
    case 1: return TokenFormat::megatron_uint8;
    case 2: return TokenFormat::megatron_int8;
    case 3: return TokenFormat::megatron_int16;
    case 4: return TokenFormat::megatron_int32;
    case 5: return TokenFormat::megatron_int64;
    case 6:
    case 7:
      fail(ExitCode::data, "'", path, "' says its tokens are floating-point numbers (type ", int{data[17]},
           ", ", data[17] == 6 ? "float64" : "float32", "); expected integers: make the data set again");
    case 8: return TokenFormat::megatron_uint16;
    default:
      fail(ExitCode::data, "'", path, "' has token type ", int{data[17]},
           "; expected 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64 or 8 uint16");
  }
}

}  // namespace

std::string megatron_index_of(const std::string& bin_path) {
  CHECK(bin_path.ends_with(".bin"), bin_path);
  return bin_path.substr(0, bin_path.size() - 4) + ".idx";
}

bool has_megatron_index(const std::string& bin_path) {
  struct stat info {};
  return bin_path.ends_with(".bin") && ::stat(megatron_index_of(bin_path).c_str(), &info) == 0 &&
         S_ISREG(info.st_mode);
}

TokenFormat megatron_format(const std::string& index_path) {
  const MappedFile file(index_path);
  const MappedRead guard(file);
  return format_of(index_path, file.data(), file.bytes());
}

MegatronIndex::MegatronIndex(const std::string& bin_path, int64_t bin_bytes)
    : file_(megatron_index_of(bin_path)) {
  const std::string& path = file_.path();
  const MappedRead guard(file_);
  format_ = format_of(path, file_.data(), file_.bytes());
  const int64_t width = token_bytes(format_), payload = file_.bytes() - kHeaderBytes;
  const auto sequences = value_at<uint64_t>(file_.data(), 18), bounds = value_at<uint64_t>(file_.data(), 26);
  // Counts are compared by division: their products could overflow.
  const auto most = static_cast<uint64_t>(payload);
  if (sequences == 0 || bounds < 2)
    fail(ExitCode::data, "'", path, "' has ", sequences, " sequences and ", bounds,
         " document bounds; expected at least 1 and 2: an interrupted conversion, make the data set again");
  const bool fits = sequences <= most / kSequenceBytes && bounds <= (most - sequences * kSequenceBytes) / 8;
  const uint64_t rest = fits ? most - sequences * kSequenceBytes - bounds * 8 : 0;
  if (fits && rest == sequences)
    fail(ExitCode::data, "'", path,
         "' is a multimodal Megatron index (it has a mode for each sequence); expected "
         "one of text only");
  if (!fits || rest != 0)
    fail(ExitCode::data, "'", path, "' should have ", kHeaderBytes, " + ", sequences, " x ", kSequenceBytes,
         " + ", bounds, " x 8 bytes (", sequences, " sequences, ", bounds, " document bounds), found ",
         file_.bytes(), fits ? "; there are trailing bytes" : "; the file is cut off",
         ": copy it or make the data set again");
  sequences_ = static_cast<int64_t>(sequences);
  documents_ = static_cast<int64_t>(bounds) - 1;

  file_.advise_sequential(true);
  int64_t end = 0;  // of the sequence before, in bytes
  for (int64_t s = 0; s < sequences_; ++s) {
    const int64_t size = size_of_sequence(s), from = pointer(s);
    if (size < 0)
      fail(ExitCode::data, "'", path, "': sequence ", s, " has ", size, " tokens; the index is damaged");
    if (from < end)
      fail(ExitCode::data, "'", path, "': sequence ", s, " begins at byte ", from, ", expected ", end,
           " or later, where the one before it ends; the index is damaged");
    if (from > bin_bytes || size > (bin_bytes - from) / width)
      fail(ExitCode::data, "'", bin_path, "' has ", bin_bytes, " bytes, but sequence ", s, " in '", path,
           "' has ", size, " tokens of ", width, " bytes from byte ", from,
           "; the .bin is cut off or belongs to another index: copy both again");
    if (size > 0 && (pieces_.empty() || from != used_bytes_)) pieces_.push_back({tokens_, from});
    if (size > 0) used_bytes_ = from + size * width;
    tokens_ += size;
    end = from + size * width;
  }
  if (tokens_ == 0)
    fail(ExitCode::data, "'", path, "' has ", sequences_, " sequences and no token; make the data set again");
  int64_t before = 0;
  for (int64_t d = 0; d <= documents_; ++d) {
    const int64_t sequence = first_sequence(d);
    if (sequence < before || sequence > sequences_ || (d == 0 && sequence != 0) ||
        (d == documents_ && sequence != sequences_))
      fail(ExitCode::data, "'", path, "': document bound ", d, " is sequence ", sequence, ", expected ",
           d == 0            ? "0"
           : d == documents_ ? cat(sequences_, ", the number of sequences")
                             : cat("one from ", before, " to ", sequences_),
           "; the index is damaged");
    before = sequence;
  }
  file_.advise_sequential(false);
}

int64_t MegatronIndex::size_of_sequence(int64_t sequence) const {
  return value_at<int32_t>(file_.data(), kHeaderBytes + 4 * sequence);
}

int64_t MegatronIndex::pointer(int64_t sequence) const {
  return value_at<int64_t>(file_.data(), kHeaderBytes + 4 * sequences_ + 8 * sequence);
}

int64_t MegatronIndex::first_sequence(int64_t document) const {
  return value_at<int64_t>(file_.data(), kHeaderBytes + kSequenceBytes * sequences_ + 8 * document);
}

MegatronIndex::Run MegatronIndex::at(int64_t position) const {
  CHECK(position >= 0 && position < tokens_, "token ", position, " of ", tokens_);
  const auto next = std::upper_bound(pieces_.begin(), pieces_.end(), position,
                                     [](int64_t p, const Piece& piece) { return p < piece.position; });
  const Piece& piece = *(next - 1);
  const int64_t end = next == pieces_.end() ? tokens_ : next->position;
  return {piece.offset + (position - piece.position) * token_bytes(format_), end - position};
}

int64_t MegatronIndex::document_start(int64_t document) const {
  const int64_t sequence = first_sequence(document);
  if (sequence == sequences_) return tokens_;
  const int64_t offset = pointer(sequence);
  const auto next = std::upper_bound(pieces_.begin(), pieces_.end(), offset,
                                     [](int64_t o, const Piece& piece) { return o < piece.offset; });
  if (next == pieces_.begin()) return 0;
  const Piece& piece = *(next - 1);
  const int64_t end = next == pieces_.end() ? tokens_ : next->position;
  // An empty sequence may point between two pieces.
  return std::min(piece.position + (offset - piece.offset) / token_bytes(format_), end);
}

int64_t MegatronIndex::first_document(int64_t position) const {
  int64_t low = 0, high = documents_;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (document_start(middle) < position)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

}  // namespace kinoe
