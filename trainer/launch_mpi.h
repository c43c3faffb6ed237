// The little that a team needs of MPI: to be started by its mpirun, and to learn where rank 0 listens.
#pragma once

#include <string>

#include "trainer/launch.h"
#include "trainer/launch_socket.h"

namespace kinoe {

/// Initializes MPI for calls from the main thread. MPI_Init may wait for ever for a node that never comes: after timeout_s
/// the process ends with one line and exit code 5. Throws Error(rank_lost) when MPI does not see the ranks that the
/// launcher announced, and where this program was built without MPI.
void mpi_begin(const Place& place, double timeout_s);
/// Rank 0's text (up to 4 KiB) on all ranks. Throws Error(rank_lost) at the deadline.
std::string mpi_from_first(const Place& place, const std::string& mine, const Patience& patience);
/// Finalizes MPI. All ranks call it.
void mpi_end();

}  // namespace kinoe
