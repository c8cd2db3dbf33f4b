// SPDX-License-Identifier: Apache-2.0
// What a KV cache weighs, what each policy makes of it, and how many streams a memory then holds: arithmetic, before anything is
// installed. Pages are those that `peak_pages` says no run exceeds.

#include <CLI/CLI.hpp>

#include <kvtrim/cache/memory.hpp>
#include <kvtrim/policy/peak_pages.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "program/console.hpp"
#include "program/evictor.hpp"
#include "program/model_shapes.hpp"
#include "program/policy_spec.hpp"
#include "program/sizes.hpp"

namespace {

struct Options {
  std::string model = "Llama-3-70B", dtype = "f16", memory = "8x80GiB", weights, tables = "any";
  std::vector<std::string> policies{
      "full", "streaming", "h2o", "snapkv", "pyramidkv", "adakv", "page"};
  std::int64_t context = 131'072, generate = 0, streams = 8, page_size = 16, chunk = 128;
  double removed = 0.9;
  bool json = false, markdown = false;
};

// What a policy makes of one stream.
struct Row {
  std::string policy;
  std::int64_t kept_rows = 0;      // of a head that sees everything, after the prompt
  kvtrim::PeakPages pages;         // of such a head's table
  std::int64_t prompt_bytes = 0;   // peak of all layers
  std::int64_t running_bytes = 0;  // from then on
};

kvtrim::DType dtype_of(const std::string& name) {
  using enum kvtrim::DType;
  return name == "f32"    ? f32
         : name == "f16"  ? f16
         : name == "bf16" ? bf16
         : name == "i8"   ? i8
                          : f8e4m3;
}

void check_tables(const Options& o, const std::string& spec, kvtrim::TableScope needed) {
  const std::vector<std::string> names{"group", "layer", "head"};
  const auto has = std::ranges::find(names, o.tables) - names.begin();
  if (o.tables == "any" || has >= static_cast<std::ptrdiff_t>(needed)) return;
  throw std::runtime_error("policy '" + spec + "' needs a page table per " +
                           names[static_cast<std::size_t>(needed)] + ", but the pool has one per " +
                           o.tables);
}

Row row_of(const Options& o, const program::ModelShape& model, const std::string& text) {
  const program::PolicySpec spec(text);
  const auto context = static_cast<std::int32_t>(o.context);
  const std::int32_t keep = spec.rows_to_keep(context, o.removed);
  const program::AnyPolicy policy = spec.make(keep, kvtrim::SinkForm::pages);
  check_tables(o, text, program::needs_of(policy).scope);
  const kvtrim::CutTimes cuts =
      spec.acts_once() ? kvtrim::CutTimes::after_prompt : kvtrim::CutTimes::each_step;
  Row row{text, std::min(keep, context), {}, 0, 0};
  const auto bytes = [&](const kvtrim::LayerShape& kind, std::int64_t pages) {
    return kvtrim::cache_bytes(kind, dtype_of(o.dtype), pages * o.page_size);
  };
  for (const kvtrim::LayerShape& kind : model.kinds) {
    kvtrim::PeakPages pages = program::peak_pages_of(
        policy, o.context, o.generate, o.page_size, o.chunk, {cuts, keep, kind.layers});
    if (kind.window == 0) {
      row.pages = pages;
    } else {  // the engine itself drops what has left the window, chunk by chunk
      const kvtrim::StreamingSink<> window({.sinks = 0, .recent = kind.window});
      const kvtrim::PeakPages own = kvtrim::peak_pages(
          window, o.context, o.generate, o.page_size, o.chunk, {kvtrim::CutTimes::each_chunk});
      pages = {std::min(pages.prompt, own.prompt), std::min(pages.running, own.running)};
      if (row.pages.prompt == 0) row.pages = pages;
    }
    row.prompt_bytes += bytes(kind, pages.prompt);
    row.running_bytes += bytes(kind, pages.running);
  }
  return row;
}

struct Answer {
  std::int64_t token_bytes = 0;   // in all layers
  std::int64_t stream_bytes = 0;  // rows of one stream's context
  std::int64_t memory = 0, weights = 0;
  std::vector<Row> rows;
  [[nodiscard]] std::int64_t free() const { return std::max<std::int64_t>(0, memory - weights); }
  [[nodiscard]] std::int64_t steady(const Row& row) const {
    return kvtrim::streams_that_fit(free(), row.running_bytes, row.running_bytes);
  }
  [[nodiscard]] std::int64_t in_prefill(const Row& row) const {
    return kvtrim::streams_that_fit(
        free(), row.running_bytes, std::max(row.prompt_bytes, row.running_bytes));
  }
};

void print_json(const Options& o, const program::ModelShape& model, const Answer& a) {
  nlohmann::ordered_json kinds = nlohmann::ordered_json::array();
  for (const kvtrim::LayerShape& k : model.kinds) {
    kinds.push_back({{"layers", k.layers},
                     {"kv_heads", k.kv_heads},
                     {"key_dim", k.key_dim},
                     {"value_dim", k.value_dim},
                     {"window", k.window}});
  }
  const nlohmann::ordered_json head{{"kind", "memory_model"},
                                    {"model", model.name},
                                    {"layers", kinds},
                                    {"dtype", o.dtype},
                                    {"token_bytes", a.token_bytes},
                                    {"context", o.context},
                                    {"generate", o.generate},
                                    {"streams", o.streams},
                                    {"stream_bytes", a.stream_bytes},
                                    {"bytes", a.stream_bytes * o.streams},
                                    {"page_size", o.page_size},
                                    {"memory_bytes", a.memory},
                                    {"weights_bytes", a.weights}};
  std::printf("%s\n", head.dump().c_str());
  for (const Row& r : a.rows) {
    const nlohmann::ordered_json line{{"kind", "memory_policy"},
                                      {"policy", r.policy},
                                      {"kept_rows", r.kept_rows},
                                      {"prompt_pages", r.pages.prompt},
                                      {"running_pages", r.pages.running},
                                      {"prompt_bytes", r.prompt_bytes},
                                      {"running_bytes", r.running_bytes},
                                      {"bytes", r.running_bytes * o.streams},
                                      {"fit_steady", a.steady(r)},
                                      {"fit_one_in_prefill", a.in_prefill(r)}};
    std::printf("%s\n", line.dump().c_str());
  }
}

void print_text(const Options& o, const program::ModelShape& model, const Answer& a) {
  std::printf("%s, %s: %s B a token",
              model.name.c_str(),
              o.dtype.c_str(),
              program::grouped(a.token_bytes).c_str());
  for (const kvtrim::LayerShape& k : model.kinds) {
    std::printf("; %d layers, %d KV head%s of %d",
                k.layers,
                k.kv_heads,
                k.kv_heads == 1 ? "" : "s",
                k.key_dim);
    if (k.value_dim == 0) std::printf(", values within the keys");
    if (k.window > 0) std::printf(", a window of %d", k.window);
  }
  const std::int64_t bytes = a.stream_bytes * o.streams;
  std::printf("\n%s streams of %s tokens: %s B (%s GiB)\n",
              program::grouped(o.streams).c_str(),
              program::grouped(o.context).c_str(),
              program::grouped(bytes).c_str(),
              program::in_gib(bytes).c_str());
  std::printf("%s (%s B) beside %s B of weights: %s B for the cache, in pages of %lld\n\n",
              o.memory.c_str(),
              program::grouped(a.memory).c_str(),
              program::grouped(a.weights).c_str(),
              program::grouped(a.free()).c_str(),
              static_cast<long long>(o.page_size));
  std::vector<std::vector<std::string>> cells{{"policy",
                                               "rows kept",
                                               "pages a table: prompt",
                                               "running",
                                               "GiB of " + std::to_string(o.streams) + " streams",
                                               "streams that fit",
                                               "while one is in prefill"}};
  for (const Row& r : a.rows) {
    cells.push_back({r.policy,
                     program::grouped(r.kept_rows),
                     program::grouped(r.pages.prompt),
                     program::grouped(r.pages.running),
                     program::in_gib(r.running_bytes * o.streams),
                     program::grouped(a.steady(r)),
                     program::grouped(a.in_prefill(r))});
  }
  std::vector<std::size_t> widths(cells[0].size());
  for (const auto& line : cells) {
    for (std::size_t c = 0; c < line.size(); ++c) widths[c] = std::max(widths[c], line[c].size());
  }
  for (std::size_t i = 0; i < cells.size(); ++i) {
    for (std::size_t c = 0; c < widths.size(); ++c) {
      const int width = static_cast<int>(widths[c]);
      std::printf(o.markdown ? (c == 0 ? "| %-*s |" : " %*s |") : (c == 0 ? "%-*s" : "  %*s"),
                  width,
                  cells[i][c].c_str());
    }
    std::printf("\n");
    for (std::size_t c = 0; o.markdown && i == 0 && c < widths.size(); ++c)
      std::printf(c == 0 ? "|---|" : "---:|");
    if (o.markdown && i == 0) std::printf("\n");
  }
}

int calculate(const Options& o) {
  if (o.context + o.generate > INT32_MAX) {
    throw std::runtime_error("--context and --generate together are " +
                             std::to_string(o.context + o.generate) +
                             " tokens, more than 2147483647");
  }
  if (!(o.removed >= 0 && o.removed <= 1))
    throw std::runtime_error("--removed " + std::to_string(o.removed) + " is not within 0 and 1");
  const program::ModelShape model = program::model_shape(o.model);
  Answer a;
  a.memory = program::parse_bytes("--memory", o.memory);
  // What the headline's model weighs in 16 bits; of another, nobody said.
  const bool headline = o.weights.empty() && o.model == "Llama-3-70B";
  a.weights = headline            ? 140'000'000'000
              : o.weights.empty() ? 0
                                  : program::parse_bytes("--weights", o.weights);
  for (const kvtrim::LayerShape& kind : model.kinds) {
    const std::int64_t bytes = kvtrim::token_bytes(kind, dtype_of(o.dtype));
    if (bytes > (std::int64_t{1} << 30))  // so that no sum below overflows
      throw std::runtime_error(model.name + ": " + program::grouped(bytes) +
                               " B a token is no model's");
    a.token_bytes += bytes;
    a.stream_bytes += bytes * kvtrim::window_rows(kind, o.context);
  }
  // Printed sums are of all streams.
  const auto check = [&](std::int64_t bytes) {
    static_cast<void>(kvtrim::detail::checked_product("--streams", {bytes, o.streams}));
  };
  check(a.stream_bytes);
  for (const std::string& policy : o.policies) {
    a.rows.push_back(row_of(o, model, policy));
    check(std::max(a.rows.back().prompt_bytes, a.rows.back().running_bytes));
  }
  if (o.json) {
    print_json(o, model, a);
  } else {
    print_text(o, model, a);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("What a KV cache weighs, what a policy makes of it, and how many streams then fit.");
  std::vector<std::string> names;
  for (const program::ModelShape& m : program::known_models()) names.push_back(m.name);
  app.add_option("--model",
                 o.model,
                 "a GGUF file, a Hugging Face config.json, or one of " + program::listed(names))
      ->capture_default_str();
  app.add_option("--context", o.context, "tokens of a prompt")
      ->check(CLI::Range(1, INT32_MAX))
      ->capture_default_str();
  app.add_option("--generate", o.generate, "rows that are added to it")
      ->check(CLI::Range(0, 1 << 24))
      ->capture_default_str();
  app.add_option("--streams", o.streams, "sequences at once")
      ->check(CLI::Range(1, INT32_MAX))
      ->capture_default_str();
  app.add_option("--dtype", o.dtype, "of keys and values")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "f8", "i8"}))
      ->capture_default_str();
  app.add_option("--page-size", o.page_size, "rows per page")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--chunk", o.chunk, "tokens of a prompt that are read at a time")
      ->check(CLI::Range(1, INT32_MAX))
      ->capture_default_str();
  app.add_option("--policy", o.policies, "SPEC ... (see below)")->capture_default_str();
  app.add_option("--removed", o.removed, "fraction removed, for policies that name no size")
      ->capture_default_str();
  app.add_option(
         "--tables", o.tables, "what the pool has a page table for; any: as the policy needs")
      ->check(CLI::IsMember({"any", "group", "layer", "head"}))
      ->capture_default_str();
  app.add_option("--memory", o.memory, "of the machine: 140e9, 80GiB or 8x80GiB")
      ->capture_default_str();
  app.add_option("--weights", o.weights, "of the model, beside the cache [0; Llama-3-70B: 140e9]");
  auto* json = app.add_flag("--json", o.json, "print JSON lines (bench/README.md)");
  app.add_flag("--markdown", o.markdown, "print a Markdown table")->excludes(json);
  app.footer(std::string("\n") + program::spec_help());
  CLI11_PARSE(app, argc, argv);
  return program::run("cache_memory", [&] { return calculate(o); });
}
