#include "trainer/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "trainer/model_config.h"
#include "trainer/safetensors.h"

namespace kinoe {
namespace {

constexpr size_t kListed = 8;  // names in one message

std::vector<TensorInfo> file_tensors(const ParameterTable& table, DType weights) {
  std::vector<TensorInfo> tensors;
  for (const Parameter& p : table.parameters()) tensors.push_back({p.name, to_file_dtype(weights), p.shape});
  return tensors;
}

/// Names of checkpoints that were finished (not .tmp), oldest first.
std::vector<std::string> finished(Files& files, const std::string& checkpoints) {
  std::vector<std::string> names;
  if (files.kind(checkpoints) != Files::Kind::directory) return names;
  for (const std::string& name : files.list(checkpoints))
    if (name.starts_with("step_") && name.size() == 13 &&
        files.kind(join_path(join_path(checkpoints, name), "config.json")) == Files::Kind::file)
      names.push_back(name);
  return names;
}

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

std::string checkpoint_path(const std::string& run_directory, int64_t step) {
  char name[32];
  std::snprintf(name, sizeof(name), "step_%08lld", static_cast<long long>(step));
  return join_path(join_path(run_directory, "checkpoints"), name);
}

uint64_t checkpoint_bytes(const ParameterTable& table, DType weights) {
  return plan_safetensors(file_tensors(table, weights)).bytes() + 4096;
}

std::string write_checkpoint(Files& files, const std::string& run_directory, int64_t step, const Context& ctx,
                             const ModelConfig& config, const ParameterTable& table, const Tensor& weights) {
  const std::string final_path = checkpoint_path(run_directory, step);
  const std::string temporary = final_path + ".tmp";
  if (files.kind(temporary) != Files::Kind::absent) remove_tree(files, temporary);  // left by a crash
  make_directories(files, temporary);

  const SafetensorsPlan plan = plan_safetensors(file_tensors(table, weights.dtype));
  const size_t element = size_of(weights.dtype);
  write_safetensors(files, temporary, plan, [&](size_t tensor, uint64_t offset, void* to, size_t bytes) {
    const char* from = static_cast<const char*>(weights.data) +
                       static_cast<size_t>(table.parameters()[tensor].offset) * element + offset;
    download(ctx, to, from, bytes);
    synchronize(ctx);
  });
  write_file_durably(files, join_path(temporary, "config.json"),
                     model_config_to_json(config, weights.dtype == DType::bf16 ? "bfloat16" : "float32"));
  files.sync_directory(temporary);
  if (files.kind(final_path) != Files::Kind::absent) remove_tree(files, final_path);
  files.rename(temporary, final_path);
  files.sync_directory(parent_directory(final_path));
  return final_path;
}

std::string find_checkpoint(Files& files, const std::string& path) {
  if (files.kind(path) != Files::Kind::directory)
    fail(ExitCode::checkpoint, "'", path,
         "' is not a directory; expected a run directory or a checkpoint (a directory with config.json)");
  if (files.kind(join_path(path, "config.json")) == Files::Kind::file) return path;
  const std::string checkpoints = join_path(path, "checkpoints");
  const std::vector<std::string> names = finished(files, checkpoints);
  if (names.empty())
    fail(ExitCode::checkpoint, "no checkpoint in '", path, "': expected config.json there, or ", checkpoints,
         "/step_NNNNNNNN");
  return join_path(checkpoints, names.back());
}

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
