// SPDX-License-Identifier: Apache-2.0
// A text without end in a context with one: attention sinks and a window, positions renumbered in the cache. Also what the
// renumbering does to a key, which llama.cpp rotates in place (--drift).

#include <kvtrim/policy/streaming_sink.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "answers.hpp"
#include "drift.hpp"
#include "options.hpp"
#include "program/console.hpp"
#include "program/eval_data.hpp"

namespace {

using namespace llama_example;

struct Options : ContextOptions {
  std::string samples, prompts, positions = "in-cache";
  std::int32_t tokens = 12000, sinks = 4, block = 512, chunk = 128;
  bool drift = false;
};

// Ids of the samples, then of the prompts' texts, one after another.
std::vector<llama_token> text_of_files(const Options& o) {
  std::vector<llama_token> ids;
  const auto add = [&](const std::vector<llama_token>& more) {
    ids.insert(ids.end(), more.begin(), more.end());
  };
  if (!o.samples.empty())
    for (const auto& s : program::read_samples(o.samples, 0)) add(s.ids);
  if (!o.prompts.empty())
    for (const auto& n : program::read_needles(o.prompts, 0, 0)) add(n.context);
  if (ids.size() < static_cast<std::size_t>(o.tokens) + 1) {
    throw std::runtime_error("the files have " + std::to_string(ids.size()) + " tokens, not the " +
                             std::to_string(o.tokens + 1) + " that are needed");
  }
  ids.resize(static_cast<std::size_t>(o.tokens) + 1);
  return ids;
}

int run(const Options& o) {
  program::catch_interrupt();
  quiet();
  const bool in_cache = o.positions == "in-cache";
  const llama_model_ptr model = load_model(o.model);
  if (o.drift) return print_drift(model.get(), o.params(2048, 2, {}));
  const auto ids = text_of_files(o);
  Session session(model.get(), o.params(2048, 1, {}), {.needs = {}, .in_cache = in_cache});
  const std::int32_t cells = session.cells(), recent = cells - o.sinks - o.block;
  if (recent < 1 || o.chunk > o.block) {
    throw std::invalid_argument("--block " + std::to_string(o.block) + " leaves no window of " +
                                std::to_string(cells) + " cells, or is below --chunk " +
                                std::to_string(o.chunk));
  }
  // A key lives for so many evictions; each time an f16 key is rounded again (--drift).
  constexpr std::int32_t most_rotations = 16;
  const std::int32_t rotations = (recent + o.block - 1) / o.block;
  if (in_cache && o.type_k == "f16" && rotations > most_rotations) {
    throw std::invalid_argument("type_k: is f16, and with --block " + std::to_string(o.block) +
                                " a key is rotated " + std::to_string(rotations) +
                                " times, each time rounded: use --type-k f32, or larger blocks");
  }
  // Cut when the next chunk does not fit: to sinks + recent, which frees `block` cells.
  const kvtrim::StreamingSink policy({.sinks = o.sinks, .recent = recent});
  double sum = 0, late = 0;
  std::int64_t evictions = 0, predictions = 0, late_predictions = 0;
  std::size_t done = 0;
  while (done + 1 < ids.size()) {
    program::check_interrupt();
    const std::size_t n = std::min(static_cast<std::size_t>(o.chunk), ids.size() - 1 - done);
    if (o.positions != "none" && session.rows() + static_cast<std::int32_t>(n) > cells) {
      session.evict(policy, 0);
      ++evictions;
    }
    std::vector<Token> batch;
    for (std::size_t i = 0; i < n; ++i) batch.push_back({ids[done + i], 0, true});
    if (session.try_decode(batch) != 0) {
      std::printf("llama_decode returned 1 at token %zu: %d cells are full\n", done + 1, cells);
      break;
    }
    for (std::size_t i = 0; i < n; ++i) {
      const double p =
          log_probability(logits(session, static_cast<std::int32_t>(i)), ids[done + i + 1]);
      sum += p, ++predictions;
      if (done + i + 1 >= ids.size() / 4 * 3) late += p, ++late_predictions;
    }
    done += n;
  }
  std::printf("%zu of %d tokens in %d cells, positions %s, K %s, V %s: %lld evictions of %d rows\n",
              done,
              o.tokens,
              cells,
              o.positions.c_str(),
              o.type_k.c_str(),
              o.type_v.c_str(),
              static_cast<long long>(evictions),
              o.block);
  if (in_cache) std::printf("no key was rotated more than %d times\n", rotations);
  std::printf("perplexity %.3f",
              std::exp(-sum / static_cast<double>(std::max<std::int64_t>(1, predictions))));
  if (late_predictions > 0)
    std::printf(", of the last quarter %.3f",
                std::exp(-late / static_cast<double>(late_predictions)));
  std::printf("; next position %d\n", session.table(0).next_position());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("More text than a context of llama.cpp has cells, by kvtrim's StreamingSink.");
  o.add(app);
  app.add_option("--samples", o.samples, "text: JSON lines of token ids, as perplexity.jsonl");
  app.add_option("--prompts", o.prompts, "more text: needle prompts");
  app.add_option("--tokens", o.tokens, "tokens to read and predict")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  app.add_option("--positions",
                 o.positions,
                 "in-cache: renumbered after each eviction; keep; none: nothing is evicted")
      ->check(CLI::IsMember({"in-cache", "keep", "none"}))
      ->capture_default_str();
  app.add_option("--sinks", o.sinks, "first tokens, which stay")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--block", o.block, "rows that go at a time")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--chunk", o.chunk, "tokens decoded at a time, at most --block")
      ->check(CLI::Range(1, 512))
      ->capture_default_str();
  app.add_flag("--drift", o.drift, "print what rotations in place do to a key, and stop");
  CLI11_PARSE(app, argc, argv);
  return program::run("llama_endless", [&] { return run(o); });
}
