#include <mpi.h>

#include <cstdlib>

#include "kernels/common/check.h"
#include "test/mpi_session.h"

namespace kinoe {

bool built_with_mpi() { return true; }

void start_mpi() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized != 0) return;
  int provided = 0;
  CHECK(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided) == MPI_SUCCESS,
        "MPI_Init_thread failed");
  std::atexit([] { MPI_Finalize(); });
}

}  // namespace kinoe
