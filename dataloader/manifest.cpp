// manifest.json, read strictly: what scripts/prepare_data.py wrote, or an error.
#include "dataloader/manifest.h"

#include <sys/stat.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "kernels/common/check.h"
#include "kernels/common/untrusted.h"

namespace kinoe {
namespace {

using Json = nlohmann::json;

constexpr const char* kFormat = "kinoe-data-1";
constexpr const char* kAnyFormat = "kinoe-data-";
constexpr int64_t kLargest = 64 << 20;  // bytes; a file entry has about 150

/// An object of the manifest with the path to it, for messages.
struct Part {
  const Json& json;
  std::string where;

  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const {
    const std::string found =
        json.is_object() && json.contains(key) ? json.at(key).dump().substr(0, 60) : "nothing";
    fail(ExitCode::data, where, key, ": expected ", expected, ", found ", found,
         "; write the manifest again, or remove it to read the shards without it");
  }
  [[nodiscard]] Part object(const std::string& key) const {
    if (!json.contains(key) || !json.at(key).is_object()) refuse(key, "an object");
    return {json.at(key), cat(where, key, ".")};
  }
  [[nodiscard]] std::string text(const std::string& key) const {
    if (!json.contains(key) || !json.at(key).is_string()) refuse(key, "a string");
    return json.at(key).get<std::string>();
  }
  [[nodiscard]] std::string hash(const std::string& key) const {
    std::string digits = text(key);
    if (digits.size() != 32 || digits.find_first_not_of("0123456789abcdef") != std::string::npos)
      refuse(key, "32 hexadecimal digits in lower case");
    return digits;
  }
  [[nodiscard]] int64_t count(const std::string& key, int64_t lowest) const {
    const bool natural = json.contains(key) && json.at(key).is_number_unsigned();
    if (!natural || json.at(key).get<uint64_t>() > static_cast<uint64_t>(INT64_MAX) ||
        json.at(key).get<int64_t>() < lowest)
      refuse(key, cat("an integer of ", lowest, " or more"));
    return json.at(key).get<int64_t>();
  }
};

}  // namespace

std::string file_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::optional<Manifest> read_manifest(const std::string& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  const auto bytes = static_cast<int64_t>(in.tellg());
  if (!in || bytes < 0) fail(ExitCode::data, "cannot read '", path, "'; check its permissions");
  if (bytes > kLargest) fail(ExitCode::data, "'", path, "' has ", bytes, " bytes, too many for a manifest");
  in.seekg(0);
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  // Objects in an object in an array are three; other programs' files may have some more.
  const Json json = nested_deeper(text, 64) ? Json() : Json::parse(text, nullptr, false);
  const std::string where = "'" + path + "': ";
  if (!json.is_object())
    fail(ExitCode::data, where,
         "no JSON object; write the manifest again, or remove it to read the shards without it");
  if (!json.contains("format") || !json.at("format").is_string() ||
      !json.at("format").get<std::string>().starts_with(kAnyFormat))
    return std::nullopt;
  const Part whole{json, where};
  if (whole.text("format") != kFormat) whole.refuse("format", cat('"', kFormat, '"'));

  Manifest manifest;
  manifest.path = path;
  const Part tokenizer = whole.object("tokenizer");
  manifest.tokenizer_file = tokenizer.text("file");
  manifest.tokenizer_hash = tokenizer.hash("xxh3_128");
  manifest.vocab_size = tokenizer.count("vocab_size", 1);
  if (!tokenizer.json.contains("eot_id")) tokenizer.refuse("eot_id", "an integer or null");
  if (!tokenizer.json.at("eot_id").is_null()) {
    manifest.end_token = tokenizer.count("eot_id", 0);
    if (manifest.end_token >= manifest.vocab_size) tokenizer.refuse("eot_id", "an id below vocab_size");
  }
  if (!json.contains("files") || !json.at("files").is_array()) whole.refuse("files", "a list");
  const Json& files = json.at("files");
  for (size_t i = 0; i < files.size(); ++i) {
    const Part entry{files[i], cat(where, "files[", i, "].")};
    if (!files[i].is_object()) fail(ExitCode::data, entry.where, " expected an object");
    Manifest::File file;
    file.split = entry.text("split");
    if (file.split != "train" && file.split != "val") entry.refuse("split", "\"train\" or \"val\"");
    file.bytes = entry.count("bytes", 0);
    file.tokens = entry.count("tokens", 0);
    file.documents = entry.count("documents", 0);
    file.hash = entry.hash("xxh3_128");
    const std::string name = entry.text("name");
    if (name.empty() || name.find('/') != std::string::npos) entry.refuse("name", "a name without slashes");
    if (!manifest.files.emplace(name, file).second) entry.refuse("name", "each name once");
  }
  return manifest;
}

const Manifest* Manifests::of(const std::string& file) {
  const std::string name = file_name(file);
  const std::string path = file.substr(0, file.size() - name.size()) + "manifest.json";
  const auto [entry, fresh] = by_path_.try_emplace(path);
  struct stat info {};
  if (fresh && ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode)) entry->second = read_manifest(path);
  return entry->second && entry->second->files.contains(name) ? &*entry->second : nullptr;
}

}  // namespace kinoe
