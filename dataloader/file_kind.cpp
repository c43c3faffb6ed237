// The first bytes of a file against the formats that are read, and those that are often mistaken for them.
#include "dataloader/file_kind.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "dataloader/megatron.h"
#include "dataloader/utf8.h"
#include "kernels/common/check.h"

namespace kinoe {
namespace {

using namespace std::string_view_literals;

struct Signature {
  std::string_view bytes;
  const char* what;
};

struct Llmc {
  TokenFormat format;
  int32_t magic, version;
};

// First bytes of files that are often given by mistake.
constexpr std::array kSignatures = {
    Signature{"\x93NUMPY"sv, "a NumPy .npy array; write its values as an llm.c shard"},
    Signature{"MMIDIDX\0\0"sv,
              "the index of a Megatron data set; give it under its name NAME.idx, beside NAME.bin"},
    Signature{"\x1F\x8B"sv, "gzip; decompress it first"},
    Signature{"\x28\xB5\x2F\xFD"sv, "zstd; decompress it first"},
    Signature{"\xFD"
              "7zXZ\0"sv,
              "xz; decompress it first"},
    Signature{"BZh"sv, "bzip2; decompress it first"},
    Signature{"PK\x03\x04"sv,
              "a zip archive (.zip, .npz, .docx, PyTorch .pt); extract its text or tokens first"},
    Signature{"PAR1"sv, "Parquet; extract its text first"},
    Signature{"ARROW1"sv, "Arrow; extract its text first"},
    Signature{"\x89HDF\r\n\x1A\n"sv, "HDF5; write its tokens as an llm.c shard"},
    Signature{"%PDF-"sv, "PDF; extract its text first"},
    Signature{"GGUF"sv, "a GGUF model, not data"},
    Signature{"\x7F"
              "ELF"sv,
              "a program"},
    Signature{"\x89PNG"sv, "a picture"},
};

int32_t header_word(const unsigned char* data, size_t i) {
  int32_t value;
  std::memcpy(&value, data + 4 * i, 4);
  return value;
}

int32_t swapped(int32_t value) {
  return static_cast<int32_t>(__builtin_bswap32(static_cast<uint32_t>(value)));
}

[[noreturn]] void refuse(const std::string& path, const std::string& looks_like) {
  fail(ExitCode::data, "'", path, "' is no token file: expected an llm.c shard (magic ", kLlmcMagicUint16,
       " or ", kLlmcMagicUint32, "), a Megatron .bin with its .idx, or UTF-8 text; it looks like ",
       looks_like);
}

bool is_text(const unsigned char* data, int64_t bytes) {
  std::string_view head(reinterpret_cast<const char*>(data),
                        static_cast<size_t>(std::min<int64_t>(bytes, 4096)));
  const bool cut = bytes > 4096;
  while (!head.empty()) {
    const int length = utf8_length(head);
    if (length == 0) return cut && utf8_cut_off(head);
    const auto c = static_cast<unsigned char>(head[0]);
    if (c < 0x20 && (c < 0x08 || c > 0x0D) && c != 0x1B) return false;
    head.remove_prefix(static_cast<size_t>(length));
  }
  return true;
}

// A .bin without a magic is refused whatever it holds; this says what it probably is.
std::string describe_bin(const unsigned char* data, int64_t bytes) {
  if (is_text(data, bytes)) return "text under the name .bin; rename it to .txt to train on its bytes";
  return std::string(
      "raw tokens without a header: Megatron .bin without its .idx (copy that too), or nanoGPT (write them "
      "as an "
      "llm.c shard)");
}

}  // namespace

bool looks_like_utf16(const unsigned char* data, int64_t bytes) {
  if (bytes >= 2 && ((data[0] == 0xFF && data[1] == 0xFE) || (data[0] == 0xFE && data[1] == 0xFF)))
    return true;
  const int64_t looked = std::min<int64_t>(bytes, 4096) / 2;
  int64_t even = 0, odd = 0;
  for (int64_t i = 0; i < looked; ++i) {
    even += data[2 * i] == 0;
    odd += data[2 * i + 1] == 0;
  }
  return looked >= 4 && ((even == 0 && odd * 10 >= looked * 7) || (odd == 0 && even * 10 >= looked * 7));
}

TokenFormat identify(const std::string& path, const unsigned char* data, int64_t bytes) {
  const int32_t magic = bytes >= 4 ? header_word(data, 0) : 0;
  const int32_t version = bytes >= 8 ? header_word(data, 1) : -1;
  for (const auto& [format, its_magic, its_version] :
       {Llmc{TokenFormat::llmc_uint16, kLlmcMagicUint16, kLlmcVersionUint16},
        Llmc{TokenFormat::llmc_uint32, kLlmcMagicUint32, kLlmcVersionUint32}}) {
    if (magic == its_magic) {
      if (bytes < kLlmcHeaderBytes)
        fail(ExitCode::data, "'", path, "' is shorter than its header: expected ", kLlmcHeaderBytes,
             " bytes and the tokens, found ", bytes, " bytes; copy or write the shard again");
      if (version != its_version)
        fail(ExitCode::data, "'", path, "' is an llm.c shard of magic ", magic, " and version ", version,
             "; expected version ", its_version,
             swapped(version) == its_version ? " (it looks byte-swapped)" : "");
      return format;
    }
    if (swapped(magic) == its_magic)
      refuse(path, "an llm.c shard in the other byte order (big-endian); write it again little-endian");
  }
  const std::string_view head(reinterpret_cast<const char*>(data),
                              static_cast<size_t>(std::min<int64_t>(bytes, 64)));
  for (const Signature& signature : kSignatures)
    if (head.starts_with(signature.bytes)) refuse(path, signature.what);
  if (has_megatron_index(path)) return megatron_format(megatron_index_of(path));
  if (path.ends_with(".bin")) refuse(path, describe_bin(data, bytes));
  if (looks_like_utf16(data, bytes)) refuse(path, "UTF-16 text; convert it with iconv -t UTF-8");
  if (std::memchr(data, 0, static_cast<size_t>(std::min<int64_t>(bytes, 4096))))
    refuse(path, "binary data (it has NUL bytes)");
  return TokenFormat::text;
}

int64_t llmc_token_count(const std::string& path, const unsigned char* data, int64_t bytes,
                         int64_t token_bytes) {
  // The header is int32 in llm.c; read unsigned it holds twice as many tokens, and no count is negative.
  const int64_t tokens = static_cast<uint32_t>(header_word(data, 2));
  const int64_t payload = bytes - kLlmcHeaderBytes;
  if (tokens == 0)
    fail(ExitCode::data, "'", path, "' says it has 0 tokens (file of ", bytes,
         " bytes); an empty shard is probably an interrupted conversion: write it again or leave it out");
  const int64_t expected = kLlmcHeaderBytes + tokens * token_bytes;
  if (bytes == expected) return tokens;
  const int64_t other_width = token_bytes == 2 ? 4 : 2;
  const std::string hint =
      payload == tokens * other_width
          ? cat("; it has exactly the size of ", other_width * 8, "-bit tokens under a header for ",
                token_bytes * 8, "-bit ones: write it again with the magic of its width")
      : bytes < expected ? "; the file is cut off: copy or write it again"
                         : "; there are trailing bytes: copy or write it again";
  fail(ExitCode::data, "'", path, "' should have ", expected, " bytes (header ", kLlmcHeaderBytes, " + ",
       tokens, " tokens of ", token_bytes, " bytes), found ", bytes, hint);
}

}  // namespace kinoe
