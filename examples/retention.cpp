// SPDX-License-Identifier: Apache-2.0
// What a model still knows after its KV cache was cut: facts found again (needles) and text predicted (perplexity), by
// policy and by the fraction of rows removed. One prefill per prompt serves all policies: the sequence is forked.

#include <CLI/CLI.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "llama_engine/gguf.hpp"
#include "llama_engine/llama.hpp"
#include "llama_engine/tokenizer.hpp"
#include "program/cache_options.hpp"
#include "program/console.hpp"
#include "program/eval_data.hpp"
#include "program/evictor.hpp"
#include "program/forks.hpp"
#include "program/policy_spec.hpp"
#include "program/waiting.hpp"

namespace {

using program::Token;

struct Options {
  std::string model, prompts, ids, text, json, filters, mode = "aware", cache_type = "f32";
  std::vector<std::string> policies{"full", "streaming", "h2o", "snapkv"};
  std::vector<double> removed{0.5, 0.75, 0.9};
  std::int32_t tokens = 0, page_size = 16, threads = 0;
  std::size_t limit = 0, prefill = 1024, next = 256, samples = 6;
  bool demo = false;
};

// What the model is asked.
struct Texts {
  std::vector<program::Needle> needles;
  std::vector<program::Sample> samples;

  [[nodiscard]] std::size_t longest() const {
    std::size_t most = 0;
    for (const auto& n : needles) most = std::max(most, n.context.size() + n.question.size());
    for (const auto& s : samples) most = std::max(most, s.ids.size());
    return most;
  }
  // Tokens of a prompt, or of a sample if there is no prompt; none if they differ.
  [[nodiscard]] std::optional<std::size_t> length() const {
    std::vector<std::size_t> lengths;
    for (const auto& n : needles) lengths.push_back(n.context.size() + n.question.size());
    if (needles.empty()) {
      for (const auto& s : samples) lengths.push_back(s.ids.size());
    }
    const auto [low, high] = std::minmax_element(lengths.begin(), lengths.end());
    return low != lengths.end() && *low == *high ? std::optional(*low) : std::nullopt;
  }
};

// A policy at one size, and what it did.
struct Variant {
  program::PolicySpec spec;
  std::optional<double> removed;  // none: the SPEC gives a budget
  std::int64_t evictions = 0, rows = 0, rows_before = 0, allocated_rows = 0, live_bytes = 0,
               released_pages = 0, page_bytes = 0, bytes_moved = 0;
  std::int32_t heads = 1;  // of all layers
  double evict_seconds = 0, decode_seconds = 0;
  std::int64_t decoded = 0;
  std::int32_t correct = 0, prompts = 0;
  double log_probability = 0;
  std::int64_t predictions = 0;

  [[nodiscard]] double perplexity() const {
    return std::exp(-log_probability / static_cast<double>(predictions));
  }
  // Rows of a head, and their share of the rows of its pages.
  [[nodiscard]] double rows_of_head() const { return mean(rows) / heads; }
  [[nodiscard]] double fill() const {
    return allocated_rows == 0 ? 1.0
                               : static_cast<double>(rows) / static_cast<double>(allocated_rows);
  }
  [[nodiscard]] double mean(std::int64_t sum) const {
    return evictions == 0 ? 0 : static_cast<double>(sum) / static_cast<double>(evictions);
  }
};

constexpr std::size_t answer_tokens = 7;

// What all variants need to have observed.
kvtrim::Needs needs_of(const std::vector<Variant>& variants) {
  kvtrim::Needs needs;
  for (const Variant& v : variants)
    needs = kvtrim::merge(needs, program::needs_of(v.spec.make(1024, kvtrim::SinkForm::exact)));
  return needs;
}

// Throws if a text is not for this model: before the work, not in the middle of it.
void check_texts(const Texts& texts, const engine::LlamaShape& shape) {
  const auto check = [&](const std::string& name,
                         std::initializer_list<std::span<const Token>> parts,
                         std::size_t positions) {
    if (positions > static_cast<std::size_t>(shape.context)) {
      throw std::runtime_error(name + " needs " + std::to_string(positions) +
                               " positions, more than the model's context of " +
                               std::to_string(shape.context));
    }
    for (const auto part : parts) {
      for (const Token token : part) {
        if (token >= 0 && token < shape.vocabulary) continue;
        throw std::runtime_error(name + ": token " + std::to_string(token) +
                                 " is outside the model's vocabulary of " +
                                 std::to_string(shape.vocabulary));
      }
    }
  };
  for (const auto& n : texts.needles) {
    check("prompt " + n.id,
          {n.context, n.question},
          n.context.size() + n.question.size() + answer_tokens - 1);
  }
  for (std::size_t i = 0; i < texts.samples.size(); ++i) {
    const auto& ids = texts.samples[i].ids;
    check("sample " + std::to_string(i + 1), {ids}, ids.size() - 1);
  }
}

class Experiment {
 public:
  Experiment(const Options& options,
             const engine::GgufFile& file,
             const engine::Tokenizer& tokenizer,
             std::vector<Variant> variants,
             std::size_t longest)
      : options_(options),
        tokenizer_(tokenizer),
        model_(file),
        variants_(std::move(variants)),
        cache_(program::fork_cache(model_,
                                   needs_of(variants_),
                                   options.cache_type,
                                   options.page_size,
                                   longest + answer_tokens + 1,
                                   variants_.size() + 1)),
        evictor_(model_,
                 cache_,
                 needs_of(variants_),
                 options.filters.empty() ? std::vector<float>{}
                                         : program::read_filters(options.filters, model_.shape())),
        forks_(model_, cache_, evictor_) {}

  [[nodiscard]] std::vector<Variant>& variants() { return variants_; }

  void needle(const program::Needle& prompt) {
    const bool aware = options_.mode == "aware";
    std::vector<Token> read = prompt.context;
    std::vector<Token> rest = prompt.question;
    if (aware) {
      read.insert(read.end(), rest.begin(), rest.end() - 1);
      rest = {rest.back()};
    }
    std::vector<kvtrim::SequenceId> forks;
    with_prefix(read, [&](kvtrim::SequenceId base) {
      for (Variant& v : variants_) forks.push_back(fork_and_evict(base, v));
    });
    const auto answers = options_.demo ? answer_one_by_one(forks, rest)
                                       : forks_.answer(tokenizer_, forks, rest, answer_tokens);
    for (std::size_t i = 0; i < forks.size(); ++i) {
      variants_[i].prompts += 1;
      variants_[i].correct +=
          tokenizer_.decode(answers[i]).find(prompt.answer) != std::string::npos ? 1 : 0;
      cache_.destroy(forks[i]);
    }
  }

  void sample(const program::Sample& sample) {
    const std::span<const Token> ids(sample.ids);
    with_prefix(ids.first(sample.prefill), [&](kvtrim::SequenceId base) {
      for (Variant& v : variants_) {
        const kvtrim::SequenceId s = fork_and_evict(base, v);
        const auto scored = forks_.log_probabilities(s, ids.subspan(sample.prefill));
        for (const double p : scored) v.log_probability += p;
        v.predictions += static_cast<std::int64_t>(scored.size());
        cache_.destroy(s);
      }
    });
  }

 private:
  template <class F>
  void with_prefix(std::span<const Token> tokens, F f) {
    const kvtrim::SequenceId base = forks_.read(tokens);
    f(base);
    cache_.destroy(base);
  }

  kvtrim::SequenceId fork_and_evict(kvtrim::SequenceId base, Variant& v) {
    const kvtrim::SequenceId s = forks_.fork(base);
    const std::int32_t free_before = cache_.pool().available();
    const kvtrim::Report report = forks_.cut(s, v.spec, v.removed.value_or(0), &v.evict_seconds);
    v.evictions += 1;
    v.rows += report.kept_rows;
    v.rows_before += report.kept_rows + report.evicted_rows;
    v.allocated_rows += report.allocated_rows;
    v.heads = cache_.params().layers * cache_.params().kv_heads;
    v.live_bytes += cache_.live_bytes(s);
    v.released_pages += cache_.pool().available() - free_before;
    v.page_bytes = cache_.page_bytes();
    v.bytes_moved += report.bytes_moved;
    return s;
  }

  std::vector<std::vector<Token>> answer_one_by_one(const std::vector<kvtrim::SequenceId>& forks,
                                                    const std::vector<Token>& rest) {
    std::vector<std::vector<Token>> answers;
    for (std::size_t i = 0; i < forks.size(); ++i) {
      const program::Stopwatch watch;
      answers.push_back(forks_.answer(tokenizer_, {forks[i]}, rest, answer_tokens).front());
      variants_[i].decode_seconds += watch.seconds();
      variants_[i].decoded += static_cast<std::int64_t>(answers.back().size());
    }
    return answers;
  }

  const Options& options_;
  const engine::Tokenizer& tokenizer_;
  engine::LlamaModel model_;
  std::vector<Variant> variants_;
  kvtrim::PagedCache cache_;
  program::Evictor evictor_;
  program::Forks forks_;
};

std::vector<Variant> make_variants(const Options& options) {
  std::vector<Variant> variants;
  bool full = false;
  for (const std::string& text : options.policies) {
    const program::PolicySpec spec(text);
    static_cast<void>(
        spec.make(1024, kvtrim::SinkForm::exact));  // bad values are found before the model is read
    full = full || spec.name() == "full";
    if (spec.name() == "full") {
      variants.push_back({spec, 0});
    } else if (spec.has_size()) {
      variants.push_back({spec, spec.removed()});
    } else {
      for (const double removed : options.removed) variants.push_back({spec, removed});
    }
  }
  // Retention is measured against the full cache.
  if (!full) variants.insert(variants.begin(), {program::PolicySpec("full"), 0});
  static_cast<void>(needs_of(variants));  // also refuses policies that do not go together
  return variants;
}

// What was not measured is null.
nlohmann::ordered_json to_json(const Variant& v,
                               const Options& options,
                               std::optional<std::size_t> length,
                               double full_perplexity) {
  nlohmann::ordered_json line;
  line["kind"] = "retention";
  line["policy"] = v.spec.text();
  line["mode"] = options.mode;
  line["tokens"] = length ? nlohmann::ordered_json(*length) : nlohmann::ordered_json();
  line["removed"] = v.removed ? nlohmann::ordered_json(*v.removed) : nlohmann::ordered_json();
  line["kept_fraction"] =
      v.rows_before == 0 ? 1.0 : static_cast<double>(v.rows) / static_cast<double>(v.rows_before);
  line["correct"] = v.prompts > 0 ? nlohmann::ordered_json(v.correct) : nlohmann::ordered_json();
  line["prompts"] = v.prompts;
  line["perplexity"] =
      v.predictions > 0 ? nlohmann::ordered_json(v.perplexity()) : nlohmann::ordered_json();
  line["retention"] = v.predictions > 0
                          ? nlohmann::ordered_json(100 * full_perplexity / v.perplexity())
                          : nlohmann::ordered_json();
  line["fill"] = v.fill();
  line["live_bytes"] = std::llround(v.mean(v.live_bytes));
  line["released_pages"] = v.mean(v.released_pages);
  line["bytes_moved"] = std::llround(v.mean(v.bytes_moved));
  line["evict_ms"] =
      v.evictions == 0 ? 0 : v.evict_seconds * 1000 / static_cast<double>(v.evictions);
  return line;
}

void print_table(const std::vector<Variant>& variants, bool timed) {
  std::size_t width = 6;
  double full = 0;
  for (const Variant& v : variants) {
    width = std::max(width, v.spec.text().size());
    if (v.spec.name() == "full" && v.predictions > 0) full = v.perplexity();
  }
  const int w = static_cast<int>(width);
  std::printf(
      "\n%-*s  removed   rows    fill   MiB live  pages freed  MiB freed  MiB moved  evict ms   "
      "found  "
      "perplexity  "
      "retention%s\n",
      w,
      "policy",
      timed ? "  tokens/s" : "");
  for (const Variant& v : variants) {
    std::printf("%-*s  %6.1f%%  %5.0f  %5.1f%%  %9.2f  %11.1f  %9.2f  %9.2f  %8.2f",
                w,
                v.spec.text().c_str(),
                100 * (1 - (v.rows_before == 0 ? 1.0
                                               : static_cast<double>(v.rows) /
                                                     static_cast<double>(v.rows_before))),
                v.rows_of_head(),
                100 * v.fill(),
                v.mean(v.live_bytes) / 1048576,
                v.mean(v.released_pages),
                v.mean(v.released_pages * v.page_bytes) / 1048576,
                v.mean(v.bytes_moved) / 1048576,
                v.evictions == 0 ? 0 : 1000 * v.evict_seconds / static_cast<double>(v.evictions));
    if (v.prompts > 0) {
      std::printf("  %3d/%-3d", v.correct, v.prompts);
    } else {
      std::printf("       -");
    }
    if (v.predictions > 0) {
      std::printf("  %10.3f  %8.1f%%", v.perplexity(), 100 * full / v.perplexity());
    } else {
      std::printf("           -          -");
    }
    if (timed && v.decode_seconds > 0)
      std::printf("  %8.1f", static_cast<double>(v.decoded) / v.decode_seconds);
    std::printf("\n");
  }
  std::fflush(stdout);
}

int evaluate(Options options) {
  if (options.demo) {
    options.prompts = options.prompts.empty() ? KVTRIM_EVAL_DATA "/needle.jsonl" : options.prompts;
    options.ids = options.ids.empty() ? KVTRIM_EVAL_DATA "/perplexity.jsonl" : options.ids;
    if (options.tokens == 0) options.tokens = 1024;
    if (options.limit == 0) options.limit = 8;
    options.samples = std::min<std::size_t>(options.samples, 2);
    options.policies.insert(options.policies.end(), {"snapkv:config=maxima", "page"});
  }
  if (options.prompts.empty() && options.ids.empty() && options.text.empty()) {
    throw std::runtime_error("nothing to do: give --prompts, --ids or --text (see --help)");
  }
  for (const double r : options.removed) {
    if (!(r >= 0 && r <= 1))
      throw std::runtime_error("--removed " + std::to_string(r) + " is not within 0 and 1");
  }
  if (options.threads > 0) omp_set_num_threads(options.threads);
  program::catch_interrupt();
  std::vector<Variant> variants = make_variants(options);
  Texts texts;
  if (!options.prompts.empty())
    texts.needles = program::read_needles(options.prompts, options.tokens, options.limit);
  if (!options.ids.empty()) texts.samples = program::read_samples(options.ids, options.samples);
  const std::string text = options.text.empty() ? "" : program::read_file(options.text);
  std::optional<program::OutputFile> json;
  if (!options.json.empty()) json.emplace(options.json);

  std::printf("reading %s ...\n", options.model.c_str());
  std::fflush(stdout);
  const engine::GgufFile file(options.model);
  const engine::Tokenizer tokenizer(file);
  if (!options.text.empty()) {
    const auto cut = program::cut_samples(
        tokenizer.encode(text, false), options.prefill, options.next, options.samples);
    texts.samples.insert(texts.samples.end(), cut.begin(), cut.end());
  }
  check_texts(texts, engine::read_llama_shape(file));
  Experiment experiment(options, file, tokenizer, std::move(variants), texts.longest());
  const auto& needles = texts.needles;
  const auto& samples = texts.samples;
  std::printf("%zu policies and sizes, %zu prompts (%s), %zu samples, %d threads\n",
              experiment.variants().size(),
              needles.size(),
              options.mode.c_str(),
              samples.size(),
              omp_get_max_threads());
  std::fflush(stdout);

  if (options.demo) {
    std::printf("a number a size: answers found with");
    for (const double r : options.removed) std::printf(" %.0f %%", 100 * r);
    std::printf(" of the cache removed\n");
    std::fflush(stdout);
  }

  program::Progress progress;
  const program::Stopwatch watch;
  const std::size_t steps = needles.size() + samples.size();
  for (std::size_t i = 0; i < steps; ++i) {
    program::check_interrupt();
    const bool is_needle = i < needles.size();
    progress.show((is_needle
                       ? "prompt " + std::to_string(i + 1) + " of " + std::to_string(needles.size())
                       : "sample " + std::to_string(i - needles.size() + 1) + " of " +
                             std::to_string(samples.size())) +
                  ", " + std::to_string(std::lround(watch.seconds())) + " s");
    if (is_needle) {
      experiment.needle(needles[i]);
    } else {
      experiment.sample(samples[i - needles.size()]);
    }
    if (options.demo && is_needle) {
      progress.clear();
      // The sizes of one policy are shown together: "snapkv 6 3 0".
      std::printf("prompt %zu/%zu, %.0f s; answers found:", i + 1, needles.size(), watch.seconds());
      const std::string* last = nullptr;
      for (const Variant& v : experiment.variants()) {
        if (last == nullptr || *last != v.spec.text()) {
          std::printf("%s%s", last == nullptr ? " " : ", ", v.spec.text().c_str());
        }
        std::printf(" %d", v.correct);
        last = &v.spec.text();
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
  progress.clear();
  print_table(experiment.variants(), options.demo);
  if (json) {
    double full = 0;
    for (const Variant& v : experiment.variants()) {
      if (v.spec.name() == "full" && v.predictions > 0) full = v.perplexity();
    }
    for (const Variant& v : experiment.variants())
      json->stream() << to_json(v, options, texts.length(), full).dump() << '\n';
    json->commit();
  }
  if (options.demo) {
    std::printf(
        "\nremoved: share of the prompt's KV rows evicted once, after the prefill. found: answers "
        "found by the model afterwards.\n"
        "rows: left of a KV head, on average. fill: how much of the pages that are left they use. "
        "evict ms: score, selection and moves, all layers.\n"
        "retention: 100 x perplexity of the full cache / perplexity. pages freed: pages of %d "
        "rows, back in the pool.\n",
        options.page_size);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  program::wait_asleep(argv);
  Options o;
  CLI::App app("What a language model still knows after a policy evicted part of its KV cache.");
  app.add_option("--model", o.model, "GGUF file of a Llama model")->required();
  app.add_option("--prompts", o.prompts, "needle prompts, JSON lines: answers found");
  app.add_option("--ids", o.ids, "token ids, JSON lines with prefill and ids: perplexity");
  app.add_option("--text", o.text, "text file: perplexity of samples cut from it");
  app.add_option("--policy",
                 o.policies,
                 "SPEC ...: full, streaming, h2o, snapkv, with :key=value,... (see below)")
      ->capture_default_str();
  app.add_option(
      "--filters", o.filters, "directions for qfilter: fp32, [layers, KV heads, head dim]");
  app.add_option("--removed", o.removed, "fractions removed, for policies that name no size")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option(
         "--mode", o.mode, "aware: the question is read before the eviction; agnostic: after")
      ->check(CLI::IsMember({"aware", "agnostic"}))
      ->capture_default_str();
  app.add_option("--tokens", o.tokens, "only prompts of this length; 0: all")
      ->capture_default_str();
  app.add_option("--limit", o.limit, "maximum number of prompts; 0: all")->capture_default_str();
  app.add_option("--prefill", o.prefill, "tokens read of each sample of --text")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--next",
                 o.next,
                 "tokens of each sample of --text after those, all but the first predicted")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  app.add_option("--samples",
                 o.samples,
                 "samples of --text, evenly spaced; maximum number of samples of --ids")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option(
      "--json",
      o.json,
      "write JSON lines here, at the end, one per policy and size: kind, policy, mode, tokens, "
      "removed, kept_fraction, correct, prompts, perplexity, retention, and means of "
      "live_bytes, released_pages, bytes_moved, evict_ms");
  program::add_cache_options(app, o.cache_type, o.page_size, o.threads);
  app.add_flag(
      "--demo", o.demo, "the README's demonstration: few prompts, six policies at three sizes");
  app.footer(std::string("\n") + program::spec_help() +
             "Here streaming is form=exact unless asked.\n");
  CLI11_PARSE(app, argc, argv);
  return program::run("retention", [&] { return evaluate(o); });
}
