// SPDX-License-Identifier: Apache-2.0

// The program `retention`, started as a user does, with a tiny model.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "catch.hpp"
#include "llama_engine/llama.hpp"
#include "llama_engine/sampling.hpp"
#include "llama_engine/tokenizer.hpp"
#include "program/policy_spec.hpp"
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

using Tokens = std::vector<std::int32_t>;

constexpr int row_bytes = program_test::tiny_heads * 2 * program_test::tiny_dim * 4;

Tokens random_tokens(std::size_t n, std::uint32_t seed) {
  std::mt19937 random(seed);
  Tokens tokens(n);
  for (auto& t : tokens) t = static_cast<std::int32_t>(' ' + random() % 95);
  return tokens;
}

std::string prompt_line(const std::string& id,
                        const Tokens& all,
                        std::size_t question,
                        const std::string& answer) {
  const auto border = all.end() - static_cast<std::ptrdiff_t>(question);
  const ordered_json line{{"id", id},
                          {"tokens", all.size()},
                          {"answer", answer},
                          {"context", Tokens(all.begin(), border)},
                          {"question", Tokens(border, all.end())}};
  return line.dump() + "\n";
}

std::string sample_line(const Tokens& ids, std::size_t prefill) {
  return ordered_json{{"prefill", prefill}, {"ids", ids}}.dump() + "\n";
}

/// The tiny model by itself, for what the full cache must give.
class Reference {
 public:
  /// The text of the seven likeliest tokens, one after the other.
  std::string answer(const Tokens& prompt) {
    Tokens all = prompt;
    for (int i = 0; i < 7; ++i) all.push_back(engine::greedy_token(run(all).back()));
    return tokenizer_.decode(Tokens(all.end() - 7, all.end()));
  }
  /// Sum of the log-probabilities of the tokens after `prefill` and one.
  double log_probability(const Tokens& ids, std::size_t prefill) {
    const auto rows = run(ids);
    double sum = 0;
    for (std::size_t i = prefill + 1; i < ids.size(); ++i) {
      const auto& row = rows[i - 1];
      double total = 0;
      for (const float x : row) total += std::exp(double{x});
      sum += double{row[static_cast<std::size_t>(ids[i])]} - std::log(total);
    }
    return sum;
  }

 private:
  std::vector<std::vector<float>> run(const Tokens& tokens) {
    auto params = model_.cache_params();
    params.pages = 100;
    kvtrim::PagedCache cache(params);
    const auto sequence = cache.try_create();
    const engine::Segment segment{*sequence, tokens};
    REQUIRE(model_.forward(cache, {&segment, 1}, engine::LogitRows::all) == kvtrim::Status::ok);
    std::vector<std::vector<float>> rows;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const auto row = model_.logits(static_cast<Eigen::Index>(i));
      rows.emplace_back(row.begin(), row.end());
    }
    return rows;
  }

  engine::GgufFile file_ = tiny_model().file();
  engine::Tokenizer tokenizer_{file_};
  engine::LlamaModel model_{file_};
};

/// Two prompts of 40 tokens, 10 of them the question: the first has the answer that the model gives, the second none.
struct Setting {
  Folder folder;
  std::string model = write_model(folder, "m.gguf", tiny_model());
  std::string json = folder.file("out.jsonl");
  std::string prompts;

  Setting() {
    const Tokens first = random_tokens(40, 1);
    prompts = folder.with("prompts.jsonl",
                          prompt_line("a", first, 10, Reference().answer(first).substr(1, 4)) +
                              prompt_line("b", random_tokens(40, 2), 10, "longer than 7 tokens"));
  }

  [[nodiscard]] Result run(Arguments arguments) const {
    arguments.insert(arguments.begin(), {"--model", model, "--page-size", "4"});
    return run_program(KVTRIM_RETENTION, arguments);
  }
  /// The JSON lines of a run that must end well.
  [[nodiscard]] std::vector<ordered_json> lines(Arguments arguments) const {
    arguments.insert(arguments.end(), {"--json", json});
    const Result r = run(arguments);
    INFO(r.out << r.err);
    REQUIRE(r.status == 0);
    CHECK_FALSE(std::filesystem::exists(json + ".part"));
    return program_test::read_json_lines(json);
  }
};

void check_error(const Result& r, const std::string& words) {
  INFO(r.out << r.err);
  CHECK(r.status == 1);
  CHECK(r.err.starts_with("retention: "));
  CHECK(std::count(r.err.begin(), r.err.end(), '\n') == 1);
  CHECK_THAT(r.err, ContainsSubstring(words));
}

/// Refused before the model is read.
void check_early_error(const Result& r, const std::string& words) {
  check_error(r, words);
  CHECK(r.out.empty());
}

}  // namespace

TEST_CASE("retention: a JSON line for each policy and size, with exactly these keys", "[program]") {
  const Setting s;
  const auto lines = s.lines({"--prompts",
                              s.prompts,
                              "--policy",
                              "streaming",
                              "h2o",
                              "snapkv:window=4",
                              "--removed",
                              "0.5,0.9"});
  std::vector<std::pair<std::string, double>> variants;
  for (const auto& line : lines) {
    std::vector<std::string> keys;
    for (const auto& [key, value] : line.items()) keys.push_back(key);
    CHECK(keys == std::vector<std::string>{"kind",
                                           "policy",
                                           "mode",
                                           "tokens",
                                           "removed",
                                           "kept_fraction",
                                           "correct",
                                           "prompts",
                                           "perplexity",
                                           "retention",
                                           "fill",
                                           "live_bytes",
                                           "released_pages",
                                           "bytes_moved",
                                           "evict_ms"});
    CHECK(line["kind"] == "retention");
    variants.emplace_back(line["policy"], line["removed"]);
  }
  // The full cache is always measured: it is what the others are compared with.
  CHECK(variants == std::vector<std::pair<std::string, double>>{{"full", 0},
                                                                {"streaming", 0.5},
                                                                {"streaming", 0.9},
                                                                {"h2o", 0.5},
                                                                {"h2o", 0.9},
                                                                {"snapkv:window=4", 0.5},
                                                                {"snapkv:window=4", 0.9}});
}

TEST_CASE("retention: rows, bytes and pages agree with one another, in both modes and all types",
          "[program]") {
  const Setting s;
  struct Mode {
    std::string name;
    int rows;  // read before the eviction
  };
  for (const Mode& mode : {Mode{"aware", 39}, {"agnostic", 30}}) {
    for (const auto& [type, bytes] : {std::pair{"f32", row_bytes}, {"f16", row_bytes / 2}}) {
      const auto lines = s.lines({"--prompts",
                                  s.prompts,
                                  "--policy",
                                  "full",
                                  "streaming",
                                  "h2o",
                                  "snapkv:window=4",
                                  "--removed",
                                  "0.5,0.8",
                                  "--mode",
                                  mode.name,
                                  "--cache-type",
                                  type});
      REQUIRE(lines.size() == 7);
      for (const auto& line : lines) {
        INFO(mode.name << ' ' << type << ' ' << line.dump());
        const double removed = line["removed"];
        const int kept = static_cast<int>(std::floor(mode.rows * (1 - removed) + 0.5 + 1e-9));
        CHECK(line["mode"] == mode.name);
        CHECK(line["tokens"] == 40);
        CHECK(line["kept_fraction"].get<double>() ==
              Catch::Approx(static_cast<double>(kept) / mode.rows));
        CHECK(line["live_bytes"] == kept * bytes);
        CHECK(line["released_pages"] == (mode.rows + 3) / 4 - (kept + 3) / 4);
        CHECK(line["prompts"] == 2);
        CHECK(line["correct"].get<int>() >= 0);
        CHECK(line["correct"].get<int>() <= 1);
        CHECK(line["perplexity"].is_null());
        CHECK(line["retention"].is_null());
        CHECK(line["evict_ms"].get<double>() >= 0);
        CHECK(line["bytes_moved"].get<int>() >= 0);
        CHECK(line["bytes_moved"].get<int>() <= kept * bytes);
        if (line["policy"] == "full") {
          CHECK(line["correct"] == 1);
          CHECK(line["bytes_moved"] == 0);
        }
        // All but the 4 sinks close up.
        if (line["policy"] == "streaming") CHECK(line["bytes_moved"] == (kept - 4) * bytes);
      }
    }
  }
}

TEST_CASE("retention: every policy keeps what it is asked for, heads and layers together",
          "[program]") {
  const Setting s;
  const std::vector<float> filters(program_test::tiny_heads * program_test::tiny_dim, 0.5F);
  const std::string path = s.folder.with(
      "filters.f32",
      std::string(reinterpret_cast<const char*>(filters.data()), filters.size() * sizeof(float)));
  Arguments arguments{"--prompts", s.prompts, "--filters", path, "--removed", "0.5", "--policy"};
  for (const auto& policy : program::methods()) {
    const program::SpecValues defaults = program::defaults_of(policy);
    std::string spec = std::string(policy.name);
    if (std::ranges::find(defaults.keys(), "kernel") != defaults.keys().end()) spec += ":window=4";
    if (policy.name == "chunkkv") spec += ",chunk=4";
    if (policy.name == "lagkv") spec += ":lag=6";
    arguments.push_back(spec);
  }
  for (const std::string mode : {"aware", "agnostic"}) {
    Arguments with_mode = arguments;
    with_mode.insert(with_mode.begin(), {"--mode", mode});
    const auto lines = s.lines(with_mode);
    REQUIRE(lines.size() == program::methods().size());
    for (const auto& line : lines) {
      INFO(mode << ' ' << line.dump());
      const int rows = mode == "aware" ? 39 : 30;
      const bool full = line["policy"] == "full";
      const double kept = line["kept_fraction"].get<double>() * rows;
      CHECK(kept <= (full ? rows : (rows + 1) / 2) + 1e-9);
      CHECK(kept >= (full ? rows : (rows + 1) / 2 - 4));  // whole pages may be fewer rows
      CHECK(line["fill"].get<double>() > 0.7);
      CHECK(line["fill"].get<double>() <= 1);
      CHECK(line["live_bytes"].get<double>() == Catch::Approx(kept * row_bytes).epsilon(1e-6));
    }
  }
}

TEST_CASE("retention: a policy's own size goes before --removed", "[program][edge]") {
  const Setting s;
  const auto lines = s.lines({"--prompts",
                              s.prompts,
                              "--policy",
                              "h2o:budget=13",
                              "h2o:removed=0.75",
                              "h2o:budget=1000",
                              "--removed",
                              "0.5"});
  REQUIRE(lines.size() == 4);
  CHECK(lines[1]["removed"].is_null());
  CHECK(lines[1]["live_bytes"] == 13 * row_bytes);
  CHECK(lines[2]["removed"] == 0.75);
  CHECK(lines[2]["live_bytes"] == 10 * row_bytes);
  CHECK(lines[3]["kept_fraction"] == 1.0);
}

TEST_CASE("retention: rows that a policy must protect stay beyond the budget", "[program][edge]") {
  const Setting s;
  const auto lines =
      s.lines({"--prompts", s.prompts, "--policy", "snapkv:window=16,sinks=4", "--removed", "0.9"});
  REQUIRE(lines.size() == 2);
  CHECK(lines[1]["live_bytes"] == 20 * row_bytes);
}

TEST_CASE("retention: prompts are chosen by --tokens and --limit", "[program][edge]") {
  const Setting s;
  const std::string file =
      s.folder.with("more.jsonl",
                    read_text(s.prompts) + prompt_line("c", random_tokens(50, 3), 10, "x") +
                        prompt_line("d", random_tokens(50, 4), 10, "x"));
  const Arguments base{"--prompts", file, "--policy", "streaming", "--removed", "0.5"};
  const auto with = [&](const Arguments& more) {
    Arguments all = base;
    all.insert(all.end(), more.begin(), more.end());
    return s.lines(all).back();
  };
  CHECK(with({"--tokens", "50"})["prompts"] == 2);
  CHECK(with({"--tokens", "50"})["tokens"] == 50);
  CHECK(with({"--tokens", "50", "--limit", "1"})["prompts"] == 1);
  CHECK(with({})["prompts"] == 4);
  CHECK(with({})["tokens"].is_null());
  CHECK(with({"--limit", "2"})["tokens"] == 40);
  Arguments none = base;
  none.insert(none.end(), {"--tokens", "41"});
  check_early_error(s.run(none), "has no prompt of 41 tokens");
}

TEST_CASE("retention: perplexity of --ids is that of the tokens after the prefix", "[program]") {
  const Setting s;
  const Tokens first = random_tokens(60, 5);
  const Tokens second = random_tokens(50, 6);
  const std::string ids =
      s.folder.with("ids.jsonl", sample_line(first, 40) + sample_line(second, 30));
  const auto lines = s.lines({"--ids", ids, "--policy", "full", "streaming", "--removed", "0,0.5"});
  REQUIRE(lines.size() == 3);
  Reference reference;
  const double log_probability =
      reference.log_probability(first, 40) + reference.log_probability(second, 30);
  CHECK(lines[0]["perplexity"].get<double>() ==
        Catch::Approx(std::exp(-log_probability / 38)).epsilon(1e-4));
  CHECK(lines[0]["retention"] == 100.0);
  CHECK(lines[1]["perplexity"] == lines[0]["perplexity"]);
  const double cut = lines[2]["perplexity"];
  CHECK(cut != lines[0]["perplexity"].get<double>());
  CHECK(lines[2]["retention"].get<double>() ==
        Catch::Approx(100 * lines[0]["perplexity"].get<double>() / cut));
  CHECK(lines[2]["kept_fraction"].get<double>() == Catch::Approx(0.5));
  CHECK(lines[2]["correct"].is_null());
  CHECK(lines[2]["prompts"] == 0);
  CHECK(lines[2]["live_bytes"].get<double>() == 17.5 * row_bytes);
  CHECK(s.lines({"--ids", ids, "--samples", "1"}).front()["tokens"] == 60);
}

TEST_CASE("retention: perplexity of --text is that of samples cut from it", "[program]") {
  const Setting s;
  std::string text;
  for (const auto token : random_tokens(100, 7)) text += static_cast<char>(token);
  const auto lines = s.lines({"--text",
                              s.folder.with("text", text),
                              "--prefill",
                              "20",
                              "--next",
                              "10",
                              "--samples",
                              "3",
                              "--policy",
                              "streaming",
                              "--removed",
                              "0.5"});
  REQUIRE(lines.size() == 2);
  Reference reference;
  double log_probability = 0;
  for (const std::size_t begin : {0U, 35U, 70U}) {
    Tokens ids;
    for (const char c : text.substr(begin, 30)) ids.push_back(c);
    log_probability += reference.log_probability(ids, 20);
  }
  CHECK(lines[0]["perplexity"].get<double>() ==
        Catch::Approx(std::exp(-log_probability / 27)).epsilon(1e-4));
  CHECK(lines[1]["tokens"] == 30);
  CHECK(lines[1]["live_bytes"] == 10 * row_bytes);
  check_error(s.run({"--text", s.folder.with("short", "abc"), "--prefill", "20", "--next", "10"}),
              "the text has 3 tokens, but --prefill and --next ask for 30");
}

TEST_CASE("retention: prompts and samples in one run do not disturb each other", "[program]") {
  const Setting s;
  const std::string ids = s.folder.with("ids.jsonl", sample_line(random_tokens(60, 5), 40));
  const Arguments policies{"--policy", "snapkv:window=4", "h2o", "--removed", "0.5"};
  const auto run = [&](Arguments what) {
    what.insert(what.end(), policies.begin(), policies.end());
    return s.lines(what);
  };
  const auto needles = run({"--prompts", s.prompts});
  const auto samples = run({"--ids", ids});
  const auto both = run({"--prompts", s.prompts, "--ids", ids});
  REQUIRE(both.size() == 3);
  for (std::size_t i = 0; i < both.size(); ++i) {
    CHECK(both[i]["correct"] == needles[i]["correct"]);
    CHECK(both[i]["perplexity"] == samples[i]["perplexity"]);
  }
}

TEST_CASE("retention: the table says what the JSON says", "[program]") {
  const Setting s;
  const Result r = s.run({"--prompts", s.prompts, "--policy", "full", "h2o", "--removed", "0.5"});
  REQUIRE(r.status == 0);
  CHECK_THAT(r.out, ContainsSubstring("2 policies and sizes, 2 prompts (aware), 0 samples"));
  CHECK_THAT(r.out,
             ContainsSubstring("policy") && ContainsSubstring("pages freed") &&
                 ContainsSubstring("found"));
  CHECK_THAT(r.out, ContainsSubstring("1/2"));
  CHECK(r.err.empty());  // no terminal, no progress line
}

TEST_CASE("retention: options that make no sense are refused before the model is read",
          "[program][edge]") {
  const Setting s;
  const auto refused = [&](const Arguments& arguments, const std::string& why) {
    Arguments all{"--prompts", s.prompts, "--json", s.json};
    all.insert(all.end(), arguments.begin(), arguments.end());
    check_early_error(s.run(all), why);
    CHECK_FALSE(std::filesystem::exists(s.json));
    CHECK_FALSE(std::filesystem::exists(s.json + ".part"));
  };
  refused({"--policy", "lru"}, "unknown policy 'lru'; known are full, streaming, h2o, snapkv");
  refused({"--policy", "h2o", "snapkv:windows=8"},
          "unknown key 'windows'; known are config, window, ");
  refused({"--policy", "snapkv:kernel=4"}, "policy 'snapkv:kernel=4'");
  refused({"--policy", "h2o", "h2o:decay=0.5"},
          "one has decay 1, squared false, the other decay 0.5");
  refused({"--removed", "1.5"}, "--removed 1.5");
  refused({"--removed", "0.5,-0.1"}, "--removed -0.1");
  refused({"--removed", "nan"}, "--removed nan");
  refused({"--ids", s.folder.file("none")}, "cannot read " + s.folder.file("none"));
  refused({"--text", s.folder.file("none")}, "cannot read " + s.folder.file("none"));
  check_early_error(s.run({}), "nothing to do: give --prompts, --ids or --text");
  check_early_error(s.run({"--prompts", s.folder.with("bad", "{\n")}), "bad line 1: ");
  for (const Arguments& wrong : {Arguments{"--mode", "both"},
                                 {"--cache-type", "f8"},
                                 {"--prefill", "0"},
                                 {"--next", "1"},
                                 {"--samples", "0"},
                                 {"--threads", "-1"}}) {
    const Result r = s.run(wrong);
    INFO(wrong.front());
    CHECK(r.status != 0);
    CHECK_THAT(r.err, ContainsSubstring(wrong.front()));
  }
}

TEST_CASE("retention: a --json path that cannot be written is refused before the model is read",
          "[program][edge]") {
  const Setting s;
  const std::string missing = s.folder.file("missing/out.jsonl");
  check_early_error(s.run({"--prompts", s.prompts, "--json", missing}), "cannot write " + missing);
  std::filesystem::create_directory(s.folder.file("sub"));
  check_early_error(s.run({"--prompts", s.prompts, "--json", s.folder.file("sub")}),
                    "cannot write " + s.folder.file("sub"));
}

TEST_CASE("retention: for a model that it cannot run, one line names it, and no file is left",
          "[program][edge]") {
  Setting s;
  const auto refused = [&](const std::string& path, const std::string& why) {
    s.model = path;
    check_error(s.run({"--prompts", s.prompts, "--json", s.json}),
                "retention: " + path + ": " + why);
    CHECK_FALSE(std::filesystem::exists(s.json));
    CHECK_FALSE(std::filesystem::exists(s.json + ".part"));
  };
  refused(s.folder.file("none.gguf"), "cannot be opened");
  refused(s.folder.with("text.gguf", "This is a text, not a model."), "not a GGUF file");
  refused(write_model(s.folder, "half.gguf", tiny_model(), tiny_model().bytes().size() / 2), "");
  refused(write_model(s.folder, "less.gguf", tiny_model().without("output_norm.weight")),
          "missing tensor output_norm.weight");
  refused(write_model(s.folder, "other.gguf", tiny_model().string("general.architecture", "rwkv")),
          "architecture 'rwkv' is not supported");
}

TEST_CASE("retention: texts that are not for the model are refused before the first is read",
          "[program][edge]") {
  const Setting s;
  const auto refused =
      [&](const std::string& option, const std::string& more, const std::string& why) {
        const std::string begin =
            option == "--ids" ? sample_line(random_tokens(40, 1), 20) : read_text(s.prompts);
        const Result r = s.run({option, s.folder.with("more.jsonl", begin + more)});
        check_error(r, why);
        CHECK(r.out.find("policies and sizes") == std::string::npos);
      };
  Tokens strange = random_tokens(40, 8);
  strange[35] = 259;
  refused("--prompts",
          prompt_line("z", strange, 10, "x"),
          "prompt z: token 259 is outside the model's vocabulary of 259");
  strange[35] = 5;
  strange[3] = -1;
  refused("--ids",
          sample_line(strange, 30),
          "sample 2: token -1 is outside the model's vocabulary of 259");
  // The last of 7 answer tokens is not read.
  CHECK(s.run({"--prompts",
               s.folder.with("fits", prompt_line("z", random_tokens(194, 9), 10, "x")),
               "--policy",
               "h2o"})
            .status == 0);
  refused("--prompts",
          prompt_line("z", random_tokens(195, 9), 10, "x"),
          "prompt z needs 201 positions, more than the model's context of 200");
  CHECK(s.run({"--ids",
               s.folder.with("fits", sample_line(random_tokens(201, 9), 100)),
               "--policy",
               "h2o"})
            .status == 0);
  refused("--ids",
          sample_line(random_tokens(202, 9), 100),
          "sample 2 needs 201 positions, more than the model's context of 200");
}

TEST_CASE("retention: Ctrl-C ends it, leaves no half-written file and the older one as it was",
          "[program][edge]") {
  const Setting s;
  std::string many;
  for (std::uint32_t i = 0; i < 2000; ++i) many += prompt_line("p", random_tokens(190, i), 10, "x");
  const std::string prompts = s.folder.with("many.jsonl", many);
  const std::string json = s.folder.with("old.jsonl", "old");
  for (const int signal : {SIGINT, SIGTERM}) {
    const Folder streams;
    program_test::Process process(
        streams, KVTRIM_RETENTION, {"--model", s.model, "--prompts", prompts, "--json", json});
    for (int i = 0; i < 3000 && process.out().find("policies and sizes") == std::string::npos; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    CHECK(std::filesystem::exists(json + ".part"));
    REQUIRE(kill(process.id(), signal) == 0);
    const int status = process.wait();
    CHECK(status == 130);
    CHECK(process.err() == "retention: interrupted; no file was written\n");
    CHECK_FALSE(std::filesystem::exists(json + ".part"));
    CHECK(read_text(json) == "old");
  }
}

TEST_CASE("retention: --help names every option and every policy", "[program]") {
  const Result r = run_program(KVTRIM_RETENTION, {"--help"});
  CHECK(r.status == 0);
  for (const char* word :
       {"--model",   "--prompts",    "--ids",       "--text",    "--policy", "--removed",
        "--mode",    "--tokens",     "--limit",     "--prefill", "--next",   "--samples",
        "--json",    "--cache-type", "--page-size", "--threads", "--demo",   "full",
        "streaming", "h2o",          "snapkv",      "removed=",  "budget="}) {
    CHECK_THAT(r.out, ContainsSubstring(word));
  }
}
