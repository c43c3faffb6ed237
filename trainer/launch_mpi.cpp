// The only file of launch that sees MPI. Every wait has a deadline: a blocking call gets a thread that ends the process,
// everything else is asked for and polled.
#include "trainer/launch_mpi.h"

#include <mpi.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "trainer/launch_end.h"
#include "trainer/launch_place.h"

namespace kinoe {
namespace {

constexpr size_t kLongestText = 4096;

/// Ends the process with one line unless it is destroyed in time.
class Deadline {
 public:
  Deadline(double seconds, std::string message) : message_(std::move(message)) {
    thread_ = std::thread([this, until = in_seconds(seconds)] {
      std::unique_lock lock(mutex_);
      if (changed_.wait_until(lock, until, [this] { return met_; })) return;
      print_error(message_);
      end_process(ExitCode::rank_lost);
    });
  }
  ~Deadline() {
    {
      const std::lock_guard lock(mutex_);
      met_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool met_ = false;
  const std::string message_;
  std::thread thread_;
};

void mpi_check(int code, const char* call, int line) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  call_failed(ExitCode::rank_lost, "MPI", call, std::string(text.data(), static_cast<size_t>(length)),
              __FILE__, line);
}
#define MPI_CHECK(call) mpi_check(call, #call, __LINE__)

}  // namespace

void mpi_begin(const Place& place, double timeout_s) {
  int begun = 0;
  MPI_Initialized(&begun);
  if (begun == 0) {
    // Rank 0 speaks first; where it does, the launcher ends the others.
    const Deadline deadline(
        timeout_s + (place.rank == 0 ? 0 : 2),
        cat("rank ", place.rank, " of ", place.ranks, " (", place.host, "): MPI_Init did not return within ",
            timeout_s,
            " s (--launch-timeout): not all ranks have come; see whether every node runs, and the "
            "network between them (mpirun --mca btl_base_verbose 30 shows what it tries)"));
    int given = 0;
    MPI_CHECK(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &given));
    CHECK(given >= MPI_THREAD_FUNNELED, "this MPI cannot be used by a program with threads (it gives level ",
          given, ")");
  }
  MPI_CHECK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
  int rank = 0, ranks = 0;
  MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
  MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
  if (ranks != place.ranks || rank != place.rank)
    fail_together(
        place,
        cat("mpirun announced ", place.ranks,
            " ranks (OMPI_COMM_WORLD_SIZE), but the MPI library of this "
            "program sees rank ",
            rank, " of ", ranks,
            ": mpirun and the library are not the same MPI; start it with the "
            "mpirun of the MPI it was built with, or build it again with that mpirun's mpicxx (MPICXX=...)"));
}

std::string mpi_from_first(const Place& place, const std::string& mine, const Patience& patience) {
  CHECK(mine.size() < kLongestText, "a text of ", mine.size(), " bytes for all ranks");
  std::array<char, kLongestText> text{};
  if (place.rank == 0) mine.copy(text.data(), text.size() - 1);
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_CHECK(MPI_Ibcast(text.data(), static_cast<int>(text.size()), MPI_CHAR, 0, MPI_COMM_WORLD, &request));
  for (int done = 0; done == 0;) {
    MPI_CHECK(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
    if (done != 0) break;
    if (seconds_until(patience.end) <= 0)
      fail(ExitCode::rank_lost, "rank ", place.rank, " (", place.host,
           ") heard nothing from rank 0 over MPI within ", patience.seconds,
           " s (--launch-timeout); see the network between the nodes");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return text.data();
}

void mpi_end() {
  int ended = 0;
  MPI_Finalized(&ended);
  if (ended == 0) MPI_CHECK(MPI_Finalize());
}

}  // namespace kinoe
