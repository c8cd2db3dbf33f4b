// SPDX-License-Identifier: Apache-2.0

// The program `evaluate`, started as a user does, with a tiny model; with --expect full, because that model knows nothing.

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "support.hpp"
#include "tiny_model.hpp"

using Catch::Matchers::ContainsSubstring;
using nlohmann::ordered_json;
using program_test::Arguments;
using program_test::Folder;
using program_test::Process;
using program_test::read_text;
using program_test::Result;
using program_test::run_program;
using program_test::tiny_model;
using program_test::write_model;

namespace {

constexpr int context = 1400;
const Arguments two{"--expect", "full", "--policy", "streaming", "snapkv", "--removed", "0.25,0.9"};

struct Setting {
  Folder folder;
  std::string model = write_model(folder, "m.gguf", tiny_model(false, context));
  std::string out = folder.file("results.jsonl");

  [[nodiscard]] Arguments all(Arguments arguments) const {
    arguments.insert(arguments.begin(), {"--model", model, "--page-size", "4", "--out", out});
    return arguments;
  }
  [[nodiscard]] Result run(const Arguments& arguments) const {
    return run_program(KVTRIM_EVALUATE, all(arguments));
  }
  [[nodiscard]] std::vector<ordered_json> lines() const {
    return program_test::read_json_lines(out);
  }
  void fails(const Arguments& arguments, const std::string& message) const {
    const Result r = run(arguments);
    INFO(r.out << r.err);
    CHECK(r.status == 1);
    CHECK_THAT(r.err, ContainsSubstring(message));
  }
};

/// A whole run, done once for all tests.
const std::pair<Result, std::string>& whole_run() {
  static const auto run = [] {
    const Setting s;
    Result r = s.run(two);
    return std::pair(std::move(r), read_text(s.out));
  }();
  return run;
}

}  // namespace

TEST_CASE("evaluate: the small suite, whole, and once more without work", "[evaluate]") {
  const Setting s;
  const auto& [r, whole] = whole_run();
  INFO(r.out << r.err);
  REQUIRE(r.status == 0);
  program_test::write_text(s.out, whole);
  const auto lines = s.lines();
  REQUIRE(lines.front()["kind"] == "suite");
  CHECK(lines.front()["version"] == 1);
  CHECK(lines.front()["model"] == "m.gguf");
  CHECK(lines.front()["model_hash"].get<std::string>().size() == 64);
  CHECK(lines.front()["row_bytes"] == 6 * 2 * 8 * 4);

  std::map<std::string, int> kinds;
  std::map<std::pair<std::string, std::string>, int> answers;  // task, policy
  std::map<std::string, int> pictures;
  int changed = 0;
  for (const auto& line : lines) {
    ++kinds[line["kind"]];
    if (line["kind"] == "answer") {
      ++answers[{line["task"], line["policy"]}];
      const double before = line["rows_before"], rows = line["rows"];
      if (line["policy"] == "full") {
        CHECK(line["correct"] == true);
        CHECK(rows == before);
      } else {
        CHECK(std::abs(rows - before * (1 - line["removed"].get<double>())) <= 1);
        changed += line["correct"] == true ? 0 : 1;
      }
      CHECK(line["bytes"] == static_cast<std::int64_t>(rows) * 6 * 2 * 8 * 4);
      // The later question is not in the cache at the cut.
      const int length = line["length"];
      CHECK(before < length);
      if (line["policy"] != "full" && line["question"] == "known" && line["turn"] == 0 &&
          line["task"] != "cued_copy")
        CHECK(before == length - 1);
      CHECK(line["fact_rows"] > 0);
    }
    if (line["kind"] == "kept") {
      ++pictures[line["prompt"]];
      REQUIRE(line["rows"].size() == 2);
      REQUIRE(line["rows"][0].size() == 3);
      for (const auto& layer : line["rows"]) {
        for (const auto& head : layer) {
          int rows = 0;
          for (const char digit : head.get<std::string>())
            rows +=
                std::popcount(static_cast<unsigned>(std::stoi(std::string(1, digit), nullptr, 16)));
          CHECK(rows == (line["prompt"] == "needle_number-1024-0" ? 102 : 84));
        }
      }
    }
  }
  CHECK(kinds["suite"] == 1);
  CHECK(kinds["task"] == 8);
  CHECK(kinds["tokens"] == 2);
  CHECK(pictures ==
        std::map<std::string, int>{{"needle_number-1024-0", 2}, {"multi_turn-1024-0", 2}});
  CHECK(kinds["perplexity"] == 2 * 4 * 5);
  for (const char* task : {"needle_number",
                           "needle_word",
                           "needle_name",
                           "four_needles",
                           "key_value",
                           "identifier",
                           "cued_copy",
                           "multi_turn"}) {
    const int turns = std::string(task) == "multi_turn" ? 3 : 1;
    CHECK(answers[{task, "full"}] == 8 * 2 * turns);
    CHECK(answers[{task, "snapkv"}] == 8 * 2 * 2 * turns);
    CHECK(answers[{task, "streaming"}] == 8 * 2 * 2 * turns);
  }
  CHECK(changed > 100);  // the cuts have an effect
  CHECK_THAT(r.out, ContainsSubstring("the question is known at the cut"));
  CHECK_THAT(r.out, ContainsSubstring("8 of 8 drawn"));

  CHECK(s.run(two).status == 0);
  CHECK(read_text(s.out) == whole);
}

TEST_CASE("evaluate: cut off anywhere, it goes on to the same results", "[evaluate]") {
  const Setting s;
  const std::string& whole = whole_run().second;
  // Torn in the middle of a line: of a prompt's third variant, and of the perplexity.
  for (const std::size_t at : {whole.find("\"multi_turn-1024-3\""), whole.size() * 97 / 100}) {
    program_test::write_text(s.out, whole.substr(0, at));
    const Result r = s.run(two);
    INFO(r.out << r.err);
    CHECK(r.status == 0);
    CHECK_THAT(r.err, ContainsSubstring("which is dropped"));
    CHECK(read_text(s.out) == whole);
  }
  // A further policy adds its own lines alone.
  const Result r = s.run({"--expect", "full", "--policy", "keydiff:removed=0.5"});
  INFO(r.out << r.err);
  CHECK(r.status == 0);
  const std::string more = read_text(s.out);
  REQUIRE(more.starts_with(whole));
  std::istringstream added(more.substr(whole.size()));
  std::set<std::string> policies;
  for (std::string line; std::getline(added, line);)
    policies.insert(ordered_json::parse(line).value("policy", ""));
  CHECK(policies == std::set<std::string>{"keydiff:removed=0.5"});
}

TEST_CASE("evaluate: Ctrl-C leaves whole lines", "[evaluate]") {
  const Setting s;
  const Folder streams;
  Process process(streams, KVTRIM_EVALUATE, s.all(two));
  // Some results are there, not all.
  const auto written = [&] {
    std::error_code ignored;
    const auto size = std::filesystem::file_size(s.out, ignored);
    return ignored ? 0 : size;
  };
  for (int i = 0; i < 3000 && written() < 20000; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  kill(process.id(), SIGINT);
  CHECK(process.wait() == 130);
  CHECK_THAT(process.err(), ContainsSubstring("interrupted"));
  CHECK_THAT(process.err(), ContainsSubstring("the same command goes on"));
  const std::string part = read_text(s.out);
  CHECK(part.ends_with("\n"));
  CHECK(part.size() >= 20000);
  CHECK_FALSE(s.lines().empty());
}

TEST_CASE("evaluate: tasks that the full cache fails are dropped and named", "[evaluate]") {
  const Setting s;
  const Result r = s.run({"--policy", "streaming", "--removed", "0.5"});
  INFO(r.out << r.err);
  REQUIRE(r.status == 0);
  int dropped = 0;
  for (const auto& line : s.lines()) {
    if (line["kind"] == "task") {
      CHECK(line["dropped"] == true);
      CHECK(line["drawn"] == 9);  // fewer than 8 of 16 is certain
      CHECK(line["answered"] == 0);
      ++dropped;
    }
    if (line["kind"] == "answer") CHECK(line["policy"] == "full");
  }
  CHECK(dropped == 8);
  CHECK_THAT(r.out, ContainsSubstring("dropped: needle_number at 1024 tokens"));
}

TEST_CASE("evaluate: foreign and broken files are refused with the line", "[evaluate][fault]") {
  const Setting s;
  const std::string header =
      R"({"kind":"suite","version":1,"suite":"small","sizes":[[1024,8,4]],"expect":"full","model":"m.gguf",)"
      R"("model_hash":"00","layers":2,"kv_heads":3,"row_bytes":384,"dtype":"f32","page_size":4,)"
      R"("commit":"x"})";
  program_test::write_text(s.out, header + "\n");
  s.fails(two, "line 1: results with model_hash \"00\"");
  program_test::write_text(s.out, "{\"kind\":\"answer\"}\n");
  s.fails(two, "line 1: it has kind \"answer\"");
  program_test::write_text(s.out, "");
  REQUIRE(s.run({"--policy", "streaming", "--removed", "0.5"}).status == 0);
  const std::string good = read_text(s.out);
  s.fails(two, "line 1: results with expect \"truth\", not \"full\"");
  const auto lines = std::count(good.begin(), good.end(), '\n');
  const std::string next = "line " + std::to_string(lines + 1) + ": ";
  const Arguments again{"--policy", "streaming", "--removed", "0.5"};
  program_test::write_text(s.out, good + "{\"kind\":\n");
  s.fails(again, next + "it is no JSON object");
  program_test::write_text(s.out, good + "{\"kind\":\"answer\",\"prompt\":\"p\"}\n");
  s.fails(again, next);
  program_test::write_text(s.out, good + header + "\n");
  s.fails(again, next + "results with expect");
  // A kind that this program does not know is none of its business.
  program_test::write_text(s.out, good + "{\"kind\":\"later\"}\n");
  CHECK(s.run(again).status == 0);
}

TEST_CASE("evaluate: bad input ends before the work", "[evaluate][fault]") {
  const Setting s;
  s.fails({"--policy", "snap"}, "unknown policy 'snap'");
  s.fails({"--policy", "snapkv:kernel=0"}, "policy 'snapkv:kernel=0'");
  s.fails({"--policy", "full"}, "no policy but full");
  s.fails({"--policy", "snapkv", "snapkv"}, "given twice");
  s.fails({"--removed", "1.5"}, "is not within 0 and 1");
  s.fails({"--policy", "qfilter"}, "needs --filters");
  s.fails({"--suite", "standard"}, "needs 2305 positions, more than the model's context of 1400");
  CHECK(s.run({"--suite", "huge"}).status != 0);
  CHECK_FALSE(std::filesystem::exists(s.out));
  CHECK(run_program(KVTRIM_EVALUATE, {"--model", s.model, "--out", s.folder.file("")}).status == 1);
  // Endless, if it were read.
  const Result r = run_program(KVTRIM_EVALUATE, {"--model", s.model, "--out", "/dev/zero"});
  CHECK(r.status == 1);
  CHECK_THAT(r.err, ContainsSubstring("it is no regular file"));
}

TEST_CASE("evaluate: on a full disk it ends, and goes on when there is room", "[evaluate][fault]") {
  const Setting s;
  std::string command = "trap '' XFSZ; ulimit -f 20; exec \"$0\" \"$@\"";
  Arguments arguments{"-c", command, KVTRIM_EVALUATE};
  const Arguments all = s.all(two);
  arguments.insert(arguments.end(), all.begin(), all.end());
  const Result r = run_program("/bin/sh", arguments);
  INFO(r.out << r.err);
  CHECK(r.status == 1);
  CHECK_THAT(r.err, ContainsSubstring("cannot write " + s.out));
  CHECK(s.run(two).status == 0);
  CHECK(read_text(s.out) == whole_run().second);
}
