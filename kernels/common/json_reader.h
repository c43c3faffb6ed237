// The keys of one JSON object of a file that this program wrote: whatever is missing, superfluous or of another type is
// named with its path, ExitCode::checkpoint.
#pragma once

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

#include "kernels/common/check.h"

namespace kinoe {

template <class Json>
class JsonReader {
 public:
  /// `where`: the file and the path to the object, "state.json: sources[0]".
  JsonReader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) refuse(where_, "an object", object);
  }

  [[nodiscard]] const std::string& where() const { return where_; }
  [[nodiscard]] std::string path(const std::string& key) const { return where_ + ": " + key; }

  const Json& at(const std::string& key) {
    taken_.insert(key);
    const auto it = object_.find(key);
    if (it == object_.end())
      fail(ExitCode::checkpoint, where_, ": the key '", key, "' is missing; the file is damaged");
    return *it;
  }
  std::string text(const std::string& key) {
    const Json& value = at(key);
    if (!value.is_string()) refuse(path(key), "a string", value);
    return value.template get<std::string>();
  }
  bool boolean(const std::string& key) {
    const Json& value = at(key);
    if (!value.is_boolean()) refuse(path(key), "true or false", value);
    return value.template get<bool>();
  }
  uint64_t natural(const std::string& key) {
    const Json& value = at(key);
    if (!value.is_number_unsigned()) refuse(path(key), "an integer of 0 or more", value);
    return value.template get<uint64_t>();
  }
  /// At most 2^`bits` - 1, so that sums of such numbers can be kept from overflowing.
  int64_t count(const std::string& key, int bits = 63) {
    const uint64_t value = natural(key);
    if (value >> bits != 0) refuse(path(key), cat("an integer below 2^", bits), object_.at(key));
    return static_cast<int64_t>(value);
  }
  double weight(const std::string& key) {
    const Json& value = at(key);
    if (!value.is_number() || !std::isfinite(value.template get<double>()) ||
        value.template get<double>() <= 0)
      refuse(path(key), "a number above 0", value);
    return value.template get<double>();
  }
  /// 16 hexadecimal digits.
  uint64_t hash(const std::string& key) { return hash_of(text(key), path(key)); }
  [[nodiscard]] static uint64_t hash_of(const std::string& digits, const std::string& what) {
    if (digits.size() != 16 || digits.find_first_not_of("0123456789abcdef") != std::string::npos)
      refuse(what, "16 hexadecimal digits in lower case", Json(digits));
    return std::stoull(digits, nullptr, 16);
  }
  const Json& list(const std::string& key, bool may_be_empty = false) {
    const Json& value = at(key);
    if (!value.is_array() || (value.empty() && !may_be_empty))
      refuse(path(key), may_be_empty ? "a list" : "a list that is not empty", value);
    return value;
  }
  const Json& object(const std::string& key) {
    const Json& value = at(key);
    if (!value.is_object()) refuse(path(key), "an object", value);
    return value;
  }
  /// A key that nobody asked for is an error too.
  void finish() const {
    for (const auto& entry : object_.items())
      if (!taken_.contains(entry.key()))
        fail(ExitCode::checkpoint, where_, ": the key '", entry.key(),
             "' is not known; the file is damaged or of a newer version");
  }

  [[noreturn]] static void refuse(const std::string& what, const std::string& expected, const Json& found) {
    fail(ExitCode::checkpoint, what, ": expected ", expected, ", found ", found.dump().substr(0, 60),
         "; the file is damaged");
  }

 private:
  const Json& object_;
  std::string where_;
  std::set<std::string> taken_;
};

}  // namespace kinoe
