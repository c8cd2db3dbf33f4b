// SPDX-License-Identifier: Apache-2.0
#pragma once

// One user prompt in a model's chat format. The template in the file is a Jinja program, which this engine does not run: it
// recognises ChatML by its marker and writes that format itself, with the system prompt that the template has built in.

#include <string>
#include <string_view>

#include "gguf.hpp"

namespace engine {

/// The text to encode (with special tokens) so that the model answers `prompt`.
///
/// \throws std::runtime_error if the file has no chat template, or one that is not ChatML
[[nodiscard]] inline std::string apply_chat_template(const GgufFile& file,
                                                     std::string_view prompt) {
  constexpr std::string_view start = "<|im_start|>";
  constexpr std::string_view end = "<|im_end|>";
  const std::string* stored = file.find<std::string>("tokenizer.chat_template");
  if (stored == nullptr) file.fail("the model has no chat template (key tokenizer.chat_template)");
  if (stored->find(start) == std::string::npos) {
    file.fail(
        "the model's chat template is not known; known is ChatML (<|im_start|> ... <|im_end|>)");
  }
  std::string text;
  const auto say = [&](std::string_view role, std::string_view content) {
    text.append(start).append(role).append("\n").append(content).append(end).append("\n");
  };
  // A template with a default system prompt holds it as text: "<|im_start|>system\n...<|im_end|>".
  const std::string opening = std::string(start) + "system\n";
  if (const std::size_t at = stored->find(opening); at != std::string::npos) {
    const std::size_t begin = at + opening.size();
    const std::size_t length = stored->find(end, begin);
    if (length != std::string::npos) {
      const std::string_view content = std::string_view(*stored).substr(begin, length - begin);
      if (content.find('\'') == std::string_view::npos) say("system", content);
    }
  }
  say("user", prompt);
  return text.append(start).append("assistant\n");
}

}  // namespace engine
