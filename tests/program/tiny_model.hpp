// SPDX-License-Identifier: Apache-2.0
#pragma once

// A model small enough that a program run with it takes milliseconds: one token per byte, random weights, 200 positions. It
// outputs printable ASCII only, because all other tokens have embeddings of 0, which are the output matrix too.

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "../llama_engine/gguf_builder.hpp"
#include "llama_engine/tokenizer.hpp"
#include "support.hpp"

namespace program_test {

inline constexpr int tiny_context = 200;
inline constexpr int tiny_heads = 6;  // KV heads of all layers
inline constexpr int tiny_dim = 8;    // of a key and of a value
inline constexpr std::int32_t end_of_text = 256;
inline constexpr std::int32_t end_of_turn = 258;

/// \param ends_at_once  whether an end token is by far the likeliest, whatever the text
/// \param context       positions
inline engine_test::GgufBuilder tiny_model(bool ends_at_once = false,
                                           std::uint32_t context = tiny_context) {
  constexpr std::size_t width = 12;
  std::vector<std::string> tokens;
  for (const auto& character : engine::detail::byte_characters()) tokens.push_back(character);
  std::vector<std::int32_t> types(tokens.size(), 1);
  tokens.insert(tokens.end(), {"<|endoftext|>", "<|im_start|>", "<|im_end|>"});
  types.insert(types.end(), {3, 3, 3});
  std::mt19937 random(11);
  std::vector<float> embedding(width * tokens.size());
  for (std::size_t i = 0; i < embedding.size(); ++i) {
    const auto value = static_cast<float>(random() % 2001) / 1000.0F - 1.0F;
    const auto token = static_cast<std::int32_t>(i / width);
    if (token >= ' ' && token <= '~') embedding[i] = value;
    // Opposite to each other: one of them has a high logit.
    if (ends_at_once && token == end_of_text)
      embedding[i] = 100 * embedding['a' * width + i % width];
    if (ends_at_once && token == end_of_turn)
      embedding[i] = -100 * embedding['a' * width + i % width];
  }
  auto builder = engine_test::tiny_llama();
  builder.u32("llama.context_length", context);
  builder.tensor("token_embd.weight", {width, tokens.size()}, embedding)
      .string("tokenizer.ggml.model", "gpt2")
      .string("tokenizer.ggml.pre", "smollm")
      .strings("tokenizer.ggml.tokens", tokens)
      .i32s("tokenizer.ggml.token_type", types)
      .strings("tokenizer.ggml.merges", {})
      .u32("tokenizer.ggml.eos_token_id", end_of_text)
      .string("tokenizer.chat_template", "{{ '<|im_start|>' + role }}");
  return builder;
}

/// Writes a model, or the first `bytes` of it, and returns its path.
inline std::string write_model(const Folder& folder,
                               const std::string& name,
                               const engine_test::GgufBuilder& model,
                               std::size_t bytes = std::string::npos) {
  const auto all = model.bytes();
  const std::string text(reinterpret_cast<const char*>(all.data()), all.size());
  return folder.with(name, text.substr(0, bytes));
}

}  // namespace program_test
