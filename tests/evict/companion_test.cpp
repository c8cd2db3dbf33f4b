// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/evict/companion.hpp>

#include "catch.hpp"
#include "support/by_score.hpp"
#include "support/instances.hpp"
#include "support/random.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

using namespace kvtrim;

namespace {

using Ints = std::vector<std::int32_t>;

// Two sequences of 14 and 6 rows in pages of 4; a row's elements are its sequence * 100 + row.
struct Cache {
  std::int32_t layers, heads, dim;
  bool hnd;
  std::vector<float> keys, values;
  Ints ids, lengths{14, 6};
  CacheView view;

  Cache(std::int32_t layers_, std::int32_t heads_, std::int32_t dim_, bool hnd_, const Ints& table)
      : layers(layers_), heads(heads_), dim(dim_), hnd(hnd_), ids(table) {
    keys.assign(static_cast<std::size_t>(layers * 16 * 4 * heads * dim), -1.0F);
    values = keys;
    const PlaneShape shape{4, heads, dim, DType::f32};
    view.k = hnd ? Plane::hnd(keys.data(), shape) : Plane::nhd(keys.data(), shape);
    view.v = hnd ? Plane::hnd(values.data(), shape) : Plane::nhd(values.data(), shape);
    view.k.layer_stride = view.v.layer_stride = layers > 1 ? 16 * view.k.page_stride : 0;
    view.page_size = 4, view.pages = 16, view.kv_heads = heads, view.layers = layers;
    view.sequences = 2;
    view.table.ids = ids.data();
    view.table.row_stride = view.table.max_pages = 4;
    view.lengths = lengths.data();
    for_each([&](float* at, std::int32_t s, std::int32_t r) {
      std::fill_n(at, dim, static_cast<float>(s * 100 + r));
    });
  }
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  // Elements of each row, by the tables as they are.
  template <class F>
  void for_each(F&& f) {
    for (std::int32_t s = 0; s < 2; ++s) {
      for (std::int32_t i = 0; i < layers * heads * lengths[static_cast<std::size_t>(s)]; ++i) {
        const std::int32_t r = i / (layers * heads);
        const LayerId l{i % layers};
        const HeadId h{i / layers % heads};
        f(reinterpret_cast<float*>(view.key(SequenceId{s}, l, h, r)), s, r);
        f(reinterpret_cast<float*>(view.value(SequenceId{s}, l, h, r)), s, r);
      }
    }
  }
  // Whether sequence s has these rows.
  bool has(const std::vector<Ints>& rows) {
    bool right = true;
    for_each([&](const float* at, std::int32_t s, std::int32_t r) {
      const float wanted = static_cast<float>(
          s * 100 + rows[static_cast<std::size_t>(s)].at(static_cast<std::size_t>(r)));
      for (std::int32_t d = 0; d < dim; ++d) { right = right && at[d] == wanted; }
    });
    return right;
  }
};

struct Scored {
  std::vector<float> scores = std::vector<float>(2 * 14);
  Observation obs;
  Scored() {
    test::Random random(4);
    for (float& x : scores) { x = random.uniform(); }
    obs.scores.base = reinterpret_cast<std::byte*>(scores.data());
    obs.scores.row_stride = 4;
    obs.scores.sequence_stride = 14 * 4;
  }
};

std::vector<Ints> kept_of(const PlanView& plan) {
  std::vector<Ints> out(2);
  for (std::int32_t s = 0; s < 2; ++s) {
    plan.for_each_kept(SequenceId{s}, LayerId{0}, HeadId{0}, [&](std::int32_t r) {
      out[static_cast<std::size_t>(s)].push_back(r);
    });
  }
  return out;
}

const Ints table{7, 2, 9, 4, 11, 5, -1, -1};
const test::ByScore policy{.keep = 5};

template <class P>
PlanRef made_of(const P& p, Cache& c, const Observation& obs, std::vector<std::byte>& memory) {
  memory.resize(plan_workspace_bytes(p, plan_shape(c.view, obs)));
  return plan(p, c.view, obs, memory);
}

}  // namespace

TEST_CASE("companion: caches with the same page ids move with the rows of one plan",
          "[companion]") {
  for (const bool hnd : {false, true}) {
    Cache target(2, 2, 8, false, table);
    Cache draft(3, 3, 4, hnd, table);  // another model's layers and heads
    Cache indexer(1, 1, 6, false, table);
    std::vector<PagePlane> planes(64);
    const std::int32_t first = companion_planes(draft.view, planes);
    CHECK(first == (hnd ? 18 : 6));
    const std::int32_t all =
        first +
        companion_planes(indexer.view, std::span(planes).subspan(static_cast<std::size_t>(first)));
    CHECK(all == first + 2);
    CHECK(companion_planes(draft.view, {}) == first);
    target.view.page_planes = planes.data();
    target.view.page_plane_count = all;
    check_layout(target.view);
    const Scored scored;
    std::vector<std::byte> memory;
    const PlanRef made = made_of(policy, target, scored.obs, memory);
    REQUIRE(made.status() == Status::ok);
    const auto kept = kept_of(made);
    REQUIRE((apply(made, target.view) == Status::ok));
    std::vector<PageId> freed(8);
    DenseTables tables(target.view, target.ids.data(), target.lengths.data(), nullptr, freed);
    CHECK(commit(made, target.view, tables).released_pages == 2);
    CHECK(target.has(kept));
    for (Cache* other : {&draft, &indexer}) {  // the engine's tables and lengths are one
      other->ids = target.ids, other->lengths = target.lengths;
      other->view.table.ids = other->ids.data(), other->view.lengths = other->lengths.data();
      CHECK(other->has(kept));
    }
  }
}

TEST_CASE("companion: heads that would keep different rows are refused, nothing moves",
          "[companion][edge]") {
  Cache target(2, 2, 8, false, table);
  Cache draft(1, 1, 4, false, table);
  std::vector<PagePlane> planes(2);
  target.view.page_plane_count = companion_planes(draft.view, planes);
  target.view.page_planes = planes.data();
  std::vector<float> scores(2 * 4 * 14);
  test::Random random(8);
  for (float& x : scores) { x = random.uniform(); }
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 2, 2, 14);
  std::vector<std::byte> memory;
  CHECK((made_of(policy, target, obs, memory).status() == Status::planes_disagree));
  target.view.page_plane_count = 0;
  const PlanRef alone = made_of(policy, target, obs, memory);
  REQUIRE(alone.status() == Status::ok);
  std::vector<float> same(2 * 14);
  Ints budgets(2);
  Observation out;
  CHECK(keep_the_same(alone, same, 14, budgets, out) == Status::unequal_budget);
  CHECK(out.budgets == nullptr);
  // What no plane can describe.
  draft.view.k.feature_stride = 8;
  CHECK(companion_planes(draft.view, planes) == 0);
}

TEST_CASE("companion: caches with tables of their own keep the same rows", "[companion]") {
  Cache target(2, 2, 8, false, table);
  Cache draft(1, 3, 4, true, {0, 1, 2, 3, 8, 6, -1, -1});
  const Scored scored;
  std::vector<std::byte> memory, other_memory;
  const PlanRef made = made_of(policy, target, scored.obs, memory);
  REQUIRE(made.status() == Status::ok);
  const auto kept = kept_of(made);
  std::vector<float> same(2 * 14);
  Ints budgets(2);
  Observation obs;
  CHECK(keep_the_same(made, same, 13, budgets, obs) == Status::workspace_too_small);
  REQUIRE(keep_the_same(made, same, 14, budgets, obs) == Status::ok);
  const External follower({.budget = 1, .sinks = 0, .recent = 0});
  const PlanRef follows = made_of(follower, draft, obs, other_memory);
  REQUIRE(follows.status() == Status::ok);
  CHECK(kept_of(follows) == kept);
  for (auto [plan, cache] : {std::pair{made, &target}, std::pair{follows, &draft}}) {
    REQUIRE((apply(plan, cache->view) == Status::ok));
    std::vector<PageId> freed(8);
    DenseTables tables(cache->view, cache->ids.data(), cache->lengths.data(), nullptr, freed);
    CHECK(commit(plan, cache->view, tables).released_pages == 2);
    CHECK(cache->has(kept));
  }
}

TEST_CASE("prefix: two sequences share pages, one is evicted from; the other's rows stay",
          "[companion][prefix]") {
  // Pages 7 and 2 are common to both: by ref counts, or by a mask of pages that a prefix cache has hashed.
  for (const bool by_counts : {true, false}) {
    for (const SharedPages rule : {SharedPages::leave, SharedPages::copy}) {
      Cache c(2, 2, 8, false, {7, 2, 9, 4, 7, 2, 5, -1});
      c.lengths = {14, 10};
      Ints counts(16, 1);
      counts[7] = counts[2] = 2;
      std::vector<std::uint64_t> bits{~std::uint64_t{0} & ~(std::uint64_t{1} << 7U) &
                                      ~(std::uint64_t{1} << 2U)};
      c.view.writable.ref_counts = by_counts ? counts.data() : nullptr;
      c.view.writable.bits = by_counts ? nullptr : bits.data();
      const auto keys = c.keys, values = c.values;
      const StreamingSink<SinkForm::exact> keeps({.sinks = 1, .recent = 6});
      const Ints budgets{7, 10};  // sequence 1 keeps all
      Observation obs;
      obs.budgets = budgets.data();
      obs.budget_rows = {1, 0, 0};
      std::vector<std::byte> memory(plan_workspace_bytes(keeps, plan_shape(c.view, obs)));
      const std::vector<PageId> spares{PageId{12}, PageId{13}};
      const PlanOptions few{.shared = rule, .spare_pages = std::span(spares).first(0)};
      if (rule == SharedPages::copy) {  // the plan says how many private pages it wants
        const PlanRef poor = plan(keeps, c.view, obs, memory, few);
        CHECK((poor.status() == Status::out_of_pages));
        CHECK(poor.spares_needed() == 2);
      }
      const PlanRef made =
          plan(keeps, c.view, obs, memory, {.shared = rule, .spare_pages = spares});
      REQUIRE(usable(made.status()));
      REQUIRE((apply(made, c.view) == Status::ok));
      // Not one byte of a shared page was written.
      const auto page = static_cast<std::size_t>(c.view.k.page_stride / 4);
      for (const std::size_t p : {7U, 2U}) {
        for (std::size_t l = 0; l < 2; ++l) {
          const std::size_t at = (l * 16 + p) * page;
          CHECK(std::equal(keys.begin() + static_cast<long>(at),
                           keys.begin() + static_cast<long>(at + page),
                           c.keys.begin() + static_cast<long>(at)));
          CHECK(std::equal(values.begin() + static_cast<long>(at),
                           values.begin() + static_cast<long>(at + page),
                           c.values.begin() + static_cast<long>(at)));
        }
      }
      std::vector<PageId> freed(8);
      DenseTables tables(
          c.view, c.ids.data(), c.lengths.data(), by_counts ? counts.data() : nullptr, freed);
      CHECK(usable(commit(made, c.view, tables).status));
      CHECK(c.lengths[1] == 10);
      CHECK((Ints(c.ids.begin() + 4, c.ids.end()) == Ints{7, 2, 5, -1}));
      if (rule == SharedPages::copy) {
        CHECK(c.lengths[0] == 7);
        CHECK((c.ids[0] == 12 && c.ids[1] == 13));
        if (by_counts) { CHECK((counts[7] == 1 && counts[2] == 1)); }
      }
    }
  }
}
