// SPDX-License-Identifier: Apache-2.0

// The whole engine on the real model. Without the file there is nothing to test: exit code 77, which ctest counts as skipped.
#define CATCH_CONFIG_RUNNER
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
#include "engine/chat.hpp"
#include "engine/gguf.hpp"
#include "engine/llama.hpp"
#include "engine/sampling.hpp"
#include "engine/tokenizer.hpp"

namespace {

using engine::LogitRows;
using engine::Segment;
using engine::Token;
using kvtrim::Status;

std::string model_path() {
  const char* path = std::getenv("KVTRIM_MODEL");
  return path != nullptr && *path != '\0' ? path : KVTRIM_MODEL_DEFAULT;
}

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

int main(int argc, char** argv) {
  if (!std::filesystem::exists(model_path())) {
    std::printf("skipped: no model at %s (set KVTRIM_MODEL)\n", model_path().c_str());
    return 77;
  }
  return Catch::Session().run(argc, argv);
}
