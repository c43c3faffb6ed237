// run.json: what produced a run.
#include <gnu/libc-version.h>
#include <sys/utsname.h>

#include <ctime>
#include <nlohmann/json.hpp>

#include "trainer/monitor.h"

// The build gives the commit as a string: -DKINOE_COMMIT='"1a2b3c4"'.
#ifndef KINOE_COMMIT
#define KINOE_COMMIT "unknown"
#endif

namespace kinoe {
namespace {

std::string utc_time(std::time_t now) {
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

nlohmann::ordered_json object_of(const std::vector<NameValue>& pairs) {
  nlohmann::ordered_json object = nlohmann::ordered_json::object();
  for (const auto& [name, value] : pairs) object[name] = value;
  return object;
}

}  // namespace

RunRecord make_run_record(int argc, const char* const* argv) {
  RunRecord record;
  record.started = utc_time(std::time(nullptr));
  for (int i = 0; i < argc; ++i) record.command.emplace_back(argv[i]);
  record.commit = KINOE_COMMIT;
#if defined(__clang__)
  record.compiler = "clang " __clang_version__;
#else
  record.compiler = "g++ " __VERSION__;
#endif
  record.libraries.emplace_back("glibc", ::gnu_get_libc_version());
  record.libraries.emplace_back(
      "nlohmann-json",
      cat(NLOHMANN_JSON_VERSION_MAJOR, ".", NLOHMANN_JSON_VERSION_MINOR, ".", NLOHMANN_JSON_VERSION_PATCH));
  utsname system{};
  if (::uname(&system) == 0) {
    record.system = cat(system.sysname, " ", system.release, " ", system.machine);
    record.hosts.emplace_back(system.nodename);
  }
  return record;
}

std::string to_json(const RunRecord& record) {
  nlohmann::ordered_json json;
  json["started"] = record.started;
  json["command"] = record.command;
  json["commit"] = record.commit;
  json["compiler"] = record.compiler;
  json["libraries"] = object_of(record.libraries);
  json["device"] = record.device;
  json["driver"] = record.driver;
  if (!record.gpu.empty()) json["gpu"] = object_of(record.gpu);
  json["hosts"] = record.hosts;
  json["system"] = record.system;
  json["config"] = object_of(record.config);
  // Paths of a command line are bytes, JSON is UTF-8: what is not is replaced, so that the file can be read.
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace kinoe
