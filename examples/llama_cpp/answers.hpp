// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a model says: greedy tokens, their text, and what it thought of given ones.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "session.hpp"

namespace llama_example {

/// Logits of token `i` of the last batch.
[[nodiscard]] inline std::span<const float> logits(Session& session, std::int32_t i) {
  const float* const row = llama_get_logits_ith(session.context(), i);
  if (row == nullptr) throw std::runtime_error("no logits of token " + std::to_string(i));
  return {row, static_cast<std::size_t>(llama_vocab_n_tokens(session.vocab()))};
}

/// The most likely token.
[[nodiscard]] inline llama_token greedy(std::span<const float> row) {
  return static_cast<llama_token>(std::max_element(row.begin(), row.end()) - row.begin());
}

/// Natural logarithm of a token's probability.
[[nodiscard]] inline double log_probability(std::span<const float> row, llama_token token) {
  const double top = static_cast<double>(*std::max_element(row.begin(), row.end()));
  double sum = 0;
  for (const float x : row) sum += std::exp(static_cast<double>(x) - top);
  return static_cast<double>(row[static_cast<std::size_t>(token)]) - top - std::log(sum);
}

/// Text of tokens.
[[nodiscard]] inline std::string text_of(const llama_vocab* vocab,
                                         std::span<const llama_token> ids) {
  std::string text(ids.size() * 16 + 64, '\0');
  for (;;) {
    const std::int32_t n = llama_detokenize(vocab,
                                            ids.data(),
                                            static_cast<std::int32_t>(ids.size()),
                                            text.data(),
                                            static_cast<std::int32_t>(text.size()),
                                            false,
                                            false);
    text.resize(static_cast<std::size_t>(std::abs(n)));
    if (n >= 0) return text;
  }
}

/// Tokens of a text, special words among them.
[[nodiscard]] inline std::vector<llama_token> tokens_of(const llama_vocab* vocab,
                                                        const std::string& text,
                                                        bool begin) {
  std::vector<llama_token> ids(text.size() + 8);
  const std::int32_t n = llama_tokenize(vocab,
                                        text.data(),
                                        static_cast<std::int32_t>(text.size()),
                                        ids.data(),
                                        static_cast<std::int32_t>(ids.size()),
                                        begin,
                                        true);
  if (n < 0)
    throw std::runtime_error("the text of " + std::to_string(text.size()) +
                             " bytes has more tokens");
  ids.resize(static_cast<std::size_t>(n));
  return ids;
}

/// Decodes greedily, each sequence from its own first token, all of them together.
///
/// \param past_end  go on after the token that ends the text
/// \returns for each sequence at most `steps` tokens; those of `past_end` among them
[[nodiscard]] inline std::vector<std::vector<llama_token>> generate(
    Session& session,
    std::span<const llama_seq_id> sequences,
    std::span<const llama_token> firsts,
    std::size_t steps,
    bool past_end = false) {
  std::vector<std::vector<llama_token>> answers(sequences.size());
  for (std::size_t step = 0; step < steps; ++step) {
    std::vector<Token> batch;
    std::vector<std::size_t> of;  // index of the sequence
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const llama_token last = answers[i].empty() ? firsts[i] : answers[i].back();
      if (!answers[i].empty() && !past_end && llama_vocab_is_eog(session.vocab(), last)) continue;
      batch.push_back({last, sequences[i], true});
      of.push_back(i);
    }
    if (batch.empty()) break;
    session.decode(batch);
    for (std::size_t b = 0; b < of.size(); ++b)
      answers[of[b]].push_back(greedy(logits(session, static_cast<std::int32_t>(b))));
  }
  return answers;
}

/// Whether an answer, up to the token that ends it, holds a word.
[[nodiscard]] inline bool says(const llama_vocab* vocab,
                               std::span<const llama_token> answer,
                               const std::string& word) {
  const auto end = std::find_if(
      answer.begin(), answer.end(), [&](llama_token t) { return llama_vocab_is_eog(vocab, t); });
  const auto length = static_cast<std::size_t>(end - answer.begin());
  return text_of(vocab, answer.first(length)).find(word) != std::string::npos;
}

}  // namespace llama_example
