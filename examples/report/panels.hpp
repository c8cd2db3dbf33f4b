// SPDX-License-Identifier: Apache-2.0
#pragma once

// One small panel per policy: its line is drawn, those of the others stand behind it in grey. So ten policies can be looked at
// without ten colours, and each is named where it is drawn.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "html.hpp"
#include "svg.hpp"

namespace report {

/// A figure with its interval, all in the unit of the axis.
struct Point {
  double x = 0, y = 0;
  double low = 0, high = 0;
  std::string key{};   ///< of the table's cell
  std::string text{};  ///< what a pointer that rests on the mark is told
};

/// A policy's points, by rising x.
struct Series {
  std::string policy;
  std::vector<Point> points;
};

/// How a row of panels looks.
struct PanelStyle {
  std::string id;        ///< unique in the page
  std::string colour;    ///< class: a or b
  std::size_t form = 0;  ///< of the marks
  std::string heading;   ///< of the row; empty: none
  std::string shows;     ///< what an image shows, before the policy's name
  double x_high = 100;   ///< end of the axis
  std::string x_unit = "%";
  double y_low = 0, y_high = 100;
  std::string y_unit = "%";
  bool values = true;  ///< beside the marks
};

namespace detail {

inline std::vector<std::array<double, 2>> line_of(const Series& s, const Frame& frame) {
  std::vector<std::array<double, 2>> line;
  for (const Point& p : s.points) line.push_back({frame.x(p.x), frame.y(p.y)});
  return line;
}

}  // namespace detail

/// A row of panels. Every mark's key must be that of a cell of the figure's table.
///
/// \param lines  what is drawn as the line of each series where that has more points than marks; empty: through the marks
[[nodiscard]] inline std::string panel_row(const PanelStyle& style,
                                           const std::vector<Series>& all,
                                           const std::vector<Series>& lines = {}) {
  constexpr double width = 168, height = 150, left = 38;
  Frame frame{.x = {0, style.x_high, left, width - 16},
              .y = {style.y_low, style.y_high, height - 24, 12},
              .x_ticks = ticks_to(style.x_high),
              .y_ticks = ticks_to(style.y_high),
              .x_unit = style.x_unit,
              .y_unit = style.y_unit};
  if (style.y_unit == "%")
    frame.y_ticks = {style.y_low, (style.y_low + style.y_high) / 2, style.y_high};
  if (style.x_unit == "%") {
    const double step = style.x_high > 60 ? 50 : style.x_high > 25 ? 25 : 10;
    frame.x_ticks = {0, step, 2 * step};
  } else if (frame.x_ticks.size() > 4) {  // numbers that would touch
    std::vector<double> fewer;
    for (std::size_t i = 0; i < frame.x_ticks.size(); i += 2) fewer.push_back(frame.x_ticks[i]);
    frame.x_ticks = fewer;
  }
  std::erase_if(frame.x_ticks, [&](double t) { return t > style.x_high * (1 + 1e-9); });
  std::erase_if(frame.y_ticks, [&](double t) { return t > style.y_high * (1 + 1e-9); });
  const std::vector<Series>& drawn = lines.empty() ? all : lines;

  std::string out;
  if (!style.heading.empty()) {
    out += "<h4 class=row><svg width=14 height=14 aria-hidden=true><path class=\"key " +
           style.colour + "\" transform=translate(7,7) d=\"" + std::string(shape(style.form)) +
           "\"/></svg>" + escape(style.heading) + "</h4>\n";
  }
  out += "<svg class=defs width=0 height=0 aria-hidden=true><g id=" + style.id + ">";
  for (const Series& s : drawn) {
    std::string d;
    for (const auto& [x, y] : detail::line_of(s, frame))
      d += (d.empty() ? 'M' : 'L') + number(x) + ',' + number(y);
    if (!d.empty()) out += "<path class=ghost d=" + d + "></path>";
  }
  out += "</g></svg>\n<div class=panels>\n";
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Series& s = all[i];
    Svg svg(width, height, style.shows + ", " + s.policy);
    frame.draw(svg);
    svg.raw("<use href=#" + style.id + "></use>");
    svg.path(style.colour + "l", detail::line_of(drawn[i], frame));
    for (const Point& p : s.points) {
      const double x = frame.x(p.x);
      if (p.high > p.low) svg.whisker(style.colour + "w", x, frame.y(p.low), frame.y(p.high));
      svg.mark(style.colour, style.form, x, frame.y(p.y), p.key, p.text);
      const double above = frame.y(std::max(p.high, p.y)) - 8,
                   below = frame.y(std::min(p.low, p.y)) + 15;
      if (style.values) svg.label("value", "middle", x, above > 16 ? above : below, number(p.y, 0));
    }
    if (s.points.empty()) svg.label("none", "middle", (left + width - 16) / 2, 62, "no results");
    out += "<div class=panel><div class=name>" + escape_name(s.policy) + "</div>" + svg.html() +
           "</div>\n";
  }
  return out + "</div>\n";
}

}  // namespace report
