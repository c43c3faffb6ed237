// The addresses at which rank 0 can be found when the launcher names none.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <memory>

#include "trainer/launch_rendezvous.h"

namespace kinoe {

std::vector<Interface> list_interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  std::vector<Interface> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    std::array<char, INET6_ADDRSTRLEN> text{};
    if (entry->ifa_addr->sa_family == AF_INET) {
      const auto* v4 = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
      inet_ntop(AF_INET, &v4->sin_addr, text.data(), text.size());
    } else if (entry->ifa_addr->sa_family == AF_INET6) {
      const auto* v6 = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr);
      if (IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) continue;  // means nothing on another host
      inet_ntop(AF_INET6, &v6->sin6_addr, text.data(), text.size());
    } else {
      continue;
    }
    found.push_back({entry->ifa_name, text.data(), (entry->ifa_flags & IFF_LOOPBACK) != 0});
  }
  // IPv4 first: it is the one that is set up everywhere.
  std::stable_partition(found.begin(), found.end(),
                        [](const Interface& one) { return one.address.find(':') == std::string::npos; });
  return found;
}

std::vector<Interface> choose_interfaces(const std::vector<Interface>& all, const std::string& filter) {
  std::vector<Interface> chosen;
  // NCCL user guide, "Environment Variables", NCCL_SOCKET_IFNAME.
  const bool exclude = filter.starts_with('^');
  std::string rest = filter.substr(exclude ? 1 : 0);
  const bool exact = rest.starts_with('=');
  if (exact) rest.erase(0, 1);
  const auto named = [&](const std::string& name) {
    for (size_t at = 0; at <= rest.size();) {
      const size_t end = std::min(rest.find(',', at), rest.size());
      const std::string item = rest.substr(at, end - at);
      if (!item.empty() && (exact ? name == item : name.starts_with(item))) return true;
      at = end + 1;
    }
    return false;
  };
  const auto bridge = [](const std::string& name) {
    return name.starts_with("docker") || name.starts_with("virbr") || name.starts_with("br-") ||
           name.starts_with("veth") || name.starts_with("cni");
  };
  for (const Interface& one : all)
    if (filter.empty() ? !one.loopback && !bridge(one.name) : named(one.name) != exclude)
      chosen.push_back(one);
  if (!chosen.empty()) return chosen;
  std::string there;
  for (const Interface& one : all)
    if (there.find(one.name + " (") == std::string::npos)
      there += cat(there.empty() ? "" : ", ", one.name, " (", one.address, ")");
  if (filter.empty())
    fail(ExitCode::rank_lost, "no network interface of this host can be reached from others; there are: ",
         there.empty() ? "none" : there, "; name one with NCCL_SOCKET_IFNAME");
  fail(ExitCode::rank_lost, "NCCL_SOCKET_IFNAME=", filter,
       " names no network interface of this host; there are: ", there.empty() ? "none" : there,
       "; set it to one of these (or unset it)");
}

}  // namespace kinoe
