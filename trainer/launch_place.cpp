// Who this process is among those started with it, by the environment variables of each launcher.
//
// The variables are inherited, so those of several launchers may be there at once (mpirun inside a Slurm job, torchrun in a
// step of srun): the innermost launcher counts. What would make several single runs out of one run of several ranks, all
// writing the same directory, is an error and never a guess.
#include "trainer/launch_place.h"

#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

namespace kinoe {
namespace {

std::string text_of(const Environment& env, const char* name) {
  const char* value = env(name);
  return value == nullptr ? "" : value;
}

std::optional<int64_t> whole_number(const std::string& text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

/// The number in a variable; none where it is not set or empty.
std::optional<int> number_of(const Environment& env, const char* name) {
  const std::string text = text_of(env, name);
  if (text.empty()) return std::nullopt;
  const std::optional<int64_t> value = whole_number(text);
  if (!value || *value < 0 || *value > 1'000'000)
    fail(ExitCode::rank_lost, name, " is '", text,
         "', not a number of ranks; the launcher sets it, or unset it for a single process");
  return static_cast<int>(*value);
}

/// A rank and how many there are, from two variables that must come together.
std::optional<Place> pair_of(const Environment& env, const char* rank_name, const char* ranks_name,
                             const char* local_name, const char* launcher) {
  const std::optional<int> rank = number_of(env, rank_name), ranks = number_of(env, ranks_name);
  if (!rank && !ranks) return std::nullopt;
  if (!rank || !ranks)
    fail(ExitCode::rank_lost, rank ? rank_name : ranks_name, " is set and ", rank ? ranks_name : rank_name,
         " is not; set both, or unset both for a single process");
  if (*ranks < 1 || *rank >= *ranks)
    fail(ExitCode::rank_lost, rank_name, "=", *rank, " is no rank of ", ranks_name, "=", *ranks, " (0 to ",
         ranks_name, " - 1); see how the processes are started");
  return Place{*rank, *ranks, number_of(env, local_name).value_or(-1), "", launcher};
}

/// Slurm numbers the batch script and the shell of salloc as steps of their own (slurm.h: SLURM_BATCH_SCRIPT,
/// SLURM_INTERACTIVE_STEP); nothing was started in parallel there.
bool in_slurm_step(const Environment& env) {
  const std::string step = text_of(env, "SLURM_STEP_ID");
  return !step.empty() && step != "4294967291" && step != "4294967290";
}

std::optional<Place> slurm_place(const Environment& env) {
  if (!in_slurm_step(env)) return std::nullopt;
  const char* ranks_name =
      text_of(env, "SLURM_STEP_NUM_TASKS").empty() ? "SLURM_NTASKS" : "SLURM_STEP_NUM_TASKS";
  return pair_of(env, "SLURM_PROCID", ranks_name, "SLURM_LOCALID", "Slurm");
}

std::string this_host() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "this host";
  return name.data();
}

}  // namespace

Place find_place(const Environment& env) {
  const auto mpi =
      pair_of(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "Open MPI");
  const auto given = pair_of(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "RANK and WORLD_SIZE");
  const auto slurm = slurm_place(env);
  const bool has_address = !text_of(env, "MASTER_ADDR").empty(),
             has_port = !text_of(env, "MASTER_PORT").empty();

  Place place;
  if (mpi) {
    place = *mpi;
    if (given && (given->rank != mpi->rank || given->ranks != mpi->ranks))
      fail(ExitCode::rank_lost, "mpirun started this process as rank ", mpi->rank, " of ", mpi->ranks,
           ", but RANK=", given->rank, " and WORLD_SIZE=", given->ranks,
           " say otherwise; unset RANK and WORLD_SIZE");
  } else if (given && slurm && given->rank == slurm->rank && given->ranks == slurm->ranks &&
             !(has_address && has_port)) {
    place = *slurm;
  } else if (given) {
    place = *given;
    // torchrun inside of srun starts more ranks than srun; fewer means that each task would train on its own.
    if (slurm && given->ranks < slurm->ranks)
      fail(ExitCode::rank_lost, "srun started ", slurm->ranks, " tasks, but WORLD_SIZE=", given->ranks,
           " announces fewer ranks; unset RANK and WORLD_SIZE, or start fewer tasks");
    if (place.ranks > 1 && !(has_address && has_port))
      fail(ExitCode::rank_lost, "RANK=", place.rank, " and WORLD_SIZE=", place.ranks, " are set, but not ",
           has_address ? "MASTER_PORT"
           : has_port  ? "MASTER_ADDR"
                       : "MASTER_ADDR and MASTER_PORT",
           ": set them to the host of rank 0 and a free port there, the same for all ranks");
  } else if (slurm) {
    place = *slurm;
  } else {
    for (const char* name : {"PMI_SIZE", "MV2_COMM_WORLD_SIZE"})
      if (const int ranks = number_of(env, name).value_or(1); ranks > 1)
        fail(ExitCode::rank_lost, name, "=", ranks, " announces ", ranks,
             " ranks started by an MPI that is not Open MPI, which this program cannot join: start it with "
             "Open MPI's mpirun, "
             "with srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT");
    if (const int tasks = number_of(env, "SLURM_NTASKS").value_or(1);
        tasks > 1 && !text_of(env, "SLURM_JOB_ID").empty())
      fail(ExitCode::rank_lost, "Slurm gave this job ", tasks,
           " tasks, but this is a single process outside of any step: start it with srun or mpirun, or, for "
           "a single process, with "
           "SLURM_NTASKS unset");
  }
  place.host = this_host();
  if (place.ranks == 1) {
    place.local_rank = 0;
    place.launcher = "";
  }
  return place;
}

MeetingPoint find_meeting_point(const Environment& env) {
  MeetingPoint point;
  const std::string port_text = text_of(env, "MASTER_PORT");
  std::string job;
  if (!text_of(env, "MASTER_ADDR").empty() && !port_text.empty()) {
    point.host = text_of(env, "MASTER_ADDR");
    const std::optional<int64_t> port = whole_number(port_text);
    if (!port || *port < 1 || *port > 65535)
      fail(ExitCode::rank_lost, "MASTER_PORT is '", port_text, "', not a port (1 to 65535)");
    point.port = static_cast<int>(*port);
    if (text_of(env, "TORCHELASTIC_USE_AGENT_STORE") == "True") point.port += point.port < 65535 ? 1 : -1;
    job = cat(point.host, ":", point.port, " ", text_of(env, "TORCHELASTIC_RUN_ID"));
  } else {
    std::string list = text_of(env, "SLURM_STEP_NODELIST");
    if (list.empty()) list = text_of(env, "SLURM_JOB_NODELIST");
    const std::vector<std::string> hosts = expand_hosts(list);
    if (hosts.empty())
      fail(ExitCode::rank_lost, "Slurm's list of nodes (SLURM_STEP_NODELIST) is '", list,
           "', which names no host: set MASTER_ADDR and MASTER_PORT to the host of rank 0 and a free port "
           "there");
    point.host = hosts.size() == 1 ? "127.0.0.1" : hosts.front();
    job = cat("Slurm ", text_of(env, "SLURM_JOB_ID"), ".", text_of(env, "SLURM_STEP_ID"), ".",
              text_of(env, "SLURM_RESTART_COUNT"));
    // Below the ports that Linux gives out by itself (from 32768), above those of known services.
    point.port = 15000 + static_cast<int>(XXH3_64bits(job.data(), job.size()) % 15000);
  }
  point.key = XXH3_64bits(job.data(), job.size());
  return point;
}

std::vector<std::string> expand_hosts(const std::string& list) {
  std::vector<std::string> done;
  size_t at = 0;
  while (at < list.size()) {
    // One item, up to a comma outside of brackets: pieces of text and brackets, each multiplying what there is so far.
    std::vector<std::string> names{""};
    while (at < list.size() && list[at] != ',') {
      std::vector<std::string> pieces;
      if (list[at] != '[') {
        const size_t end = std::min(list.find_first_of(",[", at), list.size());
        pieces.push_back(list.substr(at, end - at));
        at = end;
      } else {
        const size_t close = list.find(']', at);
        if (close == std::string::npos) return {};
        for (++at; at < close;) {
          const size_t end = std::min(list.find(',', at), close);
          const std::string range = list.substr(at, end - at);
          const size_t dash = range.find('-');
          const std::string low = range.substr(0, dash),
                            high = dash == std::string::npos ? low : range.substr(dash + 1);
          const std::optional<int64_t> from = whole_number(low), to = whole_number(high);
          if (!from || !to || *from < 0 || *to < *from || *to - *from >= 100'000) return {};
          for (int64_t number = *from; number <= *to; ++number) {
            std::string digits = std::to_string(number);
            if (digits.size() < low.size()) digits.insert(0, low.size() - digits.size(), '0');
            pieces.push_back(digits);
          }
          at = end + 1;
        }
        at = close + 1;
      }
      if (names.size() * pieces.size() > 100'000) return {};
      std::vector<std::string> longer;
      for (const std::string& name : names)
        for (const std::string& piece : pieces) longer.push_back(name + piece);
      names = std::move(longer);
    }
    for (std::string& name : names)
      if (!name.empty()) done.push_back(std::move(name));
    ++at;
  }
  return done;
}

std::string rank_ranges(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += cat(text.empty() ? "" : ", ", ranks[i]);
    if (last > i) text += cat(last == i + 1 ? ", " : "-", ranks[last]);
    i = last + 1;
  }
  return text;
}

void fail_together(const Place& place, const std::string& message) {
  if (place.rank == 0) throw Error(ExitCode::rank_lost, message);
  throw ToldElsewhere(ExitCode::rank_lost, message);
}

}  // namespace kinoe
