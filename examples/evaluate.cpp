// SPDX-License-Identifier: Apache-2.0
// What a language model still knows after its KV cache was cut: a suite of tasks, by policy and by the fraction of rows removed.
// Results go to a file line by line, and an interrupted run goes on where it was.

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "evaluate/results.hpp"
#include "evaluate/runner.hpp"
#include "evaluate/session.hpp"
#include "evaluate/sha256.hpp"
#include "evaluate/suite.hpp"
#include "kvtrim_commit.hpp"
#include "llama_engine/gguf.hpp"
#include "llama_engine/llama.hpp"
#include "llama_engine/openmp.hpp"
#include "llama_engine/tokenizer.hpp"
#include "program/cache_options.hpp"
#include "program/console.hpp"
#include "program/policy_spec.hpp"
#include "program/waiting.hpp"

namespace {

struct Options {
  std::string model, suite = "small", out, prompts_out, filters, cache_type = "f32",
                     expect = "truth";
  std::vector<std::string> policies{
      "streaming", "h2o", "snapkv", "keydiff", "page", "page:score=surprisal"};
  std::vector<double> removed;
  std::vector<std::string> tasks;
  std::int32_t page_size = 16, threads = 0, prompts = 0;
  std::uint32_t seed = 0;
};

std::vector<evaluate::Variant> make_variants(const Options& options,
                                             const std::vector<double>& removed) {
  std::vector<evaluate::Variant> variants;
  const auto add = [&](const program::PolicySpec& spec, std::optional<double> share) {
    for (const evaluate::Variant& v : variants)
      if (v.spec.text() == spec.text() && v.removed == share)
        throw std::runtime_error("policy '" + spec.text() + "' is given twice at the same size");
    variants.push_back({spec, share});
  };
  for (const std::string& text : options.policies) {
    const program::PolicySpec spec(text);
    if (spec.name() == "full") continue;  // is measured in any case
    if (spec.has_size()) {
      add(spec, spec.removed());
    } else {
      for (const double share : removed) add(spec, share);
    }
  }
  if (variants.empty()) throw std::runtime_error("no policy but full is given");
  static_cast<void>(evaluate::needs_of(variants));  // before the model is read
  return variants;
}

// All prompts that may be drawn, as token ids: for another engine.
void write_prompts(const std::string& path,
                   const evaluate::Suite& suite,
                   const evaluate::Generator& generator) {
  program::OutputFile out(path);
  for (const evaluate::Size& size : suite.sizes) {
    for (const std::string& task : suite.tasks) {
      for (std::int32_t i = 0; i < 2 * size.prompts; ++i) {
        const evaluate::Prompt prompt = generator.make(task, size.length, i, size.prompts);
        const auto ask = [](evaluate::Json& line, const evaluate::Turn& turn) {
          line["depth"] = turn.depth;
          line["answer"] = turn.answer;
          line["question"] = turn.question;
          if (turn.copy.empty()) {
            line["max_tokens"] = turn.most;
          } else {
            line["copy"] = turn.copy;
          }
        };
        const evaluate::Turn& first = prompt.turns.front();
        evaluate::Json line;
        line["kind"] = "prompt";
        line["id"] = prompt.id;
        line["task"] = task;
        line["length"] = size.length;
        line["tokens"] = prompt.context.size() + first.question.size();
        line["context"] = prompt.context;
        ask(line, first);
        for (std::size_t t = 1; t < prompt.turns.size(); ++t) {
          evaluate::Json turn;
          turn["reference"] = prompt.turns[t - 1].reference;
          ask(turn, prompt.turns[t]);
          line["then"].push_back(turn);
        }
        out.stream() << line.dump(-1, ' ', false, evaluate::Json::error_handler_t::replace) << '\n';
      }
    }
  }
  out.commit();
}

int run(const Options& o) {
  if (o.out.empty() && o.prompts_out.empty())
    throw std::runtime_error("nothing to do: give --out or --write-prompts");
  evaluate::Suite suite = evaluate::suite_of(o.suite);
  if (!o.removed.empty()) suite.removed = o.removed;
  for (const double r : suite.removed) {
    if (!(r >= 0 && r <= 1))
      throw std::runtime_error("--removed " + std::to_string(r) + " is not within 0 and 1");
  }
  for (evaluate::Size& size : suite.sizes) {
    if (o.prompts > 0) size.prompts = o.prompts, size.samples = std::min(size.samples, o.prompts);
  }
  if (!o.tasks.empty()) {
    suite.tasks.clear(), suite.perplexity = false;
    for (const std::string& task : o.tasks) {
      if (task == "perplexity")
        suite.perplexity = true;
      else
        suite.tasks.push_back(task);
    }
  }
  const std::vector<evaluate::Variant> variants = make_variants(o, suite.removed);
  if (o.threads > 0) omp_set_num_threads(o.threads);
  program::catch_interrupt();

  const engine::GgufFile file(o.model);
  const engine::Tokenizer tokenizer(file);
  const engine::LlamaShape shape = engine::read_llama_shape(file);
  const std::size_t longest = evaluate::longest(suite);
  if (longest > static_cast<std::size_t>(shape.context)) {
    throw std::runtime_error("suite " + suite.name + " needs " + std::to_string(longest) +
                             " positions, more than the model's context of " +
                             std::to_string(shape.context));
  }
  const evaluate::Generator generator(tokenizer, KVTRIM_SUITE_TEXTS, o.seed);
  for (const evaluate::Size& size : suite.sizes) {  // texts that are too short are found now
    static_cast<void>(generator.samples(size.length, size.samples));
    for (const std::string& task : suite.tasks)
      static_cast<void>(generator.make(task, size.length, 0, size.prompts));
  }
  if (!o.prompts_out.empty()) {
    write_prompts(o.prompts_out, suite, generator);
    return 0;
  }
  evaluate::Runner runner(file,
                          tokenizer,
                          variants,
                          {.cache_type = o.cache_type,
                           .filters = o.filters,
                           .page_size = o.page_size,
                           .longest = longest,
                           .expect_full = o.expect == "full"});
  evaluate::Json header;
  header["kind"] = "suite";
  header["version"] = evaluate::suite_version;
  header["suite"] = suite.name + (o.seed == 0 ? "" : " seed " + std::to_string(o.seed));
  for (const evaluate::Size& size : suite.sizes)
    header["sizes"].push_back({size.length, size.prompts, size.samples});
  header["expect"] = o.expect;
  header["model"] = std::filesystem::path(o.model).filename().string();
  header["model_hash"] = evaluate::sha256_of_file(o.model);
  header["layers"] = shape.layers;
  header["kv_heads"] = shape.kv_heads;
  header["row_bytes"] = std::int64_t{shape.layers} * shape.kv_heads * shape.head_dim * 2 *
                        (o.cache_type == "f32" ? 4 : 2);
  header["dtype"] = o.cache_type;
  header["page_size"] = o.page_size;
  header["commit"] = KVTRIM_COMMIT;
  evaluate::Results results(o.out, header);
  std::printf("suite %s, %zu policies and sizes, %d threads; results in %s",
              suite.name.c_str(),
              variants.size(),
              omp_get_max_threads(),
              o.out.c_str());
  if (results.resumed() > 0) std::printf(", which has %zu", results.resumed());
  std::printf("\n");
  std::fflush(stdout);
  evaluate::Session session(suite, generator, tokenizer, variants, runner, results);
  try {
    session.run();
  } catch (const program::Interrupted&) {
    std::fprintf(stderr,
                 "evaluate: interrupted; %zu results are in %s, and the same command goes on\n",
                 results.lines().size(),
                 o.out.c_str());
    return 130;
  }
  evaluate::print_tables(results, suite);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  program::wait_asleep(argv);
  Options o;
  CLI::App app(
      "What a language model still knows after a policy evicted part of its KV cache: a suite of "
      "tasks.");
  app.add_option("--model", o.model, "GGUF file of a Llama model")->required();
  app.add_option("--suite",
                 o.suite,
                 "small: 8 prompts of 1,024 tokens a task, a smoke test; standard: 24 of 1,024 and "
                 "12 of 2,048; full: also 6 of 4,096, and 95 % removed")
      ->check(CLI::IsMember({"small", "standard", "full"}))
      ->capture_default_str();
  auto* out =
      app.add_option("--out", o.out, "results, JSON lines; a file that is there is continued");
  app.add_option("--write-prompts",
                 o.prompts_out,
                 "instead of results, the prompts that may be drawn, as JSON lines of token ids")
      ->excludes(out);
  app.add_option("--policy", o.policies, "SPEC ... (see below)")->capture_default_str();
  app.add_option("--removed",
                 o.removed,
                 "fractions removed, for policies that name no size, instead of the suite's")
      ->delimiter(',');
  std::vector<std::string> names(evaluate::tasks.begin(), evaluate::tasks.end());
  names.emplace_back("perplexity");
  app.add_option("--task", o.tasks, "only these tasks")->check(CLI::IsMember(names));
  app.add_option("--prompts",
                 o.prompts,
                 "prompts of each length and task, to try something: another suite, whose results "
                 "mix with no other's; 0: the suite's own number")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  app.add_option(
         "--seed", o.seed, "other facts in other places, to tune on; 0: the suite's own prompts")
      ->capture_default_str();
  app.add_option("--expect",
                 o.expect,
                 "truth: an answer is right if it has the fact; full: if it is the full cache's "
                 "answer, whatever that is")
      ->check(CLI::IsMember({"truth", "full"}))
      ->capture_default_str();
  app.add_option(
      "--filters", o.filters, "directions for qfilter: fp32, [layers, KV heads, head dim]");
  program::add_cache_options(app, o.cache_type, o.page_size, o.threads);
  app.footer(std::string("\n") + program::spec_help() +
             "Here streaming is form=exact unless asked.\n");
  CLI11_PARSE(app, argc, argv);
  return program::run("evaluate", [&] { return run(o); });
}
