// Weights in Hugging Face's safetensors form: one file, or several with model.safetensors.index.json.
//
// A file is: the length of the header (uint64, little endian), the header (JSON: name -> dtype, shape, byte range relative
// to the end of the header), then the tensors' bytes back to back (https://huggingface.co/docs/safetensors). Where every
// byte goes is decided by a plan before anything is written, so several writers can fill one file.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kernels/common/dtype.h"
#include "trainer/files.h"

namespace kinoe {

/// Element types of the format. More than kernels compute with: files by others hold them.
enum class FileDType : uint8_t {
  boolean,
  u8,
  i8,
  f8_e4m3,
  f8_e5m2,
  u16,
  i16,
  f16,
  bf16,
  u32,
  i32,
  f32,
  u64,
  i64,
  f64
};

size_t size_of(FileDType type);
const char* name_of(FileDType type);  // "BF16", as the header spells it
std::optional<FileDType> parse_file_dtype(std::string_view name);
FileDType to_file_dtype(DType type);
std::optional<DType> to_dtype(FileDType type);  // absent: no kernel computes with it

float half_to_float(uint16_t bits);  // IEEE binary16, exact

struct TensorInfo {
  std::string name;
  FileDType dtype = FileDType::f32;
  std::vector<int64_t> shape;  // [] is a scalar
};

/// Product of the shape times the element size. Throws ExitCode::checkpoint if it does not fit in 63 bits.
uint64_t byte_size(const TensorInfo& tensor);
std::string shape_text(const std::vector<int64_t>& shape);  // "[768, 3072]"

// ---- Writing -------------------------------------------------------------------------------------------------------

/// Where a tensor lies: bytes [offset, offset + bytes) of file `file`, counted from the start of that file.
struct TensorPlace {
  TensorInfo info;
  size_t file = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

struct FilePlan {
  std::string name;    // "model.safetensors" or "model-00001-of-00003.safetensors"
  std::string head;    // header length and header: the bytes before the first tensor, a multiple of 8
  uint64_t bytes = 0;  // of the whole file
};

struct SafetensorsPlan {
  std::string stem;  // "model" of model.safetensors
  std::vector<FilePlan> files;
  std::vector<TensorPlace> tensors;  // in the order given
  std::string index;                 // contents of <stem>.safetensors.index.json; "" for a single file

  [[nodiscard]] uint64_t bytes() const;  // of all files and the index
};

inline constexpr uint64_t kShardBytes = 5'000'000'000;  // transformers' classic max_shard_size

/// Fills files in the given order with at most `shard_bytes` of tensors each (a larger tensor gets a file of
/// its own). Within a file wider elements come first, as the format asks, so that every tensor is aligned to
/// its element.
///
/// `metadata` joins {"format": "pt"} in every header.
SafetensorsPlan plan_safetensors(const std::vector<TensorInfo>& tensors, const std::string& stem = "model",
                                 uint64_t shard_bytes = kShardBytes,
                                 const std::vector<std::pair<std::string, std::string>>& metadata = {});

/// Bytes [offset, offset + bytes) of tensor `tensor` (an index into the plan), written to `to`. Called for
/// consecutive ranges of whole elements, at most kWriteBlock at a time.
using TensorBytes = std::function<void(size_t tensor, uint64_t offset, void* to, size_t bytes)>;
inline constexpr size_t kWriteBlock = size_t{8} << 20;

/// Writes all files of the plan and the index into a directory, each fsynced, holding one block in memory.
/// The caller makes names durable (sync_directory, or a rename of the directory).
void write_safetensors(Files& files, const std::string& directory, const SafetensorsPlan& plan,
                       const TensorBytes& source);

// ---- Reading -------------------------------------------------------------------------------------------------------

/// The tensors of one file or of a directory. Everything in the headers is checked against the size of the
/// files before it is believed; what is wrong throws ExitCode::checkpoint with file and tensor.
class SafetensorsReader {
 public:
  /// `path`: a .safetensors file, an .index.json, or a directory holding <stem>.safetensors or its index.
  SafetensorsReader(Files& files, const std::string& path, const std::string& stem = "model");

  /// In the order of their bytes, file by file.
  [[nodiscard]] const std::vector<TensorPlace>& tensors() const { return tensors_; }
  [[nodiscard]] const TensorPlace* find(std::string_view name) const;
  [[nodiscard]] const std::string& file_path(const TensorPlace& tensor) const { return paths_[tensor.file]; }
  /// The "__metadata__" strings of the first file.
  [[nodiscard]] const std::vector<std::pair<std::string, std::string>>& metadata() const { return metadata_; }

  /// Bytes [offset, offset + bytes) of a tensor. May be called from several threads.
  void read(const TensorPlace& tensor, uint64_t offset, void* to, size_t bytes) const;

 private:
  void add_file(Files& files, const std::string& path);
  void add_index(Files& files, const std::string& path);

  std::vector<std::string> paths_;
  std::vector<std::unique_ptr<File>> files_;
  std::vector<TensorPlace> tensors_;
  std::unordered_map<std::string, size_t> by_name_;
  std::vector<std::pair<std::string, std::string>> metadata_;
};

}  // namespace kinoe
