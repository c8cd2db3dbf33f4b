// SPDX-License-Identifier: Apache-2.0

// The program `batch`, started as a user does, with a tiny model.
#include "batch/memory_use.hpp"
#include "batch/report.hpp"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "catch.hpp"
#include "support.hpp"
#include "tiny_model.hpp"

using Catch::Matchers::ContainsSubstring;
using nlohmann::ordered_json;
using program_test::Arguments;
using program_test::Folder;
using program_test::read_text;
using program_test::Result;
using program_test::run_program;
using program_test::tiny_model;
using program_test::write_model;

namespace {

// Text of a prompt of `n` tokens: a token a byte.
std::string text_of(std::size_t n, char first) {
  std::string text;
  for (std::size_t i = 0; i < n; ++i)
    text += static_cast<char>(' ' + (static_cast<std::size_t>(first) + 7 * i) % 95);
  return text;
}

std::string request(const std::string& id, int arrival, std::size_t tokens, int max_tokens) {
  return ordered_json{{"id", id},
                      {"arrival", arrival},
                      {"context", text_of(tokens - 4, id.back())},
                      {"question", "Why?"},
                      {"answer", "because"},
                      {"max_tokens", max_tokens}}
             .dump() +
         "\n";
}

// Pages of 4 rows in 6 tables: a page is 256 bytes.
std::string mib(int pages_per_table) {
  return std::to_string(pages_per_table * 6 * 256.0 / 1048576 + 1e-6);
}

struct Setting {
  Folder folder;
  std::string model = write_model(folder, "m.gguf", tiny_model());
  std::string json = folder.file("out.jsonl");

  [[nodiscard]] Result run(const std::string& requests, Arguments arguments) const {
    arguments.insert(arguments.begin(),
                     {"--model",
                      model,
                      "--page-size",
                      "4",
                      "--chunk",
                      "8",
                      "--requests-file",
                      folder.with("requests.jsonl", requests)});
    return run_program(KVTRIM_BATCH, arguments);
  }
  [[nodiscard]] std::vector<ordered_json> lines() const {
    return program_test::read_json_lines(json);
  }
};

void check_error(const Result& r, const std::string& words) {
  INFO(r.out << r.err);
  CHECK(r.status == 1);
  CHECK(r.err.starts_with("batch: "));
  CHECK(std::count(r.err.begin(), r.err.end(), '\n') == 1);
  CHECK_THAT(r.err, ContainsSubstring(words));
}

const std::vector<std::string> request_keys{"kind",
                                            "policy",
                                            "id",
                                            "arrival",
                                            "prompt_tokens",
                                            "end",
                                            "reason",
                                            "tokens",
                                            "first_token_s",
                                            "preempted",
                                            "answer",
                                            "right",
                                            "text"};

std::vector<std::string> keys_of(const ordered_json& line) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : line.items()) keys.push_back(key);
  return keys;
}

}  // namespace

TEST_CASE("batch program: a line for each request and policy, and one for each run", "[program]") {
  const Setting s;
  std::string requests;
  for (const char* id : {"a", "b", "c", "d", "e"}) requests += request(id, 0, 40, 9);
  const Result r = s.run(requests,
                         {"--pool-mib",
                          mib(24),
                          "--streams",
                          "8",
                          "--json",
                          s.json,
                          "--policy",
                          "full",
                          "streaming:sinks=2,budget=14",
                          "snapkv:budget=12,window=4"});
  INFO(r.out << r.err);
  REQUIRE(r.status == 0);
  const auto lines = s.lines();
  REQUIRE(lines.size() == 18);
  const std::string readme = read_text(KVTRIM_TEST_DATA "/../../bench/README.md");
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const auto& line = lines[i];
    INFO(line.dump());
    CHECK(line["kind"] == (i % 6 == 5 ? "batch" : "request"));
    CHECK(keys_of(line).front() == "kind");
    for (const std::string& key : keys_of(line))  // the schema is written down
      CHECK_THAT(readme, ContainsSubstring("`" + key + "`"));
    if (line["kind"] == "request") {
      CHECK(keys_of(line) == request_keys);
      CHECK(line["end"] == "done");
      CHECK(line["tokens"] == 9);
      CHECK(line["text"].get<std::string>().size() == 9);
      CHECK(line["right"] == false);
      continue;
    }
    CHECK(line["done"] == 5);
    CHECK(line["refused"] == 0);
    CHECK(line["tokens"] == 45);
    CHECK(line["pages"] == 144);
    CHECK(line["asked"] == 5);
    CHECK(line["bytes"]["pages"] == 144 * 256);
    // A pool of two full streams of 48 rows, 12 pages.
    CHECK(line["full_streams"] == 2);
    CHECK(line["streams_at_once"] == (i == 5 ? 2 : 3));
    std::int64_t sum = 0;
    for (const auto& [key, bytes] : line["bytes"].items())
      if (key != "sum") sum += bytes.get<std::int64_t>();
    CHECK(line["bytes"]["sum"] == sum);
    CHECK_THAT(r.out, ContainsSubstring(line["policy"].get<std::string>()));
  }
  CHECK(lines[5]["bytes"]["sum"] >
        lines[5]["full_bytes"]);  // a recorder, even if it has nothing to see
  CHECK(lines[11]["streams_at_equal_bytes"] < 3);
  // A prompt's text is the same under a policy that never cuts.
  const Result shown = run_program(KVTRIM_BATCH, {"--show", s.json});
  CHECK(shown.status == 0);
  CHECK(shown.out == r.out);
}

TEST_CASE("batch program: prompts drawn for a model whose context is too short are refused",
          "[program][edge]") {
  const Folder folder;
  const std::string model = write_model(folder, "m.gguf", tiny_model());
  const std::string text = folder.with("text", text_of(400, 'x'));
  const std::string prefix = folder.with("prefix", text_of(16, 'p'));
  const Result r = run_program(KVTRIM_BATCH,
                               {"--model",
                                model,
                                "--pool-mib",
                                "1",
                                "--streams",
                                "2",
                                "--requests",
                                "2",
                                "--context",
                                "300",
                                "--generate",
                                "2",
                                "--text",
                                text,
                                "--prefix",
                                prefix});
  check_error(r, "need 317 positions, more than the model's context of 200");
}

TEST_CASE("batch program: what cannot be is one line that says so", "[program][edge]") {
  const Setting s;
  const std::string good = request("a", 0, 40, 9);
  const auto with = [&](const std::string& requests, Arguments more = {}) {
    more.insert(more.begin(), {"--pool-mib", mib(24), "--streams", "2", "--json", s.json});
    const Result r = s.run(requests, more);
    CHECK_FALSE(std::filesystem::exists(s.json));
    return r;
  };
  check_error(s.run(good, {"--streams", "2"}), "--pool-mib is missing");
  check_error(s.run(good, {"--streams", "2", "--pool-mib", "nan"}), "--pool-mib");
  check_error(s.run(good, {"--pool-mib", "1", "--streams", "0"}),
              "--streams is missing or below 1");
  check_error(s.run(good, {"--pool-mib", "1", "--streams", "-3"}), "--streams");
  check_error(with(""), "has no request");
  check_error(with(good + "{\"id\": \"b\",\n"), "requests.jsonl line 2: ");
  check_error(with(good + "\n[]\n"), "requests.jsonl line 3: ");
  check_error(with(good + "{\"id\": \"b\", \"context\": \"x\"}\n"), "line 2: ");
  check_error(with(good + request("a", 1, 40, 9)), "line 2: request a is there twice");
  check_error(with(request("b", 7, 40, 9) + request("c", 6, 40, 9)),
              "line 2: request c arrives at step 6, before the one above it, at 7");
  check_error(with(request("b", -1, 40, 9)), "line 1: request b: arrival -1 is negative");
  check_error(with(good + request("b", 0, 40, 0)),
              "line 2: request b: max_tokens is 0, it must be at least 1");
  check_error(with(good + request("b", 0, 40, 162)),
              "line 2: request b: a prefix of 0, a prompt of 40 and max_tokens of 162 need 201 "
              "positions, more than the model's context of 200");
  check_error(with(good + request("b", 0, 210, 2)), "more than the model's context of 200");
  check_error(with(R"({"id": "b", "context": [1, 9999], "question": [2]})"),
              "line 1: request b: token 9999 is outside the model's vocabulary of 259");
  check_error(with(R"({"id": "b", "context": [], "question": []})"),
              "context and question are empty");
  check_error(with(R"({"id": "b", "context": "x", "question": "y", "max_tokens": 99999999999})"),
              "more than the model's context of 200");
  check_error(with(good, {"--policy", "page"}), "needs a size");
  check_error(
      with(good, {"--policy", "page:budget=32", "--tables", "group"}),
      "policy 'page:budget=32' needs a page table for each layer, but the pool has --tables "
      "group");
  check_error(with(good, {"--policy", "adakv:budget=40", "--tables", "layer"}),
              "needs a page table for each head");
  check_error(with(good, {"--policy", "nothing:budget=1"}), "unknown policy 'nothing'");
  check_error(with(good, {"--prefix", s.folder.file("missing")}), "cannot read ");
  check_error(with(good, {"--prefix", s.folder.with("long", text_of(199, 'p'))}),
              "a prefix of 199");
  check_error(run_program(KVTRIM_BATCH, {"--pool-mib", "1", "--streams", "1", "--requests", "1"}),
              "--model is missing");
  check_error(run_program(KVTRIM_BATCH, {"--show", s.folder.with("empty", "")}),
              "no line of kind batch");
}

TEST_CASE("batch program: a pool smaller than a request refuses it, and only it",
          "[program][edge]") {
  const Setting s;
  const Result r = s.run(request("a", 0, 40, 9) + request("b", 0, 150, 9),
                         {"--pool-mib", mib(13), "--streams", "2", "--json", s.json});
  CHECK(r.status == 0);
  CHECK(r.err ==
        "batch: request b is refused: it needs 240 pages at its peak, but the pool has 78\n");
  const auto lines = s.lines();
  REQUIRE(lines.size() == 3);
  CHECK(lines[0]["end"] == "done");
  CHECK(lines[1]["end"] == "refused");
  CHECK(lines[1]["first_token_s"].is_null());
  CHECK(lines[2]["refused"] == 1);
  CHECK(lines[2]["done"] == 1);
  // Nothing could run: the program says so by its status.
  CHECK(s.run(request("b", 0, 150, 9), {"--pool-mib", mib(13), "--streams", "2"}).status == 1);
}

TEST_CASE("batch program: after Ctrl-C the table and the lines say what was done until then",
          "[program][edge]") {
  const Setting s;
  std::string many;
  for (int i = 0; i < 3000; ++i) many += request("r" + std::to_string(i), 0, 150, 40);
  const std::string requests = s.folder.with("many.jsonl", many);
  for (const int signal : {SIGINT, SIGTERM}) {
    const Folder streams;
    program_test::Process process(streams,
                                  KVTRIM_BATCH,
                                  {"--model",
                                   s.model,
                                   "--requests-file",
                                   requests,
                                   "--page-size",
                                   "4",
                                   "--pool-mib",
                                   mib(200),
                                   "--streams",
                                   "4",
                                   "--json",
                                   s.json,
                                   "--policy",
                                   "full",
                                   "tova:budget=16"});
    for (int i = 0; i < 3000 && !std::filesystem::exists(s.json + ".part"); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    REQUIRE(kill(process.id(), signal) == 0);
    CHECK(process.wait() == 130);
    CHECK(process.err() == "batch: interrupted; the table says what was done until then\n");
    CHECK_THAT(process.out(), ContainsSubstring("full"));
    const auto lines = s.lines();
    REQUIRE(lines.size() == 3001);
    const auto& run = lines.back();
    CHECK(run["kind"] == "batch");
    CHECK(run["interrupted"] > 0);
    CHECK(run["done"].get<int>() + run["interrupted"].get<int>() == 3000);
    CHECK(lines[2999]["end"] == "interrupted");
    CHECK_FALSE(std::filesystem::exists(s.json + ".part"));
  }
}

TEST_CASE("batch program: --help names every option and every policy", "[program]") {
  const Result r = run_program(KVTRIM_BATCH, {"--help"});
  CHECK(r.status == 0);
  for (const char* word :
       {"--model",      "--pool-mib",   "--streams", "--requests", "--requests-file", "--context",
        "--generate",   "--text",       "--seed",    "--prefix",   "--policy",        "--chunk",
        "--interleave", "--overcommit", "--stop",    "--tables",   "--cache-type",    "--page-size",
        "--threads",    "--json",       "--show",    "full",       "streaming",       "h2o",
        "snapkv",       "page"}) {
    CHECK_THAT(r.out, ContainsSubstring(word));
  }
}

TEST_CASE("batch: bytes are counted by hand", "[program]") {
  kvtrim::PagedCache::Params p;
  p.pages = 100;
  p.page_size = 16;
  p.layers = 30;
  p.kv_heads = 3;
  p.key_dim = 64;
  p.scope = kvtrim::TableScope::head;
  p.max_sequences = 8;
  p.max_rows = 2176;
  p.scores = true;
  const batch::MemoryUse use = batch::memory_use(p, 8192);
  CHECK(use.pages == 819200);
  CHECK(use.positions == 8LL * 90 * 2176 * 8);
  CHECK(use.scores == use.positions);
  CHECK(use.tables ==
        8LL * 90 * (136 * 4 + static_cast<std::int64_t>(sizeof(kvtrim::SequenceState))) + 800);
  CHECK(use.sum() == use.pages + 2 * use.positions + use.tables);
  // 10 beside each stream, 5 whatever there is; the first takes 100 pages while it is read, each other 20.
  CHECK(batch::streams_within(114, 10, 5, 20, 100) == 0);
  CHECK(batch::streams_within(115, 10, 5, 20, 100) == 1);
  CHECK(batch::streams_within(144, 10, 5, 20, 100) == 1);
  CHECK(batch::streams_within(145, 10, 5, 20, 100) == 2);
}

TEST_CASE("batch: a quantile is a value that was measured", "[program][edge]") {
  CHECK(batch::quantile({}, 0.5).is_null());
  CHECK(batch::quantile({3, 1, 2}, 0.5) == 2.0);
  CHECK(batch::quantile({3, 1, 2, 4}, 0.5) == 2.0);
  CHECK(batch::quantile({3, 1, 2, 4}, 0.99) == 4.0);
  CHECK(batch::quantile({7}, 0.01) == 7.0);
}
