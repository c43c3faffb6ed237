// Names and steps of checkpoints on the disk.
#include "trainer/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

namespace kinoe {
namespace {

/// The step of "step_00001000"; -1 for any other name.
int64_t step_of(const std::string& name) {
  constexpr std::string_view kPrefix = "step_";
  if (!name.starts_with(kPrefix)) return -1;
  int64_t step = -1;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  return error == std::errc() && stop == end ? step : -1;
}

}  // namespace

std::string checkpoint_path(const std::string& run_directory, int64_t step) {
  char name[32];
  std::snprintf(name, sizeof(name), "step_%08lld", static_cast<long long>(step));
  return join_path(join_path(run_directory, "checkpoints"), name);
}

std::vector<int64_t> checkpoint_steps(Files& files, const std::string& run_directory) {
  std::vector<int64_t> steps;
  const std::string directory = join_path(run_directory, "checkpoints");
  if (files.kind(directory) != Files::Kind::directory) return steps;
  for (const std::string& name : files.list(directory)) {
    const int64_t step = step_of(name);
    if (step >= 0 && checkpoint_path(run_directory, step) == join_path(directory, name) &&
        files.kind(join_path(directory, name + "/trainer/manifest.json")) == Files::Kind::file)
      steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::string find_checkpoint(Files& files, const std::string& path) {
  if (files.kind(path) != Files::Kind::directory)
    fail(ExitCode::checkpoint, "'", path,
         "' is not a directory; expected a run directory or a checkpoint (a directory with config.json)");
  if (files.kind(join_path(path, "config.json")) == Files::Kind::file) return path;
  const std::vector<int64_t> steps = checkpoint_steps(files, path);
  if (steps.empty())
    fail(ExitCode::checkpoint, "no checkpoint in '", path, "': expected config.json there, or ",
         join_path(path, "checkpoints"), "/step_NNNNNNNN");
  return checkpoint_path(path, steps.back());
}

std::string check_latest(Files& files, const std::string& run_directory) {
  const std::string path = join_path(join_path(run_directory, "checkpoints"), "latest");
  const std::vector<int64_t> steps = checkpoint_steps(files, run_directory);
  if (steps.empty() || files.kind(path) != Files::Kind::file) return "";
  const std::string newest = checkpoint_path("", steps.back()).substr(sizeof("checkpoints/") - 1);
  std::string said = read_file(files, path);
  while (!said.empty() && said.back() == '\n') said.pop_back();
  if (said == newest) return "";
  const bool printable = !said.empty() && said.size() < 64 &&
                         std::all_of(said.begin(), said.end(), [](char c) { return c > ' ' && c < 127; });
  return cat(path, printable ? cat(" says ", said) : " holds no name of a checkpoint",
             "; the newest complete one is ", newest, ", which is used");
}

}  // namespace kinoe
