// SPDX-License-Identifier: Apache-2.0
// kvpress's masks: tests/golden/adaptive_test.cpp. The sharing itself: tests/budget/adaptive_test.cpp.
#include <kvtrim/evict/evict.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/fill.hpp"
#include "support/instances.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;

namespace {

using SharedSnapKV = AdaKV<SnapKVSelector<>>;
using Rows = std::vector<std::int32_t>;

SharedSnapKV policy(std::int64_t budget, double safeguard = 0, std::int64_t window = 2) {
  return SharedSnapKV({.inner = {.window = window, .budget = budget}, .safeguard = safeguard});
}

struct Extents {
  TableScope scope = TableScope::head;
  std::int32_t layers = 2;
  std::int32_t sequences = 2;
};

// A cache whose rows have random scores by (sequence, layer, head, position); keys and values are the position.
class World {
 public:
  static constexpr std::int32_t heads = 3;
  static constexpr std::int32_t most = 200;

  explicit World(const Extents& e = {})
      : extents_(e),
        cache_({.pages = 600,
                .page_size = 4,
                .layers = e.layers,
                .kv_heads = heads,
                .key_dim = 2,
                .scope = e.scope,
                .max_sequences = e.sequences,
                .max_rows = most}) {
    std::mt19937 rng(11);
    for (std::int32_t s = 0; s < e.sequences; ++s) { REQUIRE(cache_.try_create()); }
    by_position_.resize(lists() * most);
    // Heads differ in scale, so that they do compete.
    for (std::size_t i = 0; i < by_position_.size(); ++i) {
      by_position_[i] = static_cast<float>(rng() % 1000) * static_cast<float>(1 + i / most % 3);
    }
    by_row_.resize(by_position_.size());
  }

  PagedCache& cache() { return cache_; }
  Rows rows(std::int32_t s, std::int32_t l) {
    Rows out;
    for (std::int32_t h = 0; h < heads; ++h) {
      out.push_back(cache_.live_rows(SequenceId{s}, LayerId{l}, HeadId{h}));
    }
    return out;
  }
  std::vector<float>& scores() { return by_position_; }
  float& score(std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t position) {
    return by_position_[list(s, l, h) * most + static_cast<std::size_t>(position)];
  }

  Status extend(std::int32_t s, std::int32_t tokens) {
    const std::int32_t first = raw(cache_.next_position(SequenceId{s}));
    const Status status = cache_.try_extend(SequenceId{s}, tokens);
    if (status != Status::ok) { return status; }
    std::vector<float> values(static_cast<std::size_t>(tokens * heads * 2));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(first) + static_cast<float>(i / (heads * 2));
    }
    for (std::int32_t l = 0; l < extents_.layers; ++l) {
      REQUIRE(cache_.write(
                  SequenceId{s}, LayerId{l}, {.data = values.data()}, {.data = values.data()}) ==
              kvtrim::Status::ok);
    }
    return status;
  }

  template <class P>
  Report evict(const P& p, Observation obs = {}, const PlanOptions& options = {}) {
    const CacheView view = cache_.view();
    for_each_head([&](std::int32_t s, std::int32_t l, std::int32_t h) {
      for (std::int32_t r = 0; r < cache_.live_rows(SequenceId{s}, LayerId{l}, HeadId{h}); ++r) {
        const Position at = view.position(SequenceId{s}, LayerId{l}, HeadId{h}, r);
        by_row_[list(s, l, h) * most + static_cast<std::size_t>(r)] = score(s, l, h, raw(at));
      }
    });
    obs.scores = SequencePlane::dense(by_row_.data(), extents_.layers, heads, most);
    std::vector<std::byte> workspace(plan_workspace_bytes(p, plan_shape(view, obs)));
    return kvtrim::evict(p, cache_, view, obs, workspace, options);
  }

  // Positions of the live rows, ascending; REQUIREs that key and value moved with them.
  Rows positions(std::int32_t s, std::int32_t l, std::int32_t h) {
    const CacheView view = cache_.view();
    Rows out;
    for (std::int32_t r = 0; r < cache_.live_rows(SequenceId{s}, LayerId{l}, HeadId{h}); ++r) {
      const std::int32_t p = raw(view.position(SequenceId{s}, LayerId{l}, HeadId{h}, r));
      float key = 0;
      std::memcpy(&key, view.key(SequenceId{s}, LayerId{l}, HeadId{h}, r), sizeof key);
      REQUIRE(key == static_cast<float>(p));
      out.push_back(p);
    }
    std::sort(out.begin(), out.end());
    return out;
  }
  std::int32_t pages_needed() {
    std::int32_t pages = 0;
    for_each_head([&](std::int32_t s, std::int32_t l, std::int32_t h) {
      pages += pages_for(cache_.live_rows(SequenceId{s}, LayerId{l}, HeadId{h}), 4);
    });
    return pages;
  }
  template <class F>
  void for_each_head(F&& f) const {
    for (std::int32_t s = 0; s < extents_.sequences; ++s) {
      for (std::int32_t l = 0; l < extents_.layers; ++l) {
        for (std::int32_t h = 0; h < heads; ++h) { f(s, l, h); }
      }
    }
  }

 private:
  std::size_t list(std::int32_t s, std::int32_t l, std::int32_t h) const {
    return static_cast<std::size_t>((s * extents_.layers + l) * heads + h);
  }
  std::size_t lists() const {
    return static_cast<std::size_t>(extents_.sequences * extents_.layers * heads);
  }

  Extents extents_;
  PagedCache cache_;
  std::vector<float> by_position_;
  std::vector<float> by_row_;
};

std::int32_t sum(const Rows& x) {
  std::int32_t n = 0;
  for (const std::int32_t v : x) { n += v; }
  return n;
}

// The rows that a layer's heads keep without a safeguard: the window, and the best of all heads' other rows.
std::vector<Rows> reference(
    World& w, std::int32_t s, std::int32_t l, std::int32_t tokens, std::int32_t budget) {
  struct Row {
    float score;
    std::int32_t position;
    std::int32_t head;
  };
  std::vector<Row> rows;
  for (std::int32_t h = 0; h < World::heads; ++h) {
    for (std::int32_t p = 0; p < tokens - 2; ++p) { rows.push_back({w.score(s, l, h, p), p, h}); }
  }
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    if (a.score != b.score) { return a.score > b.score; }
    return a.position != b.position ? a.position < b.position : a.head < b.head;
  });
  std::vector<Rows> kept(World::heads);
  for (std::int32_t i = 0; i < World::heads * (budget - 2); ++i) {
    const Row& row = rows[static_cast<std::size_t>(i)];
    kept[static_cast<std::size_t>(row.head)].push_back(row.position);
  }
  for (Rows& head : kept) {
    head.push_back(tokens - 2);
    head.push_back(tokens - 1);
    std::sort(head.begin(), head.end());
  }
  return kept;
}

}  // namespace

TEST_CASE("adakv: the constructor refuses what cannot work, with the numbers", "[adakv][edge]") {
  CHECK_THROWS_WITH(policy(10, 1.5), ContainsSubstring("safeguard 1.5"));
  CHECK_THROWS_WITH(policy(10, -0.25), ContainsSubstring("safeguard -0.25"));
  CHECK_THROWS_WITH(policy(1), ContainsSubstring("kvtrim::SnapKVSelector: budget 1"));
  constexpr AdaKV<SnapKVSelector<>> defaults;
  CHECK(defaults.params().safeguard == 0.2);
  DemandInput in;
  in.live = 5000;
  CHECK(defaults.demand(in).keep == 1024);
}

TEST_CASE("adakv: heads keep the best rows of them all, and the pages of the others are free",
          "[adakv]") {
  World w;
  REQUIRE(w.extend(0, 100) == Status::ok);
  REQUIRE(w.extend(1, 60) == Status::ok);
  const Report report = w.evict(policy(20));
  CHECK(report.status == Status::ok);
  for (std::int32_t l = 0; l < 2; ++l) {
    for (std::int32_t s = 0; s < 2; ++s) {
      const auto expected = reference(w, s, l, s == 0 ? 100 : 60, 20);
      for (std::int32_t h = 0; h < World::heads; ++h) {
        INFO("sequence " << s << ", layer " << l << ", head " << h);
        CHECK(w.positions(s, l, h) == expected[static_cast<std::size_t>(h)]);
      }
      CHECK(sum(w.rows(s, l)) == 3 * 20);
      CHECK(w.rows(s, l)[0] < w.rows(s, l)[2]);  // the heads did compete
    }
  }
  CHECK(w.cache().pool().in_use() == w.pages_needed());
  CHECK(report.kept_rows == 2 * 2 * 3 * 20);
  CHECK(report.allocated_rows == 4 * w.pages_needed());  // fragmentation: kept / allocated
}

TEST_CASE("adakv: a second eviction takes nothing; while generating, the total stays the budget",
          "[adakv]") {
  World w;
  REQUIRE(w.extend(0, 100) == Status::ok);
  REQUIRE(w.extend(1, 10) == Status::ok);  // below the budget: untouched
  CHECK(w.evict(policy(20)).status == Status::ok);
  const Rows before = w.rows(0, 0);
  const Report again = w.evict(policy(20));
  CHECK(again.status == Status::ok);
  CHECK(again.evicted_rows == 0);
  CHECK(w.rows(0, 0) == before);
  CHECK(w.rows(1, 1) == Rows{10, 10, 10});
  for (std::int32_t step = 0; step < 60; ++step) {
    REQUIRE(w.extend(0, 1) == Status::ok);
    CHECK(w.evict(policy(20)).status == Status::ok);
    for (std::int32_t l = 0; l < 2; ++l) {
      CHECK(sum(w.rows(0, l)) == 3 * 20);
      for (std::int32_t h = 0; h < World::heads; ++h) {
        const Rows kept = w.positions(0, l, h);
        REQUIRE(kept.size() >= 2);
        CHECK(kept.back() == 100 + step);
        CHECK(kept[kept.size() - 2] == 99 + step);
      }
    }
    CHECK(w.cache().pool().in_use() == w.pages_needed());
  }
}

TEST_CASE("adakv: over all heads of a sequence, layers compete too", "[adakv]") {
  World w({.layers = 3, .sequences = 1});
  REQUIRE(w.extend(0, 80) == Status::ok);
  for (std::int32_t h = 0; h < World::heads; ++h) {
    for (std::int32_t p = 0; p < 80; ++p) { w.score(0, 1, h, p) += 1e6F; }
  }
  CHECK(w.evict(SharedSnapKV({.inner = {.window = 2, .budget = 20},
                              .safeguard = 0,
                              .over = AdaptiveOver::all_heads}))
            .status == Status::ok);
  CHECK(w.rows(0, 0) == Rows{2, 2, 2});
  CHECK(sum(w.rows(0, 1)) == 9 * 20 - 6 * 2);
  CHECK(w.rows(0, 2) == Rows{2, 2, 2});
}

TEST_CASE(
    "adakv: tables that serve several heads cannot hold unequal counts: refused, nothing changed",
    "[adakv][edge]") {
  for (const TableScope scope : {TableScope::group, TableScope::layer}) {
    World w({.scope = scope, .sequences = 1});
    REQUIRE(w.extend(0, 100) == Status::ok);
    CHECK(w.evict(policy(20)).status == Status::unequal_budget);
    CHECK(w.rows(0, 1) == Rows{100, 100, 100});
    // A safeguard of 1 leaves nothing to share.
    CHECK(w.evict(policy(20, 1)).status == Status::ok);
    CHECK(w.rows(0, 1) == Rows{20, 20, 20});
  }
}

TEST_CASE(
    "adakv: budgets given at run time are the heads' averages, below the window it is what stays",
    "[adakv][edge]") {
  World w;
  REQUIRE(w.extend(0, 100) == Status::ok);
  REQUIRE(w.extend(1, 100) == Status::ok);
  const std::array<std::int32_t, 2> budgets{30, 1};
  Observation obs;
  obs.budgets = budgets.data();
  obs.budget_rows = {1, 0, 0};
  CHECK(w.evict(policy(20), obs).status == Status::over_budget);
  CHECK(sum(w.rows(0, 0)) == 3 * 30);
  CHECK(w.rows(1, 0) == Rows{2, 2, 2});
}

TEST_CASE("adakv: the order of the rows in memory does not change what is kept",
          "[adakv][property]") {
  World packed;
  World filled;
  for (World* const w : {&packed, &filled}) {
    REQUIRE(w->extend(0, 90) == Status::ok);
    REQUIRE(w->extend(1, 90) == Status::ok);
  }
  CHECK(packed.evict(policy(60)).status == Status::ok);
  CHECK(filled.evict(policy(60), {}, {.removal = Removal::fill_holes}).status == Status::ok);
  CHECK(packed.evict(policy(25)).status == Status::ok);
  CHECK(filled.evict(policy(25)).status == Status::ok);
  packed.for_each_head([&](std::int32_t s, std::int32_t l, std::int32_t h) {
    CHECK(packed.positions(s, l, h) == filled.positions(s, l, h));
  });
}

TEST_CASE("adakv: equal scores keep the lower positions, NaN go first", "[adakv][ties][nan]") {
  World w({.layers = 1, .sequences = 1});
  REQUIRE(w.extend(0, 40) == Status::ok);
  std::fill(w.scores().begin(), w.scores().end(), 1.0F);
  for (std::int32_t p = 0; p < 40; ++p) {
    w.score(0, 0, 1, p) = std::numeric_limits<float>::quiet_NaN();
  }
  const Report report = w.evict(policy(8));
  CHECK(report.nan_count == 38);
  CHECK(w.positions(0, 0, 0) == Rows{0, 1, 2, 3, 4, 5, 6, 7, 8, 38, 39});
  CHECK(w.positions(0, 0, 1) == Rows{38, 39});
  CHECK(w.positions(0, 0, 2) == Rows{0, 1, 2, 3, 4, 5, 6, 7, 8, 38, 39});
}

TEST_CASE("adakv: a head whose rows are not written decides nothing over another's", "[adakv]") {
  // By norms, what nobody wrote (zeros, or NaN) would be the best or the worst of all.
  const AdaKV<KeyNorm> shared({.inner = {.budget = 4, .sinks = 0, .recent = 0},
                               .safeguard = 0,
                               .over = AdaptiveOver::all_heads});
  PagedCache cache({.pages = 40,
                    .page_size = 4,
                    .layers = 2,
                    .kv_heads = 1,
                    .key_dim = 2,
                    .scope = TableScope::head,
                    .max_sequences = 1,
                    .max_rows = 16});
  REQUIRE(cache.try_create());
  test::fill_unwritten(cache, GENERATE(std::uint32_t{test::signalling_nan}, 0U));
  REQUIRE(cache.try_extend(SequenceId{0}, 6) == kvtrim::Status::ok);
  const std::vector<float> rows(12, 1.0F);
  const auto write = [&](std::int32_t l) {
    REQUIRE(cache.write(SequenceId{0}, LayerId{l}, {.data = rows.data()}, {.data = rows.data()}) ==
            kvtrim::Status::ok);
  };
  std::vector<std::byte> workspace;
  const auto status = [&] {
    const CacheView view = cache.view();
    workspace.resize(plan_workspace_bytes(shared, plan_shape(view, {})));
    return plan(shared, view, {}, workspace).status();
  };
  write(0);
  CHECK(status() == kvtrim::Status::step_open);
  write(1);
  const CacheView view = cache.view();
  REQUIRE(status() == kvtrim::Status::ok);
  const PlanRef first = plan(shared, view, {}, workspace);
  REQUIRE(apply(first, view) == kvtrim::Status::ok);
  std::vector<std::byte> other(workspace.size());
  CHECK(plan(shared, view, {}, other).status() == kvtrim::Status::eviction_open);
}
