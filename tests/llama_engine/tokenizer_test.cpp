// SPDX-License-Identifier: Apache-2.0
#include "llama_engine/tokenizer.hpp"

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "catch.hpp"
#include "gguf_builder.hpp"

using Catch::Matchers::ContainsSubstring;
using engine::PreTokenizer;
using engine::Token;
using engine::Tokenizer;
using engine_test::GgufBuilder;
using engine_test::vocabulary;

namespace {

using Pieces = std::vector<std::string>;

Pieces split(const std::string& name, std::string_view text) {
  const PreTokenizer splitter(name);
  Pieces pieces;
  for (const std::string_view piece : splitter.split(text)) pieces.emplace_back(piece);
  return pieces;
}

/// The vocabulary entries that a text becomes.
Pieces entries(const Tokenizer& tokenizer, std::string_view text, bool parse_special = false) {
  Pieces result;
  for (const Token token : tokenizer.encode(text, parse_special)) {
    result.push_back(tokenizer.decode(std::vector<Token>{token}));
  }
  return result;
}

}  // namespace

TEST_CASE(
    "pre-tokenizer gpt-2: words take the space before them, contractions and digits stand alone",
    "[tokenizer]") {
  CHECK(
      split("gpt-2", "I'll pay  $120, won't I?\n\n ok ") ==
      Pieces{
          "I", "'ll", " pay", " ", " $", "120", ",", " won", "'t", " I", "?", "\n\n", " ok", " "});
  CHECK(split("gpt-2", "L'\xC3\xA9t\xC3\xA9 \xE6\x97\xA5\xE6\x9C\xAC") ==
        Pieces{"L", "'", "\xC3\xA9t\xC3\xA9", " \xE6\x97\xA5\xE6\x9C\xAC"});
  CHECK(split("gpt-2", "'S'LL") == Pieces{"'", "S", "'", "LL"});
}

TEST_CASE("pre-tokenizer smollm: every digit is a piece, and what is before it ends there",
          "[tokenizer]") {
  CHECK(split("smollm", "a 12  3b") == Pieces{"a", " ", "1", "2", "  ", "3", "b"});
  // Other scripts' digits and fractions are numbers, too.
  CHECK(split("smollm", "\xD9\xA1\xC2\xBD x") == Pieces{"\xD9\xA1", "\xC2\xBD", " x"});
}

TEST_CASE("pre-tokenizer llama-bpe: up to three digits, line ends stay with what is before them",
          "[tokenizer]") {
  CHECK(split("llama-bpe", "1234567 I'LL (see)\r\n\n  go") ==
        Pieces{"123", "456", "7", " I", "'LL", " (", "see", ")\r\n\n", " ", " go"});
}

TEST_CASE("pre-tokenizer: pieces joined are the text, whatever the bytes are",
          "[tokenizer][edge]") {
  std::string text = "ok \xFF\xFE z\xC3";
  text += '\0';
  text += "1\xF0\x9F\x98\x80\xE2\x82 9\xED\xA0\x80";
  for (const char* name : {"smollm", "gpt-2", "llama-bpe"}) {
    std::string joined;
    for (const std::string& piece : split(name, text)) {
      CHECK_FALSE(piece.empty());
      joined += piece;
    }
    CHECK(joined == text);
    CHECK(split(name, "").size() <= 1);
  }
}

TEST_CASE("pre-tokenizer: another name is refused with the known ones", "[tokenizer][edge]") {
  CHECK_THROWS_WITH(PreTokenizer("qwen2"),
                    ContainsSubstring("'qwen2'") && ContainsSubstring("smollm, gpt-2, llama-bpe"));
  CHECK_THROWS_WITH(Tokenizer(vocabulary({}, "qwen2").file()),
                    ContainsSubstring("test.gguf: unknown pre-tokenizer 'qwen2'"));
}

TEST_CASE("tokenizer: the lowest rank merges first, the leftmost of equals", "[tokenizer][ties]") {
  const Tokenizer tokenizer(vocabulary({"b c", "a b", "a a", "aa a"}).file());
  CHECK(entries(tokenizer, "abc") == Pieces{"a", "bc"});
  CHECK(entries(tokenizer, "aaaa") == Pieces{"aa", "aa"});
  CHECK(entries(tokenizer, "aaa") == Pieces{"aaa"});
  CHECK(entries(tokenizer, "aaaaa") == Pieces{"aa", "aaa"});
}

TEST_CASE("tokenizer: merges agree with the plain algorithm on random text",
          "[tokenizer][property]") {
  const std::vector<std::string> merges{
      "b a", "a b", "ba b", "a a", "b b", "aa ba", "ab ab", "bab a"};
  const Tokenizer tokenizer(vocabulary(merges).file());
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    Pieces expected;
    std::string text;
    for (auto i = random() % 20 + 1; i > 0; --i) {
      text += random() % 2 == 0 ? 'a' : 'b';
      expected.push_back(text.substr(text.size() - 1));
    }
    // The first merge in the list that applies anywhere, at its first place, until none applies.
    for (bool merged = true; merged;) {
      merged = false;
      for (std::size_t m = 0; m < merges.size() && !merged; ++m) {
        for (std::size_t i = 0; i + 1 < expected.size() && !merged; ++i) {
          if (expected[i] + " " + expected[i + 1] != merges[m]) continue;
          expected[i] += expected[i + 1];
          expected.erase(expected.begin() + static_cast<std::ptrdiff_t>(i) + 1);
          merged = true;
        }
      }
    }
    CHECK(entries(tokenizer, text) == expected);
  }
}

TEST_CASE("tokenizer: nothing merges across the border of two pieces", "[tokenizer]") {
  const Tokenizer tokenizer(vocabulary({"a 1", "1 1"}).file());
  CHECK(entries(tokenizer, "a11") == Pieces{"a", "11"});
  const Tokenizer digits(vocabulary({"1 1"}, "smollm").file());
  CHECK(entries(digits, "11") == Pieces{"1", "1"});
}

TEST_CASE("tokenizer: llama-bpe takes a piece that is an entry as it is, without merges",
          "[tokenizer]") {
  // "abc" is an entry that no chain of merges from "abc" reaches: "b c" has the lower rank.
  const std::vector<std::string> merges{"b c", "a b", "ab c"};
  CHECK(entries(Tokenizer(vocabulary(merges).file()), "abc") == Pieces{"a", "bc"});
  CHECK(entries(Tokenizer(vocabulary(merges, "llama-bpe").file()), "abc") == Pieces{"abc"});
}

TEST_CASE("tokenizer: special tokens are read only when asked, the longest first", "[tokenizer]") {
  const Tokenizer tokenizer(vocabulary({}).file());
  CHECK(entries(tokenizer, "a<s>b", true) == Pieces{"a", "<s>", "b"});
  CHECK(entries(tokenizer, "<s>xx<s>", true) == Pieces{"<s>x", "x", "<s>"});
  CHECK(entries(tokenizer, "<s>", false) == Pieces{"<", "s", ">"});
  CHECK(entries(tokenizer, "<s", true) == Pieces{"<", "s"});
  CHECK(tokenizer.encode("", true).empty());
}

TEST_CASE("tokenizer: every byte string comes back from its tokens", "[tokenizer][edge]") {
  for (const char* name : {"smollm", "gpt-2", "llama-bpe"}) {
    const Tokenizer tokenizer(vocabulary({"a b", "\xC4\xA0 a"}, name).file());
    std::string all;
    for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
    all += "\xE2\x82\xAC ab \xE2\x82";
    CHECK(tokenizer.decode(tokenizer.encode(all, true)) == all);
  }
}

TEST_CASE("tokenizer: a byte without a token becomes the unknown token, or is an error",
          "[tokenizer][edge]") {
  GgufBuilder builder;
  builder.string("tokenizer.ggml.model", "gpt2")
      .string("tokenizer.ggml.pre", "gpt-2")
      .strings("tokenizer.ggml.tokens", {"<unk>", "a"})
      .i32s("tokenizer.ggml.token_type", {3, 1})
      .strings("tokenizer.ggml.merges", {});
  CHECK_THROWS_WITH(Tokenizer(builder.file()).encode("ab", false),
                    ContainsSubstring("byte 98 has no token"));
  builder.u32("tokenizer.ggml.unknown_token_id", 0);
  CHECK(Tokenizer(builder.file()).encode("ab", false) == std::vector<Token>{1, 0});
}

TEST_CASE("tokenizer: a long piece without spaces does not take quadratic time",
          "[tokenizer][edge]") {
  const Tokenizer tokenizer(vocabulary({"a a", "aa aa"}).file());
  const std::string text(400000, 'a');
  CHECK(tokenizer.encode(text, true).size() == text.size() / 4);
}

TEST_CASE("tokenizer: a vocabulary that contradicts itself is refused", "[tokenizer][edge]") {
  auto builder = vocabulary({"a b"});
  builder.strings("tokenizer.ggml.merges", {"a b", "a zz"});
  CHECK_THROWS_WITH(Tokenizer(builder.file()), ContainsSubstring("merge 1 'a zz'"));
  builder = vocabulary({"a b"});
  builder.i32s("tokenizer.ggml.token_type", {1, 1});
  CHECK_THROWS_WITH(Tokenizer(builder.file()), ContainsSubstring("token_type has 2 entries"));
  builder = vocabulary({});
  builder.u32("tokenizer.ggml.eos_token_id", 258);
  CHECK_THROWS_WITH(Tokenizer(builder.file()), ContainsSubstring("outside the vocabulary of 258"));
  builder = vocabulary({});
  builder.string("tokenizer.ggml.model", "llama");
  CHECK_THROWS_WITH(Tokenizer(builder.file()), ContainsSubstring("'llama' is not supported"));
  builder = vocabulary({});
  builder.without("tokenizer.ggml.tokens");
  CHECK_THROWS_WITH(Tokenizer(builder.file()),
                    ContainsSubstring("missing key tokenizer.ggml.tokens"));
}

TEST_CASE("tokenizer: ids outside the vocabulary are refused", "[tokenizer][edge]") {
  const Tokenizer tokenizer(vocabulary({}).file());
  CHECK_THROWS_WITH(tokenizer.decode(std::vector<Token>{258}), ContainsSubstring("token 258"));
  CHECK_THROWS_WITH(tokenizer.decode(std::vector<Token>{-1}), ContainsSubstring("token -1"));
}
