// SPDX-License-Identifier: Apache-2.0
#pragma once

// Quality against memory: over all tasks, for each task, and perplexity.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "evaluate/statistics.hpp"
#include "html.hpp"
#include "panels.hpp"
#include "results.hpp"

namespace report {

/// How much was asked to go, for people.
[[nodiscard]] inline std::string size_name(double removed) {
  return removed < 0 ? "own budget" : number(100 * removed, 1) + " % removed";
}

/// What the answers of one policy and size come to.
struct Tally {
  std::size_t right = 0, asked = 0;
  double kept = 0, bytes = 0, score = 0;  ///< sums
  std::set<std::string> prompts{};

  void add(const Answer& a) {
    right += a.correct ? 1 : 0;
    ++asked;
    kept += a.kept;
    bytes += a.bytes;
    score += a.score;
    prompts.insert(a.prompt);
  }
  [[nodiscard]] double share() const {
    return asked == 0 ? 0 : 100 * static_cast<double>(right) / static_cast<double>(asked);
  }
  [[nodiscard]] double mean(double sum) const { return sum / static_cast<double>(asked); }
};

/// By policy, question mode and share removed.
using Tallies = std::map<std::string, std::array<std::map<double, Tally>, 2>>;

/// \param task  empty: all
[[nodiscard]] inline Tallies tally(const Results& results, const std::string& task) {
  Tallies all;
  for (const Answer& a : results.answers)
    if (task.empty() || a.task == task) all[a.policy][a.later ? 1 : 0][a.removed].add(a);
  return all;
}

/// The end of the memory axis: as much as any policy keeps.
[[nodiscard]] inline double most_kept(const Results& results) {
  double most = 0.1;
  for (const Answer& a : results.answers)
    if (a.policy != "full") most = std::max(most, a.kept);
  for (const Perplexity& p : results.perplexities)
    if (p.policy != "full") most = std::max(most, p.kept);
  return std::min(100.0, std::ceil(100 * most / 10) * 10 + 5);
}

inline constexpr std::array<const char*, 2> question_names{"The question is known at the cut",
                                                           "The question comes after the cut"};
inline constexpr std::array<const char*, 2> question_words{"known", "later"};

/// The figure of a task, or of all.
///
/// \param id    unique in the page
/// \param task  empty: all
[[nodiscard]] inline std::string quality_figure(const Results& results,
                                                const std::string& id,
                                                const std::string& task) {
  const Tallies all = tally(results, task);
  Table table("answers found, with 95 % Wilson intervals",
              {"policy",
               "question",
               "asked to go",
               "rows kept",
               "KV memory",
               "answers found",
               "95 % interval",
               "found / asked",
               "mean score"});
  std::string rows;
  for (std::size_t q = 0; q < 2; ++q) {
    std::vector<Series> series;
    bool any = false;
    for (std::size_t p = 0; p < results.policies.size(); ++p) {
      Series s{results.policies[p], {}};
      if (const auto of = all.find(s.policy); of != all.end()) {
        for (const auto& [removed, t] : of->second[q]) {
          const auto [low, high] =
              evaluate::wilson(static_cast<double>(t.right), static_cast<std::int64_t>(t.asked));
          const std::string key = id + '-' + std::to_string(q) + '-' + std::to_string(p) + '-' +
                                  std::to_string(s.points.size());
          const std::string kept = fixed(100 * t.mean(t.kept)) + " %";
          const std::string interval = fixed(100 * low) + " to " + fixed(100 * high);
          const std::string of_all = std::to_string(t.right) + " / " + std::to_string(t.asked);
          table.row(s.policy,
                    {{question_words[q], "", false},
                     {size_name(removed), "", false},
                     {kept, key + "x"},
                     {fixed(t.mean(t.bytes) / 1048576, 2) + " MiB"},
                     {fixed(t.share()) + " %", key},
                     {interval},
                     {of_all},
                     {fixed(100 * t.mean(t.score)) + " %"}});
          s.points.push_back({100 * t.mean(t.kept),
                              t.share(),
                              100 * low,
                              100 * high,
                              key,
                              s.policy + ": " + fixed(t.share()) + " % found (" + of_all + "; " +
                                  interval + ") with " + kept + " of the rows"});
        }
      }
      std::sort(s.points.begin(), s.points.end(), [](const Point& a, const Point& b) {
        return a.x < b.x;
      });
      any = any || !s.points.empty();
      series.push_back(std::move(s));
    }
    if (!any) continue;
    const PanelStyle style{.id = id + "g" + std::to_string(q),
                           .colour = q == 0 ? "a" : "b",
                           .form = q == 0 ? 0U : 2U,
                           .heading = question_names[q],
                           .shows = "answers found against memory kept",
                           .x_high = most_kept(results)};
    rows += panel_row(style, series);
  }
  if (rows.empty()) return "<p class=note>No policy has answers here.</p>\n";
  return "<figure class=chart data-chart=quality>\n" + rows +
         "<figcaption>Up: answers found. Right: rows kept, in percent of the full cache. Bars: 95 "
         "% "
         "Wilson intervals. Grey: the other policies. The full cache finds 100 % by "
         "construction.</figcaption>\n" +
         table.html() + "</figure>\n";
}

/// What one policy and size say of the samples that the full cache was asked as well.
struct Retained {
  double predictions = 0, log_probability = 0, full = 0, kept = 0;
  std::vector<evaluate::Weighted>
      samples{};  ///< log-probability above that of `full`, per prediction

  /// Perplexity of the full cache as a percentage of the policy's.
  [[nodiscard]] double percent() const { return 100 * std::exp(evaluate::mean(samples)); }
  /// The interval around it.
  [[nodiscard]] evaluate::Interval around() const {
    const evaluate::Interval of = evaluate::bootstrap(samples);
    return {100 * std::exp(of.low), 100 * std::exp(of.high)};
  }
};

/// By policy and share removed.
///
/// \param task  perplexity or long_perplexity
[[nodiscard]] inline std::map<std::string, std::map<double, Retained>> retained(
    const Results& results, const std::string& task) {
  std::map<std::string, const Perplexity*> full;
  std::map<std::string, std::map<double, Retained>> all;
  for (const Perplexity& p : results.perplexities)
    if (p.task == task && p.policy == "full") full[p.prompt] = &p;
  for (const Perplexity& p : results.perplexities) {
    const auto of = full.find(p.prompt);
    if (p.task != task || p.policy == "full" || of == full.end() || p.predictions <= 0) continue;
    auto& r = all[p.policy][p.removed];
    r.predictions += p.predictions;
    r.log_probability += p.log_probability;
    r.full += of->second->log_probability;
    r.kept += p.kept;
    r.samples.push_back(
        {(p.log_probability - of->second->log_probability) / p.predictions, p.predictions});
  }
  return all;
}

/// The tasks of `retained`.
inline constexpr std::array<const char*, 2> perplexity_names{"perplexity", "long_perplexity"};

/// The figure of both perplexities; empty if there are none.
[[nodiscard]] inline std::string perplexity_figure(const Results& results) {
  static constexpr std::array<const char*, 2> headings{
      "Next token", "Next token, where the distant context matters"};
  Table table("perplexity retained",
              {"policy",
               "task",
               "asked to go",
               "rows kept",
               "perplexity",
               "of the full cache",
               "retained",
               "95 % interval",
               "samples"});
  std::string rows;
  for (std::size_t k = 0; k < 2; ++k) {
    auto all = retained(results, perplexity_names[k]);
    if (all.empty()) continue;
    std::vector<Series> series;
    for (std::size_t p = 0; p < results.policies.size(); ++p) {
      Series s{results.policies[p], {}};
      for (const auto& [removed, r] : all[s.policy]) {
        const std::string key = "p-" + std::to_string(k) + '-' + std::to_string(p) + '-' +
                                std::to_string(s.points.size());
        const double y = r.percent();
        const auto [low, high] = r.around();
        const double kept = 100 * r.kept / static_cast<double>(r.samples.size());
        table.row(s.policy,
                  {{k == 0 ? "next token" : "distant context", "", false},
                   {size_name(removed), "", false},
                   {fixed(kept) + " %", key + "x"},
                   {fixed(std::exp(-r.log_probability / r.predictions), 2)},
                   {fixed(std::exp(-r.full / r.predictions), 2)},
                   {fixed(y) + " %", key},
                   {fixed(low) + " to " + fixed(high)},
                   {std::to_string(r.samples.size())}});
        s.points.push_back(
            {kept,
             y,
             low,
             high,
             key,
             s.policy + ": " + fixed(y) + " % retained with " + fixed(kept) + " % of the rows"});
      }
      std::sort(s.points.begin(), s.points.end(), [](const Point& a, const Point& b) {
        return a.x < b.x;
      });
      series.push_back(std::move(s));
    }
    double high = 100, least = 100;
    for (const Series& s : series)
      for (const Point& p : s.points)
        high = std::max(high, std::min(p.high, 200.0)), least = std::min(least, p.low);
    rows += panel_row({.id = "pg" + std::to_string(k),
                       .colour = k == 0 ? "a" : "b",
                       .form = k == 0 ? 0U : 2U,
                       .heading = headings[k],
                       .shows = "perplexity retained against memory kept",
                       .x_high = most_kept(results),
                       .y_low = 25 * std::floor(least / 25),
                       .y_high = high > 100 ? 10 * std::ceil(high / 10) : 100},
                      series);
  }
  if (rows.empty()) return "";
  return "<figure class=chart data-chart=perplexity>\n" + rows +
         "<figcaption>Up: perplexity of the full cache as a share of the policy's; 100 % is no "
         "loss. "
         "Right: rows kept. Bars: 95 % intervals from a bootstrap over samples. The vertical axis "
         "may begin above 0.</figcaption>\n" +
         table.html() + "</figure>\n";
}

}  // namespace report
