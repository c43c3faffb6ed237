// Collectives between CPUs: MPI's non-blocking collectives, completed by polling.
//
// MPI starts calls side by side; the contract promises them in order. So calls wait in a queue and one at a time is
// handed to MPI, which also bounds the memory that MPI takes for intermediate sums. Large calls are cut into pieces: MPI
// counts in int (and its implementations multiply these counts by the number of ranks), and a piece bounds that memory.
//
// Same bits everywhere and every time: Open MPI's non-blocking collectives (coll/libnbc, read and tested in 4.1) run a
// schedule fixed by sizes and rank alone, never by what arrives first; every element of an all-reduce is summed on one
// path (a tree to rank 0, or around a ring) and its sum is then copied to the others.
//
// Nothing here waits inside MPI: a lost rank would hang it there. Who has to wait polls, and lets others run meanwhile:
// more ranks than cores are usual in tests. How long is too long is the watchdog's to say, who knows what the other ranks
// are doing.
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <thread>
#include <vector>

#include "trainer/collectives.h"

namespace kinoe {
namespace {

void check_mpi(int status, const char* call, const char* file, int line) {
  if (status == MPI_SUCCESS) [[likely]]
    return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(status, text.data(), &length);
  call_failed(ExitCode::rank_lost, "MPI", call, std::string(text.data(), static_cast<size_t>(length)), file,
              line);
}
#define MPI_CHECK(call) check_mpi((call), #call, __FILE__, __LINE__)

/// Integers add as unsigned ones: the same bits, and wrapping is defined.
MPI_Datatype mpi_type(DType type) {
  return type == DType::f32 ? MPI_FLOAT : type == DType::f64 ? MPI_DOUBLE : MPI_UINT64_T;
}

/// Elements [begin, begin + count) of a buffer, or of each rank's part of `part` elements.
struct Piece {
  enum class Kind : uint8_t { all_reduce, reduce_scatter, all_gather };
  Kind kind;
  Collectives::Mark number;
  DType dtype;
  char* to;
  const char* from;
  int64_t part;
  int64_t begin;
  int count;

  [[nodiscard]] char* to_at(int64_t element) const { return to + at(element); }
  [[nodiscard]] const char* from_at(int64_t element) const { return from + at(element); }

 private:
  [[nodiscard]] int64_t at(int64_t element) const { return element * static_cast<int64_t>(size_of(dtype)); }
};

class Mpi : public Collectives {
 public:
  Mpi(int rank, int ranks, const Options& options)
      : Collectives(rank, ranks, options), piece_elements_(std::min(options.piece_elements, kMostElements)) {
    requests_.reserve(static_cast<size_t>(ranks));
  }

  void follow(const Context& ctx) override { check_cpu(ctx); }

  void await(const Context& ctx, Mark mark) override {
    check_cpu(ctx);
    CHECK(mark <= traffic().calls, "mark ", mark, " of ", traffic().calls, " calls");
    int fruitless = 0;
    while (!queue_.empty() && queue_.front().number <= mark) {
      if (advance())
        fruitless = 0;
      else
        let_others_run(++fruitless);
    }
  }

  void poke() override {
    while (advance()) {
    }
  }

 protected:
  void queue_all_reduce(const Tensor& buffer) override {
    queue(Piece::Kind::all_reduce, buffer, buffer, buffer.size(), piece_elements_);
  }
  void queue_reduce_scatter(const Tensor& mine, const Tensor& all) override {
    queue(Piece::Kind::reduce_scatter, mine, all, mine.size(), piece_elements_ / ranks());
  }
  void queue_all_gather(const Tensor& all, const Tensor& mine) override {
    queue(Piece::Kind::all_gather, all, mine, mine.size(), piece_elements_ / ranks());
  }

 private:
  /// All ranks' bytes of a piece, of the largest type, are 2^30: an int counts them.
  static constexpr int64_t kMostElements = int64_t{1} << 27;

  static void check_cpu(const Context& ctx) {
    CHECK(ctx.backend == Backend::cpu, "MPI moves numbers in CPU memory only");
  }

  void queue(Piece::Kind kind, const Tensor& to, const Tensor& from, int64_t part, int64_t most) {
    most = std::max<int64_t>(most, 1);
    for (int64_t begin = 0; begin < part; begin += most)
      queue_.push_back({kind, traffic().calls, to.dtype, static_cast<char*>(to.data),
                        static_cast<const char*>(from.data), part, begin,
                        static_cast<int>(std::min(most, part - begin))});
    poke();
  }

  /// Starts the first piece in the queue, or looks whether it is done. True when it was.
  bool advance() {
    if (queue_.empty()) return false;
    if (requests_.empty()) start(queue_.front());
    int done = 0;
    MPI_CHECK(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE));
    if (done == 0) return false;
    requests_.clear();
    queue_.pop_front();
    return true;
  }

  void start(const Piece& p) {
    switch (p.kind) {
      case Piece::Kind::all_reduce:
        MPI_CHECK(MPI_Iallreduce(MPI_IN_PLACE, p.to_at(p.begin), p.count, mpi_type(p.dtype), MPI_SUM,
                                 MPI_COMM_WORLD, request()));
        break;
      case Piece::Kind::reduce_scatter: start_reduce_scatter(p); break;
      case Piece::Kind::all_gather: start_all_gather(p); break;
    }
  }

  void start_reduce_scatter(const Piece& p) {
    if (p.count == p.part) {
      MPI_CHECK(MPI_Ireduce_scatter_block(p.from, p.to, p.count, mpi_type(p.dtype), MPI_SUM, MPI_COMM_WORLD,
                                          request()));
      return;
    }
    // The ranks' pieces do not lie side by side, which that call wants: a sum to each rank instead.
    for (int root = 0; root < ranks(); ++root)
      MPI_CHECK(MPI_Ireduce(p.from_at(root * p.part + p.begin), p.to_at(p.begin), p.count, mpi_type(p.dtype),
                            MPI_SUM, root, MPI_COMM_WORLD, request()));
  }

  void start_all_gather(const Piece& p) {
    const int bytes = p.count * static_cast<int>(size_of(p.dtype));
    if (p.count == p.part) {
      MPI_CHECK(MPI_Iallgather(p.from, bytes, MPI_BYTE, p.to, bytes, MPI_BYTE, MPI_COMM_WORLD, request()));
      return;
    }
    // One element of `spaced` per rank: the bytes of its piece, then a gap up to the next rank's part.
    MPI_Datatype piece = MPI_DATATYPE_NULL, spaced = MPI_DATATYPE_NULL;
    MPI_CHECK(MPI_Type_contiguous(bytes, MPI_BYTE, &piece));
    MPI_CHECK(MPI_Type_create_resized(piece, 0, p.part * static_cast<MPI_Aint>(size_of(p.dtype)), &spaced));
    MPI_CHECK(MPI_Type_commit(&spaced));
    MPI_CHECK(MPI_Iallgather(p.from_at(p.begin), bytes, MPI_BYTE, p.to_at(p.begin), 1, spaced, MPI_COMM_WORLD,
                             request()));
    MPI_CHECK(MPI_Type_free(&spaced));
    MPI_CHECK(MPI_Type_free(&piece));
  }

  MPI_Request* request() { return &requests_.emplace_back(MPI_REQUEST_NULL); }

  /// Spins a little, then gives the core away, then sleeps: whom it waits for may need the core.
  static void let_others_run(int fruitless) {
    if (fruitless < 50) return;
    if (fruitless < 2000)
      sched_yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(100));
  }

  int64_t piece_elements_;
  std::deque<Piece> queue_;            // in order of call; the first is under way when there are requests
  std::vector<MPI_Request> requests_;  // at most one per rank: reserved, MPI keeps their addresses
};

}  // namespace

std::unique_ptr<Collectives> collectives_mpi(const Collectives::Options& options) {
  int initialized = 0, rank = 0, ranks = 0;
  MPI_CHECK(MPI_Initialized(&initialized));
  CHECK(initialized != 0, "MPI must be initialised before collectives are made on it");
  // By default an error ends the process, without a word of what was under way.
  MPI_CHECK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
  MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
  MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
  return std::make_unique<Mpi>(rank, ranks, options);
}

}  // namespace kinoe
