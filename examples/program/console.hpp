// SPDX-License-Identifier: Apache-2.0
#pragma once

// What every program owes its user: a progress line, on a terminal only; an end on Ctrl-C that leaves no half-written file;
// and one clear line when something is wrong.

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace program {

/// Seconds since it was created.
class Stopwatch {
 public:
  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Thrown when a program notices Ctrl-C.
struct Interrupted : std::exception {
  [[nodiscard]] const char* what() const noexcept override { return "interrupted"; }
};

namespace detail {
inline volatile std::sig_atomic_t interrupted = 0;
}  // namespace detail

/// From now on `check_interrupt` notices Ctrl-C and termination requests. Call it before an `OutputFile` is created.
inline void catch_interrupt() {
  for (const int kind : {SIGINT, SIGTERM}) std::signal(kind, [](int) { detail::interrupted = 1; });
}

/// \throws Interrupted after Ctrl-C or a termination request
inline void check_interrupt() {
  if (detail::interrupted != 0) throw Interrupted();
}

/// One line on the error stream, rewritten in place; silent if that is not a terminal.
class Progress {
 public:
  Progress() : terminal_(isatty(STDERR_FILENO) != 0) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() { clear(); }

  void show(const std::string& text) {
    if (!terminal_) return;
    std::fprintf(stderr, "\r\x1b[K%s", text.c_str());
    std::fflush(stderr);
    shown_ = true;
  }
  void clear() {
    if (shown_) std::fprintf(stderr, "\r\x1b[K");
    shown_ = false;
  }

 private:
  bool terminal_;
  bool shown_ = false;
};

/// A file that appears complete or not at all: written next to its destination, renamed to it by `commit`.
class OutputFile {
 public:
  /// \throws std::runtime_error if it cannot be written
  explicit OutputFile(std::string path) : path_(std::move(path)), part_(path_ + ".part") {
    std::error_code ignored;
    // Found now, not when the file is renamed after the work is done.
    if (std::filesystem::is_directory(path_, ignored))
      throw std::runtime_error("cannot write " + path_ + ": it is a folder");
    out_.open(part_);
    if (!out_) throw std::runtime_error("cannot write " + part_);
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile() {
    std::error_code ignored;
    out_.close();
    if (!committed_) std::filesystem::remove(part_, ignored);
  }

  std::ofstream& stream() { return out_; }

  /// \throws std::runtime_error if a write failed; then whatever was at the path before is still there
  void commit() {
    out_.close();
    if (!out_) throw std::runtime_error("cannot write " + part_);
    std::error_code error;
    std::filesystem::rename(part_, path_, error);
    if (error) throw std::runtime_error("cannot write " + path_ + ": " + error.message());
    committed_ = true;
  }

 private:
  std::string path_;
  std::string part_;
  std::ofstream out_;
  bool committed_ = false;
};

/// The whole of a text file.
///
/// \throws std::runtime_error if it cannot be read
[[nodiscard]] inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  // A folder can be opened but fails at the first read; an empty file gives no character, which `<<` treats as a failure.
  if (in.peek() != std::ifstream::traits_type::eof()) text << in.rdbuf();
  if (!in.is_open() || in.bad() || text.fail()) throw std::runtime_error("cannot read " + path);
  return text.str();
}

/// Runs a program's body; an exception becomes one line and an exit status.
template <class Body>
int run(std::string_view name, Body body) {
  std::string why = "out of memory";
  int status = 1;
  try {
    return body();
  } catch (const Interrupted&) {
    status = 130, why = "interrupted; no file was written";
  } catch (const std::bad_alloc&) {
  } catch (const std::exception& error) { why = error.what(); }
  std::fprintf(stderr, "%.*s: %s\n", static_cast<int>(name.size()), name.data(), why.c_str());
  return status;
}

}  // namespace program
