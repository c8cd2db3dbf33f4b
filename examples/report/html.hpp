// SPDX-License-Identifier: Apache-2.0
#pragma once

// Text that comes from a file is text in the page too: everything passes `escape` on its way into it.

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace report {

/// A text as HTML, inside an element or a quoted attribute. Control characters, which HTML forbids, become U+FFFD.
[[nodiscard]] inline std::string escape(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '\n':
      case '\t':
        out += c;
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F)
          out += "\xEF\xBF\xBD";
        else
          out += c;
    }
  }
  return out;
}

/// A policy's SPEC as HTML that may break after its punctuation.
[[nodiscard]] inline std::string escape_name(std::string_view name) {
  std::string out;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name[i] != ':' && name[i] != ',' && name[i] != '=') continue;
    out += escape(name.substr(begin, i + 1 - begin)) + "<wbr>";
    begin = i + 1;
  }
  return out + escape(name.substr(begin));
}

/// A number with at most `digits` decimals, and no zeros at their end.
[[nodiscard]] inline std::string number(double value, int digits = 1) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  std::string result = text;
  if (result.find('.') != std::string::npos) {
    result.erase(result.find_last_not_of('0') + 1);
    if (result.back() == '.') result.pop_back();
  }
  return result == "-0" ? "0" : result;
}

/// A number with exactly `digits` decimals, for columns of a table.
[[nodiscard]] inline std::string fixed(double value, int digits = 1) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

/// A difference with its sign.
[[nodiscard]] inline std::string signed_number(double value, int digits) {
  const std::string text = number(std::abs(value), digits);
  return text == "0" ? text : (value < 0 ? "\xE2\x88\x92" : "+") + text;
}

/// A count with its noun: "1 prompt", "2 prompts".
[[nodiscard]] inline std::string counted(std::size_t n, std::string_view noun) {
  return std::to_string(n) + " " + std::string(noun) + (n == 1 ? "" : "s");
}

/// Names of columns or rows, for a sentence: "a, b and c".
[[nodiscard]] inline std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i)
    text += (i == 0 ? "" : i + 1 == names.size() ? " and " : ", ") + names[i];
  return text;
}

/// A cell of a table. A key names the mark of the chart that shows the same number.
struct Cell {
  std::string text;
  std::string key{};
  bool numeric = true;
};

/// The numbers of a chart, for readers and machines.
class Table {
 public:
  Table(std::string caption, std::vector<std::string> names)
      : caption_(std::move(caption)), names_(std::move(names)) {}

  /// Adds a row: a heading and its cells.
  void row(const std::string& heading, const std::vector<Cell>& cells) {
    rows_ += "<tr><th scope=row>" + escape(heading);
    for (const Cell& c : cells) {
      rows_ += c.numeric ? "<td" : "<td class=t";
      if (!c.key.empty()) rows_ += " data-key=\"" + escape(c.key) + '"';
      rows_ += '>' + escape(c.text);
    }
    rows_ += '\n';
    ++count_;
  }

  [[nodiscard]] std::size_t rows() const { return count_; }

  /// The table, closed until a reader opens it. Wide tables scroll by themselves, by keyboard too.
  [[nodiscard]] std::string html() const {
    std::string out = "<details class=data><summary>" + escape("Table: " + caption_) +
                      "</summary><div class=scroll tabindex=0 role=region aria-label=\"" +
                      escape(caption_) + "\"><table><thead><tr>";
    for (const std::string& name : names_) out += "<th scope=col>" + escape(name);
    return out + "</thead><tbody>\n" + rows_ + "</tbody></table></div></details>\n";
  }

 private:
  std::string caption_;
  std::vector<std::string> names_;
  std::string rows_;
  std::size_t count_ = 0;
};

}  // namespace report
