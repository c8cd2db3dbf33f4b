// SPDX-License-Identifier: Apache-2.0
#pragma once

// A policy as a word on the command line. methods.hpp names the policies, methods.cpp their keys.

#include <kvtrim/budget/rows.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "methods.hpp"
#include "spec_values.hpp"

namespace program {

/// The row of a name.
/// \throws std::invalid_argument if there is none; the text lists the names
[[nodiscard]] inline const Method& method_of(std::string_view name) {
  std::string known;
  for (const Method& m : methods()) {
    if (m.name == name) return m;
    known += (known.empty() ? "" : ", ") + std::string(m.name);
  }
  throw std::invalid_argument("unknown policy '" + std::string(name) + "'; known are " + known);
}

/// The keys of a policy, with their defaults.
[[nodiscard]] inline std::vector<SpecKey> keys_of(std::string_view name) {
  SpecValues defaults;
  static_cast<void>(method_of(name).make(defaults, {}));
  return defaults.asked();
}

/// What `--help` says about a SPEC.
[[nodiscard]] inline std::string spec_help() {
  std::string text =
      "SPEC is a name, or name:key=value,... with these keys; a first word is the default:\n";
  for (const Method& m : methods()) {
    std::string words, line = "  " + std::string(m.name);
    for (const SpecKey& key : keys_of(m.name)) words += key.name + "=" + key.values + " ";
    if (!m.note.empty()) words += "(" + std::string(m.note) + ")";
    std::istringstream in(words);
    for (std::string word; in >> word;) {
      if (line.size() + word.size() > 99) text += line + "\n", line.clear();
      line.resize(std::max<std::size_t>(line.size(), 12), ' ');
      line += " " + word;
    }
    text += line + "\n";
  }
  return text +
         "All except full also take the size: removed=0.5 (fraction of the rows that go) or "
         "budget=256 (rows).\n";
}

/// A parsed SPEC. Values are read when a policy is made from it.
class PolicySpec {
 public:
  /// \throws std::invalid_argument if the name or a key is unknown (the text lists the known ones), or a part is not key=value
  explicit PolicySpec(const std::string& text)
      : values_(text, [](const std::string& name) {
          std::vector<SpecKey> keys = keys_of(name);
          if (name != "full") keys.insert(keys.end(), {{"removed", ""}, {"budget", ""}});
          return keys;
        }) {
    SpecValues key = values_;
    double removed = 0;
    std::int64_t rows = 1;
    key("removed", removed)("budget", rows);
    if (key.has("removed") && key.has("budget"))
      key.refuse("removed and budget both fix the size; give one");
    if (!(removed >= 0 && removed <= 1)) key.fail("removed", "is not within 0 and 1");
    if (rows < 1 || rows > std::numeric_limits<std::int32_t>::max())
      key.fail("budget", "is not within 1 and 2147483647 rows");
    if (key.has("removed")) removed_ = removed;
    if (key.has("budget")) budget_ = static_cast<std::int32_t>(rows);
  }

  [[nodiscard]] const std::string& text() const noexcept { return values_.text(); }
  [[nodiscard]] const std::string& name() const noexcept { return values_.name(); }
  /// Fraction removed, if the SPEC gives one.
  [[nodiscard]] std::optional<double> removed() const noexcept { return removed_; }
  /// Whether the SPEC itself says how much stays.
  [[nodiscard]] bool has_size() const { return name() == "full" || removed_ || budget_; }
  /// Whether the method acts once, at the end of the prompt; the others keep the size while tokens are generated.
  [[nodiscard]] bool acts_once() const {
    return method_of(name()).once || values_.is("score", "surprisal");
  }

  /// Rows to keep of `rows`: the SPEC's budget (which may be above `rows`), otherwise by its fraction, otherwise by
  /// `removed_otherwise`.
  [[nodiscard]] std::int32_t rows_to_keep(std::int32_t rows, double removed_otherwise) const {
    if (name() == "full") return rows;
    if (budget_) return *budget_;
    const double fraction = removed_.value_or(removed_otherwise);
    if (name() != "chunkkv" || !values_.is("form", "chunks"))
      return kvtrim::rows_kept(rows, fraction);
    SpecValues key = values_;
    std::int32_t chunk = static_cast<std::int32_t>(kvtrim::ChunkKV<>::Params{}.chunk);
    key("chunk", chunk);
    return kvtrim::kvpress_chunk_rows(rows, fraction, std::max(1, chunk));
  }

  /// The policy that keeps `keep` rows. If that is fewer than it must protect, it is made for what it protects, and passing
  /// `keep` in `Observation::budgets` makes the library report it (`over_budget`).
  ///
  /// \param form_otherwise  form of `streaming` if the SPEC names none
  /// \param rope            the model's, for `expected`; its frequencies must outlive the policy
  /// \throws std::invalid_argument if a value is not a number, out of range, or not a known word; the text starts with the SPEC
  [[nodiscard]] AnyPolicy make(std::int32_t keep,
                               SinkForm form_otherwise,
                               const kvtrim::Rope& rope = {}) const {
    SpecValues key = values_;
    try {
      return method_of(name()).make(key, {keep, form_otherwise, rope});
    } catch (const std::invalid_argument& error) {
      const std::string what = error.what();
      if (what.starts_with(key.start())) throw;
      key.refuse(what);
    }
  }

 private:
  SpecValues values_;
  std::optional<double> removed_;
  std::optional<std::int32_t> budget_;
};

}  // namespace program
