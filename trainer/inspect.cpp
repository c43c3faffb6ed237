// What `inspect` prints of a model directory.
#include "trainer/inspect.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <set>

#include "dataloader/data_spec.h"
#include "dataloader/inspect.h"
#include "dataloader/tokenizer.h"
#include "trainer/checkpoint.h"
#include "trainer/files.h"
#include "trainer/inspect_checkpoint.h"
#include "trainer/model_config.h"
#include "trainer/parameters.h"
#include "trainer/safetensors.h"
#include "trainer/tables.h"

namespace kinoe {
namespace {

constexpr size_t kMostFrequent = 10;

[[noreturn]] void fail_with(ExitCode code, const std::vector<std::string>& problems) {
  const size_t more = problems.size() - 1;
  fail(code, problems[0],
       more > 0 ? cat(" (and ", more, more == 1 ? " more problem, " : " more problems, ", "listed above)")
                : "");
}

std::string percent(int64_t part, int64_t whole) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f %%",
                100.0 * static_cast<double>(part) / static_cast<double>(whole));
  return text;
}

// ---- Data ------------------------------------------------------------------------------------------------------------

void print_histogram(const Histogram& histogram, TokenFormat format) {
  const auto total = histogram.total();
  print_row("ids",
            cat(grouped(histogram.lowest()), " to ", grouped(histogram.highest()), ", ",
                grouped(histogram.different()), " different, of ", counted(total, "token"), " looked at"));
  bool first = true;
  for (const auto& [id, count] : histogram.most_frequent(kMostFrequent)) {
    const std::string shown =
        format == TokenFormat::text && id > 32 && id < 127 ? cat(" '", static_cast<char>(id), "'") : "";
    print_row(first ? "most frequent" : "",
              cat(grouped(id), shown, ": ", grouped(count), ", ", percent(count, total)));
    first = false;
  }
}

void print_data(const DataReport& report, const InspectConfig& config) {
  std::printf("%s\n", report.path.c_str());
  print_row("format", name_of(report.format));
  print_row("size", counted(report.bytes, "byte"));
  print_row("tokens", grouped(report.tokens));
  if (report.sequences > 0) print_row("sequences", grouped(report.sequences));
  if (report.documents >= 0)
    print_row("documents", cat(grouped(report.documents),
                               report.sequences > 0 ? "" : cat(", ended by token ", report.end_token)));
  print_histogram(report.histogram, report.format);
  if (report.vocab > 0)
    print_row("vocabulary", cat(grouped(report.vocab), ", ",
                                report.histogram.at_least(report.vocab) > 0 ? "exceeded" : "kept"));
  if (report.manifest) {
    const Manifest& manifest = *report.manifest;
    print_row("manifest",
              cat(manifest.path, ": ", manifest.files.at(file_name(report.path)).split, ", tokenizer ",
                  manifest.tokenizer_file, " of ", grouped(manifest.vocab_size), " ids"));
    print_row("hash of the file",
              report.hash_compared ? "compared with the manifest's" : "not compared (--full does)");
  }
  print_row("fingerprint", report.fingerprint);
  if (!report.shown.empty() && report.format == TokenFormat::text) {
    std::printf("  text at %s:\n%s\n", grouped(*config.offset).c_str(),
                printable(byte_tokenizer()->decode(report.shown)).c_str());
  } else if (!report.shown.empty()) {
    std::string ids;
    for (const int32_t id : report.shown) ids += (ids.empty() ? "" : " ") + std::to_string(id);
    print_row(cat("tokens at ", grouped(*config.offset)), ids);
  }
  for (const std::string& warning : report.warnings) print_row("warning", warning);
  for (const std::string& problem : report.problems) print_row("problem", problem);
}

int inspect_files(const InspectConfig& config) {
  InspectOptions options;
  options.full = config.full;
  options.vocab = config.vocab.value_or(0);
  options.offset = config.offset.value_or(-1);
  const std::vector<std::string> files = expand_data(std::vector<std::string>{config.path}).front().files;
  if (config.offset && files.size() > 1)
    fail(ExitCode::usage, "--offset is within one file; '", config.path, "' names ", files.size());
  Histogram all;
  int64_t tokens = 0, bytes = 0;
  std::vector<std::string> problems;
  for (const std::string& file : files) {
    try {
      const DataReport report = inspect_data(file, options);
      print_data(report, config);
      all.add(report.histogram);
      tokens += report.tokens;
      bytes += report.bytes;
      problems.insert(problems.end(), report.problems.begin(), report.problems.end());
    } catch (const Error& error) {  // a file that can not be opened is one of the things to find
      if (error.code != ExitCode::data || files.size() == 1) throw;
      std::printf("%s\n", file.c_str());
      print_row("problem", error.what());
      problems.emplace_back(error.what());
    }
  }
  if (files.size() > 1 && all.total() > 0) {
    std::printf("all\n");
    print_row("files", grouped(static_cast<int64_t>(files.size())));
    print_row("size", counted(bytes, "byte"));
    print_row("tokens", grouped(tokens));
    print_histogram(all, TokenFormat::llmc_uint16);
  }
  if (!problems.empty()) fail_with(ExitCode::data, problems);
  return 0;
}

// ---- Model directories -----------------------------------------------------------------------------------------------

/// Of the elements of one tensor.
struct Statistics {
  double lowest = INFINITY, highest = -INFINITY, squares = 0;
  int64_t finite = 0, not_finite = 0;

  void add(double x) {
    if (!std::isfinite(x)) {
      ++not_finite;
      return;
    }
    lowest = std::min(lowest, x);
    highest = std::max(highest, x);
    squares += x * x;
    ++finite;
  }
};

bool is_real(FileDType type) {
  return type == FileDType::f32 || type == FileDType::bf16 || type == FileDType::f16 ||
         type == FileDType::f64;
}

double element(FileDType type, const char* from) {
  if (type == FileDType::f64) {
    double value = 0;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  if (type == FileDType::f32) {
    float value = 0;
    std::memcpy(&value, from, sizeof(value));
    return static_cast<double>(value);
  }
  uint16_t bits = 0;
  std::memcpy(&bits, from, sizeof(bits));
  return static_cast<double>(type == FileDType::bf16 ? to_float(bf16{bits}) : half_to_float(bits));
}

Statistics statistics(const SafetensorsReader& reader, const TensorPlace& tensor) {
  Statistics result;
  const size_t width = size_of(tensor.info.dtype);
  std::vector<char> block;
  for (uint64_t at = 0; at < tensor.bytes; at += block.size()) {
    block.resize(std::min<uint64_t>(kWriteBlock, tensor.bytes - at));
    reader.read(tensor, at, block.data(), block.size());
    for (size_t i = 0; i < block.size(); i += width) result.add(element(tensor.info.dtype, block.data() + i));
  }
  return result;
}

void print_shape(const ModelConfig& m) {
  print_row("layers", grouped(m.layers));
  print_row("width", grouped(m.hidden));
  print_row("heads", cat(m.heads, " of ", m.head_dim, ", ", m.kv_heads, " key/value"));
  print_row("MLP", cat(grouped(m.ffn), m.mlp == MlpKind::swiglu ? ", SwiGLU" : ", GELU"));
  print_row("norm", cat(m.norm == NormKind::rmsnorm ? "RMSNorm" : "LayerNorm", ", eps ", m.norm_eps));
  print_row("positions",
            cat(grouped(m.max_positions),
                m.position == PositionKind::rope ? cat(", RoPE, theta ", m.rope_theta) : ", learned"));
  print_row("vocabulary", cat(grouped(m.vocab_size), m.tied ? ", head tied to the embedding" : ""));
  print_row("end of text", m.eos_token < 0 ? "none" : cat("token ", m.eos_token));
  print_row("parameters", grouped(m.parameter_count()));
}

/// GPT-2's files by others leave "transformer." out.
const TensorPlace* find_parameter(const SafetensorsReader& reader, const Parameter& parameter) {
  constexpr std::string_view kPrefix = "transformer.";
  if (const TensorPlace* tensor = reader.find(parameter.name)) return tensor;
  return parameter.name.starts_with(kPrefix) ? reader.find(parameter.name.substr(kPrefix.size())) : nullptr;
}

bool is_checkpoint(Files& files, const std::string& path) {
  return files.kind(join_path(path, "trainer/manifest.json")) == Files::Kind::file;
}

bool is_run(Files& files, const std::string& path) {
  return files.kind(join_path(path, "metrics.jsonl")) == Files::Kind::file;
}

int inspect_model(const InspectConfig& config) {
  if (config.offset || config.vocab)
    fail(ExitCode::usage, config.offset ? "--offset" : "--vocab", " is for data; '", config.path,
         "' is a model directory");
  const std::unique_ptr<Files> files = posix_files();
  const ModelConfig model = load_model_config(config.path);
  validate(model);
  std::printf("%s\n", config.path.c_str());
  print_shape(model);

  const SafetensorsReader reader(*files, config.path);
  std::map<std::string, int64_t> types;
  std::set<size_t> weight_files;
  uint64_t bytes = 0;
  for (const TensorPlace& tensor : reader.tensors()) {
    ++types[name_of(tensor.info.dtype)];
    weight_files.insert(tensor.file);
    bytes += tensor.bytes;
  }
  std::string kinds;
  for (const auto& [type, count] : types) kinds += (kinds.empty() ? "" : ", ") + cat(count, " of ", type);
  print_row("tensors", cat(counted(static_cast<int64_t>(reader.tensors().size()), "tensor"), " (", kinds,
                           "), ", grouped(static_cast<int64_t>(bytes)), " bytes in ",
                           counted(static_cast<int64_t>(weight_files.size()), "file")));

  std::vector<std::string> problems;
  std::set<const TensorPlace*> known;
  const ParameterTable table(model);
  for (const Parameter& parameter : table.parameters()) {
    const TensorPlace* tensor = find_parameter(reader, parameter);
    known.insert(tensor);
    if (tensor == nullptr)
      problems.push_back(cat("'", config.path, "' lacks the tensor ", parameter.name));
    else if (tensor->info.shape != parameter.shape)
      problems.push_back(cat("tensor ", tensor->info.name, " in '", config.path, "' is ",
                             shape_text(tensor->info.shape), ", its config.json means ",
                             shape_text(parameter.shape)));
  }
  for (const TensorPlace& tensor : reader.tensors())
    if (!known.contains(&tensor))
      print_row("not a parameter", cat(tensor.info.name, " ", shape_text(tensor.info.shape)));

  if (config.full) {
    std::printf("  %-52s %-6s %-18s %12s %12s %12s\n", "tensor", "type", "shape", "lowest", "highest", "rms");
    for (const TensorPlace& tensor : reader.tensors()) {
      const std::string shape = shape_text(tensor.info.shape);
      if (!is_real(tensor.info.dtype)) {
        std::printf("  %-52s %-6s %s\n", tensor.info.name.c_str(), name_of(tensor.info.dtype), shape.c_str());
        continue;
      }
      const Statistics s = statistics(reader, tensor);
      std::printf("  %-52s %-6s %-18s %12.5g %12.5g %12.5g\n", tensor.info.name.c_str(),
                  name_of(tensor.info.dtype), shape.c_str(), s.lowest, s.highest,
                  std::sqrt(s.squares / static_cast<double>(std::max<int64_t>(1, s.finite))));
      if (s.not_finite > 0)
        problems.push_back(cat("tensor ", tensor.info.name, " in '", config.path, "' has ", s.not_finite,
                               " elements that are NaN or infinite"));
    }
  }
  for (const std::string& problem : problems) print_row("problem", problem);
  if (is_checkpoint(*files, config.path)) inspect_checkpoint(*files, config.path, config.full);
  if (!problems.empty()) fail_with(ExitCode::checkpoint, problems);
  return 0;
}

constexpr int kDiffer = 1;  // as diff says it

int compare(Files& files, const std::string& first, const std::string& second) {
  const auto both = [&](const auto& is) { return is(files, first) && is(files, second); };
  if (both(is_checkpoint)) return compare_checkpoints(files, first, second) ? 0 : kDiffer;
  if (both(is_run)) return compare_runs(files, first, second) ? 0 : kDiffer;
  fail(ExitCode::usage, "inspect ", first, " ", second,
       ": expected two checkpoints (directories with trainer/manifest.json) or two runs (with "
       "metrics.jsonl)");
}

}  // namespace

int inspect(const InspectConfig& config) {
  const std::unique_ptr<Files> files = posix_files();
  if (!config.second.empty()) return compare(*files, config.path, config.second);
  if (is_run(*files, config.path)) {
    InspectConfig newest = config;
    newest.path = find_checkpoint(*files, config.path);
    return inspect_model(newest);
  }
  const bool directory = files->kind(config.path) == Files::Kind::directory;
  if (directory && files->kind(join_path(config.path, "config.json")) == Files::Kind::file)
    return inspect_model(config);
  return inspect_files(config);
}

}  // namespace kinoe
