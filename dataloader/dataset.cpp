// From a sample's index to its tokens: mixture, epoch, permutation, shard, window.
#include "dataloader/dataset.h"

#include <algorithm>
#include <utility>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

constexpr int64_t kScanTokens = int64_t{1} << 26;  // looked at over all shards before the run starts
constexpr int64_t kScanLeast = 4096;               // but in each shard at least these

}  // namespace

Dataset::Dataset(const DatasetOptions& options)
    : vocab_size_(options.vocab_size), end_token_(options.end_token) {
  CHECK(options.seq_len > 0 && options.vocab_size > 0 && options.min_samples > 0, "seq_len ", options.seq_len,
        ", vocab_size ", options.vocab_size, ", min_samples ", options.min_samples);
  state_.seed = options.seed;
  state_.seq_len = options.seq_len;
  state_.shuffled = options.shuffle;
  state_.document_mask = options.document_mask;
}

Dataset Dataset::open(const std::vector<DataSource>& sources, const DatasetOptions& options) {
  CHECK(!sources.empty(), "a data set of no sources");
  if (!options.shuffle && (sources.size() > 1 || sources[0].weight != 1.0))
    fail(ExitCode::usage,
         "validation data are read once from end to end and take no mixture weights; remove ':",
         sources[0].weight, "' from '", sources[0].name, "'");
  Dataset dataset(options);
  size_t files = 0;
  for (const DataSource& source : sources) files += source.files.size();
  CHECK(files > 0, "a data set of no files");
  const int64_t budget = std::max(kScanTokens / static_cast<int64_t>(files), kScanLeast);
  for (const DataSource& source : sources) {
    std::vector<Shard> shards;
    for (const std::string& file : source.files) shards.push_back(Shard::open(file));
    dataset.add_source(source.name, source.weight, std::move(shards), budget);
  }
  dataset.finish(options);
  return dataset;
}

Dataset Dataset::stories(StorySplit split, int64_t bytes, const DatasetOptions& options) {
  Dataset dataset(options);
  std::vector<Shard> shards;
  shards.push_back(
      Shard::from_text(split == StorySplit::training ? "built-in stories" : "built-in stories (validation)",
                       stories_text(split, bytes)));
  const std::string name = shards[0].name();
  dataset.add_source(name, 1.0, std::move(shards), kScanTokens);
  dataset.finish(options);
  return dataset;
}

void Dataset::check_manifest(const Shard& shard, const Manifest& manifest) {
  const Manifest::File& expected = manifest.files.at(file_name(shard.name()));
  const auto differ = [&](const char* what, int64_t found, int64_t said) {
    if (found == said) return;
    fail(ExitCode::data, "'", shard.name(), "' has ", found, " ", what, ", '", manifest.path, "' says ", said,
         "; the shard is not the one that was prepared: copy or prepare it again");
  };
  differ("bytes", shard.file_bytes(), expected.bytes);
  differ("tokens", shard.tokens(), expected.tokens);
  if (manifest.vocab_size > vocab_size_)
    fail(ExitCode::data, "'", shard.name(), "' was made with a tokenizer of ", manifest.vocab_size, " ids ('",
         manifest.path, "'), but the model's vocabulary has ", vocab_size_,
         "; use a model with the tokenizer's vocabulary");
  if (state_.tokenizer.empty()) {
    state_.tokenizer = manifest.tokenizer_hash;
    tokenizer_from_ = manifest.path;
  }
  if (state_.tokenizer != manifest.tokenizer_hash)
    fail(ExitCode::data, "'", tokenizer_from_, "' and '", manifest.path, "' have different tokenizers (",
         state_.tokenizer, " and ", manifest.tokenizer_hash,
         "): the same id means another token there; prepare all data with one tokenizer");
}

void Dataset::prepare_documents(Shard& shard, const Manifest* manifest, int64_t scan_budget) {
  shard.set_end_token(manifest != nullptr ? manifest->end_token : end_token_);
  if (!state_.document_mask) return;
  if (!shard.knows_documents())
    fail(ExitCode::usage, "--document-mask: nothing says where the documents of '", shard.name(),
         "' end; the model's config.json needs an eos_token_id that ends each document, or the data a "
         "manifest.json or a Megatron index; or leave --document-mask out");
  if (shard.index() != nullptr || shard.holds_token(shard.end_token(), scan_budget)) return;
  if (without_end_++ == 0) first_without_end_ = shard.name();
}

void Dataset::add_source(std::string name, double weight, std::vector<Shard> shards, int64_t scan_budget) {
  SourceState state{std::move(name), weight, 0, 0, {}};
  Source source;
  source.first_sample.push_back(0);
  for (Shard& shard : shards) {
    const int64_t samples = (shard.tokens() - 1) / seq_len();
    for (const std::string& warning : shard.warnings()) warnings_.push_back(warning);
    const Manifest* manifest = shard.in_memory() ? nullptr : manifests_.of(shard.name());
    if (manifest != nullptr) check_manifest(shard, *manifest);
    if (std::string warning = shard.scan(vocab_size_, scan_budget); !warning.empty())
      warnings_.push_back(std::move(warning));
    prepare_documents(shard, manifest, scan_budget);
    state.files.push_back({shard.name(), name_of(shard.format()), shard.file_bytes(), shard.tokens(), samples,
                           shard.fingerprint()});
    state.tokens += shard.tokens();
    if (samples == 0) continue;
    state.samples += samples;
    source.first_sample.push_back(state.samples);
    source.shards.push_back(std::move(shard));
  }
  tokens_ += state.tokens;
  samples_ += state.samples;
  state_.sources.push_back(std::move(state));
  sources_.push_back(std::move(source));
}

void Dataset::finish(const DatasetOptions& options) {
  // Bytes and a vocabulary's ids are different languages: one model can not read both.
  const FileState* text = nullptr;
  const FileState* ids = nullptr;
  int64_t files = 0, skipped = 0, skipped_tokens = 0;
  const FileState* first_skipped = nullptr;
  for (const SourceState& source : state_.sources)
    for (const FileState& file : source.files) {
      (file.format == name_of(TokenFormat::text) ? text : ids) = &file;
      ++files;
      if (file.samples > 0) continue;
      ++skipped;
      skipped_tokens += file.tokens;
      if (!first_skipped) first_skipped = &file;
    }
  if (text && ids && vocab_size_ > 256)
    fail(ExitCode::data, "'", text->path, "' is text (its tokens are bytes) and '", ids->path,
         "' holds token ids of a vocabulary of ", vocab_size_,
         "; train on one kind, or encode the text with the shards' tokenizer first");
  byte_tokens_ = ids == nullptr;

  if (skipped > 0)
    warnings_.push_back(cat("skipped ", skipped, " of ", files, " files (", skipped_tokens,
                            " tokens) that have fewer than ", seq_len() + 1,
                            " tokens, one sample of --seq-len ", seq_len(), "; the first is '",
                            first_skipped->path, "' with ", first_skipped->tokens));
  if (without_end_ > 0)
    warnings_.push_back(cat("--document-mask: no end-of-text token was found in the parts looked at of ",
                            without_end_, " of ", files, " files, the first is '", first_without_end_,
                            "'; where there is none, attention stops nowhere"));
  for (const SourceState& source : state_.sources)
    if (source.samples == 0)
      fail(ExitCode::data, "'", source.name, "' has no file of at least ", seq_len() + 1,
           " tokens, which one sample of --seq-len ", seq_len(), " needs; it has ", source.tokens,
           " tokens in ", source.files.size(), source.files.size() == 1 ? " file" : " files",
           ": give more data or a smaller --seq-len");
  if (samples_ < options.min_samples)
    fail(ExitCode::data, "the data are shorter than one global batch: at least ",
         options.min_samples * seq_len() + 1, " tokens are needed (", options.min_samples, " sequences of ",
         seq_len(), "), found ", tokens_, " tokens that make ", samples_,
         " sequences; give more data, or a smaller --global-batch or --seq-len");
  std::vector<double> weights;
  for (const SourceState& source : state_.sources) weights.push_back(source.weight);
  mixture_ = Mixture(weights);
}

std::vector<double> Dataset::epochs(int64_t samples) const {
  std::vector<double> result;
  for (size_t s = 0; s < sources_.size(); ++s)
    result.push_back(
        static_cast<double>(mixture_.count(static_cast<int>(s), static_cast<uint64_t>(samples))) /
        static_cast<double>(sources_[s].samples()));
  return result;
}

Dataset::Place Dataset::place(int64_t index) const {
  CHECK(index >= 0 && (state_.shuffled || index < samples_), "sample ", index, " of ", samples_);
  const Mixture::Share share = mixture_.at(static_cast<uint64_t>(index));
  const Source& source = sources_[static_cast<size_t>(share.source)];
  const auto size = static_cast<uint64_t>(source.samples());
  Place place;
  place.source = share.source;
  place.epoch = static_cast<int64_t>(share.index / size);
  uint64_t sample = share.index % size;
  if (state_.shuffled)
    sample = Permutation(size, state_.seed, static_cast<uint64_t>(share.source),
                         static_cast<uint64_t>(place.epoch))(sample);
  place.sample = static_cast<int64_t>(sample);
  const auto after = std::upper_bound(source.first_sample.begin(), source.first_sample.end(), place.sample);
  const auto shard = static_cast<size_t>(after - source.first_sample.begin()) - 1;
  place.shard = &source.shards[shard];
  place.first_token = (place.sample - source.first_sample[shard]) * seq_len();
  return place;
}

void Dataset::read(int64_t index, int32_t* tokens) const {
  const Place at = place(index);
  at.shard->read(at.first_token, seq_len() + 1, tokens);
  // As unsigned, so that an id above 2^31 - 1, negative here, is caught too. The check costs nothing beside the read.
  uint32_t largest = 0;
  for (int64_t i = 0; i <= seq_len(); ++i) largest = std::max(largest, static_cast<uint32_t>(tokens[i]));
  if (static_cast<int64_t>(largest) < vocab_size_) return;
  const auto bad = at.shard->find_bad_token(at.first_token, seq_len() + 1, vocab_size_);
  CHECK(bad.has_value(), "token ", largest, " of '", at.shard->name(), "' was read but is not there");
  fail(ExitCode::data, "'", at.shard->name(), "' has token id ", bad->id, " at token ", bad->position,
       ", but the vocabulary has ", vocab_size_,
       " ids; the shard is damaged or was made for another tokenizer");
}

void Dataset::find_documents(int64_t index, const int32_t* tokens, int32_t* start, int32_t* end) const {
  const Place at = place(index);
  at.shard->find_documents(at.first_token, seq_len(), tokens, start, end);
}

void Dataset::will_need(int64_t index) const {
  const Place at = place(index);
  at.shard->will_need(at.first_token, seq_len() + 1);
}

}  // namespace kinoe
