// How the processes of a run find each other, notice that one is lost, and end together.
//
// A run is a Team. Whoever started the processes said in environment variables who is who (find_place); every rank then
// holds TCP connections to rank 0. TCP and not MPI, because a run may be started without MPI, and because a closed socket
// tells of a killed process within milliseconds while MPI calls just wait. One line carries what main threads agree on, one
// what checkpoint threads agree on, and one belongs to a thread on every rank that says each second how far its main thread
// is. From that, rank 0's thread judges who is lost or hangs, and everybody ends with one message that names the rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common/check.h"
#include "trainer/channel.h"

namespace kinoe {

struct LaunchOptions {
  /// --launch-timeout: seconds within which all ranks must have arrived.
  double launch_timeout_s = 120;
  /// --hang-timeout: a rank that sends no heartbeat for half of this is lost. 0: nobody is judged by time (a debugger).
  double hang_timeout_s = 40;
  /// --expect-ranks; 0: whatever the launcher says.
  int64_t expect_ranks = 0;
  /// An exchange ends with an error after this long. The watchdog knows better and sooner: this is for what it cannot see.
  double exchange_timeout_s = 3600;
};

/// Where this process stands among those started together.
struct Place {
  int rank = 0, ranks = 1;
  int local_rank = 0;  // among the processes of this host; -1 from find_place where the launcher does not say
  std::string host;    // name of this machine
  std::string launcher;  // "" for a single process, "Open MPI", "Slurm", "RANK and WORLD_SIZE"
  // Known after Team::join:
  int ranks_here = 1;  // processes on this host
  int hosts = 1;
};

/// The place by environment variables alone, looked up with `env` (getenv). The innermost launcher counts:
///   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK                                mpirun of Open MPI
///   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and LOCAL_RANK if given     torchrun, or by hand
///   SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_LOCALID       in a step of srun (SLURM_STEP_ID)
/// and none of them is a single process. Throws Error(rank_lost), saying what to do, where they contradict each other or are
/// incomplete, and where several processes were announced that cannot find each other: another MPI (PMI_SIZE), or a Slurm
/// job of several tasks outside of srun.
Place find_place(const std::function<const char*(const char*)>& env);

class Team {
 public:
  /// Connects all ranks. A single process opens no socket, makes no MPI call and has no thread. Under mpirun MPI is
  /// initialized and carries rank 0's address; else that is MASTER_ADDR and MASTER_PORT, or follows from Slurm's job.
  /// Throws Error(rank_lost) within launch_timeout_s: who is missing, what is in the way, what to do.
  static std::unique_ptr<Team> join(const LaunchOptions& options);
  /// What main() does with an error where there is no team, for one that join() threw as well: prints
  /// "train_gpt: error: ..." unless another rank says it, returns the exit code.
  static int report(const Error& error) noexcept;

  Team() = default;
  /// Without finish() the others take this rank for lost.
  virtual ~Team() = default;
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  [[nodiscard]] virtual const Place& place() const = 0;
  [[nodiscard]] int rank() const { return place().rank; }
  [[nodiscard]] int ranks() const { return place().ranks; }
  [[nodiscard]] bool first() const { return rank() == 0; }

  /// For the main thread.
  virtual Channel& control() = 0;
  /// For the thread that writes checkpoints.
  virtual Channel& saving() = 0;
  /// MPI_COMM_WORLD is initialized and has these ranks.
  [[nodiscard]] virtual bool has_mpi() const = 0;

  /// What the main thread does from now on, and how many seconds it may take until the next call of at(), reached() or
  /// alive() before this rank counts as hung. All ranks go through the same phases in the same order: who hangs is known by who
  /// is behind. Cheap (a mutex and a small string).
  virtual void at(const std::string& what, double limit_s) = 0;
  /// One more thing begun in the same phase, with the same limit: reached("reduce-scatter of bucket", 3). Cheap enough for
  /// every collective. Again, the same calls in the same order on all ranks.
  virtual void reached(const char* what, int64_t number) = 0;
  /// The main thread goes on with the same thing: the time of its limit begins anew. For the pieces of what takes long, of
  /// which each rank may have a number of its own. Cheap enough for every micro-batch.
  virtual void alive() = 0;

  /// Ends the run because of `error`; main()'s catch returns what this returns. Rank 0 prints one line ("train_gpt: error:
  /// ...", with "rank 3 (host): " where the error is another rank's), and all ranks end with the same exit code within
  /// seconds, whatever their main threads wait for. Of several errors at once the first counts; one that only says that
  /// a rank is gone gives way to the reason. Other ranks print nothing unless rank 0 cannot be reached.
  virtual int leave(const Error& error) noexcept = 0;
  /// For a signal handler, which may do little but write: a line of an exit code's digit and a text ("3'a.bin' was cut
  /// off\n", in one write() to this descriptor) ends the run as leave() does, and this process within seconds. -1: a
  /// single process, where nobody reads.
  [[nodiscard]] virtual int last_words() const = 0;
  /// A regular end, for exit codes 0 and 75 alike: waits for all ranks, then closes everything (and finalizes MPI).
  virtual void finish() = 0;
};

/// Names and values, in the order in which they are shown.
using Facts = std::vector<std::pair<std::string, std::string>>;

struct RankFacts {
  std::string pci;  // PCI bus id of the GPU; "" on the CPU
  Facts same;       // must be the same on all ranks: binary, GPU, driver, each setting that matters
  Facts data;       // name of each data source and a hash of it
  // Where this rank would go on, as it sees the run directory:
  std::string checkpoints = {};  // the directory of checkpoints
  std::string checkpoint = {};   // "step 8, hash 123", "none"
  std::string passed_over = {};  // why none that is newer; "" where there is nothing to say
};

/// Call after join and before anything large. Throws Error(rank_lost) when two ranks have one GPU (host and pci), naming
/// both, Error(checkpoint) when they see other checkpoints, from which other settings would follow (unless "--resume" in
/// `same` differs), naming each rank's, and Error(rank_lost) when `same` differs, with every difference and who has which
/// value; Error(data) when a source differs or is missing on some host, naming host and source. The same error on all
/// ranks. Returns a table of them for rank 0 to print: rank, host, "GPU", "driver" and "NCCL" of facts.same, pci.
std::string compare_ranks(Channel& channel, const Place& place, const RankFacts& facts);
/// A hash of the running program's file, for facts.same.
std::string program_hash();

/// What is likely to go wrong later for want of a resource: one sentence each, with the number needed. Raises the limit of
/// open files as far as it may be raised. `gpus`: NCCL will be used.
std::vector<std::string> launch_warnings(const Place& place, bool gpus);

}  // namespace kinoe
