// A team from its parts: place, rendezvous, channels, watch.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "trainer/launch_channel.h"
#include "trainer/launch_end.h"
#include "trainer/launch_limits.h"
#include "trainer/launch_mpi.h"
#include "trainer/launch_place.h"
#include "trainer/launch_rendezvous.h"
#include "trainer/launch_watch.h"

namespace kinoe {
namespace {

/// A single process: nobody to talk to, nobody to wait for.
class Solo final : public Team {
 public:
  explicit Solo(Place place) : place_(std::move(place)), control_(alone()), saving_(alone()) {}
  [[nodiscard]] const Place& place() const override { return place_; }
  Channel& control() override { return *control_; }
  Channel& saving() override { return *saving_; }
  [[nodiscard]] bool has_mpi() const override { return false; }
  void at(const std::string& /*what*/, double /*limit_s*/) override {}
  void reached(const char* /*what*/, int64_t /*number*/) override {}
  void alive() override {}
  int leave(const Error& error) noexcept override { return report(error); }
  [[nodiscard]] int last_words() const override { return -1; }
  void finish() override {}

 private:
  const Place place_;
  const std::unique_ptr<Channel> control_, saving_;
};

class Connected final : public Team {
 public:
  Connected(Place place, Roster roster, bool mpi, const LaunchOptions& options)
      : place_(std::move(place)),
        mpi_(mpi),
        watch_(place_.rank, roster.hosts, lines(roster, Line::heartbeat), options.hang_timeout_s),
        control_(make_socket_channel(place_.rank, roster.hosts, lines(roster, Line::control),
                                     options.exchange_timeout_s,
                                     [this](const char* what) { watch_.exchanging(what); })),
        saving_(make_socket_channel(place_.rank, roster.hosts, lines(roster, Line::saving),
                                    options.exchange_timeout_s,
                                    [this](const char* what) { watch_.saving(what); })) {}

  [[nodiscard]] const Place& place() const override { return place_; }
  Channel& control() override { return *control_; }
  Channel& saving() override { return *saving_; }
  [[nodiscard]] bool has_mpi() const override { return mpi_; }
  void at(const std::string& what, double limit_s) override { watch_.at(what, limit_s); }
  void reached(const char* what, int64_t number) override { watch_.reached(what, number); }
  void alive() override { watch_.alive(); }
  [[nodiscard]] int last_words() const override { return watch_.last_words(); }

  int leave(const Error& error) noexcept override {
    try {
      const ExitCode code = watch_.leave(error);
      // What the main thread still destroys on its way out may wait for a rank or a GPU that is no more.
      try {
        std::thread([code] {
          std::this_thread::sleep_for(std::chrono::seconds(5));
          end_process(code);
        }).detach();
      } catch (const std::system_error&) {
        end_process(code);
      }
      return static_cast<int>(code);
    } catch (...) {
      return report(error);
    }
  }

  void finish() override {
    control_->barrier("the end of the run");
    if (mpi_) {
      watch_.at("MPI_Finalize", kFinalizeLimit);
      mpi_end();
    }
    watch_.finish();
  }

 private:
  static constexpr double kFinalizeLimit = 60;

  static std::vector<Socket> lines(Roster& roster, Line line) {
    return std::move(roster.lines[static_cast<size_t>(line)]);
  }

  const Place place_;
  const bool mpi_;
  Watch watch_;
  const std::unique_ptr<Channel> control_, saving_;
};

/// What is wrong with this rank, and is said when there is a team: so it is said once, whoever has it, and ends all alike.
std::optional<Error> mistake_of(const Place& place, const LaunchOptions& options, const std::string& filter) {
  if (options.expect_ranks > 0 && options.expect_ranks != place.ranks)
    return Error(ExitCode::rank_lost,
                 cat("--expect-ranks ", options.expect_ranks, ", but the launcher started ", place.ranks,
                     place.ranks == 1 ? " process, or this process does not know its launcher" : "",
                     "; see how the processes are started (mpirun -n, srun -n, WORLD_SIZE)"));
  if (filter.empty() || place.ranks == 1) return std::nullopt;
  try {
    choose_interfaces(list_interfaces(), filter);  // it must name something, whoever uses it
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

/// Where rank 0 listens when MPI carries the word: "port key address address ...", or "error code text".
Roster meet_over_mpi(const Place& place, const std::string& filter, const Patience& patience) {
  mpi_begin(place, patience.seconds);
  if (place.rank == 0) {
    Socket listener;
    std::string word;
    std::random_device random;
    const uint64_t key = (uint64_t{random()} << 32) ^ random();
    try {
      require_open_files(place.ranks, raise_open_files());
      listener = listen_on(0);
      word = cat(port_of(listener), " ", key);
      const char* here = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
      if (here != nullptr && std::to_string(place.ranks) == here) {
        word += " 127.0.0.1";
      } else {
        for (const Interface& one : choose_interfaces(list_interfaces(), filter)) word += " " + one.address;
      }
    } catch (const Error& error) {
      mpi_from_first(place, cat("error ", static_cast<int>(error.code), " ", error.what()), patience);
      throw;
    }
    mpi_from_first(place, word, patience);
    return gather_ranks(listener, place.host, place, key, patience);
  }
  std::istringstream word(mpi_from_first(place, "", patience));
  int port = 0;
  uint64_t key = 0;
  if (!(word >> port >> key)) {
    std::istringstream error(word.str());
    int code = static_cast<int>(ExitCode::rank_lost);
    error.ignore(6) >> code;
    throw ToldElsewhere(static_cast<ExitCode>(code), error.str());
  }
  std::vector<std::string> hosts;
  for (std::string host; word >> host;) hosts.push_back(host);
  return join_ranks(hosts, port, place, key, patience);
}

}  // namespace

std::unique_ptr<Team> Team::join(const LaunchOptions& options) {
  const Environment env = [](const char* name) { return std::getenv(name); };
  Place place = find_place(env);
  const char* names = std::getenv("NCCL_SOCKET_IFNAME");
  const std::string filter = names == nullptr ? "" : names;
  const std::optional<Error> mistake = mistake_of(place, options, filter);
  if (place.ranks == 1) {
    if (mistake) throw Error(*mistake);
    return std::make_unique<Solo>(place);
  }

  raise_open_files();  // rank 0 holds three connections to every other rank
  const bool mpi = place.launcher == "Open MPI";
  const Patience patience(options.launch_timeout_s);
  Roster roster;
  if (mpi) {
    roster = meet_over_mpi(place, filter, patience);
  } else {
    const MeetingPoint point = find_meeting_point(env);
    roster = place.rank == 0 ? gather_ranks(listen_on(point.port), point.host, place, point.key, patience)
                             : join_ranks({point.host}, point.port, place, point.key, patience);
  }
  place.local_rank = roster.local_rank;
  place.ranks_here = static_cast<int>(std::count(roster.hosts.begin(), roster.hosts.end(), place.host));
  place.hosts = static_cast<int>(std::set<std::string>(roster.hosts.begin(), roster.hosts.end()).size());
  auto team = std::make_unique<Connected>(std::move(place), std::move(roster), mpi, options);
  if (mistake) throw ToldElsewhere(static_cast<ExitCode>(team->leave(*mistake)), mistake->what());
  return team;
}

int Team::report(const Error& error) noexcept {
  std::fflush(stdout);  // what was said before the error comes before it
  if (dynamic_cast<const ToldElsewhere*>(&error) == nullptr) print_error(error.what());
  return static_cast<int>(error.code);
}

}  // namespace kinoe
