// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/detail/joined_name.hpp>

#include "catch.hpp"

#include <string_view>

using namespace kvtrim::detail;

namespace {

struct Plain {
  static constexpr std::string_view name = "plain";
  static constexpr std::string_view title = "kvtrim::Plain";
};
// A user's name may be a plain literal.
struct Literally {
  static constexpr const char* name = "mine";
  static constexpr const char* title = "Mine";
};
struct Around {
  static constexpr std::string_view name = name_around<"around", Literally>;
};

}  // namespace

TEST_CASE("joined_name: any number of pieces", "[policy]") {
  STATIC_REQUIRE(JoinedName<name_text<Plain>>::value == "plain");
  STATIC_REQUIRE(JoinedName<piece<"a">, piece<"">, name_text<Plain>, piece<"bc">>::value ==
                 "aplainbc");
}

TEST_CASE("joined_name: what is put around something says around what", "[policy]") {
  STATIC_REQUIRE(name_around<"adakv", Plain> == "adakv<plain>");
  STATIC_REQUIRE(name_around<"adakv", Around> == "adakv<around<mine>>");
  STATIC_REQUIRE(name_unless_default<"page", Plain, Plain> == "page");
  STATIC_REQUIRE(name_unless_default<"page", Around, Plain> == "page<around<mine>>");
  STATIC_REQUIRE(title_around<"kvtrim::PerLayer", Plain> == "kvtrim::PerLayer of kvtrim::Plain");
  STATIC_REQUIRE(title_around<"kvtrim::PerLayer", Literally> == "kvtrim::PerLayer of Mine");
}
