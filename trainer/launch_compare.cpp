// What must be the same on all ranks, and what must not: found before anything large is allocated or any number computed.
#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>

#include "trainer/launch_place.h"
#include "trainer/launch_socket.h"

namespace kinoe {
namespace {

/// Everything a rank says of itself, as texts; a text may hold anything.
struct Told {
  std::string host;
  RankFacts facts;
};

void put(std::string& bytes, const std::string& text) {
  const uint64_t size = text.size();
  bytes.append(reinterpret_cast<const char*>(&size), sizeof(size)).append(text);
}

std::string pack(const Place& place, const RankFacts& facts) {
  std::string bytes;
  for (const std::string& text :
       {place.host, facts.pci, facts.checkpoints, facts.checkpoint, facts.passed_over})
    put(bytes, text);
  for (const Facts* list : {&facts.same, &facts.data}) {
    put(bytes, cat(list->size()));
    for (const auto& [name, value] : *list) {
      put(bytes, name);
      put(bytes, value);
    }
  }
  return bytes;
}

std::string take(const std::string& bytes, size_t& at) {
  uint64_t size = 0;
  CHECK(bytes.size() - at >= sizeof(size), "facts of a rank end early");
  std::memcpy(&size, bytes.data() + at, sizeof(size));
  at += sizeof(size);
  CHECK(bytes.size() - at >= size, "facts of a rank end early");
  at += size;
  return bytes.substr(at - size, size);
}

Told unpack(const std::string& bytes) {
  Told told;
  RankFacts& facts = told.facts;
  size_t at = 0;
  for (std::string* text :
       {&told.host, &facts.pci, &facts.checkpoints, &facts.checkpoint, &facts.passed_over})
    *text = take(bytes, at);
  for (Facts* list : {&facts.same, &facts.data})
    for (size_t left = std::stoull(take(bytes, at)); left > 0; --left) {
      std::string name = take(bytes, at);
      list->emplace_back(std::move(name), take(bytes, at));
    }
  CHECK(at == bytes.size(), "facts of a rank in ", bytes.size(), " bytes, of which ", at, " are known");
  return told;
}

std::vector<Told> tell_all(Channel& channel, const Place& place, const RankFacts& facts) {
  std::vector<Told> all;
  for (const std::string& bytes : channel.exchange("facts about each rank", pack(place, facts)))
    all.push_back(unpack(bytes));
  return all;
}

/// "ranks 0-7 (n1), ranks 8-11 (n2)".
std::string who(const std::vector<Told>& all, const std::vector<int>& ranks) {
  std::vector<std::pair<std::string, std::vector<int>>> by_host;
  for (const int rank : ranks) {
    const std::string& host = all[static_cast<size_t>(rank)].host;
    const auto found =
        std::find_if(by_host.begin(), by_host.end(), [&](const auto& one) { return one.first == host; });
    if (found == by_host.end())
      by_host.push_back({host, {rank}});
    else
      found->second.push_back(rank);
  }
  std::string text;
  for (const auto& [host, here] : by_host)
    text += cat(text.empty() ? "" : ", ", here.size() == 1 ? "rank " : "ranks ", rank_ranges(here), " (",
                host, ")");
  return text;
}

/// Values in the order in which they first come, each with the ranks that have it.
using Values = std::vector<std::pair<std::string, std::vector<int>>>;
Values values_of(const std::vector<std::string>& of_each_rank) {
  Values different;
  for (size_t rank = 0; rank < of_each_rank.size(); ++rank) {
    const auto known = std::find_if(different.begin(), different.end(),
                                    [&](const auto& one) { return one.first == of_each_rank[rank]; });
    if (known == different.end())
      different.push_back({of_each_rank[rank], {static_cast<int>(rank)}});
    else
      known->second.push_back(static_cast<int>(rank));
  }
  return different;
}

/// Names in the order in which they first come, each with its values and who has them ("missing" where it is).
using Differences = std::vector<std::pair<std::string, Values>>;
Differences differences(const std::vector<Told>& all, Facts RankFacts::*list) {
  std::vector<std::string> names;
  std::map<std::string, std::vector<std::string>> values;  // of each rank
  for (size_t rank = 0; rank < all.size(); ++rank)
    for (const auto& [name, value] : all[rank].facts.*list) {
      const auto [entry, is_new] = values.try_emplace(name, all.size(), "missing");
      if (is_new) names.push_back(name);
      entry->second[rank] = value;
    }
  Differences found;
  for (const std::string& name : names)
    if (Values different = values_of(values[name]); different.size() > 1)
      found.emplace_back(name, std::move(different));
  return found;
}

std::string describe(const std::vector<Told>& all, const Values& values) {
  std::string text;
  for (const auto& [value, ranks] : values)
    text += cat(text.empty() ? "" : ", ", value.empty() ? "''" : value, " on ", who(all, ranks));
  return text;
}
std::string describe(const std::vector<Told>& all, const Differences& found) {
  std::vector<std::string> rows;
  for (const auto& [name, values] : found) rows.push_back(cat(name, ": ", describe(all, values)));
  return joined(rows);
}

std::string fact(const Told& told, const std::string& name) {
  for (const auto& [key, value] : told.facts.same)
    if (key == name) return value;
  return "";
}

std::string table_of(const std::vector<Told>& all) {
  std::vector<std::array<std::string, 6>> rows{{"rank", "host", "GPU", "driver", "NCCL", "PCI"}};
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto or_dash = [](const std::string& text) { return text.empty() ? std::string("-") : text; };
    rows.push_back({cat(rank), all[rank].host, or_dash(fact(all[rank], "GPU")),
                    or_dash(fact(all[rank], "driver")), or_dash(fact(all[rank], "NCCL")),
                    or_dash(all[rank].facts.pci)});
  }
  std::array<size_t, 6> widths{};
  for (const auto& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  // What no rank has, such as a GPU, has no column.
  const auto shown = [&](size_t column) {
    return std::any_of(rows.begin() + 1, rows.end(), [&](const auto& row) { return row[column] != "-"; });
  };
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i)
      if (shown(i)) line += row[i] + std::string(widths[i] - row[i].size() + 2, ' ');
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

/// Ends the run where ranks would go on from other checkpoints.
void compare_checkpoints(const std::vector<Told>& all) {
  std::vector<std::string> full, steps, notes;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const RankFacts& facts = all[rank].facts;
    full.push_back(facts.checkpoint);
    steps.push_back(facts.checkpoint.substr(0, facts.checkpoint.find(',')));
    if (!facts.passed_over.empty())
      notes.push_back(cat("rank ", rank, " (", all[rank].host, "): ", facts.passed_over));
  }
  const Values values = values_of(full), short_ones = values_of(steps);
  if (values.size() == 1) return;
  fail(ExitCode::checkpoint, all.front().facts.checkpoints, " is not the same everywhere: ",
       describe(all, short_ones.size() == values.size() ? short_ones : values),
       "; RUN must be on a file system that all hosts see", notes.empty() ? "" : "; ", joined(notes));
}

}  // namespace

std::string compare_ranks(Channel& channel, const Place& place, const RankFacts& facts) {
  const std::vector<Told> all = tell_all(channel, place, facts);
  for (size_t b = 1; b < all.size(); ++b)
    for (size_t a = 0; a < b; ++a)
      if (!all[a].facts.pci.empty() && all[a].facts.pci == all[b].facts.pci && all[a].host == all[b].host)
        fail(ExitCode::rank_lost, "rank ", a, " and rank ", b, " use the same GPU (", all[a].host, ", PCI ",
             all[a].facts.pci,
             "): start no more ranks on a host than it has GPUs, and let each see all of them or one of its "
             "own "
             "(CUDA_VISIBLE_DEVICES)");
  const Differences found = differences(all, &RankFacts::same);
  if (std::none_of(found.begin(), found.end(), [](const auto& one) { return one.first == "--resume"; }))
    compare_checkpoints(all);
  if (!found.empty())
    fail(ExitCode::rank_lost, "the ranks are not alike: ", describe(all, found),
         "; start the same program with the same options on machines of one kind");
  if (const Differences other = differences(all, &RankFacts::data); !other.empty())
    fail(ExitCode::data, "the ranks do not see the same data: ", describe(all, other),
         "; copy the same files to every host, or use a file system that all share");
  return table_of(all);
}

std::string program_hash() {
  const Socket file(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));  // a descriptor like any other
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(),
                                                                              XXH3_freeState);
  XXH3_64bits_reset(state.get());
  std::vector<char> buffer(1 << 20);
  for (ssize_t n = 0; file.is_open() && (n = read(file.fd(), buffer.data(), buffer.size())) > 0;)
    XXH3_64bits_update(state.get(), buffer.data(), static_cast<size_t>(n));
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx",
                static_cast<unsigned long long>(XXH3_64bits_digest(state.get())));
  return text.data();
}

}  // namespace kinoe
