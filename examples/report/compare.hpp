// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which differences are more than chance: policies compared two at a time on the same prompts.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "evaluate/statistics.hpp"
#include "html.hpp"
#include "quality.hpp"
#include "results.hpp"
#include "svg.hpp"

namespace report {

/// Two policies on the prompts that both were given.
struct Comparison {
  std::size_t first = 0, second = 0;  ///< policies
  std::size_t both = 0, only_first = 0, only_second = 0, neither = 0;
  std::vector<evaluate::Weighted>
      differences{};            ///< by prompt: points of answers found, second minus first
  double points = 0;            ///< their mean
  evaluate::Interval around{};  ///< bootstrap over prompts
  double p = 1;                 ///< exact McNemar
  double corrected = 1;         ///< Holm, over all pairs of a setting

  [[nodiscard]] std::size_t prompts() const { return both + only_first + only_second + neither; }
  /// Whether the test and the interval both say so.
  [[nodiscard]] bool separated() const {
    return corrected < 0.05 && (around.low > 0 || around.high < 0);
  }
};

namespace detail {

// The test counts prompts, and a prompt as right if all its turns are: turns of one conversation are not independent.
struct Outcome {
  bool right = true;
  double found = 0, turns = 0;
};
using Outcomes = std::map<std::string, Outcome>;

inline std::string p_value(double p) {
  return p < 0.0001 ? "< 0.0001" : fixed(p, 4);
}

}  // namespace detail

/// All pairs of policies at one setting; policies without answers are missing.
[[nodiscard]] inline std::vector<Comparison> compare(const Results& results,
                                                     bool later,
                                                     double removed) {
  std::vector<detail::Outcomes> all(results.policies.size());
  for (const Answer& a : results.answers) {
    if (a.later != later || a.removed != removed) continue;
    const auto p = std::find(results.policies.begin(), results.policies.end(), a.policy);
    if (p == results.policies.end()) continue;
    auto& o = all[static_cast<std::size_t>(p - results.policies.begin())][a.prompt];
    o.right = o.right && a.correct;
    o.found += a.correct ? 1 : 0;
    o.turns += 1;
  }
  std::vector<Comparison> pairs;
  std::vector<double> p_values;
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t j = i + 1; j < all.size(); ++j) {
      Comparison c{.first = i, .second = j};
      for (const auto& [prompt, a] : all[i]) {
        const auto other = all[j].find(prompt);
        if (other == all[j].end() || other->second.turns != a.turns) continue;
        const auto& b = other->second;
        ++(a.right ? (b.right ? c.both : c.only_first) : (b.right ? c.only_second : c.neither));
        c.differences.push_back({100 * (b.found / b.turns - a.found / a.turns)});
      }
      if (c.prompts() == 0) continue;
      c.p = evaluate::mcnemar(static_cast<std::int64_t>(c.only_first),
                              static_cast<std::int64_t>(c.only_second));
      c.points = evaluate::mean(c.differences);
      c.around = evaluate::bootstrap(c.differences);
      p_values.push_back(c.p);
      pairs.push_back(std::move(c));
    }
  }
  const std::vector<double> corrected = evaluate::holm(p_values);
  for (std::size_t i = 0; i < pairs.size(); ++i) pairs[i].corrected = corrected[i];
  return pairs;
}

namespace detail {

// Rows and columns are policies; below the diagonal stands row minus column.
inline std::string matrix(const Results& results,
                          const std::vector<Comparison>& pairs,
                          const std::string& id) {
  std::set<std::size_t> used;
  for (const Comparison& c : pairs) used.insert({c.first, c.second});
  const std::vector<std::size_t> order(used.begin(), used.end());
  const auto place = [&](std::size_t policy) {
    return static_cast<double>(std::find(order.begin(), order.end(), policy) - order.begin());
  };
  constexpr double size = 27, left = 130, top = 4;
  const auto n = static_cast<double>(order.size());
  Svg svg(left + size * n, top + size * n, "differences between policies, in percentage points");
  for (std::size_t i = 0; i < order.size(); ++i) {
    const double at = top + size * static_cast<double>(i);
    svg.label("tick", "end", left - 6, at + 17.5, shortened(results.policies[order[i]], 18));
    svg.label("tick strong",
              "middle",
              left + size * (static_cast<double>(i) + 0.5),
              at + 17.5,
              std::to_string(order[i] + 1));
  }
  for (const Comparison& c : pairs) {
    const double x = left + size * place(c.first), y = top + size * place(c.second);
    const char* css = !c.separated() ? "same" : c.points > 0 ? "more" : "less";
    svg.raw(std::string("<g class=\"cmp ") + css + "\" data-key=" + id + '-' +
            std::to_string(c.first) + '-' + std::to_string(c.second) + "><rect x=" + number(x + 1) +
            " y=" + number(y + 1) + "></rect><text x=" + number(x + size / 2) +
            " y=" + number(y + 17.5) + '>' + signed_number(c.points, 0) + "</text></g>");
  }
  return svg.html();
}

}  // namespace detail

/// The figure of all settings; empty if there are not two policies to compare.
[[nodiscard]] inline std::string comparison_figure(const Results& results) {
  std::set<double> sizes;
  for (const Answer& a : results.answers)
    if (a.policy != "full") sizes.insert(a.removed);
  Table table("all pairs",
              {"row against column",
               "question",
               "asked to go",
               "row minus column",
               "95 % interval",
               "prompts",
               "both right",
               "only row",
               "only column",
               "neither",
               "p (McNemar)",
               "p (Holm)",
               "verdict"});
  std::string rows;
  std::size_t separated = 0, count = 0;
  for (std::size_t q = 0; q < 2; ++q) {
    std::string panels;
    std::size_t setting = 0;
    for (const double removed : sizes) {
      const std::string id = "c-" + std::to_string(q) + '-' + std::to_string(setting++);
      const std::vector<Comparison> pairs = compare(results, q == 1, removed);
      if (pairs.empty()) continue;
      for (const Comparison& c : pairs) {
        ++count;
        separated += c.separated() ? 1 : 0;
        table.row(results.policies[c.second] + " against " + results.policies[c.first],
                  {{question_words[q], "", false},
                   {size_name(removed), "", false},
                   {signed_number(c.points, 1) + " points",
                    id + '-' + std::to_string(c.first) + '-' + std::to_string(c.second)},
                   {signed_number(c.around.low, 1) + " to " + signed_number(c.around.high, 1)},
                   {std::to_string(c.prompts())},
                   {std::to_string(c.both)},
                   {std::to_string(c.only_second)},
                   {std::to_string(c.only_first)},
                   {std::to_string(c.neither)},
                   {detail::p_value(c.p)},
                   {detail::p_value(c.corrected)},
                   {c.separated() ? c.points > 0 ? "row finds more" : "column finds more"
                                  : "not separated",
                    "",
                    false}});
      }
      panels += "<div class=panel><div class=name>" + escape(size_name(removed)) + "</div>" +
                detail::matrix(results, pairs, id) + "</div>\n";
    }
    if (!panels.empty()) {
      rows += "<h4 class=row>" + escape(question_names[q]) + "</h4>\n<div class=panels>\n" +
              panels + "</div>\n";
    }
  }
  if (count == 0) return "";
  return "<p>" + std::to_string(separated) + " of " + std::to_string(count) +
         " differences are separated from chance; the others rank nothing.</p>\n"
         "<figure class=chart data-chart=compare>\n" +
         rows +
         "<figcaption>Percentage points of answers found by the row's policy, minus the column's; "
         "columns "
         "are numbered as on the diagonal. <b class=\"swatch more\">+ framed</b> the row finds "
         "more, "
         "<b class=\"swatch less\">\xE2\x88\x92 dashed</b> the column does. Those are separated: "
         "exact "
         "McNemar test on the same prompts below 0.05 after Holm's correction over the pairs of a "
         "matrix, "
         "and a bootstrap interval without 0. The test takes a prompt of several turns as found if "
         "all its "
         "answers are.</figcaption>\n" +
         table.html() + "</figure>\n";
}

}  // namespace report
