// Which files a start writes, and in which order.
#include "trainer/run_directory.h"

#include <optional>

#include "trainer/checkpoint.h"
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

}  // namespace

std::unique_ptr<RunLock> take_run_directory(Files& files, Team& team, RunSetup& setup, const Device& device,
                                            bool resumes, uint64_t needed_bytes, int argc, char** argv) {
  std::unique_ptr<RunLock> lock;
  RunConfig& config = setup.config;
  if (team.first()) {
    config.out =
        prepare_run_directory(files, {.path = config.out, .resume = resumes, .needed_bytes = needed_bytes});
    lock = std::make_unique<RunLock>(config.out);
    print_notes(team, claim_run(files, config.out, setup.from));
    record_run(files, config, device, team.ranks(), setup.state.step, argc, argv);
    remove_unfinished_checkpoints(files, config.out);
  }
  config.out = team.control().from_first("run directory", config.out);
  return lock;
}

}  // namespace kinoe
