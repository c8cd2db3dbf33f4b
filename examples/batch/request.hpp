// SPDX-License-Identifier: Apache-2.0
#pragma once

// What is asked of the batch: a list of requests, drawn or read from a file, checked before the first one runs.

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "llama_engine/llama_weights.hpp"
#include "llama_engine/tokenizer.hpp"
#include "program/eval_data.hpp"
#include "program/needles.hpp"
#include "program/strict.hpp"

namespace batch {

using program::Token;

/// One stream to be.
struct Request {
  std::string id;
  std::int64_t arrival = 0;   ///< in decode steps, so that a run is the same everywhere
  std::vector<Token> prompt;  ///< context and question, without a common prefix
  std::string answer;         ///< what the text must contain; empty: nobody asks
  std::int32_t max_tokens = 0;
};

/// \throws std::runtime_error if the prompt is empty, a token is not of the model, or prompt and answer do not fit its context
inline void check(const Request& r, std::int64_t prefix, const engine::LlamaShape& shape) {
  const auto refuse = [&](const std::string& what) {
    throw std::runtime_error("request " + r.id + ": " + what);
  };
  if (r.prompt.empty()) refuse("context and question are empty");
  if (r.arrival < 0) refuse("arrival " + std::to_string(r.arrival) + " is negative");
  if (r.max_tokens < 1) {
    refuse("max_tokens is " + std::to_string(r.max_tokens) + ", it must be at least 1");
  }
  for (const Token token : r.prompt) {
    if (token >= 0 && token < shape.vocabulary) continue;
    refuse("token " + std::to_string(token) + " is outside the model's vocabulary of " +
           std::to_string(shape.vocabulary));
  }
  // The last token that is generated is not read.
  const std::int64_t rows = prefix + static_cast<std::int64_t>(r.prompt.size()) + r.max_tokens - 1;
  if (rows > shape.context) {
    refuse("a prefix of " + std::to_string(prefix) + ", a prompt of " +
           std::to_string(r.prompt.size()) + " and max_tokens of " + std::to_string(r.max_tokens) +
           " need " + std::to_string(rows) + " positions, more than the model's context of " +
           std::to_string(shape.context));
  }
}

/// Needle prompts that all arrive at once.
[[nodiscard]] inline std::vector<Request> draw_requests(const engine::Tokenizer& tokenizer,
                                                        const std::string& text,
                                                        const std::string& name,
                                                        std::int32_t context,
                                                        std::int32_t count,
                                                        std::int32_t max_tokens,
                                                        std::uint64_t seed) {
  std::vector<Request> requests;
  for (auto& made : program::make_needles(tokenizer, text, name, context, count, seed)) {
    Request r{made.prompt.id, 0, std::move(made.prompt.context), made.prompt.answer, max_tokens};
    r.prompt.insert(r.prompt.end(), made.prompt.question.begin(), made.prompt.question.end());
    requests.push_back(std::move(r));
  }
  return requests;
}

namespace detail {

// Token ids as they are, a text through the tokenizer.
inline void append(const engine::Tokenizer& tokenizer,
                   const nlohmann::json& part,
                   std::vector<Token>& to) {
  const auto ids = part.is_string() ? tokenizer.encode(part.get<std::string>(), true)
                                    : program::strict<std::vector<Token>>(part);
  to.insert(to.end(), ids.begin(), ids.end());
}

}  // namespace detail

/// Reads requests as JSON lines with `id, context, question`, texts or token ids, and optional `arrival` (0), `answer` (none)
/// and `max_tokens`: prompts of `evaluate --write-prompts` are requests that arrive at once.
///
/// \param max_tokens  of a request that names none
/// \param prefix      tokens in front of every prompt
/// \throws std::runtime_error if the file cannot be read or has no request; with the line, if one is none that the model can
///   answer, has the id of another, or arrives before the one above it
[[nodiscard]] inline std::vector<Request> read_requests(const std::string& path,
                                                        const engine::Tokenizer& tokenizer,
                                                        const engine::LlamaShape& shape,
                                                        std::int32_t max_tokens,
                                                        std::int64_t prefix) {
  std::vector<Request> requests;
  std::set<std::string> ids;
  program::detail::for_each_json_line(path, [&](const nlohmann::json& line) {
    Request r;
    line.at("id").get_to(r.id);
    r.arrival = line.contains("arrival") ? program::strict<std::int64_t>(line["arrival"]) : 0;
    r.answer = line.value("answer", std::string());
    const auto most = line.contains("max_tokens")
                          ? program::strict<std::int64_t>(line["max_tokens"])
                          : std::int64_t{max_tokens};
    if (most > std::numeric_limits<std::int32_t>::max()) {
      throw std::runtime_error("request " + r.id + ": max_tokens is " + std::to_string(most) +
                               ", more than the model's context of " +
                               std::to_string(shape.context));
    }
    r.max_tokens = static_cast<std::int32_t>(most < 0 ? 0 : most);
    detail::append(tokenizer, line.at("context"), r.prompt);
    detail::append(tokenizer, line.at("question"), r.prompt);
    check(r, prefix, shape);
    if (!ids.insert(r.id).second) throw std::runtime_error("request " + r.id + " is there twice");
    if (!requests.empty() && r.arrival < requests.back().arrival) {
      throw std::runtime_error("request " + r.id + " arrives at step " + std::to_string(r.arrival) +
                               ", before the one above it, at " +
                               std::to_string(requests.back().arrival));
    }
    requests.push_back(std::move(r));
  });
  if (requests.empty()) throw std::runtime_error(path + " has no request");
  return requests;
}

}  // namespace batch
