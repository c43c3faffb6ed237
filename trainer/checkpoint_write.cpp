// Bytes to their places, and the order of fsyncs and renames that makes them a checkpoint.
#include "trainer/checkpoint_write.h"

#include <algorithm>

#include "trainer/checkpoint.h"

namespace kinoe {
namespace {

std::string checkpoints_of(const std::string& run_directory) {
  return join_path(run_directory, "checkpoints");
}
std::string temporary_path(const std::string& run_directory, int64_t step) {
  return checkpoint_path(run_directory, step) + ".tmp";
}

void write_synced(Files& files, const std::string& path, std::string_view contents) {
  const std::unique_ptr<File> file = files.create(path);
  file->write_at(0, contents.data(), contents.size());
  file->sync();
  file->close();
}

constexpr const char* kOneFileSystem = "; the run directory must be on a file system that all hosts see";

FileRecord record_of(const std::string& name, std::string_view head, uint64_t bytes) {
  return {name, static_cast<int64_t>(bytes), static_cast<int64_t>(head.size()),
          checksum(head.data(), head.size())};
}

std::string name_of_index(const CheckpointPlan::Part& part) {
  return join_path(part.directory, part.files.stem + ".safetensors.index.json");
}

CheckpointManifest make_manifest(const ParameterTable& table, const CheckpointPlan& plan,
                                 std::span<const uint64_t> checksums,
                                 const std::vector<SmallFile>& small_files) {
  CheckpointManifest manifest;
  manifest.step = plan.step;
  for (const SmallFile& file : small_files)
    manifest.files.push_back(record_of(file.name, file.contents, file.contents.size()));
  for (const CheckpointPlan::Part& part : plan.parts) {
    const size_t first_file = manifest.files.size();
    for (const FilePlan& file : part.files.files)
      manifest.files.push_back(record_of(join_path(part.directory, file.name), file.head, file.bytes));
    std::vector<TensorRecord>& records = manifest.sections[static_cast<size_t>(part.section)];
    for (size_t i = 0; i < part.files.tensors.size(); ++i) {
      const TensorPlace& place = part.files.tensors[i];
      const auto first = checksums.begin() + static_cast<std::ptrdiff_t>(part.first_chunk + plan.chunk_of[i]);
      TensorRecord record;
      record.name = place.info.name;
      record.shape = place.info.shape;
      record.type = place.info.dtype;
      record.file = first_file + place.file;
      record.offset = static_cast<int64_t>(place.offset);
      record.chunks = chunks_of(table.parameters()[i]);
      record.checksums.assign(first, first + record.chunks.count());
      records.push_back(std::move(record));
    }
  }
  return manifest;
}

}  // namespace

std::vector<SmallFile> read_tokenizer_files(Files& files, const std::string& directory) {
  std::vector<SmallFile> found;
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"}) {
    const std::string path = join_path(directory, name);
    if (files.kind(path) == Files::Kind::file) found.push_back({name, read_file(files, path)});
  }
  return found;
}

void begin_checkpoint(Files& files, const std::string& run_directory, const CheckpointPlan& plan) {
  const std::string temporary = temporary_path(run_directory, plan.step);
  if (files.kind(temporary) != Files::Kind::absent) remove_tree(files, temporary);
  if (files.kind(checkpoints_of(run_directory)) == Files::Kind::absent) {
    make_directories(files, checkpoints_of(run_directory));
    files.sync_directory(run_directory);
  }
  make_directories(files, join_path(temporary, "trainer"));
  for (const CheckpointPlan::Part& part : plan.parts)
    for (const FilePlan& planned : part.files.files) {
      const std::unique_ptr<File> file =
          files.create(join_path(join_path(temporary, part.directory), planned.name));
      file->write_at(0, planned.head.data(), planned.head.size());
      file->resize(planned.bytes);
      file->close();
    }
}

void check_begun(Files& files, const std::string& run_directory, const CheckpointPlan& plan) {
  const std::string directory = checkpoints_of(run_directory),
                    temporary = temporary_path(run_directory, plan.step);
  // Listing the directory makes a network file system look again where asking for one name may be answered from memory.
  const auto listed = [&](const std::string& name) { return join_path(directory, name) == temporary; };
  bool seen = files.kind(directory) == Files::Kind::directory;
  if (seen) {
    const std::vector<std::string> names = files.list(directory);
    seen = std::any_of(names.begin(), names.end(), listed);
  }
  if (!seen) fail(ExitCode::checkpoint, temporary, ": made by rank 0, not seen here", kOneFileSystem);
}

CheckpointPart::CheckpointPart(Files& files, const std::string& run_directory, const ParameterTable& table,
                               const CheckpointPlan& plan)
    : table_(table), plan_(plan), checksums_(plan.chunks()) {
  const std::string temporary = temporary_path(run_directory, plan.step);
  for (const CheckpointPlan::Part& part : plan.parts) {
    files_.emplace_back();
    for (const FilePlan& file : part.files.files)
      files_.back().push_back(files.open_write(join_path(join_path(temporary, part.directory), file.name)));
  }
}

void CheckpointPart::write(Section section, int64_t begin, int64_t count, const void* elements) {
  const CheckpointPlan::Part* part = plan_.find(section);
  CHECK(part != nullptr, "a checkpoint of this plan has no section ", name_of(section));
  CHECK(begin % kChunk == 0 && count % kChunk == 0, "[", begin, ", +", count, ") is not whole chunks");
  write_section(*part, begin, count, elements);
  if (section != Section::masters) return;
  std::vector<bf16> rounded(static_cast<size_t>(count));
  const float* masters = static_cast<const float*>(elements);
  std::transform(masters, masters + count, rounded.begin(), [](float x) { return to_bf16(x); });
  write_section(*plan_.find(Section::weights), begin, count, rounded.data());
}

void CheckpointPart::write_section(const CheckpointPlan::Part& part, int64_t begin, int64_t count,
                                   const void* elements) {
  const std::vector<Parameter>& parameters = table_.parameters();
  const auto element = static_cast<int64_t>(size_of(part.type));
  auto p = std::partition_point(parameters.begin(), parameters.end(),
                                [&](const Parameter& q) { return q.offset + q.size <= begin; });
  for (; p != parameters.end() && p->offset < begin + count; ++p) {
    const auto index = static_cast<size_t>(p - parameters.begin());
    const TensorPlace& place = part.files.tensors[index];
    const Chunks chunks = chunks_of(*p);
    const int64_t first = std::max(begin, p->offset) - p->offset;
    const int64_t last = std::min(begin + count, p->offset + p->size) - p->offset;
    const char* from = static_cast<const char*>(elements) + (p->offset + first - begin) * element;
    File& file = *files_[static_cast<size_t>(&part - plan_.parts.data())][place.file];
    file.write_at(place.offset + static_cast<uint64_t>(first * element), from,
                  static_cast<size_t>((last - first) * element));
    for (int64_t c = chunks.holding(first); c < chunks.count() && chunks.begin(c) < last; ++c)
      checksums_[part.first_chunk + plan_.chunk_of[index] + static_cast<size_t>(c)] =
          checksum(from + (chunks.begin(c) - first) * element,
                   static_cast<size_t>((chunks.end(c) - chunks.begin(c)) * element));
  }
}

std::vector<uint64_t> CheckpointPart::finish() {
  for (const auto& part : files_)
    for (const std::unique_ptr<File>& file : part) {
      file->sync();
      file->close();
    }
  files_.clear();
  return std::move(checksums_);
}

void check_arrived(Files& files, const std::string& run_directory, const ParameterTable& table,
                   const CheckpointPlan& plan, size_t chunk, uint64_t expected) {
  const CheckpointPlan::Part& part = plan.parts[chunk / plan.chunk_of.back()];
  const size_t within = chunk % plan.chunk_of.back();
  const auto index = static_cast<size_t>(
      std::upper_bound(plan.chunk_of.begin(), plan.chunk_of.end(), within) - plan.chunk_of.begin() - 1);
  const TensorPlace& place = part.files.tensors[index];
  const Chunks chunks = chunks_of(table.parameters()[index]);
  const auto c = static_cast<int64_t>(within - plan.chunk_of[index]);
  const auto element = static_cast<int64_t>(size_of(part.type));
  std::vector<char> bytes(static_cast<size_t>((chunks.end(c) - chunks.begin(c)) * element));
  const std::string path = join_path(join_path(temporary_path(run_directory, plan.step), part.directory),
                                     part.files.files[place.file].name);
  files.open_read(path)->read_at(place.offset + static_cast<uint64_t>(chunks.begin(c) * element),
                                 bytes.data(), bytes.size());
  if (checksum(bytes.data(), bytes.size()) != expected)
    fail(ExitCode::checkpoint, path, ": what another rank has written into it is not there for rank 0",
         kOneFileSystem);
}

std::string publish_checkpoint(Files& files, const std::string& run_directory, const ParameterTable& table,
                               const CheckpointPlan& plan, std::span<const uint64_t> checksums,
                               const TrainingState& state, const std::vector<SmallFile>& small_files) {
  const std::string temporary = temporary_path(run_directory, plan.step);
  const std::string final_path = checkpoint_path(run_directory, plan.step);
  std::vector<SmallFile> all = small_files;
  all.push_back({"trainer/state.json", to_json(state)});
  for (const CheckpointPlan::Part& part : plan.parts)
    if (!part.files.index.empty()) all.push_back({name_of_index(part), part.files.index});
  for (const SmallFile& file : all) write_synced(files, join_path(temporary, file.name), file.contents);
  files.sync_directory(join_path(temporary, "trainer"));
  files.sync_directory(temporary);

  write_synced(files, join_path(temporary, "trainer/manifest.json"),
               to_json(make_manifest(table, plan, checksums, all)));
  files.sync_directory(join_path(temporary, "trainer"));

  const bool replaces = files.kind(final_path) != Files::Kind::absent;
  if (replaces)
    files.exchange(temporary, final_path);
  else
    files.rename(temporary, final_path);
  files.sync_directory(checkpoints_of(run_directory));
  if (replaces) remove_tree(files, temporary);
  write_file_durably(files, join_path(checkpoints_of(run_directory), "latest"),
                     final_path.substr(final_path.rfind('/') + 1) + "\n");
  return final_path;
}

void remove_old_checkpoints(Files& files, const std::string& run_directory, const Retention& keep) {
  if (keep.newest == 0) return;
  std::vector<int64_t> steps = checkpoint_steps(files, run_directory);
  const size_t newest = std::min(steps.size(), static_cast<size_t>(keep.newest));
  for (size_t i = 0; i + newest < steps.size(); ++i)
    if (keep.every == 0 || steps[i] % keep.every != 0) {
      // Under another name first: half a directory must not look like a checkpoint.
      const std::string path = checkpoint_path(run_directory, steps[i]);
      files.rename(path, path + ".old.tmp");
      remove_tree(files, path + ".old.tmp");
    }
}

void remove_unfinished_checkpoints(Files& files, const std::string& run_directory) {
  const std::string directory = checkpoints_of(run_directory);
  if (files.kind(directory) != Files::Kind::directory) return;
  for (const std::string& name : files.list(directory))
    if (name.ends_with(".tmp")) remove_tree(files, join_path(directory, name));
}

}  // namespace kinoe
