// SPDX-License-Identifier: Apache-2.0
#pragma once

// A folder for a test's files, and a program run in it to its end.

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

namespace program_test {

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  if (!out) throw std::runtime_error("the test cannot write " + path);
}

inline std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

/// The lines of a file of JSON lines.
inline std::vector<nlohmann::ordered_json> read_json_lines(const std::string& path) {
  std::vector<nlohmann::ordered_json> lines;
  std::istringstream text(read_text(path));
  for (std::string line; std::getline(text, line);) {
    lines.push_back(nlohmann::ordered_json::parse(line));
  }
  return lines;
}

/// A temporary folder, removed with the object.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "kvtrim-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("the test cannot make a folder");
    path_ = name;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }
  /// Writes a file and returns its path.
  [[nodiscard]] std::string with(const std::string& name, const std::string& text) const {
    write_text(file(name), text);
    return file(name);
  }
  [[nodiscard]] std::size_t files() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::string path_;
};

using Arguments = std::vector<std::string>;

/// A program that was started; its streams go to files.
class Process {
 public:
  Process(const Folder& folder, const std::string& program, const Arguments& arguments)
      : out_(folder.file("stdout")), err_(folder.file("stderr")) {
    std::vector<char*> argv{const_cast<char*>(program.c_str())};
    for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    constexpr int flags = O_WRONLY | O_CREAT | O_TRUNC;
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out_.c_str(), flags, 0600);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err_.c_str(), flags, 0600);
    const int failed = posix_spawn(&id_, program.c_str(), &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    if (failed != 0) throw std::runtime_error("the test cannot start " + program);
  }

  [[nodiscard]] pid_t id() const { return id_; }
  [[nodiscard]] std::string out() const { return read_text(out_); }
  [[nodiscard]] std::string err() const { return read_text(err_); }

  /// Waits for the end. \returns the exit status; -1 if a signal ended it
  int wait() {
    int status = 0;
    if (waitpid(id_, &status, 0) != id_) throw std::runtime_error("the test lost its program");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  std::string out_;
  std::string err_;
  pid_t id_ = -1;
};

/// What a program that ended left behind.
struct Result {
  int status = -1;
  std::string out;
  std::string err;
};

inline Result run_program(const std::string& program, const Arguments& arguments) {
  const Folder folder;
  Process process(folder, program, arguments);
  const int status = process.wait();
  return {status, process.out(), process.err()};
}

}  // namespace program_test
