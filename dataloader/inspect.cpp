// What `inspect` prints of a data file, read as training would read it.
#include "dataloader/inspect.h"

#include <algorithm>
#include <numeric>

#include "dataloader/fingerprint.h"
#include "kernels/common/check.h"

namespace kinoe {
namespace {

constexpr int64_t kLook = int64_t{1} << 24;  // tokens looked at without --full
constexpr int64_t kWindows = 256;
constexpr int64_t kShownIds = 64, kShownBytes = 512;
constexpr int64_t kBlock = int64_t{1} << 16;

void look_at(const Shard& shard, int64_t first, int64_t count, Histogram& histogram) {
  std::vector<int32_t> ids;
  for (int64_t at = first; at < first + count; at += kBlock) {
    ids.resize(static_cast<size_t>(std::min(kBlock, first + count - at)));
    shard.read(at, static_cast<int64_t>(ids.size()), ids.data());
    histogram.add(ids);
  }
}

std::string hash_of_file(const std::string& path) {
  const MappedFile file(path);
  const MappedRead guard(file);
  file.advise_sequential(true);
  ContentHash hash;
  for (int64_t at = 0; at < file.bytes(); at += int64_t{1} << 24)
    hash.add(file.data() + at, std::min(int64_t{1} << 24, file.bytes() - at));
  return hash.hex();
}

void compare_with_manifest(DataReport& report, const Manifest& manifest, bool full) {
  const Manifest::File& expected = manifest.files.at(file_name(report.path));
  const auto differ = [&](const char* what, const auto& found, const auto& said) {
    if (found != said)
      report.problems.push_back(
          cat("'", report.path, "' has ", what, " ", found, ", '", manifest.path, "' says ", said));
  };
  differ("size in bytes", report.bytes, expected.bytes);
  differ("number of tokens", report.tokens, expected.tokens);
  if (!full) return;
  if (report.documents >= 0) differ("number of documents", report.documents, expected.documents);
  differ("hash", hash_of_file(report.path), expected.hash);
  report.hash_compared = true;
}

}  // namespace

void Histogram::add(const std::vector<int32_t>& ids) {
  total_ += static_cast<int64_t>(ids.size());
  for (const int32_t id : ids) {
    if (id < 0 || id >= kTable) {
      ++beyond_;
      continue;
    }
    const auto i = static_cast<size_t>(id);
    if (i >= counts_.size()) counts_.resize(std::max(i + 1, std::min<size_t>(2 * counts_.size(), kTable)));
    ++counts_[i];
  }
}

void Histogram::add(const Histogram& other) {
  counts_.resize(std::max(counts_.size(), other.counts_.size()));
  for (size_t i = 0; i < other.counts_.size(); ++i) counts_[i] += other.counts_[i];
  total_ += other.total_;
  beyond_ += other.beyond_;
}

int64_t Histogram::count(int64_t id) const {
  return id >= 0 && id < static_cast<int64_t>(counts_.size()) ? counts_[static_cast<size_t>(id)] : 0;
}

int64_t Histogram::different() const {
  return std::count_if(counts_.begin(), counts_.end(), [](int64_t n) { return n > 0; });
}

int64_t Histogram::lowest() const {
  const auto found = std::find_if(counts_.begin(), counts_.end(), [](int64_t n) { return n > 0; });
  return found == counts_.end() ? -1 : found - counts_.begin();
}

int64_t Histogram::highest() const {
  const auto found = std::find_if(counts_.rbegin(), counts_.rend(), [](int64_t n) { return n > 0; });
  return counts_.rend() - found - 1;
}

int64_t Histogram::at_least(int64_t id) const {
  const auto first = std::min(static_cast<size_t>(id), counts_.size());
  return beyond_ +
         std::accumulate(counts_.begin() + static_cast<std::ptrdiff_t>(first), counts_.end(), int64_t{0});
}

std::vector<std::pair<int64_t, int64_t>> Histogram::most_frequent(size_t n) const {
  std::vector<std::pair<int64_t, int64_t>> all;
  for (size_t i = 0; i < counts_.size(); ++i)
    if (counts_[i] > 0) all.emplace_back(static_cast<int64_t>(i), counts_[i]);
  const auto more = [](const auto& a, const auto& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  };
  const size_t kept = std::min(n, all.size());
  std::partial_sort(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(kept), all.end(), more);
  all.resize(kept);
  return all;
}

DataReport inspect_data(const std::string& file, const InspectOptions& options) {
  const Shard shard = Shard::open(file);
  DataReport report;
  report.path = file;
  report.format = shard.format();
  report.bytes = shard.file_bytes();
  report.tokens = shard.tokens();
  report.warnings = shard.warnings();
  report.fingerprint = shard.fingerprint();
  Manifests manifests;
  if (const Manifest* manifest = manifests.of(file)) report.manifest = *manifest;
  if (report.manifest) report.end_token = report.manifest->end_token;
  report.vocab = options.vocab > 0 ? options.vocab : report.manifest ? report.manifest->vocab_size : 0;

  if (options.offset >= 0) {
    if (options.offset >= shard.tokens())
      fail(ExitCode::usage, "--offset ", options.offset, ": '", file, "' has ", shard.tokens(),
           " tokens, the last is ", shard.tokens() - 1);
    report.shown.resize(static_cast<size_t>(std::min(
        shard.format() == TokenFormat::text ? kShownBytes : kShownIds, shard.tokens() - options.offset)));
    shard.read(options.offset, static_cast<int64_t>(report.shown.size()), report.shown.data());
  }

  if (options.full || shard.tokens() <= kLook) {
    look_at(shard, 0, shard.tokens(), report.histogram);
  } else {
    for (int64_t w = 0; w < kWindows; ++w) {
      const int64_t length = kLook / kWindows, last = shard.tokens() - length;
      look_at(shard, last / (kWindows - 1) * w + last % (kWindows - 1) * w / (kWindows - 1), length,
              report.histogram);
    }
  }
  const bool saw_all = report.histogram.total() == shard.tokens();
  if (shard.index() != nullptr) {
    report.sequences = shard.index()->sequences();
    report.documents = shard.index()->documents();
  } else if (saw_all && report.end_token >= 0) {
    report.documents = report.histogram.count(report.end_token);
  }
  const int64_t limit = report.vocab > 0 ? report.vocab : Histogram::kTable;
  if (const int64_t outside = report.histogram.at_least(limit); outside > 0) {
    // The first of them is somewhere in what was looked at; the whole file is searched, which ends there at the latest.
    const auto first = shard.find_bad_token(0, shard.tokens(), limit);
    CHECK(first.has_value(), outside, " ids of '", file, "' were out of range and are not there");
    report.problems.push_back(cat("'", file, "' has ", outside, saw_all ? "" : " (of those looked at)",
                                  " token ids that are not below ", limit,
                                  report.vocab > 0 ? ", the vocabulary" : "", "; the first is ", first->id,
                                  " at token ", first->position));
  }
  if (report.manifest) compare_with_manifest(report, *report.manifest, options.full);
  return report;
}

}  // namespace kinoe
