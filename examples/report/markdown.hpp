// SPDX-License-Identifier: Apache-2.0
#pragma once

// The main tables as Markdown, for a README.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "compare.hpp"
#include "evaluate/statistics.hpp"
#include "html.hpp"
#include "quality.hpp"
#include "results.hpp"

namespace report {

namespace detail {

/// A header and its line of dashes.
inline std::string markdown_head(const std::vector<std::string>& names) {
  std::string head = "|", line = "|";
  for (const std::string& name : names) head += " " + name + " |", line += "---|";
  return head + "\n" + line + "\n";
}

inline std::string with_interval(double value, double low, double high) {
  return number(value, 0) + " (" + number(low, 0) + "\xE2\x80\x93" + number(high, 0) + ")";
}

}  // namespace detail

/// Answers found, a table for the known question and one for the later, then perplexity retained; in percent with 95 % intervals,
/// policies in the order of the files. Where the most was asked to go, a policy is said to find more than those from which it is
/// separated, and no others.
[[nodiscard]] inline std::string markdown(const Results& results) {
  std::set<double> sizes;
  for (const Answer& a : results.answers)
    if (a.policy != "full" && a.removed >= 0) sizes.insert(a.removed);
  std::string out;
  if (!sizes.empty()) {
    const Tallies all = tally(results, "");
    for (std::size_t q = 0; q < 2; ++q) {
      std::vector<std::string> names{std::string("question ") + question_words[q]};
      for (const double removed : sizes) names.push_back(size_name(removed));
      names.push_back("at " + number(100 * *sizes.rbegin(), 1) + " % finds more than");
      out += (out.empty() ? "" : "\n") + detail::markdown_head(names);
      const auto pairs = compare(results, q == 1, *sizes.rbegin());
      for (std::size_t p = 0; p < results.policies.size(); ++p) {
        const std::string& policy = results.policies[p];
        out += "| `" + policy + "` |";
        for (const double removed : sizes) {
          const auto of = all.find(policy);
          if (of == all.end() || !of->second[q].contains(removed)) {
            out += " \xE2\x80\x93 |";
            continue;
          }
          const Tally& t = of->second[q].at(removed);
          const auto [low, high] =
              evaluate::wilson(static_cast<double>(t.right), static_cast<std::int64_t>(t.asked));
          out += " " + detail::with_interval(t.share(), 100 * low, 100 * high) + " |";
        }
        std::string less;
        for (const Comparison& c : pairs) {
          if (!c.separated() || (c.points > 0 ? c.second : c.first) != p) continue;
          less += (less.empty() ? "`" : ", `") +
                  results.policies[c.points > 0 ? c.first : c.second] + "`";
        }
        out += " " + (less.empty() ? "\xE2\x80\x93" : less) + " |\n";
      }
    }
  }
  std::vector<std::string> names{"perplexity retained"};
  std::string rows;
  std::set<double> shares;
  for (const Perplexity& p : results.perplexities)
    if (p.policy != "full" && p.removed >= 0) shares.insert(p.removed);
  for (const char* what : {"", "long-range, "})
    for (const double removed : shares) names.push_back(what + size_name(removed));
  for (const std::string& policy : results.policies) {
    rows += "| `" + policy + "` |";
    for (const char* task : perplexity_names) {
      const auto all = retained(results, task);
      for (const double removed : shares) {
        const auto of = all.find(policy);
        if (of == all.end() || !of->second.contains(removed)) {
          rows += " \xE2\x80\x93 |";
          continue;
        }
        const Retained& r = of->second.at(removed);
        const auto [low, high] = r.around();
        rows += ' ';
        rows += detail::with_interval(r.percent(), low, high);
        rows += " |";
      }
    }
    rows += "\n";
  }
  if (!shares.empty()) out += (out.empty() ? "" : "\n") + detail::markdown_head(names) + rows;
  return out;
}

}  // namespace report
