// SPDX-License-Identifier: Apache-2.0
#pragma once

// The page: what was run, then the figures, from what most people ask to what few do.

#include <algorithm>
#include <array>
#include <cstddef>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "assets.hpp"
#include "compare.hpp"
#include "heat.hpp"
#include "html.hpp"
#include "kept.hpp"
#include "quality.hpp"
#include "results.hpp"
#include "serve.hpp"

namespace report {

/// No report is larger, in bytes.
inline constexpr std::size_t most_bytes = 3'000'000;

namespace detail {

struct TaskWords {
  std::string_view task, title, what;
};
inline constexpr std::array<TaskWords, 8> task_words{{
    {"needle_number", "Needle: a number", "A five-digit number stands once in a long text."},
    {"needle_word", "Needle: a word", "An ordinary word has to be found again."},
    {"needle_name", "Needle: a name", "A person's name has to be found again."},
    {"four_needles",
     "Four needles, one asked",
     "Four facts of one form; the question asks for one."},
    {"key_value", "Key and value", "A list of pairs; one key is asked for."},
    {"identifier",
     "Identifier in code",
     "A name that was defined long before has to be completed."},
    {"cued_copy", "Cued copy", "The first tokens of a passage are given; the next are scored."},
    {"multi_turn",
     "Several turns",
     "Three questions, one after the other, over one evicted cache."},
}};

// Of a task that is not known, its name.
inline TaskWords words_of(std::string_view task) {
  for (const TaskWords& w : task_words)
    if (w.task == task) return w;
  return {task, task, ""};
}

inline std::vector<std::string> tasks_of(const Results& results) {
  std::vector<std::string> tasks;
  for (const TaskWords& w : task_words) tasks.emplace_back(w.task);
  for (const Answer& a : results.answers)
    if (std::find(tasks.begin(), tasks.end(), a.task) == tasks.end()) tasks.push_back(a.task);
  std::erase_if(tasks, [&](const std::string& task) {
    return std::none_of(results.answers.begin(), results.answers.end(), [&](const Answer& a) {
      return a.task == task && a.policy != "full";
    });
  });
  return tasks;
}

inline std::string task_section(const Results& results,
                                const std::string& task,
                                std::size_t index,
                                bool heat) {
  const TaskWords words = words_of(task);
  std::string text(words.what);
  for (const TaskLine& t : results.tasks) {
    if (t.task != task) continue;
    text += " At " + std::to_string(t.length) + " tokens the full cache answers " +
            std::to_string(t.answered) + " of " + std::to_string(t.drawn) + " prompts drawn";
    text += t.dropped ? ", too few: dropped." : "; " + std::to_string(t.used) + " are used.";
    if (!t.dropped && t.fact_rows > 0) text += " The facts take " + number(t.fact_rows) + " rows.";
  }
  const std::string id = "k" + std::to_string(index);
  return "<details class=task" + std::string(index == 0 ? " open" : "") + "><summary><h3>" +
         escape(words.title) + "</h3></summary>\n<p>" + escape(text) + "</p>\n" +
         quality_figure(results, id, task) + (heat ? heat_figure(results, id + "h", task) : "") +
         "</details>\n";
}

inline std::string row_of_facts(std::string_view name, const std::string& value) {
  return "<div><dt>" + std::string(name) + "</dt><dd>" + escape(value) + "</dd></div>";
}

inline std::string plain(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// What was run, and what was passed over.
inline std::string head(const Results& results) {
  std::string out = "<dl class=facts>";
  if (!results.suite.is_null()) {
    std::set<std::string> prompts;
    for (const Answer& a : results.answers) prompts.insert(a.prompt);
    out +=
        row_of_facts("Model", plain(results.suite["model"])) +
        row_of_facts("SHA-256", plain(results.suite["model_hash"]).substr(0, 12)) +
        row_of_facts(
            "Suite",
            plain(results.suite["suite"]) + ", version " + plain(results.suite["version"])) +
        row_of_facts("Prompts", std::to_string(prompts.size())) +
        row_of_facts(
            "Cache",
            plain(results.suite["dtype"]) + ", pages of " + plain(results.suite["page_size"])) +
        row_of_facts(results.commits.size() == 1 ? "Commit" : "Commits", listed(results.commits));
  }
  out += "</dl>\n";
  std::vector<std::string> notes;
  if (!results.suite.is_null() && plain(results.suite["suite"]).starts_with("small"))
    notes.emplace_back("The small suite is a smoke test: its few prompts support no claim.");
  if (!results.suite.is_null() && results.suite.value("expect", Json()) == "full")
    notes.emplace_back(
        "An answer counts as right if it is the full cache's own, not if it is true.");
  for (const TaskLine& t : results.tasks) {
    if (t.dropped)
      notes.push_back("Dropped: " + t.task + " at " + std::to_string(t.length) +
                      " tokens, since the full cache answers only " + std::to_string(t.answered) +
                      " of " + std::to_string(t.drawn) + " prompts.");
  }
  std::set<std::size_t> counts;
  for (const auto& [policy, questions] : tally(results, ""))
    if (policy != "full")
      for (const auto& sizes : questions)
        for (const auto& [removed, t] : sizes) counts.insert(t.asked);
  if (counts.size() > 1) {
    notes.push_back("Not all policies and sizes have the same prompts: between " +
                    std::to_string(*counts.begin()) + " and " + std::to_string(*counts.rbegin()) +
                    " answers. Compare them by the pairs below, not by their shares.");
  }
  if (results.left_out > 0)
    notes.push_back(counted(results.left_out, "answer") +
                    " left out, of prompts that the full cache does not answer.");
  if (!results.skipped.empty()) {
    std::string text = "Lines of other kinds, passed over:";
    for (const auto& [kind, n] : results.skipped)
      text += " " + std::to_string(n) + " of " + kind + ",";
    text.back() = '.';
    notes.push_back(text);
  }
  if (notes.empty()) return out;
  out += "<ul class=notes>";
  for (const std::string& note : notes) out += "<li>" + escape(note) + "</li>";
  return out + "</ul>\n";
}

inline std::string section(std::string_view title,
                           const std::string& lead,
                           const std::string& body) {
  if (body.empty()) return "";
  return "<section><h2>" + std::string(title) + "</h2>\n" +
         (lead.empty() ? "" : "<p class=lead>" + lead + "</p>\n") + body + "</section>\n";
}

inline std::string page(const Results& results, bool heat) {
  const bool answers = std::any_of(results.answers.begin(),
                                   results.answers.end(),
                                   [](const auto& a) { return a.policy != "full"; });
  const std::string title =
      results.suite.is_null() ? "What a smaller cache is worth" : "What the model still knows";
  std::string out = R"(<!doctype html>
<html lang=en><head><meta charset=utf-8>
<meta name=viewport content="width=device-width, initial-scale=1">
<meta name=color-scheme content="light dark">
<link rel=icon href="data:,">
<title>)" + title + "</title>\n<style>\n";
  out += style_sheet;
  out += "</style></head><body><main>\n<header><h1>" + title +
         "</h1>\n<p class=lead>Policies evict part of the KV cache. What does that save, and what "
         "does it cost?</p>\n";
  out += head(results) + "</header>\n";
  if (answers) {
    out += section("Quality against memory",
                   "All tasks together, one panel per policy, in the order of the files.",
                   quality_figure(results, "all", ""));
    out += section("Which differences count",
                   "Two policies, the same prompts, all tasks together.",
                   comparison_figure(results));
    const auto names = tasks_of(results);
    std::vector<std::pair<std::string, std::string>> titles;
    for (const std::string& task : names) titles.emplace_back(task, words_of(task).title);
    std::string tasks = overview_figure(results, titles);
    for (std::size_t i = 0; i < names.size(); ++i)
      tasks += task_section(results, names[i], i, heat);
    if (!heat)
      tasks = "<p class=note>The heat maps are left out, for the page's size.</p>\n" + tasks;
    out += section("Task by task", "", tasks);
  }
  out += section(
      "Perplexity", "How well the text after the cut is predicted.", perplexity_figure(results));
  out += "\x01";  // what was kept, as far as there is room
  out += section("Many streams over one pool", "", batch_figure(results));
  out += section("Memory over time", "", trace_figure(results));
  std::string files = "<ul class=plain>";
  for (const auto& [path, lines] : results.files)
    files += "<li>" + escape(path) + ": " + counted(lines, "line") + "</li>";
  out += section("Read from", "", files + "</ul>\n");
  return out + "</main>\n<script>\n" + std::string(script) + "</script>\n</body></html>\n";
}

}  // namespace detail

/// The report as one HTML file.
///
/// \throws std::runtime_error if it does not fit into `most_bytes` even without what may be left out
[[nodiscard]] inline std::string page(const Results& results) {
  std::string out = detail::page(results, true);
  if (out.size() > most_bytes) out = detail::page(results, false);
  if (out.size() > most_bytes) {
    throw std::runtime_error("the report has " + std::to_string(out.size()) + " bytes, more than " +
                             std::to_string(most_bytes) + ": give it fewer policies");
  }
  const std::string kept =
      detail::section("What was kept",
                      "Every token of the prompt, in the layer and KV head that you choose.",
                      kept_figure(results, most_bytes - out.size()));
  return out.replace(out.find('\x01'), 1, kept);
}

}  // namespace report
