// What `inspect` prints of a checkpoint, and where two checkpoints or two runs begin to differ.
#include "trainer/inspect_checkpoint.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "trainer/checkpoint_read.h"
#include "trainer/config.h"
#include "trainer/tables.h"

namespace kinoe {
namespace {

std::string hexadecimal(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", x);
  return text;
}

void print_section(const CheckpointManifest& manifest, Section section) {
  const std::vector<TensorRecord>& tensors = manifest.sections[static_cast<size_t>(section)];
  if (tensors.empty()) {
    print_row(name_of(section), "are the weights, which are fp32");
    return;
  }
  uint64_t bytes = 0;
  std::set<size_t> in_files;
  for (const TensorRecord& tensor : tensors) {
    bytes += static_cast<uint64_t>(tensor.chunks.size) * size_of(tensor.type);
    in_files.insert(tensor.file);
  }
  const std::string& file = manifest.files[*in_files.begin()].name;
  print_row(name_of(section),
            cat(counted(static_cast<int64_t>(tensors.size()), "tensor"), " of ", name_of(tensors[0].type),
                ", ", grouped(static_cast<int64_t>(bytes)), " bytes in ",
                in_files.size() == 1 ? file : counted(static_cast<int64_t>(in_files.size()), "file")));
}

// ---- Two checkpoints -------------------------------------------------------------------------------------------------

/// Reads a section of both block by block. Returns a sentence about the first difference, "" where there is none.
std::string first_difference(const CheckpointReader& a, const CheckpointReader& b, Section section,
                             const ParameterTable& table) {
  constexpr int64_t kBlock = 64 * kChunk;
  std::vector<float> x(static_cast<size_t>(kBlock)), y(x.size());
  int64_t first = -1, different = 0;
  float in_first = 0, in_second = 0;
  double largest = 0;
  for (int64_t at = 0; at < table.flat_size(); at += kBlock) {
    const int64_t count = std::min(kBlock, table.flat_size() - at);
    a.read(section, table, at, count, x.data());
    b.read(section, table, at, count, y.data());
    for (int64_t i = 0; i < count; ++i) {
      const float p = x[static_cast<size_t>(i)], q = y[static_cast<size_t>(i)];
      if (std::bit_cast<uint32_t>(p) == std::bit_cast<uint32_t>(q)) continue;
      if (different++ == 0) {
        first = at + i;
        in_first = p;
        in_second = q;
      }
      largest = std::max(largest, std::abs(static_cast<double>(p) - static_cast<double>(q)));
    }
  }
  if (different == 0) return "";
  const auto parameter = std::find_if(table.parameters().begin(), table.parameters().end(),
                                      [&](const Parameter& p) { return first < p.offset + p.size; });
  return cat("first in ", parameter->name, ", element ", grouped(first - parameter->offset), ": ",
             number(static_cast<double>(in_first)), " and ", number(static_cast<double>(in_second)), "; ",
             counted(different, "element"), different == 1 ? " differs" : " differ", ", by ", number(largest),
             " at most");
}

template <class T>
bool compare_row(const std::string& name, const T& a, const T& b) {
  if (a != b) print_row(name, cat(a, " and ", b));
  return a == b;
}

bool compare_settings(const TrainingState& a, const TrainingState& b) {
  std::set<std::string> names;
  for (const auto* settings : {&a.settings, &b.settings})
    for (const auto& [name, value] : *settings) names.insert(name);
  names.erase("out");  // where a run lies is not what it is
  bool equal = true;
  for (const std::string& name : names)
    equal &= compare_row(name, setting(a.settings, name), setting(b.settings, name));
  return equal;
}

// ---- Two runs --------------------------------------------------------------------------------------------------------

struct StepLine {
  std::string loss, hash;
  bool operator==(const StepLine&) const = default;
};

std::map<int64_t, StepLine> steps_of(Files& files, const std::string& run) {
  const std::string text = read_file(files, join_path(run, "metrics.jsonl"));
  std::map<int64_t, StepLine> steps;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const auto line = nlohmann::json::parse(text.begin() + static_cast<std::ptrdiff_t>(at),
                                            text.begin() + static_cast<std::ptrdiff_t>(end), nullptr, false);
    if (line.is_object() && line.contains("loss") && line.contains("step") &&
        line["step"].is_number_integer())
      steps[line["step"].get<int64_t>()] = {line["loss"].dump(), line.value("weights_hash", "")};
    at = end + 1;
  }
  return steps;
}

}  // namespace

void inspect_checkpoint(Files& files, const std::string& directory, bool full) {
  const CheckpointReader checkpoint(files, directory);
  const TrainingState& state = checkpoint.state();
  std::printf("training\n");
  print_row("step", grouped(state.step));
  print_row("samples", cat(grouped(state.samples),
                           state.first_sample > 0
                               ? cat(", from ", grouped(state.first_sample), " on in the data's order")
                               : ""));
  print_row("tokens", cat(grouped(state.tokens), " of ", grouped(state.schedule_tokens)));
  if (state.ranks > 0) print_row("saved by", counted(state.ranks, "rank"));
  if (state.skipped + state.nan > 0) print_row("not applied", counted(state.skipped + state.nan, "step"));
  print_row("hash of the weights", hexadecimal(state.weights_hash));
  for (const SourceState& source : state.data.sources)
    print_row("data", cat(source.name, ": ", counted(static_cast<int64_t>(source.files.size()), "file"), ", ",
                          counted(source.tokens, "token")));
  for (const Section section : kSections) print_section(checkpoint.manifest(), section);
  for (const SettingChange& change : state.changes)
    print_row("changed", cat("after step ", grouped(change.step), ": ", change.name, " from ", change.from,
                             " to ", change.to));
  std::printf("settings\n");
  for (const auto& [name, value] : state.settings) print_row(name, value);
  if (!full) {
    print_row("checksums", "of headers and small files; --full checks all");
    return;
  }
  uint64_t bytes = 0;
  for (const FileRecord& file : checkpoint.manifest().files) bytes += static_cast<uint64_t>(file.bytes);
  const auto began = std::chrono::steady_clock::now();
  checkpoint.verify();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  print_row("checksums", cat("all ", grouped(static_cast<int64_t>(bytes)), " bytes are right, read in ",
                             duration(took.count())));
}

bool compare_checkpoints(Files& files, const std::string& first, const std::string& second) {
  const CheckpointReader a(files, first), b(files, second);
  std::printf("%s and %s\n", first.c_str(), second.c_str());
  const std::string models = describe_difference(a.model(), b.model());
  if (!models.empty()) {
    print_row("models", cat(models, " (here: the first, there: the second)"));
    return false;
  }
  bool equal = compare_row("step", a.state().step, b.state().step);
  equal &= compare_row("samples", a.state().samples, b.state().samples);
  equal &= compare_row("tokens", a.state().tokens, b.state().tokens);
  equal &= compare_settings(a.state(), b.state());
  for (const std::string& line :
       describe_change(a.state().data, b.state().data, "in the first", "in the second")) {
    print_row("data", line);
    equal = false;
  }
  const ParameterTable table(a.model());
  a.check_tensors(table);
  b.check_tensors(table);
  const auto lacks = [](const CheckpointReader& of, Section section) {
    return of.manifest().sections[static_cast<size_t>(section)].empty();
  };
  for (const Section section : kSections) {
    if (lacks(a, section) && lacks(b, section)) continue;
    const std::string difference = first_difference(a, b, section, table);
    print_row(name_of(section), difference.empty() ? "equal" : difference);
    equal &= difference.empty();
  }
  return equal;
}

bool compare_runs(Files& files, const std::string& first, const std::string& second) {
  const std::map<int64_t, StepLine> a = steps_of(files, first), b = steps_of(files, second);
  std::printf("%s and %s\n", first.c_str(), second.c_str());
  int64_t equal = 0, alone = 0;
  bool different = false;
  for (const auto& [step, line] : a) {
    const auto other = b.find(step);
    if (other == b.end()) {
      ++alone;
      continue;
    }
    if (line == other->second) {
      equal += different ? 0 : 1;
      continue;
    }
    if (!different) {
      print_row("first difference", cat("step ", grouped(step)));
      compare_row("loss", line.loss, other->second.loss);
      compare_row("hash of the weights", line.hash, other->second.hash);
    }
    different = true;
  }
  print_row(different ? "equal before it" : "equal", counted(equal, "step"));
  if (alone > 0) print_row("only in the first", counted(alone, "step"));
  const auto shared = static_cast<int64_t>(a.size()) - alone;
  if (static_cast<int64_t>(b.size()) > shared)
    print_row("only in the second", counted(static_cast<int64_t>(b.size()) - shared, "step"));
  return !different && a.size() == b.size() && alone == 0;
}

}  // namespace kinoe
