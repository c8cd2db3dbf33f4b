// SPDX-License-Identifier: Apache-2.0
#pragma once

// Maps of the answers found, one per policy: of all tasks, and of a task by depth and length.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "html.hpp"
#include "quality.hpp"
#include "results.hpp"
#include "svg.hpp"

namespace report {

/// A place on an axis of a map: the larger division, then the place within it. Sorted by both.
struct Place {
  double division = 0, within = 0;
  std::string division_name{}, name{};

  friend bool operator<(const Place& a, const Place& b) {
    return std::pair(a.division, a.within) < std::pair(b.division, b.within);
  }
};

/// Answers by policy, row and column.
class Heat {
 public:
  void add(const Answer& a, const Place& row, const Place& column) {
    rows_.insert(row);
    columns_.insert(column);
    auto& [right, asked] = cells_[a.policy][{row, column}];
    right += a.correct ? 1 : 0;
    ++asked;
  }

  /// \param id       unique in the page
  /// \param left     width of the rows' names
  /// \param caption  of the figure, as HTML
  [[nodiscard]] std::string figure(const Results& results,
                                   const std::string& id,
                                   double left,
                                   const std::string& title,
                                   const std::string& caption) const {
    if (cells_.empty()) return "";
    std::vector<std::string> names{"policy", "row"};
    for (const Place& c : columns_) names.push_back(c.division_name + ", " + c.name);
    Table table(title, names);
    std::string panels;
    for (std::size_t p = 0; p < results.policies.size(); ++p) {
      const auto of = cells_.find(results.policies[p]);
      if (of == cells_.end()) continue;
      panels += "<div class=panel><div class=name>" + escape_name(of->first) + "</div>" +
                map(of->first, of->second, id + '-' + std::to_string(p), left, title, table) +
                "</div>\n";
    }
    return "<figure class=chart data-chart=heat>\n<div class=panels>\n" + panels +
           "</div>\n<figcaption>" + caption + "</figcaption>\n" + table.html() + "</figure>\n";
  }

 private:
  using Cells = std::map<std::pair<Place, Place>, std::pair<std::size_t, std::size_t>>;
  static constexpr double cell_width = 27, cell_height = 17, head = 30, gap = 16;

  // A map, whose numbers become rows of the table.
  std::string map(const std::string& policy,
                  const Cells& cells,
                  const std::string& id,
                  double left,
                  const std::string& title,
                  Table& table) const {
    double height = head + cell_height * static_cast<double>(rows_.size()) + 2;
    for (auto r = rows_.begin(); r != rows_.end(); ++r) height += begins(rows_, r) ? gap : 0;
    Svg svg(left + cell_width * static_cast<double>(columns_.size()) + 2,
            height,
            title + ", " + policy);
    double x = left;
    for (auto c = columns_.begin(); c != columns_.end(); ++c, x += cell_width) {
      if (begins(columns_, c)) {
        const auto after = std::next(c);
        const bool narrow = after == columns_.end() || begins(columns_, after);
        // A percentage above a single column would touch the next.
        const std::string& name = c->division_name;
        svg.label("tick",
                  "start",
                  x + 3,
                  11,
                  narrow && name.ends_with(" %") ? name.substr(0, name.size() - 2) : name);
        svg.line("axis", x, 2, x, head - 2);
      }
      svg.label("tick", "middle", x + cell_width / 2, head - 5, c->name);
    }
    double y = head;
    std::size_t number_of_row = 0;
    for (auto r = rows_.begin(); r != rows_.end(); ++r, y += cell_height, ++number_of_row) {
      if (begins(rows_, r)) {
        svg.label("tick strong", "start", 0, y + 12, r->division_name);
        y += gap;
      }
      svg.label("tick", "end", left - 6, y + 12.5, r->name);
      x = left;
      std::vector<Cell> line{
          {r->division_name + (r->division_name.empty() ? "" : ", ") + r->name, "", false}};
      for (auto c = columns_.begin(); c != columns_.end(); ++c, x += cell_width) {
        const auto cell = cells.find({*r, *c});
        if (cell == cells.end()) {
          line.push_back({"\xE2\x80\x93"});
          continue;
        }
        const auto [right, asked] = cell->second;
        const double share = 100 * static_cast<double>(right) / static_cast<double>(asked);
        const std::string key =
            id + '-' + std::to_string(number_of_row) + '-' + std::to_string(line.size());
        svg.raw("<g class=h" + number(std::floor(share / 20), 0) + " data-key=" + key +
                "><rect x=" + number(x) + " y=" + number(y) +
                "></rect><text x=" + number(x + cell_width / 2) + " y=" + number(y + 12.5) + '>' +
                number(share, 0) + "</text></g>");
        line.push_back({number(share, 0) + " % (" + std::to_string(right) + " of " +
                            std::to_string(asked) + ")",
                        key});
      }
      table.row(policy, line);
    }
    return svg.html();
  }

  static bool begins(const std::set<Place>& places, std::set<Place>::const_iterator at) {
    return !at->division_name.empty() &&
           (at == places.begin() || std::prev(at)->division != at->division);
  }

  std::set<Place> rows_, columns_;
  std::map<std::string, Cells> cells_;
};

namespace detail {

inline std::string share_name(double removed) {
  return removed < 0 ? "own" : number(100 * removed) + " %";
}

}  // namespace detail

/// All tasks, by question mode and size.
///
/// \param titles  of the tasks, in the order to show
[[nodiscard]] inline std::string overview_figure(
    const Results& results, const std::vector<std::pair<std::string, std::string>>& titles) {
  Heat heat;
  for (const Answer& a : results.answers) {
    if (a.policy == "full") continue;
    const auto task = std::find_if(
        titles.begin(), titles.end(), [&](const auto& t) { return t.first == a.task; });
    if (task == titles.end()) continue;
    heat.add(a,
             {.within = static_cast<double>(task - titles.begin()), .name = task->second},
             {.division = a.later ? 1.0 : 0.0,
              .within = a.removed,
              .division_name = question_words[a.later ? 1 : 0],
              .name = a.removed < 0 ? "own" : number(100 * a.removed)});
  }
  return heat.figure(results,
                     "o",
                     142,
                     "answers found by task",
                     "Percent of answers found. Across: whether the question is known at the cut "
                     "or comes later, and the percentage of rows asked to go.");
}

/// A task by depth and length. Answers of several turns also stand by turn.
///
/// \param id  unique in the page
[[nodiscard]] inline std::string heat_figure(const Results& results,
                                             const std::string& id,
                                             const std::string& task) {
  Heat heat;
  for (const Answer& a : results.answers) {
    if (a.task != task || a.policy == "full") continue;
    const int quarter = std::min(3, static_cast<int>(a.depth * 4));
    const bool round = a.length % 1024 == 0;
    const Place column{
        .division = a.removed,
        .within = static_cast<double>(a.length),
        .division_name = detail::share_name(a.removed),
        .name = round ? std::to_string(a.length / 1024) + "k" : std::to_string(a.length)};
    Place row{.division = a.later ? 1.0 : 0.0,
              .within = static_cast<double>(quarter),
              .division_name = std::string("question ") + question_words[a.later ? 1 : 0],
              .name = number(25 * quarter) + "\xE2\x80\x93" + number(25 * quarter + 25) + " %"};
    heat.add(a, row, column);
    if (a.turn == 0) continue;
    row.within = 3 + a.turn;
    row.name = "turn " + std::to_string(a.turn);
    heat.add(a, row, column);
  }
  return heat.figure(
      results,
      id,
      62,
      "answers found by depth and length",
      "Percent of answers found. Down: where in the prompt the fact lies. Across: share of "
      "rows asked to go, then prompt length in tokens. A cell holds few prompts; the table "
      "says how many.");
}

}  // namespace report
