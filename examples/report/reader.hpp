// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads results files, and checks them line by line.

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "program/eval_data.hpp"
#include "program/strict.hpp"
#include "results.hpp"

namespace report {

namespace detail {

template <class T>
T value(const Json& line, const char* key) {
  try {
    return program::strict<T>(line.at(key));
  } catch (const Json::exception& error) {
    throw std::runtime_error("'" + std::string(key) + "': " + error.what());
  }
}

inline double number_in(const Json& line, const char* key, double low, double high) {
  const auto v = value<double>(line, key);
  if (!(v >= low && v <= high)) {
    throw std::runtime_error("'" + std::string(key) + "' is " + line.at(key).dump() +
                             ", not within " + Json(low).dump() + " and " + Json(high).dump());
  }
  return v;
}

inline constexpr double many = 1e15;

inline double removed_of(const Json& line) {
  return line.contains("removed") && line["removed"].is_null() ? -1
                                                               : number_in(line, "removed", 0, 1);
}

inline bool is_later(const Json& line) {
  const auto q = value<std::string>(line, "question");
  if (q != "known" && q != "later")
    throw std::runtime_error("'question' is '" + q + "', not known or later");
  return q == "later";
}

inline double kept_of(const Json& line) {
  const double before = number_in(line, "rows_before", 1, many);
  return number_in(line, "rows", 0, before) / before;
}

}  // namespace detail

/// Reads results files.
///
/// \throws std::runtime_error if a file cannot be read, a line is broken or of another model or suite (with its number), or
///         there is no result at all
class Reader {
 public:
  void read(const std::string& path) {
    trace_open_ = false;
    std::size_t lines = 0;
    program::detail::for_each_json_line(path, [&](const Json& line) {
      ++lines;
      take(line);
    });
    results_.files.emplace_back(path, lines);
  }

  /// What was read. Answers of prompts that `full` does not answer, or whose task was dropped, are left out.
  [[nodiscard]] Results finish() {
    drop_void();
    if (results_.answers.empty() && results_.perplexities.empty() && results_.batches.empty() &&
        results_.traces.empty()) {
      std::string why = "there are no results in " + std::to_string(results_.files.size()) +
                        (results_.files.size() == 1 ? " file" : " files");
      std::size_t passed = results_.left_out;
      for (const auto& [kind, n] : results_.skipped) passed += n;
      if (passed > 0) why += " (" + std::to_string(passed) + " lines do not count)";
      throw std::runtime_error(why);
    }
    return std::move(results_);
  }

 private:
  void take(const Json& line) {
    using detail::value;
    const auto kind = value<std::string>(line, "kind");
    if (kind == "suite") return suite(line);
    if (kind == "generate") return begin_trace(line);
    if (kind == "generate_token") return trace(line);
    if (kind == "batch") return batch(line);
    const bool of_evaluate = kind == "answer" || kind == "perplexity" || kind == "task" ||
                             kind == "tokens" || kind == "kept";
    if (!of_evaluate) {
      ++results_.skipped[kind];
      return;
    }
    if (results_.suite.is_null())
      throw std::runtime_error("a line of kind " + kind + " before the first of kind suite");
    if (kind == "answer") return answer(line);
    if (kind == "perplexity") return perplexity(line);
    if (kind == "task") return task(line);
    if (kind == "tokens") return tokens(line);
    kept(line);
  }

  void suite(const Json& line) {
    for (const char* key : {"version", "suite", "model", "model_hash", "dtype", "page_size"})
      if (!line.contains(key)) throw std::runtime_error("'" + std::string(key) + "' is missing");
    if (results_.suite.is_null()) results_.suite = line;
    // All but the commit; a key that only one of them has differs, too.
    std::set<std::string> keys;
    for (const Json& each : {results_.suite, line})
      for (const auto& [key, value] : each.items()) keys.insert(key);
    keys.erase("commit");
    for (const std::string& key : keys) {
      const Json first = results_.suite.value(key, Json()), other = line.value(key, Json());
      if (first == other) continue;
      throw std::runtime_error("results of another " +
                               std::string(key.starts_with("model") ? "model" : "suite") + ": '" +
                               key + "' is " + other.dump() + ", not " + first.dump());
    }
    layers_ = static_cast<std::size_t>(detail::number_in(line, "layers", 1, 1e6));
    heads_ = static_cast<std::size_t>(detail::number_in(line, "kv_heads", 1, 1e6));
    add(results_.commits, line.contains("commit") ? line["commit"].dump() : "unknown");
  }

  static void add(std::vector<std::string>& names, std::string name) {
    if (name.size() > 1 && name.front() == '"') name = name.substr(1, name.size() - 2);
    if (std::find(names.begin(), names.end(), name) == names.end())
      names.push_back(std::move(name));
  }
  std::string policy_of(const Json& line) {
    auto policy = detail::value<std::string>(line, "policy");
    if (policy != "full") add(results_.policies, policy);
    return policy;
  }
  void once(const std::string& task,
            const std::string& prompt,
            int turn,
            const std::string& policy,
            double removed,
            bool later) {
    if (!seen_.emplace(task, prompt, turn, policy, removed, later).second)
      throw std::runtime_error("this result of " + policy + " for " + prompt + " was read before");
  }

  void answer(const Json& line) {
    using detail::number_in, detail::value;
    Answer a;
    a.task = value<std::string>(line, "task");
    a.prompt = value<std::string>(line, "prompt");
    a.policy = policy_of(line);
    a.length = static_cast<std::int64_t>(number_in(line, "length", 1, detail::many));
    a.turn = static_cast<int>(number_in(line, "turn", 0, 1e6));
    a.depth = number_in(line, "depth", 0, 1);
    a.removed = detail::removed_of(line);
    a.later = detail::is_later(line);
    a.correct = value<bool>(line, "correct");
    a.score = number_in(line, "score", 0, 1);
    a.kept = detail::kept_of(line);
    a.bytes = number_in(line, "bytes", 0, detail::many);
    once(a.task, a.prompt, a.turn, a.policy, a.removed, a.later);
    if (a.policy == "full") {
      const auto [at, fresh] = full_.try_emplace({a.prompt, a.later}, a.correct);
      if (!fresh) at->second = at->second && a.correct;
    }
    results_.answers.push_back(std::move(a));
  }

  void perplexity(const Json& line) {
    using detail::number_in, detail::value;
    Perplexity p;
    p.task = value<std::string>(line, "task");
    p.prompt = value<std::string>(line, "prompt");
    p.policy = policy_of(line);
    p.removed = detail::removed_of(line);
    p.predictions = number_in(line, "predictions", 0, detail::many);
    p.log_probability = number_in(line, "log_probability", -detail::many, 0);
    p.kept = detail::kept_of(line);
    p.bytes = number_in(line, "bytes", 0, detail::many);
    once(p.task, p.prompt, 0, p.policy, p.removed, false);
    results_.perplexities.push_back(std::move(p));
  }

  void task(const Json& line) {
    using detail::value;
    TaskLine t{.task = value<std::string>(line, "task"),
               .length = value<std::int64_t>(line, "length"),
               .wanted = value<std::int64_t>(line, "wanted"),
               .drawn = value<std::int64_t>(line, "drawn"),
               .answered = value<std::int64_t>(line, "answered"),
               .used = value<std::int64_t>(line, "used"),
               .dropped = value<bool>(line, "dropped"),
               .fact_rows = line.contains("fact_rows") && line["fact_rows"].is_number()
                                ? line["fact_rows"].get<double>()
                                : 0};
    if (t.dropped) void_.emplace(t.task, t.length);
    results_.tasks.push_back(std::move(t));
  }

  void tokens(const Json& line) {
    using detail::value;
    Tokens t{.key = {value<std::string>(line, "prompt"), detail::is_later(line)},
             .task = value<std::string>(line, "task"),
             .texts = value<std::vector<std::string>>(line, "texts"),
             .facts = value<std::vector<std::array<std::size_t, 2>>>(line, "facts")};
    for (const auto& [begin, end] : t.facts) {
      if (begin > end || end > t.texts.size()) {
        throw std::runtime_error("a fact at tokens " + std::to_string(begin) + " to " +
                                 std::to_string(end) + " of " + std::to_string(t.texts.size()));
      }
    }
    results_.tokens.push_back(std::move(t));
  }

  void kept(const Json& line) {
    using detail::value;
    Kept k{.key = {value<std::string>(line, "prompt"), detail::is_later(line)},
           .policy = policy_of(line),
           .removed = detail::removed_of(line),
           .rows = value<std::vector<std::vector<std::string>>>(line, "rows")};
    const auto of = std::find_if(results_.tokens.begin(),
                                 results_.tokens.end(),
                                 [&](const auto& t) { return t.key == k.key; });
    if (of == results_.tokens.end())
      throw std::runtime_error("there is no line of kind tokens for " + k.key.first + " before it");
    const std::size_t digits = (of->texts.size() + 3) / 4;
    if (k.rows.size() != layers_)
      throw std::runtime_error(std::to_string(k.rows.size()) + " layers of a model with " +
                               std::to_string(layers_));
    for (const auto& layer : k.rows) {
      if (layer.size() != heads_)
        throw std::runtime_error(std::to_string(layer.size()) + " KV heads of a model with " +
                                 std::to_string(heads_));
      for (const std::string& head : layer) {
        if (head.size() != digits ||
            head.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos)
          throw std::runtime_error("a row of '" + head.substr(0, 20) + "', not of " +
                                   std::to_string(digits) + " hexadecimal digits");
      }
    }
    results_.kept.push_back(std::move(k));
  }

  void batch(const Json& line) {
    using detail::number_in, detail::value;
    Batch b;
    b.policy = value<std::string>(line, "policy");
    b.streams = number_in(line, "streams_at_once", 0, detail::many);
    b.done = value<std::int64_t>(line, "done");
    b.requests = value<std::int64_t>(line, "requests");
    if (line.contains("tokens_per_s") && !line["tokens_per_s"].is_null())
      b.tokens_per_s = number_in(line, "tokens_per_s", 0, detail::many);
    b.bytes = number_in(value<Json>(line, "bytes"), "sum", 0, detail::many);
    results_.batches.push_back(std::move(b));
  }

  void begin_trace(const Json& line) {
    results_.traces.push_back(
        Trace{.policy = detail::value<std::string>(line, "policy"),
              .page_bytes = detail::number_in(line, "page_bytes", 0, detail::many)});
    trace_open_ = true;
  }
  void trace(const Json& line) {
    if (!trace_open_)
      throw std::runtime_error("a line of kind generate_token before the first of kind generate");
    results_.traces.back().seen_pages.push_back(
        {detail::number_in(line, "seen", 0, detail::many),
         detail::number_in(line, "pages", 0, detail::many)});
  }

  void drop_void() {
    const auto counts = [&](const Answer& a) {
      const auto full = full_.find({a.prompt, a.later});
      return full != full_.end() && full->second && !void_.contains({a.task, a.length});
    };
    results_.left_out =
        std::erase_if(results_.answers, [&](const Answer& a) { return !counts(a); });
    std::erase_if(results_.traces, [](const Trace& t) { return t.seen_pages.empty(); });
  }

  Results results_;
  std::size_t layers_ = 0, heads_ = 0;
  bool trace_open_ = false;
  std::map<PromptKey, bool> full_;  // prompts, and whether `full` answers all their turns
  std::set<std::pair<std::string, std::int64_t>> void_;  // tasks and lengths that were dropped
  std::set<std::tuple<std::string, std::string, int, std::string, double, bool>> seen_;
};

}  // namespace report
