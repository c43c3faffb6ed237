// The losses of a run read back from metrics.jsonl.
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

}  // namespace kinoe
