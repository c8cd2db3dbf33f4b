// SPDX-License-Identifier: Apache-2.0
#pragma once

// What memory is worth where many streams share it, and how it goes on while a text grows.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "html.hpp"
#include "panels.hpp"
#include "results.hpp"
#include "svg.hpp"

namespace report {

namespace detail {

inline constexpr double mib = 1048576;

// Points with their names beside them; each policy has a shape of its own.
struct Dot {
  double x = 0, y = 0;
  std::size_t form = 0;
  std::string name, key, text;
};

inline std::string scatter(const std::string& title,
                           const std::string& x_name,
                           const std::vector<Dot>& dots) {
  constexpr double width = 340, height = 236;
  double right = 0, top = 0;
  for (const Dot& d : dots) right = std::max(right, d.x), top = std::max(top, d.y);
  Frame frame{.x = {0, 1, 40, width - 20},
              .y = {0, 1, height - 40, 12},
              .x_ticks = ticks_to(right),
              .y_ticks = ticks_to(top),
              .x_unit = "",
              .y_unit = ""};
  frame.x.high = frame.x_ticks.back();
  frame.y.high = frame.y_ticks.back();
  Svg svg(width, height, title + " against " + x_name);
  frame.draw(svg);
  svg.label("tick", "middle", (40 + width - 20) / 2, height - 6, x_name);
  std::vector<std::array<double, 4>> taken;  // left, top, right, bottom of what no name may cover
  for (const Dot& d : dots) {
    const double x = frame.x(d.x), y = frame.y(d.y);
    taken.push_back({x - 6, y - 6, x + 6, y + 6});
  }
  for (const Dot& d : dots) {
    const std::string name = shortened(d.name, 26);
    const double x = frame.x(d.x), y = frame.y(d.y), wide = 6.9 * static_cast<double>(name.size());
    // The nearest free place, to the right, then to the left.
    for (int k = 0; k < 30; ++k) {
      const double away = k % 2 == 0 ? 1 : -1,
                   dy = 13.0 * ((k / 2 + 1) / 2) * (k / 2 % 2 == 0 ? 1 : -1);
      const double begin = away > 0 ? x + 12 : x - 12 - wide;
      const std::array<double, 4> box{begin, y + dy - 7, begin + wide, y + dy + 6};
      const bool covers = std::any_of(taken.begin(), taken.end(), [&](const auto& t) {
        return box[0] < t[2] && t[0] < box[2] && box[1] < t[3] && t[1] < box[3];
      });
      if (k < 29 && (covers || box[0] < 34 || box[2] > width || box[1] < 2 || box[3] > height - 42))
        continue;
      taken.push_back(box);
      if (dy != 0) svg.line("lead", x + 5 * away, y, x + 11 * away, y + dy);
      svg.label("tick strong", away > 0 ? "start" : "end", x + 12 * away, y + dy + 4, name);
      break;
    }
  }
  for (const Dot& d : dots) svg.mark("a", d.form, frame.x(d.x), frame.y(d.y), d.key, d.text);
  return "<div class=panel><div class=name>" + escape(title) + "</div>" + svg.html() + "</div>\n";
}

// A trace as a line: of all values within a pixel only the first, the least, the largest and the last can be seen.
inline std::vector<Point> outline(const Trace& trace, double last) {
  constexpr double pixels = 128;
  std::vector<Point> line;
  const auto& all = trace.seen_pages;
  for (std::size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    const double column = std::floor(all[begin][0] / last * pixels);
    std::size_t low = begin, high = begin;
    for (end = begin; end < all.size() && std::floor(all[end][0] / last * pixels) == column;
         ++end) {
      if (all[end][1] < all[low][1]) low = end;
      if (all[end][1] > all[high][1]) high = end;
    }
    for (const std::size_t i : {begin, std::min(low, high), std::max(low, high), end - 1})
      line.push_back({.x = all[i][0], .y = all[i][1] * trace.page_bytes / mib});
  }
  return line;
}

}  // namespace detail

/// The figure of `batch`; empty if there are no such lines.
[[nodiscard]] inline std::string batch_figure(const Results& results) {
  if (results.batches.empty()) return "";
  Table table("streams and speed against memory",
              {"policy", "KV memory, all parts", "streams at once", "tokens/s", "requests done"});
  std::vector<std::string> policies;
  std::vector<detail::Dot> streams, speed;
  for (std::size_t i = 0; i < results.batches.size(); ++i) {
    const Batch& b = results.batches[i];
    auto of = std::find(policies.begin(), policies.end(), b.policy);
    if (of == policies.end()) of = policies.insert(of, b.policy);
    const auto form = static_cast<std::size_t>(of - policies.begin());
    const std::string key = "b-" + std::to_string(i);
    const bool timed = std::isfinite(b.tokens_per_s);
    const std::string memory = fixed(b.bytes / detail::mib) + " MiB";
    table.row(b.policy,
              {{memory, key + "x"},
               {number(b.streams, 0), key + "s"},
               {timed ? fixed(b.tokens_per_s) : "\xE2\x80\x93", timed ? key + "t" : ""},
               {std::to_string(b.done) + " of " + std::to_string(b.requests)}});
    const double x = b.bytes / detail::mib;
    streams.push_back({x,
                       b.streams,
                       form,
                       b.policy,
                       key + "s",
                       b.policy + ": " + number(b.streams, 0) + " streams in " + memory});
    if (timed) {
      speed.push_back({x,
                       b.tokens_per_s,
                       form,
                       b.policy,
                       key + "t",
                       b.policy + ": " + fixed(b.tokens_per_s) + " tokens/s in " + memory});
    }
  }
  return "<figure class=chart data-chart=batch>\n<div class=panels>\n" +
         detail::scatter("Streams at once", "KV memory, MiB", streams) +
         (speed.empty() ? "" : detail::scatter("Tokens per second", "KV memory, MiB", speed)) +
         "</div>\n<figcaption>Memory is all that a cache needs: pages, positions, scores, tables, "
         "query "
         "rings, workspace. Times are of the machine that ran it.</figcaption>\n" +
         table.html() + "</figure>\n";
}

/// The figure of `generate --trace`; empty if there are no such lines.
[[nodiscard]] inline std::string trace_figure(const Results& results) {
  if (results.traces.empty()) return "";
  Table table("memory over time", {"policy", "tokens seen", "KV pages in use", "KV memory"});
  std::vector<Series> marks, lines;
  double last = 1, most = 0;
  for (const Trace& trace : results.traces) {
    for (const auto& [seen, pages] : trace.seen_pages) {
      last = std::max(last, seen);
      most = std::max(most, pages * trace.page_bytes / detail::mib);
    }
  }
  for (std::size_t t = 0; t < results.traces.size(); ++t) {
    const Trace& trace = results.traces[t];
    lines.push_back({trace.policy, detail::outline(trace, last)});
    Series mark{trace.policy, {}};
    const std::size_t n = trace.seen_pages.size(), shown = std::min<std::size_t>(5, n);
    for (std::size_t k = 0; k < shown; ++k) {
      const auto [seen, pages] = trace.seen_pages[shown == 1 ? 0 : k * (n - 1) / (shown - 1)];
      const std::string key = "t-" + std::to_string(t) + '-' + std::to_string(k);
      const std::string memory = fixed(pages * trace.page_bytes / detail::mib, 2) + " MiB";
      table.row(trace.policy, {{number(seen, 0), key + "x"}, {number(pages, 0)}, {memory, key}});
      mark.points.push_back(
          {.x = seen,
           .y = pages * trace.page_bytes / detail::mib,
           .key = key,
           .text = trace.policy + ": " + memory + " after " + number(seen, 0) + " tokens"});
    }
    marks.push_back(std::move(mark));
  }
  return "<figure class=chart data-chart=trace>\n" +
         panel_row({.id = "tg",
                    .colour = "a",
                    .heading = "",
                    .shows = "memory over time",
                    .x_high = ticks_to(last).back(),
                    .x_unit = "",
                    .y_high = ticks_to(most).back(),
                    .y_unit = "",
                    .values = false},
                   marks,
                   lines) +
         "<figcaption>Up: MiB of keys and values in use, whole pages. Right: tokens seen. Grey: "
         "the other "
         "runs.</figcaption>\n" +
         table.html() + "</figure>\n";
}

}  // namespace report
