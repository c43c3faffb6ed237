// The JSON of gemm.json. Reading forgives everything: the file only saves measurements.
#include "trainer/gemm_choices.h"

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

}  // namespace

std::string gemm_cache_path() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0')
    return join_path(cache, "kinoe/gemm.json");
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0')
    return join_path(home, ".cache/kinoe/gemm.json");
  return "";
}

std::vector<GemmChoice> read_gemm_choices(Files& files, const std::string& path, const std::string& key) {
  std::vector<GemmChoice> choices;
  const Json json = load(files, path);
  const auto of_key = json.find(key);
  if (of_key == json.end() || !of_key->is_object()) return choices;
  for (const auto& [shape, value] : of_key->items()) {
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

void write_gemm_choices(Files& files, const std::string& path, const std::string& key,
                        const std::vector<GemmChoice>& choices) {
  make_directories(files, parent_directory(path));
  Json json = load(files, path);
  Json& of_key = json[key];
  if (!of_key.is_object()) of_key = Json::object();
  for (const GemmChoice& choice : choices)
    of_key[choice.shape] = {{"algorithm", choice.algorithm}, {"us", choice.us}, {"tflops", choice.tflops}};
  write_file_durably(files, path, json.dump(1) + "\n");
}

}  // namespace kinoe
