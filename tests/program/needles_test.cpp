// SPDX-License-Identifier: Apache-2.0
#include "program/needles.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "catch.hpp"
#include "llama_engine/gguf.hpp"
#include "llama_engine/tokenizer.hpp"
#include "program/eval_data.hpp"
#include "tiny_model.hpp"

using Catch::Matchers::ContainsSubstring;
using program::make_needles;

namespace {

struct Texts {
  engine::GgufFile file = program_test::tiny_model().file();
  engine::Tokenizer tokenizer{file};
  std::string text = std::string(3000, 'x') + "the end";
};

}  // namespace

TEST_CASE("needles: a prompt has its length, its fact once, and the question for it", "[program]") {
  const Texts t;
  const auto made = make_needles(t.tokenizer, t.text, "text", 700, 6, 3);
  REQUIRE(made.size() == 6);
  std::set<std::string> ids;
  for (std::size_t i = 0; i < made.size(); ++i) {
    const auto& n = made[i];
    ids.insert(n.prompt.id);
    CHECK(n.prompt.context.size() + n.prompt.question.size() == 700);
    CHECK(n.prompt.tokens == 700);
    CHECK(n.depth == Catch::Approx((static_cast<double>(i) + 0.5) / 6));
    const std::string context = t.tokenizer.decode(n.prompt.context);
    CHECK(context.find(n.prompt.answer) == context.rfind(n.prompt.answer));
    const std::vector<program::Token> fact(
        n.prompt.context.begin() + static_cast<std::ptrdiff_t>(n.begin),
        n.prompt.context.begin() + static_cast<std::ptrdiff_t>(n.end));
    CHECK_THAT(t.tokenizer.decode(fact), ContainsSubstring(" is " + n.prompt.answer + "."));
    CHECK_THAT(t.tokenizer.decode(n.prompt.question), ContainsSubstring("The secret number of"));
    if (i > 0) CHECK(n.begin > made[i - 1].begin);
  }
  CHECK(ids.size() == made.size());
}

TEST_CASE("needles: the same seed makes the same prompts, another seed others", "[program]") {
  const Texts t;
  const auto first = make_needles(t.tokenizer, t.text, "text", 500, 4, 7);
  const auto again = make_needles(t.tokenizer, t.text, "text", 500, 4, 7);
  const auto other = make_needles(t.tokenizer, t.text, "text", 500, 4, 8);
  for (std::size_t i = 0; i < first.size(); ++i) {
    CHECK(first[i].prompt.context == again[i].prompt.context);
    CHECK(first[i].prompt.question == again[i].prompt.question);
    CHECK(first[i].prompt.answer == again[i].prompt.answer);
    CHECK(first[i].prompt.answer != other[i].prompt.answer);
  }
}

TEST_CASE("needles: a text too short, and a prompt without room, are refused with the numbers",
          "[program][edge]") {
  const Texts t;
  CHECK_THROWS_WITH(make_needles(t.tokenizer, t.text, "text", 5000, 1, 1),
                    ContainsSubstring("text has 3007 tokens, but 5000 tokens per prompt need "));
  CHECK_THROWS_WITH(make_needles(t.tokenizer, t.text, "text", 100, 1, 1),
                    ContainsSubstring("at least 1"));
}
