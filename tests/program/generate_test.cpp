// SPDX-License-Identifier: Apache-2.0

// The program `generate`, started as a user does, with a tiny model.

#include <algorithm>
#include <cstddef>
#include <limits>
#include <regex>
#include <string>
#include <vector>

#include "catch.hpp"
#include "program/policy_spec.hpp"
#include "support.hpp"
#include "tiny_model.hpp"

using Catch::Matchers::ContainsSubstring;
using program_test::Arguments;
using program_test::Folder;
using program_test::Result;
using program_test::run_program;
using program_test::tiny_model;
using program_test::write_model;

namespace {

const std::string prompt = "A prompt of forty characters, less none.";

Result generate(const std::string& model, Arguments arguments) {
  arguments.insert(arguments.begin(), {"--model", model});
  return run_program(KVTRIM_GENERATE, arguments);
}

/// What the program says at its end.
struct Summary {
  int prompt = -1, made = -1, live = -1, seen = -1, pages = -1, freed = -1, evicted = -1;

  explicit Summary(const std::string& text) {
    const std::regex words(
        "prompt (\\d+) tokens in [^;]*; (\\d+) tokens generated[^\\n]*\\n"
        "live rows (\\d+) of (\\d+) seen[^,]*, pages in use (\\d+)[^,]*, pages freed (\\d+), "
        "rows evicted (\\d+)");
    std::smatch m;
    INFO(text);
    REQUIRE(std::regex_search(text, m, words));
    int i = 1;
    for (int* field : {&prompt, &made, &live, &seen, &pages, &freed, &evicted}) {
      *field = std::stoi(m[static_cast<std::size_t>(i++)]);
    }
  }
};

void check_error(const Result& r, const std::string& words) {
  INFO(r.err);
  CHECK(r.status == 1);
  CHECK(r.err.starts_with("generate: "));
  CHECK(std::count(r.err.begin(), r.err.end(), '\n') == 1);
  CHECK_THAT(r.err, ContainsSubstring(words));
}

}  // namespace

TEST_CASE("generate: each policy holds its size, in every cache type and position mode",
          "[program]") {
  const Folder folder;
  const std::string model = write_model(folder, "m.gguf", tiny_model());
  struct Case {
    std::string policy;
    int least, most;
  };
  // 40 tokens read, 20 made, the last of which is not read. SnapKV cuts once, after the prompt.
  const std::vector<Case> cases{{"full", 59, 59},
                                {"streaming:sinks=4,budget=16", 16, 19},
                                {"streaming:sinks=4,budget=16,form=exact", 16, 16},
                                {"h2o:budget=16", 16, 16},
                                {"h2o:removed=0.6,recent=4,mode=promote", 16, 16},
                                {"snapkv:window=4,budget=16", 35, 35}};
  for (const auto& c : cases) {
    for (const char* type : {"f32", "f16", "bf16"}) {
      for (const bool in_cache : {false, true}) {
        Arguments arguments{"--prompt",
                            prompt,
                            "--policy",
                            c.policy,
                            "--tokens",
                            "20",
                            "--cache-type",
                            type,
                            "--page-size",
                            "4"};
        if (in_cache) arguments.emplace_back("--in-cache");
        const Result r = generate(model, arguments);
        INFO(c.policy << ' ' << type << (in_cache ? " in-cache\n" : "\n") << r.err);
        REQUIRE(r.status == 0);
        CHECK(r.out.size() == 21);
        const Summary s(r.err);
        CHECK(s.prompt == 40);
        CHECK(s.made == 20);
        CHECK(s.seen == 59);
        CHECK(s.live >= c.least);
        CHECK(s.live <= c.most);
        CHECK(s.live == s.seen - s.evicted);
        CHECK(s.pages * 4 >= s.live);
        CHECK(s.pages * 4 <= s.live + 4);
        CHECK((s.freed > 0) == (c.policy != "full"));
      }
    }
  }
}

TEST_CASE("generate: every policy generates on, over heads of different lengths too", "[program]") {
  const Folder folder;
  const std::string model = write_model(folder, "m.gguf", tiny_model());
  const std::vector<float> filters(program_test::tiny_heads * program_test::tiny_dim, 0.5F);
  const std::string path = folder.with(
      "filters.f32",
      std::string(reinterpret_cast<const char*>(filters.data()), filters.size() * sizeof(float)));
  for (const auto& policy : program::methods()) {
    const program::SpecValues defaults = program::defaults_of(policy);
    std::string spec = std::string(policy.name);
    if (policy.name != "full") spec += ":budget=20";
    if (std::ranges::find(defaults.keys(), "kernel") != defaults.keys().end()) spec += ",window=4";
    if (policy.name == "chunkkv") spec += ",chunk=4";
    if (policy.name == "lagkv") spec += ",lag=6";
    for (const bool in_cache : {false, true}) {
      Arguments arguments{
          "--prompt", prompt, "--policy", spec, "--tokens", "12", "--page-size", "4"};
      if (in_cache) arguments.emplace_back("--in-cache");
      if (policy.name == "qfilter") arguments.insert(arguments.end(), {"--filters", path});
      const Result r = generate(model, arguments);
      INFO(spec << (in_cache ? " in-cache\n" : "\n") << r.err);
      REQUIRE(r.status == 0);
      const Summary s(r.err);
      CHECK(s.made == 12);
      CHECK(s.live >= (policy.name == "full" ? 51 : 16));
      CHECK(s.live <= (policy.name == "full" ? 51 : 20 + 11));
    }
  }
}

TEST_CASE("generate: qfilter without filters, or with another model's, is one line that says so",
          "[program][edge]") {
  const Folder folder;
  const std::string model = write_model(folder, "m.gguf", tiny_model());
  const auto run = [&](const std::vector<std::string>& more) {
    Arguments arguments{"--prompt", prompt, "--policy", "qfilter:budget=20"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Result r = generate(model, arguments);
    CHECK(r.status == 1);
    return r.err;
  };
  CHECK_THAT(run({}), ContainsSubstring("needs --filters FILE"));
  CHECK_THAT(run({"--filters", folder.file("none")}), ContainsSubstring("cannot read"));
  CHECK_THAT(run({"--filters", folder.with("short", "1234")}), ContainsSubstring("must hold"));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::string bytes(reinterpret_cast<const char*>(&nan), sizeof nan);
  bytes.resize(program_test::tiny_heads * program_test::tiny_dim * sizeof(float));
  CHECK_THAT(run({"--filters", folder.with("nan", bytes)}), ContainsSubstring("not finite"));
}

TEST_CASE("generate: a policy that evicts nothing says what full says", "[program]") {
  const Folder folder;
  const std::string model = write_model(folder, "m.gguf", tiny_model());
  const auto text = [&](const std::string& policy, const Arguments& more = {}) {
    Arguments arguments{"--prompt", prompt, "--tokens", "20", "--policy", policy};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Result r = generate(model, arguments);
    REQUIRE(r.status == 0);
    return r.out;
  };
  const std::string full = text("full");
  CHECK(text("full") == full);
  CHECK(text("full", {"--in-cache"}) == full);
  CHECK(text("full", {"--page-size", "1", "--threads", "1"}) == full);
  for (const char* policy : {"streaming:budget=59",
                             "streaming:budget=59,form=exact",
                             "h2o:budget=59",
                             "snapkv:window=4,removed=0"}) {
    INFO(policy);
    CHECK(text(policy) == full);
    CHECK(text(policy, {"--in-cache"}) == full);
  }
  CHECK(text("h2o:budget=8") != full);
}

TEST_CASE("generate: --prompt-file reads what --prompt says, bytes as they are", "[program]") {
  const Folder folder;
  const std::string model = write_model(folder, "m.gguf", tiny_model());
  const std::string file = folder.with("prompt", prompt);
  CHECK(generate(model, {"--prompt-file", file, "--tokens", "5"}).out ==
        generate(model, {"--prompt", prompt, "--tokens", "5"}).out);
  const Result both = generate(model, {"--prompt-file", file, "--prompt", prompt});
  CHECK(both.status != 0);
  CHECK_THAT(both.err, ContainsSubstring("excludes"));
  check_error(generate(model, {"--prompt-file", folder.file("none")}),
              "cannot read " + folder.file("none"));
}

TEST_CASE("generate: stops at --tokens, and at a token that ends the text", "[program][edge]") {
  const Folder folder;
  const std::string model = write_model(folder, "m.gguf", tiny_model());
  for (const int tokens : {0, 1, 7}) {
    const Result r = generate(model, {"--prompt", prompt, "--tokens", std::to_string(tokens)});
    REQUIRE(r.status == 0);
    CHECK(Summary(r.err).made == tokens);
    CHECK(r.out.size() == static_cast<std::size_t>(tokens) + 1);
  }
  const std::string ends = write_model(folder, "ends.gguf", tiny_model(true));
  const Result r = generate(ends, {"--prompt", prompt, "--tokens", "7"});
  REQUIRE(r.status == 0);
  CHECK(Summary(r.err).made == 0);
  CHECK(r.out == "\n");
}

TEST_CASE("generate: the same seed draws the same text", "[program]") {
  const Folder folder;
  const std::string model = write_model(folder, "m.gguf", tiny_model());
  const auto text = [&](const std::string& seed) {
    return generate(model,
                    {"--prompt",
                     prompt,
                     "--tokens",
                     "30",
                     "--temperature",
                     "2",
                     "--top-p",
                     "1",
                     "--seed",
                     seed})
        .out;
  };
  CHECK(text("1") == text("1"));
  CHECK(text("1") != text("2"));
}

TEST_CASE("generate: --chat writes ChatML, and says so where the model has another format",
          "[program][edge]") {
  const Folder folder;
  const std::string model = write_model(folder, "m.gguf", tiny_model());
  const Result r = generate(model, {"--prompt", "hello", "--tokens", "3", "--chat"});
  REQUIRE(r.status == 0);
  // <|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n
  CHECK(Summary(r.err).prompt == 1 + 5 + 5 + 1 + 1 + 1 + 10);
  CHECK(Summary(generate(model, {"--prompt", "hello", "--tokens", "3"}).err).prompt == 5);
  const std::string none =
      write_model(folder, "none.gguf", tiny_model().without("tokenizer.chat_template"));
  check_error(generate(none, {"--prompt", "hello", "--chat"}),
              none + ": the model has no chat template");
  CHECK(generate(none, {"--prompt", "hello", "--tokens", "3"}).status == 0);
  const std::string other = write_model(
      folder, "other.gguf", tiny_model().string("tokenizer.chat_template", "[INST] {{ m }}"));
  check_error(generate(other, {"--prompt", "hello", "--chat"}),
              other + ": the model's chat template is not known");
}

TEST_CASE("generate: a model that asks for a first token gets it", "[program][edge]") {
  const Folder folder;
  auto builder = tiny_model();
  builder.u32("tokenizer.ggml.bos_token_id", 257).boolean("tokenizer.ggml.add_bos_token", true);
  const std::string model = write_model(folder, "m.gguf", builder);
  CHECK(Summary(generate(model, {"--prompt", "hello", "--tokens", "3"}).err).prompt == 6);
}

TEST_CASE("generate: an empty prompt is refused", "[program][edge]") {
  const Folder folder;
  const std::string model = write_model(folder, "m.gguf", tiny_model());
  check_error(generate(model, {"--prompt", ""}), "the prompt is empty");
  check_error(generate(model, {}), "the prompt is empty");
  check_error(generate(model, {"--prompt-file", folder.with("empty", "")}), "the prompt is empty");
}

TEST_CASE("generate: the model's context ends the text, and with --in-cache it does not",
          "[program][edge]") {
  const Folder folder;
  const std::string model = write_model(folder, "m.gguf", tiny_model());
  check_error(generate(model, {"--prompt", std::string(201, 'x')}),
              "the prompt of 201 tokens is longer than the model's context of 200");
  for (const auto& [length, made] : {std::pair{200, 1}, {195, 6}, {194, 7}}) {
    const Result r = generate(
        model, {"--prompt", std::string(static_cast<std::size_t>(length), 'x'), "--tokens", "7"});
    INFO(length);
    REQUIRE(r.status == 0);
    CHECK(Summary(r.err).made == made);
    CHECK((r.err.find("stopped: the model's context of 200 tokens is full") != std::string::npos) ==
          (made < 7));
  }
  for (const char* policy : {"streaming:budget=16", "h2o:budget=16"}) {
    Arguments arguments{"--prompt", prompt, "--policy", policy, "--tokens", "300"};
    INFO(policy);
    CHECK(Summary(generate(model, arguments).err).made == 161);
    arguments.emplace_back("--in-cache");
    CHECK(Summary(generate(model, arguments).err).made == 300);
  }
}

TEST_CASE("generate: for a file that is not a model it can run, one line names it",
          "[program][edge]") {
  const Folder folder;
  const auto refused = [&](const std::string& path, const std::string& why) {
    check_error(generate(path, {"--prompt", prompt}), "generate: " + path + ": " + why);
  };
  refused(folder.file("none.gguf"), "cannot be opened");
  refused(folder.file(""), "cannot be opened as a file");
  refused(folder.with("text.gguf", "This is a text, not a model."), "not a GGUF file");
  refused(folder.with("empty.gguf", ""), "truncated");
  const std::size_t size = tiny_model().bytes().size();
  refused(write_model(folder, "head.gguf", tiny_model(), 40), "truncated");
  refused(write_model(folder, "half.gguf", tiny_model(), size / 2), "");
  refused(write_model(folder, "short.gguf", tiny_model(), size - 1), "tensor ");
  refused(write_model(folder, "other.gguf", tiny_model().string("general.architecture", "mamba")),
          "architecture 'mamba' is not supported; known is llama");
  refused(write_model(folder, "less.gguf", tiny_model().without("blk.1.ffn_up.weight")),
          "missing tensor blk.1.ffn_up.weight");
  refused(write_model(folder,
                      "more.gguf",
                      tiny_model().tensor("blk.0.attn_q.bias", {48}, std::vector<float>(48))),
          "tensor blk.0.attn_q.bias is not part");
  refused(write_model(folder, "words.gguf", tiny_model().string("tokenizer.ggml.pre", "deepseek")),
          "unknown pre-tokenizer 'deepseek'; known are smollm, gpt-2, llama-bpe");
}

TEST_CASE("generate: options that make no sense are refused before the model is read",
          "[program][edge]") {
  const Folder folder;
  const std::string none = folder.file("none.gguf");
  const auto refused = [&](const Arguments& arguments, const std::string& why) {
    Arguments all{"--prompt", prompt};
    all.insert(all.end(), arguments.begin(), arguments.end());
    check_error(generate(none, all), why);
  };
  refused({"--policy", "lru:budget=8"}, "unknown policy 'lru'; known are full, streaming, h2o");
  refused({"--policy", "h2o"}, "policy 'h2o' needs a size: removed=0.5 or budget=256");
  refused({"--policy", "h2o:budget=8,recents=2"}, "unknown key 'recents'; known are recent, ");
  refused({"--policy", "snapkv:budget=64,kernel=4"}, "kernel 4 must be odd");
  refused({"--temperature", "-1"}, "temperature is -1");
  refused({"--top-p", "0"}, "top_p is 0");
  for (const Arguments& wrong : {Arguments{"--cache-type", "f8"},
                                 {"--tokens", "-1"},
                                 {"--page-size", "0"},
                                 {"--threads", "-1"},
                                 {"--no-such-option"}}) {
    const Result r = generate(none, wrong);
    INFO(wrong.front());
    CHECK(r.status != 0);
    CHECK_THAT(r.err, ContainsSubstring(wrong.front()));
  }
}

TEST_CASE("generate: --help names every option and every policy", "[program]") {
  const Result r = run_program(KVTRIM_GENERATE, {"--help"});
  CHECK(r.status == 0);
  for (const char* word :
       {"--model",       "--prompt",   "--prompt-file", "--policy",     "--tokens",
        "--chat",        "--in-cache", "--teacher",     "--trace",      "--beyond-context",
        "--temperature", "--top-p",    "--seed",        "--cache-type", "--page-size",
        "--threads",     "full",       "streaming",     "h2o",          "snapkv",
        "removed=",      "budget="}) {
    CHECK_THAT(r.out, ContainsSubstring(word));
  }
}
