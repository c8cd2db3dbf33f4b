// SPDX-License-Identifier: Apache-2.0
#include "score_fixture.hpp"

#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/scorer.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"

#include <cstddef>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

using namespace score_test;

namespace {

// A scorer of a user's own, found by `ScorerOf` without a specialisation.
struct ByRow {
  std::size_t scratch_bytes(const PlanShape&) const noexcept { return 0; }
  Status check(const CacheView&, const Observation&) const noexcept { return Status::ok; }
  void score(const HeadRef&,
             const Observation&,
             std::span<std::byte>,
             std::span<float> out) const noexcept {
    for (std::size_t i = 0; i < out.size(); ++i) { out[i] = static_cast<float>(i); }
  }
};
struct Throwing : ByRow {
  void score(const HeadRef&, const Observation&, std::span<std::byte>, std::span<float>) const {}
};
struct NotConst : ByRow {
  void score(const HeadRef&, const Observation&, std::span<std::byte>, std::span<float>) noexcept {}
};
struct BoolCheck : ByRow {
  bool check(const CacheView&, const Observation&) const noexcept { return true; }
};
struct WithMemory : ByRow {
  std::string name;  // not trivially copyable
};
struct Doubles : ByRow {
  void score(const HeadRef&,
             const Observation&,
             std::span<std::byte>,
             std::span<double>) const noexcept {}
};

static_assert(Scorer<ByRow>);
static_assert(!Scorer<Throwing>);
static_assert(!Scorer<NotConst>);
static_assert(!Scorer<BoolCheck>);
static_assert(!Scorer<WithMemory>);
static_assert(!Scorer<Doubles>);
static_assert(!Scorer<int>);

}  // namespace

// Parameters of a user's own: with a declared scorer, with a specialised one, and scorers themselves.
namespace own {
struct Declared {};
struct Specialised {};
struct Derived : Declared, ByRow {};
kvtrim::NoScorer scorer_of(kvtrim::ScoreTag<Declared>);
}  // namespace own
template <>
struct kvtrim::ScorerOf<own::Specialised> {
  using type = kvtrim::NoScorer;
};

TEST_CASE("scorer: parameters find their scorer, a scorer is its own", "[scorer]") {
  STATIC_REQUIRE(std::is_same_v<ScorerOf<WindowParams>::type, WindowScorer>);
  STATIC_REQUIRE(std::is_same_v<ScorerOf<AccumulateParams>::type, AccumulatedScorer>);
  STATIC_REQUIRE(std::is_same_v<ScorerOf<NoScores>::type, NoScorer>);
  STATIC_REQUIRE(std::is_same_v<ScorerOf<ByRow>::type, ByRow>);
  STATIC_REQUIRE(std::is_same_v<ScorerOf<own::Declared>::type, NoScorer>);
  STATIC_REQUIRE(std::is_same_v<ScorerOf<own::Specialised>::type, NoScorer>);
  STATIC_REQUIRE(std::is_same_v<ScorerOf<own::Derived>::type, own::Derived>);
  STATIC_REQUIRE(std::is_same_v<ScorerOf<ExternalScorer>::type, ExternalScorer>);
}

TEST_CASE("scorer: NoScorer writes 0 for every row and needs nothing", "[scorer]") {
  const NoScorer scorer{NoScores{}};
  std::vector<float> out(7, nan_f);
  scorer.score({{}, {}, {}, {}}, {}, {}, out);
  CHECK(out == std::vector<float>(7, 0.0F));
  scorer.score({{}, {}, {}, {}}, {}, {}, {});
  CHECK(scorer.scratch_bytes({}) == 0);
  CHECK(scorer.check({}, {}) == Status::ok);
}
