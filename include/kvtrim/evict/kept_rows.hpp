// SPDX-License-Identifier: Apache-2.0
#pragma once

// A plan that keeps given rows: the rows that stay get one score, those that go a lower one, and the budget is how many
// stay. So everything else (shared pages, ways of removal, moves, refusals) is as for any policy.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/observe/plan_shape.hpp>
#include <kvtrim/policy/external.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtrim {

/// Rows that were chosen elsewhere: by ranks together, by another process, by hand.
///
///     KeptRows kept(view, [&](const HeadRef& head, std::int32_t row) { return ...; });
///     plan(kept.policy(), view, kept.observation(), workspace, options);
///
/// Rows of whole pages leave without a move by `PlanOptions::removal` = `Removal::drop_pages`.
class KeptRows {
 public:
  /// \param view  as it will be when the plan is made
  /// \param keep  keep(HeadRef, row) -> bool, asked once for each live row, in slot order
  /// \par Complexity
  /// O(live rows); allocates 4 bytes for each
  template <class Keep>
  KeptRows(const CacheView& view, Keep&& keep)
      : layers_(view.layers),
        kv_heads_(view.kv_heads),
        max_rows_(std::max(1, plan_shape(view).max_rows)),  // scores, even of no rows
        scores_(static_cast<std::size_t>(heads(view)) * static_cast<std::size_t>(max_rows_)),
        budgets_(static_cast<std::size_t>(heads(view))) {
    float* scores = scores_.data();
    for (std::int32_t i = 0; i < heads(view); ++i, scores += max_rows_) {
      const HeadRef head{view,
                         SequenceId{i / kv_heads_ / layers_},
                         LayerId{i / kv_heads_ % layers_},
                         HeadId{i % kv_heads_}};
      const LiveRows rows(head);
      for (std::int32_t live = 0; live < rows.count(); ++live) {
        const std::int32_t row = rows.row(live);
        if (!keep(head, row)) { continue; }
        scores[row] = 1;
        ++budgets_[static_cast<std::size_t>(i)];
      }
    }
  }

  /// What the plan is made from; valid as long as this object is.
  [[nodiscard]] Observation observation() noexcept {
    Observation obs;
    obs.scores = SequencePlane::dense(scores_.data(), layers_, kv_heads_, max_rows_);
    obs.budgets = budgets_.data();
    obs.budget_rows = {std::int64_t{layers_} * kv_heads_, kv_heads_, 1};
    return obs;
  }
  /// The policy: it protects nothing of its own.
  [[nodiscard]] static constexpr External policy() { return External({.budget = 1}); }

 private:
  [[nodiscard]] static std::int32_t heads(const CacheView& view) noexcept {
    return view.sequences * view.layers * view.kv_heads;
  }

  std::int32_t layers_;
  std::int32_t kv_heads_;
  std::int32_t max_rows_;
  std::vector<float> scores_;          // [sequences, layers, kv_heads, max_rows]: 1 stays, 0 goes
  std::vector<std::int32_t> budgets_;  // [sequences, layers, kv_heads]: how many stay
};

}  // namespace kvtrim
