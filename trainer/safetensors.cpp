// Element types, the plan of a set of files, and writing it.
#include "trainer/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <unordered_set>

namespace kinoe {
namespace {

struct TypeRow {
  FileDType type;
  const char* name;
  size_t bytes;
};

constexpr std::array<TypeRow, 15> kTypes = {{
    {FileDType::boolean, "BOOL", 1},
    {FileDType::u8, "U8", 1},
    {FileDType::i8, "I8", 1},
    {FileDType::f8_e4m3, "F8_E4M3", 1},
    {FileDType::f8_e5m2, "F8_E5M2", 1},
    {FileDType::u16, "U16", 2},
    {FileDType::i16, "I16", 2},
    {FileDType::f16, "F16", 2},
    {FileDType::bf16, "BF16", 2},
    {FileDType::u32, "U32", 4},
    {FileDType::i32, "I32", 4},
    {FileDType::f32, "F32", 4},
    {FileDType::u64, "U64", 8},
    {FileDType::i64, "I64", 8},
    {FileDType::f64, "F64", 8},
}};

const TypeRow& row_of(FileDType type) {
  const TypeRow& row = kTypes[static_cast<size_t>(type)];
  CHECK(row.type == type, "the table of element types is not in the order of FileDType");
  return row;
}

std::string little_endian_u64(uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>((value >> (8 * i)) & 0xFF);
  return bytes;
}

/// Gives the tensors of one file (indices into the plan, in the order of their bytes) their places, and the file its
/// head. The header is padded with spaces so that the data begins at a multiple of 8.
void lay_out(SafetensorsPlan& plan, size_t file, const std::vector<size_t>& members,
             const std::vector<std::pair<std::string, std::string>>& metadata) {
  nlohmann::ordered_json header;
  header["__metadata__"] = {{"format", "pt"}};
  for (const auto& [key, value] : metadata) header["__metadata__"][key] = value;
  uint64_t end = 0;
  for (const size_t t : members) {
    TensorPlace& place = plan.tensors[t];
    place.file = file;
    place.offset = end;
    end += place.bytes;
    header[place.info.name] = {{"dtype", name_of(place.info.dtype)},
                               {"shape", place.info.shape},
                               {"data_offsets", {place.offset, end}}};
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  plan.files[file].head = little_endian_u64(text.size()) + text;
  for (const size_t t : members) plan.tensors[t].offset += plan.files[file].head.size();
  plan.files[file].bytes = plan.files[file].head.size() + end;
}

std::string index_of(const SafetensorsPlan& plan) {
  nlohmann::json index;  // sorted keys, as transformers writes it
  uint64_t total = 0;
  for (const TensorPlace& place : plan.tensors) {
    index["weight_map"][place.info.name] = plan.files[place.file].name;
    total += place.bytes;
  }
  index["metadata"]["total_size"] = total;
  return index.dump(2) + "\n";
}

}  // namespace

size_t size_of(FileDType type) { return row_of(type).bytes; }
const char* name_of(FileDType type) { return row_of(type).name; }

std::optional<FileDType> parse_file_dtype(std::string_view name) {
  for (const TypeRow& row : kTypes)
    if (row.name == name) return row.type;
  return std::nullopt;
}

FileDType to_file_dtype(DType type) {
  switch (type) {
    case DType::f32: return FileDType::f32;
    case DType::bf16: return FileDType::bf16;
    case DType::f64: return FileDType::f64;
    case DType::i32: return FileDType::i32;
    case DType::i64: return FileDType::i64;
    case DType::u64: return FileDType::u64;
  }
  CHECK(false, "no file type for ", name_of(type));
}

std::optional<DType> to_dtype(FileDType type) {
  switch (type) {
    case FileDType::f32: return DType::f32;
    case FileDType::bf16: return DType::bf16;
    case FileDType::f64: return DType::f64;
    case FileDType::i32: return DType::i32;
    case FileDType::i64: return DType::i64;
    case FileDType::u64: return DType::u64;
    default: return std::nullopt;
  }
}

float half_to_float(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000U) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1FU;
  const uint32_t mantissa = bits & 0x3FFU;
  if (exponent == 0) {  // zero or subnormal: mantissa x 2^-24
    const float value = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0 ? -value : value;
  }
  const uint32_t wide = exponent == 31 ? 255U : exponent + (127 - 15);
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

uint64_t byte_size(const TensorInfo& tensor) {
  int64_t bytes = static_cast<int64_t>(size_of(tensor.dtype));
  for (const int64_t n : tensor.shape)
    if (n < 0 || __builtin_mul_overflow(bytes, n, &bytes))
      fail(ExitCode::checkpoint, "tensor ", tensor.name, ": the shape ", shape_text(tensor.shape),
           " does not describe a tensor (a negative dimension, or more than 2^63 bytes)");
  return static_cast<uint64_t>(bytes);
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += cat(i > 0 ? ", " : "", shape[i]);
  return text + "]";
}

uint64_t SafetensorsPlan::bytes() const {
  uint64_t total = index.size();
  for (const FilePlan& file : files) total += file.bytes;
  return total;
}

SafetensorsPlan plan_safetensors(const std::vector<TensorInfo>& tensors, const std::string& stem,
                                 uint64_t shard_bytes,
                                 const std::vector<std::pair<std::string, std::string>>& metadata) {
  SafetensorsPlan plan;
  plan.stem = stem;
  std::unordered_set<std::string> names;
  std::vector<std::vector<size_t>> members(1);  // of each file
  uint64_t used = 0;
  for (size_t t = 0; t < tensors.size(); ++t) {
    CHECK(tensors[t].name != "__metadata__" && names.insert(tensors[t].name).second,
          "every tensor of a file needs its own name, here ", tensors[t].name);
    const uint64_t bytes = byte_size(tensors[t]);
    plan.tensors.push_back({tensors[t], 0, 0, bytes});
    if (!members.back().empty() && (bytes > shard_bytes || used > shard_bytes - bytes)) {
      members.emplace_back();
      used = 0;
    }
    members.back().push_back(t);
    used += bytes;
  }

  plan.files.resize(members.size());
  for (size_t f = 0; f < members.size(); ++f) {
    char part[64] = "";
    if (members.size() > 1) std::snprintf(part, sizeof part, "-%05zu-of-%05zu", f + 1, members.size());
    plan.files[f].name = cat(stem, part, ".safetensors");
    std::stable_sort(members[f].begin(), members[f].end(), [&](size_t a, size_t b) {
      return size_of(tensors[a].dtype) > size_of(tensors[b].dtype);
    });
    lay_out(plan, f, members[f], metadata);
  }
  if (members.size() > 1) plan.index = index_of(plan);
  return plan;
}

void write_safetensors(Files& files, const std::string& directory, const SafetensorsPlan& plan,
                       const TensorBytes& source) {
  std::vector<std::unique_ptr<File>> open;
  for (const FilePlan& file : plan.files) {
    open.push_back(files.create(join_path(directory, file.name)));
    open.back()->write_at(0, file.head.data(), file.head.size());
  }
  std::vector<char> block;
  for (size_t t = 0; t < plan.tensors.size(); ++t) {
    const TensorPlace& place = plan.tensors[t];
    for (uint64_t done = 0; done < place.bytes;) {
      const size_t bytes = static_cast<size_t>(std::min<uint64_t>(kWriteBlock, place.bytes - done));
      block.resize(std::max(block.size(), bytes));
      source(t, done, block.data(), bytes);
      open[place.file]->write_at(place.offset + done, block.data(), bytes);
      done += bytes;
    }
  }
  for (const std::unique_ptr<File>& file : open) {
    file->sync();
    file->close();
  }
  if (!plan.index.empty()) {
    const std::unique_ptr<File> file =
        files.create(join_path(directory, plan.stem + ".safetensors.index.json"));
    file->write_at(0, plan.index.data(), plan.index.size());
    file->sync();
    file->close();
  }
}

}  // namespace kinoe
