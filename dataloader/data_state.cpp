// The record of the data as JSON, and two records compared: contents and order count, names do not.
#include "dataloader/data_state.h"

#include <nlohmann/json.hpp>

#include "kernels/common/check.h"
#include "kernels/common/json_reader.h"

namespace kinoe {
namespace {

using Json = nlohmann::json;

using Reader = JsonReader<Json>;

FileState file_from(const Json& json, const std::string& where) {
  Reader in(json, where);
  FileState file;
  file.path = in.text("path");
  file.format = in.text("format");
  file.bytes = in.count("bytes");
  file.tokens = in.count("tokens");
  file.samples = in.count("samples");
  file.fingerprint = in.text("fingerprint");
  in.finish();
  return file;
}

SourceState source_from(const Json& json, const std::string& where) {
  Reader in(json, where);
  SourceState source;
  source.name = in.text("name");
  source.weight = in.weight("weight");
  source.tokens = in.count("tokens");
  source.samples = in.count("samples");
  const Json& files = in.list("files");
  for (size_t i = 0; i < files.size(); ++i)
    source.files.push_back(file_from(files[i], cat(in.path("files"), "[", i, "]")));
  in.finish();
  return source;
}

/// Collects "what: 1 in the checkpoint, 2 here".
struct Changes {
  std::string before_is, now_is;
  std::vector<std::string> lines;

  template <class T>
  bool compare(const std::string& what, const T& before, const T& now) {
    if (before == now) return false;
    lines.push_back(cat(what, ": ", before, " ", before_is, ", ", now, " ", now_is));
    return true;
  }
};

}  // namespace

std::string to_json(const DataState& state) {
  Json sources = Json::array();
  for (const SourceState& source : state.sources) {
    Json files = Json::array();
    for (const FileState& file : source.files)
      files.push_back({{"path", file.path},
                       {"format", file.format},
                       {"bytes", static_cast<uint64_t>(file.bytes)},
                       {"tokens", static_cast<uint64_t>(file.tokens)},
                       {"samples", static_cast<uint64_t>(file.samples)},
                       {"fingerprint", file.fingerprint}});
    sources.push_back({{"name", source.name},
                       {"weight", source.weight},
                       {"tokens", static_cast<uint64_t>(source.tokens)},
                       {"samples", static_cast<uint64_t>(source.samples)},
                       {"files", std::move(files)}});
  }
  const Json json = {{"seed", state.seed},           {"seq_len", static_cast<uint64_t>(state.seq_len)},
                     {"shuffled", state.shuffled},   {"document_mask", state.document_mask},
                     {"tokenizer", state.tokenizer}, {"sources", std::move(sources)}};
  // Paths are bytes, not always UTF-8; what is not becomes U+FFFD, and paths are compared by nobody.
  return json.dump(1, ' ', false, Json::error_handler_t::replace);
}

DataState data_state_from_json(const std::string& text, const std::string& where) {
  const Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) fail(ExitCode::checkpoint, where, " is no JSON; the file is damaged");
  Reader in(json, where);
  DataState state;
  state.seed = in.natural("seed");
  state.seq_len = in.count("seq_len");
  state.shuffled = in.boolean("shuffled");
  state.document_mask = in.boolean("document_mask");
  state.tokenizer = in.text("tokenizer");
  const Json& sources = in.list("sources");
  for (size_t i = 0; i < sources.size(); ++i)
    state.sources.push_back(source_from(sources[i], cat(in.path("sources"), "[", i, "]")));
  in.finish();
  return state;
}

std::vector<std::string> describe_change(const DataState& before, const DataState& now,
                                         const std::string& before_is, const std::string& now_is) {
  Changes changes{before_is, now_is, {}};
  const auto on_off = [](bool on) { return std::string(on ? "on" : "off"); };
  changes.compare("seed of the data order", before.seed, now.seed);
  changes.compare("tokens of a sample (--seq-len)", before.seq_len, now.seq_len);
  changes.compare("shuffling", on_off(before.shuffled), on_off(now.shuffled));
  changes.compare("--document-mask", on_off(before.document_mask), on_off(now.document_mask));
  changes.compare("tokenizer of the data", before.tokenizer, now.tokenizer);
  if (changes.compare("sources", before.sources.size(), now.sources.size())) return changes.lines;
  for (size_t s = 0; s < now.sources.size(); ++s) {
    const SourceState &a = before.sources[s], &b = now.sources[s];
    // Weights of the same ratios may still round to another order.
    changes.compare("weight of " + b.name, a.weight, b.weight);
    if (changes.compare("files of " + b.name, a.files.size(), b.files.size())) continue;
    for (size_t f = 0; f < b.files.size(); ++f) {
      const FileState &x = a.files[f], &y = b.files[f];
      const std::string name = x.path == y.path ? y.path : y.path + " (was " + x.path + ")";
      // A line for each is enough: other bytes have another fingerprint.
      if (x.format != y.format)
        changes.compare(name + ": format", x.format, y.format);
      else if (x.bytes != y.bytes)
        changes.compare(name + ": bytes", x.bytes, y.bytes);
      else if (x.tokens != y.tokens)
        changes.compare(name + ": tokens", x.tokens, y.tokens);
      else
        changes.compare(name + ": contents (fingerprint)", x.fingerprint, y.fingerprint);
    }
  }
  return changes.lines;
}

void check_tokenizer(const DataState& data, const std::string& model_tokenizer,
                     const std::string& directory) {
  if (data.tokenizer.empty() || model_tokenizer.empty() || data.tokenizer == model_tokenizer) return;
  fail(ExitCode::data, "the data were made with the tokenizer ", data.tokenizer,
       " (their manifest.json), but '", directory, "' has the tokenizer ", model_tokenizer,
       ": the same id means another token there; use data of that tokenizer, or, to teach the model another "
       "one, give "
       "the data's own with --tokenizer DIR");
}

}  // namespace kinoe
