// What collectives.h says about MPI in a build without it. Left out of the build when collectives_mpi.cpp is in it.
#include "trainer/collectives.h"

namespace kinoe {

std::unique_ptr<Collectives> collectives_mpi(const Collectives::Options& /*options*/) {
  fail(ExitCode::rank_lost,
       "this build has no MPI, so ranks on CPUs can not be joined: run scripts/setup.sh (it installs Open "
       "MPI), then "
       "make without MPI=0");
}

}  // namespace kinoe
