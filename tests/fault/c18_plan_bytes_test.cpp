// SPDX-License-Identifier: Apache-2.0
// Plans from elsewhere: what bytes say is checked against the cache once, and then done whole, or not at all.
#include <kvtrim/evict/plan_bytes.hpp>

#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "catch.hpp"
#include "support/planned.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

using namespace kvtrim;
using test::ByScore;
using test::Planned;
using test::TaggedCache;

namespace {

using Bytes = std::vector<std::byte>;

Bytes bytes_of(const PlanView& plan) {
  return {plan.bytes().begin(), plan.bytes().end()};
}
ByScore policy_of(Removal way) {
  return {.keep = way == Removal::overwrite_slot ? 17 : 6, .way = way};
}
constexpr Removal ways[] = {
    Removal::drop_pages, Removal::overwrite_slot, Removal::fill_holes, Removal::stable_pack};

// A plan with one field changed by `forge(plan)`.
template <class F>
Status forged(Planned& planned, Removal way, const F& forge) {
  Plan plan(planned.make(policy_of(way)));
  REQUIRE(usable(plan.view().status()));
  REQUIRE(plan.view().table({}, 0).removal == way);
  forge(plan.ref());
  const auto before = planned.c.bytes();
  Plan read = Plan::from_bytes(plan.view().bytes(), planned.c.view());
  CHECK(apply(read.ref(), planned.c.view()) == read.view().status());
  CHECK(planned.c.bytes() == before);
  return read.view().status();
}
template <class T>
void set(const T& place, T value) {
  const_cast<T&>(place) = value;
}

}  // namespace

TEST_CASE("C18 an applied plan is committed to a cache of its own shape alone", "[fault][plan]") {
  const StreamingSink policy({.sinks = 4, .recent = 4});
  TaggedCache large({.sequences = 8});
  TaggedCache small({.sequences = 2});
  for (std::int32_t s = 0; s < 8; ++s) { REQUIRE(large.append(s, 20) == Status::ok); }
  for (std::int32_t s = 0; s < 2; ++s) { REQUIRE(small.append(s, 20) == Status::ok); }
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(large.view(), {})));
  const PlanRef eight = plan(policy, large.view(), {}, workspace);
  REQUIRE(apply(eight, large.view()) == Status::ok);
  const auto before = small.bytes();
  auto wrong = small.cache.sink_for(small.view());
  CHECK(commit(eight, small.view(), wrong).status == Status::bad_plan);
  Plan sent = Plan::from_bytes(eight.bytes());
  CHECK(commit(sent.ref(), small.view(), wrong).status == Status::stale_plan);
  CHECK(Plan::from_bytes(eight.bytes(), small.view()).view().status() == Status::stale_plan);
  CHECK(small.bytes() == before);
  // And nothing is lost: it still can be committed where it belongs.
  auto sink = large.cache.sink_for(large.view());
  CHECK(commit(eight, large.view(), sink).status == Status::ok);
  CHECK(large.fault() == "");
}

TEST_CASE("C18 fields of plan bytes that no table allows are refused", "[fault][plan]") {
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    Planned x(18, scope);
    const SequenceId s{0};
    // The row that an append takes lies beyond the table, or beyond the pages that stay.
    for (const std::int32_t row : {18, 17, 12}) {
      CHECK(forged(x, Removal::overwrite_slot, [&](const PlanRef& p) {
              p.own_table(s, 0).append_row = row;
              p.own_table(s, 0).live_after = row == 12 ? 8 : 17;
            }) == Status::bad_plan);
    }
    const std::int32_t others = x.c.cache.page_table(SequenceId{1}, {}, {})[0];
    for (const std::int32_t page : {others, 40, -1, 80, 1'000'000'000}) {
      for (const Removal way : ways) {
        if (!x.make(policy_of(way)).table(s, 0).evicts) {
          continue;
        }  // each page has a row that stays
        CHECK(forged(x, way, [&](const PlanRef& p) {
                set(p.k_pages(s, 0).back(), PageId{page});
              }) == Status::bad_plan);
        if (way == Removal::overwrite_slot) { continue; }  // releases nothing
        CHECK(forged(x, way, [&](const PlanRef& p) { set(p.released(s, 0)[0], PageId{page}); }) ==
              Status::bad_plan);
      }
    }
    // A page twice: once kept, once released.
    CHECK(forged(x, Removal::stable_pack, [&](const PlanRef& p) {
            set(p.released(s, 0)[0], p.k_pages(s, 0)[0]);
          }) == Status::bad_plan);
    // Rows that neither stay nor go, and one that does both.
    CHECK(forged(x, Removal::stable_pack, [&](const PlanRef& p) {
            const auto kept = p.kept_list(s, {}, {});
            for (std::size_t i = 0; i < kept.size(); ++i) {
              set(kept[i], static_cast<std::int32_t>(i));
            }
          }) == Status::bad_plan);
  }
}

TEST_CASE("C18 pages that stay in another order than they had are refused", "[fault][plan]") {
  const StreamingSink policy({.sinks = 4, .recent = 8});
  TaggedCache c({});
  REQUIRE(c.append(0, 24) == Status::ok);
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(c.view(), {})));
  const PlanRef made = plan(policy, c.view(), {}, workspace);
  REQUIRE(made.sources({}, 0).size() == 3);
  for (const auto& order : {std::vector{4, 0, 5}, {0, 5, 4}, {0, 0, 5}, {0, 4, 4}, {0, 4, 6}}) {
    Plan swapped(made);
    for (std::size_t e = 0; e < 3; ++e) {
      set(swapped.view().sources({}, 0)[e], order[e]);
      if (order[e] < 6) {
        set(swapped.view().k_pages({}, 0)[e], c.view().k_page({}, {}, {}, order[e]));
      }
    }
    CHECK(Plan::from_bytes(swapped.view().bytes(), c.view()).view().status() == Status::bad_plan);
  }
}

TEST_CASE("C18 only pages that the caller allows take the place of shared ones", "[fault][plan]") {
  TaggedCache c({.layers = 1, .sequences = 3});
  REQUIRE(c.append(0, 12) == Status::ok);
  c.cache.destroy(SequenceId{1}), c.cache.destroy(SequenceId{2});
  REQUIRE(c.cache.try_fork(SequenceId{0}));
  REQUIRE(c.cache.try_create());
  c.tags_checked = false;
  REQUIRE(c.append(2, 4) == Status::ok);
  // A view of sequence 0 alone: it shows neither that sequence 2 has a page, nor which pages are free.
  const CacheView view = c.cache.view(SequenceId{0});
  const PageId stranger{c.cache.page_table(SequenceId{2})[0]};
  const std::vector<PageId> spares{*c.cache.pool().try_acquire(), *c.cache.pool().try_acquire()};
  std::vector<float> scores{0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1};
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 1, 1, 12);
  const ByScore policy{.keep = 6};
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
  const PlanOptions options{.shared = SharedPages::copy, .spare_pages = spares};
  const PlanRef made = plan(policy, view, obs, workspace, options);
  REQUIRE(made.status() == Status::ok);
  REQUIRE(made.spares_needed() == 2);
  const auto status = [&](const PlanView& sent, std::span<const PageId> allowed) {
    return Plan::from_bytes(sent.bytes(), view, {.spare_pages = allowed}).view().status();
  };
  CHECK(status(made, spares) == Status::ok);
  CHECK(status(made, {}) == Status::bad_plan);
  CHECK(status(made, std::span(spares).first(1)) == Status::bad_plan);
  Plan forged(made);
  set(forged.view().k_pages({}, 0)[0], stranger);
  CHECK(status(forged.view(), spares) == Status::bad_plan);
  const std::vector<PageId> mistaken{stranger, spares[1]};
  CHECK(status(forged.view(), mistaken) == Status::ok);  // whoever allows it says that it is free
}

TEST_CASE("C18 a plan's bytes are of one state of one cache", "[fault][plan]") {
  for (const Removal way : ways) {
    Planned x;
    const Bytes sent = bytes_of(x.make(policy_of(way)));
    const auto status = [&](const CacheView& view) {
      return Plan::from_bytes(sent, view).view().status();
    };
    CHECK(usable(status(x.c.view())));
    CHECK(status(x.c.view(0)) == Status::bad_plan);  // of another shape
    REQUIRE(x.c.append(1, 1) == Status::ok);         // a table from which nothing goes
    CHECK(usable(status(x.c.view())));
    REQUIRE(x.c.cache.try_extend(SequenceId{0}, 1) == Status::ok);
    CHECK(status(x.c.view()) == Status::step_open);
    REQUIRE(x.c.cache.try_cancel_step(SequenceId{0}) == Status::ok);
    CHECK(status(x.c.view()) == Status::stale_plan);
    // A table whose entries are out of the pool is not followed.
    Planned y;
    const Bytes other = bytes_of(y.make(policy_of(way)));
    std::vector<std::int32_t> ids(static_cast<std::size_t>(y.c.view().table.row_stride) * 4, 1'000);
    CacheView bad = y.c.view();
    bad.table.ids = ids.data();
    CHECK(Plan::from_bytes(other, bad).view().status() == Status::page_out_of_range);
  }
}

TEST_CASE("C18 each word of a plan by hostile values: done whole, or refused", "[fault][plan]") {
  std::int64_t done = 0;
  std::int64_t refused = 0;
  for (const TableScope scope : {TableScope::group, TableScope::head}) {
    for (const Removal way : ways) {
      Planned x(18, scope);
      const Bytes good = bytes_of(x.make(policy_of(way)));
      const CacheView view = x.c.view();
      const auto rows =
          static_cast<std::size_t>(detail::PlanLayout(x.make(policy_of(way)).header()).rows);
      for (std::size_t at = 0; at + 4 <= good.size(); at += at < rows ? 4 : 12) {
        for (const std::int32_t value : {-1, 0, 1, 5, 18, 0x100, 0x7FFF'FFFF}) {
          Bytes bad = good;
          std::memcpy(bad.data() + at, &value, 4);
          if (bad == good) { continue; }
          Plan read = Plan::from_bytes(bad, view);
          if (!usable(read.view().status()) || read.view().empty()) {
            ++refused;
            continue;
          }
          // The same steps make the same cache.
          Planned y(18, scope);
          REQUIRE(apply(read.ref(), y.c.view()) == Status::ok);
          auto sink = y.c.cache.sink_for(y.c.view());
          REQUIRE(usable(commit(read.ref(), y.c.view(), sink).status));
          INFO("word " << at / 4 << " is " << value);
          REQUIRE(y.c.fault() == "");
          REQUIRE(y.c.append(0, 3) == Status::ok);
          REQUIRE(y.c.fault() == "");
          ++done;
        }
      }
    }
  }
  CHECK(done > 1000);  // room behind lists, padding between arrays and statistics may be anything
  CHECK(refused > 1000);
}
