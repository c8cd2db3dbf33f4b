// SPDX-License-Identifier: Apache-2.0

// The whole engine on the real model. Without the file there is nothing to test: exit code 77, which ctest counts as skipped.
#include <kvtrim/budget/rows.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "catch.hpp"
#include "llama_engine/chat.hpp"
#include "llama_engine/gguf.hpp"
#include "llama_engine/llama.hpp"
#include "llama_engine/sampling.hpp"
#include "llama_engine/tokenizer.hpp"
#include "program/evictor.hpp"
#include "program/policy_spec.hpp"

namespace {

using engine::LogitRows;
using engine::Segment;
using engine::Token;
using kvtrim::Status;

std::string model_path() {
  const char* path = std::getenv("KVTRIM_MODEL");
  return path != nullptr && *path != '\0' ? path : KVTRIM_MODEL_DEFAULT;
}

/// Leaves before Catch's main begins.
[[maybe_unused]] const bool found = [] {
  if (std::filesystem::exists(model_path())) return true;
  std::printf("skipped: no model at %s (set KVTRIM_MODEL)\n", model_path().c_str());
  std::exit(77);
}();

struct Loaded {
  engine::GgufFile file{model_path()};
  engine::Tokenizer tokenizer{file};
  engine::LlamaModel model{file};
};

/// Loaded once: dequantising takes longer than most tests.
Loaded& loaded() {
  static Loaded instance;
  return instance;
}

/// The three texts of logits.json.
const nlohmann::json& reference_texts() {
  static const nlohmann::json texts = [] {
    std::ifstream in(KVTRIM_TEST_DATA "/eval/logits.json");
    return nlohmann::json::parse(in).at("texts");
  }();
  REQUIRE(texts.size() == 3);
  return texts;
}

kvtrim::PagedCache cache_of(std::int32_t rows, kvtrim::DType dtype) {
  auto params = loaded().model.cache_params();
  params.page_size = 16;
  params.pages = kvtrim::pages_for(rows, params.page_size);
  params.dtype = dtype;
  return kvtrim::PagedCache(params);
}

/// Checks one text of logits.json: logits of all its tokens, then 24 greedy ones.
void agrees_with(const nlohmann::json& text, kvtrim::DType dtype) {
  auto& model = loaded().model;
  const auto ids = text.at("ids").get<std::vector<Token>>();
  const auto top1 = text.at("top1").get<std::vector<Token>>();
  const auto margin = text.at("margin").get<std::vector<double>>();
  const auto top1_logprob = text.at("top1_logprob").get<std::vector<double>>();
  const auto next_logprob = text.at("next_logprob").get<std::vector<double>>();
  REQUIRE(top1.size() == ids.size());
  REQUIRE(next_logprob.size() == ids.size() - 1);

  auto cache = cache_of(static_cast<std::int32_t>(ids.size()) + 24, dtype);
  const auto sequence = *cache.try_create();
  const Segment prompt{sequence, ids};
  REQUIRE(model.forward(cache, {&prompt, 1}, LogitRows::all) == Status::ok);
  std::size_t wrong = 0;
  double top1_error = 0;
  double next_error = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto logits = model.logits(static_cast<Eigen::Index>(i));
    const double norm = engine::log_sum_exp(logits);
    const Token top = engine::greedy_token(logits);
    if (margin[i] > 0.05 && top != top1[i]) ++wrong;
    top1_error += std::abs(double{logits[static_cast<std::size_t>(top)]} - norm - top1_logprob[i]);
    if (i + 1 < ids.size()) {
      const auto next = static_cast<std::size_t>(ids[i + 1]);
      next_error += std::abs(double{logits[next]} - norm - next_logprob[i]);
    }
  }
  CHECK(wrong == 0);
  CHECK(top1_error / static_cast<double>(ids.size()) < 0.01);
  CHECK(next_error / static_cast<double>(next_logprob.size()) < 0.01);

  std::vector<Token> answer{engine::greedy_token(model.logits(model.logits().rows() - 1))};
  while (answer.size() < 24) {
    const Segment step{sequence, std::span(answer).last(1)};
    REQUIRE(model.forward(cache, {&step, 1}, LogitRows::last) == Status::ok);
    answer.push_back(engine::greedy_token(model.logits(0)));
  }
  CHECK(answer == text.at("greedy24").get<std::vector<Token>>());
  CHECK(loaded().tokenizer.decode(answer) == text.at("greedy_text").get<std::string>());
}

}  // namespace

TEST_CASE("model: without eviction the logits and 24 greedy tokens are the reference's",
          "[model][parity]") {
  for (const auto& text : reference_texts()) agrees_with(text, kvtrim::DType::f32);
}

TEST_CASE("model: with an f16 cache the logits and 24 greedy tokens are still the reference's",
          "[model][parity]") {
  for (const auto& text : reference_texts()) agrees_with(text, kvtrim::DType::f16);
}

TEST_CASE(
    "model: AdaKV at 75 % removed gives back all pages except a partly filled one per head, and "
    "decode "
    "goes on",
    "[model][adakv]") {
  auto& model = loaded().model;
  std::ifstream in(KVTRIM_TEST_DATA "/eval/needle.jsonl");
  std::string line;
  REQUIRE(std::getline(in, line));
  const auto prompt = nlohmann::json::parse(line);
  auto ids = prompt.at("context").get<std::vector<Token>>();
  const auto question = prompt.at("question").get<std::vector<Token>>();
  ids.insert(ids.end(), question.begin(), question.end());

  for (const auto over : {kvtrim::AdaptiveOver::heads_of_layer, kvtrim::AdaptiveOver::all_heads}) {
    auto params = model.cache_params();
    params.page_size = 16;
    params.scope = kvtrim::TableScope::head;
    const std::int32_t heads = params.layers * params.kv_heads;
    params.max_rows = static_cast<std::int32_t>(ids.size()) + 40;
    params.pages = heads * kvtrim::pages_for(params.max_rows, params.page_size);
    kvtrim::PagedCache cache(params);
    const auto s = *cache.try_create();
    const auto rows = static_cast<std::int32_t>(ids.size());
    const std::int32_t budget = kvtrim::rows_kept(rows, 0.75);
    const kvtrim::AdaKV<kvtrim::SnapKVSelector<>> policy(
        {.inner = {.budget = budget}, .over = over});
    program::Evictor evictor(model, cache, kvtrim::needs(policy));
    REQUIRE(evictor.prefill(model, s, ids) == Status::ok);
    const std::int32_t before = cache.pool().in_use();
    CHECK(before == heads * kvtrim::pages_for(rows, 16));
    const kvtrim::Report report = evictor.evict(policy, s, budget);
    CHECK(report.status == Status::ok);

    // In theory this many rows, packed. Each head may waste less than one page.
    std::int64_t kept = 0;
    std::int64_t pages = 0;
    std::int32_t shortest = rows;
    std::int32_t longest = 0;
    for (std::int32_t l = 0; l < params.layers; ++l) {
      for (std::int32_t h = 0; h < params.kv_heads; ++h) {
        const std::int32_t live = cache.live_rows(s, kvtrim::LayerId{l}, kvtrim::HeadId{h});
        kept += live;
        pages += kvtrim::pages_for(live, 16);
        shortest = std::min(shortest, live);
        longest = std::max(longest, live);
      }
    }
    CHECK(kept == std::int64_t{heads} * budget);
    CHECK(longest > shortest + 16);
    CHECK(cache.pool().in_use() == pages);
    CHECK(cache.pool().in_use() * 16 < kept + 16 * heads);
    CHECK(report.released_pages == before - cache.pool().in_use());
    CHECK(report.kept_rows == kept);
    CHECK(report.allocated_rows == std::int64_t{16} * cache.pool().in_use());

    std::vector<Token> answer{engine::greedy_token(model.logits(0))};
    while (answer.size() < 24) {
      const Segment step{s, std::span(answer).last(1)};
      REQUIRE(model.forward(cache, {&step, 1}, LogitRows::last) == Status::ok);
      for (const float x : model.logits(0)) REQUIRE(std::isfinite(x));
      answer.push_back(engine::greedy_token(model.logits(0)));
    }
    std::int64_t after = 0;
    std::int64_t pages_after = 0;
    for (std::int32_t l = 0; l < params.layers; ++l) {
      for (std::int32_t h = 0; h < params.kv_heads; ++h) {
        const std::int32_t live = cache.live_rows(s, kvtrim::LayerId{l}, kvtrim::HeadId{h});
        after += live;
        pages_after += kvtrim::pages_for(live, 16);
      }
    }
    CHECK(after == kept + std::int64_t{heads} * 23);
    CHECK(cache.pool().in_use() == pages_after);
  }
}

TEST_CASE("model: the texts of the logits encode to their ids", "[model][tokenizer]") {
  for (const auto& text : reference_texts()) {
    CHECK(loaded().tokenizer.encode(text.at("text").get<std::string>(), true) ==
          text.at("ids").get<std::vector<Token>>());
  }
}

TEST_CASE("model: the ids of every needle prompt decode to its text", "[model][tokenizer]") {
  std::ifstream in(KVTRIM_TEST_DATA "/eval/needle.jsonl");
  std::size_t prompts = 0;
  for (std::string line; std::getline(in, line); ++prompts) {
    const auto prompt = nlohmann::json::parse(line);
    auto ids = prompt.at("context").get<std::vector<Token>>();
    const auto question = prompt.at("question").get<std::vector<Token>>();
    ids.insert(ids.end(), question.begin(), question.end());
    CHECK(ids.size() == prompt.at("tokens").get<std::size_t>());
    CHECK(loaded().tokenizer.decode(ids) == prompt.at("text").get<std::string>());
  }
  CHECK(prompts == 35);
}

TEST_CASE("model: the ids of every perplexity sample lie in the vocabulary", "[model][tokenizer]") {
  std::ifstream in(KVTRIM_TEST_DATA "/eval/perplexity.jsonl");
  std::size_t samples = 0;
  for (std::string line; std::getline(in, line); ++samples) {
    const auto ids = nlohmann::json::parse(line).at("ids").get<std::vector<Token>>();
    CHECK(ids.size() == 1280);
    CHECK_NOTHROW(loaded().tokenizer.decode(ids));
  }
  CHECK(samples == 6);
}

TEST_CASE("model: its chat template is applied and its markers are single tokens",
          "[model][chat]") {
  const auto& [file, tokenizer, model] = loaded();
  const auto ids = tokenizer.encode(engine::apply_chat_template(file, "Hi"), true);
  REQUIRE(ids.size() > 4);
  CHECK(ids[0] == tokenizer.find("<|im_start|>"));
  CHECK(std::count(ids.begin(), ids.end(), tokenizer.find("<|im_start|>")) == 3);
  CHECK(std::count(ids.begin(), ids.end(), tokenizer.find("<|im_end|>")) == 2);
  CHECK(tokenizer.ends_text(tokenizer.eos()));
  CHECK_FALSE(tokenizer.add_bos());
  CHECK(static_cast<std::int32_t>(tokenizer.vocabulary()) == model.shape().vocabulary);
}
