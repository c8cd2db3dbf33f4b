// SPDX-License-Identifier: Apache-2.0
#pragma once

// From scores to a plan. Everything that can fail fails here, before a byte of the cache is written.
// Over 400 lines: one class whose steps share the plan in the making; tables and rows are in detail/.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/check_view.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/core/arena.hpp>
#include <kvtrim/core/executor.hpp>
#include <kvtrim/evict/detail/plan_memory.hpp>
#include <kvtrim/evict/detail/row_choice.hpp>
#include <kvtrim/evict/detail/share_budgets.hpp>
#include <kvtrim/evict/plan.hpp>
#include <kvtrim/evict/plan_options.hpp>
#include <kvtrim/observe/plan_shape.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/page_scores.hpp>
#include <kvtrim/score/scorer.hpp>
#include <kvtrim/select/pages.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

namespace kvtrim {

namespace detail {

template <Policy P, Executor E>
class Planner : public RowChoice {
 public:
  using S = PolicyScorer<P>;
  static constexpr bool by_position = std::is_same_v<S, NoScorer>;
  static constexpr bool by_page = PagePolicy<P>;
  static constexpr bool shares = AdaptivePolicy<P>;  // heads share one budget
  static constexpr bool two_stages = TwoStagePolicy<P>;
  static constexpr bool saves = shares || LayerScorer<S>;  // scores come first, all of them
  static_assert(!shares || !by_position, "heads cannot compete without scores");
  static_assert(!by_page || !(shares || two_stages), "pages are chosen by score alone");

  Planner(const P& policy,
          const CacheView& view,
          const Observation& obs,
          const PlanOptions& options,
          const E& executor) noexcept
      : RowChoice(view, options),
        policy_(policy),
        obs_(obs),
        executor_(executor),
        scorer_(policy.scorer()),
        given_(!by_position && !reads_given_scores<S> && static_cast<bool>(obs.scores)),
        given_pages_(by_page && obs.page_scores.data != nullptr) {}

  [[nodiscard]] PlanView run(std::span<std::byte> workspace) noexcept {
    Arena arena(workspace);
    const auto check = take_check(arena, view_.pages);
    if (!arena.ok()) { return PlanView(Status::workspace_too_small); }
    if (const ViewFault fault = check_tables(view_, check); fault.status != Status::ok) {
      return PlanView(fault.status);
    }
    if (const Status status = check_observation(); status != Status::ok) {
      return PlanView(status);
    }
    const PlanShape shape = plan_shape(view_, obs_, executor_.workers());
    mem_ = PlanMemory::take(arena, shape, plan_needs(policy_, shape, given_ || given_pages_));
    if (!arena.ok()) { return PlanView(Status::workspace_too_small); }
    plan_ = PlanView(mem_.header);
    PlanHeader& header = *mem_.header;
    header.separate_values = view_.table.v_offset != 0;
    header.positions =
        options_.rerotator == nullptr ? PositionMode::keep : options_.rerotator->mode();
    header.generation = generation_of(view_);
    if constexpr (shares) {
      BudgetSharing<P> sharing(policy_, view_, obs_, mem_);
      save_scores([&](SequenceId s, LayerId l, HeadId) { return sharing.exceeds_budget(s, l); });
      sharing.share_budgets([&](SequenceId s, LayerId l, HeadId h) { return saved(s, l, h); });
    }
    if (const Status status = open_tables(); status != Status::ok) { return refuse(status); }
    if constexpr (saves && !shares) {
      if (!given_ && !given_pages_) {
        save_scores([&](SequenceId s, LayerId l, HeadId) { return any_evicts(s, l); });
      }
    }

    for_each_item([&](SequenceId s,
                      LayerId l,
                      HeadId h,
                      std::int32_t t,
                      SelectScratch& scratch,
                      std::int64_t& nan) {
      if (table(s, t).evicts && !(by_position && table(s, t).removal == Removal::drop_pages)) {
        choose(s, l, h, t, scratch, nan, false);
      }
    });
    if constexpr (by_page) {
      if (const Status status = choose_page_sets(); !usable(status)) { return refuse(status); }
    }
    bool again = false;
    for_each_table([&](SequenceId s, std::int32_t t) { again = needs_second_pass(s, t) || again; });
    if (again) {
      for_each_item([&](SequenceId s,
                        LayerId l,
                        HeadId h,
                        std::int32_t t,
                        SelectScratch& scratch,
                        std::int64_t& nan) {
        if (mem_.second_pass[flag_index(s, t)] != 0) { choose(s, l, h, t, scratch, nan, true); }
      });
    }
    Status status = Status::ok;
    for_each_table([&](SequenceId s, std::int32_t t) {
      const Status closed = close_table(s, t);
      if (usable(status) && (closed != Status::ok)) { status = closed; }
    });
    if (usable(status) && !common_planes_agree()) { status = Status::planes_disagree; }
    if (!usable(status)) { return refuse(status); }
    header.status = status;
    for (const std::int64_t n : mem_.nan_counts) { header.nan_count += n; }
    return plan_;
  }

 private:
  [[nodiscard]] Status check_observation() const noexcept {
    if (given_pages_) { return Status::ok; }
    if constexpr (two_stages) {
      const Status status = FactorScorer<P>(policy_.second_stage()).check(view_, obs_);
      if (status != Status::ok) { return status; }
    }
    return given_ ? ExternalScorer{}.check(view_, obs_) : scorer_.check(view_, obs_);
  }

  void score(SequenceId s,
             LayerId l,
             HeadId h,
             SelectScratch& scratch,
             std::span<float> scores) const noexcept {
    if (given_) {
      ExternalScorer{}.score({view_, s, l, h}, obs_, scratch.scorer, scores);
    } else {
      scorer_.score({view_, s, l, h}, obs_, scratch.scorer, scores);
    }
  }

  // Scores of (sequence, layer, KV head) that were computed before the rows are chosen.
  [[nodiscard]] std::span<float> saved(SequenceId s, LayerId l, HeadId h) const noexcept {
    const std::int64_t heads = LayerScorer<S> && !shares ? 1 : view_.kv_heads;
    const std::int64_t item = (static_cast<std::int64_t>(raw(s)) * view_.layers + raw(l)) * heads +
                              (heads == 1 ? 0 : raw(h));
    const std::int64_t rows = mem_.header->max_rows;
    return mem_.saved_scores.subspan(index(item * rows), index(extent_of(s, l, h)));
  }
  [[nodiscard]] std::int32_t extent_of(SequenceId s, LayerId l, HeadId h) const noexcept {
    return view_.live_rows(s, l, h) + (view_.state(s, l, h).append_row >= 0 ? 1 : 0);
  }

  // Scores that are common to a layer are computed once for it.
  template <class Wanted>
  void save_scores(Wanted&& wanted) noexcept {
    for_each_item([&](SequenceId s,
                      LayerId l,
                      HeadId h,
                      std::int32_t,
                      SelectScratch& scratch,
                      std::int64_t&) {
      if ((LayerScorer<S> && !given_ && raw(h) > 0) || !wanted(s, l, h)) { return; }
      const auto scores = saved(s, l, h);
      score(s, l, h, scratch, scores);
      if constexpr (LayerScorer<S> && shares) {
        for (std::int32_t other = 1; !given_ && other < view_.kv_heads; ++other) {
          const auto copy = saved(s, l, HeadId{other});
          std::copy_n(scores.begin(), std::min(scores.size(), copy.size()), copy.begin());
        }
      }
    });
  }
  [[nodiscard]] bool any_evicts(SequenceId s, LayerId l) const noexcept {
    bool any = false;
    for (std::int32_t h = 0; h < view_.kv_heads; ++h) {
      any = any || table(s, view_.table_of(l, HeadId{h})).evicts;
    }
    return any;
  }

  template <class F>
  void for_each_item(F&& f) const noexcept {
    const std::int64_t heads = static_cast<std::int64_t>(view_.layers) * view_.kv_heads;
    executor_.for_each(view_.sequences * heads,
                       [&](std::int64_t item, std::int32_t worker) noexcept {
                         const SequenceId s{static_cast<std::int32_t>(item / heads)};
                         const LayerId l{static_cast<std::int32_t>(item % heads / view_.kv_heads)};
                         const HeadId h{static_cast<std::int32_t>(item % view_.kv_heads)};
                         f(s,
                           l,
                           h,
                           view_.table_of(l, h),
                           mem_.workers[index(worker)],
                           mem_.nan_counts[index(worker)]);
                       });
  }

  [[nodiscard]] Demand demand_of(SequenceId s, LayerId l, HeadId h) const noexcept {
    const DemandInput in = demand_input(view_, obs_, s, l, h);
    Demand demand = policy_.demand(in);
    const std::int32_t shared = shares ? mem_.budgets[head_index(s, l, h)] : -1;
    if ((shares ? shared : demand.keep) >= in.live) {
      demand.keep = in.live;
      return demand;
    }
    const std::int32_t fixed = in.live - candidates(demand.protection, in.live).count();
    if (demand.keep < fixed) {
      demand.keep = fixed;
      if (demand.status == Status::ok) { demand.status = Status::over_budget; }
    }
    if (shares) { demand.keep = shared; }
    return demand;
  }
  [[nodiscard]] std::size_t head_index(SequenceId s, LayerId l, HeadId h) const noexcept {
    return index((static_cast<std::int64_t>(raw(s)) * view_.layers + raw(l)) * view_.kv_heads +
                 raw(h));
  }
  [[nodiscard]] Demand demand_of_table(SequenceId s, std::int32_t t) const noexcept {
    return demand_of(s, view_.first_layer(t), view_.first_head(t));
  }

  // What each table is to do, as far as it does not depend on scores.
  [[nodiscard]] Status open_tables() noexcept {
    Status status = Status::ok;
    for_each_table([&](SequenceId s, std::int32_t t) {
      if (!usable(status)) { return; }
      const LayerId l = view_.first_layer(t);
      const HeadId h = view_.first_head(t);
      const SequenceState state = view_.state(s, l, h);
      TablePlan& plan = table(s, t);
      const Demand demand = demand_of(s, l, h);
      plan.live_before = plan.live_after = view_.live_rows(s, l, h);
      plan.extent_before = plan.live_before + (state.append_row >= 0 ? 1 : 0);
      plan.first_row = view_.first_row(s);
      plan.append_row = state.append_row;
      plan.ordered_after = state.ordered;
      plan.pages_before = plan.pages_after =
          plan.live_before == 0
              ? 0
              : pages_for(plan.extent_before + view_.first_row(s), view_.page_size);
      plan.status = demand.status;
      plan.evicts = demand.keep < plan.live_before;
      plan.removal = options_.removal == Removal::automatic ? policy_.removal() : options_.removal;
      if (plan.removal == Removal::automatic) { plan.removal = Removal::stable_pack; }
      if (!usable(demand.status)) { status = demand.status; }
      for_each_head(t, [&](LayerId other_l, HeadId other_h) {
        const std::int32_t keep = demand_of(s, other_l, other_h).keep;
        if (std::min(keep, plan.live_before) != std::min(demand.keep, plan.live_before)) {
          status = Status::unequal_budget;
        }
      });
      if (!plan.evicts) { return; }
      // What follows the window are the first rows: they must be the sinks whose keys the rerotator has.
      if (header_positions() == PositionMode::sinks_follow &&
          demand.protection.sinks < options_.rerotator->sinks()) {
        status = Status::bad_observation;
      }
      if (plan.removal == Removal::overwrite_slot &&
          (plan.live_before - demand.keep != 1 || state.append_row >= 0 ||
           view_.states == nullptr ||  // nowhere to say which row is the hole
           header_positions() == PositionMode::sinks_follow ||
           (header_positions() == PositionMode::in_cache &&
            state.next_rope_position != plan.live_before))) {  // not numbered 0..live-1 yet
        plan.removal = Removal::stable_pack;
      }
      if (two_stages && plan.removal == Removal::overwrite_slot) {
        plan.removal = Removal::stable_pack;  // the victim is not the lowest score
      }
      if (by_page && plan.removal != Removal::drop_pages) { status = Status::bad_observation; }
      if (plan.removal == Removal::drop_pages && (!state.ordered || state.append_row >= 0)) {
        status = Status::rows_unordered;
      }
    });
    return status;
  }

  // Scores of one KV head, and its rows or its pages' scores by them.
  void choose(SequenceId s,
              LayerId l,
              HeadId h,
              std::int32_t t,
              SelectScratch& scratch,
              std::int64_t& nan,
              bool restricted) noexcept {
    const TablePlan& plan = table(s, t);
    const Demand demand = demand_of(s, l, h);
    const auto scores = scratch.scores.first(index(plan.extent_before));
    if (given_pages_) { return; }
    if (!shares &&
        demand.keep <= plan.live_before - candidates(demand.protection, plan.live_before).count()) {
      std::fill(scores.begin(), scores.end(), 0.0F);  // all candidates go, whatever their scores
    } else if (saves && (shares || !given_)) {
      std::copy_n(saved(s, l, h).begin(), scores.size(), scores.begin());
    } else {
      score(s, l, h, scratch, scores);
    }
    if constexpr (by_page) {
      const CandidateRange range = candidates(demand.protection, plan.live_before);
      for (std::int32_t r = range.begin; r < range.end; ++r) {
        nan += is_nan(scores[index(r)]) ? 1 : 0;
      }
      // A page's rows are sorted in place: the scores are not needed any more.
      kvtrim::page_scores(policy_.page_scores(),
                          scores,
                          plan.first_row,
                          view_.page_size,
                          scores,
                          page_scores_of(s, l, h, plan.pages_before));
    } else if constexpr (two_stages) {
      struct Rescored {
        const Planner& planner;
        SequenceId s;
        LayerId l;
        HeadId h;
        SelectScratch& scratch;
        std::span<float> scores;
        std::int32_t first;
        void rescore() const noexcept {
          const auto factors = scratch.factors.first(scores.size());
          FactorScorer<P>(planner.policy_.second_stage())
              .score({planner.view_, s, l, h}, planner.obs_, scratch.scorer, factors);
          for (std::size_t r = 0; r < scores.size(); ++r) {
            scores[r] = planner.policy_.rescaled(scores[r], factors[r]);
          }
        }
      };
      const Rescored stage{*this, s, l, h, scratch, scores, policy_.first_stage(demand.keep)};
      choose_rows(s, l, h, t, demand, scratch, nan, restricted, stage);
    } else {
      choose_rows(s, l, h, t, demand, scratch, nan, restricted);
    }
  }

  [[nodiscard]] std::span<float> page_scores_of(SequenceId s,
                                                LayerId l,
                                                HeadId h,
                                                std::int32_t pages) const noexcept {
    return mem_.page_scores.subspan(head_index(s, l, h) * index(mem_.header->max_pages),
                                    index(pages));
  }

  // One set of pages for all tables of a unit, from the sum (or maximum) of their heads' page scores.
  [[nodiscard]] Status choose_page_sets() noexcept
    requires by_page
  {
    Status status = Status::ok;
    const PageUnit unit = policy_.unit();
    if (view_.scope == TableScope::group && unit == PageUnit::per_layer && view_.layers > 1) {
      return Status::unequal_budget;
    }
    for_each_table([&](SequenceId s, std::int32_t t) {
      const std::int32_t u = unit_of(unit, view_, t);
      if (t > 0 && unit_of(unit, view_, t - 1) == u) { return; }  // not the first table of its unit
      TablePlan& first = table(s, t);
      const Demand demand = demand_of_table(s, t);
      const auto sum =
          page_scores_of(s, view_.first_layer(t), view_.first_head(t), first.pages_before);
      std::int32_t end = t;
      for (; end < view_.tables_per_sequence() && unit_of(unit, view_, end) == u; ++end) {
        const TablePlan& plan = table(s, end);
        if (plan.evicts != first.evicts || plan.live_before != first.live_before ||
            demand_of_table(s, end).keep != demand.keep) {
          status = Status::unequal_budget;
          return;
        }
        if (!first.evicts || given_pages_) { continue; }
        for_each_head(end, [&](LayerId l, HeadId h) {
          const auto scores = page_scores_of(s, l, h, first.pages_before);
          if (scores.data() != sum.data()) { add_page_scores(policy_.page_scores(), scores, sum); }
        });
      }
      if (!first.evicts) { return; }
      const PageSpan span{first.live_before, first.first_row, view_.page_size};
      const std::span<const float> scores =
          given_pages_ ? obs_.page_scores.of(s, u, first.pages_before) : sum;
      SelectScratch& scratch = mem_.workers.front();
      const auto flags = std::span(entries(s, t), index(first.pages_before));
      const Status chosen = choose_pages(
          span, scores, demand.keep, demand.protection, scratch.keys, scratch.picked, flags);
      for (std::int32_t other = t; other < end; ++other) {
        if (other != t) { std::copy(flags.begin(), flags.end(), entries(s, other)); }
        if (chosen != Status::ok) { table(s, other).status = chosen; }
      }
    });
    return status;
  }

  // Shared pages: whether the table must be selected again, with their rows fixed. Also where overwriting is not possible.
  [[nodiscard]] bool needs_second_pass(SequenceId s, std::int32_t t) noexcept {
    TablePlan& plan = table(s, t);
    if (!plan.evicts || plan.removal == Removal::drop_pages) { return false; }
    const bool overwrites = plan.removal == Removal::overwrite_slot;
    bool any_shared = false;
    for (std::int32_t e = 0; e < plan.pages_before; ++e) {
      any_shared = any_shared || shared_entry(s, t, e);
    }
    if (overwrites && overwrite_is_possible(s, t, any_shared, demand_of_table(s, t).window)) {
      return false;
    }
    if (!overwrites && !any_shared) { return false; }
    std::uint8_t* const flags = entries(s, t);
    std::fill_n(flags, plan.pages_before, static_cast<std::uint8_t>(Entry::own));
    plan.removal =
        overwrites || options_.shared == SharedPages::leave ? Removal::stable_pack : plan.removal;
    if (options_.shared == SharedPages::leave) {
      for (std::int32_t e = 0; e < plan.pages_before; ++e) {
        if (shared_entry(s, t, e)) { flags[e] = static_cast<std::uint8_t>(Entry::dropped); }
      }
      for_each_head(t, [&](LayerId l, HeadId h) {
        const auto want = [&](std::int32_t r) {
          std::uint8_t& flag = flags[entry_of(s, r)];
          if (flag == static_cast<std::uint8_t>(Entry::dropped)) {
            flag = static_cast<std::uint8_t>(Entry::locked);
          }
        };
        const HeadPlan& head = plan_.head(s, l, h);
        if (head.victim >= 0) {
          for (std::int32_t r = 0; r < plan.extent_before; ++r) {
            if (r != head.victim) { want(r); }
          }
        } else {
          for (const std::int32_t r : plan_.kept_list(s, l, h)) { want(r); }
        }
      });
    } else if (!overwrites) {
      return false;  // copy: the first selection stands
    }
    mem_.second_pass[flag_index(s, t)] = 1;
    return true;
  }

  // The table's pages, length and costs; the last checks.
  [[nodiscard]] Status close_table(SequenceId s, std::int32_t t) noexcept {
    TablePlan& plan = table(s, t);
    PlanHeader& header = *mem_.header;
    Status status = plan.status;
    if (plan.evicts) {
      const Status closed = plan.removal == Removal::drop_pages ? close_drop(s, t)
                            : plan.removal == Removal::overwrite_slot
                                ? close_overwrite(s, t)
                                : close_pack(s, t, demand_of_table(s, t).keep);
      if (usable(status) && closed != Status::ok) { status = closed; }
    }
    if (!plan.evicts) { keep_all(s, t); }
    if (!usable(status)) { return status; }
    for_each_head(t, [&](LayerId l, HeadId h) {
      const HeadPlan& head = plan_.head(s, l, h);
      header.evicted_rows += head.evicted;
      header.kept_rows += plan.live_before - head.evicted;
      header.bytes_moved += head.moved * moved_row_bytes(view_, l, h);
    });
    plan.status = status;
    return status;
  }

  [[nodiscard]] Status close_drop(SequenceId s, std::int32_t t) noexcept {
    TablePlan& plan = table(s, t);
    const Demand demand = demand_of_table(s, t);
    std::uint8_t* const flags = entries(s, t);
    if constexpr (by_page) { return drop_entries(s, t); }
    std::fill_n(flags, plan.pages_before, std::uint8_t{0});
    if constexpr (by_position) {
      const CandidateRange range = candidates(demand.protection, plan.live_before);
      const PageSpan span{plan.live_before, plan.first_row, view_.page_size};
      for (std::int32_t e = 0; e < plan.pages_before; ++e) {
        flags[e] = span.begin(e) < range.begin || span.end(e) > range.end ? 1 : 0;
      }
    } else {
      for_each_head(t, [&](LayerId l, HeadId h) {
        for (const std::int32_t r : plan_.kept_list(s, l, h)) { flags[entry_of(s, r)] = 1; }
      });
    }
    const Status status = drop_entries(s, t);
    const bool over = !by_position && status == Status::ok && plan.live_after > demand.keep;
    return over ? Status::over_budget : status;
  }

  const P& policy_;
  const Observation& obs_;
  const E& executor_;
  S scorer_;
  bool given_;        // ready-made scores of rows
  bool given_pages_;  // ready-made scores of pages
};

}  // namespace detail

/// Bytes of workspace that `plan` needs for views and observations within `shape`. Pure, monotone in every field.
template <Policy P>
[[nodiscard]] std::size_t plan_workspace_bytes(const P& policy, const PlanShape& shape) noexcept {
  Arena arena;
  static_cast<void>(detail::take_check(arena, shape.pages));
  static_cast<void>(
      detail::PlanMemory::take(arena, shape, detail::plan_needs(policy, shape, false)));
  return arena.bytes();
}

/// Says what an eviction by `policy` does to every sequence of `view`. Nothing is changed.
///
/// \param view       the cache as it is; `check_layout(view)` passed once
/// \param obs        what the policy's scorer needs, budgets at run time, or ready-made scores
/// \param workspace  [plan_workspace_bytes(policy, plan_shape(view, obs, executor.workers()))]; the plan lies in it
/// \param options    way of removal, shared pages, position mode
/// \returns the plan. Its status: `ok`; `over_budget` (valid; protected or shared rows exceed the budget and stay);
///   else nothing is planned: a fault of the tables, `bad_observation`, `workspace_too_small`, `unequal_budget`,
///   `rows_unordered`, `shared_page`, `out_of_pages` (`spares_needed()` says how many), `planes_disagree`, `chunk_too_long`
/// \par Ties
/// the lower position is kept. NaN is the lowest class, counted in `nan_count()`
/// \par Complexity
/// the scorer's, and O(live rows) a KV head (O(live rows log live rows) where slot order is not position order); O(table
/// entries) when nothing goes; no allocation
/// \par Thread-safety
/// const; work items are (sequence, layer, KV head)
template <Policy P, Executor E = Serial>
[[nodiscard]] PlanView plan(const P& policy,
                            const CacheView& view,
                            const Observation& obs,
                            std::span<std::byte> workspace,
                            const PlanOptions& options = {},
                            const E& executor = {}) noexcept {
  return detail::Planner<P, E>(policy, view, obs, options, executor).run(workspace);
}

}  // namespace kvtrim
