// SPDX-License-Identifier: Apache-2.0
// A model file: it is read, and its vocabulary, or refused with words. What it announces is not allocated before it is there.
#include "fuzz/fuzz.hpp"
#include "llama_engine/gguf.hpp"
#include "llama_engine/tokenizer.hpp"

#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <vector>

KVTRIM_FUZZ_TARGET(gguf) {
  std::vector<std::byte> bytes(input.size());
  if (!input.empty()) { std::memcpy(bytes.data(), input.data(), input.size()); }
  try {
    const engine::GgufFile file("fuzz.gguf", std::move(bytes));
    const engine::Tokenizer tokenizer(file);
    const auto tokens = tokenizer.encode("a 12 b", true);
    static_cast<void>(tokenizer.decode(tokens));
  } catch (const std::runtime_error& error) {
    kvtrim::fuzz::require(error.what()[0] != '\0', "no reason");
  }
}
