// What the ranks of a run settle between them before training: devices, that they are alike, how they add.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dataloader/data_state.h"
#include "kernels/common/device.h"
#include "trainer/collectives.h"
#include "trainer/config.h"
#include "trainer/gemm_choices.h"
#include "trainer/launch.h"

namespace kinoe {

LaunchOptions launch_options(const RunConfig& config);

/// This rank's device: on a host the ranks take its GPUs in turn.
std::unique_ptr<Device> open_device(const RunConfig& config, const Place& place);

/// Ends the run on all ranks unless they have the same program, settings, data and kind of GPU, and a GPU each. Returns
/// a table of the ranks; "" for one. The first exchange of a run: from here on every rank knows that the others got so far.
/// `data`: what is trained and evaluated on; `facts`: what else this rank found under the names that it was given.
std::string compare_ranks(Team& team, const Device& device, const RunConfig& config,
                          const std::vector<const DataState*>& data, RankFacts facts);

/// Ends the run on all ranks (ExitCode::checkpoint) unless all have read the same weights from `source`: a directory of that name
/// may be another one on another host.
void compare_weights(Channel& ranks, const Place& place, const std::string& source,
                     const std::vector<float>& weights);

/// What is likely to go wrong later for want of a resource of any rank's host (launch_warnings), each sentence once a host.
/// The same on all ranks; nothing for a single process.
std::vector<std::string> host_warnings(Team& team, bool gpus);

/// NCCL between GPUs, MPI between processes on CPUs, nothing for one rank.
std::unique_ptr<Collectives> connect(Team& team, const Context& ctx);

/// Makes the connections between ranks. GB/s that each rank sends and receives while all of them add up 64 MiB; 0 for one
/// rank, and between CPUs, where nothing is to be had from it.
double measure_links(const Context& ctx, Collectives& collectives);
/// A sentence for the user where measure_links() found less than what ranks like these should have (FAULTS: NCCL falls back to
/// TCP in silence); "" else.
std::string link_warning(double gigabytes_per_s, int hosts);

/// Every rank computes matrix products as rank 0 measured them best. `rehearse`, which only rank 0 calls, uses each once.
void share_gemm_choices(Team& team, Device& device, const std::function<void()>& rehearse);

}  // namespace kinoe
