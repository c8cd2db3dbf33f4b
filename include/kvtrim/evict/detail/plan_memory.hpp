// SPDX-License-Identifier: Apache-2.0
#pragma once

// The layout of a plan's workspace: what checking the tables takes, what lasts as the plan, then what is used while it is
// made. The first is sized by the pool alone: until the tables are checked, no length is believed.

#include <kvtrim/budget/adaptive.hpp>
#include <kvtrim/cache/check_view.hpp>
#include <kvtrim/core/arena.hpp>
#include <kvtrim/evict/plan.hpp>
#include <kvtrim/observe/plan_shape.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/score/scorer.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <type_traits>
#include <utility>

namespace kvtrim::detail {

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
  std::span<float> factors;  // of the second stage
};

// What a policy's kind adds to the workspace.
struct PlanNeeds {
  std::size_t scorer_bytes = 0;    // of one call, the larger of both stages'
  bool factors = false;            // there is a second stage
  std::int64_t saved_scores = 0;   // lists of scores that are kept until rows are chosen
  std::int64_t sharing_heads = 0;  // heads that share one budget
};

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
  std::span<std::int64_t> nan_counts;  // [workers]
  std::span<SelectScratch> workers;

  static PlanMemory take(Arena& arena, const PlanShape& shape, const PlanNeeds& needs) noexcept {
    PlanMemory m;
    const std::int64_t tables = tables_of(shape.scope, shape.layers, shape.kv_heads);
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
    m.entry_flags = arena.take<std::uint8_t>(all_tables * max_pages);
    m.second_pass = arena.take<std::uint8_t>(all_tables);
    m.page_scores = arena.take<float>(heads * max_pages);
    m.saved_scores = arena.take<float>(needs.saved_scores * shape.max_rows);
    m.budgets = arena.take<std::int32_t>(needs.sharing_heads > 0 ? heads : 0);
    m.sharing = arena.take<AdaptiveHead>(needs.sharing_heads);
    m.sharing_keys = arena.take<std::uint64_t>(needs.sharing_heads * shape.max_rows);
    m.adaptive = AdaptiveScratch::take(arena, needs.sharing_heads, shape.max_rows);
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
      s.scorer = arena.take<std::byte>(static_cast<std::int64_t>(needs.scorer_bytes));
      s.factors = arena.take<float>(needs.factors ? shape.max_rows : 0);
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

// What a policy's kind asks of the planner: scorers, and memory beside what every plan needs.

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

}  // namespace kvtrim::detail
