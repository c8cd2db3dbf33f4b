// SPDX-License-Identifier: Apache-2.0
// The tables at the end of a run, made of the results file's lines.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "session.hpp"
#include "statistics.hpp"

namespace evaluate {

namespace {

struct Prompts {
  std::map<std::string, std::vector<double>> scores;  // of each prompt, its turns
  std::int64_t correct = 0, answers = 0;
};
struct Predictions {
  double log_probability = 0;
  std::int64_t tokens = 0;
};
// A policy at a size, in the order of the file.
struct Row {
  std::string policy, removed;
  std::map<std::string, Prompts> tasks;
  std::map<std::string, Predictions> texts;
  double bytes = 0, cuts = 0;  // left of the cache, of all answers together
};

Row& row_of(std::vector<Row>& rows, const Json& line) {
  const auto policy = line["policy"].get<std::string>();
  const std::string removed = line["removed"].is_null() ? "" : line["removed"].dump();
  const auto it = std::ranges::find_if(
      rows, [&](const Row& r) { return r.policy == policy && r.removed == removed; });
  if (it != rows.end()) return *it;
  return rows.emplace_back(Row{policy, removed, {}, {}, 0, 0});
}

std::string percent(const std::string& removed) {
  return removed.empty() ? "-" : std::to_string(std::lround(100 * std::stod(removed))) + " %";
}

void print_answers(const std::vector<Row>& rows, const std::set<std::string>& shown) {
  std::size_t width = 6;
  for (const Row& r : rows) width = std::max(width, r.policy.size());
  const int w = static_cast<int>(width);
  std::printf("%-*s  removed  MiB left", w, "policy");
  for (const auto task : tasks)
    if (shown.contains(std::string(task))) std::printf("  %13s", std::string(task).c_str());
  std::printf("  mean of prompts (95 %%)\n");
  for (const Row& r : rows) {
    std::printf("%-*s  %7s  %8.1f",
                w,
                r.policy.c_str(),
                percent(r.removed).c_str(),
                r.bytes / r.cuts / 1048576);
    double found = 0;
    std::int64_t prompts = 0;
    for (const auto task : tasks) {
      if (!shown.contains(std::string(task))) continue;
      const auto it = r.tasks.find(std::string(task));
      if (it == r.tasks.end()) {
        std::printf("  %13s", "-");
        continue;
      }
      std::printf(
          "  %13s",
          (std::to_string(it->second.correct) + "/" + std::to_string(it->second.answers)).c_str());
      for (const auto& [prompt, scores] : it->second.scores) {
        double sum = 0;
        for (const double s : scores) sum += s;
        found += sum / static_cast<double>(scores.size());
        ++prompts;
      }
    }
    if (prompts > 0) {
      // Of means of prompts, each within [0, 1]; drawn again, prompts that are all alike would give an interval of no width.
      const Interval i = wilson(found, prompts);
      std::printf("  %5.1f %% (%.0f to %.0f)",
                  100 * found / static_cast<double>(prompts),
                  100 * i.low,
                  100 * i.high);
    }
    std::printf("\n");
  }
}

}  // namespace

void print_tables(const Results& results, const Suite& suite) {
  std::set<std::pair<std::string, std::int32_t>> dropped;
  std::set<std::string> wrong;  // prompts that the full cache does not answer
  for (const Json& line : results.lines()) {
    if (line["kind"] == "task" && line["dropped"].get<bool>())
      dropped.emplace(line["task"].get<std::string>(), line["length"].get<std::int32_t>());
    if (line["kind"] == "answer" && line["policy"] == "full" && !line["correct"].get<bool>())
      wrong.insert(line["prompt"].get<std::string>());
  }
  for (const Size& size : suite.sizes) {
    for (const char* question : {"known", "later"}) {
      std::vector<Row> rows;
      std::set<std::string> shown;
      for (const Json& line : results.lines()) {
        if (line["kind"] != "answer" || line["length"] != size.length ||
            line["question"] != question || wrong.contains(line["prompt"].get<std::string>()))
          continue;
        const auto task = line["task"].get<std::string>();
        if (dropped.contains({task, size.length})) continue;
        shown.insert(task);
        Row& row = row_of(rows, line);
        row.bytes += line["bytes"].get<double>(), row.cuts += 1;
        Prompts& p = row.tasks[task];
        p.scores[line["prompt"].get<std::string>()].push_back(line["score"].get<double>());
        p.correct += line["correct"].get<bool>() ? 1 : 0;
        p.answers += 1;
      }
      if (rows.empty()) continue;
      std::printf(
          "\n%d tokens, the question is %s at the cut: answers found (full answers all prompts, "
          "because only such are used)\n",
          size.length,
          std::string(question) == "known" ? "known" : "not known");
      print_answers(rows, shown);
    }
    std::vector<Row> rows;
    for (const Json& line : results.lines()) {
      if (line["kind"] != "perplexity" || line["length"] != size.length) continue;
      Predictions& p = row_of(rows, line).texts[line["task"].get<std::string>()];
      p.log_probability += line["log_probability"].get<double>();
      p.tokens += line["predictions"].get<std::int64_t>();
    }
    if (rows.empty()) continue;
    std::printf(
        "\n%d tokens read, the next 256 predicted\n%-28s  removed  perplexity  long-range "
        "perplexity\n",
        size.length,
        "policy");
    for (const Row& r : rows) {
      std::printf("%-28s  %7s", r.policy.c_str(), percent(r.removed).c_str());
      for (const char* task : {"perplexity", "long_perplexity"}) {
        const auto it = r.texts.find(task);
        if (it == r.texts.end() || it->second.tokens == 0) {
          std::printf("  %10s", "-");
        } else {
          std::printf(
              "  %10.3f",
              std::exp(-it->second.log_probability / static_cast<double>(it->second.tokens)));
        }
      }
      std::printf("\n");
    }
  }
  for (const auto& [task, length] : dropped)
    std::printf("\ndropped: %s at %d tokens, because the full cache answers less than half\n",
                task.c_str(),
                length);
  std::fflush(stdout);
}

}  // namespace evaluate
