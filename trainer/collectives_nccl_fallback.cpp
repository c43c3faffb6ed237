// What collectives.h says about NCCL in a build without it. Left out of the build when collectives_nccl.cpp is in it.
#include "trainer/collectives.h"

namespace kinoe {

std::string nccl_version() { return ""; }

std::unique_ptr<Collectives> collectives_nccl(
    const Context& /*ctx*/, int /*rank*/, int /*ranks*/,
    const std::function<std::string(const std::string&)>& /*exchange*/,
    const Collectives::Options& /*options*/) {
  fail(ExitCode::rank_lost,
       "this build has no NCCL, so GPUs can not be joined: install NCCL where nvcc finds it (libnccl-dev on "
       "Debian and "
       "Ubuntu), remove build/probe.mk, then make again");
}

}  // namespace kinoe
