// bench_kernels: how fast every operation is, and how exact, at the shapes of a training step. `make bench` runs it.
//
//   us | GB/s | % of the measured copy | TFLOP/s | % of the measured GEMM | error
//
// First the two ceilings of the device at hand are measured; shares are of them, not of a data sheet. Bytes and FLOPs are
// those of the operations' cost functions: what must move and what the mathematics asks for. Each time is the median
// over calls that begin with a cold cache (dev/bench/measure.h), on random data, between poisoned outputs, which must be
// finite in the end. The error is of a part of the result against the CPU twin in fp64 (dev/bench/reference.h).
//
// There is no column for other libraries, since none is linked that has these operations: plain products are cuBLASLt
// itself, and dev/peers/ compares whole training steps with PyTorch.
//
// Exit code: 0; 1 when a row failed (an exception, a number that is not finite, an error above the bound); 2 for options.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include "dev/bench/cases.h"
#include "dev/bench/measure.h"
#include "dev/bench/report.h"
#include "dev/bench/workspace.h"
#include "trainer/config.h"

namespace kinoe::bench {
namespace {

/// Far above what rounding to the outputs' types gives, far below what a wrong kernel gives.
double error_bound(const Workspace& work) { return work.has_output_of(DType::bf16) ? 3e-2 : 1e-3; }

struct Options {
  std::string filter, csv, json;
  std::string device = "auto";
  int repeat = 15;
  bool list = false, all = false;
};

void declare(CLI::App& app, Options& o) {
  app.add_option("--filter", o.filter, "only rows whose \"operation shape\" this regular expression finds")
      ->type_name("REGEX");
  app.add_option("--device", o.device, "auto (a GPU if there is one), cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->type_name("DEVICE");
  app.add_option("--repeat", o.repeat, "timed calls of each row (15)")
      ->check(CLI::Range(1, 10000))
      ->type_name("N");
  app.add_flag("--all", o.all, "on a GPU, also the other training shapes of test/op_cases.h");
  app.add_option("--csv", o.csv, "write the rows there as CSV")->type_name("FILE");
  app.add_option("--json", o.json, "write the rows there as JSON, with what is needed to repeat them")
      ->type_name("FILE");
  app.add_flag("--list", o.list, "print the names of the rows and measure nothing");
}

Cases chosen_cases(const Options& o, Backend backend) {
  Cases cases = model_cases(backend);
  if (o.all) {
    if (backend == Backend::cpu)
      fail(ExitCode::usage,
           "--all: the other training shapes are too large for a CPU; use it where there is a GPU");
    add_listed_cases(cases);
  }
  if (o.filter.empty()) return cases;
  Cases chosen;
  try {
    const std::regex wanted(o.filter);
    for (const Case& c : cases)
      if (std::regex_search(c.name(), wanted)) chosen.push_back(c);
  } catch (const std::regex_error& error) {
    fail(ExitCode::usage, "--filter '", o.filter, "' is not a regular expression: ", error.what());
  }
  if (chosen.empty())
    fail(ExitCode::usage, "--filter '", o.filter, "' finds none of the ", cases.size(), " rows; see --list");
  return chosen;
}

/// Opened before anything is measured: a wrong path should not cost minutes.
std::ofstream open_output(const std::string& path, const char* option) {
  std::ofstream file;
  if (path.empty()) return file;
  file.open(path, std::ios::trunc);
  if (!file)
    fail(ExitCode::usage, option, " ", path, ": the file cannot be written; check the folder and its rights");
  return file;
}

void write_output(std::ofstream& file, const std::string& path, const std::string& text) {
  if (path.empty()) return;
  file << text << std::flush;
  if (!file) fail(ExitCode::usage, path, ": writing failed; is the disk full?");
}

Row measure(const Case& c, Workspace& work, Timer& timer) {
  Row row;
  row.operation = c.operation;
  row.where = c.where();
  row.cost = c.cost;
  try {
    const Prepared prepared = c.prepare(work);
    row.error = prepared.error();
    row.us = timer.median_us(prepared.run, prepared.restore);
    row.bytes = work.bytes();
    row.in_cache = row.bytes <= cache_bytes(work.context().backend);
    if (!(row.error <= error_bound(work)))
      row.problem = "the result is not that of the CPU";
    else if (!work.outputs_are_finite())
      row.problem = "an output is not finite";
    work.clear();
  } catch (const Error& error) {
    // After a fault of the GPU nothing that follows could be believed.
    if (error.code == ExitCode::gpu) throw;
    row.problem = error.what();
    work.clear();
  }
  return row;
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app("Times every operation at the shapes of a training step and compares it with the CPU.",
               "bench_kernels");
  declare(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    fail(ExitCode::usage, error.what(), "; see --help");
  }

  const DeviceDecision decision = choose_device(options.device == "cpu"    ? DeviceChoice::cpu
                                                : options.device == "cuda" ? DeviceChoice::cuda
                                                                           : DeviceChoice::automatic,
                                                find_gpus());
  const Cases cases = chosen_cases(options, decision.backend);
  if (options.list) {
    for (const Case& c : cases) std::printf("%s\n", c.name().c_str());
    return 0;
  }
  std::ofstream csv = open_output(options.csv, "--csv"), json = open_output(options.json, "--json");
  if (!decision.note.empty()) std::printf("%s\n", decision.note.c_str());

  const std::unique_ptr<Device> device = Device::open(decision.backend);
  Workspace work(device->context());
  Timer timer(device->context(), options.repeat);
  Subject subject;
  subject.backend = decision.backend;
  subject.repeat = options.repeat;
  subject.run = make_run_record(argc, argv);
  subject.run.device = device->info().name;
  subject.run.driver = device->info().driver;
  subject.ceilings = measure_ceilings(work, timer);

  print_header(subject);
  std::vector<Row> rows;
  bool failed = false;
  for (const Case& c : cases) {
    rows.push_back(measure(c, work, timer));
    print_row(rows.back(), subject.ceilings);
    failed = failed || !rows.back().problem.empty();
  }
  print_footer(rows);
  write_output(csv, options.csv, to_csv(rows, subject.ceilings));
  write_output(json, options.json, to_json(rows, subject));
  return failed ? static_cast<int>(ExitCode::internal) : 0;
}

}  // namespace
}  // namespace kinoe::bench

int main(int argc, char** argv) {
  try {
    return kinoe::bench::run(argc, argv);
  } catch (const kinoe::Error& error) {
    std::fprintf(stderr, "bench_kernels: error: %s\n", error.what());
    return static_cast<int>(error.code);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_kernels: internal error: %s\n", error.what());
    return static_cast<int>(kinoe::ExitCode::internal);
  }
}
