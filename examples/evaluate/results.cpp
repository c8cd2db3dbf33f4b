// SPDX-License-Identifier: Apache-2.0
#include "results.hpp"

#include <sys/file.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <ios>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "program/console.hpp"
#include "program/strict.hpp"

namespace evaluate {

namespace {

// What the program reads again must be there, and be of its type.
void check(const Json& line) {
  const auto has = [&]<class T>(T, std::initializer_list<const char*> keys) {
    for (const char* key : keys) static_cast<void>(program::strict<T>(line.at(key)));
  };
  const std::string kind = line["kind"];
  if (kind == "answer") {
    has(std::string(), {"task", "prompt", "policy", "question"});
    has(double{}, {"score", "bytes"});
    has(std::int32_t{}, {"turn", "length"});
    has(bool{}, {"correct"});
    static_cast<void>(line.at("removed"));
  } else if (kind == "perplexity") {
    has(std::string(), {"task", "prompt", "policy"});
    has(double{}, {"log_probability"});
    has(std::int64_t{}, {"length", "predictions"});
    static_cast<void>(line.at("removed"));
  } else if (kind == "task") {
    has(std::string(), {"task"});
    has(std::int32_t{}, {"length"});
    has(bool{}, {"dropped"});
  }
}

}  // namespace

Results::Results(std::string path, Json header) : path_(std::move(path)) {
  std::error_code error;
  if (std::filesystem::is_directory(path_, error))
    throw std::runtime_error("cannot write " + path_ + ": it is a folder");
  // A device may have no end.
  if (std::filesystem::exists(path_, error) && !std::filesystem::is_regular_file(path_, error))
    throw std::runtime_error("cannot write " + path_ + ": it is no regular file");
  lock_.reset(std::fopen(path_.c_str(), "ab"));
  if (!lock_) throw std::runtime_error("cannot write " + path_ + ": " + std::strerror(errno));
  // A file system that knows no locks is no reason not to run.
  if (::flock(::fileno(lock_.get()), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    throw std::runtime_error("cannot write " + path_ + ": another run is writing it");
  read(header);
  out_.open(path_, std::ios::binary | std::ios::app);
  if (!out_) throw std::runtime_error("cannot write " + path_);
  if (header_needed_) add(header);
}

void Results::read(const Json& header) {
  const std::string text = program::read_file(path_);
  std::size_t number = 0, done = 0;
  bool first = true;
  for (std::size_t end = 0; (end = text.find('\n', done)) != std::string::npos; done = end + 1) {
    ++number;
    const std::string where = path_ + " line " + std::to_string(number) + ": ";
    const Json line = Json::parse(text.begin() + static_cast<std::ptrdiff_t>(done),
                                  text.begin() + static_cast<std::ptrdiff_t>(end),
                                  nullptr,
                                  false);
    if (!line.is_object() || !line.contains("kind") || !line["kind"].is_string())
      throw std::runtime_error(where + "it is no JSON object with a kind");
    if (line["kind"] == "suite") {
      for (const auto& [key, value] : header.items()) {
        const Json& there = line.contains(key) ? line[key] : Json();
        if (key == "commit" || key == "model" || there == value) continue;
        throw std::runtime_error(where + "results with " + key + " " + there.dump() + ", not " +
                                 value.dump() + "; give another --out");
      }
      header_needed_ = !line.contains("commit") || line["commit"] != header["commit"];
      first = false;
    } else if (first) {
      throw std::runtime_error(where + "it has kind " + line["kind"].dump() +
                               ", but a results file begins with kind \"suite\"");
    } else {
      try {
        check(line);
        remember(line);
      } catch (const nlohmann::json::exception& wrong) {
        throw std::runtime_error(where + wrong.what());
      }
    }
  }
  resumed_ = lines_.size();
  if (done == text.size()) return;
  std::fprintf(
      stderr, "evaluate: %s ends within line %zu, which is dropped\n", path_.c_str(), number + 1);
  std::error_code error;
  std::filesystem::resize_file(path_, done, error);
  if (error) throw std::runtime_error("cannot write " + path_ + ": " + error.message());
}

void Results::add(const Json& line) {
  // Texts may have half a character at their ends.
  out_ << line.dump(-1, ' ', false, Json::error_handler_t::replace) << '\n' << std::flush;
  if (!out_) throw std::runtime_error("cannot write " + path_);
  if (line["kind"] != "suite") remember(line);
}

void Results::remember(Json line) {
  keys_.insert(key_of(line));
  lines_.push_back(std::move(line));
}

std::string Results::key_of(const Json& line) {
  std::string key = line.at("kind").get<std::string>();
  for (const char* part : {"task", "length", "prompt", "turn", "question", "policy", "removed"}) {
    const auto it = line.find(part);
    key += '|';
    if (it != line.end() && !it->is_null()) key += it->dump();
  }
  return key;
}

}  // namespace evaluate
