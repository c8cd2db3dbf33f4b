// SPDX-License-Identifier: Apache-2.0

// The program `evaluate`, started as a user does, with a tiny model; with --expect full, because that model knows nothing.

#include <signal.h>
#include <sys/file.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
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
#include "evaluate/runner.hpp"
#include "evaluate/sha256.hpp"
#include "evaluate/suite.hpp"
#include "llama_engine/llama.hpp"
#include "llama_engine/sampling.hpp"
#include "llama_engine/tokenizer.hpp"
#include "program/eval_data.hpp"
#include "program/policy_spec.hpp"
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
    CHECK(r.err.starts_with("evaluate: "));
    CHECK(std::count(r.err.begin(), r.err.end(), '\n') == 1);
    CHECK_THAT(r.err, ContainsSubstring(message));
  }
  /// The lines of a kind, of a run that must end well.
  [[nodiscard]] std::vector<ordered_json> lines_of(const std::string& kind,
                                                   const Arguments& arguments) const {
    std::filesystem::remove(out);
    const Result r = run(arguments);
    INFO(r.out << r.err);
    REQUIRE(r.status == 0);
    auto all = lines();
    std::erase_if(all, [&](const ordered_json& line) { return line["kind"] != kind; });
    return all;
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

TEST_CASE("evaluate: Ctrl-C leaves whole lines, and no lock", "[evaluate]") {
  const Setting s;
  const int signal = GENERATE(SIGINT, SIGTERM);
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
  // Meanwhile no other run writes there.
  s.fails(two, "cannot write " + s.out + ": another run is writing it");
  kill(process.id(), signal);
  CHECK(process.wait() == 130);
  CHECK_THAT(process.err(), ContainsSubstring("interrupted"));
  CHECK_THAT(process.err(), ContainsSubstring("the same command goes on"));
  const std::string part = read_text(s.out);
  CHECK(part.ends_with("\n"));
  CHECK(part.size() >= 20000);
  CHECK_FALSE(s.lines().empty());
  std::FILE* file = std::fopen(s.out.c_str(), "ab");
  REQUIRE(file != nullptr);
  CHECK(flock(fileno(file), LOCK_EX | LOCK_NB) == 0);
  std::fclose(file);
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
  s.fails({"--policy", "snapkv:windows=8"}, "unknown key 'windows'; known are config, window, ");
  s.fails({"--policy", "h2o", "h2o:decay=0.5"},
          "one has decay 1, squared false, exact sums false, the other decay 0.5");
  s.fails({"--removed", "0.5,-0.1"}, "--removed -0.1");
  s.fails({"--removed", "nan"}, "--removed nan");
  s.fails({"--policy", "qfilter"}, "needs --filters");
  // Filters of another model: 6 heads of 8 dimensions here.
  s.fails({"--policy", "qfilter", "--filters", s.folder.with("filters", std::string(4 * 40, 'x'))},
          "must hold 48");
  s.fails({"--policy", "qfilter", "--filters", s.folder.file("none")}, "cannot read");
  s.fails({"--suite", "standard"}, "needs 2305 positions, more than the model's context of 1400");
  for (const Arguments& wrong : {Arguments{"--suite", "huge"},
                                 {"--task", "haystack"},
                                 {"--prompts", "-1"},
                                 {"--seed", "-1"},
                                 {"--expect", "luck"},
                                 {"--write-prompts", "x"},  // beside --out
                                 {"--cache-type", "f8"},
                                 {"--page-size", "0"},
                                 {"--threads", "-1"}}) {
    const Result r = s.run(wrong);
    INFO(wrong.front());
    CHECK(r.status != 0);
    CHECK_THAT(r.err, ContainsSubstring(wrong.front()));
  }
  CHECK_FALSE(std::filesystem::exists(s.out));
}

TEST_CASE("evaluate: a file that cannot be written is named", "[evaluate][fault]") {
  Setting s;
  const auto refused = [&](const std::string& path, const std::string& why) {
    s.out = path;
    s.fails({"--task", "needle_word", "--prompts", "1"}, "cannot write " + path + why);
  };
  refused(s.folder.file("missing/out.jsonl"), ": No such file");
  refused(s.folder.file(""), ": it is a folder");
  refused("/dev/full", ": it is no regular file");
  refused("/dev/zero", ": it is no regular file");  // endless, if it were read
  refused("/proc/version", "");                     // read-only for root, too
  CHECK(run_program(KVTRIM_EVALUATE, {"--model", s.model}).status == 1);
  const Result r = run_program(
      KVTRIM_EVALUATE, {"--model", s.model, "--write-prompts", s.folder.file("missing/p.jsonl")});
  CHECK(r.status == 1);
  CHECK_THAT(r.err, ContainsSubstring("cannot write " + s.folder.file("missing/p.jsonl")));
}

TEST_CASE("evaluate: for a model that it cannot run, one line names it, and no file is left",
          "[evaluate][fault]") {
  Setting s;
  const auto refused = [&](const std::string& path, const std::string& why) {
    s.model = path;
    s.fails(two, "evaluate: " + path + ": " + why);
    CHECK_FALSE(std::filesystem::exists(s.out));
  };
  const auto model = tiny_model(false, context);
  refused(s.folder.file("none.gguf"), "cannot be opened");
  refused(s.folder.with("text.gguf", "This is a text, not a model."), "not a GGUF file");
  refused(write_model(s.folder, "half.gguf", model, model.bytes().size() / 2), "");
  refused(
      write_model(s.folder, "less.gguf", tiny_model(false, context).without("output_norm.weight")),
      "missing tensor output_norm.weight");
  refused(write_model(s.folder, "other.gguf", tiny_model().string("general.architecture", "rwkv")),
          "architecture 'rwkv' is not supported");
}

TEST_CASE("evaluate: texts too short for the lengths are refused with the numbers, in every task",
          "[evaluate][fault]") {
  const Folder folder;
  const engine::GgufFile file = tiny_model().file();
  const engine::Tokenizer tokenizer(file);
  CHECK_THROWS_WITH(evaluate::Generator(tokenizer, folder.file("none")),
                    ContainsSubstring("cannot read " + folder.file("none")));
  // One byte a token: 700 of 1,024.
  for (const char* name : {"novel.txt", "proceedings.txt", "code.txt"})
    program_test::write_text(folder.file(name), std::string(700, 'x'));
  const evaluate::Generator generator(tokenizer, folder.file(""));
  for (const std::string_view task : evaluate::tasks) {
    INFO(task);
    if (task != "key_value" && task != "multi_turn" && task != "four_needles") {
      CHECK_THROWS_WITH(generator.make(task, 1024, 0, 8),
                        ContainsSubstring(".txt has 700 tokens") && ContainsSubstring("1024"));
    }
    CHECK_THROWS_WITH(generator.make(task, 4096, 0, 8), ContainsSubstring(".txt has 700 tokens"));
    CHECK_THROWS_WITH(generator.make(task, 60, 0, 8), ContainsSubstring("60"));
  }
  CHECK_THROWS_WITH(generator.samples(1024, 4),
                    ContainsSubstring("the text has 700 tokens") && ContainsSubstring("1281"));
}

TEST_CASE("evaluate: the suite's prompts are those of its version, and another seed's are others",
          "[evaluate]") {
  const Setting s;
  const auto written = [&](const Arguments& more) {
    Arguments arguments{"--model", s.model, "--write-prompts", s.folder.file("prompts.jsonl")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Result r = run_program(KVTRIM_EVALUATE, arguments);
    INFO(r.err);
    REQUIRE(r.status == 0);
    return program_test::read_json_lines(s.folder.file("prompts.jsonl"));
  };
  const auto suite = written({});
  // Other prompts are another suite: count evaluate::suite_version up, and then put the new hash here. (Another form of these
  // lines has another hash too.)
  CHECK(evaluate::suite_version == 1);
  CHECK(evaluate::sha256_of_file(s.folder.file("prompts.jsonl")) ==
        "f13d93ffb0f30bf9ee0b3555afa52a31b03a5fbb53f9975cfbeee803084a366b");
  REQUIRE(suite.size() == 8 * 16);
  for (const auto& line : suite) {
    INFO(line["id"]);
    const std::size_t turns = line["task"] == "multi_turn" ? 3 : 1;
    CHECK((line.contains("then") ? line["then"].size() + 1 : 1) == turns);
    CHECK(line.contains("copy") == (line["task"] == "cued_copy"));
    CHECK(line["kind"] == "prompt");
  }
  // What other programs read of it.
  CHECK(program::read_needles(s.folder.file("prompts.jsonl"), 0, 0).size() == suite.size());

  std::set<std::string> contexts;
  for (const auto& line : suite) contexts.insert(line["context"].dump());
  const auto others = written({"--seed", "7"});
  REQUIRE(others.size() == suite.size());
  for (const auto& line : others) {
    CHECK(line["id"].get<std::string>().ends_with("-seed-7"));
    contexts.insert(line["context"].dump());
  }
  CHECK(contexts.size() == 2 * suite.size());
  REQUIRE(s.run({"--task", "needle_word", "--prompts", "1", "--seed", "7"}).status == 0);
  CHECK(s.lines().front()["suite"] == "small seed 7");
  s.fails({"--task", "needle_word", "--prompts", "1"},
          "line 1: results with suite \"small seed 7\", not \"small\"");
}

TEST_CASE("evaluate: every policy keeps what it is asked for, known or later, whatever the dtype",
          "[evaluate]") {
  const Setting s;
  const std::vector<float> filters(program_test::tiny_heads * program_test::tiny_dim, 0.5F);
  Arguments arguments{"--expect",
                      "full",
                      "--task",
                      "needle_word",
                      "--prompts",
                      "1",
                      "--removed",
                      "0.5",
                      "--filters",
                      s.folder.with("filters",
                                    std::string(reinterpret_cast<const char*>(filters.data()),
                                                filters.size() * sizeof(float))),
                      "--cache-type",
                      "",
                      "--policy"};
  for (const auto& policy : program::methods()) arguments.emplace_back(policy.name);
  for (const auto& [type, bytes] : {std::pair{"f32", 4}, {"f16", 2}}) {
    *std::ranges::find(arguments, "--cache-type").operator++() = type;
    const auto answers = s.lines_of("answer", arguments);
    CHECK(answers.size() == 2 * program::methods().size());
    for (const auto& line : answers) {
      INFO(line.dump());
      const double before = line["rows_before"], rows = line["rows"];
      if (line["policy"] == "full") {
        CHECK(rows == before);
      } else {
        CHECK(rows <= std::floor((before + 1) / 2));
        CHECK(rows >= std::floor((before + 1) / 2) - 4);  // whole pages may be fewer rows
      }
      CHECK(line["bytes"].get<double>() ==
            Catch::Approx(rows * program_test::tiny_heads * 2 * program_test::tiny_dim * bytes));
    }
  }
}

TEST_CASE("evaluate: a policy's own size goes before --removed, protected rows before both",
          "[evaluate][edge]") {
  const Setting s;
  std::map<std::string, std::pair<ordered_json, double>> rows;
  for (const auto& line : s.lines_of("answer",
                                     {"--expect",
                                      "full",
                                      "--task",
                                      "needle_word",
                                      "--prompts",
                                      "1",
                                      "--removed",
                                      "0.99",
                                      "--policy",
                                      "h2o:budget=13",
                                      "h2o:removed=0.75",
                                      "h2o:budget=5000",
                                      "snapkv:window=16,sinks=4"}))
    if (line["question"] == "known")
      rows[line["policy"]] = {line["removed"], line["rows"].get<double>()};
  CHECK(rows["h2o:budget=13"] == std::pair(ordered_json(), 13.0));
  CHECK(rows["h2o:removed=0.75"] == std::pair(ordered_json(0.75), 256.0));
  CHECK(rows["h2o:budget=5000"] == std::pair(ordered_json(), 1023.0));
  CHECK(rows["snapkv:window=16,sinks=4"] == std::pair(ordered_json(0.99), 20.0));
}

TEST_CASE("evaluate: a task or the samples alone give the lines that they give beside the others",
          "[evaluate]") {
  const Setting s;
  for (const std::string task : {"perplexity", "needle_word"}) {
    Arguments arguments = two;
    arguments.insert(arguments.begin(), {"--task", task});
    REQUIRE(s.run(arguments).status == 0);
    std::istringstream alone(read_text(s.out));
    std::filesystem::remove(s.out);
    std::size_t lines = 0;
    for (std::string line; std::getline(alone, line); ++lines)
      if (whole_run().second.find(line + "\n") == std::string::npos) FAIL(line);
    CHECK(lines > 40);
  }
}

TEST_CASE("evaluate: the full cache's perplexity is the model's own", "[evaluate]") {
  const engine::GgufFile file = tiny_model(false, context).file();
  const engine::Tokenizer tokenizer(file);
  engine::LlamaModel model(file);
  auto params = model.cache_params();
  params.pages = 100;
  const auto samples = evaluate::Generator(tokenizer, KVTRIM_SUITE_TEXTS).samples(1024, 4);
  std::istringstream lines(whole_run().second);
  std::size_t compared = 0;
  for (std::string text; std::getline(lines, text);) {
    const auto line = ordered_json::parse(text);
    if (line["kind"] != "perplexity" || line["policy"] != "full" || line["task"] != "perplexity")
      continue;
    const auto& ids = samples.at(compared++).ids;
    kvtrim::PagedCache cache(params);
    const engine::Segment segment{*cache.try_create(), ids};
    REQUIRE(model.forward(cache, {&segment, 1}, engine::LogitRows::all) == kvtrim::Status::ok);
    double sum = 0;
    for (std::size_t i = 1025; i < ids.size(); ++i) {
      const auto row = model.logits(static_cast<Eigen::Index>(i - 1));
      double total = 0;
      for (const float x : row) total += std::exp(double{x});
      sum += double{row[static_cast<std::size_t>(ids[i])]} - std::log(total);
    }
    CHECK(line["predictions"] == 256);
    CHECK(line["log_probability"].get<double>() == Catch::Approx(sum).epsilon(1e-4));
  }
  CHECK(compared == 4);
}

TEST_CASE("evaluate: the table says what the lines say", "[evaluate]") {
  const auto& [r, whole] = whole_run();
  CHECK(r.err.empty());                              // no terminal, no progress line
  std::map<std::string, std::pair<int, int>> found;  // of the known question
  std::istringstream lines(whole);
  for (std::string text; std::getline(lines, text);) {
    const auto line = ordered_json::parse(text);
    if (line["kind"] != "answer" || line["question"] != "known" || line["policy"] != "snapkv" ||
        line["removed"] != 0.9)
      continue;
    auto& [right, all] = found[line["task"]];
    right += line["correct"] == true ? 1 : 0, all += 1;
  }
  std::istringstream table(r.out);
  std::string row;
  while (std::getline(table, row) && row.find("is known at the cut") == std::string::npos) {}
  while (std::getline(table, row) && !row.starts_with("snapkv        90 %")) {}
  REQUIRE(found.size() == 8);
  for (const auto& [task, counts] : found)
    CHECK_THAT(row,
               ContainsSubstring(" " + std::to_string(counts.first) + "/" +
                                 std::to_string(counts.second) + " "));
}

TEST_CASE("evaluate: positions that are none are no picture", "[evaluate][fault]") {
  CHECK(evaluate::bits_of(std::array{0, 3, 4, 9}, 10) == "984");
  CHECK_THROWS_WITH(evaluate::bits_of(std::array{0, -1}, 10),
                    ContainsSubstring("position -1 of 10 tokens"));
  CHECK_THROWS_WITH(evaluate::bits_of(std::array{10}, 10),
                    ContainsSubstring("position 10 of 10 tokens"));
}

TEST_CASE("evaluate: --help names every option and every policy", "[evaluate]") {
  const Result r = run_program(KVTRIM_EVALUATE, {"--help"});
  CHECK(r.status == 0);
  for (const char* word : {"--model",
                           "--suite",
                           "--out",
                           "--write-prompts",
                           "--policy",
                           "--removed",
                           "--task",
                           "--prompts",
                           "--seed",
                           "--expect",
                           "--filters",
                           "--cache-type",
                           "--page-size",
                           "--threads",
                           "removed=",
                           "budget="})
    CHECK_THAT(r.out, ContainsSubstring(word));
  for (const auto& policy : program::methods())
    CHECK_THAT(r.out, ContainsSubstring(std::string(policy.name)));
}

TEST_CASE("evaluate: search_selection.py ranks what evaluate finds, and asks nothing twice",
          "[evaluate]") {
  if (!std::filesystem::exists("/usr/bin/python3")) return;
  const Setting s;
  const Arguments arguments{KVTRIM_BENCH "/search_selection.py",
                            "--programs",
                            std::filesystem::path(KVTRIM_EVALUATE).parent_path().string(),
                            "--model",
                            s.model,
                            "--out",
                            s.out,
                            "--policy",
                            "snapkv:kernel={1,5},pool={avg,max}",
                            "--prompts",
                            "2",
                            "--expect",
                            "full",
                            "--removed",
                            "0.05,0.9"};
  const Result r = run_program("/usr/bin/python3", arguments);
  INFO(r.out << r.err);
  REQUIRE(r.status == 0);
  CHECK(s.lines().front()["suite"] == "small seed 7");
  std::istringstream table(r.out);
  std::vector<std::string> rows;
  for (std::string row; std::getline(table, row);) rows.push_back(row);
  REQUIRE(rows.size() == 8);
  CHECK(rows.front().starts_with(" 0.05  needle_number 1024: "));
  CHECK(rows.back().starts_with(" 0.90  needle_number 1024: "));
  const std::string before = read_text(s.out);
  CHECK(run_program("/usr/bin/python3", arguments).out == r.out);
  CHECK(read_text(s.out) == before);
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
