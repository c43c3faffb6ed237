// One option of the command line, and the tables of all of them: name, help, how to read it, how to write it.
//
// To add an option: a field in config.h and one row of a table in config_options.cpp; parsing, --help, TOML in both
// directions and the suggestions for mistyped names follow.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "trainer/config.h"

namespace kinoe {

enum class Arity : uint8_t { flag, one, many };

template <class Config>
struct Option {
  std::string name;  // without "--"; "" for a positional argument
  std::string group;
  std::string metavar;
  std::string help;
  Arity arity = Arity::one;
  /// `what` names the option in messages: "--lr", or "run.toml line 3: lr".
  std::function<void(Config&, const std::vector<std::string>& values, const std::string& what)> read;
  /// The TOML value; "" leaves the option out.
  std::function<std::string(const Config&)> write;
  /// Another option that says the same in another unit, and how to take its value back.
  std::string excludes = {};
  std::function<void(Config&)> clear_other = {};
};

std::vector<Option<RunConfig>> run_options();
std::vector<Option<SampleConfig>> sample_options();
std::vector<Option<EvalConfig>> eval_options();
std::vector<Option<InspectConfig>> inspect_options();

}  // namespace kinoe
