// SPDX-License-Identifier: Apache-2.0
// Any view whose buffers have the bytes that `required_bytes` names: what `check_layout` accepts is planned, applied and
// committed, whatever its tables say, and nothing outside of the buffers is touched. A plan is usable only if the tables are
// sound, and leaves them sound.
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/key_diff.hpp>

#include "fuzz/hostile_view.hpp"
#include "support/by_score.hpp"

#include <optional>
#include <span>
#include <utility>

using namespace kvtrim;
using namespace kvtrim::fuzz;

namespace {

// An engine whose tables are not those of a view that says CSR.
struct Elsewhere {
  void update(const TableUpdate&) noexcept {}
  bool release(PageId) noexcept { return true; }
};

template <class P>
void evict(const P& policy, HostileView& world, Reader& in) {
  const CacheView& view = world.view;
  Observation obs;
  const ByteRange range{
      0, saturated_product({view.sequences, view.layers, view.kv_heads, world.max_rows, 4})};
  if (range.end > 1 << 20) { return; }
  obs.scores = SequencePlane::dense(
      reinterpret_cast<float*>(world.block(range)), view.layers, view.kv_heads, world.max_rows);
  for (std::int64_t i = 0; i + 4 <= range.end; i += 4) {
    const float score = in.number<std::int8_t>();
    std::memcpy(obs.scores.base + i, &score, 4);
  }
  PlanOptions options{.removal = static_cast<Removal>(in.below(5)),
                      .shared = static_cast<SharedPages>(in.below(2)),
                      .reserved = static_cast<ReservedPages>(in.below(2))};
  std::vector<PageId> spares;  // in no table, and with one owner
  for (std::int32_t p = 0; p < view.pages && spares.size() < 3 && in.coin(); ++p) {
    if (world.names(PageId{p})) { continue; }
    if (!view.writable.all() && !view.writable(PageId{p}, {}, {})) { continue; }
    spares.push_back(PageId{p});
  }
  options.spare_pages = spares;
  std::optional<Rerotator> rerotator;
  const std::vector<double> frequencies{0.5};
  if (in.coin()) {
    try {
      const Rope rope{.inverse_frequencies = frequencies, .dim = 2, .same_for_all_layers = true};
      rerotator.emplace(view, rope, PositionMode::in_cache);
      options.rerotator = &*rerotator;
    } catch (const std::invalid_argument&) {}
  }
  const std::size_t needed = plan_workspace_bytes(policy, plan_shape(view, obs));
  if (needed > std::size_t{1} << 28U) { return; }  // tables of no sequence may be of any size
  std::vector<std::byte> workspace(needed);
  const PlanRef made = plan(policy, view, obs, workspace, options);
  require(made.status() != Status::workspace_too_small, "the workspace is what was asked for");
  if (!usable(made.status())) { return; }
  require(check_lengths(view).status == Status::ok, "a plan over lengths that are not sound");
  std::vector<std::uint64_t> scratch(static_cast<std::size_t>(check_tables_words(view.pages)));
  require(made.empty() || check_entries(view, scratch).status == Status::ok,
          "a plan over tables that are not sound");
  const Rerotator keep;
  const Status applied = apply(made, view, rerotator ? *rerotator : keep);
  require(applied == Status::ok, "usable, but not applied");
  if (view.table.indptr != nullptr || view.last_page_len != nullptr) {
    Elsewhere sink;
    require(usable(commit(made, view, sink).status), "applied, but not committed");
    return;
  }
  std::vector<PageId> freed(static_cast<std::size_t>(view.pages));
  DenseTables sink(view, world.ids, world.lengths, world.counts, freed);
  const std::int64_t gone = made.evicted_rows();
  require(usable(commit(made, view, sink).status), "applied, but not committed");
  // Counts from outside may be below the number of tables: then a page that one of them gave back seems to be another's own.
  const Status after = check_tables(view, scratch).status;
  require(gone == 0 || view.reserved_pages != nullptr || after == Status::ok ||
              (after == Status::page_twice && view.writable.ref_counts != nullptr),
          "tables are broken");
}

}  // namespace

KVTRIM_FUZZ_TARGET(view) {
  Reader in(input);
  HostileView world;
  if (!world.make(in)) { return; }
  try {
    check_layout(world.view);
  } catch (const std::invalid_argument&) { return; }
  const std::int32_t keep = in.below(8);
  switch (in.below(5)) {
    case 0:
      return evict(
          test::ByScore{.keep = keep, .sinks = in.below(3), .recent = in.below(3)}, world, in);
    case 1:
      return evict(StreamingSink({.sinks = in.below(3), .recent = 1 + keep}), world, in);
    case 2:
      return evict(
          PageSelector<ExternalParams>({.budget = 1 + keep, .sinks = 0, .window = 1}), world, in);
    case 3:
      return evict(KeyDiff({.budget = 1 + keep, .sinks = 0, .recent = 0}), world, in);
    default:
      return evict(HeavyHitter({.heavy = keep, .recent = 1}), world, in);
  }
}
