// Stands in for launch_mpi.cpp where this program is built without MPI.
#include "trainer/launch_mpi.h"
#include "trainer/launch_place.h"

namespace kinoe {

void mpi_begin(const Place& place, double /*timeout_s*/) {
  fail_together(
      place,
      cat("mpirun started ", place.ranks,
          " ranks, but this program was built without MPI: install Open MPI "
          "(libopenmpi-dev; scripts/setup.sh does) and build it again, or start it with torchrun or srun"));
}
std::string mpi_from_first(const Place& place, const std::string& /*mine*/, const Patience& /*patience*/) {
  fail_together(place, "this program was built without MPI");
}
void mpi_end() {}

}  // namespace kinoe
