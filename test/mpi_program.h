// Starts a program as several ranks under mpirun, also where ranks are more than cores and the user is root, as on the
// machines that run tests.
#pragma once

#include <map>

#include "test/program.h"

namespace kinoe {

/// ASAN_OPTIONS for ranks. Open MPI keeps memory to the end in parts that it unloads before, so that no suppression can name
/// them. Under the sanitizers everything else is still looked for, and leaks in the tests of one process.
inline std::string sanitizer_of_ranks() {
  const char* sanitizer = std::getenv("ASAN_OPTIONS");
  return std::string(sanitizer != nullptr ? sanitizer : "") + ":detect_leaks=0";
}

/// The shell command of `ranks` processes of `command` (a program and its arguments) under mpirun, each with
/// `environment` besides this process's own; ended after `limit_s` seconds, which is exit code 124.
inline std::string mpi_command(int ranks, const std::vector<std::string>& command,
                               const std::map<std::string, std::string>& environment = {}, int limit_s = 60) {
  // What tells a GoogleTest process of its share of the tests is not for the processes it starts.
  std::string text =
      "env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX -u GTEST_SHARD_STATUS_FILE -u GTEST_OUTPUT";
  std::map<std::string, std::string> variables = {
      {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
      {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
      {"OMPI_MCA_mpi_yield_when_idle", "1"},
      {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
      {"OMPI_MCA_btl_vader_single_copy_mechanism", "none"},  // needs a right that containers withhold
      {"OMP_NUM_THREADS", "1"},
  };
  variables["ASAN_OPTIONS"] = sanitizer_of_ranks();
  for (const auto& [name, value] : environment) variables[name] = value;
  for (const auto& [name, value] : variables) text += " " + name + "=" + quoted(value);
  text += " timeout --kill-after=5 " + std::to_string(limit_s) +
          " mpirun --oversubscribe --bind-to none -n " + std::to_string(ranks);
  for (const std::string& word : command) text += " " + quoted(word);
  return text;
}

inline Outcome run_mpi(int ranks, const std::vector<std::string>& command,
                       const std::map<std::string, std::string>& environment = {}, int limit_s = 60) {
  return run_shell(mpi_command(ranks, command, environment, limit_s));
}

/// "" where mpirun can start two processes on this machine, else why not, for GTEST_SKIP.
inline const std::string& why_no_mpi() {
  static const std::string why = [] {
    if (run_shell("command -v mpirun").code != 0) return std::string("there is no mpirun");
    const Outcome tried = run_mpi(2, {"sh", "-c", "exit 0"}, {}, 20);
    return tried.code == 0 ? std::string() : "mpirun can not start two processes here: " + tried.output;
  }();
  return why;
}

}  // namespace kinoe
