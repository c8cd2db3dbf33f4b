// SPDX-License-Identifier: Apache-2.0
#pragma once

// The host's `plan`, on the device: the specification is kvtrim::plan. Equal scores give equal kept rows, bit for bit.
//
// Stages, in order, each a header of detail/: check (what the tables and the planes say is never trusted), open (the policy's
// demand), the scorer's, select (rows, or pages), close (pages, moves and costs of a table) with finish (totals) in its last
// block, lists. Between select and close, where pages are shared: shared (what stays because it must not be written, and a second
// choice). Where pages leave by position, open and close are one launch. Paths depend on bounds alone, so all of it can be
// captured into a graph.
//
// Differs from the host: a fault of a sequence refuses that sequence alone, the others are planned; rows that are not in order
// are renumbered only where they were before (`rows_unordered`); a page that must not be written and occurs twice in one table is not noticed.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/check.cuh>
#include <kvtrim/cuda/evict/detail/close.cuh>
#include <kvtrim/cuda/evict/detail/finish.cuh>
#include <kvtrim/cuda/evict/detail/fits.cuh>
#include <kvtrim/cuda/evict/detail/layout.cuh>
#include <kvtrim/cuda/evict/detail/open.cuh>
#include <kvtrim/cuda/evict/detail/pages.cuh>
#include <kvtrim/cuda/evict/detail/renumber.cuh>
#include <kvtrim/cuda/evict/detail/shared.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/cuda/evict/device_scorer.cuh>
#include <kvtrim/cuda/select/top_k.cuh>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/policy.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace kvtrim::cuda {

namespace detail {

/// Refuses, at compile time, the kinds of policies that have rules without kernels: planned by the rest of their rules, they
/// would be other policies.
template <Policy P>
struct DevicePolicy {
  static_assert(
      !requires(const P& p) { p.adaptive(); },
      "kvtrim::cuda: heads that share a budget (AdaKV) have no kernels: plan on the host, or "
      "give each head its share as `budgets` and plan the inner policy");
  static_assert(
      !requires(const P& p) { p.second_stage(); },
      "kvtrim::cuda: policies with a second stage (CriticalKV) have no kernels: plan on the "
      "host");
  using Scores = std::remove_cvref_t<decltype(std::declval<const P&>().scorer())>;
  static constexpr bool by_position = std::is_same_v<Scores, NoScores>;
  static constexpr bool by_page = PagePolicy<P>;

  /// Whether rows are listed: not where pages leave by position, or are chosen.
  [[nodiscard]] static bool lists_rows(Removal removal) noexcept {
    return !by_page && !(by_position && removal == Removal::drop_pages);
  }
  /// Working space of the selection.
  [[nodiscard]] static std::size_t select_bytes(const PlanBounds& shape, Removal removal) noexcept {
    return by_page               ? PageChoice::bytes(shape)
           : lists_rows(removal) ? top_k_workspace_bytes(select_bounds(shape))
                                 : 0;
  }
  /// Bytes of all of it. Rows are listed when the scorer has ended, and lie where it worked: at the end.
  [[nodiscard]] static std::size_t bytes(const PlanBounds& shape,
                                         Removal removal,
                                         std::size_t score_bytes,
                                         std::size_t scorer_bytes) noexcept {
    WorkspaceLayout layout;
    static_cast<void>(take_plan(layout, shape));
    const std::size_t lists = lists_rows(removal) ? row_list_bytes(shape) : 0;
    return layout.bytes() + select_bytes(shape, removal) + score_bytes +
           (lists < scorer_bytes ? scorer_bytes : lists);
  }
  /// The way of removal, before a table is looked at.
  [[nodiscard]] static Removal removal(const P& policy, Removal asked, bool out_of_place) noexcept {
    const Removal way = asked == Removal::automatic ? policy.removal() : asked;
    return way == Removal::automatic || out_of_place ? Removal::stable_pack : way;
  }
  /// Whether a choice of pages is one that adds up in no order: not where page scores of several heads are added.
  [[nodiscard]] static bool order_is_free(const P& policy, const CacheView& view) noexcept {
    if constexpr (by_page) {
      const bool alone = policy.unit() == PageUnit::per_table && view.scope == TableScope::head;
      const bool one = view.kv_heads == 1 &&
                       (view.layers == 1 ||
                        (policy.unit() != PageUnit::per_group && view.scope != TableScope::group));
      return alone || one || policy.page_scores().heads == Reduction::max;
    }
    return true;
  }
};

/// The policy's own scores of an observation.
template <class P>
struct OwnScores {
  using Scorer = DeviceScorer<typename DevicePolicy<P>::Scores>;
  const P& policy;
  const DeviceObservation& obs;

  [[nodiscard]] static std::size_t score_bytes(const PlanBounds& shape) noexcept {
    return Scorer::makes_scores ? score_list_bytes(shape) : 0;
  }
  [[nodiscard]] std::size_t bytes(const PlanBounds& shape) const noexcept {
    return Scorer::workspace_bytes(policy.scorer(), shape);
  }
  [[nodiscard]] bool check(const CacheView& view) const noexcept {
    return Scorer::check(policy.scorer(), view, obs);
  }
  [[nodiscard]] bool reads_positions() const noexcept {
    return Scorer::reads_positions(policy.scorer());
  }
  [[nodiscard]] cudaError_t launch(const CacheView& view,
                                   const ScorerCall& call,
                                   RowScores& rows) const noexcept {
    return Scorer::launch(policy.scorer(), view, obs, call, rows);
  }
};

/// Scores that were given.
struct ReadyScores {
  const GivenScores& given;

  [[nodiscard]] static std::size_t score_bytes(const PlanBounds&) noexcept { return 0; }
  [[nodiscard]] static std::size_t bytes(const PlanBounds&) noexcept { return 0; }
  [[nodiscard]] bool check(const CacheView&) const noexcept {
    const SequencePlane& p = given.scores;
    return p && p.element_bytes == 4 && aligned_to(4, p.base) &&
           (p.sequence_stride | p.layer_stride | p.head_stride | p.row_stride) % 4 == 0;
  }
  [[nodiscard]] static bool reads_positions() noexcept { return false; }
  [[nodiscard]] cudaError_t launch(const CacheView& view,
                                   const ScorerCall&,
                                   RowScores& rows) const noexcept {
    rows = {given.scores, {}, view.positions, false, nullptr};
    return cudaSuccess;
  }
};

/// What a plan is made for besides being looked at.
struct PlanPass {
  bool goes_on = false;  // moves and commits follow, with nothing in between: `step`
  bool written = false;  // the open step is written in all layers
};

/// The stages, whatever ranks the rows.
template <Policy P, class Ranking>
[[nodiscard]] cudaError_t plan_by(const P& policy,
                                  const CacheView& view,
                                  const Ranking& ranking,
                                  OpenInput input,
                                  const PlanWorkspace& workspace,
                                  cudaStream_t stream,
                                  const DevicePlanOptions& options,
                                  const PlanPass& pass = {}) noexcept {
  using Kind = DevicePolicy<P>;
  const PlanBounds& shape = workspace.shape;
  input.removal = Kind::removal(policy, options.removal, options.out_of_place);
  const std::size_t select_bytes = Kind::select_bytes(shape, input.removal);
  const std::size_t score_bytes = ranking.score_bytes(shape);
  const std::size_t scorer_bytes = ranking.bytes(shape);
  WorkspaceLayout layout;
  static_cast<void>(take_plan(layout, shape));
  const DevicePlan made = device_plan(workspace);
  if (!fits(view, shape) || made.report == nullptr || pools_of(view) > made.pools ||
      shape.max_evicted < 0 || shape.total_rows < 0 ||
      workspace.bytes < Kind::bytes(shape, input.removal, score_bytes, scorer_bytes) ||
      !ranking.check(view) || !Kind::order_is_free(policy, view) ||
      !rotation_fits(view, options.rotation, shape.max_rows) ||
      (options.out_of_place &&
       (options.spare_pages == nullptr || options.spare_count == nullptr))) {
    return cudaErrorInvalidValue;
  }
  input.named = options.removal != Removal::automatic;
  input.out_of_place = options.out_of_place;
  input.by_position = Kind::by_position;
  input.by_page = Kind::by_page;
  input.reads_positions = ranking.reads_positions();
  input.positions = options.rotation.mode;
  input.sinks = options.rotation.pristine.sinks;
  if constexpr (Kind::by_page) {  // sets of their own for layers that share a table
    const bool finer = policy.unit() == PageUnit::per_layer && view.scope == TableScope::group;
    if (finer && view.layers > 1) { input.refused = Status::unequal_budget; }
  }
  const dim3 threads(table_threads);
  const std::int64_t of_planes = device_layout_checks(view);
  const dim3 checks(check_grid(of_planes > made.all_tables() ? of_planes : made.all_tables()));
  const CheckInput checking{
      base_units(view), view_mark(view), !pass.goes_on, pass.written, options.rotation.mode};
  cudaError_t e = cudaSuccess;
  if (options.checks_spares()) {
    e = launch(clear_spares_kernel<>,
               dim3(1),
               threads,
               0,
               stream,
               view,
               made,
               options.spare_pages,
               options.spare_count);
    if (e != cudaSuccess) { return e; }
  }
  e = launch(check_kernel<>, checks, threads, 0, stream, view, made, checking);
  if (e != cudaSuccess || view.sequences == 0) { return e; }

  FinishInput finishing;
  finishing.close = {Kind::by_position, options.out_of_place, nullptr, options.reserved};
  finishing.close.copies_shared = options.copies(view);
  if (!options.rotation.unrotated_cache) { finishing.close.positions = options.rotation.mode; }
  finishing.close.sinks = options.rotation.pristine.sinks;
  finishing.options = options;
  finishing.goes_on = pass.goes_on;
  const dim3 tables(bounded_grid(made.all_tables()));
  bool closed = false;
  if constexpr (Kind::by_position) {
    if (input.removal == Removal::drop_pages) {
      closed = true;
      e = launch(open_and_close_kernel<P>,
                 checks,
                 threads,
                 0,
                 stream,
                 policy,
                 view,
                 made,
                 input,
                 finishing);
    }
  }
  if (!closed) {
    e = launch(open_kernel<P>, checks, threads, 0, stream, policy, view, made, input);
    std::byte* const rest = static_cast<std::byte*>(workspace.memory) + layout.bytes();
    std::byte* const scores = rest + select_bytes;
    RowScores rows;
    const ScorerCall call{shape,
                          made.active,
                          scores + score_bytes,
                          scorer_bytes,
                          stream,
                          made,
                          {{}, reinterpret_cast<float*>(scores), made.tasks}};
    if (e == cudaSuccess) { e = ranking.launch(view, call, rows); }
    if (e != cudaSuccess) { return e; }
    if constexpr (Kind::by_page) {
      WorkspaceLayout pages(rest, select_bytes);
      const PageChoice choice = PageChoice::take(pages, shape);
      finishing.close.stays = choice.stays;
      const dim3 block(select_threads);
      e = launch(page_scores_kernel<>,
                 dim3(bounded_grid(made.heads())),
                 block,
                 0,
                 stream,
                 view,
                 rows,
                 made,
                 policy.page_scores(),
                 choice);
      if (e != cudaSuccess) { return e; }
      e = launch(
          choose_pages_kernel<>, tables, block, 0, stream, view, made, policy.unit(), choice);
    } else {
      e = top_k(rows,
                made.tasks,
                select_bounds(shape),
                made.rows,
                made.nan_counts,
                rest,
                select_bytes,
                stream);
      // Copied, the first choice stands: a slot in a shared page alone is not overwritten.
      const bool leaves = options.shared == SharedPages::leave;
      const bool fixes = leaves || input.removal == Removal::overwrite_slot;
      if (e == cudaSuccess && fixes && input.removal != Removal::drop_pages &&
          !options.out_of_place && !view.writable.all()) {
        finishing.close.leaves_shared = leaves;
        e = choose_again(view,
                         rows,
                         made,
                         shape,
                         leaves,
                         finishing.close.positions != PositionMode::keep,
                         stream);
      }
    }
    if (e == cudaSuccess) {
      e = launch(close_kernel<>, tables, threads, 0, stream, view, made, finishing);
    }
  }
  // A step lists what leaves along with the moves; spare pages must be known before.
  if (e != cudaSuccess || (pass.goes_on && !options.takes_spares(view))) { return e; }
  return launch(lists_kernel<>, tables, threads, 0, stream, view, made, options.spare_pages);
}

/// Calls f(ranking, input) with what ranks the rows of a policy: its own scores of an observation.
template <Policy P, class F>
[[nodiscard]] cudaError_t with_ranking(const P& policy, const DeviceObservation& obs, F&& f) {
  OpenInput input;
  input.budgets = obs.budgets;
  input.budget_rows = obs.budget_rows;
  return f(OwnScores<P>{policy, obs}, input);
}
/// The same of scores that are given. A policy that keeps by position does not look at them.
template <Policy P, class F>
[[nodiscard]] cudaError_t with_ranking(const P& policy, const GivenScores& given, F&& f) {
  OpenInput input;
  input.budgets = given.budgets;
  input.budget_rows = given.budget_rows;
  if constexpr (DevicePolicy<P>::by_position) {
    const DeviceObservation none;
    return f(OwnScores<P>{policy, none}, input);
  } else {
    return f(ReadyScores{given}, input);
  }
}

}  // namespace detail

/// Device bytes that `plan` needs for views within `shape`. Pure, monotone in every field, a multiple of 256.
///
/// \param options  as the plan's: another way of removal than the policy's own may need lists of rows
template <Policy P>
[[nodiscard]] std::size_t plan_workspace_bytes(const P& policy,
                                               const PlanBounds& shape,
                                               const DevicePlanOptions& options = {}) noexcept {
  using Kind = detail::DevicePolicy<P>;
  const DeviceObservation none;
  const detail::OwnScores<P> own{policy, none};
  return Kind::bytes(shape,
                     Kind::removal(policy, options.removal, options.out_of_place),
                     own.score_bytes(shape),
                     own.bytes(shape));
}
/// The same for scores that are given.
template <Policy P>
[[nodiscard]] std::size_t plan_workspace_bytes(const P& policy,
                                               const PlanBounds& shape,
                                               const GivenScores&,
                                               const DevicePlanOptions& options = {}) noexcept {
  using Kind = detail::DevicePolicy<P>;
  return Kind::bytes(shape, Kind::removal(policy, options.removal, options.out_of_place), 0, 0);
}

/// Plans what an eviction by `policy` does to every sequence of `view`. Writes nothing except the workspace.
///
/// \param view       every pointer in it is a device pointer; its extents are those of the workspace's shape
/// \param obs        what the policy's scorer needs, and budgets; on the device
/// \param workspace  where the plan will lie: `device_plan(workspace)`
/// \param options    way of removal; shared pages; spare pages
/// \returns `cudaErrorInvalidValue` before any launch for a misaligned plane, planes that overlap or lack a stride, a view
///   without keys or one that does not fit the shape, a missing input or a workspace that is too small; otherwise the
///   launches' status. What lies on the device (ids, lengths, budgets, layer bases, arrays of planes) is checked there. A
///   fault of a sequence refuses it alone: `DevicePlan::refusals` says which are refused and why, `DeviceReport::status` is that
///   of the first, and `apply` leaves them as they are. A page that two sequences may write refuses both. A fault of the planes,
///   of the workspace or of the spare pages refuses all
/// \par Ties
/// the lower position is kept. NaN is the lowest class, counted in the report
/// \par Complexity
/// the scorer's, plus O(live rows) per KV head; O(table entries) if nothing goes
/// \par Stream
/// asynchronous on `stream`; never synchronises, allocates nothing, may be captured into a graph
template <Policy P>
[[nodiscard]] cudaError_t plan(const P& policy,
                               const CacheView& view,
                               const DeviceObservation& obs,
                               const PlanWorkspace& workspace,
                               cudaStream_t stream,
                               const DevicePlanOptions& options = {}) noexcept {
  return detail::with_ranking(policy, obs, [&](const auto& ranking, const auto& input) {
    return detail::plan_by(policy, view, ranking, input, workspace, stream, options);
  });
}

/// The same by ready-made scores: for every policy that has a path on the device, whether or not there are kernels for its own
/// scores. A policy that keeps by position does not look at them.
template <Policy P>
[[nodiscard]] cudaError_t plan(const P& policy,
                               const CacheView& view,
                               const GivenScores& given,
                               const PlanWorkspace& workspace,
                               cudaStream_t stream,
                               const DevicePlanOptions& options = {}) noexcept {
  return detail::with_ranking(policy, given, [&](const auto& ranking, const auto& input) {
    return detail::plan_by(policy, view, ranking, input, workspace, stream, options);
  });
}

}  // namespace kvtrim::cuda
