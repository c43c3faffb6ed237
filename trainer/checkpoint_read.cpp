// Checksums, shapes and numbers checked on the way from the files into memory.
#include "trainer/checkpoint_read.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <set>

#include "kernels/adamw.h"

namespace kinoe {
namespace {

constexpr int64_t kPieceChunks = 16;  // 1 MiB of fp32 per read: still in the core's cache when it is checked

std::string names(const std::vector<std::string>& list) {
  constexpr size_t kListed = 8;
  std::string text;
  for (size_t i = 0; i < std::min(list.size(), kListed); ++i) text += (i ? ", " : "") + list[i];
  return list.size() > kListed ? text + ", ..." : text;
}

/// The blocks of a section, in order.
void add_blocks(Section section, int64_t size, int64_t most, std::vector<CheckpointReader::Block>& blocks) {
  for (int64_t at = 0; at < size; at += most) blocks.push_back({section, at, std::min(most, size - at)});
}

/// Calls use(parameter, first, last) for what a range of the flat range has of each tensor.
template <class Use>
void for_tensors(const ParameterTable& table, int64_t begin, int64_t count, const Use& use) {
  for (const Parameter& p : table.parameters()) {
    const int64_t first = std::max(p.offset, begin) - p.offset;
    const int64_t last = std::min(p.offset + p.size, begin + count) - p.offset;
    if (first < last) use(p, first, last);
  }
}

// Without a branch in the loop: the compiler makes them vectors. Where they find something, element by element says what.

bool all_finite(const float* x, size_t count) {
  uint32_t bad = 0;
  for (size_t i = 0; i < count; ++i)
    bad |= static_cast<uint32_t>((std::bit_cast<uint32_t>(x[i]) & 0x7f800000U) == 0x7f800000U);
  return bad == 0;
}

bool none_negative(const float* x, size_t count) {
  uint32_t bad = 0;
  for (size_t i = 0; i < count; ++i) bad |= static_cast<uint32_t>(x[i] < 0);
  return bad == 0;
}

bool all_rounded(const float* x, const bf16* rounded, size_t count) {
  uint32_t bad = 0;
  for (size_t i = 0; i < count; ++i) bad |= static_cast<uint32_t>(to_bf16(x[i]).bits ^ rounded[i].bits);
  return bad == 0;
}

/// Files below a directory, relative, one level of folders deep.
std::vector<std::string> files_below(Files& files, const std::string& directory) {
  std::vector<std::string> found;
  for (const std::string& name : files.list(directory)) {
    if (files.kind(join_path(directory, name)) != Files::Kind::directory)
      found.push_back(name);
    else
      for (const std::string& inner : files.list(join_path(directory, name)))
        found.push_back(join_path(name, inner));
  }
  return found;
}

}  // namespace

struct CheckpointReader::Piece {
  const Parameter* parameter = nullptr;
  int64_t first = 0, last = 0;  // elements wanted, within the tensor
  float* to = nullptr;          // of element `first`
};

CheckpointReader::CheckpointReader(Files& files, std::string directory)
    : directory_(std::move(directory)), all_files_(files) {
  const std::string manifest = join_path(directory_, "trainer/manifest.json");
  if (files.kind(manifest) != Files::Kind::file)
    fail(ExitCode::checkpoint, directory_,
         files.kind(directory_) == Files::Kind::absent
             ? ": no such checkpoint; check the path"
             : ": no complete checkpoint: trainer/manifest.json is missing; to start from weights alone use "
               "--init-from");
  manifest_ = checkpoint_manifest_from_json(read_file(files, manifest), manifest);
  check_files();
  state_ = training_state_from_json(read_file(files, join_path(directory_, "trainer/state.json")),
                                    join_path(directory_, "trainer/state.json"));
  if (state_.step != manifest_.step)
    fail(ExitCode::checkpoint, directory_, ": state.json is of step ", state_.step, ", the manifest of step ",
         manifest_.step);
  model_ = load_model_config(directory_);
  for (const FileRecord& file : manifest_.files)
    files_.push_back(files.open_read(join_path(directory_, file.name)));
  for (const Section section : kSections) {
    auto& index = by_name_[static_cast<size_t>(section)];
    const auto& tensors = manifest_.sections[static_cast<size_t>(section)];
    for (size_t i = 0; i < tensors.size(); ++i) index.emplace_back(tensors[i].name, i);
    std::sort(index.begin(), index.end());
  }
}

/// Sizes, headers and small files; what is missing and what does not belong.
void CheckpointReader::check_files() const {
  std::set<std::string> known = {"trainer/manifest.json"};
  std::vector<std::string> missing, extra;
  for (const FileRecord& file : manifest_.files) known.insert(file.name);
  for (const char* name : {"config.json", "trainer/state.json"})
    if (known.count(name) == 0)
      fail(ExitCode::checkpoint, directory_, ": its manifest does not list ", name,
           ": damaged; use another checkpoint");
  for (const FileRecord& file : manifest_.files) {
    const std::string path = join_path(directory_, file.name);
    if (all_files_.kind(path) != Files::Kind::file) {
      missing.push_back(file.name);
      continue;
    }
    const std::unique_ptr<File> opened = all_files_.open_read(path);
    if (opened->size() != static_cast<uint64_t>(file.bytes))
      fail(ExitCode::checkpoint, path, ": ", opened->size(), " bytes, the manifest says ", file.bytes,
           ": truncated or of another step; use another checkpoint");
    std::string covered(static_cast<size_t>(file.covered), '\0');
    opened->read_at(0, covered.data(), covered.size());
    if (checksum(covered.data(), covered.size()) != file.checksum)
      fail(ExitCode::checkpoint, path, ": checksum of its first ", file.covered,
           " bytes does not fit the manifest: damaged or of another step; use another checkpoint");
  }
  // Anything may lie beside the model but what a reader would take for part of it.
  for (const std::string& name : files_below(all_files_, directory_))
    if (known.count(name) == 0 && (name.find('/') != std::string::npos || name.ends_with(".safetensors") ||
                                   name.ends_with(".safetensors.index.json")))
      extra.push_back(name);
  if (!missing.empty() || !extra.empty())
    fail(ExitCode::checkpoint, directory_, ": not the files its manifest lists",
         missing.empty() ? "" : "; missing: ", names(missing),
         extra.empty() ? "" : "; not known: ", names(extra), "; restore them, or use another checkpoint");
}

std::string CheckpointReader::small_file(const std::string& name) const {
  const auto listed = [&](const FileRecord& file) { return file.name == name; };
  if (std::none_of(manifest_.files.begin(), manifest_.files.end(), listed)) return "";
  return read_file(all_files_, join_path(directory_, name));
}

void CheckpointReader::check_model(const ModelConfig& wanted, const ParameterTable& table) const {
  const std::string difference = describe_difference(wanted, model_);
  if (!difference.empty())
    fail(ExitCode::checkpoint, directory_, " holds another model: ", difference,
         " (here: wanted, there: in the checkpoint)");
  check_tensors(table);
}

void CheckpointReader::check_tensors(const ParameterTable& table) const {
  for (const Section section : kSections) {
    const auto& tensors = manifest_.sections[static_cast<size_t>(section)];
    if (section == Section::masters && tensors.empty()) continue;
    if (tensors.size() != table.parameters().size())
      fail(ExitCode::checkpoint, directory_, ": ", tensors.size(), " tensors in section ", name_of(section),
           ", the model has ", table.parameters().size());
    for (const Parameter& p : table.parameters())
      if (record(section, p).shape != p.shape)
        fail(ExitCode::checkpoint, directory_, ": tensor ", p.name, " is ",
             shape_text(record(section, p).shape), " in section ", name_of(section), ", the model has ",
             shape_text(p.shape));
    if (section != Section::masters) continue;
    for (const Parameter& p : table.parameters())
      if (record(section, p).chunks.first != record(Section::weights, p).chunks.first)
        fail(ExitCode::checkpoint, directory_, ": tensor ", p.name,
             ": its chunks are not the same in masters and weights");
  }
}

const TensorRecord& CheckpointReader::record(Section section, const Parameter& parameter) const {
  const auto& index = by_name_[static_cast<size_t>(section)];
  const auto found = std::lower_bound(index.begin(), index.end(), std::pair(parameter.name, size_t{0}));
  if (found == index.end() || found->first != parameter.name)
    fail(ExitCode::checkpoint, directory_, ": tensor ", parameter.name, " is missing in section ",
         name_of(section));
  return manifest_.sections[static_cast<size_t>(section)][found->second];
}

void CheckpointReader::damaged(const TensorRecord& tensor, const std::string& what) const {
  fail(ExitCode::checkpoint, join_path(directory_, manifest_.files[tensor.file].name), ": tensor ",
       tensor.name, ": ", what, kUseOlder);
}

/// The bytes of elements [first, last), which are whole chunks.
void CheckpointReader::read_checked(const TensorRecord& tensor, int64_t first, int64_t last,
                                    char* bytes) const {
  const auto element = static_cast<int64_t>(size_of(tensor.type));
  files_[tensor.file]->read_at(static_cast<uint64_t>(tensor.offset + first * element), bytes,
                               static_cast<size_t>((last - first) * element));
  for (int64_t c = tensor.chunks.holding(first); c < tensor.chunks.count() && tensor.chunks.begin(c) < last;
       ++c) {
    const char* from = bytes + (tensor.chunks.begin(c) - first) * element;
    const auto size = static_cast<size_t>((tensor.chunks.end(c) - tensor.chunks.begin(c)) * element);
    if (checksum(from, size) != tensor.checksums[static_cast<size_t>(c)])
      damaged(tensor, cat("elements ", tensor.chunks.begin(c), " to ", tensor.chunks.end(c) - 1,
                          " do not fit their checksum"));
  }
}

uint64_t CheckpointReader::read_piece(Section section, const Piece& piece, std::vector<char>& scratch) const {
  const Parameter& p = *piece.parameter;
  const TensorRecord& tensor = record(section, p);
  const Chunks& chunks = tensor.chunks;
  const int64_t begin = chunks.begin(chunks.holding(piece.first));
  const int64_t end = chunks.end(chunks.holding(piece.last - 1));
  const auto skipped = static_cast<size_t>(piece.first - begin);
  const auto count = static_cast<size_t>(piece.last - piece.first);
  const auto read = [&](const TensorRecord& from) {
    const size_t bytes = static_cast<size_t>(end - begin) * size_of(from.type);
    if (scratch.size() < bytes) scratch.resize(bytes);
    read_checked(from, begin, end, scratch.data());
    return scratch.data() + skipped * size_of(from.type);
  };
  if (tensor.type == FileDType::f32 && begin == piece.first && end == piece.last) {
    read_checked(tensor, begin, end, reinterpret_cast<char*>(piece.to));
  } else if (tensor.type == FileDType::f32) {
    std::memcpy(piece.to, read(tensor), count * sizeof(float));
  } else {
    const auto* narrow = reinterpret_cast<const bf16*>(read(tensor));
    for (size_t i = 0; i < count; ++i) piece.to[i] = to_float(narrow[i]);
  }
  if (!all_finite(piece.to, count) || (section == Section::v && !none_negative(piece.to, count)))
    for (size_t i = 0; i < count; ++i)
      if (!std::isfinite(piece.to[i]) || (section == Section::v && piece.to[i] < 0))
        damaged(tensor, cat("element ", piece.first + static_cast<int64_t>(i), " is ", piece.to[i]));

  const bool masters =
      section == Section::masters || (section == Section::weights && tensor.type == FileDType::f32);
  if (!masters) return 0;
  if (section == Section::masters) {  // the other copy of the same numbers
    const TensorRecord& weights = record(Section::weights, p);
    const auto* narrow = reinterpret_cast<const bf16*>(read(weights));
    if (!all_rounded(piece.to, narrow, count))
      for (size_t i = 0; i < count; ++i)
        if (narrow[i].bits != to_bf16(piece.to[i]).bits)
          damaged(weights, cat("element ", piece.first + static_cast<int64_t>(i), " is ", to_float(narrow[i]),
                               ", not its master ", piece.to[i], " rounded to bf16"));
  }
  uint64_t hash = 0;
  for (size_t i = 0; i < count; ++i)
    hash += master_hash(p.key, piece.first + static_cast<int64_t>(i), std::bit_cast<uint32_t>(piece.to[i]));
  return hash;
}

/// Where the files have it: masters in fp32 are the weights.
Section CheckpointReader::stored(Section section) const {
  const bool in_weights =
      section == Section::masters && manifest_.sections[static_cast<size_t>(section)].empty();
  return in_weights ? Section::weights : section;
}

uint64_t CheckpointReader::read(Section section, const ParameterTable& table, int64_t begin, int64_t count,
                                float* out) const {
  section = stored(section);
  uint64_t hash = 0;
  std::vector<char> scratch;
  int64_t filled = begin;
  for_tensors(table, begin, count, [&](const Parameter& p, int64_t first, int64_t last) {
    std::fill(out + (filled - begin), out + (p.offset + first - begin), 0.0F);
    filled = p.offset + last;
    while (first < last) {
      const int64_t end = std::min(last, first + kPieceChunks * kChunk);
      hash += read_piece(section, {&p, first, end, out + (p.offset + first - begin)}, scratch);
      first = end;
    }
  });
  std::fill(out + (filled - begin), out + count, 0.0F);
  return hash;
}

void CheckpointReader::expect(const ParameterTable& table, const Block& block) const {
  const Section section = stored(block.section);
  const auto expect_in = [&](Section in) {
    for_tensors(table, block.begin, block.count, [&](const Parameter& p, int64_t first, int64_t last) {
      const TensorRecord& tensor = record(in, p);
      const auto element = static_cast<int64_t>(size_of(tensor.type));
      files_[tensor.file]->expect(static_cast<uint64_t>(tensor.offset + first * element),
                                  static_cast<uint64_t>((last - first) * element));
    });
  };
  expect_in(section);
  if (section == Section::masters) expect_in(Section::weights);
}

void CheckpointReader::share_out_blocks(const ParameterTable& table, const std::vector<Block>& blocks,
                                        int threads, const std::function<void(int, size_t)>& work) const {
  share_out(threads, blocks.size(), [&](int thread, size_t i) {
    if (i < static_cast<size_t>(threads)) expect(table, blocks[i]);
    if (const size_t next = i + static_cast<size_t>(threads); next < blocks.size())
      expect(table, blocks[next]);
    work(thread, i);
  });
}

uint64_t CheckpointReader::read_all(Section section, const ParameterTable& table, int threads,
                                    float* out) const {
  std::vector<Block> blocks;
  add_blocks(section, table.flat_size(), kBlockElements, blocks);
  std::atomic<uint64_t> hash = 0;
  share_out_blocks(table, blocks, threads, [&](int, size_t i) {
    hash += read(section, table, blocks[i].begin, blocks[i].count, out + blocks[i].begin);
  });
  return hash;
}

void CheckpointReader::verify(int threads, int64_t block_elements) const {
  const ParameterTable table(model_);
  check_model(model_, table);
  std::vector<Block> blocks;
  for (const Section section : {Section::masters, Section::m, Section::v})
    add_blocks(section, table.flat_size(), block_elements, blocks);
  std::vector<std::vector<float>> buffers(static_cast<size_t>(threads));
  std::atomic<uint64_t> hash = 0;
  share_out_blocks(table, blocks, threads, [&](int thread, size_t i) {
    std::vector<float>& buffer = buffers[static_cast<size_t>(thread)];
    buffer.resize(static_cast<size_t>(std::min(block_elements, table.flat_size())));
    hash += read(blocks[i].section, table, blocks[i].begin, blocks[i].count, buffer.data());
  });
  if (hash != state_.weights_hash)
    fail(ExitCode::checkpoint, directory_,
         ": the weights are not those of the step its state.json names (hashes ", hash, " and ",
         state_.weights_hash, ")", kUseOlder);
}

}  // namespace kinoe
