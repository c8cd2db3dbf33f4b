// SPDX-License-Identifier: Apache-2.0

// `generate` past the model's context, with a teacher and a trace.

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "support.hpp"
#include "tiny_model.hpp"

using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
using program_test::Arguments;
using program_test::Folder;
using program_test::Result;
using program_test::run_program;
using program_test::tiny_model;
using program_test::write_model;

namespace {

Result generate(const std::string& model, Arguments arguments) {
  arguments.insert(arguments.begin(), {"--model", model});
  return run_program(KVTRIM_GENERATE, arguments);
}

// As JSON lines, `per_line` tokens in each, and as a text of one byte a token.
struct Text {
  std::string text, lines;

  Text(std::size_t tokens, std::size_t per_line) {
    nlohmann::json ids = nlohmann::json::array();
    for (std::size_t i = 0; i < tokens; ++i) {
      text += static_cast<char>('a' + (i * i + i / 7) % 26);
      ids.push_back(static_cast<int>(text.back()));
      if (ids.size() < per_line && i + 1 < tokens) continue;
      lines += nlohmann::json{{"ids", ids}}.dump() + "\n";
      ids.clear();
    }
  }
};

std::vector<nlohmann::json> read_trace(const std::string& path, const std::string& kind) {
  std::vector<nlohmann::json> lines;
  std::istringstream in(program_test::read_text(path));
  for (std::string line; std::getline(in, line);) {
    auto json = nlohmann::json::parse(line);
    if (json.at("kind") == kind) lines.push_back(std::move(json));
  }
  return lines;
}

double perplexity_of(const std::vector<nlohmann::json>& tokens) {
  double sum = 0;
  for (const auto& token : tokens) sum += token.at("surprisal").get<double>();
  return std::exp(sum / static_cast<double>(tokens.size()));
}

}  // namespace

TEST_CASE(
    "endless: the teacher's tokens come next, from a text as from ids, and their surprisal is "
    "that after a prompt read at once",
    "[program]") {
  const Folder folder;
  const std::string model = write_model(folder, "m.gguf", tiny_model());
  const Text text(90, 40);
  const std::string trace = folder.file("trace.jsonl");
  std::string last;
  for (const std::string& teacher :
       {folder.with("t.txt", text.text), folder.with("t.jsonl", text.lines)}) {
    const Result r = generate(
        model, {"--teacher", teacher, "--tokens", "500", "--trace", trace, "--page-size", "4"});
    INFO(r.err);
    REQUIRE(r.status == 0);
    CHECK(r.out.empty());
    const auto tokens = read_trace(trace, "generate_token");
    REQUIRE(tokens.size() == 89);  // its first token is the prompt
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      REQUIRE(tokens[i].at("token") == static_cast<int>(text.text[i + 1]));
      REQUIRE(tokens[i].at("seen") == i + 2);
      REQUIRE(tokens[i].at("pages") == (i + 2 + 3) / 4);
      REQUIRE(tokens[i].at("ms").get<double>() >= 0);
      REQUIRE(tokens[i].at("resident_bytes").get<std::int64_t>() > 0);
    }
    char printed[64];
    std::snprintf(printed, sizeof printed, "perplexity %.4f over 89 tokens", perplexity_of(tokens));
    CHECK_THAT(r.err, ContainsSubstring(printed));

    nlohmann::json first, rest;
    for (std::size_t i = 0; i < text.text.size(); ++i)
      (i < 50 ? first : rest)["ids"].push_back(static_cast<int>(text.text[i]));
    const std::string at_once = folder.file("at_once.jsonl");
    const Result other = generate(model,
                                  {"--prompt-file",
                                   folder.with("first.jsonl", first.dump()),
                                   "--teacher",
                                   folder.with("rest.jsonl", rest.dump()),
                                   "--trace",
                                   at_once});
    INFO(other.err);
    REQUIRE(other.status == 0);
    const auto later = read_trace(at_once, "generate_token");
    REQUIRE(later.size() == 40);
    CHECK(read_trace(at_once, "generate").at(0).at("prompt") == 50);
    for (std::size_t i = 0; i < later.size(); ++i)
      REQUIRE(later[i].at("surprisal").get<double>() ==
              Approx(tokens[49 + i].at("surprisal").get<double>()).epsilon(1e-4));
  }
  const Result chat = generate(model, {"--prompt-file", folder.file("first.jsonl"), "--chat"});
  CHECK(chat.status == 1);
  CHECK_THAT(chat.err, ContainsSubstring("--chat needs a text, but "));
}

TEST_CASE("endless: streaming goes on past the context, in the same pages for ever", "[program]") {
  const Folder folder;
  const std::string model = write_model(folder, "m.gguf", tiny_model());
  const std::string teacher = folder.with("t.txt", Text(700, 1).text);
  const std::string trace = folder.file("trace.jsonl");
  for (const char* policy :
       {"streaming:sinks=4,budget=24,form=pages", "streaming:sinks=4,budget=24,form=exact"}) {
    const Result r = generate(model,
                              {"--teacher",
                               teacher,
                               "--tokens",
                               "699",
                               "--policy",
                               policy,
                               "--in-cache",
                               "--trace",
                               trace,
                               "--page-size",
                               "4"});
    INFO(policy << r.err);
    REQUIRE(r.status == 0);
    const auto run = read_trace(trace, "generate").at(0);
    const auto tokens = read_trace(trace, "generate_token");
    REQUIRE(tokens.size() == 699);
    CHECK(run.at("in_cache") == true);
    CHECK(run.at("prompt") == 1);
    // The pool has the pages that the policy needs at most, so more cannot be.
    CHECK(run.at("pool_pages") <= 9);
    const bool whole = std::string(policy).ends_with("pages");
    for (std::size_t i = 100; i < tokens.size() - 1; ++i) {
      INFO(i);
      // Whole pages leave every 4 tokens; exact rows fit 6 pages, of which one may be waiting to be overwritten.
      if (whole) { REQUIRE(tokens[i].at("pages") == tokens[i % 4 + 96].at("pages")); }
      REQUIRE(tokens[i].at("pages") <= (whole ? 8 : 7));
    }
  }
}

TEST_CASE("endless: --beyond-context lifts the engine's limit, and nothing else does",
          "[program]") {
  const Folder folder;
  const std::string model = write_model(folder, "m.gguf", tiny_model());
  const std::string teacher = folder.with("t.txt", Text(300, 1).text);
  const std::string trace = folder.file("trace.jsonl");
  const Arguments arguments{"--teacher", teacher, "--tokens", "299", "--trace", trace};
  const Result stops = generate(model, arguments);
  REQUIRE(stops.status == 0);
  CHECK_THAT(stops.err, ContainsSubstring("stopped: the model's context of 200 tokens is full"));
  const auto within = read_trace(trace, "generate_token");
  REQUIRE(within.size() == 200);
  Arguments beyond = arguments;
  beyond.emplace_back("--beyond-context");
  const Result r = generate(model, beyond);
  INFO(r.err);
  REQUIRE(r.status == 0);
  const auto tokens = read_trace(trace, "generate_token");
  REQUIRE(tokens.size() == 299);
  for (std::size_t i = 0; i < within.size(); ++i)
    REQUIRE(tokens[i].at("surprisal") == within[i].at("surprisal"));
}

TEST_CASE("endless: a broken teacher is one line that names its line, and no trace is left",
          "[program][fault]") {
  const Folder folder;
  const std::string model = write_model(folder, "m.gguf", tiny_model());
  const auto refused = [&](const std::string& teacher, const std::string& words) {
    const std::size_t files = folder.files();
    const Result r = generate(model, {"--teacher", teacher, "--trace", folder.file("trace")});
    INFO(r.err);
    CHECK(r.status == 1);
    CHECK(std::count(r.err.begin(), r.err.end(), '\n') == 1);
    CHECK_THAT(r.err, ContainsSubstring(words));
    CHECK(folder.files() == files);
  };
  refused(folder.file("none"), "cannot read " + folder.file("none"));
  refused(folder.with("empty", ""), "has no token");
  refused(folder.with("empty.jsonl", "{\"ids\": []}\n"), "has no token");
  const std::string good = "{\"ids\": [65, 66]}\n";
  const auto broken = [&](const std::string& line, const std::string& words) {
    refused(folder.with("broken.jsonl", good + line + "\n" + good),
            "broken.jsonl line 2: " + words);
  };
  broken("{\"ids\": [65, 6", "");
  broken("{\"id\": [65]}", "");
  broken("{\"ids\": [\"a\"]}", "");
  broken("{\"ids\": [259]}", "token 259 is outside the vocabulary of 259");
  broken("{\"ids\": [-1]}", "token -1 is outside the vocabulary of 259");
  const Result folder_for_trace =
      generate(model, {"--teacher", folder.with("t.txt", "abc"), "--trace", folder.file("")});
  CHECK(folder_for_trace.status == 1);
  CHECK_THAT(folder_for_trace.err, ContainsSubstring("it is a folder"));
}
