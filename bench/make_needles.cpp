// SPDX-License-Identifier: Apache-2.0
// Makes fresh needle prompts: a fact hidden in a text of your choice, in the format that `retention --prompts` reads.
// Tune on prompts made here, report on others.

#include <CLI/CLI.hpp>

#include <nlohmann/json.hpp>

#include <array>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/gguf.hpp"
#include "engine/tokenizer.hpp"
#include "program/console.hpp"

namespace {

struct Options {
  std::string model, text, out;
  std::int32_t length = 1024, count = 20;
  std::uint64_t seed = 1;
};

constexpr std::array<const char*, 20> things{
    "the harbour", "Paris",          "winter",       "the old bridge", "the lighthouse",
    "Saturn",      "the museum",     "the red door", "Oslo",           "the engine",
    "the orchard", "the north gate", "autumn",       "the library",    "the fountain",
    "the valley",  "Lisbon",         "the ferry",    "the clock",      "the archive"};

int make(const Options& o) {
  const engine::GgufFile file(o.model);
  const engine::Tokenizer tokenizer(file);
  const auto encode = [&](const std::string& text) { return tokenizer.encode(text, true); };
  const std::vector<std::int32_t> filler = tokenizer.encode(program::read_file(o.text), false);
  const auto opening = encode(
      "<|im_start|>user\nThere is an important fact hidden in the text below. Find it and remember "
      "it.\n\n");
  std::mt19937_64 random(o.seed);
  program::OutputFile out(o.out);
  for (std::int32_t i = 0; i < o.count; ++i) {
    const std::string thing = things[random() % things.size()];
    const std::string answer = std::to_string(10000 + random() % 90000);
    const auto needle = encode("\nThe secret number of " + thing + " is " + answer + ".\n");
    const auto question =
        encode("\n\nWhat is the secret number of " + thing +
               "?<|im_end|>\n<|im_start|>assistant\nThe secret number of " + thing + " is");
    const auto around = static_cast<std::int64_t>(opening.size() + needle.size() + question.size());
    const std::int64_t gap = o.length - around;
    if (gap < 1 || gap > static_cast<std::int64_t>(filler.size())) {
      throw std::runtime_error(o.text + " has " + std::to_string(filler.size()) + " tokens, but " +
                               std::to_string(o.length) + " tokens per prompt need " +
                               std::to_string(gap) + " of them, at least 1");
    }
    const auto start =
        static_cast<std::ptrdiff_t>(random() % (filler.size() - static_cast<std::size_t>(gap) + 1));
    const double depth = (i + 0.5) / o.count;
    const auto before = static_cast<std::ptrdiff_t>(depth * static_cast<double>(gap));
    std::vector<std::int32_t> context = opening;
    const auto from = filler.begin() + start;
    context.insert(context.end(), from, from + before);
    const std::size_t begin = context.size();
    context.insert(context.end(), needle.begin(), needle.end());
    const std::size_t end = context.size();
    context.insert(context.end(), from + before, from + static_cast<std::ptrdiff_t>(gap));
    std::vector<std::int32_t> all = context;
    all.insert(all.end(), question.begin(), question.end());
    nlohmann::ordered_json line;
    line["id"] =
        "s" + std::to_string(o.seed) + "-" + std::to_string(o.length) + "-" + std::to_string(i);
    line["tokens"] = o.length;
    line["depth"] = depth;
    line["answer"] = answer;
    line["needle"] = {begin, end};
    line["context"] = context;
    line["question"] = question;
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
