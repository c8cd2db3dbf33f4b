// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a run says at its end: JSON lines, and a table that is made of them. The lines are described in bench/README.md.

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "llama_engine/tokenizer.hpp"
#include "memory_use.hpp"
#include "request.hpp"
#include "scheduler.hpp"

namespace batch {

using Json = nlohmann::ordered_json;

/// The smallest value that `share` of all values do not exceed; null if there is none.
[[nodiscard]] inline Json quantile(std::vector<double> values, double share) {
  if (values.empty()) return {};
  const auto rank = static_cast<std::ptrdiff_t>(
      std::max(0.0, std::ceil(share * static_cast<double>(values.size())) - 1));
  std::nth_element(values.begin(), values.begin() + rank, values.end());
  return values[static_cast<std::size_t>(rank)];
}

/// What was generated, up to a token that ends the text.
[[nodiscard]] inline std::string text_of(const Outcome& outcome,
                                         const engine::Tokenizer& tokenizer) {
  const auto end = std::find_if(outcome.tokens.begin(), outcome.tokens.end(), [&](Token t) {
    return tokenizer.ends_text(t);
  });
  return tokenizer.decode(
      {outcome.tokens.data(), static_cast<std::size_t>(end - outcome.tokens.begin())});
}

/// Whether the text has the answer; null if none was asked for.
[[nodiscard]] inline Json right(const Request& request, const std::string& text) {
  if (request.answer.empty()) return {};
  return text.find(request.answer) != std::string::npos;
}

/// The line of a request.
[[nodiscard]] inline Json request_line(const std::string& policy,
                                       const Request& request,
                                       const Outcome& outcome,
                                       const engine::Tokenizer& tokenizer) {
  const std::string text = text_of(outcome, tokenizer);
  const bool done = outcome.end == Outcome::End::done;
  Json line;
  line["kind"] = "request";
  line["policy"] = policy;
  line["id"] = request.id;
  line["arrival"] = request.arrival;
  line["prompt_tokens"] = request.prompt.size();
  line["end"] = done ? "done" : outcome.end == Outcome::End::refused ? "refused" : "interrupted";
  line["reason"] = outcome.refusal.empty() ? Json() : Json(outcome.refusal);
  line["tokens"] = outcome.tokens.size();
  line["first_token_s"] =
      outcome.times.empty() ? Json() : Json(outcome.times.front() - outcome.arrived);
  line["preempted"] = outcome.preempted;
  line["answer"] = request.answer.empty() ? Json() : Json(request.answer);
  line["right"] = done ? right(request, text) : Json();
  line["text"] = text;
  return line;
}

/// What a run was made of, besides its scheduler.
struct RunFacts {
  std::string policy;
  std::string tables;  ///< group, layer or head
  Settings settings;
  std::int32_t threads = 0;
  MemoryUse memory;
  MemoryUse full;                  ///< of a cache for as many full streams as fit the pool
  std::int64_t full_streams = 0;   ///< how many
  std::int64_t equal_streams = 0;  ///< streams under this policy that fit into the sum of `full`
  std::int64_t page_size = 0;
  std::int64_t pages = 0;
  std::int64_t prefix_tokens = 0;
  std::int64_t peak_resident_bytes = 0;
};

/// The line of a run.
[[nodiscard]] inline Json run_line(const RunFacts& facts,
                                   std::span<const Request> requests,
                                   const Scheduler& run,
                                   const engine::Tokenizer& tokenizer,
                                   double seconds) {
  std::int64_t tokens = 0, done = 0, refused = 0, asked = 0, correct = 0;
  std::vector<double> first, between;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Outcome& o = run.outcomes()[i];
    tokens += static_cast<std::int64_t>(o.tokens.size());
    done += o.end == Outcome::End::done ? 1 : 0;
    refused += o.end == Outcome::End::refused ? 1 : 0;
    if (!o.times.empty()) first.push_back(o.times.front() - o.arrived);
    for (std::size_t t = 1; t < o.times.size(); ++t) between.push_back(o.times[t] - o.times[t - 1]);
    if (o.end != Outcome::End::done || requests[i].answer.empty()) continue;
    ++asked;
    correct += right(requests[i], text_of(o, tokenizer)).get<bool>() ? 1 : 0;
  }
  const Counters& c = run.counters();
  // The largest number of streams that all decoded at once.
  std::size_t all = c.tokens.size();
  while (all > 0 && c.tokens[all - 1] == 0) --all;
  const auto rate = [](std::int64_t n, double s) {
    return s > 0 ? Json(static_cast<double>(n) / s) : Json();
  };

  Json line;
  line["kind"] = "batch";
  line["policy"] = facts.policy;
  line["streams"] = facts.settings.streams;
  line["requests"] = requests.size();
  line["prefix_tokens"] = facts.prefix_tokens;
  line["chunk"] = facts.settings.chunk;
  line["interleave"] = facts.settings.interleave;
  line["overcommit"] = facts.settings.overcommit;
  line["tables"] = facts.tables;
  line["page_size"] = facts.page_size;
  line["threads"] = facts.threads;
  line["done"] = done;
  line["refused"] = refused;
  line["interrupted"] = static_cast<std::int64_t>(requests.size()) - done - refused;
  line["preempted"] = c.preempted;
  line["right"] = correct;
  line["asked"] = asked;
  line["streams_at_once"] = c.streams;
  line["tokens"] = tokens;
  line["seconds"] = seconds;
  line["tokens_per_s"] = rate(tokens, seconds);
  line["decoding_streams"] = all > 0 ? all - 1 : 0;
  line["decoding_tokens"] = all > 0 ? c.tokens[all - 1] : 0;
  line["decoding_tokens_per_s"] = all > 0 ? rate(c.tokens[all - 1], c.seconds[all - 1]) : Json();
  line["first_token_s"] = {{"median", quantile(first, 0.5)}, {"p99", quantile(first, 0.99)}};
  line["between_tokens_s"] = {{"median", quantile(between, 0.5)}, {"p99", quantile(between, 0.99)}};
  line["pages"] = facts.pages;
  line["peak_pages"] = c.peak_pages;
  line["wasted_pages"] = c.steps > 0 ? Json(c.wasted_pages / static_cast<double>(c.steps)) : Json();
  const MemoryUse& m = facts.memory;
  line["bytes"] = {{"pages", m.pages},
                   {"positions", m.positions},
                   {"scores", m.scores},
                   {"tables", m.tables},
                   {"recorder", m.recorder},
                   {"workspace", m.workspace},
                   {"sum", m.sum()}};
  line["full_streams"] = facts.full_streams;
  line["full_bytes"] = facts.full.sum();
  line["streams_at_equal_bytes"] = facts.equal_streams;
  line["peak_resident_bytes"] = facts.peak_resident_bytes;
  return line;
}

/// The table of some runs' lines.
inline void print_table(const std::vector<Json>& runs) {
  const auto number = [](const Json& value, int digits) {
    if (!value.is_number()) return std::string("-");
    char text[64];
    std::snprintf(text, sizeof text, "%.*f", digits, value.get<double>());
    return std::string(text);
  };
  const auto mib = [&](const Json& bytes) {
    return number(Json(bytes.get<double>() / 1048576), 1);
  };
  const std::vector<std::string> names{"policy",
                                       "streams",
                                       "done",
                                       "refused",
                                       "preempted",
                                       "right",
                                       "tok/s",
                                       "decoding",
                                       "tok/s",
                                       "first s",
                                       "p99",
                                       "next s",
                                       "p99",
                                       "peak",
                                       "of pages",
                                       "wasted"};
  std::vector<std::vector<std::string>> rows{names};
  for (const Json& r : runs) {
    rows.push_back({r["policy"],
                    r["streams_at_once"].dump(),
                    r["done"].dump() + "/" + r["requests"].dump(),
                    r["refused"].dump(),
                    r["preempted"].dump(),
                    r["right"].dump() + "/" + r["asked"].dump(),
                    number(r["tokens_per_s"], 1),
                    r["decoding_streams"].dump(),
                    number(r["decoding_tokens_per_s"], 1),
                    number(r["first_token_s"]["median"], 1),
                    number(r["first_token_s"]["p99"], 1),
                    number(r["between_tokens_s"]["median"], 2),
                    number(r["between_tokens_s"]["p99"], 2),
                    r["peak_pages"].dump(),
                    r["pages"].dump(),
                    number(r["wasted_pages"], 0)});
  }
  const auto print = [](const std::vector<std::vector<std::string>>& cells) {
    std::vector<std::size_t> widths(cells.front().size());
    for (const auto& row : cells)
      for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    for (const auto& row : cells) {
      for (std::size_t i = 0; i < row.size(); ++i) {
        std::printf(i == 0 ? "%-*s" : "  %*s", static_cast<int>(widths[i]), row[i].c_str());
      }
      std::printf("\n");
    }
  };
  std::printf("\n");
  print(rows);
  rows = {{"MiB",
           "pages",
           "positions",
           "scores",
           "tables",
           "recorder",
           "workspace",
           "sum",
           "full",
           "peak resident"}};
  for (const Json& r : runs) {
    const Json& b = r["bytes"];
    rows.push_back({r["policy"],
                    mib(b["pages"]),
                    mib(b["positions"]),
                    mib(b["scores"]),
                    mib(b["tables"]),
                    mib(b["recorder"]),
                    mib(b["workspace"]),
                    mib(b["sum"]),
                    mib(r["full_bytes"]),
                    mib(r["peak_resident_bytes"])});
  }
  std::printf("\n");
  print(rows);
  std::printf("\n");
  for (const Json& r : runs) {
    const double over = r["bytes"]["sum"].get<double>() - r["full_bytes"].get<double>();
    if (over <= 0 || r["policy"] == "full") continue;
    std::printf(
        "%s: %.1f MiB more than the %s full streams of this pool; %s streams fit into as much as "
        "theirs\n",
        r["policy"].get<std::string>().c_str(),
        over / 1048576,
        r["full_streams"].dump().c_str(),
        r["streams_at_equal_bytes"].dump().c_str());
  }
  std::fflush(stdout);
}

}  // namespace batch
