// SPDX-License-Identifier: Apache-2.0
// What a model in llama.cpp still knows after kvtrim evicted: facts found again, text predicted. Prompts are those that
// `evaluate --write-prompts` writes, or others of that form; policies are named as there, where kvtrim's own engine runs.

#include <CLI/CLI.hpp>

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "answers.hpp"
#include "needles.hpp"
#include "options.hpp"
#include "policies.hpp"
#include "program/console.hpp"
#include "program/eval_data.hpp"

namespace {

using namespace llama_example;

struct Options : ContextOptions {
  std::string prompts, ids, ids_model, text, json;
  std::vector<std::string> policies{"full",
                                    "page:unit=group,window=32,sinks=4,rows=max,group=max,pool=max,"
                                    "kernel=15,columns=all"};
  std::vector<double> removed{0.75, 0.9};
  std::int32_t tokens = 0, page_size = 1, protect = 0, count = 10, next = 256;
  std::size_t limit = 0;
};

struct Variant {
  program::PolicySpec spec;
  double removed = 0;
  std::int64_t rows = 0, evictions = 0, predictions = 0;
  std::int32_t correct = 0;
  double log_probability = 0;

  [[nodiscard]] double perplexity() const {
    return std::exp(-log_probability / static_cast<double>(predictions));
  }
};

std::vector<Variant> variants_of(const Options& o) {
  std::vector<Variant> variants{{program::PolicySpec("full"), 0}};
  for (const std::string& text : o.policies) {
    const program::PolicySpec spec(text);
    if (spec.name() == "full") continue;
    if (spec.has_size())
      variants.push_back({spec, spec.removed().value_or(0)});
    else
      for (const double removed : o.removed) variants.push_back({spec, removed});
  }
  return variants;
}

class Experiment {
 public:
  Experiment(const Options& o, Session& session, std::vector<Variant>& variants)
      : o_(o), session_(session), variants_(variants) {}

  void needle(const program::Needle& prompt) {
    std::vector<llama_token> read = prompt.context;
    read.insert(read.end(), prompt.question.begin(), prompt.question.end() - 1);
    each(read, [&](Variant& v) {
      const llama_seq_id s = 1;
      const auto answer = generate(session_, {&s, 1}, {&prompt.question.back(), 1}, answer_tokens);
      v.correct += says(session_.vocab(), answer.front(), prompt.answer) ? 1 : 0;
    });
  }
  void sample(const program::Sample& sample) {
    const std::span<const llama_token> ids(sample.ids);
    each(ids.first(sample.prefill), [&](Variant& v) {
      std::vector<Token> given;
      for (const llama_token id : ids.subspan(sample.prefill, ids.size() - sample.prefill - 1))
        given.push_back({id, 1, true});
      session_.decode(given);
      for (std::size_t i = 0; i < given.size(); ++i) {
        v.log_probability += log_probability(logits(session_, static_cast<std::int32_t>(i)),
                                             ids[sample.prefill + i + 1]);
      }
      v.predictions += static_cast<std::int64_t>(given.size());
    });
  }

 private:
  static constexpr std::size_t answer_tokens = 8;

  // Reads a text once, and calls f for each variant with sequence 1 cut to its size.
  template <class F>
  void each(std::span<const llama_token> read, F f) {
    session_.end(0);
    session_.prompt(0, read);
    const auto n = static_cast<std::int32_t>(read.size());
    for (Variant& v : variants_) {
      program::check_interrupt();
      session_.fork(0, 1);
      if (v.spec.name() != "full") {
        const std::int32_t last = std::min(o_.protect, n);
        evict(session_, v.spec, 1, last + v.spec.rows_to_keep(n - last, v.removed), last);
      }
      v.rows += session_.table(1).live_rows(), v.evictions += 1;
      f(v);
      session_.end(1);
    }
  }

  const Options& o_;
  Session& session_;
  std::vector<Variant>& variants_;
};

void report(const Options& o, const std::vector<Variant>& variants, std::size_t prompts) {
  std::ofstream json(o.json, std::ios::app);
  std::printf("\nremoved   rows  found  perplexity  retention  policy\n");
  for (const Variant& v : variants) {
    const double rows =
        static_cast<double>(v.rows) / static_cast<double>(std::max<std::int64_t>(1, v.evictions));
    const double full = variants.front().perplexity();
    std::printf("%6.1f%%  %5.0f  ", 100 * v.removed, rows);
    std::printf(prompts > 0 ? "%2d/%-2zu  " : "    -  ", v.correct, prompts);
    std::printf(v.predictions > 0 ? "%10.3f  %8.1f%%" : "         -          -",
                v.perplexity(),
                100 * full / v.perplexity());
    std::printf("  %s\n", v.spec.text().c_str());
    nlohmann::ordered_json line;
    line["policy"] = v.spec.text(), line["removed"] = v.removed, line["rows"] = rows;
    line["protect"] = o.protect, line["page_size"] = o.page_size, line["tokens"] = o.tokens;
    line["correct"] = v.correct, line["prompts"] = prompts;
    if (v.predictions > 0)
      line["perplexity"] = v.perplexity(), line["retention"] = 100 * full / v.perplexity();
    json << line.dump() << '\n';
  }
  json.flush();
  if (!o.json.empty() && !json) throw std::runtime_error("cannot write " + o.json);
}

int evaluate(const Options& o) {
  program::catch_interrupt();
  quiet();
  std::vector<Variant> variants = variants_of(o);
  kvtrim::Needs needs;
  for (const Variant& v : variants) needs = kvtrim::merge(needs, needs_of(v.spec));
  const llama_model_ptr model = load_model(o.model);
  const llama_vocab* vocab = llama_model_get_vocab(model.get());

  std::vector<program::Needle> needles;
  std::vector<program::Sample> samples;
  if (!o.prompts.empty()) needles = program::read_needles(o.prompts, o.tokens, o.limit);
  if (!o.text.empty())
    needles = make_needles(model.get(), program::read_file(o.text), o.tokens, o.count);
  if (!o.ids.empty()) samples = program::read_samples(o.ids, o.limit);
  if (!o.ids_model.empty()) samples = translate(samples, o.ids_model, vocab, o.next);
  std::size_t longest = 0;
  for (const auto& n : needles) longest = std::max(longest, n.context.size() + n.question.size());
  for (const auto& s : samples) longest = std::max(longest, s.ids.size());

  Session session(model.get(),
                  o.params(static_cast<std::int32_t>(2 * longest + 64), 2, needs),
                  {.needs = needs, .page_size = o.page_size});
  std::printf("%s, %s, %zu policies and sizes, %zu prompts, %zu samples, pages of %d",
              meta(model.get(), "general.architecture").c_str(),
              llama_model_chat_template(model.get(), nullptr) != nullptr ? "chat template"
                                                                         : "no chat template",
              variants.size(),
              needles.size(),
              samples.size(),
              o.page_size);
  if (ScoreTap* tap = session.tap(); tap != nullptr) {
    std::printf(", scored layers:");
    for (const std::int32_t l : tap->layers()) std::printf(" %d", l);
  }
  std::printf("\n");
  Experiment experiment(o, session, variants);
  for (std::size_t i = 0; i < needles.size(); ++i) {
    experiment.needle(needles[i]);
    std::printf("prompt %zu/%zu:", i + 1, needles.size());
    for (const Variant& v : variants) std::printf(" %d", v.correct);
    std::printf("\n");
    std::fflush(stdout);
  }
  for (std::size_t i = 0; i < samples.size(); ++i) {
    experiment.sample(samples[i]);
    std::printf("sample %zu/%zu\n", i + 1, samples.size());
    std::fflush(stdout);
  }
  report(o, variants, needles.size());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("What a model in llama.cpp still knows after kvtrim evicted part of its cache.");
  o.add(app);
  app.add_option("--prompts", o.prompts, "needle prompts, JSON lines of token ids");
  app.add_option("--text", o.text, "make prompts from this text by the model's tokenizer instead");
  app.add_option("--count", o.count, "prompts made from --text")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--tokens", o.tokens, "only prompts of this length; with --text, their length")
      ->capture_default_str();
  app.add_option("--limit", o.limit, "maximum number of prompts and of samples; 0: all")
      ->capture_default_str();
  app.add_option("--ids", o.ids, "samples for perplexity, JSON lines of token ids");
  app.add_option(
      "--ids-model", o.ids_model, "GGUF file whose tokenizer those ids are of, if it is another");
  app.add_option("--next", o.next, "tokens to predict of each sample of --ids-model")
      ->check(CLI::Range(2, 511))
      ->capture_default_str();
  app.add_option("--policy", o.policies, "SPEC ..., as for evaluate")->capture_default_str();
  app.add_option("--removed", o.removed, "fractions removed")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--protect", o.protect, "last rows that always stay; --removed counts beyond them")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--page-size", o.page_size, "positions that stay or go together")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--json", o.json, "add JSON lines to this file");
  CLI11_PARSE(app, argc, argv);
  return program::run("llama_retention", [&] { return evaluate(o); });
}
