// Facts of each rank, as the others compare them.
#include "trainer/ranks.h"

#include <xxhash.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "kernels/common/simd.h"

namespace kinoe {

LaunchOptions launch_options(const RunConfig& config) {
  LaunchOptions options;
  options.launch_timeout_s = static_cast<double>(config.launch_timeout);
  options.hang_timeout_s = static_cast<double>(config.hang_timeout);
  options.expect_ranks = config.expect_ranks.value_or(0);
  return options;
}

std::unique_ptr<Device> open_device(const RunConfig& config, const Place& place) {
  if (config.device != DeviceChoice::cuda) return Device::cpu();
  // Where a launcher shows each rank one GPU of its own, that is number 0.
  return Device::gpu(place.local_rank % std::max(1, gpu_count()));
}

std::string compare_ranks(Team& team, const Device& device, const RunConfig& config,
                          const std::vector<const DataState*>& data, RankFacts facts) {
  if (team.ranks() == 1) return "";
  const DeviceInfo info = device.info();
  facts.pci = info.pci;
  const Facts found = std::move(facts.same);
  facts.same = {{"program", program_hash()},
                {"GPU", info.pci.empty() ? "" : info.name},
                {"driver", info.driver},
                {"vector units", info.pci.empty() ? vector_units() : ""},
                {"NCCL", info.pci.empty() ? "" : nccl_version()}};
  // How long a rank waits and where the run lies is its own business.
  const std::set<std::string> own = {"out", "gemm-trace", "launch-timeout", "hang-timeout", "expect-ranks"};
  for (auto& [name, value] : settings_of(config))
    if (!own.contains(name)) facts.same.emplace_back("--" + name, value);
  facts.same.insert(facts.same.end(), found.begin(), found.end());
  for (const DataState* state : data)
    for (const SourceState& source : state->sources)
      for (const FileState& file : source.files)
        facts.data.emplace_back(file.path.empty() ? source.name : file.path,
                                cat(file.bytes, " bytes, ", file.fingerprint));
  return compare_ranks(team.control(), team.place(), facts);
}

std::vector<std::string> host_warnings(Team& team, bool gpus) {
  std::vector<std::string> all;
  if (team.ranks() == 1) return all;
  std::string mine;
  for (const std::string& sentence : launch_warnings(team.place(), gpus))
    mine += cat(team.place().host, ": ", sentence, "\n");
  for (const std::string& theirs : team.control().exchange("warnings", mine)) {
    std::istringstream lines(theirs);
    for (std::string line; std::getline(lines, line);)
      if (std::find(all.begin(), all.end(), line) == all.end()) all.push_back(line);
  }
  return all;
}

void compare_weights(Channel& ranks, const Place& place, const std::string& source,
                     const std::vector<float>& weights) {
  if (ranks.ranks() == 1) return;
  const uint64_t hash = XXH3_64bits(weights.data(), weights.size() * sizeof(float));
  const std::vector<std::string> all =
      ranks.exchange("weights to start from", cat(hash, " rank ", ranks.rank(), " (", place.host, ")"));
  const auto hash_of = [](const std::string& said) { return said.substr(0, said.find(' ')); };
  const auto who = [](const std::string& said) { return said.substr(said.find(' ') + 1); };
  for (const std::string& other : all)
    if (hash_of(other) != hash_of(all.front()))
      fail(ExitCode::checkpoint, source, " holds other weights for ", who(other), " than for ",
           who(all.front()), "; copy the same files to every host, or use a file system that all share");
}

std::unique_ptr<Collectives> connect(Team& team, const Context& ctx) {
  if (team.ranks() == 1) return collectives_self();
  Collectives::Options options;
  options.reached = [&team](const char* what, int64_t number) { team.reached(what, number); };
  if (ctx.backend == Backend::cuda)
    return collectives_nccl(
        ctx, team.rank(), team.ranks(),
        [&team](const std::string& id) { return team.control().from_first("NCCL id", id); }, options);
  if (!team.has_mpi())
    fail(ExitCode::rank_lost, "ranks on CPUs add their gradients over MPI, and this run of ", team.ranks(),
         " was started by ", team.place().launcher, ": start it with mpirun (scripts/run_mpi.sh)");
  return collectives_mpi(options);
}

double measure_links(const Context& ctx, Collectives& collectives) {
  if (collectives.ranks() == 1 || ctx.backend == Backend::cpu) return 0;
  constexpr int64_t kElements = int64_t{16} << 20;
  const Memory memory = Memory::on(ctx.backend, kElements * sizeof(float));
  const Tensor buffer(memory.data(), DType::f32, {kElements});
  fill_zero(ctx, buffer.data, buffer.bytes());
  // The other collectives' connections as well: they take memory, which the plan is to count.
  const int64_t share = kElements / 2 / collectives.ranks();
  const Tensor all = buffer.slice(0, share * collectives.ranks()), mine = buffer.slice(kElements / 2, share);
  collectives.follow(ctx);
  collectives.reduce_scatter(mine, all);
  collectives.all_gather(all, mine);
  double best_ms = 0;
  for (int i = 0; i < 4; ++i) {
    Event began(ctx.backend), ended(ctx.backend);
    began.record(ctx);
    collectives.follow(ctx);
    collectives.all_reduce(buffer);
    collectives.await(ctx, collectives.mark());
    ended.record(ctx);
    ended.wait();
    const double ms = ended.ms_since(began);
    if (i > 0 && (best_ms == 0 || ms < best_ms)) best_ms = ms;
  }
  const double sent =
      2.0 * (collectives.ranks() - 1) / collectives.ranks() * static_cast<double>(buffer.bytes());
  return sent / (best_ms * 1e6);
}

std::string link_warning(double gigabytes_per_s, int hosts) {
  // NVLink 3 to 5 measure 200 to 700 GB/s and PCIe 4 about 20; a 200 Gbit/s adapter for each GPU 22, TCP on one 1 to 5.
  const double expected = hosts == 1 ? 10 : 8;
  if (gigabytes_per_s == 0 || gigabytes_per_s >= expected) return "";
  return cat("the ranks exchange only ", gigabytes_per_s, " GB/s",
             hosts == 1
                 ? " within this host: are NVLink and peer access on (nvidia-smi topo -m)?"
                 : " between hosts, as over TCP: is InfiniBand or RoCE used? NCCL_DEBUG=INFO says, and "
                   "NCCL_IB_HCA and NCCL_SOCKET_IFNAME choose");
}

void share_gemm_choices(Team& team, Device& device, const std::function<void()>& rehearse) {
  if (team.ranks() == 1 || device.gemm_key().empty()) return;
  if (team.first()) rehearse();
  const std::string choices =
      team.control().from_first("matrix products", team.first() ? to_text(device.gemm_choices()) : "");
  if (!team.first()) device.pin_gemm_choices(gemm_choices_from_text(choices));
}

}  // namespace kinoe
