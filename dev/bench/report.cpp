// See report.h.
#include "dev/bench/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace kinoe::bench {
namespace {

/// The figures of a row; 0 where the operation moves or computes nothing that its cost function counts.
struct Figures {
  double gb_per_s, percent_of_copy, tflop_per_s, percent_of_gemm;
};

Figures figures_of(const Row& row, const Ceilings& c) {
  if (row.us <= 0) return {};
  const double gb_per_s = row.cost.bytes / row.us * 1e-3, tflop_per_s = row.cost.flops / row.us * 1e-6;
  return {gb_per_s, gb_per_s / c.copy_gb_per_s * 100, tflop_per_s, tflop_per_s / c.gemm_tflop_per_s * 100};
}

std::string number(const char* format, double value) {
  char text[32];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

/// A dash for what the operation has none of.
std::string or_dash(const char* format, double value) { return value == 0 ? "-" : number(format, value); }

/// Quoted where a comma, a quote or a line's end would break the line.
std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + '"';
}

}  // namespace

void print_header(const Subject& s) {
  std::printf("%s, commit %s, %s\n", s.run.device.c_str(), s.run.commit.c_str(), s.run.started.c_str());
  std::printf("copy %.1f GB/s read and written (%s), GEMM %.3g TFLOP/s (%s); medians of %d, cold cache\n\n",
              s.ceilings.copy_gb_per_s, s.ceilings.copy_what.c_str(), s.ceilings.gemm_tflop_per_s,
              s.ceilings.gemm_what.c_str(), s.repeat);
  std::printf("%-18s  %-51s %10s %8s %6s %8s %6s  %8s\n", "operation", "shape", "us", "GB/s", "% copy",
              "TFLOP/s", "% GEMM", "error");
  std::fflush(stdout);
}

void print_row(const Row& row, const Ceilings& ceilings) {
  std::printf("%-18s  %-51s ", row.operation.c_str(), row.where.c_str());
  if (row.us > 0) {
    const Figures f = figures_of(row, ceilings);
    std::printf("%10.1f %8s %6s%s %7s %6s  %8s", row.us, or_dash("%.1f", f.gb_per_s).c_str(),
                or_dash("%.1f", f.percent_of_copy).c_str(), row.in_cache ? "*" : " ",
                or_dash("%.3g", f.tflop_per_s).c_str(), or_dash("%.1f", f.percent_of_gemm).c_str(),
                number("%.1e", row.error).c_str());
  }
  std::printf("%s%s\n", row.problem.empty() ? "" : "  FAILED: ", row.problem.c_str());
  std::fflush(stdout);
}

void print_footer(const std::vector<Row>& rows) {
  std::printf("\n");
  if (std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.in_cache; }))
    std::printf("* all tensors together fit in the cache: the share of the copy means nothing\n");
  const auto failed =
      std::count_if(rows.begin(), rows.end(), [](const Row& row) { return !row.problem.empty(); });
  std::printf("%zu rows, %ld failed\n", rows.size(), static_cast<long>(failed));
}

std::string to_csv(const std::vector<Row>& rows, const Ceilings& ceilings) {
  std::string csv =
      "operation,shape,us,gb_per_s,percent_of_copy,tflop_per_s,percent_of_gemm,error,cost_bytes,cost_flops,"
      "tensor_bytes,in_cache,problem\n";
  for (const Row& row : rows) {
    const Figures f = figures_of(row, ceilings);
    csv += csv_field(row.operation) + ',' + csv_field(row.where);
    for (const double value : {row.us, f.gb_per_s, f.percent_of_copy, f.tflop_per_s, f.percent_of_gemm,
                               row.error, row.cost.bytes, row.cost.flops, static_cast<double>(row.bytes)})
      csv += ',' + number("%.10g", value);
    csv += cat(',', row.in_cache ? 1 : 0, ',', csv_field(row.problem), '\n');
  }
  return csv;
}

std::string to_json(const std::vector<Row>& rows, const Subject& subject) {
  nlohmann::ordered_json json;
  json["run"] = nlohmann::ordered_json::parse(to_json(subject.run));
  json["backend"] = subject.backend == Backend::cuda ? "cuda" : "cpu";
  json["repeat"] = subject.repeat;
  const Ceilings& c = subject.ceilings;
  json["copy"] = {{"what", c.copy_what}, {"gb_per_s", c.copy_gb_per_s}};
  json["gemm"] = {{"what", c.gemm_what}, {"tflop_per_s", c.gemm_tflop_per_s}};
  json["rows"] = nlohmann::ordered_json::array();
  for (const Row& row : rows) {
    const Figures f = figures_of(row, c);
    json["rows"].push_back({{"operation", row.operation},
                            {"shape", row.where},
                            {"us", row.us},
                            {"gb_per_s", f.gb_per_s},
                            {"percent_of_copy", f.percent_of_copy},
                            {"tflop_per_s", f.tflop_per_s},
                            {"percent_of_gemm", f.percent_of_gemm},
                            {"error", row.error},
                            {"cost_bytes", row.cost.bytes},
                            {"cost_flops", row.cost.flops},
                            {"tensor_bytes", row.bytes},
                            {"in_cache", row.in_cache},
                            {"problem", row.problem}});
  }
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace kinoe::bench
