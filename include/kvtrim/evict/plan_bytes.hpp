// SPDX-License-Identifier: Apache-2.0
#pragma once

// Plans that outlive the workspace they were made in. Bytes from outside may say anything: all that a reader follows is
// checked once, here.

#include <kvtrim/evict/detail/check_plan.hpp>
#include <kvtrim/evict/plan.hpp>
#include <kvtrim/evict/plan_options.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace kvtrim {

namespace detail {

// The last enumerator of a status that a plan can have.
inline constexpr Status last_status = Status::torn;

// Whether the header's counts are those of a block of this size, and every bool and enumerator is valid.
[[nodiscard]] inline bool has_plan_layout(std::span<const std::byte> bytes) noexcept {
  const auto size = static_cast<std::int64_t>(bytes.size());
  if (bytes.size() < sizeof(PlanHeader)) { return false; }
  const auto is_bool = [&](std::int64_t at) {
    return std::to_integer<unsigned>(bytes[static_cast<std::size_t>(at)]) <= 1U;
  };
  if (!is_bool(offsetof(PlanHeader, separate_values))) { return false; }
  PlanHeader x;
  std::memcpy(static_cast<void*>(&x), bytes.data(), sizeof x);
  if (x.magic != plan_magic || x.stage > PlanStage::unchecked || x.status > last_status ||
      x.positions > PositionMode::sinks_follow || x.scope > TableScope::head || x.page_size < 1 ||
      x.spares_needed < 0) {
    return false;
  }
  // Counts whose products are within the block: then no offset can overflow.
  std::int64_t product = 1;
  for (const std::int32_t count : {x.sequences, x.layers, x.kv_heads, x.max_rows}) {
    if (count < 0 || (count > 0 && product > size / count)) { return false; }
    product *= std::max(count, 1);
  }
  const PlanLayout layout(x);
  if (layout.bytes != size) { return false; }
  for (std::int64_t t = 0; t < x.sequences * layout.tables; ++t) {
    const std::int64_t at = layout.table_plans + t * static_cast<std::int64_t>(sizeof(TablePlan));
    for (const std::size_t member : {offsetof(TablePlan, evicts),
                                     offsetof(TablePlan, ordered_after),
                                     offsetof(TablePlan, replaced),
                                     offsetof(TablePlan, positions_known)}) {
      if (!is_bool(at + static_cast<std::int64_t>(member))) { return false; }
    }
  }
  return true;
}

// Whether every list fits its space, and names rows and entries that the table had.
[[nodiscard]] inline bool has_sound_lists(const PlanView& plan) noexcept {
  const PlanHeader& x = plan.header();
  const std::int32_t max_pages = pages_for(x.max_rows, x.page_size);
  const auto within = [](std::int32_t i, std::int32_t low, std::int32_t high) {
    return i >= low && i <= high;
  };
  const auto sound_table = [&](SequenceId s, std::int32_t t) {
    const TablePlan& p = plan.table(s, t);
    return p.status <= last_status && p.removal <= Removal::stable_pack &&
           within(p.extent_before, 0, x.max_rows) && within(p.live_before, 0, p.extent_before) &&
           within(p.live_after, 0, p.live_before) && within(p.append_row, -1, p.extent_before) &&
           within(
               p.first_row, 0, p.live_before == 0 ? p.first_row : x.max_rows - p.extent_before) &&
           within(p.pages_before, 0, max_pages) && within(p.pages_after, 0, p.pages_before) &&
           within(p.reserved_before,
                  0,
                  p.live_before == 0 ? p.reserved_before : max_pages - p.pages_before) &&
           within(p.reserved_after, 0, p.reserved_before) && within(p.released, 0, 2 * max_pages) &&
           within(p.shared_kept, 0, p.pages_after) && within(p.spare_pages, 0, p.pages_after) &&
           std::ranges::all_of(plan.sources(s, t), [&, to = 0](std::int32_t e) mutable {
             const bool moves_down = e < 0 || e >= to++;
             return moves_down && within(e, -1, p.pages_before + p.reserved_before - 1) &&
                    (e >= 0 || !p.evicts || p.removal != Removal::drop_pages);
           });
  };
  const auto sound_head = [&](SequenceId s, LayerId l, HeadId h) {
    const TablePlan& p = plan.table(s, plan.table_of(l, h));
    const HeadPlan& q = plan.head(s, l, h);
    const bool packs =
        p.evicts && p.removal != Removal::overwrite_slot && p.removal != Removal::drop_pages;
    const bool counts = within(q.kept, 0, x.max_rows) &&
                        within(q.evicted, 0, x.max_rows - q.kept) &&
                        within(q.victim, -1, p.extent_before - 1) && within(q.has_ranks, 0, 1) &&
                        (!packs || q.kept == p.live_after) &&
                        (!p.evicts || p.removal != Removal::overwrite_slot || q.victim >= 0);
    std::int32_t last = -1;
    return counts &&
           std::ranges::all_of(plan.kept_list(s, l, h),
                               [&](std::int32_t r) {
                                 const bool ascends = within(r, last + 1, p.extent_before - 1);
                                 last = r;
                                 return ascends;
                               }) &&
           std::ranges::all_of(plan.ranks(s, l, h),
                               [&](std::int32_t r) { return within(r, 0, q.kept - 1); });
  };
  std::int64_t evicted = 0;
  std::int64_t kept = 0;
  for (std::int32_t i = 0; i < x.sequences; ++i) {
    const SequenceId s{i};
    for (std::int32_t t = 0; t < plan.tables(); ++t) {
      if (!sound_table(s, t)) { return false; }
    }
    for (std::int32_t item = 0; item < x.layers * x.kv_heads; ++item) {
      const LayerId l{item / x.kv_heads};
      const HeadId h{item % x.kv_heads};
      if (!sound_head(s, l, h)) { return false; }
      const std::int32_t gone = plan.head(s, l, h).evicted;
      evicted += gone;
      kept += plan.table(s, plan.table_of(l, h)).live_before - gone;
    }
  }
  return evicted == x.evicted_rows && kept == x.kept_rows;
}

}  // namespace detail

/// A plan that owns its memory: to keep, to send, to compare later.
///
/// \par Allocation
/// on construction and copy
class Plan {
 public:
  /// No plan.
  Plan() = default;
  /// Copies `view`.
  explicit Plan(const PlanView& view)
      : bytes_(view.bytes().begin(), view.bytes().end()), failure_(view.status()) {}
  /// Reads a plan back from what `PlanView::bytes` gave: to look at, not to apply.
  ///
  /// \returns an empty plan with status `bad_plan` if `bytes` are not a plan: any count, row or enumerator out of its range
  [[nodiscard]] static Plan from_bytes(std::span<const std::byte> bytes) {
    Plan plan;
    if (detail::has_plan_layout(bytes)) { plan.bytes_.assign(bytes.begin(), bytes.end()); }
    if (!detail::has_sound_lists(plan.view())) { plan.bytes_.clear(); }
    if (plan.bytes_.empty()) {
      plan.failure_ = Status::bad_plan;
      return plan;
    }
    using detail::PlanStage;
    PlanStage& stage = plan.header().stage;
    const bool done = stage == PlanStage::applied || stage == PlanStage::committed;
    stage = done ? PlanStage::committed : PlanStage::unchecked;
    return plan;
  }
  /// Reads a plan that may be applied to `view`: all that apply, commit and a sink follow is checked against it, so that
  /// bytes from anywhere do what some plan of this view's planner would do, or nothing.
  ///
  /// Which rows stay is not judged, nor the statistics `nan_count`, `shared_kept` and `replaced`.
  ///
  /// \param view     the cache, as it was when the plan was made; `check_layout(view)` passed once
  /// \param options  those that it was made with: the rerotator, and the spare pages that it may take, from the front
  /// \returns an empty plan that says why: `bad_plan`; `stale_plan` if a table that it evicts from has changed, or it was
  ///   applied before; a table's fault; `step_open`, `eviction_open`
  /// \par Complexity
  /// O(rows and entries of the tables that it evicts from), O(rows log rows) where slot order is not position order
  [[nodiscard]] static Plan from_bytes(std::span<const std::byte> bytes,
                                       const CacheView& view,
                                       const PlanOptions& options = {}) {
    Plan plan = from_bytes(bytes);
    if (plan.bytes_.empty()) { return plan; }
    const bool fresh = plan.header().stage == detail::PlanStage::unchecked || plan.empty();
    const Status status =
        fresh ? detail::PlanCheck(plan.view(), view, options).run() : Status::stale_plan;
    plan.header().stage = detail::PlanStage::planned;
    if (status != Status::ok) {
      plan.bytes_.clear();
      plan.failure_ = status;
    }
    return plan;
  }

  /// The plan, to read; valid while this object is neither changed nor moved from.
  [[nodiscard]] PlanView view() const noexcept {
    return bytes_.empty() ? PlanView(failure_)
                          : PlanView(*reinterpret_cast<const detail::PlanHeader*>(bytes_.data()));
  }
  /// The plan, to apply; valid as `view()`.
  [[nodiscard]] PlanRef ref() noexcept {
    return bytes_.empty() ? PlanRef(failure_) : PlanRef(header());
  }
  /// Whether nothing goes; true for a plan that was moved from.
  [[nodiscard]] bool empty() const noexcept { return view().empty(); }

 private:
  [[nodiscard]] detail::PlanHeader& header() noexcept {
    return *reinterpret_cast<detail::PlanHeader*>(bytes_.data());
  }

  std::vector<std::byte> bytes_;
  Status failure_ = Status::ok;
};

}  // namespace kvtrim
