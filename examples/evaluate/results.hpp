// SPDX-License-Identifier: Apache-2.0
#pragma once

// The results file: a line per result, on disk as soon as it is known, so that an interrupted run goes on where it was. The lines are
// described in bench/README.md.

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdio>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace evaluate {

using Json = nlohmann::ordered_json;

/// An open results file.
class Results {
 public:
  /// Opens a file, or makes it, and reads what it has. A last line without an end is dropped. The file is locked until this is
  /// destroyed, so that two runs do not write it at once.
  ///
  /// \param header  the `suite` line; written if the file is new, and again if only the commit is another
  /// \throws std::runtime_error if it cannot be read or written, another run has it, a line is broken, or it is of another model or
  ///   suite; the text has the line's number
  Results(std::string path, Json header);

  /// Appends a line, and has it written before it returns.
  /// \throws std::runtime_error if it could not be written
  void add(const Json& line);

  /// Whether a line with this identity is there: kind, task, prompt, turn, question, policy and size.
  [[nodiscard]] bool has(const Json& line) const { return keys_.contains(key_of(line)); }
  /// All lines but the headers, in order.
  [[nodiscard]] const std::vector<Json>& lines() const noexcept { return lines_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// Lines that were there before.
  [[nodiscard]] std::size_t resumed() const noexcept { return resumed_; }

 private:
  static std::string key_of(const Json& line);
  void read(const Json& header);
  void remember(Json line);

  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  std::string path_;
  std::unique_ptr<std::FILE, Close> lock_;
  std::ofstream out_;
  std::vector<Json> lines_;
  std::set<std::string> keys_;
  std::size_t resumed_ = 0;
  bool header_needed_ = true;
};

}  // namespace evaluate
