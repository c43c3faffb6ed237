// The losses of a run read back from metrics.jsonl.
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "trainer/monitor.h"

namespace kinoe {

LossHistory read_loss_history(const std::string& metrics_path) {
  std::ifstream in(metrics_path);
  if (!in) fail(ExitCode::usage, metrics_path, ": cannot be read; give the metrics.jsonl of a run");
  std::map<int64_t, double> train, validation;
  for (std::string text; std::getline(in, text);) {
    const nlohmann::json line = nlohmann::json::parse(text, nullptr, false);
    if (!line.is_object() || !line.contains("step") || !line["step"].is_number_integer()) continue;
    const int64_t step = line["step"].get<int64_t>();
    for (const auto& [key, losses] : {std::pair("loss", &train), std::pair("val_loss", &validation)}) {
      if (!line.contains(key)) continue;
      if (line[key].is_number())
        (*losses)[step] = line[key].get<double>();
      else
        losses->erase(step);  // null: this step, as last written, has no loss
    }
  }
  LossHistory history;
  for (const auto& [step, loss] : train) history.train.push_back({step, loss});
  for (const auto& [step, loss] : validation) history.validation.push_back({step, loss});
  return history;
}

int64_t cut_metrics(const std::string& metrics_path, int64_t last_step) {
  std::ifstream in(metrics_path);
  if (!in) return 0;
  std::streamoff keep = 0, at = 0;
  int64_t cut = 0;
  for (std::string text; std::getline(in, text);) {
    at += static_cast<std::streamoff>(text.size()) + 1;
    const nlohmann::json line = nlohmann::json::parse(text, nullptr, false);
    const bool later = line.is_object() && line.contains("step") && line["step"].is_number_integer() &&
                       line["step"].get<int64_t>() > last_step;
    if (later)
      ++cut;
    else if (cut == 0)
      keep = at;
  }
  in.close();
  if (cut == 0) return 0;
  std::error_code error;
  std::filesystem::resize_file(metrics_path, static_cast<std::uintmax_t>(keep), error);
  if (error)
    fail(ExitCode::usage, metrics_path, ": records of later steps could not be cut off: ", error.message());
  return cut;
}

}  // namespace kinoe
