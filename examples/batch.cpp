// SPDX-License-Identifier: Apache-2.0
// Many streams over one pool of pages of fixed size: what a policy's smaller caches are worth.

#include <sys/resource.h>

#include <CLI/CLI.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "batch/footprint.hpp"
#include "batch/memory_use.hpp"
#include "batch/report.hpp"
#include "batch/request.hpp"
#include "batch/scheduler.hpp"
#include "llama_engine/gguf.hpp"
#include "llama_engine/llama.hpp"
#include "llama_engine/tokenizer.hpp"
#include "program/cache_options.hpp"
#include "program/console.hpp"
#include "program/evictor.hpp"
#include "program/policy_spec.hpp"
#include "program/waiting.hpp"

namespace {

using batch::Json;
using batch::Request;
using batch::Token;

struct Options {
  std::string model, requests_file, text = KVTRIM_LICENSE, prefix, json, filters;
  std::string cache_type = "f32", tables = "head";
  std::vector<std::string> policies{"full"}, show;
  double pool_mib = 0;
  std::int32_t streams = 0, requests = 0, context = 2048, generate = 128, chunk = 128;
  std::int32_t interleave = 0, page_size = 16, threads = 0;
  std::uint64_t seed = 1;
  bool overcommit = false, stop = false;
};

kvtrim::TableScope scope_of(const std::string& name) {
  return name == "group"   ? kvtrim::TableScope::group
         : name == "layer" ? kvtrim::TableScope::layer
                           : kvtrim::TableScope::head;
}

// Everything that can be wrong with a policy, before the model is read.
program::PolicySpec checked_policy(const std::string& text, const std::string& tables) {
  program::PolicySpec spec(text);
  if (!spec.has_size())
    throw std::runtime_error("policy '" + text + "' needs a size: removed=0.5 or budget=256");
  const auto needs = program::needs_of(spec.make(1024, kvtrim::SinkForm::pages));
  if (needs.scope > scope_of(tables)) {
    const char* finer = needs.scope == kvtrim::TableScope::layer ? "layer" : "head";
    throw std::runtime_error("policy '" + text + "' needs a page table for each " + finer +
                             ", but the pool has --tables " + tables);
  }
  return spec;
}

std::int64_t peak_resident_bytes() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return std::int64_t{used.ru_maxrss} * 1024;
}

// The model and its requests, run by one policy after the other.
class Bench {
 public:
  Bench(const Options& options,
        const engine::GgufFile& file,
        const engine::Tokenizer& tokenizer,
        std::vector<Token> prefix,
        std::vector<Request> requests)
      : options_(options),
        tokenizer_(tokenizer),
        model_(file),
        prefix_(std::move(prefix)),
        requests_(std::move(requests)) {
    for (const Request& r : requests_) {
      rows_ = std::max(rows_, static_cast<std::int64_t>(r.prompt.size()) + r.max_tokens);
    }
    rows_ += static_cast<std::int64_t>(prefix_.size());
  }

  // Appends the run's lines. \returns false after Ctrl-C
  bool run(const program::PolicySpec& spec, std::vector<Json>& lines) {
    const auto keep = static_cast<std::int32_t>(rows_);
    const auto needs = program::needs_of(spec.make(keep, kvtrim::SinkForm::pages, model_.rope()));
    // No more sequences than there can be: positions and query rings go with each.
    auto streams = static_cast<std::int32_t>(
        std::min<std::int64_t>(options_.streams, static_cast<std::int64_t>(requests_.size())));
    if (!options_.overcommit) {
      const batch::Footprint footprint{&spec,
                                       params(streams, needs.score_planes),
                                       model_.rope(),
                                       static_cast<std::int64_t>(prefix_.size()),
                                       options_.chunk};
      streams = static_cast<std::int32_t>(
          std::clamp<std::int64_t>(footprint.streams(requests_), 1, streams));
    }
    kvtrim::PagedCache cache(params(streams, needs.score_planes));
    program::Evictor evictor(model_,
                             cache,
                             needs,
                             options_.filters.empty()
                                 ? std::vector<float>{}
                                 : program::read_filters(options_.filters, model_.shape()),
                             batch::Scheduler::recorder_slots(spec, streams, !prefix_.empty()));
    batch::Settings settings;
    settings.streams = streams;
    settings.chunk = options_.chunk;
    settings.overcommit = options_.overcommit;
    if (options_.stop) settings.ends = [&](Token t) { return tokenizer_.ends_text(t); };

    program::Progress progress;
    progress.show(spec.text());
    batch::RunFacts facts;
    settings.interleave = options_.interleave;
    batch::Scheduler scheduler(model_, cache, evictor, spec, settings, requests_, prefix_);
    const double begin = scheduler.seconds();
    bool interrupted = false;
    try {
      for (auto round = batch::Scheduler::Round::worked; round != batch::Scheduler::Round::over;) {
        program::check_interrupt();
        round = scheduler.round();
        if (round == batch::Scheduler::Round::stuck)
          throw std::logic_error("batch: a request that fits is not admitted");
        show(progress, spec, scheduler, begin);
      }
    } catch (const program::Interrupted&) { interrupted = true; }
    const double seconds = scheduler.seconds() - begin;
    progress.clear();

    facts.policy = spec.text();
    facts.tables = options_.tables;
    facts.settings = scheduler.settings();
    facts.threads = omp_get_max_threads();
    facts.page_size = options_.page_size;
    facts.pages = cache.pool().capacity();
    facts.prefix_tokens = static_cast<std::int64_t>(prefix_.size());
    facts.peak_resident_bytes = peak_resident_bytes();
    account(facts, cache, evictor, scheduler);
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      lines.push_back(
          batch::request_line(spec.text(), requests_[i], scheduler.outcomes()[i], tokenizer_));
    }
    lines.push_back(batch::run_line(facts, requests_, scheduler, tokenizer_, seconds));
    return !interrupted;
  }

 private:
  [[nodiscard]] kvtrim::PagedCache::Params params(std::int32_t streams, bool scores) const {
    kvtrim::PagedCache::Params p = model_.cache_params();
    p.page_size = options_.page_size;
    p.dtype = program::cache_dtype(options_.cache_type);
    p.scope = scope_of(options_.tables);
    p.scores = scores;
    p.max_sequences = batch::Scheduler::sequences_for(streams, !prefix_.empty());
    p.max_rows = static_cast<std::int32_t>(rows_);
    p.value_dim = p.key_dim;
    const std::int32_t tables = kvtrim::tables_of(p.scope, p.layers, p.kv_heads);
    const std::int64_t row_bytes = 2 * std::int64_t{p.key_dim} * kvtrim::element_bytes(p.dtype) *
                                   p.layers * p.kv_heads / tables;
    const double pages =
        std::floor(options_.pool_mib * 1048576 / static_cast<double>(row_bytes * p.page_size));
    if (pages > std::numeric_limits<std::int32_t>::max() / p.page_size) {
      throw std::runtime_error("--pool-mib " + std::to_string(options_.pool_mib) +
                               " are more than 2^31 rows");
    }
    p.pages = static_cast<std::int32_t>(pages);
    return p;
  }

  void account(batch::RunFacts& facts,
               const kvtrim::PagedCache& cache,
               const program::Evictor& evictor,
               const batch::Scheduler& scheduler) const {
    const std::int64_t page_bytes = cache.page_bytes();
    facts.memory = batch::memory_use(cache.params(), page_bytes);
    facts.memory.recorder = static_cast<std::int64_t>(evictor.recorder_bytes());
    facts.memory.workspace = static_cast<std::int64_t>(evictor.workspace_bytes());
    const program::PolicySpec full("full");
    batch::Footprint footprint = scheduler.footprint();
    footprint.policy = &full;
    facts.full_streams = footprint.streams(requests_);
    facts.full = batch::memory_use(
        params(static_cast<std::int32_t>(std::max<std::int64_t>(1, facts.full_streams)), false),
        page_bytes);
    const auto& longest = *std::max_element(
        requests_.begin(), requests_.end(), [](const Request& a, const Request& b) {
          return a.prompt.size() < b.prompt.size();
        });
    const auto peak = scheduler.footprint().peak(longest);
    // What goes with a stream, but for owners of pages and workspaces, which do not depend on their number.
    const std::int64_t beside = (facts.memory.sum() - facts.memory.pages - facts.memory.workspace) /
                                cache.params().max_sequences;
    facts.equal_streams = batch::streams_within(facts.full.sum(),
                                                beside,
                                                facts.memory.workspace,
                                                peak.running * page_bytes,
                                                peak.prompt * page_bytes);
  }

  void show(program::Progress& progress,
            const program::PolicySpec& spec,
            const batch::Scheduler& scheduler,
            double begin) const {
    std::size_t done = 0, tokens = 0;
    for (const auto& o : scheduler.outcomes()) {
      done += o.end != batch::Outcome::End::none ? 1 : 0;
      tokens += o.tokens.size();
    }
    char line[256];
    std::snprintf(line,
                  sizeof line,
                  "%s: %zu live, %zu of %zu done, %.1f tokens/s, at most %lld pages of %lld",
                  spec.text().c_str(),
                  scheduler.live().size(),
                  done,
                  requests_.size(),
                  static_cast<double>(tokens) / std::max(1e-9, scheduler.seconds() - begin),
                  static_cast<long long>(scheduler.counters().peak_pages),
                  static_cast<long long>(scheduler.capacity()));
    progress.show(line);
  }

  const Options& options_;
  const engine::Tokenizer& tokenizer_;
  engine::LlamaModel model_;
  std::vector<Token> prefix_;
  std::vector<Request> requests_;
  std::int64_t rows_ = 0;
};

int show_files(const std::vector<std::string>& files) {
  std::vector<Json> runs;
  for (const std::string& path : files) {
    program::detail::for_each_json_line(path, [&](const nlohmann::json& line) {
      if (line.at("kind") == "batch") runs.push_back(line);
    });
  }
  if (runs.empty()) throw std::runtime_error("there is no line of kind batch in " + files.front());
  batch::print_table(runs);
  return 0;
}

int run(const Options& o) {
  if (!o.show.empty()) return show_files(o.show);
  if (o.model.empty()) throw std::runtime_error("--model is missing");
  if (!(o.pool_mib > 0)) throw std::runtime_error("--pool-mib is missing or not above 0");
  if (o.streams < 1) throw std::runtime_error("--streams is missing or below 1");
  if (o.requests_file.empty() && o.requests < 1)
    throw std::runtime_error("--requests is missing: a number, or --requests-file");
  std::vector<program::PolicySpec> specs;
  for (const std::string& text : o.policies) specs.push_back(checked_policy(text, o.tables));
  if (o.threads > 0) omp_set_num_threads(o.threads);
  program::catch_interrupt();
  std::optional<program::OutputFile> json;
  if (!o.json.empty()) json.emplace(o.json);
  const std::string prefix_text = o.prefix.empty() ? "" : program::read_file(o.prefix);

  const engine::GgufFile file(o.model);
  const engine::Tokenizer tokenizer(file);
  const engine::LlamaShape shape = engine::read_llama_shape(file);
  std::vector<Token> prefix = tokenizer.encode(prefix_text, true);
  const auto before = static_cast<std::int64_t>(prefix.size());
  std::vector<Request> requests =
      o.requests_file.empty()
          ? batch::draw_requests(tokenizer,
                                 program::read_file(o.text),
                                 o.text,
                                 o.context,
                                 o.requests,
                                 o.generate,
                                 o.seed)
          : batch::read_requests(o.requests_file, tokenizer, shape, o.generate, before);
  for (const Request& r : requests) batch::check(r, before, shape);

  Bench bench(o, file, tokenizer, std::move(prefix), std::move(requests));
  std::vector<Json> lines, runs;
  bool whole = true;
  for (std::size_t i = 0; whole && i < specs.size(); ++i) {
    whole = bench.run(specs[i], lines);
    runs.push_back(lines.back());
  }
  batch::print_table(runs);
  if (json) {
    for (const Json& line : lines)
      json->stream() << line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
    json->commit();
  }
  for (const Json& line : lines) {
    if (line["kind"] == "request" && line["end"] == "refused") {
      std::fprintf(stderr,
                   "batch: request %s is refused: it %s\n",
                   line["id"].get<std::string>().c_str(),
                   line["reason"].get<std::string>().c_str());
    }
  }
  if (!whole) {
    std::fprintf(stderr, "batch: interrupted; the table says what was done until then\n");
    return 130;
  }
  const auto refused = [](const Json& r) { return r["refused"] == r["requests"]; };
  return std::all_of(runs.begin(), runs.end(), refused) ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  program::wait_asleep(argv);
  Options o;
  CLI::App app(
      "Runs many requests at once over one pool of pages, under one policy after the other.");
  app.add_option("--model", o.model, "GGUF file of a Llama model");
  app.add_option("--pool-mib", o.pool_mib, "memory for keys and values, all streams together");
  app.add_option("--streams", o.streams, "most streams at once");
  auto* count = app.add_option("--requests", o.requests, "needle prompts to draw");
  app.add_option("--requests-file",
                 o.requests_file,
                 "JSON lines: id, context, question (texts or token ids); optional: arrival (in "
                 "decode steps), answer, max_tokens")
      ->excludes(count);
  app.add_option("--context", o.context, "tokens of a prompt that is drawn")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  app.add_option("--generate", o.generate, "tokens of a stream, for requests that do not say")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  app.add_option("--text", o.text, "text around the needles")->capture_default_str();
  app.add_option("--seed", o.seed, "of the needles")->capture_default_str();
  app.add_option("--prefix", o.prefix, "a file with a text that all prompts begin with");
  app.add_option("--policy", o.policies, "SPEC ... (see below)")->capture_default_str();
  app.add_option(
      "--filters", o.filters, "directions for qfilter: fp32, [layers, KV heads, head dim]");
  app.add_option("--chunk", o.chunk, "tokens of a prompt in a step")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option(
         "--interleave",
         o.interleave,
         "chunks between two decode steps; 0: prompts are read twice as fast as streams end")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_flag("--overcommit",
               o.overcommit,
               "admit what fits now; streams that find no page are preempted and resumed");
  app.add_flag("--stop", o.stop, "streams end where the model ends its text");
  app.add_option("--tables", o.tables, "what one page table serves")
      ->check(CLI::IsMember({"group", "layer", "head"}))
      ->capture_default_str();
  program::add_cache_options(app, o.cache_type, o.page_size, o.threads);
  app.add_option("--json", o.json, "write JSON lines here: a line a request and a line a run");
  app.add_option("--show", o.show, "print the table of such files, and nothing else");
  app.footer(std::string("\n") + program::spec_help());
  CLI11_PARSE(app, argc, argv);
  return program::run("batch", [&] { return run(o); });
}
