// The JSON of gemm.json. Reading forgives everything: the file only saves measurements.
#include "trainer/gemm_choices.h"

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

namespace kinoe {
namespace {

using Json = nlohmann::ordered_json;

/// The file's object; an empty one if there is none or it cannot be read as JSON.
Json load(Files& files, const std::string& path) {
  if (files.kind(path) != Files::Kind::file) return Json::object();
  Json json = Json::parse(read_file(files, path), nullptr, false);
  return json.is_object() ? json : Json::object();
}

std::vector<GemmChoice> choices_in(const Json& object) {
  std::vector<GemmChoice> choices;
  for (const auto& [shape, value] : object.items()) {
    if (!value.is_object() || !value.contains("algorithm") || !value["algorithm"].is_string()) continue;
    GemmChoice choice;
    choice.shape = shape;
    choice.algorithm = value["algorithm"].get<std::string>();
    if (value.contains("us") && value["us"].is_number()) choice.us = value["us"].get<double>();
    if (value.contains("tflops") && value["tflops"].is_number())
      choice.tflops = value["tflops"].get<double>();
    choices.push_back(std::move(choice));
  }
  return choices;
}

void put(Json& object, const std::vector<GemmChoice>& choices) {
  for (const GemmChoice& choice : choices)
    object[choice.shape] = {{"algorithm", choice.algorithm}, {"us", choice.us}, {"tflops", choice.tflops}};
}

}  // namespace

std::string gemm_cache_path() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0')
    return join_path(cache, "kinoe/gemm.json");
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0')
    return join_path(home, ".cache/kinoe/gemm.json");
  return "";
}

std::vector<GemmChoice> read_gemm_choices(Files& files, const std::string& path, const std::string& key) {
  const Json json = load(files, path);
  const auto of_key = json.find(key);
  if (of_key == json.end() || !of_key->is_object()) return {};
  return choices_in(*of_key);
}

void write_gemm_choices(Files& files, const std::string& path, const std::string& key,
                        const std::vector<GemmChoice>& choices) {
  make_directories(files, parent_directory(path));
  Json json = load(files, path);
  Json& of_key = json[key];
  if (!of_key.is_object()) of_key = Json::object();
  put(of_key, choices);
  write_file_durably(files, path, json.dump(1) + "\n");
}

std::string to_text(const std::vector<GemmChoice>& choices) {
  Json object = Json::object();
  put(object, choices);
  return object.dump();
}

std::vector<GemmChoice> gemm_choices_from_text(const std::string& text) {
  return choices_in(Json::parse(text));
}

GemmRecord::GemmRecord(Files& files, Device& device, std::string run, const std::string& checkpoint)
    : files_(files), device_(device), run_(std::move(run)) {
  if (device.gemm_key().empty()) return;
  std::vector<GemmChoice> known;
  if (!checkpoint.empty())
    known = read_gemm_choices(files, join_path(checkpoint, "trainer/gemm.json"), device.gemm_key());
  if (!gemm_cache_path().empty())
    for (const GemmChoice& cached : read_gemm_choices(files, gemm_cache_path(), device.gemm_key()))
      if (std::none_of(known.begin(), known.end(),
                       [&](const GemmChoice& k) { return k.shape == cached.shape; }))
        known.push_back(cached);
  device.pin_gemm_choices(known);
}

void GemmRecord::save() {
  const std::vector<GemmChoice> choices = device_.gemm_choices();
  if (choices.size() == saved_) return;
  saved_ = choices.size();
  write_gemm_choices(files_, join_path(run_, "gemm.json"), device_.gemm_key(), choices);
  try {
    if (!gemm_cache_path().empty())
      write_gemm_choices(files_, gemm_cache_path(), device_.gemm_key(), choices);
  } catch (const FileError& error) {
    std::fprintf(stderr, "train_gpt: warning: the cache of matrix-product algorithms was not written: %s\n",
                 error.what());
  }
}

void GemmRecord::print(std::FILE* out) const {
  if (device_.gemm_key().empty()) {
    std::fprintf(out, "matrix products: on a CPU there is one algorithm, nothing is chosen\n");
    return;
  }
  std::fprintf(out, "matrix products, column-major m x n x k, as measured when chosen\n");
  for (const GemmChoice& choice : device_.gemm_choices())
    std::fprintf(out, "  %-64s %9.1f us %7.1f TFLOP/s\n", choice.shape.c_str(), choice.us, choice.tflops);
}

}  // namespace kinoe
