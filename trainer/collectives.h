// Sums and copies of training's numbers between ranks: gradients, weights, losses.
//
// One contract, three implementations: a single rank (collectives_self.cpp), MPI between CPUs (collectives_mpi.cpp), NCCL
// between GPUs (collectives_nccl.cpp). Calls are queued in order and return at once, so that the numbers travel while the
// next layer is computed; all ranks make the same calls in the same order. What a call reads and writes stays untouched
// until await() has let the caller past it. A call may read what an earlier one writes.
//
// The same call with the same numbers on the same ranks gives the same bits every time, on all ranks alike. The bits of a
// sum of floats depend on the number of ranks and on the implementation; those of a sum of integers depend on nothing.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "kernels/common/device.h"

namespace kinoe {

class Collectives {
 public:
  struct Options {
    /// Called at the start of each call, with its name ("all-reduce", "reduce-scatter", "all-gather") and its number
    /// (from 1): how a watchdog knows what a rank reached last. May be empty.
    std::function<void(const char* what, int64_t number)> reached;
    /// MPI: a call is made in pieces of at most so many elements, since MPI counts in int and holds a copy of what it
    /// works on. All ranks the same.
    int64_t piece_elements = int64_t{1} << 24;
    /// NCCL: how long the other ranks may take to arrive when the communicator is built and, later, when a call needs
    /// connections that do not exist yet.
    double init_timeout_s = 120, call_timeout_s = 600;
  };
  /// Number of a call; see mark().
  using Mark = int64_t;
  struct Traffic {
    int64_t calls = 0;
    int64_t bytes = 0;
  };

  virtual ~Collectives() = default;
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int ranks() const { return ranks_; }

  /// buffer = its sum over all ranks, in place. fp32, fp64, int64 and uint64 (these two wrap).
  void all_reduce(const Tensor& buffer);
  /// mine[i] = sum over ranks of all[rank * n + i], n = mine.size(), the same on all ranks. `all` holds at least ranks * n
  /// elements and is not changed; mine must not overlap it. Types as above.
  void reduce_scatter(const Tensor& mine, const Tensor& all);
  /// all[r * n + i] = rank r's mine[i], n = mine.size(), the same on all ranks. Any type. `all` holds at least ranks * n
  /// elements; mine must not overlap it.
  void all_gather(const Tensor& all, const Tensor& mine);

  /// What is called from now on begins after everything queued on ctx's stream so far.
  virtual void follow(const Context& ctx) = 0;
  /// Everything called so far, for await().
  virtual Mark mark() { return traffic_.calls; }
  /// ctx's stream (the host, where ctx is a CPU's) goes on after everything up to `mark`. Throws Error(rank_lost) when the
  /// other ranks can no longer be reached, Error(gpu) when the GPU failed.
  virtual void await(const Context& ctx, Mark mark) = 0;
  /// Moves things on without waiting and looks for errors that happened meanwhile (MPI moves data only inside its calls).
  /// Called between layers. Throws as await() does.
  virtual void poke() {}

  /// Calls so far, and bytes this rank has sent, as a ring moves them, B the bytes of one rank's buffer or part:
  /// all-reduce 2 (R-1)/R B (rounded down), reduce-scatter and all-gather B.
  [[nodiscard]] Traffic traffic() const { return traffic_; }

 protected:
  Collectives(int rank, int ranks, const Options& options);

  /// The calls above, checked, counted and announced; nothing is empty.
  virtual void queue_all_reduce(const Tensor& buffer) = 0;
  virtual void queue_reduce_scatter(const Tensor& mine, const Tensor& all) = 0;
  virtual void queue_all_gather(const Tensor& all, const Tensor& mine) = 0;

 private:
  void begin(const char* what, int64_t bytes);

  int rank_, ranks_;
  Traffic traffic_;
  std::function<void(const char*, int64_t)> reached_;
};

/// One rank: at most copies, on the stream last given to follow() (the host before that).
std::unique_ptr<Collectives> collectives_self(const Collectives::Options& options = {});
/// All processes started together, tensors in CPU memory, over MPI_COMM_WORLD, which the caller has initialised and
/// finalises after this object is gone; one thread at a time. Destroyed with calls that nobody awaited, it leaves them to
/// the end of the process. Throws Error(rank_lost) when MPI fails or is not in this build.
std::unique_ptr<Collectives> collectives_mpi(const Collectives::Options& options = {});
/// Of the NCCL that is loaded: "2.28.3"; "" where it is not in this build.
std::string nccl_version();

/// One GPU per rank: that of `ctx`, which is current. Work runs on a stream of its own. `exchange` is called once, by all
/// ranks, and gives rank 0's text to all of them. Throws Error(rank_lost) when the others do not arrive in time or NCCL
/// fails or is not in this build, Error(gpu) when the GPU failed.
std::unique_ptr<Collectives> collectives_nccl(const Context& ctx, int rank, int ranks,
                                              const std::function<std::string(const std::string&)>& exchange,
                                              const Collectives::Options& options = {});

}  // namespace kinoe
