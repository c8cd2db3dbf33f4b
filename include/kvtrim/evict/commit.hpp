// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/generation.hpp>
#include <kvtrim/cache/head_ref.hpp>
#include <kvtrim/cache/table_update.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/evict/detail/freed_list.hpp>
#include <kvtrim/evict/detail/same_cache.hpp>
#include <kvtrim/evict/plan.hpp>

#include <cstdint>
#include <span>

namespace kvtrim {

/// What an eviction did. The lists of evicted positions and released pages stay in the plan (`PlanView::evicted`,
/// `PlanView::released`), ascending and tail first.
struct Report {
  Status status = Status::ok;       ///< `ok`, `over_budget`, or why nothing was committed
  std::int64_t evicted_rows = 0;    ///< rows gone, summed over layers and KV heads
  std::int64_t kept_rows = 0;       ///< rows left, summed likewise
  std::int64_t allocated_rows = 0;  ///< room for rows in the remaining pages, summed likewise
  std::int32_t dropped_pages = 0;   ///< pages that left a table
  std::int32_t released_pages = 0;  ///< of those, pages that nobody holds any longer
  std::int64_t bytes_moved = 0;     ///< bytes of keys, values and page planes written by apply
  std::int64_t nan_count = 0;       ///< NaN among the candidates' scores
  std::int32_t replaced = 0;  ///< tables that were packed in order in place of the way asked for
};

namespace detail {

// Takes the tables that cannot be committed out of the plan and the report: `stale_plan` where their sequence ended since,
// `torn` where they were changed. False if one is torn.
inline bool leave_out(const PlanRef& plan, const CacheView& view, Report& report) noexcept {
  plan.for_each_evicting([&](SequenceId s, std::int32_t t) {
    const LayerId l = view.first_layer(t);
    const HeadId h = view.first_head(t);
    TablePlan& table = plan.own_table(s, t);
    const bool applied = view.states == nullptr || view.state(s, l, h).applied;
    if (view.live_rows(s, l, h) == 0 || !applied) {
      table.status = Status::stale_plan;
    } else if (table.generation != table_generation(view, s, t, false)) {
      table.status = Status::torn;
    } else {
      return;
    }
    if (report.status != Status::torn) { report.status = table.status; }
    table.evicts = false;
    table.pages_after = table.reserved_after = 0;
    for_each_head(view, s, t, [&](const HeadRef& head) {
      const std::int64_t gone = plan.head(s, head.layer, head.head).evicted;
      report.evicted_rows -= gone;
      report.kept_rows -= table.live_before - gone;
    });
  });
  return report.status != Status::torn;
}

[[nodiscard]] inline SequenceState state_after(const PlanView& plan,
                                               const TablePlan& table,
                                               SequenceState state) noexcept {
  state.live_rows = table.live_after;
  state.append_row = table.append_row;
  state.ordered = table.ordered_after;
  state.steps = 0;
  state.rows_at_eviction = table.live_after;
  state.applied = false;
  if (plan.positions() == PositionMode::in_cache) { state.next_rope_position = table.live_after; }
  return state;
}

}  // namespace detail

/// Writes an applied plan's tables, lengths and states into `sink`, and then returns the dropped pages.
///
/// All tables are written before the first page is released, so `release` may call back: append, plan in another workspace,
/// end a sequence. Only the workspace that this plan lies in must stay as it is.
///
/// \param plan  applied to `view`
/// \param view  the cache; of the tables that the plan evicts from, unchanged since then, except that a sequence may have
///   ended: it has no rows, or its state is no longer `applied`. It is left out
/// \param sink  where the tables live
/// \returns the report. `not_applied`; `stale_plan`: committed before, or every sequence ended; `bad_plan`: the view is of
///   another shape than the plan: nothing was changed. `torn`: a
///   table was changed since `apply` moved its rows. It is lost; the others were committed
/// \par Complexity
/// O(table entries); no allocation
/// \par Thread-safety
/// one thread
template <TableSink S>
Report commit(const PlanRef& plan, const CacheView& view, S& sink) noexcept {
  Report report;
  report.status = plan.status();
  detail::PlanHeader* const header = plan.own_header();
  if (!usable(plan.status()) || header == nullptr) { return report; }
  using detail::PlanStage;
  if (header->stage == PlanStage::planned || header->stage == PlanStage::unchecked) {
    report.status = Status::not_applied;
  } else if (header->stage == PlanStage::committed && !plan.empty()) {
    report.status = Status::stale_plan;
  } else if (!detail::same_shape(plan, view)) {
    report.status = Status::bad_plan;
  }
  if (!usable(report.status)) { return report; }
  header->stage = PlanStage::committed;
  report.evicted_rows = plan.evicted_rows();
  report.kept_rows = plan.kept_rows();
  report.bytes_moved = plan.bytes_moved();
  report.nan_count = plan.nan_count();
  const bool whole = detail::leave_out(plan, view, report);
  KVTRIM_ASSERT(whole && "a table was changed between apply and commit: its rows are lost");
  bool any = plan.empty();
  for (std::int32_t i = 0; i < plan.sequences() * plan.tables(); ++i) {
    const SequenceId s{i / plan.tables()};
    const std::int32_t t = i % plan.tables();
    const TablePlan& table = plan.table(s, t);
    report.allocated_rows += static_cast<std::int64_t>(table.pages_after + table.reserved_after) *
                             view.page_size * view.layers_per_table() * view.heads_per_table();
    if (!table.evicts) { continue; }
    any = true;
    report.replaced += table.replaced ? 1 : 0;
    static_cast<void>(detail::raise_generation(view, view.table_index(s, t)));
    const LayerId l = view.first_layer(t);
    const HeadId h = view.first_head(t);
    sink.update(TableUpdate{s,
                            t,
                            l,
                            h,
                            plan.k_pages(s, t),
                            plan.v_pages(s, t),
                            table.pages_before + table.reserved_before,
                            detail::state_after(plan, table, view.state(s, l, h)),
                            plan.sources(s, t)});
  }
  if (any && report.status == Status::stale_plan) { report.status = plan.status(); }
  if constexpr (requires { sink.finish(); }) {
    static_assert(noexcept(sink.finish()), "kvtrim::commit: a sink's finish() must be noexcept");
    sink.finish();
  }
  plan.for_each_evicting([&](SequenceId s, std::int32_t t) {
    const LayerId l = view.first_layer(t);
    const HeadId h = view.first_head(t);
    for (const PageId p : plan.released(s, t)) {
      ++report.dropped_pages;
      report.released_pages += sink.release(ReleasedPage{p, s, t, l, h}) ? 1 : 0;
      KVTRIM_ASSERT(header->stage == PlanStage::committed && "the plan's workspace was used again");
    }
  });
  return report;
}

/// A ready-made `TableSink`: writes tables and lengths into an engine's dense arrays and collects the pages that became
/// free. Entries that stay keep their flag bits (`PageTable::id_mask`); those of new pages have none.
///
/// \par Allocation
/// none: the caller provides the memory
class DenseTables {
 public:
  /// \param view        the view that the plan was made from (its table is dense)
  /// \param ids         the same array as `view.table.ids`, writable
  /// \param lengths     the same array as `view.lengths`, writable; null: none
  /// \param ref_counts  the same array as `view.writable.ref_counts`, writable; null: every dropped page is free
  /// \param[out] freed  receives the free pages, tail first per table; if it is too small, the rest is only counted
  /// \param[out] freed_tables  receives the table that each of them left (`CacheView::table_index`): where layers or KV heads
  ///   have pools of their own, that says which pool it goes back to. As long as `freed`; empty: not wanted
  DenseTables(const CacheView& view,
              std::int32_t* ids,
              std::int32_t* lengths,
              std::int32_t* ref_counts,
              std::span<PageId> freed,
              std::span<std::int64_t> freed_tables = {}) noexcept
      : view_(view),
        ids_(ids),
        lengths_(lengths),
        ref_counts_(ref_counts),
        freed_(freed),
        freed_tables_(freed_tables) {
    KVTRIM_ASSERT((freed_tables.empty() || freed_tables.size() == freed.size()) &&
                  "as many tables as freed pages");
    KVTRIM_ASSERT(view.table.indptr == nullptr);
  }

  /// Stores one table.
  void update(const TableUpdate& u) noexcept {
    std::int32_t* const k =
        ids_ + view_.table.rows(u.sequence, u.layer, u.head) * view_.table.row_stride;
    std::int32_t* const v = k + view_.table.v_offset;
    // Ascending, and no entry moves up: none is overwritten before it is read.
    for (std::size_t e = 0; e < static_cast<std::size_t>(u.pages_before); ++e) {
      const bool used = e < u.k_pages.size();
      const std::int32_t source = used && e < u.sources.size() ? u.sources[e] : -1;
      KVTRIM_ASSERT(source < 0 || source >= static_cast<std::int32_t>(e));
      const std::int32_t k_entry = entry_of(k, source, used ? u.k_pages[e] : null_page);
      const std::int32_t v_entry = entry_of(v, source, used ? u.v_pages[e] : null_page);
      k[e] = k_entry;
      v[e] = v_entry;
    }
    if (lengths_ != nullptr) {
      lengths_[view_.length_rows(u.sequence, u.layer, u.head)] = u.state.live_rows;
    }
    if (view_.states != nullptr) {
      view_.states[raw(u.sequence) * view_.tables_per_sequence() + u.table] = u.state;
    }
  }
  /// Drops one reference.
  bool release(const ReleasedPage& p) noexcept {
    if (!detail::drop_reference(ref_counts_, view_.writable.index(p.page, p.layer, p.head))) {
      return false;
    }
    freed_.add(p.page);
    freed_tables_.add(view_.table_index(p.sequence, p.table));
    return true;
  }
  /// Pages that became free so far.
  [[nodiscard]] std::span<const PageId> freed() const noexcept { return freed_.all(); }
  /// Tables that they left; empty if that was not wanted.
  [[nodiscard]] std::span<const std::int64_t> freed_tables() const noexcept {
    return freed_tables_.all();
  }

 private:
  // Entry `source` of the old table where it names page `p`; otherwise the bare id.
  [[nodiscard]] std::int32_t entry_of(const std::int32_t* entries,
                                      std::int32_t source,
                                      PageId p) const noexcept {
    if (source >= 0 && view_.table.page(entries[source]) == p) { return entries[source]; }
    return p == null_page ? view_.table.null_id : raw(p);
  }

  CacheView view_;
  std::int32_t* ids_;
  std::int32_t* lengths_;
  std::int32_t* ref_counts_;
  detail::FreedList<PageId> freed_;
  detail::FreedList<std::int64_t> freed_tables_;
};
static_assert(TableSink<DenseTables>);

}  // namespace kvtrim
