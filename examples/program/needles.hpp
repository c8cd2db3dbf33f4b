// SPDX-License-Identifier: Apache-2.0
#pragma once

// Needle prompts: a fact hidden in a text, and the question for it. The same arguments make the same prompts everywhere.

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "eval_data.hpp"
#include "llama_engine/tokenizer.hpp"

namespace program {

/// A prompt as it was made: where the fact is.
struct MadeNeedle {
  Needle prompt;
  double depth = 0;                ///< of the fact, 0 to 1
  std::size_t begin = 0, end = 0;  ///< the fact's tokens
};

namespace detail {
inline constexpr std::array<const char*, 20> needle_things{
    "the harbour", "Paris",          "winter",       "the old bridge", "the lighthouse",
    "Saturn",      "the museum",     "the red door", "Oslo",           "the engine",
    "the orchard", "the north gate", "autumn",       "the library",    "the fountain",
    "the valley",  "Lisbon",         "the ferry",    "the clock",      "the archive"};

// Facts in a text: `opening`, then `gap` tokens of the text with the facts at their depths (0 to 1, ascending).
struct Hidden {
  std::vector<Token> context;
  std::vector<std::pair<std::size_t, std::size_t>> facts;  // their tokens
};

/// \param draw  which part of the text to take: it begins at `draw` mod the number of possible beginnings
/// \throws std::runtime_error if the text is too short
inline Hidden hide(std::span<const Token> filler,
                   const std::string& name,
                   std::span<const Token> opening,
                   std::span<const std::vector<Token>> facts,
                   std::span<const double> depths,
                   std::size_t question,
                   std::int32_t length,
                   std::uint64_t draw) {
  std::size_t around = opening.size() + question;
  for (const auto& fact : facts) around += fact.size();
  const std::int64_t gap = length - static_cast<std::int64_t>(around);
  if (gap < 1 || gap > static_cast<std::int64_t>(filler.size())) {
    throw std::runtime_error(name + " has " + std::to_string(filler.size()) + " tokens, but " +
                             std::to_string(length) + " tokens per prompt need " +
                             std::to_string(gap) + " of them, at least 1");
  }
  const auto size = static_cast<std::size_t>(gap);
  const auto text = filler.subspan(draw % (filler.size() - size + 1), size);
  Hidden hidden;
  std::vector<Token>& context = hidden.context;
  context.assign(opening.begin(), opening.end());
  std::size_t done = 0;
  for (std::size_t i = 0; i < facts.size(); ++i) {
    const auto before = static_cast<std::size_t>(depths[i] * static_cast<double>(gap));
    const auto part = text.subspan(done, before - done);
    context.insert(context.end(), part.begin(), part.end());
    done = before;
    hidden.facts.emplace_back(context.size(), context.size() + facts[i].size());
    context.insert(context.end(), facts[i].begin(), facts[i].end());
  }
  context.insert(context.end(), text.begin() + static_cast<std::ptrdiff_t>(done), text.end());
  return hidden;
}
}  // namespace detail

/// Hides facts in `text`.
///
/// \param text    what surrounds them; `name` is its name in errors
/// \param length  tokens of a prompt, question included
/// \param count   prompts; the fact's depth is spread evenly over them
/// \throws std::runtime_error if the text is too short
[[nodiscard]] inline std::vector<MadeNeedle> make_needles(const engine::Tokenizer& tokenizer,
                                                          const std::string& text,
                                                          const std::string& name,
                                                          std::int32_t length,
                                                          std::int32_t count,
                                                          std::uint64_t seed) {
  const auto encode = [&](const std::string& part) { return tokenizer.encode(part, true); };
  const std::vector<Token> filler = tokenizer.encode(text, false);
  const auto opening = encode(
      "<|im_start|>user\nThere is an important fact hidden in the text below. Find it and remember "
      "it.\n\n");
  std::mt19937_64 random(seed);
  std::vector<MadeNeedle> made;
  for (std::int32_t i = 0; i < count; ++i) {
    const std::string thing = detail::needle_things[random() % detail::needle_things.size()];
    MadeNeedle n;
    n.prompt.answer = std::to_string(10000 + random() % 90000);
    const auto needle =
        encode("\nThe secret number of " + thing + " is " + n.prompt.answer + ".\n");
    n.prompt.question =
        encode("\n\nWhat is the secret number of " + thing +
               "?<|im_end|>\n<|im_start|>assistant\nThe secret number of " + thing + " is");
    n.depth = (i + 0.5) / count;
    auto hidden = detail::hide(filler,
                               name,
                               opening,
                               {&needle, 1},
                               {&n.depth, 1},
                               n.prompt.question.size(),
                               length,
                               random());
    n.prompt.context = std::move(hidden.context);
    std::tie(n.begin, n.end) = hidden.facts.front();
    n.prompt.tokens = length;
    n.prompt.id =
        "s" + std::to_string(seed) + "-" + std::to_string(length) + "-" + std::to_string(i);
    made.push_back(std::move(n));
  }
  return made;
}

}  // namespace program
