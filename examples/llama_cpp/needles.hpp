// SPDX-License-Identifier: Apache-2.0
#pragma once

// Prompts and samples for models with another tokenizer than the one that the project's files hold ids of.

#include <algorithm>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "answers.hpp"
#include "program/eval_data.hpp"

namespace llama_example {

/// Hides a number in a text, more than 512 tokens before the end, and asks for it: in the words of the model's chat template,
/// or, for a model without one, in words that a base model goes on from.
///
/// \throws std::runtime_error if the text is too short, or the length is
[[nodiscard]] inline std::vector<program::Needle> make_needles(const llama_model* model,
                                                               const std::string& text,
                                                               std::int32_t length,
                                                               std::int32_t count) {
  constexpr std::int64_t back = 512;
  const llama_vocab* vocab = llama_model_get_vocab(model);
  const char* chat = llama_model_chat_template(model, nullptr);
  const auto filler = tokens_of(vocab, text, false);
  std::mt19937_64 random(7);
  std::vector<program::Needle> needles;
  for (std::int32_t i = 0; i < count; ++i) {
    static constexpr const char* things[] = {"the harbour",
                                             "Paris",
                                             "winter",
                                             "the museum",
                                             "Oslo",
                                             "the orchard",
                                             "Lisbon",
                                             "the clock"};
    const std::string fact = std::string("The secret number of ") + things[random() % 8] + " is";
    program::Needle n;
    n.id = "made-" + std::to_string(length) + "-" + std::to_string(i);
    n.tokens = length;
    n.answer = std::to_string(10000 + random() % 90000);
    std::string opening, ending = "\n\nNote again: " + fact;
    if (chat != nullptr) {
      const llama_chat_message message{
          "user", "Remember the secret number in this text.\n\n@\n\nWhat is it?"};
      std::string shaped(4096, '\0');
      const std::int32_t size =
          llama_chat_apply_template(chat, &message, 1, true, shaped.data(), 4096);
      const std::size_t at = size < 0 ? std::string::npos : shaped.find('@');
      if (at == std::string::npos)
        throw std::runtime_error("llama.cpp does not know the chat template");
      opening = shaped.substr(0, at);
      ending = shaped.substr(at + 1, static_cast<std::size_t>(size) - at - 1) + fact;
    }
    n.context = tokens_of(vocab, opening, true);
    n.question = tokens_of(vocab, ending, false);
    const auto needle = tokens_of(vocab, "\nNote: " + fact + " " + n.answer + ".\n", false);
    const std::int64_t gap =
        length - static_cast<std::int64_t>(n.context.size() + n.question.size() + needle.size());
    const std::int64_t most = gap - back;  // tokens before the needle
    if (most < 1 || gap > static_cast<std::int64_t>(filler.size())) {
      throw std::runtime_error("prompts of " + std::to_string(length) + " tokens need " +
                               std::to_string(gap) + " tokens of text, more than " +
                               std::to_string(back) + "; there are " +
                               std::to_string(filler.size()));
    }
    const auto from =
        filler.begin() +
        static_cast<std::ptrdiff_t>(random() % (filler.size() - static_cast<std::size_t>(gap) + 1));
    const std::int64_t before = most * (2 * i + 1) / (2 * count);
    n.context.insert(n.context.end(), from, from + before);
    n.context.insert(n.context.end(), needle.begin(), needle.end());
    n.context.insert(n.context.end(), from + before, from + gap);
    needles.push_back(std::move(n));
  }
  return needles;
}

/// The same texts by another tokenizer: all but the last `next` tokens are read, those are predicted.
[[nodiscard]] inline std::vector<program::Sample> translate(
    const std::vector<program::Sample>& samples,
    const std::string& from_model,
    const llama_vocab* to,
    std::int32_t next) {
  llama_model_params params = llama_model_default_params();
  params.vocab_only = true;
  const llama_model_ptr from(llama_model_load_from_file(from_model.c_str(), params));
  if (!from) throw std::runtime_error("llama.cpp cannot load " + from_model);
  std::vector<program::Sample> out;
  for (const program::Sample& s : samples) {
    auto ids = tokens_of(to, text_of(llama_model_get_vocab(from.get()), s.ids), true);
    if (ids.size() <= static_cast<std::size_t>(next) + 1)
      throw std::runtime_error("a sample has only " + std::to_string(ids.size()) + " tokens");
    out.push_back({ids, ids.size() - static_cast<std::size_t>(next)});
  }
  return out;
}

}  // namespace llama_example
