// SPDX-License-Identifier: Apache-2.0
#pragma once

// What results files hold, as far as a report shows it. The lines are described in bench/README.md.

#include <nlohmann/json.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace report {

using Json = nlohmann::json;

/// A prompt, once with its question known at the cut and once with it coming later.
using PromptKey = std::pair<std::string, bool>;

/// A line of kind `answer` that counts.
struct Answer {
  std::string task, prompt, policy;
  std::int64_t length = 0;
  int turn = 0;
  double depth = 0;
  double removed = 0;  ///< share; below 0 if the SPEC has a budget
  bool later = false;
  bool correct = false;
  double score = 0;
  double kept = 1;  ///< share of the rows
  double bytes = 0;
};

struct Perplexity {
  std::string task, prompt, policy;
  double removed = 0;
  double predictions = 0;
  double log_probability = 0;
  double kept = 1;
  double bytes = 0;
};

struct TaskLine {
  std::string task;
  std::int64_t length = 0, wanted = 0, drawn = 0, answered = 0, used = 0;
  bool dropped = false;
  double fact_rows = 0;
};

/// The text of a prompt, token by token.
struct Tokens {
  PromptKey key;
  std::string task;
  std::vector<std::string> texts;
  std::vector<std::array<std::size_t, 2>> facts;
};

/// The rows that a policy kept of a prompt.
struct Kept {
  PromptKey key;
  std::string policy;
  double removed = 0;
  std::vector<std::vector<std::string>> rows;  ///< [layer][KV head], hexadecimal
};

/// The pages in use while a text is generated.
struct Trace {
  std::string policy;
  double page_bytes = 0;
  std::vector<std::array<double, 2>> seen_pages{};
};

/// A line of kind `batch`.
struct Batch {
  std::string policy;
  double bytes = 0, streams = 0, tokens_per_s = std::numeric_limits<double>::quiet_NaN();
  std::int64_t done = 0, requests = 0;
};

struct Results {
  Json suite;  ///< null if no file is of `evaluate`
  std::vector<std::string> commits;
  std::vector<std::string> policies;  ///< in the order of the files, without `full`
  std::vector<Answer> answers;        ///< of prompts that count
  std::size_t left_out = 0;           ///< answers of prompts that do not count
  std::vector<Perplexity> perplexities;
  std::vector<TaskLine> tasks;
  std::vector<Tokens> tokens;
  std::vector<Kept> kept;
  std::vector<Batch> batches;
  std::vector<Trace> traces;
  std::map<std::string, std::size_t> skipped;              ///< kinds that the report does not know
  std::vector<std::pair<std::string, std::size_t>> files;  ///< with their lines
};

}  // namespace report
