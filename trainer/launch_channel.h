// A Channel over the connections of a team.
#pragma once

#include <functional>

#include "trainer/channel.h"
#include "trainer/launch_socket.h"

namespace kinoe {

/// `lines`: as in Roster, of one Line. `begun` is called at the start of each exchange, with what it is about.
std::unique_ptr<Channel> make_socket_channel(int rank, const std::vector<std::string>& hosts,
                                             std::vector<Socket> lines, double timeout_s,
                                             std::function<void(const char* what)> begun);

}  // namespace kinoe
