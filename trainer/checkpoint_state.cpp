// state.json and manifest.json, written plainly and read strictly.
#include "trainer/checkpoint_state.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "kernels/common/json_reader.h"
#include "kernels/common/untrusted.h"

namespace kinoe {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kManifestFormat = "kinoe-checkpoint";
constexpr int kBits = 60;     // of any number here, so that sums of them cannot overflow
constexpr int kMaxDepth = 8;  // of nested objects and arrays; 5 are needed

std::string hexadecimal(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

using Reader = JsonReader<Json>;

Json parse(std::string_view text, const std::string& source) {
  if (nested_deeper(text, kMaxDepth))
    fail(ExitCode::checkpoint, source, ": nested deeper than ", kMaxDepth, " levels: damaged");
  Json json = Json::parse(text.begin(), text.end(), nullptr, false);
  if (json.is_discarded())
    fail(ExitCode::checkpoint, source, ": not valid JSON: damaged; use another checkpoint");
  return json;
}

void check_version(Reader& reader) {
  const int64_t version = reader.count("format_version", kBits);
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
  Reader reader(json, cat(source, ": tensor ", name));
  TensorRecord tensor;
  tensor.name = name;
  for (const Json& n : reader.list("shape", true)) {
    if (!n.is_number_unsigned()) Reader::refuse(reader.path("shape"), "integers of 0 or more", n);
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
  tensor.offset = reader.count("offset", kBits);
  if (static_cast<uint64_t>(tensor.offset) + bytes > static_cast<uint64_t>(manifest.files[tensor.file].bytes))
    fail(ExitCode::checkpoint, reader.where(), ": its bytes lie beyond the end of ", file);

  tensor.chunks.size = static_cast<int64_t>(bytes / size_of(tensor.type));
  tensor.chunks.first = reader.count("first_chunk", kBits);
  if (tensor.chunks.size < 1 || tensor.chunks.first < 1 || tensor.chunks.first > kChunk ||
      tensor.chunks.first > tensor.chunks.size)
    fail(ExitCode::checkpoint, reader.where(), ": no chunk of ", tensor.chunks.first,
         " elements is possible");
  const std::string checksums = reader.text("xxh3");
  if (checksums.size() != 16 * static_cast<size_t>(tensor.chunks.count()))
    fail(ExitCode::checkpoint, reader.where(), ": ", tensor.chunks.count(), " checksums expected, found ",
         checksums.size() / 16);
  const std::string what = reader.path("xxh3");
  for (size_t i = 0; i < checksums.size(); i += 16)
    tensor.checksums.push_back(Reader::hash_of(checksums.substr(i, 16), what));
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
  if (state.ranks != 0) json["ranks"] = state.ranks;
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
  Reader reader(json, source);
  check_version(reader);
  TrainingState state;
  state.step = reader.count("step", kBits);
  state.samples = reader.count("samples_consumed", kBits);
  state.tokens = reader.count("tokens_consumed", kBits);
  state.first_sample = reader.count("first_sample", kBits);
  state.schedule_tokens = reader.count("schedule_tokens", kBits);
  state.skipped = reader.count("skipped", kBits);
  state.nan = reader.count("nan", kBits);
  if (json.contains("ranks")) state.ranks = reader.count("ranks", kBits);
  state.weights_hash = reader.hash("weights_hash");
  const Json& recorded = reader.object("settings");
  Reader settings(recorded, reader.path("settings"));
  for (const auto& entry : recorded.items())
    state.settings.emplace_back(entry.key(), settings.text(entry.key()));
  for (const Json& change : reader.list("changes", true)) {
    Reader one(change, source + ": changes");
    state.changes.push_back({one.count("step", kBits), one.text("name"), one.text("from"), one.text("to")});
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
  Reader reader(json, source);
  if (end == std::string_view::npos || reader.hash("xxh3") != checksum(text.data(), end))
    fail(ExitCode::checkpoint, source,
         ": its checksum does not fit its text: damaged; use another checkpoint");
  if (reader.text("format") != kManifestFormat)
    fail(ExitCode::checkpoint, source, ": expected format ", kManifestFormat, ", found ",
         reader.text("format").substr(0, 40));
  check_version(reader);
  if (reader.count("chunk_elements", kBits) != kChunk)
    fail(ExitCode::checkpoint, source, ": chunks of ", reader.count("chunk_elements", kBits),
         " elements, this program has chunks of ", kChunk);

  CheckpointManifest manifest;
  manifest.step = reader.count("step", kBits);
  for (const auto& [name, value] : reader.object("files").items()) {
    Reader one(value, cat(source, ": file ", name));
    FileRecord file{name, one.count("bytes", kBits), one.count("checked_bytes", kBits), one.hash("xxh3")};
    if (file.covered > file.bytes || name.empty() || name.front() == '/' ||
        name.find("..") != std::string::npos)
      fail(ExitCode::checkpoint, one.where(), ": not a file of a checkpoint");
    manifest.files.push_back(std::move(file));
  }
  for (const auto& entry : reader.object("tensors").items()) {
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
