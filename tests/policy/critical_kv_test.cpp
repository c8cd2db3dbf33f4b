// SPDX-License-Identifier: Apache-2.0
// kvpress's masks: tests/golden/adaptive_test.cpp. The norms: tests/score/output_norm_test.cpp.
#include <kvtrim/evict/evict.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/score/output_norm.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/instances.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr SequenceId seq{0};
constexpr LayerId layer{0};
constexpr std::int32_t heads = 2;
constexpr std::int32_t group = 3;
constexpr std::int32_t dim = 4;
constexpr std::int32_t hidden = 5;
constexpr std::int32_t tokens = 60;
constexpr std::int32_t window = 3;

using Rows = std::vector<std::int32_t>;

// Random scores, values and W_O, and what the definition makes of them in double.
class World {
 public:
  explicit World(std::uint32_t seed, TableScope scope = TableScope::head)
      : cache_({.pages = 200,
                .page_size = 4,
                .kv_heads = heads,
                .key_dim = dim,
                .scope = scope,
                .max_rows = 100}) {
    std::mt19937 rng(seed);
    const auto draw = [&](float from, float to) {
      return from + (to - from) * static_cast<float>(rng() % 4096) / 4096;
    };
    values_.resize(std::size_t{tokens} * heads * dim);
    for (float& x : values_) { x = draw(-2, 2); }
    w_o_.resize(std::size_t{heads} * group * dim * hidden);
    for (float& x : w_o_) { x = draw(-1, 1); }
    scores_.resize(std::size_t{heads} * tokens);
    for (float& x : scores_) { x = draw(0, 0.01F); }
    REQUIRE(cache_.try_create());
    REQUIRE(cache_.try_extend(seq, tokens) == Status::ok);
    REQUIRE(cache_.write(seq, layer, {.data = values_.data()}, {.data = values_.data()}) ==
            kvtrim::Status::ok);
  }

  float& score(std::int32_t h, std::int32_t row) {
    return scores_[static_cast<std::size_t>(h * tokens + row)];
  }
  double factor(std::int32_t h, std::int32_t row) const {
    double sum = 0;
    for (std::int32_t g = 0; g < group; ++g) {
      for (std::int32_t o = 0; o < hidden; ++o) {
        double x = 0;
        for (std::int32_t d = 0; d < dim; ++d) {
          const double value = values_[static_cast<std::size_t>((row * heads + h) * dim + d)];
          x +=
              value * static_cast<double>(
                          w_o_[static_cast<std::size_t>(((h * group + g) * dim + d) * hidden + o)]);
        }
        sum += std::fabs(x);
      }
    }
    return sum / group;
  }

  Observation observation() {
    Observation obs;
    obs.scores = SequencePlane::dense(scores_.data(), 1, heads, tokens);
    obs.output = {
        .data = w_o_.data(), .query_heads = heads * group, .value_dim = dim, .hidden = hidden};
    return obs;
  }
  template <class P>
  Report evict(const P& p, const Observation& obs, const PlanOptions& options = {}) {
    std::vector<std::byte> workspace(plan_workspace_bytes(p, plan_shape(cache_.view(), obs)));
    return kvtrim::evict(p, cache_, cache_.view(), obs, workspace, options);
  }
  Rows positions(std::int32_t h) {
    Rows out;
    for (std::int32_t r = 0; r < cache_.live_rows(seq, layer, HeadId{h}); ++r) {
      out.push_back(raw(cache_.view().position(seq, layer, HeadId{h}, r)));
    }
    return out;
  }

  // The rows that head `h` keeps when `keep` stay, `first` of them by the plain scores.
  Rows expected(std::int32_t h, std::int32_t keep, std::int32_t first) {
    std::vector<std::pair<double, std::int32_t>> rows;
    for (std::int32_t r = 0; r < tokens - window; ++r) {
      rows.emplace_back(-static_cast<double>(score(h, r)), r);
    }
    std::sort(rows.begin(), rows.end());
    const auto plain = static_cast<std::size_t>(std::max(0, first - window));
    Rows kept;
    for (std::size_t i = 0; i < plain; ++i) { kept.push_back(rows[i].second); }
    rows.erase(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(plain));
    for (auto& [key, row] : rows) { key = (key - 1e-4) * factor(h, row); }
    std::sort(rows.begin(), rows.end());
    for (std::size_t i = 0; static_cast<std::int32_t>(kept.size()) < keep - window; ++i) {
      kept.push_back(rows[i].second);
    }
    for (std::int32_t r = tokens - window; r < tokens; ++r) { kept.push_back(r); }
    std::sort(kept.begin(), kept.end());
    return kept;
  }

 private:
  PagedCache cache_;
  std::vector<float> values_;
  std::vector<float> w_o_;
  std::vector<float> scores_;
};

SnapKVSelector<>::Params snapkv(std::int64_t budget) {
  return {.window = window, .budget = budget};
}

}  // namespace

TEST_CASE("criticalkv: half of the rows by their scores, the others by score times norm",
          "[criticalkv]") {
  std::int32_t differing = 0;
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    for (const std::int32_t budget : {4, 9, 20, 41, 60}) {
      for (const double share : {0.0, 0.5, 1.0}) {
        World w(seed);
        const CriticalKV<SnapKVSelector<>> policy({.inner = snapkv(budget), .first_stage = share});
        CHECK(w.evict(policy, w.observation()).status == Status::ok);
        for (std::int32_t h = 0; h < heads; ++h) {
          INFO("seed " << seed << ", budget " << budget << ", share " << share << ", head " << h);
          const auto first = static_cast<std::int32_t>(budget * share);
          CHECK(w.positions(h) == w.expected(h, budget, first));
          differing += w.expected(h, budget, first) != w.expected(h, budget, budget) ? 1 : 0;
        }
      }
    }
  }
  CHECK(differing > 100);  // the norms do decide
}

TEST_CASE("criticalkv: around AdaKV, plain scores share the budget and each head has two stages",
          "[criticalkv]") {
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    World shared(seed);
    World w(seed);
    for (World* const x : {&shared, &w}) {
      for (std::int32_t r = 0; r < tokens; ++r) { x->score(1, r) *= 2; }
    }
    const AdaKV<SnapKVSelector<>>::Params ada{.inner = snapkv(20)};
    CHECK(shared.evict(AdaKV<SnapKVSelector<>>(ada), shared.observation()).status == Status::ok);
    CHECK(w.evict(CriticalKV<AdaKV<SnapKVSelector<>>>({.inner = ada}), w.observation()).status ==
          Status::ok);
    for (std::int32_t h = 0; h < heads; ++h) {
      const auto budget = static_cast<std::int32_t>(shared.positions(h).size());
      CHECK(w.positions(h) == w.expected(h, budget, budget / 2));
    }
    CHECK(w.positions(1).size() > w.positions(0).size());
  }
}

TEST_CASE("criticalkv: protected rows stay, also beyond the first stage", "[criticalkv][edge]") {
  World w(3);
  for (std::int32_t h = 0; h < heads; ++h) {
    for (std::int32_t r = 0; r < tokens; ++r) { w.score(h, r) = r < tokens - window ? 1.0F : 0.0F; }
  }
  const CriticalKV<SnapKVSelector<>> policy({.inner = snapkv(4)});  // first stage 2, window 3
  CHECK(w.evict(policy, w.observation()).status == Status::ok);
  const Rows kept = w.positions(0);
  REQUIRE(kept.size() == 4);
  CHECK(Rows(kept.begin() + 1, kept.end()) == Rows{57, 58, 59});
}

TEST_CASE("criticalkv: one row too many is chosen by both stages too", "[criticalkv][edge]") {
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    World w(seed);
    const CriticalKV<SnapKVSelector<>> policy({.inner = snapkv(tokens - 1)});
    CHECK(w.evict(policy, w.observation(), {.removal = Removal::overwrite_slot}).status ==
          Status::ok);
    for (std::int32_t h = 0; h < heads; ++h) {
      CHECK(w.positions(h) == w.expected(h, tokens - 1, (tokens - 1) / 2));
    }
  }
}

TEST_CASE("criticalkv: without W_O, or with another model's, nothing is planned",
          "[criticalkv][edge]") {
  World w(1);
  const CriticalKV<SnapKVSelector<>> policy({.inner = snapkv(20)});
  for (int wrong = 0; wrong < 3; ++wrong) {
    Observation obs = w.observation();
    if (wrong == 0) { obs.output = {}; }
    if (wrong == 1) { obs.output.value_dim = dim + 1; }
    if (wrong == 2) { obs.output.query_heads = 3; }
    CHECK(w.evict(policy, obs).status == Status::bad_observation);
    CHECK(w.positions(0).size() == tokens);
  }
}

TEST_CASE("criticalkv: a NaN score stays the lowest, whatever the norm", "[criticalkv][nan]") {
  World w(2);
  for (std::int32_t r = 0; r < 30; ++r) { w.score(0, r) = std::numeric_limits<float>::quiet_NaN(); }
  const Report report =
      w.evict(CriticalKV<SnapKVSelector<>>({.inner = snapkv(30)}), w.observation());
  CHECK(report.nan_count == 30);
  CHECK(w.positions(0).front() == 30);
}

TEST_CASE("criticalkv: the constructor refuses what cannot work, with the numbers",
          "[criticalkv][edge]") {
  using C = CriticalKV<SnapKVSelector<>>;
  CHECK_THROWS_WITH(C({.first_stage = 1.5}), ContainsSubstring("first_stage 1.5"));
  CHECK_THROWS_WITH(C({.first_stage = -1}), ContainsSubstring("first_stage -1"));
  CHECK_THROWS_WITH(C({.epsilon = -1}), ContainsSubstring("epsilon -1"));
  CHECK_THROWS_WITH(C({.inner = {.window = 8, .budget = 7}}), ContainsSubstring("budget 7"));
  constexpr C defaults;
  CHECK(defaults.params().first_stage == 0.5);
  CHECK(defaults.params().epsilon == 1e-4F);
}
