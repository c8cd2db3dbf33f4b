// SPDX-License-Identifier: Apache-2.0
#pragma once

// A plan in the making: what it is made from, the workspace, and the plan that is being written there. The workspace
// holds what checking the tables takes, then what lasts as the plan, then what is used while it is made. The first is
// sized by the pool alone: until the tables are checked, no length is believed.

#include <kvtrim/budget/adaptive.hpp>
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/cache/head_ref.hpp>
#include <kvtrim/core/arena.hpp>
#include <kvtrim/core/executor.hpp>
#include <kvtrim/evict/detail/own_pages.hpp>
#include <kvtrim/evict/plan.hpp>
#include <kvtrim/evict/plan_options.hpp>
#include <kvtrim/observe/plan_shape.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/score/scorer.hpp>
#include <kvtrim/select/choose_rows.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <type_traits>
#include <utility>

namespace kvtrim::detail {

// --- what kind of policy it is ----------------------------------------------------------------

template <class P>
using PolicyScorer =
    typename ScorerOf<std::remove_cvref_t<decltype(std::declval<const P&>().scorer())>>::type;

// What scales the scores of a two-stage policy's second stage.
template <class P>
struct FactorScorerOf {
  using type = NoScorer;
};
template <TwoStagePolicy P>
struct FactorScorerOf<P> {
  using type = typename ScorerOf<
      std::remove_cvref_t<decltype(std::declval<const P&>().second_stage())>>::type;
};
template <class P>
using FactorScorer = typename FactorScorerOf<P>::type;

template <class P>
inline constexpr bool by_position = std::is_same_v<PolicyScorer<P>, NoScorer>;

// Whether scores come with the observation, in place of the policy's own: of rows, or of pages.
template <Policy P>
[[nodiscard]] bool rows_given(const Observation& obs) noexcept {
  return !by_position<P> && !reads_given_scores<PolicyScorer<P>> && static_cast<bool>(obs.scores);
}
template <Policy P>
[[nodiscard]] bool pages_given(const Observation& obs) noexcept {
  return PagePolicy<P> && obs.page_scores.data != nullptr;
}

// --- memory -----------------------------------------------------------------------------------

// Working memory of one worker.
struct SelectScratch {
  std::span<float> scores;
  RowScratch rows;
  std::span<std::int32_t> order;    // rank -> live index, where rows are unordered
  std::span<std::int32_t> rank_of;  // row -> rank among the kept, -1: goes
  std::span<std::byte> scorer;
  std::span<float> factors;  // of the second stage
  std::int64_t nan = 0;      // counted so far
};

// What a policy's kind adds to the workspace.
struct PlanNeeds {
  std::size_t scorer_bytes = 0;    // of one call, the larger of both stages'
  bool factors = false;            // there is a second stage
  std::int64_t saved_scores = 0;   // lists of scores that are kept until rows are chosen
  std::int64_t sharing_heads = 0;  // heads that share one budget
};

template <Policy P>
[[nodiscard]] PlanNeeds plan_needs(const P& policy, const PlanShape& shape, bool given) noexcept {
  PlanNeeds needs;
  const std::int64_t layers = static_cast<std::int64_t>(shape.sequences) * shape.layers;
  if (!given) { needs.scorer_bytes = PolicyScorer<P>(policy.scorer()).scratch_bytes(shape); }
  if constexpr (TwoStagePolicy<P>) {
    needs.factors = true;
    needs.scorer_bytes =
        std::max(needs.scorer_bytes, FactorScorer<P>(policy.second_stage()).scratch_bytes(shape));
  }
  if constexpr (AdaptivePolicy<P>) {
    const bool all = policy.adaptive().over == AdaptiveOver::all_heads;
    needs.sharing_heads = static_cast<std::int64_t>(shape.kv_heads) * (all ? shape.layers : 1);
    needs.saved_scores = layers * shape.kv_heads;
  } else if constexpr (LayerScorer<PolicyScorer<P>>) {
    needs.saved_scores = given ? 0 : layers;
  }
  return needs;
}

[[nodiscard]] inline std::span<std::uint64_t> take_check(Arena& arena,
                                                         std::int32_t pages) noexcept {
  return arena.take<std::uint64_t>(check_tables_words(pages));
}

struct PlanMemory {
  PlanHeader* header = nullptr;
  std::span<std::uint8_t> entry_flags;    // [sequences, tables, max_pages]
  std::span<std::uint8_t> second_pass;    // [sequences, tables]
  std::span<float> page_scores;           // [sequences, layers, kv_heads, max_pages]
  std::span<float> saved_scores;          // [sequences, layers, kv_heads or 1, max_rows]
  std::span<std::int32_t> budgets;        // [sequences, layers, kv_heads] where heads share one
  std::span<AdaptiveHead> sharing;        // [heads that share]
  std::span<std::uint64_t> sharing_keys;  // [heads that share, max_rows]
  AdaptiveScratch adaptive;
  std::span<SelectScratch> workers;

  static PlanMemory take(Arena& arena, const PlanShape& shape, const PlanNeeds& needs) noexcept {
    PlanHeader header;
    header.scope = shape.scope;
    header.sequences = shape.sequences;
    header.layers = shape.layers;
    header.kv_heads = shape.kv_heads;
    header.page_size = shape.page_size;
    header.max_rows = shape.max_rows;
    const PlanLayout layout(header);
    const std::int64_t tables = shape.sequences * layout.tables;
    const std::int64_t heads =
        static_cast<std::int64_t>(shape.sequences) * shape.layers * shape.kv_heads;
    PlanMemory m;
    const auto block = arena.take<std::byte>(layout.bytes);
    m.entry_flags = arena.take<std::uint8_t>(tables * layout.max_pages);
    m.second_pass = arena.take<std::uint8_t>(tables);
    m.page_scores = arena.take<float>(heads * layout.max_pages);
    m.saved_scores = arena.take<float>(needs.saved_scores * shape.max_rows);
    m.budgets = arena.take<std::int32_t>(needs.sharing_heads > 0 ? heads : 0);
    m.sharing = arena.take<AdaptiveHead>(needs.sharing_heads);
    m.sharing_keys = arena.take<std::uint64_t>(needs.sharing_heads * shape.max_rows);
    m.adaptive = AdaptiveScratch::take(arena, needs.sharing_heads, shape.max_rows);
    m.workers = arena.take<SelectScratch>(shape.workers);
    for (std::int32_t w = 0; w < shape.workers; ++w) {
      SelectScratch s;
      s.scores = arena.take<float>(shape.max_rows);
      s.rows.keys = arena.take<std::uint32_t>(shape.max_rows);
      s.rows.ranks = arena.take<std::int32_t>(shape.max_rows);
      s.rows.picked = arena.take<std::int32_t>(shape.max_rows);
      s.order = arena.take<std::int32_t>(shape.max_rows);
      s.rank_of = arena.take<std::int32_t>(shape.max_rows);
      s.rows.keep = arena.take<std::uint8_t>(shape.max_rows);
      s.scorer = arena.take<std::byte>(static_cast<std::int64_t>(needs.scorer_bytes));
      s.factors = arena.take<float>(needs.factors ? shape.max_rows : 0);
      if (arena.ok()) { m.workers[static_cast<std::size_t>(w)] = s; }
    }
    if (!arena.ok()) { return m; }
    m.header = new (block.data()) PlanHeader(header);
    const auto clear = [&]<class T>(T value, std::int64_t offset, std::int64_t count) {
      std::uninitialized_fill_n(reinterpret_cast<T*>(block.data() + offset), count, value);
    };
    clear(TablePlan{}, layout.table_plans, tables);
    clear(HeadPlan{}, layout.head_plans, heads);
    std::fill(m.second_pass.begin(), m.second_pass.end(), std::uint8_t{0});
    return m;
  }
};

// The plan's arrays, to write: the workspace is the planner's own.
class PlanWriter {
 public:
  PlanWriter() = default;
  explicit PlanWriter(const PlanHeader& header) noexcept : view_(header) {}

  [[nodiscard]] const PlanView& view() const noexcept { return view_; }
  [[nodiscard]] TablePlan& table(SequenceId s, std::int32_t t) const noexcept {
    return const_cast<TablePlan&>(view_.table(s, t));
  }
  [[nodiscard]] HeadPlan& head(const HeadRef& h) const noexcept {
    return const_cast<HeadPlan&>(view_.head(h.sequence, h.layer, h.head));
  }
  [[nodiscard]] std::int32_t* rows(const HeadRef& h) const noexcept {
    return const_cast<std::int32_t*>(view_.rows(h.sequence, h.layer, h.head));
  }
  // Behind the rows that are listed as kept; read as `Position`, so written as such.
  [[nodiscard]] Position* evicted(const HeadRef& h) const noexcept {
    return reinterpret_cast<Position*>(rows(h) + head(h).kept);
  }
  [[nodiscard]] std::span<const std::int32_t> kept_list(const HeadRef& h) const noexcept {
    return view_.kept_list(h.sequence, h.layer, h.head);
  }
  template <class T>
  [[nodiscard]] static std::span<T> writable(std::span<const T> list) noexcept {
    return {const_cast<T*>(list.data()), list.size()};
  }

 private:
  PlanView view_;
};

// --- the draft --------------------------------------------------------------------------------

struct PlanDraft {
  const CacheView& view;
  const PlanOptions& options;
  std::span<std::uint64_t> check_scratch{};
  PlanMemory memory{};
  PlanWriter plan{};

  [[nodiscard]] PlanHeader& header() const noexcept { return *memory.header; }
  [[nodiscard]] HeadRef first_head(SequenceId s, std::int32_t t) const noexcept {
    return {view, s, view.first_layer(t), view.first_head(t)};
  }
  [[nodiscard]] std::size_t table_index(SequenceId s, std::int32_t t) const noexcept {
    return static_cast<std::size_t>(view.table_index(s, t));
  }
  [[nodiscard]] std::size_t head_index(const HeadRef& h) const noexcept {
    return static_cast<std::size_t>(
        (static_cast<std::int64_t>(raw(h.sequence)) * view.layers + raw(h.layer)) * view.kv_heads +
        raw(h.head));
  }
  // Whether its rows were chosen a second time, with those of some entries fixed.
  [[nodiscard]] bool chosen_again(SequenceId s, std::int32_t t) const noexcept {
    return memory.second_pass[table_index(s, t)] != 0;
  }
  // One flag for each entry of a table.
  [[nodiscard]] std::span<std::uint8_t> entries(SequenceId s, std::int32_t t) const noexcept {
    const auto pages = static_cast<std::size_t>(pages_for(header().max_rows, view.page_size));
    return memory.entry_flags.subspan(table_index(s, t) * pages,
                                      static_cast<std::size_t>(plan.table(s, t).pages_before));
  }
  // One score for each of them.
  [[nodiscard]] std::span<float> page_scores(const HeadRef& h) const noexcept {
    const auto pages = static_cast<std::size_t>(pages_for(header().max_rows, view.page_size));
    return memory.page_scores.subspan(
        head_index(h) * pages,
        static_cast<std::size_t>(plan.table(h.sequence, h.table()).pages_before));
  }
  [[nodiscard]] std::size_t entry_of(SequenceId s, std::int32_t row) const noexcept {
    return static_cast<std::size_t>((row + view.first_row(s)) / view.page_size);
  }
  // Entries that only left padding uses: null pages may stand there. They are neither moved, dropped nor looked at.
  [[nodiscard]] std::int32_t padding_entries(SequenceId s) const noexcept {
    return view.first_row(s) / view.page_size;
  }
  [[nodiscard]] bool shared_entry(SequenceId s, std::int32_t t, std::int32_t e) const noexcept {
    return e >= padding_entries(s) && !owns_entry(first_head(s, t), e);
  }
  // Whether anything can tell the order of rows that are no longer in the order of their positions.
  [[nodiscard]] bool records_order() const noexcept {
    return view.states != nullptr && static_cast<bool>(view.positions);
  }
  [[nodiscard]] bool rotates() const noexcept {
    return options.rerotator != nullptr && options.rerotator->rotates();
  }

  // Whether the key of row `r`, of rank `rank` among the kept, is rotated in the rerotator's mode.
  [[nodiscard]] bool turns(const HeadRef& head, std::int32_t r, std::int32_t rank) const noexcept {
    return options.rerotator != nullptr && options.rerotator->turns(head, r, rank);
  }

  // Whether anything goes from any table.
  [[nodiscard]] bool evicts() const noexcept {
    bool any = false;
    plan.view().for_each_evicting([&](SequenceId, std::int32_t) { any = true; });
    return any;
  }
  // Calls f(sequence, table).
  template <class F>
  void for_each_table(F&& f) const noexcept {
    for (std::int32_t s = 0; s < view.sequences; ++s) {
      for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) { f(SequenceId{s}, t); }
    }
  }
  // Calls f(HeadRef) for the heads that a table serves.
  template <class F>
  void for_each_head(SequenceId s, std::int32_t t, F&& f) const noexcept {
    kvtrim::for_each_head(view, s, t, f);
  }
  // Calls f(HeadRef, scratch) for all heads, in parallel.
  template <Executor E, class F>
  void for_each_item(const E& executor, F&& f) const noexcept {
    const std::int64_t heads = static_cast<std::int64_t>(view.layers) * view.kv_heads;
    executor.for_each(view.sequences * heads, [&](std::int64_t item, std::int32_t worker) noexcept {
      const HeadRef head{view,
                         SequenceId{static_cast<std::int32_t>(item / heads)},
                         LayerId{static_cast<std::int32_t>(item % heads / view.kv_heads)},
                         HeadId{static_cast<std::int32_t>(item % view.kv_heads)}};
      f(head, memory.workers[static_cast<std::size_t>(worker)]);
    });
  }
};

}  // namespace kvtrim::detail
