// SPDX-License-Identifier: Apache-2.0
#pragma once

// A word on the command line: `name` or `name:key=value,...`. Does not know what the names mean. Whoever asks for a key
// passes the variable that holds its default; the requests are recorded, so help and errors need no list of their own.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace program {

/// The parts of `text` between separators.
[[nodiscard]] inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

/// "a, b, c", of all names that are not empty.
[[nodiscard]] inline std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names)
    if (!name.empty()) text += (text.empty() ? "" : ", ") + name;
  return text;
}

/// A parsed `name:key=value,...`. Values are read on request; every error starts with the whole text.
class SpecValues {
 public:
  /// No text: every key has its default.
  SpecValues() = default;
  /// \param known  the keys that the text may have
  /// \throws std::invalid_argument if a key is not among them or given twice, or a part is not key=value
  SpecValues(const std::string& text, const std::vector<std::string>& known) : text_(text) {
    const std::size_t colon = std::min(text.find(':'), text.size() - 1);
    for (const std::string& part : split(text.substr(colon + 1), ',')) {
      const std::string key = part.substr(0, part.find('='));
      if (key.size() + 1 >= part.size()) refuse("'" + part + "' is not key=value");
      if (std::ranges::find(known, key) == known.end())
        refuse("unknown key '" + key + "'; known are " + (known.empty() ? "none" : listed(known)));
      if (!values_.emplace(key, part.substr(key.size() + 1)).second)
        refuse("key '" + key + "' is given twice");
    }
  }

  [[nodiscard]] const std::string& text() const noexcept { return text_; }
  [[nodiscard]] bool has(const std::string& key) const { return values_.contains(key); }
  [[nodiscard]] bool is(const std::string& key, const std::string& value) const {
    return has(key) && values_.at(key) == value;
  }
  /// \throws std::invalid_argument with the text and `what` is wrong with it
  [[noreturn]] void refuse(const std::string& what) const {
    throw std::invalid_argument("policy '" + text_ + "': " + what);
  }
  /// \throws std::invalid_argument with the key's value and `what` is wrong with it
  [[noreturn]] void fail(const std::string& key, const std::string& what) const {
    refuse(key + "=" + values_.at(key) + " " + what);
  }

  /// Reads a number; without the key, `value` stays. 32-bit whole numbers are clamped to -1..2^30: policies check their own
  /// ranges.
  template <class T>
  SpecValues& operator()(const std::string& key, T& value) {
    std::ostringstream shown;
    shown << value;
    if (!asks(key, shown.str())) return *this;
    const std::string& text = values_.at(key);
    std::conditional_t<std::is_integral_v<T>, std::int64_t, double> read{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), read);
    const bool whole = error == std::errc() && end == text.data() + text.size();
    if (!whole || !(std::abs(static_cast<double>(read)) < 1e15))
      fail(key, std::is_integral_v<T> ? "is no whole number" : "is no number");
    if constexpr (std::is_same_v<T, std::int32_t>)
      read = std::clamp<std::int64_t>(read, -1, 1 << 30);
    value = static_cast<T>(read);
    return *this;
  }
  /// Reads a switch.
  SpecValues& operator()(const std::string& key, bool& value) { return (*this)(key, value, "0|1"); }
  /// Reads one of `words`, which stand for the values 0, 1, ... of `value`; an empty word for one that is not offered.
  template <class T>
  SpecValues& operator()(const std::string& key, T& value, const std::string& words) {
    const std::vector<std::string> all = split(words, '|');
    const auto first = static_cast<std::size_t>(value);
    std::string shown = all.at(first);
    for (std::size_t i = 0; i < all.size(); ++i)
      if (i != first && !all[i].empty()) shown += "|" + all[i];
    if (!asks(key, shown)) return *this;
    const auto at = std::ranges::find(all, values_.at(key));
    if (at == all.end()) fail(key, "is unknown; known are " + listed(all));
    value = static_cast<T>(at - all.begin());
    return *this;
  }

  /// The keys that were asked for, in that order, each once, and their values as `--help` shows them: the default, or all words
  /// with the default first.
  [[nodiscard]] const std::vector<std::string>& keys() const noexcept { return keys_; }
  [[nodiscard]] const std::string& shown(const std::string& key) const { return shown_.at(key); }

 private:
  // Records the key, and says whether the text has it.
  bool asks(const std::string& key, const std::string& values) {
    if (shown_.emplace(key, values).second) keys_.push_back(key);
    return has(key);
  }

  std::string text_;
  std::map<std::string, std::string> values_;
  std::map<std::string, std::string> shown_;
  std::vector<std::string> keys_;
};

}  // namespace program
