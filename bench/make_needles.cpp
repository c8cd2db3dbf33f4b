// SPDX-License-Identifier: Apache-2.0
// Makes fresh needle prompts: a fact hidden in a text of your choice, in the format that `retention --prompts` reads.
// Tune on prompts made here, report on others.

#include <CLI/CLI.hpp>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "llama_engine/gguf.hpp"
#include "llama_engine/tokenizer.hpp"
#include "program/console.hpp"
#include "program/needles.hpp"

namespace {

struct Options {
  std::string model, text, out;
  std::int32_t length = 1024, count = 20;
  std::uint64_t seed = 1;
};

int make(const Options& o) {
  const engine::GgufFile file(o.model);
  const engine::Tokenizer tokenizer(file);
  program::OutputFile out(o.out);
  const auto made = program::make_needles(
      tokenizer, program::read_file(o.text), o.text, o.length, o.count, o.seed);
  for (const program::MadeNeedle& n : made) {
    std::vector<std::int32_t> all = n.prompt.context;
    all.insert(all.end(), n.prompt.question.begin(), n.prompt.question.end());
    nlohmann::ordered_json line;
    line["id"] = n.prompt.id;
    line["tokens"] = n.prompt.tokens;
    line["depth"] = n.depth;
    line["answer"] = n.prompt.answer;
    line["needle"] = {n.begin, n.end};
    line["context"] = n.prompt.context;
    line["question"] = n.prompt.question;
    line["text"] = tokenizer.decode(all);
    out.stream() << line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
  }
  out.commit();
  std::printf("%d prompts of %d tokens in %s\n", o.count, o.length, o.out.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Hides a fact in a text, as prompts for retention --prompts.");
  app.add_option("--model", o.model, "GGUF file, for its tokenizer")->required();
  app.add_option("--text", o.text, "text file to hide the fact in")->required();
  app.add_option("--out", o.out, "JSON lines to write")->required();
  app.add_option("--length", o.length, "tokens of a prompt, question included")
      ->check(CLI::Range(64, 1 << 20))
      ->capture_default_str();
  app.add_option("--count", o.count, "prompts; the fact's depth is spread evenly")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--seed", o.seed, "seed: the same arguments make the same prompts")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return program::run("make_needles", [&] { return make(o); });
}
