// The benchmark's output: a table for people, CSV and JSON for programs, all from the same rows.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "dev/bench/measure.h"
#include "kernels/common/cost.h"
#include "trainer/monitor.h"

namespace kinoe::bench {

struct Row {
  std::string operation, where;
  Cost cost;
  double us = 0;
  double error = 0;       // relative L2 of a part of the result; see reference.h
  size_t bytes = 0;       // of all tensors of the call
  bool in_cache = false;  // they stay there between calls: shares of the copy mean nothing
  std::string problem;    // empty, or why the row counts as failed
};

/// What the table is about: the machine, and what is needed to repeat it.
struct Subject {
  Backend backend = Backend::cpu;
  RunRecord run;  // command, commit, date, compiler, device
  int repeat = 0;
  Ceilings ceilings;
};

void print_header(const Subject& subject);
void print_row(const Row& row, const Ceilings& ceilings);
void print_footer(const std::vector<Row>& rows);

std::string to_csv(const std::vector<Row>& rows, const Ceilings& ceilings);
std::string to_json(const std::vector<Row>& rows, const Subject& subject);

}  // namespace kinoe::bench
