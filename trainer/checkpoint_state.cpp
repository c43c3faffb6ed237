// state.json and manifest.json, written plainly and read strictly.
#include "trainer/checkpoint_state.h"

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace kinoe {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kManifestFormat = "kinoe-checkpoint";
constexpr uint64_t kMost = uint64_t{1} << 60;  // of any number here, so that sums of them cannot overflow
constexpr int kMaxDepth = 8;                   // of nested objects and arrays; 5 are needed

std::string hexadecimal(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

/// A file's JSON, whose values are taken with a type and a complaint. `where_` names the file and the place in it.
class Reader {
 public:
  Reader(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
    if (!json.is_object()) fail(ExitCode::checkpoint, where_, ": expected a JSON object");
  }

  [[nodiscard]] const Json& at(const char* key) const {
    const auto found = json_.find(key);
    if (found == json_.end()) fail(ExitCode::checkpoint, where_, ": ", key, " is missing");
    return *found;
  }
  [[nodiscard]] int64_t integer(const char* key) const {
    const Json& value = at(key);
    if (!value.is_number_unsigned() || value.get<uint64_t>() > kMost)
      fail(ExitCode::checkpoint, where_, ": ", key, " must be an integer from 0 to 2^60, here ",
           value.dump().substr(0, 40));
    return value.get<int64_t>();
  }
  [[nodiscard]] std::string text(const char* key) const { return text(at(key), key); }
  [[nodiscard]] std::string text(const Json& value, const std::string& key) const {
    if (!value.is_string()) fail(ExitCode::checkpoint, where_, ": ", key, " must be a text");
    return value.get<std::string>();
  }
  [[nodiscard]] uint64_t hash(const char* key) const { return hash(text(key), key); }
  [[nodiscard]] uint64_t hash(const std::string& digits, const char* key) const {
    if (digits.size() != 16 || digits.find_first_not_of("0123456789abcdef") != std::string::npos)
      fail(ExitCode::checkpoint, where_, ": ", key, " must be 16 hexadecimal digits");
    return std::stoull(digits, nullptr, 16);
  }
  [[nodiscard]] const std::string& where() const { return where_; }

 private:
  const Json& json_;
  std::string where_;
};

Json parse(std::string_view text, const std::string& source) {
  const auto check = [&](int depth, Json::parse_event_t /*event*/, Json& /*parsed*/) {
    if (depth > kMaxDepth)
      fail(ExitCode::checkpoint, source, ": nested deeper than ", kMaxDepth, " levels: damaged");
    return true;
  };
  Json json = Json::parse(text.begin(), text.end(), check, false);
  if (json.is_discarded())
    fail(ExitCode::checkpoint, source, ": not valid JSON: damaged; use another checkpoint");
  return json;
}

void check_version(const Reader& reader) {
  const int64_t version = reader.integer("format_version");
  if (version > kCheckpointVersion)
    fail(ExitCode::checkpoint, reader.where(), ": format version ", version,
         " is newer than this program, which reads up to ", kCheckpointVersion, "; use a newer train_gpt");
  if (version < 1) fail(ExitCode::checkpoint, reader.where(), ": there is no format version ", version);
}

Json to_object(const TensorRecord& tensor, const CheckpointManifest& manifest) {
  std::string checksums;
  for (const uint64_t checksum : tensor.checksums) checksums += hexadecimal(checksum);
  return {{"dtype", name_of(tensor.type)},
          {"shape", tensor.shape},
          {"file", manifest.files[tensor.file].name},
          {"offset", tensor.offset},
          {"first_chunk", tensor.chunks.first},
          {"xxh3", checksums}};
}

TensorRecord tensor_from(const std::string& name, const Json& json, const CheckpointManifest& manifest,
                         const std::string& source) {
  const Reader reader(json, cat(source, ": tensor ", name));
  TensorRecord tensor;
  tensor.name = name;
  const Json& shape = reader.at("shape");
  if (!shape.is_array()) fail(ExitCode::checkpoint, reader.where(), ": shape must be an array");
  for (const Json& n : shape) {
    if (!n.is_number_unsigned())
      fail(ExitCode::checkpoint, reader.where(), ": shape must hold integers of at least 0");
    tensor.shape.push_back(n.get<int64_t>());
  }
  const std::optional<FileDType> type = parse_file_dtype(reader.text("dtype"));
  if (type != FileDType::f32 && type != FileDType::bf16)
    fail(ExitCode::checkpoint, reader.where(), ": dtype must be F32 or BF16");
  tensor.type = *type;

  const std::string file = reader.text("file");
  while (tensor.file < manifest.files.size() && manifest.files[tensor.file].name != file) ++tensor.file;
  if (tensor.file == manifest.files.size())
    fail(ExitCode::checkpoint, reader.where(), ": its file ", file, " is not listed");
  const uint64_t bytes = byte_size({name, tensor.type, tensor.shape});  // checks the shape
  tensor.offset = reader.integer("offset");
  if (static_cast<uint64_t>(tensor.offset) + bytes > static_cast<uint64_t>(manifest.files[tensor.file].bytes))
    fail(ExitCode::checkpoint, reader.where(), ": its bytes lie beyond the end of ", file);

  tensor.chunks.size = static_cast<int64_t>(bytes / size_of(tensor.type));
  tensor.chunks.first = reader.integer("first_chunk");
  if (tensor.chunks.size < 1 || tensor.chunks.first < 1 || tensor.chunks.first > kChunk ||
      tensor.chunks.first > tensor.chunks.size)
    fail(ExitCode::checkpoint, reader.where(), ": no chunk of ", tensor.chunks.first,
         " elements is possible");
  const std::string checksums = reader.text("xxh3");
  if (checksums.size() != 16 * static_cast<size_t>(tensor.chunks.count()))
    fail(ExitCode::checkpoint, reader.where(), ": ", tensor.chunks.count(), " checksums expected, found ",
         checksums.size() / 16);
  for (size_t i = 0; i < checksums.size(); i += 16)
    tensor.checksums.push_back(reader.hash(checksums.substr(i, 16), "xxh3"));
  return tensor;
}

}  // namespace

std::string to_json(const TrainingState& state) {
  Json json;
  json["format_version"] = kCheckpointVersion;
  json["step"] = state.step;
  json["samples_consumed"] = state.samples;
  json["tokens_consumed"] = state.tokens;
  json["first_sample"] = state.first_sample;
  json["schedule_tokens"] = state.schedule_tokens;
  json["skipped"] = state.skipped;
  json["nan"] = state.nan;
  json["weights_hash"] = hexadecimal(state.weights_hash);
  json["settings"] = Json::object();
  for (const auto& [name, value] : state.settings) json["settings"][name] = value;
  json["changes"] = Json::array();
  for (const SettingChange& change : state.changes)
    json["changes"].push_back(
        {{"step", change.step}, {"name", change.name}, {"from", change.from}, {"to", change.to}});
  json["data"] = Json::parse(to_json(state.data));
  // Paths are bytes, not always UTF-8; what is not becomes U+FFFD.
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

TrainingState training_state_from_json(std::string_view text, const std::string& source) {
  const Json json = parse(text, source);
  const Reader reader(json, source);
  check_version(reader);
  TrainingState state;
  state.step = reader.integer("step");
  state.samples = reader.integer("samples_consumed");
  state.tokens = reader.integer("tokens_consumed");
  state.first_sample = reader.integer("first_sample");
  state.schedule_tokens = reader.integer("schedule_tokens");
  state.skipped = reader.integer("skipped");
  state.nan = reader.integer("nan");
  state.weights_hash = reader.hash("weights_hash");
  const Json& settings = reader.at("settings");
  if (!settings.is_object()) fail(ExitCode::checkpoint, source, ": settings must be an object");
  for (const auto& [name, value] : settings.items())
    state.settings.emplace_back(name, reader.text(value, "settings: " + name));
  const Json& changes = reader.at("changes");
  if (!changes.is_array()) fail(ExitCode::checkpoint, source, ": changes must be an array");
  for (const Json& change : changes) {
    const Reader one(change, source + ": changes");
    state.changes.push_back({one.integer("step"), one.text("name"), one.text("from"), one.text("to")});
  }
  state.data = data_state_from_json(reader.at("data").dump(), source);
  return state;
}

std::string to_json(const CheckpointManifest& manifest) {
  Json json;
  json["format"] = kManifestFormat;
  json["format_version"] = kCheckpointVersion;
  json["step"] = manifest.step;
  json["chunk_elements"] = kChunk;
  for (const FileRecord& file : manifest.files)
    json["files"][file.name] = {
        {"bytes", file.bytes}, {"checked_bytes", file.covered}, {"xxh3", hexadecimal(file.checksum)}};
  for (const Section section : kSections)
    for (const TensorRecord& tensor : manifest.sections[static_cast<size_t>(section)])
      json["tensors"][name_of(section)][tensor.name] = to_object(tensor, manifest);
  // The last entry is the checksum of everything before it.
  std::string text = json.dump(1);
  text.resize(text.rfind("\n}"));
  return text + ",\n \"xxh3\": \"" + hexadecimal(checksum(text.data(), text.size())) + "\"\n}\n";
}

CheckpointManifest checkpoint_manifest_from_json(std::string_view text, const std::string& source) {
  const size_t end = text.rfind(",\n \"xxh3\": \"");
  const Json json = parse(text, source);
  const Reader reader(json, source);
  if (end == std::string_view::npos || reader.hash("xxh3") != checksum(text.data(), end))
    fail(ExitCode::checkpoint, source,
         ": its checksum does not fit its text: damaged; use another checkpoint");
  if (reader.text("format") != kManifestFormat)
    fail(ExitCode::checkpoint, source, ": expected format ", kManifestFormat, ", found ",
         reader.text("format").substr(0, 40));
  check_version(reader);
  if (reader.integer("chunk_elements") != kChunk)
    fail(ExitCode::checkpoint, source, ": chunks of ", reader.integer("chunk_elements"),
         " elements, this program has chunks of ", kChunk);

  CheckpointManifest manifest;
  manifest.step = reader.integer("step");
  for (const auto& [name, value] : reader.at("files").items()) {
    const Reader one(value, cat(source, ": file ", name));
    FileRecord file{name, one.integer("bytes"), one.integer("checked_bytes"), one.hash("xxh3")};
    if (file.covered > file.bytes || name.empty() || name.front() == '/' ||
        name.find("..") != std::string::npos)
      fail(ExitCode::checkpoint, one.where(), ": not a file of a checkpoint");
    manifest.files.push_back(std::move(file));
  }
  const Json& tensors = reader.at("tensors");
  if (!tensors.is_object()) fail(ExitCode::checkpoint, source, ": tensors must be an object");
  for (const auto& entry : tensors.items()) {
    const std::string& section_name = entry.key();
    const Json& members = entry.value();
    const auto section = std::find_if(kSections.begin(), kSections.end(),
                                      [&](Section s) { return section_name == name_of(s); });
    if (section == kSections.end() || !members.is_object())
      fail(ExitCode::checkpoint, source, ": tensors: ", section_name, " is not known");
    for (const auto& [name, value] : members.items())
      manifest.sections[static_cast<size_t>(*section)].push_back(tensor_from(name, value, manifest, source));
  }
  return manifest;
}

}  // namespace kinoe
