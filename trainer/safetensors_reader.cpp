// Reading safetensors by others: nothing in a header is believed before it is checked.
#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_set>

#include "trainer/safetensors.h"

namespace kinoe {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeader = 100'000'000;  // the limit of the reference implementation
constexpr int kMaxDepth = 8;                  // of a header or an index: 3 is needed

/// A name from a file as it may stand in a message: one line, not endless.
std::string printable(std::string_view name) {
  std::string text = "\"";
  for (const char c : name.substr(0, 120)) text += static_cast<unsigned char>(c) < 32 || c == 127 ? '?' : c;
  return text + (name.size() > 120 ? "...\"" : "\"");
}

/// JSON where a key that occurs twice is an error: parsers differ in which one they take.
json parse_json(std::string_view text, const std::string& path) {
  std::vector<std::unordered_set<std::string>> keys(kMaxDepth + 2);  // by depth, of the object being read
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > kMaxDepth)
      fail(ExitCode::checkpoint, path, ": the JSON is nested deeper than ", kMaxDepth,
           " levels: not a header");
    if (event == json::parse_event_t::object_start) keys[static_cast<size_t>(depth) + 1].clear();
    if (event == json::parse_event_t::key &&
        !keys[static_cast<size_t>(depth)].insert(parsed.get<std::string>()).second)
      fail(ExitCode::checkpoint, path, ": the key ", printable(parsed.get<std::string>()), " occurs twice");
    return true;
  };
  try {
    json result = json::parse(text.begin(), text.end(), check);
    if (!result.is_object()) fail(ExitCode::checkpoint, path, ": a JSON object is needed");
    return result;
  } catch (const json::parse_error& error) {
    fail(ExitCode::checkpoint, path, ": not valid JSON at byte ", error.byte, " of ", text.size());
  } catch (const json::exception&) {  // a number beyond every type
    fail(ExitCode::checkpoint, path, ": the JSON holds a number that is too large");
  }
}

std::string read_header(const File& file, uint64_t size) {
  const std::string& path = file.path();
  if (size < 8)
    fail(ExitCode::checkpoint, path, ": ", size,
         " bytes are too few for a safetensors file: it is truncated");
  std::array<unsigned char, 8> first{};
  file.read_at(0, first.data(), first.size());
  const std::string_view start(reinterpret_cast<const char*>(first.data()), first.size());
  if (start == "version ")
    fail(ExitCode::checkpoint, path, ": a Git LFS pointer, not the weights: fetch them with git lfs pull");
  if (start.substr(0, 4) == "PK\x03\x04")
    fail(ExitCode::checkpoint, path, ": a zip archive (PyTorch's own format), not a safetensors file");

  uint64_t length = 0;
  for (size_t i = 8; i-- > 0;) length = length << 8 | first[i];
  if (length > size - 8)
    fail(ExitCode::checkpoint, path, ": the header is said to be ", length, " bytes long, the file holds ",
         size, ": it is truncated, or not a safetensors file");
  if (length > kMaxHeader)
    fail(ExitCode::checkpoint, path, ": a header of ", length, " bytes is over the format's limit of ",
         kMaxHeader);
  std::string header(static_cast<size_t>(length), '\0');
  file.read_at(8, header.data(), header.size());
  if (header.empty() || header.front() != '{')
    fail(ExitCode::checkpoint, path, ": no JSON header where one must be: not a safetensors file");
  return header;
}

/// An array of integers in [0, 2^63).
std::vector<int64_t> read_integers(const json& value, const std::string& where) {
  if (!value.is_array()) fail(ExitCode::checkpoint, where, " must be an array of integers");
  std::vector<int64_t> result;
  for (const json& element : value) {
    if (!element.is_number_unsigned() ||
        element.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      fail(ExitCode::checkpoint, where, " must hold integers from 0 to 2^63 - 1, here ",
           element.dump().substr(0, 40));
    result.push_back(element.get<int64_t>());
  }
  return result;
}

/// One entry of a header, checked against the data of the file: bytes [data_begin, data_begin + data_bytes).
TensorPlace read_entry(const std::string& path, const std::string& name, const json& entry,
                       uint64_t data_begin, uint64_t data_bytes) {
  const std::string where = cat(path, ": tensor ", printable(name));
  if (!entry.is_object()) fail(ExitCode::checkpoint, where, ": an object is needed");
  for (const auto& [key, value] : entry.items())
    if (key != "dtype" && key != "shape" && key != "data_offsets")
      fail(ExitCode::checkpoint, where, ": the key ", printable(key), " is not known");
  for (const char* key : {"dtype", "shape", "data_offsets"})
    if (!entry.contains(key)) fail(ExitCode::checkpoint, where, ": ", key, " is missing");

  TensorPlace place;
  place.info.name = name;
  const std::string dtype =
      entry["dtype"].is_string() ? entry["dtype"].get<std::string>() : entry["dtype"].dump();
  const std::optional<FileDType> type = parse_file_dtype(dtype);
  if (!type) fail(ExitCode::checkpoint, where, ": the dtype ", printable(dtype), " is not known");
  place.info.dtype = *type;
  place.info.shape = read_integers(entry["shape"], where + ": shape");

  const std::vector<int64_t> range = read_integers(entry["data_offsets"], where + ": data_offsets");
  if (range.size() != 2 || range[0] > range[1])
    fail(ExitCode::checkpoint, where, ": data_offsets must be [begin, end], here ", shape_text(range));
  const uint64_t begin = static_cast<uint64_t>(range[0]), end = static_cast<uint64_t>(range[1]);
  if (end > data_bytes)
    fail(ExitCode::checkpoint, where, ": its bytes ", shape_text(range), " are not in the file, which holds ",
         data_bytes, " bytes of data: it is truncated or damaged");

  TensorInfo named = place.info;
  named.name = cat(printable(name), " of ", path);
  place.bytes = byte_size(named);
  if (place.bytes != end - begin)
    fail(ExitCode::checkpoint, where, ": ", dtype, " ", shape_text(place.info.shape), " takes ", place.bytes,
         " bytes, data_offsets give it ", end - begin);
  place.offset = data_begin + begin;
  return place;
}

/// The tensors must fill the data from its first byte to its last without a gap and without sharing a byte.
void check_tiling(const std::string& path, const std::vector<TensorPlace>& places, uint64_t data_begin,
                  uint64_t file_bytes) {
  uint64_t end = data_begin;
  for (const TensorPlace& place : places) {
    if (place.offset != end)
      fail(ExitCode::checkpoint, path, ": tensor ", printable(place.info.name), " begins at byte ",
           place.offset,
           place.offset < end ? ", inside the tensor before it, which ends at "
                              : ", after a gap that begins at ",
           end);
    end += place.bytes;
  }
  if (end != file_bytes)
    fail(ExitCode::checkpoint, path, ": ", file_bytes - end, " bytes after the last tensor belong to none");
}

}  // namespace

SafetensorsReader::SafetensorsReader(Files& files, const std::string& path, const std::string& stem) {
  const std::string kIndex = ".index.json";
  switch (files.kind(path)) {
    case Files::Kind::absent:
      fail(ExitCode::checkpoint, path, ": no such file or directory: check the path of the weights");
    case Files::Kind::other: fail(ExitCode::checkpoint, path, ": neither a file nor a directory");
    case Files::Kind::file:
      if (path.size() > kIndex.size() && path.ends_with(kIndex))
        add_index(files, path);
      else
        add_file(files, path);
      return;
    case Files::Kind::directory: break;
  }

  const std::string single = join_path(path, stem + ".safetensors"), index = single + kIndex;
  const bool has_single = files.kind(single) != Files::Kind::absent;
  const bool has_index = files.kind(index) != Files::Kind::absent;
  if (has_single && has_index)
    fail(ExitCode::checkpoint, path, ": holds both ", stem,
         ".safetensors and its index: remove the one that is left over");
  if (has_index) {
    add_index(files, index);
    return;
  }
  if (has_single) {
    add_file(files, single);
    return;
  }
  const bool pickled = files.kind(join_path(path, "pytorch_model.bin")) != Files::Kind::absent ||
                       files.kind(join_path(path, "pytorch_model.bin.index.json")) != Files::Kind::absent;
  fail(ExitCode::checkpoint, path, ": holds neither ", stem, ".safetensors nor ", stem, ".safetensors",
       kIndex,
       pickled ? "; pytorch_model.bin is not read: save the model again with safe_serialization=True"
               : ": check the path of the weights");
}

const TensorPlace* SafetensorsReader::find(std::string_view name) const {
  const auto found = by_name_.find(std::string(name));
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

void SafetensorsReader::read(const TensorPlace& tensor, uint64_t offset, void* to, size_t bytes) const {
  CHECK(offset <= tensor.bytes && bytes <= tensor.bytes - offset, "bytes [", offset, ", +", bytes, ") of ",
        tensor.info.name, ", which has ", tensor.bytes);
  files_[tensor.file]->read_at(tensor.offset + offset, to, bytes);
}

void SafetensorsReader::add_file(Files& files, const std::string& path) {
  std::unique_ptr<File> file = files.open_read(path);
  const uint64_t size = file->size();
  const std::string text = read_header(*file, size);
  const json header = parse_json(text, path);
  const uint64_t data_begin = 8 + text.size();

  std::vector<TensorPlace> places;
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") {
      places.push_back(read_entry(path, name, entry, data_begin, size - data_begin));
      places.back().file = files_.size();
      continue;
    }
    if (!entry.is_object()) fail(ExitCode::checkpoint, path, ": __metadata__ must be an object of strings");
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string())
        fail(ExitCode::checkpoint, path, ": __metadata__ ", printable(key), " must be a string");
      if (files_.empty()) metadata_.emplace_back(key, value.get<std::string>());
    }
  }
  std::sort(places.begin(), places.end(), [](const TensorPlace& a, const TensorPlace& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  check_tiling(path, places, data_begin, size);

  for (TensorPlace& place : places) {
    const auto [other, fresh] = by_name_.emplace(place.info.name, tensors_.size());
    if (!fresh)
      fail(ExitCode::checkpoint, path, ": tensor ", printable(place.info.name), " is also in ",
           file_path(tensors_[other->second]));
    tensors_.push_back(std::move(place));
  }
  paths_.push_back(path);
  files_.push_back(std::move(file));
}

void SafetensorsReader::add_index(Files& files, const std::string& path) {
  const json index = parse_json(read_file(files, path), path);
  if (!index.contains("weight_map") || !index["weight_map"].is_object())
    fail(ExitCode::checkpoint, path, ": weight_map (tensor -> file) is missing");
  std::map<std::string, std::string> file_of;
  std::set<std::string> names;
  for (const auto& [tensor, value] : index["weight_map"].items()) {
    const std::string name = value.is_string() ? value.get<std::string>() : "";
    if (name.empty() || name.find('/') != std::string::npos || name == "." || name == "..")
      fail(ExitCode::checkpoint, path, ": tensor ", printable(tensor), " must name a file beside the index");
    file_of[tensor] = name;
    names.insert(name);
  }

  for (const std::string& name : names) {
    const std::string file = join_path(parent_directory(path), name);
    if (files.kind(file) == Files::Kind::absent)
      fail(ExitCode::checkpoint, file, ": missing, but ", path, " names it: copy it there");
    const size_t first = tensors_.size();
    add_file(files, file);
    for (size_t t = first; t < tensors_.size(); ++t) {
      const auto said = file_of.find(tensors_[t].info.name);
      if (said == file_of.end() || said->second != name)
        fail(ExitCode::checkpoint, file, ": holds tensor ", printable(tensors_[t].info.name), ", which ",
             path, said == file_of.end() ? " does not know" : " places in another file");
    }
  }
  for (const auto& [tensor, name] : file_of)
    if (find(tensor) == nullptr)
      fail(ExitCode::checkpoint, join_path(parent_directory(path), name), ": tensor ", printable(tensor),
           " is not in this file, where ", path, " places it");
}

}  // namespace kinoe
