// SPDX-License-Identifier: Apache-2.0
#pragma once

// What happens, token by token, as JSON lines. Each has a `kind`; bench/README.md says what belongs to it.

#include <unistd.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

#include "console.hpp"

namespace program {

/// Bytes of memory that the process has at the moment; 0 where the system does not say.
[[nodiscard]] inline std::int64_t resident_bytes() {
  std::ifstream pages("/proc/self/statm");
  std::int64_t all = 0, resident = 0;
  return pages >> all >> resident ? resident * sysconf(_SC_PAGESIZE) : 0;
}

/// A file of JSON lines, complete or not there; without a name, nothing is written.
class Trace {
 public:
  /// \throws std::runtime_error if the file cannot be written
  explicit Trace(const std::string& path) {
    if (!path.empty()) file_.emplace(path);
  }
  [[nodiscard]] explicit operator bool() const noexcept { return file_.has_value(); }
  /// Writes `{"kind": kind, ...}`.
  void line(const std::string& kind, const nlohmann::ordered_json& values) {
    if (!file_) return;
    nlohmann::ordered_json line{{"kind", kind}};
    line.update(values);
    file_->stream() << line.dump() << '\n';
  }
  /// \throws std::runtime_error if a write failed
  void commit() {
    if (file_) file_->commit();
  }

 private:
  std::optional<OutputFile> file_;
};

}  // namespace program
