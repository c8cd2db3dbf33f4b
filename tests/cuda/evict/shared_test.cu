// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cuda/evict/detail/shared.cuh>

#include <kvtrim/cuda/evict/prepare.cuh>
#include <kvtrim/cuda/evict/step.cuh>

#include "catch.hpp"
#include "cuda/evict/both_sides.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace {

using namespace kvtrim;
using kvtrim::test::by_given_scores;
using kvtrim::test::DeviceBuffer;
using kvtrim::test::DeviceSide;
using kvtrim::test::ok;
using kvtrim::test::World;
using kvtrim::test::WorldLayout;
using kvtrim::test::WorldShape;

/// Which entries of every table have pages that others hold too.
enum class Sharing {
  none,
  front,
  middle,
  last,
  all,
  every_second,
  values_only,
  forked,
  odd_tables
};

/// A world, and how many hold each page.
struct SharedWorld {
  SharedWorld(const WorldShape& of, Sharing sharing)
      : shape(of), world(of), counts(static_cast<std::size_t>(world.pages()), 1) {
    auto& ids = world.host().ids;
    const std::int32_t each = shape.separate_values ? 2 : 1;
    const std::size_t row = static_cast<std::size_t>(shape.max_pages * each);
    const std::size_t tables = ids.size() / row;
    const std::size_t of_sequence = tables / static_cast<std::size_t>(shape.sequences);
    for (std::size_t i = 0; i < tables; ++i) {
      for (std::int32_t e = 0; e < shape.max_pages; ++e) {
        for (std::int32_t v = 0; v < each; ++v) {
          const auto at = static_cast<std::size_t>(v * shape.max_pages + e);
          std::int32_t& id = ids[i * row + at];
          if (id < 0) { continue; }
          if (sharing == Sharing::forked && i >= of_sequence && e < 3 &&
              ids[i % of_sequence * row + at] >= 0) {
            id = ids[i % of_sequence * row + at];
            counts[static_cast<std::size_t>(id)] = 2;
          }
          const bool shared = sharing == Sharing::front          ? e < 2
                              : sharing == Sharing::middle       ? e == 2 || e == 3
                              : sharing == Sharing::last         ? e >= 5
                              : sharing == Sharing::all          ? true
                              : sharing == Sharing::every_second ? e % 2 == 1
                              : sharing == Sharing::odd_tables   ? i % 2 == 1
                              : sharing == Sharing::values_only  ? v == each - 1 && e < 3
                                                                 : false;
          if (shared) { counts[static_cast<std::size_t>(id)] = 3; }
        }
      }
    }
    world.device().ids.upload(ids);
    device_counts = std::make_unique<DeviceBuffer<std::int32_t>>(counts, "ref counts");
  }
  [[nodiscard]] CacheView host_view() {
    CacheView view = world.host_view();
    view.writable.ref_counts = counts.data();
    return with_planes(view);
  }
  [[nodiscard]] CacheView device_view() {
    CacheView view = world.device_view();
    view.writable.ref_counts = device_counts->data();
    return with_planes(view);
  }
  WorldShape shape;
  World world;
  /// KV heads have their positions and scores in common.
  CacheView with_planes(CacheView view) const {
    for (SequencePlane* const p : {&view.positions, &view.score_sums, &view.score_compensations}) {
      if (common) { p->head_stride = 0; }
    }
    return view;
  }
  bool common = false;
  std::vector<std::int32_t> counts;
  std::unique_ptr<DeviceBuffer<std::int32_t>> device_counts;
};

/// What was seen, so that a test can say that it saw it.
struct Seen {
  std::set<Status> statuses;
  std::int32_t kept_shared = 0;  // tables with shared pages that stay
  std::int32_t replaced = 0;     // by `stable_pack`
  std::int32_t spares = 0;       // spare pages
  std::int32_t half_copied = 0;  // tables with spare and old pages
  std::int32_t overwritten = 0;  // tables in which a slot is overwritten
};

struct HostTotals {
  std::int64_t evicted = 0;
  std::int64_t kept = 0;
  std::int64_t bytes_moved = 0;
  std::int64_t nan_count = 0;
  std::vector<std::int32_t> released;
  std::vector<TablePlan> tables;
};

template <class P>
Status host_side(SharedWorld& w,
                 const P& policy,
                 const CacheView& view,
                 const PlanOptions& options,
                 HostTotals& totals,
                 std::int32_t& spares) {
  Observation obs;
  if (by_given_scores<P>) { obs.scores = view.score_sums; }
  Plan made = kvtrim::test::host_plan(policy, view, obs, options);
  const PlanRef plan = made.ref();
  spares = plan.spares_needed();
  totals.evicted += plan.evicted_rows();
  totals.kept += plan.kept_rows();
  totals.bytes_moved += plan.bytes_moved();
  totals.nan_count += plan.nan_count();
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
      totals.tables.push_back(usable(plan.status()) ? plan.table(SequenceId{s}, t) : TablePlan{});
      if (!usable(plan.status()) || !plan.table(SequenceId{s}, t).evicts) { continue; }
      for (const PageId p : plan.released(SequenceId{s}, t)) { totals.released.push_back(raw(p)); }
    }
  }
  if (!usable(plan.status())) { return plan.status(); }
  REQUIRE(apply(plan, view) == Status::ok);
  std::vector<PageId> freed(w.world.host().ids.size());
  DenseTables sink(view, const_cast<std::int32_t*>(view.table.ids), nullptr, nullptr, freed);
  CHECK(usable(commit(plan, view, sink).status));
  return plan.status();
}

/// Both sides plan, apply and commit; afterwards not a byte may differ.
template <class P>
void same_shared(SharedWorld& w,
                 const P& policy,
                 Seen& seen,
                 Removal removal = Removal::automatic,
                 SharedPages shared = SharedPages::leave,
                 const std::vector<std::int32_t>& spares = {},
                 std::int32_t max_evicted = 0,
                 bool by_step = false,
                 std::int32_t max_rows = 0) {
  PlanOptions host_options;
  host_options.removal = removal;
  host_options.shared = shared;
  host_options.spare_pages = {reinterpret_cast<const PageId*>(spares.data()), spares.size()};
  const DeviceBuffer<std::int32_t> device_spares(spares, "spare pages");
  const DeviceBuffer<std::int32_t> count(
      std::vector<std::int32_t>{static_cast<std::int32_t>(spares.size())}, "spare count");
  cuda::DeviceStepOptions options;
  options.removal = removal;
  options.shared = shared;
  options.spare_pages = device_spares.data();
  options.spare_count = count.data();
  cuda::PlanBounds bounds(plan_shape(w.world.host_view()));
  bounds.max_evicted = max_evicted;
  bounds.max_rows = std::max(bounds.max_rows, max_rows);
  const CacheView device = w.device_view();
  DeviceSide side(policy, bounds, options);
  cuda::DeviceTables tables;
  tables.ids = w.world.device().ids.data();
  cuda::DeviceObservation obs;
  const cuda::GivenScores given(device.score_sums);
  const auto with_scores = [&](auto&& f) {
    if constexpr (by_given_scores<P>) {
      ok(f(given));
    } else {
      ok(f(obs));
    }
  };
  if (by_step) {
    with_scores([&](const auto& source) {
      return cuda::step(policy, device, source, side.workspace, tables, nullptr, options);
    });
  } else {
    with_scores([&](const auto& source) {
      return cuda::plan(policy, device, source, side.workspace, nullptr, options);
    });
  }
  ok(kvtrim::test::finish());
  const cuda::DeviceReport planned = side.report();
  const auto plans = side.read(cuda::device_plan(side.workspace).table_plans,
                               cuda::device_plan(side.workspace).all_tables());
  if (!by_step) {
    ok(cuda::apply(side.workspace, device, nullptr));
    ok(cuda::commit(side.workspace, device, tables, nullptr));
  }
  ok(kvtrim::test::finish());

  const CacheView host = w.host_view();
  HostTotals totals;
  std::int32_t needed = 0;
  const Status status = host_side(w, policy, host, host_options, totals, needed);
  const bool of_all = status == Status::out_of_pages || status == Status::bad_options;
  CHECK(to_string(planned.status) == to_string(status));
  if (usable(status) || of_all) { CHECK(planned.spares_needed == needed); }
  if (!usable(status) && !of_all) {  // each sequence by itself
    totals = {};
    for (std::int32_t s = 0; s < host.sequences; ++s) {
      static_cast<void>(
          host_side(w, policy, kvtrim::test::one_sequence(host, s), host_options, totals, needed));
      host_options.spare_pages = host_options.spare_pages.subspan(
          std::min(static_cast<std::size_t>(needed), host_options.spare_pages.size()));
    }
  } else {
    CHECK(planned.kept == totals.kept);
  }
  CHECK((planned.refused > 0) == !usable(status));
  CHECK(planned.nan_count == totals.nan_count);
  CHECK(planned.evicted == totals.evicted);
  CHECK(planned.bytes_moved == totals.bytes_moved);
  CHECK(side.released(planned.released) == totals.released);
  CHECK(w.world.difference() == "");
  seen.statuses.insert(status);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const TablePlan& got = plans[i];
    const TablePlan& want = totals.tables[i];
    CHECK(got.evicts == want.evicts);
    CHECK(got.live_after == want.live_after);
    if (!got.evicts || !want.evicts) { continue; }
    CHECK(to_string(got.status) == to_string(want.status));
    CHECK(got.removal == want.removal);
    CHECK(got.replaced == want.replaced);
    CHECK(got.ordered_after == want.ordered_after);
    CHECK(got.append_row == want.append_row);
    CHECK(got.pages_after == want.pages_after);
    CHECK(got.released == want.released);
    CHECK(got.shared_kept == want.shared_kept);
    CHECK(got.spare_pages == want.spare_pages);
    seen.kept_shared += got.shared_kept > 0 ? 1 : 0;
    seen.replaced += got.replaced ? 1 : 0;
    seen.spares += got.spare_pages;
    seen.half_copied += got.spare_pages > 0 && got.spare_pages < got.pages_after ? 1 : 0;
    seen.overwritten += got.removal == Removal::overwrite_slot ? 1 : 0;
  }
}

/// Calls f(shape, sharing) for worlds of many kinds.
template <class F>
void for_each_world(F&& f) {
  std::uint32_t seed = 1;
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    for (int kind = 0; kind < 6; ++kind) {
      for (const Sharing sharing : {Sharing::none,
                                    Sharing::front,
                                    Sharing::middle,
                                    Sharing::last,
                                    Sharing::all,
                                    Sharing::every_second,
                                    Sharing::values_only,
                                    Sharing::forked}) {
        WorldShape shape;
        shape.scope = scope;
        shape.seed = seed++;
        shape.padding = kind == 1 || kind == 4;
        shape.separate_values = kind == 2 || sharing == Sharing::values_only;
        shape.holes = kind == 3 || kind == 4;
        shape.shuffled = kind == 5;
        shape.scales = kind % 2 == 1;
        shape.k_dim = shape.v_dim = 8;
        shape.reserved = kind == 2 ? 1 : 0;
        shape.counters = kind == 2;
        shape.layout = kind == 3 ? WorldLayout::layer_bases : WorldLayout::nhd;
        if (kind == 4) { shape.k_dim = 5; }  // the generic path
        // Every second combination: each pair is there.
        if ((static_cast<int>(scope) + kind + static_cast<int>(sharing)) % 2 != 0) { continue; }
        INFO("scope " << static_cast<int>(scope) << ", kind " << kind << ", sharing "
                      << static_cast<int>(sharing));
        f(shape, sharing);
      }
    }
  }
}

}  // namespace

TEST_CASE("cuda::plan: rows of shared pages stay or go with their page, as on the host",
          "[cuda][parity]") {
  const Removal removal = GENERATE(Removal::stable_pack, Removal::fill_holes);
  const bool by_step = removal == Removal::fill_holes;
  Seen seen;
  for_each_world([&](const WorldShape& shape, Sharing sharing) {
    for (const std::int32_t sinks : {0, 1}) {  // without: no row of the first page may be wanted
      const HeavyHitter<> policy({.heavy = 8, .recent = 3, .sinks = sinks});
      SharedWorld w(shape, sharing);
      if (sinks == 0) {
        auto& sums = w.world.host().sums;
        for (std::size_t i = 0; i < sums.size(); ++i) {
          if (i % static_cast<std::size_t>(w.world.capacity()) < 4) { sums[i] = -1; }
        }
        w.world.device().sums.upload(sums);
      }
      same_shared(w, policy, seen, removal, SharedPages::leave, {}, 0, by_step);
    }
  });
  CHECK(seen.statuses.count(Status::ok) == 1);
  CHECK(seen.statuses.count(Status::over_budget) == 1);
  CHECK(seen.statuses.count(Status::shared_page) == 1);
  CHECK(seen.kept_shared > 10);
  CHECK((seen.replaced > 10) == (removal == Removal::fill_holes));
}

TEST_CASE("cuda::plan: a slot in a shared page is not overwritten, as on the host",
          "[cuda][parity]") {
  Seen seen;
  for_each_world([&](const WorldShape& shape, Sharing sharing) {
    if (shape.separate_values && sharing != Sharing::values_only) { return; }
    const std::int32_t live = SharedWorld(shape, sharing).world.host().states[0].live_rows;
    const bool exact = shape.padding;
    SharedWorld w(shape, sharing);
    if (exact) {
      same_shared(w, StreamingSink<SinkForm::exact>({.sinks = 3, .recent = live - 4}), seen);
    } else {
      same_shared(w,
                  HeavyHitter<AccumulateParams, HeavyMode::promote>(
                      {.heavy = live - 6, .recent = 5, .sinks = 0}),
                  seen);
    }
  });
  CHECK(seen.overwritten > 10);
  CHECK(seen.replaced > 10);
  CHECK(seen.kept_shared > 10);
}

TEST_CASE("cuda::plan: pages that leave by position, or by given scores, may be shared",
          "[cuda][parity]") {
  Seen seen;
  for_each_world([&](const WorldShape& shape, Sharing sharing) {
    if (shape.shuffled || shape.holes) { return; }
    SharedWorld by_position(shape, sharing);
    same_shared(by_position, StreamingSink<>({.sinks = 2, .recent = 9}), seen);
    SharedWorld by_score(shape, sharing);
    by_score.world.host().sums[7] = std::numeric_limits<float>::quiet_NaN();
    by_score.world.device().sums.upload(by_score.world.host().sums);
    same_shared(by_score,
                kvtrim::test::ByScore{.keep = 9, .protection = {1, 2}},
                seen,
                Removal::drop_pages,
                SharedPages::leave,
                {},
                0,
                true);
  });
  CHECK(seen.statuses.count(Status::shared_page) == 0);
}

TEST_CASE(
    "cuda::plan: shared pages, NaN, lists of the rows that go alone, and keys that do not fit",
    "[cuda][parity][nan]") {
  Seen seen;
  const std::int32_t max_rows = GENERATE(0, 60'000);
  for_each_world([&](const WorldShape& shape, Sharing sharing) {
    if (max_rows > 0 && (shape.padding || shape.scope != TableScope::layer)) { return; }
    SharedWorld w(shape, sharing);
    auto& sums = w.world.host().sums;
    for (std::size_t i = 0; i < sums.size(); i += 5) {
      sums[i] = std::numeric_limits<float>::quiet_NaN();
    }
    w.world.device().sums.upload(sums);
    same_shared(w,
                kvtrim::test::ByScore{.keep = 18, .protection = {2, 3}},
                seen,
                Removal::stable_pack,
                SharedPages::leave,
                {},
                max_rows > 0 ? 0 : 20,
                false,
                max_rows);
  });
  CHECK(seen.kept_shared > 5);
}

TEST_CASE(
    "cuda::plan: shared pages that would be written are replaced by spare pages, as on the host",
    "[cuda][parity]") {
  const Removal removal =
      GENERATE(Removal::stable_pack, Removal::fill_holes, Removal::overwrite_slot);
  Seen seen;
  std::uint32_t which = 0;
  for_each_world([&](WorldShape shape, Sharing sharing) {
    shape.spare_pages = 120;
    shape.unrotated = sharing == Sharing::middle && !shape.separate_values;
    SharedWorld w(shape, sharing);
    const bool by_step = ++which % 2 == 0;
    const auto& spares = w.world.spares();
    if (removal != Removal::overwrite_slot) {
      const HeavyHitter<> policy({.heavy = 13, .recent = 3, .sinks = 1});
      same_shared(w, policy, seen, removal, SharedPages::copy, spares, 0, by_step);
    } else {
      const std::int32_t live = w.world.host().states[0].live_rows;
      const HeavyHitter<AccumulateParams, HeavyMode::promote> policy(
          {.heavy = live - 6, .recent = 5, .sinks = 0});
      same_shared(w, policy, seen, Removal::automatic, SharedPages::copy, spares, 0, by_step);
    }
  });
  CHECK(seen.spares > 50);
  CHECK(seen.half_copied > 10);
  CHECK(seen.statuses == std::set<Status>{Status::ok});
}

TEST_CASE("cuda::plan: too few spare pages, or such as are not the caller's own, refuse all",
          "[cuda][fault]") {
  WorldShape shape;
  shape.spare_pages = 40;
  shape.scope = GENERATE(TableScope::group, TableScope::head);
  shape.separate_values = GENERATE(false, true);
  const bool by_step = GENERATE(false, true);
  const HeavyHitter<> policy({.heavy = 13, .recent = 3, .sinks = 1});
  enum class Fault { none, few, empty, twice, negative, beyond, in_a_table, held, nothing_goes };
  for (const Fault fault : {Fault::none,
                            Fault::few,
                            Fault::empty,
                            Fault::twice,
                            Fault::negative,
                            Fault::beyond,
                            Fault::in_a_table,
                            Fault::held,
                            Fault::nothing_goes}) {
    INFO(static_cast<int>(fault));
    SharedWorld w(shape, Sharing::every_second);
    std::vector<std::int32_t> spares = w.world.spares();
    if (fault == Fault::few) { spares.resize(1); }
    if (fault == Fault::empty) { spares.clear(); }
    if (fault == Fault::twice || fault == Fault::nothing_goes) { spares.back() = spares[3]; }
    if (fault == Fault::negative) { spares.back() = -1; }
    if (fault == Fault::beyond) { spares.back() = w.world.pages(); }
    if (fault == Fault::in_a_table) { spares.back() = w.world.host().ids[0]; }
    if (fault == Fault::held) {
      w.counts[static_cast<std::size_t>(spares.back())] = 2;
      w.device_counts->upload(w.counts);
    }
    Seen seen;
    const auto run = [&](const auto& by) {
      same_shared(w, by, seen, Removal::stable_pack, SharedPages::copy, spares, 0, by_step);
    };
    if (fault == Fault::nothing_goes) {
      run(HeavyHitter<>({.heavy = 90, .recent = 3, .sinks = 1}));
    } else {
      run(policy);
    }
    const Status want = fault == Fault::none || fault == Fault::nothing_goes ? Status::ok
                        : fault == Fault::few || fault == Fault::empty       ? Status::out_of_pages
                                                                             : Status::bad_options;
    CHECK(seen.statuses == std::set<Status>{want});
  }
}

TEST_CASE("cuda::plan: tables with planes in common must remove their rows in the same way",
          "[cuda][parity][fault]") {
  WorldShape shape;
  shape.scope = TableScope::head;
  shape.sequences = 1;
  shape.spare_pages = 60;
  Seen seen;
  for (const Sharing sharing : {Sharing::none, Sharing::front, Sharing::odd_tables}) {
    for (const SharedPages shared : {SharedPages::leave, SharedPages::copy}) {
      for (const std::int32_t recent : {10, 28}) {  // many rows go, or one: a slot is overwritten
        INFO(static_cast<int>(sharing) << ", " << static_cast<int>(shared) << ", " << recent);
        SharedWorld w(shape, sharing);
        w.common = true;
        same_shared(w,
                    StreamingSink<SinkForm::exact>({.sinks = 3, .recent = recent}),
                    seen,
                    Removal::automatic,
                    shared,
                    w.world.spares());
      }
    }
  }
  CHECK(seen.statuses.count(Status::ok) == 1);
  CHECK(seen.statuses.count(Status::planes_disagree) == 1);
  CHECK(seen.overwritten > 0);
}

#if defined(KVTRIM_EMULATED)
TEST_CASE("cuda::step: shared pages cost two launches, copied where slots are overwritten three",
          "[cuda]") {
  namespace emulator = kvtrim::emulator;
  WorldShape shape;
  shape.spare_pages = 40;
  const HeavyHitter<> policy({.heavy = 8, .recent = 3, .sinks = 1});
  const StreamingSink<> by_page({.sinks = 2, .recent = 9});
  const auto launches =
      [&](const auto& by, bool counted, SharedPages shared, Removal removal = Removal::automatic) {
        SharedWorld w(shape, Sharing::front);
        cuda::DeviceTables tables;
        tables.ids = w.world.device().ids.data();
        DeviceSide side(w.world, by);
        cuda::DeviceStepOptions options;
        const DeviceBuffer<std::int32_t> spares(w.world.spares(), "spare pages");
        const DeviceBuffer<std::int32_t> count(std::vector<std::int32_t>{40}, "spare count");
        options.spare_pages = spares.data();
        options.spare_count = count.data();
        options.shared = shared;
        options.removal = removal;
        CacheView view = w.device_view();
        if (!counted) { view.writable = {}; }
        ok(cuda::prepare(by, view, {}, side.workspace.shape));
        emulator::Graph graph;
        emulator::capture = &graph;
        ok(cuda::step(by, view, {}, side.workspace, tables, nullptr, options));
        emulator::capture = nullptr;
        emulator::launches().clear();
        ok(cuda::step(by, view, {}, side.workspace, tables, nullptr, options));
        return emulator::launches().size();
      };
  CHECK(launches(policy, false, SharedPages::leave) == 6);
  CHECK(launches(policy, false, SharedPages::copy) == 7);  // spare pages are checked
  CHECK(launches(policy, true, SharedPages::leave) == 8);
  CHECK(launches(policy, true, SharedPages::copy, Removal::fill_holes) == 8);
  CHECK(launches(policy, true, SharedPages::copy, Removal::overwrite_slot) == 9);
  CHECK(launches(by_page, true, SharedPages::leave) == 4);
}
#endif
