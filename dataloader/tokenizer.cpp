// Bytes as tokens.
#include "dataloader/tokenizer.h"

#include "dataloader/utf8.h"
#include "kernels/common/check.h"

namespace kinoe {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  [[nodiscard]] std::string name() const override { return "bytes"; }
  [[nodiscard]] int64_t vocab_size() const override { return 256; }

  [[nodiscard]] std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    ids.reserve(text.size());
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
    return ids;
  }

  [[nodiscard]] std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    text.reserve(ids.size());
    for (const int32_t id : ids) {
      if (id < 0 || id > 255)
        fail(ExitCode::data, "token id ", id,
             " is no byte: the byte tokenizer knows ids 0 to 255; decode with the tokenizer these tokens "
             "were made by");
      text += static_cast<char>(static_cast<unsigned char>(id));
    }
    return text;
  }
};

}  // namespace

std::unique_ptr<Tokenizer> byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

std::string printable(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  while (!bytes.empty()) {
    const int length = utf8_length(bytes);
    if (length == 0) {
      out += "\xEF\xBF\xBD";
      bytes.remove_prefix(1);
      continue;
    }
    const auto c = static_cast<unsigned char>(bytes[0]);
    // C1 controls (U+0080 to U+009F) move a terminal's cursor as ESC does.
    const bool control = (c < 0x20 && c != '\n' && c != '\t') || c == 0x7F ||
                         (c == 0xC2 && static_cast<unsigned char>(bytes[1]) < 0xA0);
    if (control)
      out += '?';
    else
      out += bytes.substr(0, static_cast<size_t>(length));
    bytes.remove_prefix(static_cast<size_t>(length));
  }
  return out;
}

std::string one_line(std::string_view bytes) {
  std::string out;
  for (const char c : printable(bytes)) {
    if (c == '\n')
      out += "\\n";
    else if (c == '\t')
      out += "\\t";
    else
      out += c;
  }
  return out;
}

}  // namespace kinoe
