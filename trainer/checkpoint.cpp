#include "trainer/checkpoint.h"

#include <cstdio>
#include <vector>

#include "trainer/model_config.h"
#include "trainer/safetensors.h"

namespace kinoe {
namespace {

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

}  // namespace kinoe
