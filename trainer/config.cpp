// Command line and TOML file into a configuration. CLI11 splits the arguments; the table of options gives them meaning.

#include "trainer/config.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "kernels/common/nearest.h"
#include "kernels/common/untrusted.h"
#include "trainer/config_options.h"
#include "trainer/config_toml.h"

namespace kinoe {
namespace {

using Strings = std::vector<std::string>;

/// Applies what one source (the command line, a file) gave. A later source replaces values of an earlier one, also
/// where it says the same in another unit.
template <class C>
void apply(const std::vector<Option<C>>& table, const std::vector<GivenOption>& given, C& config) {
  for (const GivenOption& g : given) {
    const auto option = std::find_if(table.begin(), table.end(), [&](const Option<C>& o) {
      return o.name == g.name && (!o.name.empty() || o.metavar == g.what);  // positional ones have no name
    });
    for (const GivenOption& other : given)
      if (!option->excludes.empty() && other.name == option->excludes)
        fail(ExitCode::usage, g.what, " and ", other.what, " say the same thing: give one of them");
    if (option->clear_other) option->clear_other(config);
    option->read(config, g.values, g.what);
  }
}

// ---- TOML file -----------------------------------------------------------------------------------------------------

template <class C>
std::vector<GivenOption> given_in_toml(const std::vector<Option<C>>& table, const std::string& text,
                                       const std::string& source) {
  std::vector<GivenOption> given;
  for (const TomlEntry& entry : parse_toml(text, source)) {
    const std::string what = cat(source, " line ", entry.line, ": ", entry.key);
    const auto option =
        std::find_if(table.begin(), table.end(), [&](const Option<C>& o) { return o.name == entry.key; });
    if (option == table.end()) {
      Strings names;
      for (const Option<C>& o : table) names.push_back(o.name);
      fail(ExitCode::usage, source, " line ", entry.line, ": unknown option '", entry.key,
           "'; nearest known: ", nearest_name(entry.key, names));
    }
    if (entry.array && option->arity != Arity::many)
      fail(ExitCode::usage, what, ": expected one value, got an array");
    given.push_back({entry.key, entry.values, what});
  }
  return given;
}

std::string read_file(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored))
    fail(ExitCode::usage, "--config: expected a TOML file, ", path,
         std::filesystem::exists(path, ignored) ? " is none" : " does not exist");
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file) fail(ExitCode::usage, "--config: cannot read ", path, "; check its permissions");
  return text;
}

// ---- Command line --------------------------------------------------------------------------------------------------

constexpr const char* kCounts =
    "Counts (N) accept 64k, 1.5M, 600B, 600e9: k = 1e3, M = 1e6, B or G = 1e9, T = 1e12.\n";
constexpr const char* kFooter =
    "Only one of --steps and --tokens, and of --warmup-steps and --warmup-tokens, can be given.\n"
    "Values of the command line replace those of --config. The configuration a run used is in its\n"
    "run directory; --config reads it back.\n"
    "Exit codes: 0 finished, 1 a fault of this program, 2 options or configuration, 3 data,\n"
    "4 checkpoint or model directory, 5 a rank was lost, hung or never came: start again with\n"
    "--resume auto, 6 GPU, 7 a loss or gradient that is not finite, 75 stopped on request with a\n"
    "checkpoint: start the same command again with --resume auto.\n"
    "sample, eval and inspect have options of their own: train_gpt eval --help.\n"
    "Examples:\n"
    "  train_gpt                                     a tiny model on the built-in stories\n"
    "  train_gpt --data my.txt --out runs/mine       on a text\n"
    "  train_gpt --data 'shards/train*.bin' --val-data 'shards/val*.bin' --model gpt2-124m --tokens 2.5B\n"
    "  scripts/run_mpi.sh 8 --data 'shards/train*.bin' --model gpt2-1558m --tokens 30B --out runs/xl\n"
    "                                                eight ranks on this host, one per GPU\n"
    "  train_gpt sample runs/mine --prompt 'Once'    text from the result\n"
    "  train_gpt inspect 'shards/*.bin' --full       what the shards hold, and whether all of it is sound";

constexpr const char* kInspectFooter =
    "Of PATH and PATH2 the exit code is 0 where they are equal and 1 where they differ, as diff's is.\n";

constexpr size_t kHelpColumn = 36;
constexpr size_t kHelpWidth = 64;

std::string wrapped(const std::string& text) {
  std::string result, word;
  size_t column = 0;
  std::istringstream words(text);
  while (words >> word) {
    if (column > 0 && column + 1 + word.size() > kHelpWidth) {
      result += '\n';
      column = 0;
    } else if (column > 0) {
      result += ' ';
      ++column;
    }
    result += word;
    column += word.size();
  }
  return result;
}

std::string help_of(const CLI::App& app) {
  std::string text = app.help();
  for (size_t i; (i = text.find("\n\n\n")) != std::string::npos;) text.erase(i, 1);
  return text;
}

template <class C>
void declare(CLI::App& app, const std::vector<Option<C>>& table) {
  const C defaults{};
  for (const Option<C>& o : table) {
    if (o.name.empty()) {
      app.add_option(o.metavar)->description(o.help)->type_name("");
      continue;
    }
    std::string help = o.help;
    const std::string value = o.write(defaults);
    if (!value.empty())
      help += " (default: " + (value[0] == '"' ? value.substr(1, value.size() - 2) : value) + ")";
    // add_option(name, text) would take the text for the variable to write into.
    CLI::Option* option =
        o.arity == Arity::flag ? app.add_flag("--" + o.name) : app.add_option("--" + o.name);
    option->description(wrapped(help));
    option->group(o.group);
    if (o.arity != Arity::flag) option->type_name(o.metavar);
    if (o.arity == Arity::many)
      option->expected(1, CLI::detail::expected_max_vector_size)->allow_extra_args();
  }
}

template <class C>
std::vector<GivenOption> given_on_command_line(const CLI::App& app, const std::vector<Option<C>>& table) {
  std::vector<GivenOption> given;
  for (const Option<C>& o : table) {
    const std::string shown = o.name.empty() ? o.metavar : "--" + o.name;
    const CLI::Option* option = app.get_option(shown);
    if (option->count() > 0) given.push_back({o.name, option->results(), shown});
  }
  return given;
}

template <class C>
void refuse_unknown(const CLI::App& app, const std::vector<Option<C>>& table, const Strings& commands) {
  const Strings extras = app.remaining();
  if (extras.empty()) return;
  const std::string name = extras[0].substr(0, extras[0].find('='));
  if (name[0] != '-') {
    if (commands.empty()) fail(ExitCode::usage, "unexpected argument '", name, "'; see --help");
    fail(ExitCode::usage, "unknown command '", name, "'; nearest known: ", nearest_name(name, commands),
         " (options begin with --)");
  }
  Strings names = {"--help"};
  if (!commands.empty()) names.emplace_back("--config");
  for (const Option<C>& o : table)
    if (!o.name.empty()) names.push_back("--" + o.name);
  fail(ExitCode::usage, "unknown option ", name, "; nearest known: ", nearest_name(name, names));
}

/// The arguments, last one first as CLI11 wants them. It would take "[a]" for a list; as a path it is a glob, and
/// "./[a]" is the same one.
Strings reversed_arguments(int argc, const char* const* argv) {
  Strings args;
  bool in_paths = false;
  for (int i = 1; i < argc; ++i) {
    std::string arg = argv[i];
    if (arg.starts_with("--")) {
      const size_t end = std::min(arg.find('='), arg.size());
      in_paths = arg.compare(0, end, "--data") == 0 || arg.compare(0, end, "--val-data") == 0;
      if (in_paths && arg.compare(end, 2, "=[") == 0) arg.insert(end + 1, "./");
    } else if (in_paths && arg.starts_with('[')) {
      arg.insert(0, "./");
    }
    args.push_back(std::move(arg));
  }
  std::reverse(args.begin(), args.end());
  return args;
}

}  // namespace

CommandLine parse_command_line(int argc, const char* const* argv) {
  const auto run_table = run_options();
  const auto sample_table = sample_options();
  const auto eval_table = eval_options();
  const auto inspect_table = inspect_options();

  CLI::App app(
      "Trains a GPT or Llama class language model. Without a command it trains; without arguments it trains "
      "a\n"
      "tiny model on built-in stories.",
      "train_gpt");
  app.get_formatter()->column_width(kHelpColumn);
  declare(app, run_table);
  const CLI::Option* config_file = app.add_option("--config")
                                       ->description("TOML file with options under the same names without --")
                                       ->type_name("FILE")
                                       ->group("Reports");
  CLI::App* sample = app.add_subcommand("sample", "writes text with a trained model");
  declare(*sample, sample_table);
  CLI::App* eval = app.add_subcommand("eval", "measures the loss of a checkpoint");
  declare(*eval, eval_table);
  CLI::App* inspect =
      app.add_subcommand("inspect", "shows what a data file, a model directory or a checkpoint holds");
  declare(*inspect, inspect_table);
  for (CLI::App* command : {&app, sample, eval, inspect}) {
    command->allow_extras();
    command->set_help_flag();  // removed and added again: it decides the order of the groups
    command->set_help_flag("-h,--help", "this text")
        ->group(command == &app      ? "Reports"
                : command == inspect ? "What to look at"
                                     : "Hardware and numbers");
    command->footer(command == &app      ? cat(kCounts, kFooter)
                    : command == inspect ? cat(kCounts, kInspectFooter)
                                         : kCounts);
  }
  app.require_subcommand(0, 1);

  CommandLine result;
  try {
    app.parse(reversed_arguments(argc, argv));
  } catch (const CLI::CallForHelp&) {
    result.action = Action::help;
    result.text = help_of(app);
    return result;
  } catch (const CLI::ParseError& error) {
    std::string message = error.what();
    std::replace(message.begin(), message.end(), '\n', ' ');
    if (const size_t at = message.find(": At Most 1 required"); at != std::string::npos)
      message = message.substr(0, at) + " is given more than once";
    fail(ExitCode::usage, message, "; see --help");
  }

  // Values first: of "--lr --steps 5" the useful thing to say is what is wrong with --lr.
  const std::vector<GivenOption> given = given_on_command_line(app, run_table);
  const auto commands = app.get_subcommands();  // those that were given
  if (!commands.empty()) {
    const std::string command = commands[0]->get_name();
    if (!given.empty() || config_file->count() > 0)
      fail(ExitCode::usage, given.empty() ? "--config" : given[0].what, " stands before the command ",
           command, ", where options of training are; put options of ", command, " behind it");
  }
  const auto read_command = [](const CLI::App& command, const auto& table, auto& config,
                               const std::string& positional, const std::string& expected) {
    apply(table, given_on_command_line(command, table), config);
    refuse_unknown(command, table, {});
    if (positional.empty())
      fail(ExitCode::usage, command.get_name(), ": expected ", expected, ": train_gpt ", command.get_name(),
           " ", table[0].metavar);
  };
  if (sample->parsed()) {
    result.action = Action::sample;
    read_command(*sample, sample_table, result.sample, result.sample.directory, "a directory");
  } else if (eval->parsed()) {
    result.action = Action::eval;
    read_command(*eval, eval_table, result.eval, result.eval.directory, "a directory");
  } else if (inspect->parsed()) {
    result.action = Action::inspect;
    read_command(*inspect, inspect_table, result.inspect, result.inspect.path, "data or a directory");
  } else {
    if (config_file->count() > 0) {
      const std::string path = config_file->results()[0];
      result.given = given_in_toml(run_table, read_file(path), path);
      apply(run_table, result.given, result.run);
    }
    apply(run_table, given, result.run);
    result.given.insert(result.given.end(), given.begin(), given.end());
  }
  refuse_unknown(app, run_table, {"sample", "eval", "inspect"});
  return result;
}

std::vector<std::pair<std::string, std::string>> settings_of(const RunConfig& config) {
  std::vector<std::pair<std::string, std::string>> settings;
  for (const Option<RunConfig>& option : run_options())
    if (const std::string value = option.write(config); !value.empty())
      settings.emplace_back(option.name, value);
  return settings;
}

std::string setting(const std::vector<std::pair<std::string, std::string>>& settings, std::string_view name) {
  const auto found =
      std::find_if(settings.begin(), settings.end(), [&](const auto& s) { return s.first == name; });
  return found == settings.end() ? "not set" : found->second;
}

RunConfig without_start_options(RunConfig config) {
  const RunConfig defaults;
  config.resume = defaults.resume;
  config.override_ = defaults.override_;
  config.stop_after = defaults.stop_after;
  config.dry_run = defaults.dry_run;
  config.gemm_trace = defaults.gemm_trace;
  config.launch_timeout = defaults.launch_timeout;
  config.hang_timeout = defaults.hang_timeout;
  config.expect_ranks = defaults.expect_ranks;
  return config;
}

RunConfig resumed_config(const std::vector<std::pair<std::string, std::string>>& recorded,
                         const std::string& source, const std::vector<GivenOption>& given) {
  std::string text;
  for (const auto& [name, value] : recorded) text += cat(name, " = ", value, "\n");
  RunConfig config;
  try {
    config = run_config_from_toml(text, source);
  } catch (Error& error) {
    error.code = ExitCode::checkpoint;
    throw;
  }
  config = without_start_options(config);
  const auto table = run_options();
  for (const GivenOption& g : given) apply(table, {g}, config);  // one by one: a later one replaces
  return config;
}

std::string to_toml(const RunConfig& config) {
  std::string text, group;
  for (const Option<RunConfig>& option : run_options()) {
    const std::string value = option.write(config);
    if (value.empty()) continue;
    if (option.group != group) text += (text.empty() ? "# " : "\n# ") + option.group + "\n";
    group = option.group;
    text += option.name + " = " + value + "\n";
  }
  return text;
}

RunConfig run_config_from_toml(const std::string& text, const std::string& source) {
  RunConfig config;
  const auto table = run_options();
  try {
    apply(table, given_in_toml(table, text, source), config);
  } catch (const Error& error) {  // it quotes the file
    fail(error.code, one_line(error.what()));
  }
  return config;
}

const char* name_of(DeviceChoice value) {
  switch (value) {
    case DeviceChoice::automatic: return "auto";
    case DeviceChoice::cpu: return "cpu";
    case DeviceChoice::cuda: return "cuda";
  }
  return "?";
}

/// mantissa x 10^exponent in integers: a double would round 9007199254740993.
int64_t parse_count(const std::string& text, const std::string& what, int64_t lowest, const std::string& of) {
  const auto refuse = [&](const std::string& reason) {
    fail(ExitCode::usage, what, ": expected a whole number of ", of.empty() ? "" : of + " of ", "at least ",
         lowest, of.empty() ? " such as 1000, 64k, 1.5M or 600B, got '" : ", got '", text, "'", reason);
  };
  size_t i = 0;
  const auto digit = [&] { return i < text.size() && text[i] >= '0' && text[i] <= '9'; };
  const bool negative = text.starts_with('-');
  if (negative || text.starts_with('+')) ++i;

  int64_t value = 0, exponent = 0;
  bool overflow = false;
  int digits = 0;
  std::string zeros;  // a fraction's zeros count only when a digit follows: 1.50k is 1500
  const auto push = [&](char c) {
    overflow |= __builtin_mul_overflow(value, int64_t{10}, &value) ||
                __builtin_add_overflow(value, int64_t{c - '0'}, &value);
  };
  for (; digit(); ++i, ++digits) push(text[i]);
  if (i < text.size() && text[i] == '.') {
    for (++i; digit(); ++i, ++digits) {
      zeros += text[i];
      if (text[i] == '0') continue;
      for (const char c : zeros) push(c);
      exponent -= static_cast<int64_t>(zeros.size());
      zeros.clear();
    }
  }
  if (digits == 0) refuse("");
  if (i < text.size() && (text[i] == 'e' || text[i] == 'E')) {
    int64_t e = 0;
    const bool below = ++i < text.size() && text[i] == '-';
    if (i < text.size() && (text[i] == '-' || text[i] == '+')) ++i;
    if (!digit()) refuse("");
    for (; digit(); ++i) e = std::min<int64_t>(e * 10 + (text[i] - '0'), 1000);
    exponent += below ? -e : e;
  }
  if (i < text.size()) {
    constexpr std::array<std::pair<char, int64_t>, 6> kUnits = {
        {{'k', 3}, {'K', 3}, {'M', 6}, {'B', 9}, {'G', 9}, {'T', 12}}};
    const auto unit =
        std::find_if(kUnits.begin(), kUnits.end(), [&](const auto& u) { return u.first == text[i]; });
    if (unit == kUnits.end() || i + 1 != text.size()) refuse("");
    exponent += unit->second;
  }
  for (; exponent > 0 && value != 0 && !overflow; --exponent)
    overflow |= __builtin_mul_overflow(value, int64_t{10}, &value);
  if (overflow) refuse(", which is above 2^63 - 1");
  for (; exponent < 0 && value != 0; ++exponent) {
    if (value % 10 != 0) refuse(", which is not whole");
    value /= 10;
  }
  if (negative) value = -value;
  if (value < lowest) refuse("");
  return value;
}

}  // namespace kinoe
