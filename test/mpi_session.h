// MPI for tests whose processes mpirun starts: mpi_session_mpi.cpp, and mpi_session_mpi_fallback.cpp in a build without.
#pragma once

namespace kinoe {

/// Whether this build has MPI at all. Calls nothing of it.
bool built_with_mpi();
/// Initialises MPI in a process that mpirun started, once; it is finalised when the process exits.
void start_mpi();

}  // namespace kinoe
