// Which files a start writes, and in which order.
#include "trainer/run_directory.h"

#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <optional>
#include <random>
#include <thread>

#include "trainer/checkpoint.h"
#include "trainer/checkpoint_ranks.h"
#include "trainer/monitor.h"
#include "trainer/monitor_device.h"
#include "trainer/run_reports.h"

namespace kinoe {
namespace {

/// What produced the run. `from`: the step after which it goes on, 0 for a new run.
void record_run(Files& files, const RunConfig& config, const Device& device, int ranks, int64_t from,
                int argc, char** argv) {
  in_class(ExitCode::usage, [&] {
    write_file_durably(files, join_path(config.out, "config.toml"), to_toml(without_start_options(config)));
    RunRecord record = make_run_record(argc, argv);
    const DeviceInfo info = device.info();
    record.device = ranks == 1 ? info.name : cat(info.name, " x ", ranks);
    record.driver = info.driver;
    if (const std::optional<GpuHealth> health = device.health()) record.gpu = health_facts(*health);
    record.config = settings_of(config);
    write_file_durably(files,
                       join_path(config.out, from == 0 ? "run.json" : cat("run_from_step_", from, ".json")),
                       to_json(record));
  });
}

std::string working_directory() {
  std::error_code ignored;
  return std::filesystem::current_path(ignored).string();
}

/// Whether a file that another host has just made is there. Clients of NFS remember for up to a minute that there was no such
/// directory; opening the one above makes them ask.
bool appears(Files& files, const std::string& directory, const std::string& name) {
  constexpr int kTries = 20;
  for (int i = 0; i < kTries; ++i) {
    if (i > 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    for (const std::string& above : {parent_directory(directory), directory}) try {
        files.list(above);
      } catch (const FileError&) {
        break;
      }
    if (files.kind(join_path(directory, name)) == Files::Kind::file) return true;
  }
  return false;
}

/// A file that is there as long as this object lives.
class Probe {
 public:
  Probe(Files& files, std::string path) : files_(files), path_(std::move(path)) {
    files_.create(path_)->close();
  }
  ~Probe() {
    try {
      files_.remove(path_);
    } catch (const FileError&) {  // an empty file that resuming passes over
      return;
    }
  }
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

 private:
  Files& files_;
  const std::string path_;
};

}  // namespace

void check_new_run(Files& files, const RunConfig& config) {
  if (config.resume != "never" || config.out.empty()) return;
  in_class(ExitCode::usage, [&] {
    const std::vector<int64_t> steps = checkpoint_steps(files, config.out);
    check_unused(
        files, config.out,
        steps.empty()
            ? ""
            : cat(", or --resume auto to go on from ",
                  std::filesystem::path(checkpoint_path(config.out, steps.back())).filename().string()));
  });
}

void check_shared(Files& files, Channel& ranks, const std::string& run_directory) {
  // Of a name that nobody has looked for: no cache knows that it is not there.
  std::random_device random;
  const std::string mine = cat(".probe-", random(), "-", random());
  const bool first = ranks.rank() == 0;
  std::optional<Probe> probe;
  if (first)
    in_class(ExitCode::usage, [&] { probe.emplace(files, join_path(run_directory, mine + ".tmp")); });
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  const std::string name = ranks.from_first("probe of the run directory", mine + ".tmp");
  const std::string first_host = ranks.from_first("host of rank 0", host.data());
  const std::string directory = ranks.from_first("run directory", run_directory);
  const std::string there = ranks.from_first("working directory", working_directory());
  std::string failure;
  if (!first) try {
      if (!appears(files, directory, name))
        failure = cat("run directory ", directory, " is not here what it is for rank 0 (", first_host,
                      "): the working directory is ", working_directory(), ", rank 0's is ", there,
                      "; every rank writes its part of a checkpoint: give --out a path on a file system "
                      "that all hosts see, in full");
      else
        probe_write(files, directory, mine + ".tmp");
    } catch (const FileError& error) {
      failure = cat("run directory ", directory, " (working directory ", working_directory(),
                    "), where every rank writes its part of a checkpoint: ", error.what());
    }
  failure = agree(ranks, "run directory of every rank", failure);
  if (!failure.empty()) fail(ExitCode::usage, failure);
}

std::unique_ptr<RunLock> take_run_directory(Files& files, Team& team, RunSetup& setup, const Device& device,
                                            bool resumes, uint64_t needed_bytes, int argc, char** argv) {
  std::unique_ptr<RunLock> lock;
  RunConfig& config = setup.config;
  const bool is_new = config.out.empty() || files.kind(config.out) == Files::Kind::absent;
  if (team.first())
    config.out =
        prepare_run_directory(files, {.path = config.out, .resume = resumes, .needed_bytes = needed_bytes});
  if (team.ranks() > 1 && !config.no_checkpoints) try {
      check_shared(files, team.control(), config.out);
    } catch (const Error&) {
      std::error_code ignored;
      if (team.first() && is_new) std::filesystem::remove(config.out, ignored);  // only if it is empty
      throw;
    }
  if (team.first()) {
    lock = std::make_unique<RunLock>(config.out);
    print_notes(team, claim_run(files, config.out, setup.from));
    record_run(files, config, device, team.ranks(), setup.state.step, argc, argv);
    remove_unfinished_checkpoints(files, config.out);
  }
  config.out = team.control().from_first("run directory", config.out);
  return lock;
}

}  // namespace kinoe
