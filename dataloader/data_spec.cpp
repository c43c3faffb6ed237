// Arguments, globs and the checks of the list, before any file is opened.
#include "dataloader/data_spec.h"

#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

std::optional<struct stat> status_of(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return std::nullopt;
  return info;
}

// Sorted, so that the order of shards does not depend on the file system or the locale.
std::vector<std::string> glob_matches(const std::string& pattern) {
  glob_t found{};
  const int rc = ::glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found);
  std::vector<std::string> paths;
  for (size_t i = 0; rc == 0 && i < found.gl_pathc; ++i) paths.emplace_back(found.gl_pathv[i]);
  ::globfree(&found);
  if (rc != 0 && rc != GLOB_NOMATCH)
    fail(ExitCode::data, "cannot read a directory of '", pattern, "': ", std::strerror(errno));
  std::sort(paths.begin(), paths.end());
  return paths;
}

bool is_file(const std::string& path) {
  const auto info = status_of(path);
  return info && S_ISREG(info->st_mode);
}

bool is_megatron_name(const std::string& name) { return is_file(name + ".bin") && is_file(name + ".idx"); }

bool names_something(const std::string& path) {
  return status_of(path) || is_megatron_name(path) || !glob_matches(path).empty();
}

// A Megatron data set is its .bin, also where it was named by its .idx or by what both have in common.
std::string data_file_of(const std::string& path) {
  if (!is_file(path) && is_megatron_name(path)) return path + ".bin";
  if (!path.ends_with(".idx") || !is_file(path)) return path;
  const std::string bin = path.substr(0, path.size() - 4) + ".bin";
  if (!is_file(bin))
    fail(ExitCode::data, "'", path, "' is an index without its tokens: expected '", bin,
         "' beside it; copy that file too");
  return bin;
}

std::vector<std::string> files_of(const std::string& path) {
  // A file whose name happens to hold glob characters is itself.
  std::vector<std::string> files;
  const bool is_pattern =
      !status_of(path) && !is_megatron_name(path) && path.find_first_of("*?[") != std::string::npos;
  if (is_pattern) {
    // A pattern may match both files of a Megatron data set.
    for (const std::string& match : glob_matches(path))
      if (const std::string file = data_file_of(match);
          std::find(files.begin(), files.end(), file) == files.end())
        files.push_back(file);
    if (files.empty())
      fail(ExitCode::data, "no file matches '", path, "'; check the directory and the pattern");
  } else {
    files.push_back(data_file_of(path));
  }
  for (const std::string& file : files) {
    const auto info = status_of(file);
    const int error = errno;
    if (!info && is_file(file + ".idx"))
      fail(ExitCode::data, "there is '", file, ".idx' but no '", file,
           ".bin', which holds its tokens; copy that file too");
    if (!info) fail(ExitCode::data, "cannot open data file '", file, "': ", std::strerror(error));
    if (S_ISDIR(info->st_mode))
      fail(ExitCode::data, "'", file, "' is a directory, expected a file; give its shards, for instance '",
           file, file.ends_with('/') ? "" : "/", "*.bin'");
    if (!S_ISREG(info->st_mode))
      fail(ExitCode::data, "'", file,
           "' is no regular file (a pipe or a device); data are mapped and read in any order, so save them "
           "to a file first");
  }
  return files;
}

using FileId = std::pair<dev_t, ino_t>;

FileId id_of(const std::string& file) {
  const auto info = status_of(file);
  if (!info) fail(ExitCode::data, "cannot open data file '", file, "': ", std::strerror(errno));
  return {info->st_dev, info->st_ino};
}

}  // namespace

DataSpec parse_data_argument(std::string_view argument) {
  if (argument.empty()) fail(ExitCode::usage, "an empty data path; expected a file, a glob or PATH:WEIGHT");
  const size_t colon = argument.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return {std::string(argument), 0};
  const std::string path(argument.substr(0, colon));
  const std::string_view number = argument.substr(colon + 1);
  double weight = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), weight);
  const bool is_number =
      end == number.data() + number.size() && !number.empty() && error != std::errc::invalid_argument;
  // notes:2024 is a weight of notes, unless there is only a file of the whole name.
  if (is_number && (names_something(path) || !status_of(std::string(argument)))) {
    if (error == std::errc::result_out_of_range || !std::isfinite(weight) || weight <= 0)
      fail(ExitCode::usage, "mixture weight '", number, "' of '", path,
           "': expected a finite number above zero; leave a source out instead of weighting it 0");
    return {path, weight};
  }
  // Not a number. A name with a colon in it is a name, unless what stands before the colon is the file.
  if (!names_something(std::string(argument)) && names_something(path))
    fail(ExitCode::usage, "mixture weight '", number, "' of '", path, "' is no number; write ", path,
         ":0.5 or the path alone");
  return {std::string(argument), 0};
}

std::vector<DataSource> expand_data(const std::vector<DataSpec>& specs) {
  std::vector<DataSource> sources;
  std::map<FileId, std::string> seen;
  const DataSpec* weighted = nullptr;
  const DataSpec* unweighted = nullptr;
  for (const DataSpec& spec : specs) {
    (spec.weight > 0 ? weighted : unweighted) = &spec;
    if (weighted && unweighted)
      fail(ExitCode::usage, "'", weighted->path, "' has a mixture weight and '", unweighted->path,
           "' has none; give all of them one (PATH:WEIGHT) or none");
    std::vector<std::string> files = files_of(spec.path);
    for (const std::string& file : files) {
      const auto [first, fresh] = seen.emplace(id_of(file), file);
      if (!fresh && first->second == file)
        fail(ExitCode::usage, "data file '", file,
             "' is given twice; name it once (to see it more often, train for more epochs or give it a "
             "weight)");
      if (!fresh)
        fail(ExitCode::usage, "data files '", first->second, "' and '", file,
             "' are the same file; name it once");
    }
    if (weighted || sources.empty()) sources.push_back({spec.path, weighted ? spec.weight : 1.0, {}});
    auto& all = sources.back().files;
    all.insert(all.end(), files.begin(), files.end());
  }
  if (unweighted && specs.size() > 1) sources[0].name += cat(" and ", specs.size() - 1, " more");
  return sources;
}

std::vector<DataSource> expand_data(const std::vector<std::string>& arguments) {
  std::vector<DataSpec> specs;
  for (const std::string& argument : arguments) specs.push_back(parse_data_argument(argument));
  return expand_data(specs);
}

void check_validation_apart(const std::vector<DataSource>& training,
                            const std::vector<DataSource>& validation) {
  std::map<FileId, std::string> trained;
  for (const DataSource& source : training)
    for (const std::string& file : source.files) trained.emplace(id_of(file), file);
  for (const DataSource& source : validation)
    for (const std::string& file : source.files)
      if (const auto same = trained.find(id_of(file)); same != trained.end())
        fail(ExitCode::usage, "validation file '", file, "' is also trained on",
             same->second == file ? "" : cat(" (as '", same->second, "')"),
             ", so the validation loss would say nothing; take it out of --data or --val-data");
}

}  // namespace kinoe
