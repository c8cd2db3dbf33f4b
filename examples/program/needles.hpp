// SPDX-License-Identifier: Apache-2.0
#pragma once

// Needle prompts: a fact hidden in a text, and the question for it. The same arguments make the same prompts everywhere.

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/tokenizer.hpp"
#include "eval_data.hpp"

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
    const auto around =
        static_cast<std::int64_t>(opening.size() + needle.size() + n.prompt.question.size());
    const std::int64_t gap = length - around;
    if (gap < 1 || gap > static_cast<std::int64_t>(filler.size())) {
      throw std::runtime_error(name + " has " + std::to_string(filler.size()) + " tokens, but " +
                               std::to_string(length) + " tokens per prompt need " +
                               std::to_string(gap) + " of them, at least 1");
    }
    const auto start =
        static_cast<std::ptrdiff_t>(random() % (filler.size() - static_cast<std::size_t>(gap) + 1));
    n.depth = (i + 0.5) / count;
    const auto before = static_cast<std::ptrdiff_t>(n.depth * static_cast<double>(gap));
    const auto from = filler.begin() + start;
    std::vector<Token>& context = n.prompt.context;
    context = opening;
    context.insert(context.end(), from, from + before);
    n.begin = context.size();
    context.insert(context.end(), needle.begin(), needle.end());
    n.end = context.size();
    context.insert(context.end(), from + before, from + static_cast<std::ptrdiff_t>(gap));
    n.prompt.tokens = length;
    n.prompt.id =
        "s" + std::to_string(seed) + "-" + std::to_string(length) + "-" + std::to_string(i);
    made.push_back(std::move(n));
  }
  return made;
}

}  // namespace program
