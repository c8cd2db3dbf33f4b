// SPDX-License-Identifier: Apache-2.0
#pragma once

// A word on the command line: `name` or `name:key=value,...`. Does not know what the names mean.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace program {

/// A name, and the keys that may follow it.
struct KnownName {
  std::string_view name;
  std::vector<std::string_view> keys;
};

/// Names with commas between them.
template <class Names>
std::string join(const Names& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

/// A parsed `name:key=value,...`. Values are read on request; every error starts with the whole text.
class SpecValues {
 public:
  /// \throws std::invalid_argument if the name or a key is unknown (the text lists the known ones), a key is given twice, or
  ///   a part is not key=value
  SpecValues(const std::string& text, const std::vector<KnownName>& known) : text_(text) {
    const std::size_t colon = text.find(':');
    name_ = text.substr(0, colon);
    const auto found =
        std::find_if(known.begin(), known.end(), [&](const auto& k) { return k.name == name_; });
    if (found == known.end()) {
      std::vector<std::string_view> names;
      for (const auto& k : known) names.push_back(k.name);
      throw std::invalid_argument("unknown policy '" + name_ + "'; known are " + join(names));
    }
    if (colon == std::string::npos) return;
    std::string_view rest = std::string_view(text).substr(colon + 1);
    while (!rest.empty()) {
      const std::string_view part = rest.substr(0, rest.find(','));
      rest.remove_prefix(std::min(rest.size(), part.size() + 1));
      const std::size_t equals = part.find('=');
      const std::string_view key = part.substr(0, equals);
      if (equals == std::string_view::npos || equals + 1 == part.size()) {
        throw std::invalid_argument(start() + "'" + std::string(part) + "' is not key=value");
      }
      if (std::find(found->keys.begin(), found->keys.end(), key) == found->keys.end()) {
        throw std::invalid_argument(start() + "unknown key '" + std::string(key) + "'; known are " +
                                    (found->keys.empty() ? "none" : join(found->keys)));
      }
      if (!values_.emplace(key, part.substr(equals + 1)).second) {
        throw std::invalid_argument(start() + "key '" + std::string(key) + "' is given twice");
      }
    }
  }

  [[nodiscard]] const std::string& text() const noexcept { return text_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] bool has(const std::string& key) const { return values_.contains(key); }
  /// What an error about this text starts with.
  [[nodiscard]] std::string start() const { return "policy '" + text_ + "': "; }

  /// \throws std::invalid_argument with the key's value and `what` is wrong with it
  [[noreturn]] void fail(const std::string& key, const std::string& what) const {
    throw std::invalid_argument(start() + key + "=" + values_.find(key)->second + " " + what);
  }
  [[nodiscard]] std::int64_t integer(const std::string& key, std::int64_t otherwise) const {
    return parse(key, otherwise, "is no whole number");
  }
  /// A whole number that fits an `std::int32_t`; policies check their own ranges.
  [[nodiscard]] std::int32_t integer32(const std::string& key, std::int32_t otherwise) const {
    constexpr std::int64_t most = 1 << 30;
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(integer(key, otherwise), -1, most));
  }
  [[nodiscard]] double number(const std::string& key, double otherwise) const {
    return parse(key, otherwise, "is no number");
  }
  [[nodiscard]] bool yes(const std::string& key, bool otherwise) const {
    return word<bool>(key, otherwise, {{"0", false}, {"1", true}});
  }
  template <class T>
  [[nodiscard]] T word(const std::string& key,
                       T otherwise,
                       const std::vector<std::pair<std::string_view, T>>& words) const {
    const auto it = values_.find(key);
    if (it == values_.end()) return otherwise;
    std::vector<std::string_view> names;
    for (const auto& [name, value] : words) {
      if (name == it->second) return value;
      names.push_back(name);
    }
    fail(key, "is unknown; known are " + join(names));
  }

 private:
  template <class T>
  [[nodiscard]] T parse(const std::string& key, T value, const char* what) const {
    const auto it = values_.find(key);
    if (it == values_.end()) return value;
    const char* const end = it->second.data() + it->second.size();
    const auto result = std::from_chars(it->second.data(), end, value);
    if (result.ec != std::errc() || result.ptr != end ||
        !(std::abs(static_cast<double>(value)) < 1e15))
      fail(key, what);
    return value;
  }

  std::string text_;
  std::string name_;
  std::map<std::string, std::string> values_;
};

}  // namespace program
