// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tasks: what is hidden, what is asked, where. Prompts are made when they are needed, from texts that lie in the project, with the
// model's own tokenizer. A prompt depends on its task, length and number alone, so a longer run begins with the shorter one's.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llama_engine/tokenizer.hpp"
#include "program/eval_data.hpp"

namespace evaluate {

using program::Token;

/// Counted up whenever prompts change: results of different versions do not mix.
inline constexpr int suite_version = 1;

/// The tasks with answers, in the order in which they run.
inline constexpr std::array<std::string_view, 8> tasks{"needle_number",
                                                       "needle_word",
                                                       "needle_name",
                                                       "four_needles",
                                                       "key_value",
                                                       "identifier",
                                                       "cued_copy",
                                                       "multi_turn"};
/// Tokens whose log-probability falls by this much (natural log) without what lies more than `near_tokens` before count as
/// long-range.
inline constexpr double long_range_nats = 1;
inline constexpr std::size_t near_tokens = 256;
/// Tokens of a sample after its prefill; the first is given, the others are predicted.
inline constexpr std::size_t sample_next = 257;
/// Tokens that a passage is cued with, and that are then scored.
inline constexpr std::size_t cue_tokens = 8, copy_tokens = 24;
/// Share of the tokens that makes a copy right: a model of 135 million parameters predicts 75 to 92 % with the whole cache.
inline constexpr double copy_share = 0.75;

/// How many prompts of a length.
struct Size {
  std::int32_t length = 0;
  std::int32_t prompts = 0;  ///< of each task
  std::int32_t samples = 0;  ///< of perplexity
};
struct Suite {
  std::string name;
  std::vector<Size> sizes;
  std::vector<double> removed;
  std::vector<std::string> tasks{evaluate::tasks.begin(), evaluate::tasks.end()};
  bool perplexity = true;
};
/// \throws std::runtime_error if there is none of that name; the text lists the names
[[nodiscard]] Suite suite_of(const std::string& name);

/// A question about a text, asked after the ones before it were answered.
struct Turn {
  std::vector<Token> question;  ///< what the model reads before it answers
  std::string answer;           ///< expected in what it generates
  std::vector<Token>
      copy;  ///< instead of an answer: tokens that are scored one by one, each with those before it given
  std::vector<Token>
      reference;              ///< read in place of the generated answer, before the next question
  std::size_t most = 0;       ///< tokens to generate
  std::size_t fact_rows = 0;  ///< tokens of the facts it needs
  double depth = 0;           ///< of the fact asked for, 0 to 1
};
struct Prompt {
  std::string task, id;
  std::int32_t length = 0;  ///< context, questions and references
  std::vector<Token> context;
  std::vector<Turn> turns;
  std::vector<std::pair<std::size_t, std::size_t>> facts;  ///< tokens of the context
};

/// Makes the prompts.
class Generator {
 public:
  /// \param folder  with novel.txt, proceedings.txt, code.txt
  /// \param seed    0: the suite's prompts; another: other facts in other places, to tune on (samples stay the same)
  /// \throws std::runtime_error if a text cannot be read
  Generator(const engine::Tokenizer& tokenizer, const std::string& folder, std::uint32_t seed = 0);

  /// \param task    one of `tasks`
  /// \param number  from 0; depths are spread evenly over each `spread` prompts
  /// \throws std::runtime_error if the length is too short for the facts or too long for the text
  [[nodiscard]] Prompt make(std::string_view task,
                            std::int32_t length,
                            std::int32_t number,
                            std::int32_t spread) const;

  /// \throws std::runtime_error if the text is too short
  [[nodiscard]] std::vector<program::Sample> samples(std::int32_t length, std::int32_t count) const;

 private:
  struct Text {
    std::string name;
    std::vector<Token> tokens;
  };
  [[nodiscard]] std::vector<Token> encode(const std::string& text) const {
    return tokenizer_->encode(text, true);
  }
  [[nodiscard]] std::vector<Token> opening(const std::string& text) const;
  [[nodiscard]] Turn ask(const std::string& question,
                         const std::string& lead,
                         const std::string& answer,
                         bool first) const;
  void hide(Prompt& prompt,
            const Text& text,
            const std::vector<Token>& opening,
            const std::vector<std::string>& facts,
            const std::vector<double>& depths,
            std::uint64_t draw) const;
  void copy(Prompt& prompt, double depth, std::uint64_t draw) const;

  const engine::Tokenizer* tokenizer_;
  std::uint32_t seed_;
  bool chat_;  // the model knows ChatML
  Text novel_, proceedings_, code_;
};

}  // namespace evaluate
