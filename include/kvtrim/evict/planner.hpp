// SPDX-License-Identifier: Apache-2.0
#pragma once

// From scores to a plan. Everything that can fail fails here, before a byte of the cache is written.
// Over 400 lines: the cases of one decision (tables, shared pages, the four ways to remove) that must agree.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/check_view.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/core/arena.hpp>
#include <kvtrim/core/executor.hpp>
#include <kvtrim/evict/plan.hpp>
#include <kvtrim/evict/rerotate.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/scorer.hpp>
#include <kvtrim/select/top_k.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace kvtrim {

/// How a plan is to be made.
struct PlanOptions {
  Removal removal = Removal::automatic;     ///< the policy's own, or this one
  SharedPages shared = SharedPages::leave;  ///< what happens to pages that must not be written
  std::span<const PageId> spare_pages =
      {};  ///< free pages that `SharedPages::copy` may take, from the front
  const Rerotator* rerotator = nullptr;  ///< position mode; null: positions are kept
};

/// Bounds for the workspace of plans over `view` as it is now.
///
/// Give larger fields (`max_rows` above all) to allocate once for later, longer states.
[[nodiscard]] inline PlanShape plan_shape(const CacheView& view,
                                          const Observation& obs = {},
                                          std::int32_t workers = 1) noexcept {
  PlanShape shape;
  shape.sequences = view.sequences;
  shape.layers = view.layers;
  shape.kv_heads = view.kv_heads;
  shape.scope = view.scope;
  shape.page_size = view.page_size;
  shape.pages = view.pages;
  shape.query_heads = obs.queries.query_heads;
  shape.head_dim = view.k.head_dim;
  shape.workers = workers;
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    shape.query_rows = std::max(shape.query_rows, obs.queries.count(SequenceId{s}));
    for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
      const LayerId l = view.first_layer(t);
      const HeadId h = view.first_head(t);
      const std::int32_t extent = view.live_rows(SequenceId{s}, l, h) +
                                  (view.state(SequenceId{s}, l, h).append_row >= 0 ? 1 : 0);
      shape.max_rows = std::max(shape.max_rows, extent + view.first_row(SequenceId{s}));
    }
  }
  return shape;
}

namespace detail {

template <class P>
using scorer_of =
    typename ScorerOf<std::remove_cvref_t<decltype(std::declval<const P&>().scorer())>>::type;

// Working memory of one worker.
struct SelectScratch {
  std::span<float> scores;
  std::span<std::uint32_t> keys;
  std::span<std::int32_t> ranks;    // candidate -> rank
  std::span<std::int32_t> picked;   // candidates that stay
  std::span<std::int32_t> order;    // rank -> row, where rows are unordered
  std::span<std::int32_t> rank_of;  // row -> rank among the kept, -1: goes
  std::span<std::uint8_t> keep;     // by rank
  std::span<std::byte> scorer;
};

struct PlanMemory {
  PlanHeader* header = nullptr;
  std::span<std::uint64_t> check;
  std::span<std::uint8_t> entry_flags;  // [sequences, tables, max_pages]
  std::span<std::uint8_t> second_pass;  // [sequences, tables]
  std::span<std::int64_t> nan_counts;   // [workers]
  std::span<SelectScratch> workers;

  static PlanMemory take(Arena& arena, const PlanShape& shape, std::size_t scorer_bytes) noexcept {
    PlanMemory m;
    const std::int64_t tables = shape.scope == TableScope::group   ? 1
                                : shape.scope == TableScope::layer ? shape.layers
                                                                   : shape.layers * shape.kv_heads;
    const std::int64_t all_tables = shape.sequences * tables;
    const std::int64_t heads =
        static_cast<std::int64_t>(shape.sequences) * shape.layers * shape.kv_heads;
    const std::int64_t max_pages = pages_for(shape.max_rows, std::max(1, shape.page_size));
    const auto header = arena.take<PlanHeader>(1);
    const auto table_plans = arena.take<TablePlan>(all_tables);
    const auto head_plans = arena.take<HeadPlan>(heads);
    const auto rows = arena.take<std::int32_t>(heads * shape.max_rows);
    const auto ranks = arena.take<std::int32_t>(heads * shape.max_rows);
    const auto pages = arena.take<std::int32_t>(all_tables * 2 * max_pages);
    const auto sources = arena.take<std::int32_t>(all_tables * max_pages);
    const auto released = arena.take<std::int32_t>(all_tables * 2 * max_pages);
    const auto end = arena.take<std::byte>(0);
    m.check = arena.take<std::uint64_t>(check_tables_words(shape.pages));
    m.entry_flags = arena.take<std::uint8_t>(all_tables * max_pages);
    m.second_pass = arena.take<std::uint8_t>(all_tables);
    m.nan_counts = arena.take<std::int64_t>(shape.workers);
    m.workers = arena.take<SelectScratch>(shape.workers);
    for (std::int32_t w = 0; w < shape.workers; ++w) {
      SelectScratch s;
      s.scores = arena.take<float>(shape.max_rows);
      s.keys = arena.take<std::uint32_t>(shape.max_rows);
      s.ranks = arena.take<std::int32_t>(shape.max_rows);
      s.picked = arena.take<std::int32_t>(shape.max_rows);
      s.order = arena.take<std::int32_t>(shape.max_rows);
      s.rank_of = arena.take<std::int32_t>(shape.max_rows);
      s.keep = arena.take<std::uint8_t>(shape.max_rows);
      s.scorer = arena.take<std::byte>(static_cast<std::int64_t>(scorer_bytes));
      if (arena.ok()) { m.workers[static_cast<std::size_t>(w)] = s; }
    }
    if (!arena.ok()) { return m; }
    const auto offset = [&](const void* p) {
      return static_cast<const std::byte*>(p) - reinterpret_cast<std::byte*>(header.data());
    };
    m.header = new (header.data()) PlanHeader{};
    m.header->scope = shape.scope;
    m.header->sequences = shape.sequences;
    m.header->layers = shape.layers;
    m.header->kv_heads = shape.kv_heads;
    m.header->tables = static_cast<std::int32_t>(tables);
    m.header->page_size = shape.page_size;
    m.header->max_rows = shape.max_rows;
    m.header->max_pages = static_cast<std::int32_t>(max_pages);
    m.header->table_plans = offset(table_plans.data());
    m.header->head_plans = offset(head_plans.data());
    m.header->rows = offset(rows.data());
    m.header->ranks = offset(ranks.data());
    m.header->pages = offset(pages.data());
    m.header->sources = offset(sources.data());
    m.header->released = offset(released.data());
    m.header->bytes = offset(end.data());
    std::fill(table_plans.begin(), table_plans.end(), TablePlan{});
    std::fill(head_plans.begin(), head_plans.end(), HeadPlan{});
    std::fill(m.second_pass.begin(), m.second_pass.end(), std::uint8_t{0});
    std::fill(m.nan_counts.begin(), m.nan_counts.end(), std::int64_t{0});
    return m;
  }
};

// What the second selection may do with the rows of a table entry.
enum class Entry : std::uint8_t { own, locked, dropped };

template <Policy P, Executor E>
class Planner {
 public:
  using S = scorer_of<P>;
  static constexpr bool by_position = std::is_same_v<S, NoScorer>;

  Planner(const P& policy,
          const CacheView& view,
          const Observation& obs,
          const PlanOptions& options,
          const E& executor) noexcept
      : policy_(policy),
        view_(view),
        obs_(obs),
        options_(options),
        executor_(executor),
        scorer_(policy.scorer()),
        given_(!by_position && static_cast<bool>(obs.scores)) {}

  [[nodiscard]] PlanView run(std::span<std::byte> workspace) noexcept {
    const Status usable_observation =
        given_ ? ExternalScorer{}.check(view_, obs_) : scorer_.check(view_, obs_);
    if (usable_observation != Status::ok) { return PlanView(usable_observation); }
    const PlanShape shape = plan_shape(view_, obs_, executor_.workers());
    Arena arena(workspace);
    mem_ = PlanMemory::take(arena, shape, given_ ? 0 : scorer_.scratch_bytes(shape));
    if (!arena.ok()) { return PlanView(Status::workspace_too_small); }
    plan_ = PlanView(mem_.header);
    PlanHeader& header = *mem_.header;
    header.separate_values = view_.table.v_offset != 0;
    header.positions =
        options_.rerotator == nullptr ? PositionMode::keep : options_.rerotator->mode();
    if (const ViewFault fault = check_tables(view_, mem_.check); fault.status != Status::ok) {
      return refuse(fault.status);
    }
    header.generation = generation_of(view_);
    if (const Status status = open_tables(); status != Status::ok) { return refuse(status); }

    for_each_item([&](SequenceId s,
                      LayerId l,
                      HeadId h,
                      std::int32_t t,
                      SelectScratch& scratch,
                      std::int64_t& nan) {
      if (table(s, t).evicts && !(by_position && table(s, t).removal == Removal::drop_pages)) {
        select(s, l, h, t, scratch, nan, false);
      }
    });
    bool again = false;
    for_each_table([&](SequenceId s, std::int32_t t) { again = needs_second_pass(s, t) || again; });
    if (again) {
      for_each_item([&](SequenceId s,
                        LayerId l,
                        HeadId h,
                        std::int32_t t,
                        SelectScratch& scratch,
                        std::int64_t& nan) {
        if (mem_.second_pass[flag_index(s, t)] != 0) { select(s, l, h, t, scratch, nan, true); }
      });
    }
    Status status = Status::ok;
    for_each_table([&](SequenceId s, std::int32_t t) {
      const Status closed = close_table(s, t);
      if (usable(status) && (closed != Status::ok)) { status = closed; }
    });
    if (!usable(status)) { return refuse(status); }
    header.status = status;
    for (const std::int64_t n : mem_.nan_counts) { header.nan_count += n; }
    return plan_;
  }

 private:
  static std::size_t index(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }
  [[nodiscard]] std::size_t flag_index(SequenceId s, std::int32_t t) const noexcept {
    return index(static_cast<std::int64_t>(raw(s)) * mem_.header->tables + t);
  }
  [[nodiscard]] TablePlan& table(SequenceId s, std::int32_t t) const noexcept {
    return plan_.table(s, t);
  }
  [[nodiscard]] std::uint8_t* entries(SequenceId s, std::int32_t t) const noexcept {
    return mem_.entry_flags.data() + flag_index(s, t) * index(mem_.header->max_pages);
  }
  [[nodiscard]] bool rotates() const noexcept {
    return options_.rerotator != nullptr && options_.rerotator->rotates();
  }

  [[nodiscard]] PositionMode header_positions() const noexcept { return mem_.header->positions; }

  // A refused plan evicts nothing.
  [[nodiscard]] PlanView refuse(Status status) noexcept {
    mem_.header->status = status;
    mem_.header->evicted_rows = 0;
    mem_.header->bytes_moved = 0;
    return plan_;
  }

  template <class F>
  void for_each_table(F&& f) const noexcept {
    for (std::int32_t s = 0; s < view_.sequences; ++s) {
      for (std::int32_t t = 0; t < view_.tables_per_sequence(); ++t) { f(SequenceId{s}, t); }
    }
  }
  template <class F>
  void for_each_head(std::int32_t t, F&& f) const noexcept {
    for (std::int32_t l = 0; l < view_.layers_per_table(); ++l) {
      for (std::int32_t h = 0; h < view_.heads_per_table(); ++h) {
        f(LayerId{raw(view_.first_layer(t)) + l}, HeadId{raw(view_.first_head(t)) + h});
      }
    }
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

  [[nodiscard]] bool shared_entry(SequenceId s, std::int32_t t, std::int32_t e) const noexcept {
    const LayerId l = view_.first_layer(t);
    const HeadId h = view_.first_head(t);
    return !view_.writable(view_.k_page(s, l, h, e)) || !view_.writable(view_.v_page(s, l, h, e));
  }
  [[nodiscard]] std::int32_t entry_of(SequenceId s, std::int32_t row) const noexcept {
    return (row + view_.first_row(s)) / view_.page_size;
  }

  [[nodiscard]] Demand demand_of(SequenceId s, LayerId l, HeadId h) const noexcept {
    DemandInput in;
    in.state = view_.state(s, l, h);
    in.live = view_.live_rows(s, l, h);
    in.page_size = view_.page_size;
    in.budget = obs_.budget(s, l, h);
    Demand demand = policy_.demand(in);
    if (demand.keep >= in.live) { return demand; }
    const std::int32_t fixed = in.live - candidates(demand.protection, in.live).count();
    if (demand.keep < fixed) {
      demand.keep = fixed;
      if (demand.status == Status::ok) { demand.status = Status::over_budget; }
    }
    return demand;
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
      plan.append_row = state.append_row;
      plan.ordered_after = state.ordered;
      plan.pages_before = plan.pages_after =
          plan.live_before == 0
              ? 0
              : pages_for(plan.extent_before + view_.first_row(s), view_.page_size);
      plan.status = demand.status;
      plan.evicts = demand.keep < plan.live_before;
      plan.removal = options_.removal == Removal::automatic ? policy_.removal() : options_.removal;
      if (!usable(demand.status)) { status = demand.status; }
      for_each_head(t, [&](LayerId other_l, HeadId other_h) {
        if (demand_of(s, other_l, other_h).keep != demand.keep) { status = Status::unequal_budget; }
      });
      if (!plan.evicts) { return; }
      if (plan.removal == Removal::overwrite_slot &&
          (plan.live_before - demand.keep != 1 || state.append_row >= 0 ||
           header_positions() == PositionMode::sinks_follow)) {
        plan.removal = Removal::stable_pack;
      }
      if (plan.removal == Removal::drop_pages && (!state.ordered || state.append_row >= 0)) {
        status = Status::rows_unordered;
      }
    });
    return status;
  }

  // Scores, order and choice of one KV head. `restricted`: the rows of locked entries stay, of dropped entries go.
  void select(SequenceId s,
              LayerId l,
              HeadId h,
              std::int32_t t,
              SelectScratch& scratch,
              std::int64_t& nan,
              bool restricted) noexcept {
    const TablePlan& plan = table(s, t);
    const SequenceState state = view_.state(s, l, h);
    const std::int32_t live = plan.live_before;
    const Demand demand = demand_of(s, l, h);
    const auto scores = scratch.scores.first(index(plan.extent_before));
    const CandidateRange range = candidates(demand.protection, live);
    const std::int32_t fixed = live - range.count();
    if (demand.keep > fixed || by_position) {
      if (given_) {
        ExternalScorer{}.score(view_, s, l, h, obs_, scratch.scorer, scores);
      } else {
        scorer_.score(view_, s, l, h, obs_, scratch.scorer, scores);
      }
    } else {
      std::fill(scores.begin(), scores.end(), 0.0F);  // all candidates go, whatever their scores
    }
    if (plan.removal == Removal::overwrite_slot && !restricted &&
        find_victim(s, l, h, state, plan, demand, scratch, nan)) {
      return;
    }

    const std::int32_t hole = state.append_row;
    if (!state.ordered) {
      std::int32_t n = 0;
      for (std::int32_t r = 0; r < plan.extent_before; ++r) {
        if (r != hole) { scratch.order[index(n++)] = r; }
      }
      std::sort(
          scratch.order.begin(), scratch.order.begin() + n, [&](std::int32_t a, std::int32_t b) {
            return view_.position(s, l, h, a) < view_.position(s, l, h, b);
          });
    }
    const auto row_of = [&](std::int32_t rank) {
      return !state.ordered ? scratch.order[index(rank)]
                            : rank + (hole >= 0 && rank >= hole ? 1 : 0);
    };
    const auto entry_kind = [&](std::int32_t rank) {
      return restricted ? static_cast<Entry>(entries(s, t)[entry_of(s, row_of(rank))]) : Entry::own;
    };
    std::int32_t wanted = demand.keep;
    std::int32_t competing = 0;
    for (std::int32_t rank = 0; rank < live; ++rank) {
      const bool candidate = rank >= range.begin && rank < range.end;
      const Entry kind = entry_kind(rank);
      const bool stays = kind == Entry::locked || (!candidate && kind == Entry::own);
      scratch.keep[index(rank)] = stays ? 1 : 0;
      if (stays) { --wanted; }
      if (candidate && kind == Entry::own) { scratch.ranks[index(competing++)] = rank; }
    }
    for (std::int32_t i = 0; i < competing; ++i) {
      const float score = scores[index(row_of(scratch.ranks[index(i)]))];
      scratch.keys[index(i)] = order_key(score);
      if (!restricted && is_nan(score)) { ++nan; }
    }
    const auto picked = scratch.picked.first(index(std::clamp(wanted, 0, competing)));
    top_k(scratch.keys.first(index(competing)), picked);
    for (const std::int32_t i : picked) { scratch.keep[index(scratch.ranks[index(i)])] = 1; }
    list(s, l, h, state, live, plan.extent_before, scratch, row_of);
  }

  // Writes kept rows (ascending), their ranks and the evicted positions into the plan.
  template <class RowOf>
  void list(SequenceId s,
            LayerId l,
            HeadId h,
            const SequenceState& state,
            std::int32_t live,
            std::int32_t extent,
            SelectScratch& scratch,
            RowOf row_of) noexcept {
    HeadPlan& head = plan_.head(s, l, h);
    std::int32_t* const rows = plan_.rows(s, l, h);
    std::int32_t kept = 0;
    for (std::int32_t rank = 0; rank < live; ++rank) {
      if (scratch.keep[index(rank)] == 0) { continue; }
      if (state.ordered) { rows[kept] = row_of(rank); }
      ++kept;
    }
    head = {};
    head.kept = kept;
    head.has_ranks = state.ordered ? 0 : 1;
    std::int32_t evicted = kept;
    for (std::int32_t rank = 0; rank < live; ++rank) {
      if (scratch.keep[index(rank)] == 0) {
        rows[evicted++] = raw(view_.position(s, l, h, row_of(rank)));
      }
    }
    head.evicted = evicted - kept;
    if (state.ordered) { return; }
    std::fill_n(scratch.rank_of.begin(), extent, -1);
    std::int32_t next = 0;
    for (std::int32_t rank = 0; rank < live; ++rank) {
      if (scratch.keep[index(rank)] != 0) { scratch.rank_of[index(row_of(rank))] = next++; }
    }
    const auto ranks = plan_.ranks(s, l, h);
    std::int32_t n = 0;
    for (std::int32_t r = 0; r < extent; ++r) {
      if (scratch.rank_of[index(r)] < 0) { continue; }
      rows[n] = r;
      ranks[index(n++)] = scratch.rank_of[index(r)];
    }
  }

  // One row too many: the lowest candidate, without sorting. False where there is none.
  [[nodiscard]] bool find_victim(SequenceId s,
                                 LayerId l,
                                 HeadId h,
                                 const SequenceState& state,
                                 const TablePlan& plan,
                                 const Demand& demand,
                                 SelectScratch& scratch,
                                 std::int64_t& nan) noexcept {
    const auto& scores = scratch.scores;
    const std::int32_t live = plan.live_before;
    const CandidateRange range = candidates(demand.protection, live);
    if (range.count() < 1) { return false; }
    std::int32_t first = 0;
    std::int32_t last = live;
    // Where rows are out of order: sinks are the positions below `range.begin`, recent ones the last positions, if so
    // many of them are live; else both borders are looked for.
    Position sink_end{range.begin};
    Position recent_begin{state.next_position - (live - range.end)};
    if (state.ordered) {
      first = range.begin;
      last = range.end;
    } else {
      std::int32_t sinks = 0;
      std::int32_t recent = 0;
      for (std::int32_t r = 0; r < live; ++r) {
        const Position p = view_.position(s, l, h, r);
        sinks += p < sink_end ? 1 : 0;
        recent += p >= recent_begin ? 1 : 0;
      }
      if (sinks != range.begin || recent != live - range.end) {
        const auto begin = scratch.order.begin();
        for (std::int32_t r = 0; r < live; ++r) {
          scratch.order[index(r)] = raw(view_.position(s, l, h, r));
        }
        std::nth_element(begin, begin + range.begin, begin + live);
        sink_end = Position{scratch.order[index(range.begin)]};
        std::nth_element(begin, begin + range.end - 1, begin + live);
        recent_begin = Position{scratch.order[index(range.end - 1)] + 1};
      }
    }
    std::uint64_t lowest = ~std::uint64_t{0};
    std::int32_t victim = -1;
    for (std::int32_t r = first; r < last; ++r) {
      const Position p = view_.position(s, l, h, r);
      if (!state.ordered && (p < sink_end || p >= recent_begin)) { continue; }
      nan += is_nan(scores[index(r)]) ? 1 : 0;
      const std::uint64_t key = row_key(scores[index(r)], p);
      if (key < lowest) {
        lowest = key;
        victim = r;
      }
    }
    HeadPlan& head = plan_.head(s, l, h);
    head = {};
    head.evicted = 1;
    head.victim = victim;
    plan_.rows(s, l, h)[0] = raw(view_.position(s, l, h, victim));
    return true;
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
    if (overwrites && overwrite_is_possible(s, t, any_shared)) { return false; }
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

  // The victims' pages and the page of the next append must be this sequence's own.
  [[nodiscard]] bool overwrite_is_possible(SequenceId s, std::int32_t t, bool any_shared) noexcept {
    TablePlan& plan = table(s, t);
    const LayerId l0 = view_.first_layer(t);
    const HeadId h0 = view_.first_head(t);
    const Demand demand = demand_of(s, l0, h0);
    const SequenceState state = view_.state(s, l0, h0);
    bool possible = true;
    bool same = true;
    const std::int32_t first_victim = plan_.head(s, l0, h0).victim;
    for_each_head(t, [&](LayerId l, HeadId h) {
      const HeadPlan& head = plan_.head(s, l, h);
      possible = possible && head.victim >= 0 &&
                 !(any_shared && shared_entry(s, t, entry_of(s, head.victim)));
      same = same && head.victim == first_victim;
    });
    if (!possible || (any_shared && rotates())) { return false; }
    // The row that just left the window, if it can be found: so the window's slots stay a ring.
    std::int32_t slot = first_victim;
    if (!same) {
      const Position leaving{state.next_position - 1 - demand.window};
      for (std::int32_t r = 0; r < plan.live_before; ++r) {
        if (view_.position(s, l0, h0, r) == leaving) { slot = r; }
      }
      if (any_shared && shared_entry(s, t, entry_of(s, slot))) { slot = first_victim; }
    }
    plan.append_row = slot;
    return true;
  }

  // The table's pages, length and costs; the last checks.
  [[nodiscard]] Status close_table(SequenceId s, std::int32_t t) noexcept {
    TablePlan& plan = table(s, t);
    PlanHeader& header = *mem_.header;
    Status status = plan.status;
    if (plan.evicts) {
      const Status closed = plan.removal == Removal::drop_pages       ? close_drop(s, t)
                            : plan.removal == Removal::overwrite_slot ? close_overwrite(s, t)
                                                                      : close_pack(s, t);
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

  void keep_all(SequenceId s, std::int32_t t) noexcept {
    TablePlan& plan = table(s, t);
    plan.live_after = plan.live_before;
    plan.pages_after = plan.pages_before;
    plan.released = 0;
    for (std::int32_t e = 0; e < plan.pages_before; ++e) { take_entry(s, t, e, e); }
  }

  // Entry `to` of the new table is entry `from` of the old one.
  void take_entry(SequenceId s, std::int32_t t, std::int32_t to, std::int32_t from) noexcept {
    const LayerId l = view_.first_layer(t);
    const HeadId h = view_.first_head(t);
    plan_.k_pages(s, t)[index(to)] = view_.k_page(s, l, h, from);
    plan_.v_pages(s, t)[index(to)] = view_.v_page(s, l, h, from);
    plan_.sources(s, t)[index(to)] = from;
  }

  // Lists the old entries that the new table does not name, tail first. `stays(e)`: whether entry e is still there.
  template <class Stays>
  void release_entries(SequenceId s, std::int32_t t, Stays stays) noexcept {
    TablePlan& plan = table(s, t);
    const LayerId l = view_.first_layer(t);
    const HeadId h = view_.first_head(t);
    plan.released = 2 * plan.pages_before;
    auto* const out = const_cast<PageId*>(plan_.released(s, t).data());
    std::int32_t n = 0;
    for (std::int32_t e = plan.pages_before; e-- > 0;) {
      if (stays(e)) { continue; }
      out[n++] = view_.k_page(s, l, h, e);
      if (mem_.header->separate_values) { out[n++] = view_.v_page(s, l, h, e); }
    }
    plan.released = n;
  }

  [[nodiscard]] Status close_drop(SequenceId s, std::int32_t t) noexcept {
    TablePlan& plan = table(s, t);
    const std::int32_t live = plan.live_before;
    const std::int32_t first_row = view_.first_row(s);
    const Demand demand = demand_of(s, view_.first_layer(t), view_.first_head(t));
    std::uint8_t* const flags = entries(s, t);
    std::fill_n(flags, plan.pages_before, std::uint8_t{0});
    if constexpr (by_position) {
      const CandidateRange range = candidates(demand.protection, live);
      for (std::int32_t e = 0; e < plan.pages_before; ++e) {
        const std::int32_t begin = std::max(0, e * view_.page_size - first_row);
        const std::int32_t end = std::min(live, (e + 1) * view_.page_size - first_row);
        flags[e] = begin < range.begin || end > range.end ? 1 : 0;
      }
    } else {
      for_each_head(t, [&](LayerId l, HeadId h) {
        for (const std::int32_t r : plan_.kept_list(s, l, h)) { flags[entry_of(s, r)] = 1; }
      });
    }
    if (first_row > 0 && flags[0] == 0) {
      flags[0] = 1;
    }  // the padding's page: rows are counted from inside it
    const auto dropped = [&](std::int32_t r) { return flags[entry_of(s, r)] == 0; };
    plan.pages_after = plan.pages_before;
    std::int32_t pages = 0;
    for (std::int32_t e = 0; e < plan.pages_before; ++e) {
      if (flags[e] != 0) { take_entry(s, t, pages++, e); }
    }
    plan.pages_after = pages;
    release_entries(s, t, [&](std::int32_t e) { return flags[e] != 0; });
    bool rotates_shared = false;
    for_each_head(t, [&](LayerId l, HeadId h) {
      HeadPlan& head = plan_.head(s, l, h);
      head = {};
      std::int32_t* const out = plan_.rows(s, l, h);
      std::int32_t kept = 0;
      for (std::int32_t r = 0; r < live; ++r) {
        if (dropped(r)) {
          out[head.evicted++] = raw(view_.position(s, l, h, r));
        } else {
          rotates_shared = rotates_shared || (rotates() && shared_entry(s, t, entry_of(s, r)) &&
                                              turns(s, l, h, r, kept));
          ++kept;
        }
      }
      plan.live_after = kept;
    });
    if (plan.live_after == live) { plan.evicts = false; }
    if (rotates_shared) { return Status::shared_page; }
    if (!by_position && plan.live_after > demand.keep) { return Status::over_budget; }
    return Status::ok;
  }

  // Whether the key of row `r`, of rank `rank` among the kept, is rotated in the rerotator's mode.
  [[nodiscard]] bool turns(
      SequenceId s, LayerId l, HeadId h, std::int32_t r, std::int32_t rank) const noexcept {
    if (options_.rerotator->mode() == PositionMode::sinks_follow) {
      return rank < options_.rerotator->sinks();
    }
    return view_.rope_position(s, l, h, r) != rank;
  }

  [[nodiscard]] Status close_overwrite(SequenceId s, std::int32_t t) noexcept {
    TablePlan& plan = table(s, t);
    const std::int32_t first_victim =
        plan_.head(s, view_.first_layer(t), view_.first_head(t)).victim;
    bool moves = false;
    bool same = true;
    for_each_head(t, [&](LayerId l, HeadId h) {
      HeadPlan& head = plan_.head(s, l, h);
      head.moved = head.victim == plan.append_row ? 0 : 1;
      moves = moves || head.moved != 0;
      same = same && head.victim == first_victim;
    });
    if (!same && has_common_planes(view_)) { return Status::planes_disagree; }
    plan.live_after = plan.live_before - 1;
    plan.ordered_after = plan.ordered_after && !moves;
    if (plan.append_row == plan.extent_before - 1) { plan.append_row = -1; }
    const std::int32_t extent = plan.live_after + (plan.append_row >= 0 ? 1 : 0);
    plan.pages_after = pages_for(extent + view_.first_row(s), view_.page_size);
    for (std::int32_t e = 0; e < plan.pages_after; ++e) { take_entry(s, t, e, e); }
    release_entries(s, t, [&](std::int32_t e) { return e < plan.pages_after; });
    return Status::ok;
  }

  [[nodiscard]] Status close_pack(SequenceId s, std::int32_t t) noexcept {
    TablePlan& plan = table(s, t);
    const std::int32_t first_row = view_.first_row(s);
    const Demand demand = demand_of(s, view_.first_layer(t), view_.first_head(t));
    std::int32_t kept = -1;
    bool equal = true;
    for_each_head(t, [&](LayerId l, HeadId h) {
      equal = equal && (kept < 0 || kept == plan_.head(s, l, h).kept);
      kept = plan_.head(s, l, h).kept;
    });
    if (!equal) { return Status::unequal_budget; }
    if (has_common_planes(view_) && !same_rows_in_all_heads(s, t)) {
      return Status::planes_disagree;
    }
    Status status = kept > demand.keep ? Status::over_budget : Status::ok;
    plan.live_after = kept;
    if (kept == plan.live_before) {
      plan.evicts = false;
      return status;
    }

    const bool locked =
        options_.shared == SharedPages::leave && mem_.second_pass[flag_index(s, t)] != 0;
    const std::uint8_t* const flags = entries(s, t);
    const auto is_locked = [&](std::int32_t e) {
      return locked && flags[e] == static_cast<std::uint8_t>(Entry::locked);
    };
    plan.append_row = -1;
    plan.pages_after = pages_for(kept + first_row, view_.page_size);
    std::int32_t pages = 0;
    for (std::int32_t e = 0; e < plan.pages_before; ++e) {
      if (!is_locked(e)) { continue; }
      // Locked pages must come first and be full: rows behind them are numbered from their end.
      const std::int32_t begin = e * view_.page_size - first_row;
      const bool full = begin >= 0 && begin + view_.page_size <= plan.extent_before;
      for (std::int32_t before = 0; before < e; ++before) {
        if (flags[before] == static_cast<std::uint8_t>(Entry::own)) { return Status::shared_page; }
      }
      if (pages >= plan.pages_after || (!full && pages + 1 < plan.pages_after)) {
        return Status::shared_page;
      }
      take_entry(s, t, pages++, e);
    }
    plan.shared_kept = pages;
    for (std::int32_t e = 0; e < plan.pages_before && pages < plan.pages_after; ++e) {
      if (is_locked(e) || (locked && flags[e] == static_cast<std::uint8_t>(Entry::dropped))) {
        continue;
      }
      take_entry(s, t, pages++, e);
    }
    if (pages < plan.pages_after) { return Status::shared_page; }
    if (const Status copied = replace_shared_pages(s, t); copied != Status::ok) { return copied; }
    release_entries(s, t, [&](std::int32_t e) {
      const auto sources = plan_.sources(s, t);
      return std::find(sources.begin(), sources.end(), e) != sources.end();
    });
    bool moves = false;
    for_each_head(t, [&](LayerId l, HeadId h) {
      HeadPlan& head = plan_.head(s, l, h);
      head.moved = 0;
      for_each_move(
          s, t, l, h, [&](std::int32_t, std::int32_t, bool moved) { head.moved += moved ? 1 : 0; });
      moves = moves || head.moved != 0;
    });
    plan.ordered_after = plan.ordered_after && !(plan.removal == Removal::fill_holes && moves);
    return status;
  }

  [[nodiscard]] bool same_rows_in_all_heads(SequenceId s, std::int32_t t) const noexcept {
    const auto first = plan_.kept_list(s, view_.first_layer(t), view_.first_head(t));
    bool same = true;
    for_each_head(t, [&](LayerId l, HeadId h) {
      same = same && std::ranges::equal(first, plan_.kept_list(s, l, h));
    });
    return same;
  }

  // Calls f(from row, to row, whether its data moves) for each kept row.
  template <class F>
  void for_each_move(SequenceId s, std::int32_t t, LayerId l, HeadId h, F&& f) const noexcept {
    const TablePlan& plan = table(s, t);
    const auto sources = plan_.sources(s, t);
    const std::int32_t first_row = view_.first_row(s);
    for_each_target(plan_.kept_list(s, l, h),
                    plan.removal,
                    [&](std::int32_t from, std::int32_t to, std::int32_t) {
                      const std::int32_t at = to + first_row;
                      const bool stays =
                          sources[index(at / view_.page_size)] ==
                              (from + first_row) / view_.page_size &&
                          at % view_.page_size == (from + first_row) % view_.page_size;
                      f(from, to, !stays);
                    });
  }

  // `copy`: pages of the new table that must be written but may not are replaced by spare ones; sources become -1 - entry.
  [[nodiscard]] Status replace_shared_pages(SequenceId s, std::int32_t t) noexcept {
    TablePlan& plan = table(s, t);
    PlanHeader& header = *mem_.header;
    const std::int32_t first_row = view_.first_row(s);
    plan.spare_pages = 0;
    for (std::int32_t e = 0; e < plan.pages_after; ++e) {
      const std::int32_t source = plan_.sources(s, t)[index(e)];
      if (!shared_entry(s, t, source)) { continue; }
      bool written = false;
      for_each_head(t, [&](LayerId l, HeadId h) {
        const auto ranks = plan_.ranks(s, l, h);
        std::int32_t i = 0;
        for_each_move(s, t, l, h, [&](std::int32_t from, std::int32_t to, bool moved) {
          const std::int32_t rank = ranks.empty() ? i : ranks[index(i)];
          ++i;
          if ((to + first_row) / view_.page_size == e) {
            written = written || moved || (rotates() && turns(s, l, h, from, rank));
          }
        });
      });
      if (!written) { continue; }
      if (options_.shared == SharedPages::leave) { return Status::shared_page; }
      const std::int32_t pages = header.separate_values ? 2 : 1;
      header.spares_needed += pages;
      ++plan.spare_pages;
      plan_.sources(s, t)[index(e)] = -1;
      if (static_cast<std::size_t>(header.spares_needed) > options_.spare_pages.size()) {
        continue;
      }
      const auto spare =
          options_.spare_pages.subspan(index(header.spares_needed - pages), index(pages));
      plan_.k_pages(s, t)[index(e)] = spare.front();
      plan_.v_pages(s, t)[index(e)] = spare.back();
    }
    return static_cast<std::size_t>(header.spares_needed) > options_.spare_pages.size()
               ? Status::out_of_pages
               : Status::ok;
  }

  const P& policy_;
  const CacheView& view_;
  const Observation& obs_;
  const PlanOptions& options_;
  const E& executor_;
  S scorer_;
  bool given_;
  PlanMemory mem_;
  PlanView plan_;
};

}  // namespace detail

/// Bytes of workspace that `plan` needs for views and observations within `shape`. Pure, monotone in every field.
template <Policy P>
[[nodiscard]] std::size_t plan_workspace_bytes(const P& policy, const PlanShape& shape) noexcept {
  Arena arena;
  const auto unused = detail::PlanMemory::take(
      arena, shape, detail::scorer_of<P>(policy.scorer()).scratch_bytes(shape));
  static_cast<void>(unused);
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
