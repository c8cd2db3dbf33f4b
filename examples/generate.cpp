// SPDX-License-Identifier: Apache-2.0
// Continues a prompt while a policy keeps the KV cache small: after the prompt and, if the policy goes on, after every token.
// With a teacher the next tokens are those of a file, and what is measured is how well the model foresees them.

#include <CLI/CLI.hpp>

#include <kvtrim/observe/surprisal.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "llama_engine/chat.hpp"
#include "llama_engine/gguf.hpp"
#include "llama_engine/llama.hpp"
#include "llama_engine/sampling.hpp"
#include "llama_engine/tokenizer.hpp"
#include "program/cache_options.hpp"
#include "program/console.hpp"
#include "program/evictor.hpp"
#include "program/policy_spec.hpp"
#include "program/teacher.hpp"
#include "program/trace.hpp"
#include "program/waiting.hpp"

namespace {

struct Options {
  std::string model, prompt, prompt_file, filters, policy = "full", cache_type = "f32", teacher,
                                                   trace;
  std::int32_t tokens = 128, page_size = 16, threads = 0;
  bool chat = false, in_cache = false, beyond_context = false;
  engine::TopPSampler::Params sampling{.temperature = 0, .top_p = 0.95F, .seed = 0};
};

// Rope position of the next token in the head that is furthest along.
std::int32_t next_rope_position(const kvtrim::PagedCache& cache, kvtrim::SequenceId s) {
  std::int32_t next = 0;
  for (std::int32_t l = 0; l < cache.params().layers; ++l) {
    for (std::int32_t h = 0; h < cache.params().kv_heads; ++h)
      next = std::max(next, cache.next_rope_position(s, kvtrim::LayerId{l}, kvtrim::HeadId{h}));
  }
  return next;
}

// What the model reads first, and what comes then if the model is not to choose.
struct Texts {
  std::vector<std::int32_t> prompt;
  std::vector<std::int32_t> teacher;
};

bool has_ids(const std::string& prompt_file) {
  return prompt_file.ends_with(".jsonl");
}

Texts read_texts(const Options& o,
                 std::string text,
                 const engine::GgufFile& file,
                 const engine::Tokenizer& tokenizer) {
  Texts texts;
  if (has_ids(o.prompt_file)) {
    texts.prompt = program::read_tokens(o.prompt_file, tokenizer);
  } else {
    if (o.chat) text = engine::apply_chat_template(file, text);
    if (!text.empty()) texts.prompt = tokenizer.encode(text, o.chat);
    if (tokenizer.add_bos()) texts.prompt.insert(texts.prompt.begin(), tokenizer.bos());
  }
  if (!o.teacher.empty()) texts.teacher = program::read_tokens(o.teacher, tokenizer);
  if (texts.prompt.empty()) {  // something must be read before anything can be foreseen
    texts.prompt = {texts.teacher.front()};
    texts.teacher.erase(texts.teacher.begin());
  }
  const std::int32_t context = engine::read_llama_shape(file).context;
  if (!o.beyond_context && texts.prompt.size() > static_cast<std::size_t>(context)) {
    throw std::runtime_error("the prompt of " + std::to_string(texts.prompt.size()) +
                             " tokens is longer than the model's context of " +
                             std::to_string(context));
  }
  return texts;
}

int generate(const Options& o) {
  const program::PolicySpec spec(o.policy);
  if (!spec.has_size())
    throw std::runtime_error("policy '" + o.policy + "' needs a size: removed=0.5 or budget=256");
  static_cast<void>(
      spec.make(1024, kvtrim::SinkForm::pages));  // bad values are found before the model is read
  engine::TopPSampler sample(o.sampling);
  const bool ids = has_ids(o.prompt_file);
  if (ids && o.chat)
    throw std::runtime_error("--chat needs a text, but " + o.prompt_file + " has token ids");
  const std::string text =
      ids || o.prompt_file.empty() ? o.prompt : program::read_file(o.prompt_file);
  if (text.empty() && !ids && (o.teacher.empty() || !o.prompt_file.empty()))
    throw std::runtime_error("the prompt is empty: give --prompt or --prompt-file some text");
  if (o.threads > 0) omp_set_num_threads(o.threads);
  program::catch_interrupt();
  program::Trace trace(o.trace);

  const engine::GgufFile file(o.model);
  const engine::Tokenizer tokenizer(file);
  const auto [prompt, teacher] = read_texts(o, text, file, tokenizer);
  const auto length = static_cast<std::int32_t>(prompt.size());
  std::vector<float> filters;
  if (!o.filters.empty()) {
    filters = program::read_filters(o.filters, engine::read_llama_shape(file));
  }
  engine::LlamaModel model(file);
  model.allow_beyond_context(o.beyond_context);
  const std::int32_t keep = spec.rows_to_keep(length, 0);
  const program::AnyPolicy policy = spec.make(keep, kvtrim::SinkForm::pages, model.rope());
  const bool goes_on = !spec.acts_once();
  const kvtrim::Needs needs = program::needs_of(policy);

  kvtrim::PagedCache::Params params = model.cache_params();
  params.page_size = o.page_size;
  params.dtype = program::cache_dtype(o.cache_type);
  params.unrotated_keys = o.in_cache && params.dtype != kvtrim::DType::f32;
  params.scores = true;
  params.scope = needs.scope;
  // In every position mode, live rows have different rope positions within the context.
  params.max_rows = length + o.tokens;
  if (!o.beyond_context)
    params.max_rows = std::max(length, std::min(params.max_rows, model.shape().context));
  const kvtrim::PeakOptions peak{
      goes_on ? kvtrim::CutTimes::each_step : kvtrim::CutTimes::after_prompt, keep, params.layers};
  params.pages = static_cast<std::int32_t>(
      program::peak_pages_of(policy, length, params.max_rows - length, o.page_size, length, peak)
          .most() *
      kvtrim::tables_of(params.scope, params.layers, params.kv_heads));
  kvtrim::PagedCache cache(params);
  program::Evictor evictor(model, cache, needs, filters);
  const auto sequence = cache.try_create();
  if (!sequence) throw std::runtime_error("no free sequence");

  std::optional<kvtrim::Rerotator> rerotator;
  if (o.in_cache) { rerotator.emplace(cache.view(), model.rope(), kvtrim::PositionMode::in_cache); }
  const kvtrim::PlanOptions plan{.rerotator = rerotator ? &*rerotator : nullptr};

  const auto checked = [](kvtrim::Status status) {
    if (status != kvtrim::Status::ok)
      throw std::runtime_error("the cache: " + std::string(kvtrim::to_string(status)));
  };
  program::Progress progress;
  progress.show("reading a prompt of " + std::to_string(length) + " tokens");
  const program::Stopwatch prefill_watch;
  checked(evictor.prefill(model, *sequence, prompt));
  const double prefill_seconds = prefill_watch.seconds();
  kvtrim::Report total = evictor.evict(policy, *sequence, keep, plan);
  const auto note = [&](const kvtrim::Report& r) {
    total.evicted_rows += r.evicted_rows;
    total.released_pages += r.released_pages;
    total.bytes_moved += r.bytes_moved;
  };
  progress.clear();
  trace.line("generate",
             {{"policy", o.policy},
              {"in_cache", o.in_cache},
              {"prompt", length},
              {"page_size", o.page_size},
              {"page_bytes", cache.page_bytes()},
              {"pool_pages", params.pages},
              {"prefill_ms", prefill_seconds * 1000}});

  const program::Stopwatch watch;
  program::Perplexity perplexity;
  std::int32_t made = 0;
  bool context_full = false;
  while (made < o.tokens) {
    program::check_interrupt();
    const program::Stopwatch step_watch;
    const auto at = static_cast<std::size_t>(made);
    if (!o.teacher.empty() && at == teacher.size()) break;
    const std::int32_t token = o.teacher.empty() ? sample(model.logits(0)) : teacher[at];
    nlohmann::ordered_json line{{"seen", length + made + 1}, {"token", token}};
    if (o.teacher.empty()) {
      if (tokenizer.ends_text(token)) break;
      std::cout << tokenizer.decode({&token, 1}) << std::flush;
    } else {
      const float surprisal = kvtrim::surprisal(model.logits(0), token);
      perplexity.add(surprisal);
      line["surprisal"] = surprisal;
      if (made % 16 == 0) progress.show(std::to_string(made) + " tokens");
    }
    const bool last = ++made == o.tokens;
    context_full =
        !last && !o.beyond_context && next_rope_position(cache, *sequence) >= model.shape().context;
    if (!last && !context_full) {
      const engine::Segment segment{*sequence, {&token, 1}};
      checked(model.forward(cache, {&segment, 1}, engine::LogitRows::last, evictor.observer()));
      if (goes_on) note(evictor.evict(policy, *sequence, keep, plan));
    }
    if (trace) {
      line["pages"] = cache.pool().in_use();
      line["resident_bytes"] = program::resident_bytes();
      line["ms"] = step_watch.seconds() * 1000;
      trace.line("generate_token", line);
    }
    if (context_full) break;
  }
  progress.clear();
  if (o.teacher.empty()) std::cout << std::endl;
  if (context_full) {
    std::fprintf(stderr,
                 "\nstopped: the model's context of %d tokens is full%s\n",
                 model.shape().context,
                 o.in_cache ? "" : " (with --in-cache, streaming and h2o go on)");
  }
  const double mib = 1048576;
  const std::int64_t heads = std::int64_t{params.layers} * params.kv_heads;
  std::fprintf(stderr,
               "\nprompt %d tokens in %.1f s; %d tokens generated, %.1f tokens/s; policy %s\n"
               "live rows %d of %d seen (%.2f MiB), pages in use %d (%.2f MiB), pages freed %d, "
               "rows evicted %lld per layer and head, "
               "%.2f MiB moved\n",
               length,
               prefill_seconds,
               made,
               made > 0 ? made / watch.seconds() : 0.0,
               o.policy.c_str(),
               static_cast<int>(cache.total_live_rows(*sequence) / heads),
               kvtrim::raw(cache.next_position(*sequence)),
               static_cast<double>(cache.live_bytes(*sequence)) / mib,
               cache.pool().in_use(),
               static_cast<double>(cache.pool().in_use() * cache.page_bytes()) / mib,
               total.released_pages,
               static_cast<long long>(total.evicted_rows / heads),
               static_cast<double>(total.bytes_moved) / mib);
  if (perplexity.count() > 0) {
    std::fprintf(stderr,
                 "perplexity %.4f over %lld tokens of %s\n",
                 perplexity.value(),
                 static_cast<long long>(perplexity.count()),
                 o.teacher.c_str());
  }
  trace.commit();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  program::wait_asleep(argv);
  Options o;
  CLI::App app("Continues a prompt while a policy evicts from the KV cache.");
  app.add_option("--model", o.model, "GGUF file of a Llama model")->required();
  auto* prompt = app.add_option("--prompt", o.prompt, "the prompt");
  app.add_option("--prompt-file", o.prompt_file, "a file with the prompt (.jsonl: lines with ids)")
      ->excludes(prompt);
  app.add_option(
         "--policy",
         o.policy,
         "SPEC: full, or streaming, h2o, snapkv with :removed=0.5 or :budget=256 (see below)")
      ->capture_default_str();
  app.add_option(
      "--filters", o.filters, "directions for qfilter: fp32, [layers, KV heads, head dim]");
  app.add_option("--tokens", o.tokens, "maximum number of new tokens")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--teacher",
                 o.teacher,
                 "the next tokens come from this text (.jsonl: lines with ids), and their "
                 "perplexity is printed; without a prompt, its first token is the prompt");
  app.add_option("--trace",
                 o.trace,
                 "write JSON lines here, at the end, one per token: pages, resident_bytes, ms");
  app.add_flag("--beyond-context",
               o.beyond_context,
               "do not stop at the model's context: to see what becomes of a model that goes on");
  app.add_flag("--chat", o.chat, "the prompt is a user's message: apply the model's chat template");
  app.add_flag(
      "--in-cache",
      o.in_cache,
      "renumber kept rows 0..k-1 (StreamingLLM): text may be longer than the model's context");
  app.add_option("--temperature", o.sampling.temperature, "0: greedy")->capture_default_str();
  app.add_option(
         "--top-p", o.sampling.top_p, "sample from the likeliest tokens of this total probability")
      ->capture_default_str();
  app.add_option("--seed", o.sampling.seed, "of the sampling")->capture_default_str();
  program::add_cache_options(app, o.cache_type, o.page_size, o.threads);
  app.footer(std::string("\n") + program::spec_help());
  CLI11_PARSE(app, argc, argv);
  return program::run("generate", [&] { return generate(o); });
}
