#include "trainer/import.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "trainer/safetensors.h"

namespace kinoe {
namespace {

constexpr size_t kListed = 8;  // names in one message

/// `from` holds elements of `type`; to fp32, exactly.
void widen(FileDType type, const std::vector<char>& from, float* to, size_t count) {
  switch (type) {
    case FileDType::f32: std::memcpy(to, from.data(), count * sizeof(float)); return;
    case FileDType::bf16:
    case FileDType::f16:
      for (size_t i = 0; i < count; ++i) {
        uint16_t bits = 0;
        std::memcpy(&bits, from.data() + i * sizeof(bits), sizeof(bits));
        to[i] = type == FileDType::bf16 ? to_float(bf16{bits}) : half_to_float(bits);
      }
      return;
    default:
      fail(ExitCode::checkpoint, "weights of type ", name_of(type),
           " can not be read; expected F32, BF16 or F16");
  }
}

std::string listed(const std::string& what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::string text = cat("; ", names.size(), " ", what, ": ");
  for (size_t i = 0; i < std::min(names.size(), kListed); ++i) text += (i ? ", " : "") + names[i];
  return names.size() > kListed ? text + ", ..." : text;
}

}  // namespace

void read_weights(Files& files, const std::string& directory, const ParameterTable& table, float* flat) {
  const SafetensorsReader reader(files, directory);
  std::vector<std::string> missing, extra, different;
  for (const TensorPlace& tensor : reader.tensors()) {
    const auto same = [&](const Parameter& p) { return p.name == tensor.info.name; };
    if (std::none_of(table.parameters().begin(), table.parameters().end(), same))
      extra.push_back(tensor.info.name);
  }
  for (const Parameter& p : table.parameters()) {
    const TensorPlace* tensor = reader.find(p.name);
    if (tensor == nullptr)
      missing.push_back(p.name);
    else if (tensor->info.shape != p.shape)
      different.push_back(
          cat(p.name, " ", shape_text(tensor->info.shape), " instead of ", shape_text(p.shape)));
  }
  if (!missing.empty() || !extra.empty() || !different.empty())
    fail(ExitCode::checkpoint, "the weights in '", directory, "' do not fit its config.json",
         listed("missing", missing), listed("not known to the model", extra),
         listed("of another shape", different));

  std::fill_n(flat, table.flat_size(), 0.0F);
  std::vector<char> block;
  for (const Parameter& p : table.parameters()) {
    const TensorPlace& tensor = *reader.find(p.name);
    const size_t element = size_of(tensor.info.dtype);
    const auto total = static_cast<size_t>(p.size);
    const size_t step = kWriteBlock / element;
    for (size_t first = 0; first < total; first += step) {
      const size_t count = std::min(step, total - first);
      block.resize(count * element);
      reader.read(tensor, first * element, block.data(), block.size());
      float* to = flat + p.offset + first;
      widen(tensor.info.dtype, block, to, count);
      if (!std::all_of(to, to + count, [](float x) { return std::isfinite(x); }))
        fail(ExitCode::checkpoint, "tensor ", p.name, " in '", directory,
             "' holds NaN or infinity; use an earlier checkpoint");
    }
  }
}

}  // namespace kinoe
