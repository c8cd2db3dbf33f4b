// SPDX-License-Identifier: Apache-2.0
#pragma once

// A word on the command line: `name` or `name:key=value,...`. Does not know what the names mean. Whoever asks for a key
// passes the variable that holds its default; the requests are recorded, so help and errors need no list of their own.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

namespace program {

/// A key, and its values as `--help` shows them: the default, or all words with the default first.
struct SpecKey {
  std::string name;
  std::string values;
};

/// The words that a key may have, and what each means.
template <class T>
using Words = std::vector<std::pair<std::string_view, T>>;

/// A parsed `name:key=value,...`. Values are read on request; every error starts with the whole text.
class SpecValues {
 public:
  /// No text: every key has its default.
  SpecValues() = default;
  /// \param keys_of  the keys that a name may have (`SpecKey`); throws for an unknown name
  /// \throws std::invalid_argument if a key is unknown (the text lists the known ones) or given twice, or a part is not
  ///   key=value
  template <class KeysOf>
  SpecValues(const std::string& text, KeysOf keys_of)
      : text_(text), name_(text.substr(0, text.find(':'))) {
    const std::vector<SpecKey> known = keys_of(name_);
    std::string_view rest = std::string_view(text).substr(std::min(text.size(), name_.size() + 1));
    while (!rest.empty()) {
      const std::string_view part = rest.substr(0, rest.find(','));
      rest.remove_prefix(std::min(rest.size(), part.size() + 1));
      const std::string key(part.substr(0, part.find('=')));
      if (key.size() + 1 >= part.size()) refuse("'" + std::string(part) + "' is not key=value");
      if (std::none_of(known.begin(), known.end(), [&](const auto& k) { return k.name == key; })) {
        std::string names;
        for (const SpecKey& k : known) names += (names.empty() ? "" : ", ") + k.name;
        refuse("unknown key '" + key + "'; known are " + (known.empty() ? "none" : names));
      }
      if (!values_.emplace(key, part.substr(key.size() + 1)).second)
        refuse("key '" + key + "' is given twice");
    }
  }

  [[nodiscard]] const std::string& text() const noexcept { return text_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] bool has(const std::string& key) const { return values_.contains(key); }
  [[nodiscard]] bool is(const std::string& key, std::string_view value) const {
    return has(key) && values_.at(key) == value;
  }
  /// What was asked for, in that order, each key once.
  [[nodiscard]] const std::vector<SpecKey>& asked() const noexcept { return asked_; }
  /// What an error about this text starts with.
  [[nodiscard]] std::string start() const { return "policy '" + text_ + "': "; }
  /// \throws std::invalid_argument with the text and `what` is wrong with it
  [[noreturn]] void refuse(const std::string& what) const {
    throw std::invalid_argument(start() + what);
  }
  /// \throws std::invalid_argument with the key's value and `what` is wrong with it
  [[noreturn]] void fail(const std::string& key, const std::string& what) const {
    refuse(key + "=" + values_.at(key) + " " + what);
  }

  /// Reads a number, or a switch (0 or 1); without the key, `value` stays. 32-bit whole numbers are clamped to -1..2^30;
  /// policies check their own ranges.
  template <class T>
  SpecValues& operator()(const std::string& key, T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      return (*this)(key, value, {{"0", false}, {"1", true}});
    } else if constexpr (std::is_integral_v<T>) {
      const std::int64_t read =
          parse<std::int64_t>(key, static_cast<std::int64_t>(value), "whole number");
      value = static_cast<T>(sizeof(T) < 8 ? std::clamp<std::int64_t>(read, -1, 1 << 30) : read);
    } else {
      value = static_cast<T>(parse<double>(key, static_cast<double>(value), "number"));
    }
    return *this;
  }
  /// Reads one of `words`.
  template <class T>
  SpecValues& operator()(const std::string& key,
                         T& value,
                         const Words<std::type_identity_t<T>>& words) {
    std::string names, first, others;
    for (const auto& [word, meaning] : words) {
      names += (names.empty() ? "" : ", ") + std::string(word);
      if (meaning == value)
        first = word;
      else
        others += "|" + std::string(word);
    }
    ask(key, first + others);
    if (!has(key)) return *this;
    for (const auto& [word, meaning] : words) {
      if (is(key, word)) return value = meaning, *this;
    }
    fail(key, "is unknown; known are " + names);
  }

 private:
  void ask(const std::string& key, const std::string& values) {
    if (std::none_of(asked_.begin(), asked_.end(), [&](const auto& k) { return k.name == key; }))
      asked_.push_back({key, values});
  }
  template <class T>
  T parse(const std::string& key, T value, const std::string& what) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%g", static_cast<double>(value));
    ask(key, digits);
    if (!has(key)) return value;
    const std::string& text = values_.at(key);
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ec != std::errc() || result.ptr != text.data() + text.size() ||
        !(std::abs(static_cast<double>(value)) < 1e15))
      fail(key, "is no " + what);
    return value;
  }

  std::string text_;
  std::string name_;
  std::map<std::string, std::string> values_;
  std::vector<SpecKey> asked_;
};

}  // namespace program
