// SPDX-License-Identifier: Apache-2.0
#include "program/eval_data.hpp"

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "catch.hpp"
#include "support.hpp"

using Catch::Matchers::ContainsSubstring;
using program::cut_samples;
using program::read_needles;
using program::read_samples;
using program::Token;
using program_test::Folder;

namespace {

const std::string needle_a =
    R"({"id":"a","tokens":3,"answer":"42","context":[5,6],"question":[7],"depth":0.5})"
    "\n";
const std::string needle_b =
    R"({"id":"b","tokens":5,"answer":"43","context":[5,6,8],"question":[7,9]})"
    "\n";
const std::string needle_c = R"({"id":"c","tokens":3,"answer":"44","context":[1],"question":[2,3]})"
                             "\n";

std::vector<std::string> ids(const std::vector<program::Needle>& needles) {
  std::vector<std::string> result;
  for (const auto& n : needles) result.push_back(n.id);
  return result;
}

using Ids = std::vector<std::string>;

}  // namespace

TEST_CASE("eval data: prompts are read with their fields, in order; others and empty lines pass",
          "[program]") {
  const Folder folder;
  const auto needles = read_needles(folder.with("n", needle_a + "\n" + needle_b), 0, 0);
  REQUIRE(ids(needles) == Ids{"a", "b"});
  CHECK(needles[0].tokens == 3);
  CHECK(needles[0].answer == "42");
  CHECK(needles[0].context == std::vector<Token>{5, 6});
  CHECK(needles[0].question == std::vector<Token>{7});
}

TEST_CASE("eval data: prompts are chosen by length, then cut to the limit", "[program][edge]") {
  const Folder folder;
  const std::string path = folder.with("n", needle_b + needle_a + needle_c);
  CHECK(ids(read_needles(path, 3, 0)) == Ids{"a", "c"});
  CHECK(ids(read_needles(path, 3, 1)) == Ids{"a"});
  CHECK(ids(read_needles(path, 0, 2)) == Ids{"b", "a"});
  CHECK_THROWS_WITH(read_needles(path, 4, 0),
                    ContainsSubstring(path + " has no prompt of 4 tokens"));
}

TEST_CASE("eval data: a line that is not a prompt is named by file and line", "[program][edge]") {
  const Folder folder;
  const std::string begin = folder.file("n") + " line 3: ";
  const auto refused = [&](const std::string& line, const std::string& why) {
    INFO(line);
    const std::string path = folder.with("n", needle_a + "\n" + line + "\n" + needle_b);
    CHECK_THROWS_WITH(read_needles(path, 0, 0), ContainsSubstring(begin) && ContainsSubstring(why));
  };
  refused("{\"id\": \"x\",", "parse error");
  refused("not json", "parse error");
  refused("[1, 2]", "type");
  refused(R"({"tokens":3,"answer":"42","context":[5,6],"question":[7]})", "'id' not found");
  refused(R"({"id":"x","answer":"42","context":[5,6],"question":[7]})", "'tokens' not found");
  refused(R"({"id":"x","tokens":3,"context":[5,6],"question":[7]})", "'answer' not found");
  refused(R"({"id":"x","tokens":3,"answer":"42","question":[7]})", "'context' not found");
  refused(R"({"id":"x","tokens":3,"answer":"42","context":[5,6]})", "'question' not found");
  refused(R"({"id":"x","tokens":3,"answer":42,"context":[5,6],"question":[7]})", "must be string");
  refused(R"({"id":"x","tokens":3,"answer":"42","context":["5"],"question":[7]})",
          "must be number");
  refused(R"({"id":"x","tokens":3,"answer":"","context":[5,6],"question":[7]})", "is empty");
  refused(R"({"id":"x","tokens":1,"answer":"42","context":[],"question":[7]})", "is empty");
  refused(R"({"id":"x","tokens":2,"answer":"42","context":[5,6],"question":[]})", "is empty");
  refused(R"({"id":"x","tokens":4,"answer":"42","context":[5,6],"question":[7]})",
          "tokens is 4, but context and question have 3");
  // Beyond the limit, too: a file is right or it is not.
  CHECK_THROWS_WITH(read_needles(folder.with("n", needle_a + "{"), 0, 1),
                    ContainsSubstring("line 2"));
}

TEST_CASE("eval data: a file that is missing, empty or a folder is named", "[program][edge]") {
  const Folder folder;
  CHECK_THROWS_WITH(read_needles(folder.file("x"), 0, 0),
                    ContainsSubstring("cannot read " + folder.file("x")));
  CHECK_THROWS_WITH(read_samples(folder.file("x"), 0),
                    ContainsSubstring("cannot read " + folder.file("x")));
  const std::string empty = folder.with("empty", "");
  CHECK_THROWS_WITH(read_needles(empty, 0, 0), ContainsSubstring(empty + " has no prompt"));
  CHECK_THROWS_WITH(read_samples(empty, 0), ContainsSubstring(empty + " has no sample"));
  CHECK_THROWS_WITH(read_needles(folder.file(""), 0, 0), ContainsSubstring("cannot read"));
}

TEST_CASE("eval data: samples are read with their fields, up to the limit", "[program]") {
  const Folder folder;
  const std::string path = folder.with("s",
                                       "{\"prefill\":2,\"ids\":[1,2,3,4],\"book\":\"x\"}\n"
                                       "{\"prefill\":1,\"ids\":[5,6,7]}\n");
  const auto samples = read_samples(path, 0);
  REQUIRE(samples.size() == 2);
  CHECK(samples[0].prefill == 2);
  CHECK(samples[0].ids == std::vector<Token>{1, 2, 3, 4});
  CHECK(samples[1].prefill == 1);
  CHECK(read_samples(path, 1).size() == 1);
}

TEST_CASE("eval data: a sample must leave something to read and something to predict",
          "[program][edge]") {
  const Folder folder;
  for (const char* prefill : {"0", "-1", "-2", "3", "4", "9223372036854775807"}) {
    INFO(prefill);
    const std::string line = std::string("{\"prefill\":") + prefill + ",\"ids\":[1,2,3,4]}";
    CHECK_THROWS_WITH(
        read_samples(folder.with("s", line), 0),
        ContainsSubstring("line 1: prefill " + std::string(prefill) + " of 4 ids leaves nothing"));
  }
  CHECK_THROWS_WITH(read_samples(folder.with("s", "{\"ids\":[1,2,3]}"), 0),
                    ContainsSubstring("line 1: ") && ContainsSubstring("'prefill' not found"));
  CHECK_THROWS_WITH(read_samples(folder.with("s", "{\"prefill\":1}"), 0),
                    ContainsSubstring("line 1: ") && ContainsSubstring("'ids' not found"));
  CHECK_THROWS_WITH(read_samples(folder.with("s", "{\"prefill\":1,\"ids\":[]}"), 0),
                    ContainsSubstring("prefill 1 of 0 ids"));
}

TEST_CASE("eval data: a number that is not whole, or out of range, is refused", "[program][edge]") {
  const Folder folder;
  // nlohmann-json would cut the first, wrap the next two, and convert the last two with undefined behaviour.
  for (const char* number : {"1.5",
                             "4294967297",
                             "-2147483649",
                             "18446744073709551615",
                             "2666666666666666666666666666",
                             "1e300"}) {
    INFO(number);
    const std::string n(number);
    const auto refused = [](const auto& read) {
      CHECK_THROWS_WITH(
          read(),
          ContainsSubstring("line 1: ") &&
              ContainsSubstring(" is no whole number from -2147483648 to 2147483647"));
    };
    const auto needle = [&](const std::string& tokens, const std::string& context) {
      return folder.with("n",
                         "{\"id\":\"a\",\"tokens\":" + tokens + ",\"answer\":\"b\",\"context\":[" +
                             context + "],\"question\":[7]}");
    };
    const std::string sample = "{\"prefill\":1,\"ids\":[1," + n + ",3]}";
    refused([&] { return read_samples(folder.with("s", sample), 0); });
    refused([&] { return read_needles(needle(n, "1"), 0, 0); });
    refused([&] { return read_needles(needle("2", n), 0, 0); });
  }
  CHECK_THROWS_WITH(read_samples(folder.with("s", R"({"prefill":1.5,"ids":[1,2,3]})"), 0),
                    ContainsSubstring("1.5 is no whole number"));
  CHECK_THROWS_WITH(read_samples(folder.with("s", R"({"prefill":true,"ids":[1,2,3]})"), 0),
                    ContainsSubstring("line 1: "));
}

TEST_CASE("eval data: samples are evenly spaced, first at the text's beginning, last at its end",
          "[program]") {
  std::vector<Token> text(103);
  std::iota(text.begin(), text.end(), 0);
  const auto samples = cut_samples(text, 8, 5, 4);
  REQUIRE(samples.size() == 4);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(samples[i].prefill == 8);
    REQUIRE(samples[i].ids.size() == 13);
    CHECK(samples[i].ids.front() == static_cast<Token>(30 * i));  // (103 - 13) / 3
    CHECK(samples[i].ids.back() == static_cast<Token>(30 * i + 12));
  }
}

TEST_CASE("eval data: one sample is the text's begin; a text of one sample's length is that sample",
          "[program][edge]") {
  const std::vector<Token> text{1, 2, 3, 4};
  CHECK(cut_samples(text, 1, 2, 1).at(0).ids == std::vector<Token>{1, 2, 3});
  const auto all = cut_samples(text, 2, 2, 3);
  REQUIRE(all.size() == 3);
  for (const auto& s : all) CHECK(s.ids == text);
}

TEST_CASE("eval data: a text too short, and sizes of nothing, are refused with the numbers",
          "[program][edge]") {
  const std::vector<Token> text{1, 2, 3, 4};
  CHECK_THROWS_WITH(cut_samples(text, 3, 2, 1),
                    ContainsSubstring("has 4 tokens") && ContainsSubstring("ask for 5"));
  CHECK_THROWS_WITH(cut_samples({}, 1, 2, 1), ContainsSubstring("has 0 tokens"));
  CHECK_THROWS_WITH(cut_samples(text, 0, 2, 1), ContainsSubstring("--prefill"));
  CHECK_THROWS_WITH(cut_samples(text, 1, 1, 1), ContainsSubstring("--next"));
  CHECK_THROWS_WITH(cut_samples(text, 1, 2, 0), ContainsSubstring("--samples"));
}
