// What the tests of the monitor share: a step as it might be recorded, and files read back.
#pragma once

#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "trainer/monitor.h"

namespace kinoe {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline StepRecord example(int64_t step = 10) {
  StepRecord r;
  r.step = step;
  r.samples = 256 * step;
  r.tokens = 524288 * step;
  r.loss = 10.9823456;
  r.grad_norm = 1.25;
  r.lr = 4.6875e-8;
  r.global_batch = 256;
  r.seq_len = 2048;
  r.step_ms = 4117.04;
  r.compute_ms = 4000.5;
  r.data_wait_ms = 0.25;
  r.comm_wait_ms = 100;
  r.tokens_per_s = 127345.5;
  r.tokens_per_s_per_gpu = 7903.25;
  r.tflops_per_gpu = 391.94;
  r.mfu = 0.3963;
  r.mem_bytes = int64_t{70} << 30;
  r.mem_peak_bytes = int64_t{75} << 30;
  r.weights_hash = 0x00FEDCBA98765432ULL;
  return r;
}

inline std::string contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

}  // namespace kinoe
