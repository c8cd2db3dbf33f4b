// SPDX-License-Identifier: Apache-2.0
#pragma once

// Small charts of a fixed size, which a phone shows as they are: nothing is scaled, so text stays as large as it was set.
// Colours are classes of the style sheet, which knows light and dark.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "html.hpp"

namespace report {

/// Values onto pixels.
struct Scale {
  double low = 0, high = 1;  ///< values
  double from = 0, to = 1;   ///< pixels

  [[nodiscard]] double operator()(double value) const {
    return from + (value - low) / (high - low) * (to - from);
  }
};

/// Round numbers from 0 to at least `high`, about four of them.
[[nodiscard]] inline std::vector<double> ticks_to(double high) {
  if (!(high > 0) || !std::isfinite(high)) high = 1;
  const double decade = std::pow(10, std::floor(std::log10(high / 4)));
  double step = decade;
  for (const double factor : {2.0, 5.0, 10.0})
    if (high / step > 5) step = factor * decade;
  std::vector<double> ticks{0};
  while (ticks.back() < high * (1 - 1e-9))
    ticks.push_back(step * static_cast<double>(ticks.size()));
  return ticks;
}

/// How many shapes of marks there are.
inline constexpr std::size_t shapes = 8;

/// The outline of a mark around (0, 0), 4 pixels to each side. Shapes differ where colours cannot be told apart.
[[nodiscard]] inline std::string_view shape(std::size_t index) {
  static constexpr std::array<std::string_view, shapes> outlines{
      "M4,0A4,4 0 1 1 -4,0A4,4 0 1 1 4,0Z",
      "M-3.6,-3.6H3.6V3.6H-3.6Z",
      "M0,-5L5,0L0,5L-5,0Z",
      "M0,-4.8L4.8,3.8H-4.8Z",
      "M0,4.8L4.8,-3.8H-4.8Z",
      "M-1.4,-4.5H1.4V-1.4H4.5V1.4H1.4V4.5H-1.4V1.4H-4.5V-1.4H-1.4Z",
      "M-4.6,0L-2.3,-4H2.3L4.6,0L2.3,4H-2.3Z",
      "M-4.4,-2.4L-2.4,-4.4L0,-2L2.4,-4.4L4.4,-2.4L2,0L4.4,2.4L2.4,4.4L0,2L-2.4,4.4L-4.4,2.4L-2,"
      "0Z"};
  return outlines[index % shapes];
}

/// An SVG image that is written from back to front.
class Svg {
 public:
  /// \param label  what the image shows, for a reader who does not see it
  Svg(double width, double height, std::string_view label)
      : text_("<svg width=" + number(width) + " height=" + number(height) +
              " role=img aria-label=\"" + escape(label) + "\">") {}

  void line(std::string_view css, double x1, double y1, double x2, double y2) {
    text_ += "<path class=" + std::string(css) + " d=M" + number(x1) + ',' + number(y1) + 'L' +
             number(x2) + ',' + number(y2) + "></path>";
  }
  /// A vertical interval, with its ends marked.
  void whisker(std::string_view css, double x, double y1, double y2) {
    const std::string left = number(x - 3), right = number(x + 3);
    text_ += "<path class=" + std::string(css) + " d=M" + left + ',' + number(y1) + 'H' + right +
             'M' + number(x) + ',' + number(y1) + 'V' + number(y2) + 'M' + left + ',' + number(y2) +
             'H' + right + "></path>";
  }
  /// A line through points.
  void path(std::string_view css, const std::vector<std::array<double, 2>>& points) {
    if (points.size() < 2) return;
    text_ += "<path class=" + std::string(css) + " d=";
    for (std::size_t i = 0; i < points.size(); ++i)
      text_ += (i == 0 ? 'M' : 'L') + number(points[i][0]) + ',' + number(points[i][1]);
    text_ += "></path>";
  }
  void rect(std::string_view css, double x, double y, double width, double height) {
    text_ += "<rect class=" + std::string(css) + " x=" + number(x) + " y=" + number(y) +
             " width=" + number(width) + " height=" + number(height) + "></rect>";
  }
  /// \param anchor  start, middle or end
  void label(
      std::string_view css, std::string_view anchor, double x, double y, std::string_view content) {
    text_ += "<text class=\"" + std::string(css) + ' ' + std::string(anchor) + "\" x=" + number(x) +
             " y=" + number(y) + '>' + escape(content) + "</text>";
  }
  /// A mark of data. `key` names the cell of the table with its number.
  void mark(std::string_view css,
            std::size_t form,
            double x,
            double y,
            std::string_view key,
            std::string_view title) {
    text_ += "<path class=\"m " + std::string(css) + "\" transform=translate(" + number(x) + ',' +
             number(y) + ") data-key=\"" + escape(key) + "\" d=\"" + std::string(shape(form)) +
             "\"><title>" + escape(title) + "</title></path>";
  }
  /// Markup as it is.
  void raw(std::string_view markup) { text_ += markup; }

  [[nodiscard]] std::string html() const { return text_ + "</svg>"; }

 private:
  std::string text_;
};

/// The frame of a panel: a grid line and a number per tick. The ticks say where values lie, to tests as well.
struct Frame {
  Scale x, y;
  std::vector<double> x_ticks, y_ticks;
  std::string x_unit, y_unit;  ///< after the last tick's number

  void draw(Svg& svg) const {
    for (std::size_t i = 0; i < y_ticks.size(); ++i) {
      const double at = y(y_ticks[i]);
      svg.line(i == 0 ? "axis" : "grid", x.from, at, x.to, at);
      svg.label("tick y",
                "end",
                x.from - 6,
                at + 4,
                number(y_ticks[i], 3) + (i + 1 == y_ticks.size() ? y_unit : ""));
    }
    for (std::size_t i = 0; i < x_ticks.size(); ++i) {
      const double at = x(x_ticks[i]);
      svg.line("axis", at, y.from, at, y.from + 4);
      svg.label("tick x",
                "middle",
                at,
                y.from + 17,
                number(x_ticks[i], 3) + (i + 1 == x_ticks.size() ? x_unit : ""));
    }
  }
};

/// A text that is cut to a number of bytes, never within a character.
[[nodiscard]] inline std::string shortened(const std::string& text, std::size_t most) {
  if (text.size() <= most) return text;
  std::size_t end = most - 1;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
  return text.substr(0, end) + "\xE2\x80\xA6";
}

}  // namespace report
