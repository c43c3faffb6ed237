// The losses of a run read back from metrics.jsonl, and as a line of blocks.
#include <algorithm>
#include <array>
#include <cmath>
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

std::string sparkline(const std::vector<LossPoint>& points, int width) {
  constexpr std::array<const char*, 8> kBlocks = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  std::vector<double> values;
  for (const LossPoint& point : points)
    if (std::isfinite(point.loss)) values.push_back(point.loss);
  if (values.empty() || width <= 0) return "";

  const size_t columns = std::min(values.size(), static_cast<size_t>(width));
  std::vector<double> means;
  for (size_t c = 0; c < columns; ++c) {
    const size_t begin = c * values.size() / columns, end = (c + 1) * values.size() / columns;
    double sum = 0;
    for (size_t i = begin; i < end; ++i) sum += values[i];
    means.push_back(sum / static_cast<double>(end - begin));
  }
  const auto [low, high] = std::minmax_element(means.begin(), means.end());
  std::string line;
  for (const double mean : means) {
    const double share = *high > *low ? (mean - *low) / (*high - *low) : 0;
    line += kBlocks[static_cast<size_t>(std::lround(share * (kBlocks.size() - 1)))];
  }
  return line;
}

}  // namespace kinoe
