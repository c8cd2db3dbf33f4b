// SPDX-License-Identifier: Apache-2.0
// Any bytes as a prompt: they come back as they were, whatever is in front of the words.
#include "fuzz/fuzz.hpp"
#include "llama_engine/gguf_builder.hpp"

#include <string>
#include <string_view>
#include <vector>

KVTRIM_FUZZ_TARGET(tokenizer) {
  static const std::vector<engine::Tokenizer> tokenizers = [] {
    std::vector<engine::Tokenizer> all;
    for (const char* pre : {"gpt-2", "smollm", "llama-bpe"}) {
      all.emplace_back(engine_test::vocabulary({"a b", "ab c", "1 2", "\xC4\xA0 a"}, pre).file());
    }
    return all;
  }();
  kvtrim::fuzz::Reader in(input);
  const auto& tokenizer = tokenizers[static_cast<std::size_t>(in.below(3))];
  const bool parse_special = in.coin();
  const std::string text(in.rest().begin(), in.rest().end());
  const auto tokens = tokenizer.encode(text, parse_special);
  kvtrim::fuzz::require(tokens.size() <= text.size(), "more tokens than bytes");
  kvtrim::fuzz::require(tokenizer.decode(tokens) == text, "a text comes back as another");
}
