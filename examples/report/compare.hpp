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
  std::vector<evaluate::Weighted> differences{};  ///< by prompt, of mean scores, second minus first
  double p = 1;                                   ///< exact McNemar
  double corrected = 1;                           ///< Holm, over all pairs of a setting

  [[nodiscard]] std::size_t prompts() const { return both + only_first + only_second + neither; }
  /// First minus second, in percentage points of the prompts.
  [[nodiscard]] double points() const {
    return 100 * (static_cast<double>(only_first) - static_cast<double>(only_second)) /
           static_cast<double>(prompts());
  }
  [[nodiscard]] bool separated() const { return corrected < 0.05; }
};

namespace detail {

// A prompt is right if all its turns are: turns of one conversation are not independent.
struct Outcome {
  bool right = true;
  double score = 0, turns = 0;
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
    o.score += a.score;
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
        c.differences.push_back({100 * (b.score / b.turns - a.score / a.turns)});
      }
      if (c.prompts() == 0) continue;
      c.p = evaluate::mcnemar(static_cast<std::int64_t>(c.only_first),
                              static_cast<std::int64_t>(c.only_second));
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
    const double points = -c.points();  // the row is the second
    const char* css = !c.separated() ? "same" : points > 0 ? "more" : "less";
    svg.raw(std::string("<g class=\"cmp ") + css + "\" data-key=" + id + '-' +
            std::to_string(c.first) + '-' + std::to_string(c.second) + "><rect x=" + number(x + 1) +
            " y=" + number(y + 1) + "></rect><text x=" + number(x + size / 2) +
            " y=" + number(y + 17.5) + '>' + signed_number(points, 0) + "</text></g>");
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
               "prompts",
               "both right",
               "only row",
               "only column",
               "neither",
               "p (McNemar)",
               "p (Holm)",
               "verdict",
               "mean score, row minus column (95 %)"});
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
        const evaluate::Interval around = evaluate::bootstrap(c.differences);
        const double points = -c.points();
        table.row(
            results.policies[c.second] + " against " + results.policies[c.first],
            {{question_words[q], "", false},
             {size_name(removed), "", false},
             {signed_number(points, 1) + " points",
              id + '-' + std::to_string(c.first) + '-' + std::to_string(c.second)},
             {std::to_string(c.prompts())},
             {std::to_string(c.both)},
             {std::to_string(c.only_second)},
             {std::to_string(c.only_first)},
             {std::to_string(c.neither)},
             {detail::p_value(c.p)},
             {detail::p_value(c.corrected)},
             {c.separated() ? points > 0 ? "row finds more" : "column finds more" : "not separated",
              "",
              false},
             {signed_number(evaluate::mean(c.differences), 1) + " (" +
              signed_number(around.low, 1) + " to " + signed_number(around.high, 1) + ")"}});
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
         "<figcaption>Percentage points of prompts found by the row's policy, minus the column's; "
         "columns are numbered as on the diagonal. <b class=\"swatch more\">+ framed</b> the row "
         "finds "
         "more, <b class=\"swatch less\">\xE2\x88\x92 dashed</b> the column does: exact McNemar "
         "test on "
         "the same prompts, below 0.05 after Holm's correction over the pairs of a matrix. Plain: "
         "not "
         "separated. A prompt of several turns is found if all its answers are.</figcaption>\n" +
         table.html() + "</figure>\n";
}

}  // namespace report
