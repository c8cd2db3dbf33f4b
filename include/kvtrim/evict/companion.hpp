// SPDX-License-Identifier: Apache-2.0
#pragma once

// Caches that must lose the same tokens as another: a draft model's, an indexer's keys, MTP layers. With the same page ids they
// are page planes of its view, and move with its rows. With tables of their own, they are told what the first plan keeps.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/sequence_plane.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/evict/plan.hpp>
#include <kvtrim/observe/observation.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// Planes by which a cache with the same page ids moves along: put them into `CacheView::page_planes` of the other's view. They
/// are common to its heads and layers, which must then keep the same rows (otherwise `plan` says `planes_disagree`).
///
/// \param companion   its planes; tables are not looked at. Layers at a stride; rows without gaps between their features; no
///   values inside its keys
/// \param[out] out    receives the planes; if it is too small, the rest is only counted
/// \returns how many there are: one for each layer and head of keys and of values, or for each layer where the heads of a token
///   lie side by side. 0: a plane cannot be described, or has layer bases
/// \par Complexity
/// O(planes); no allocation
[[nodiscard]] inline std::int32_t companion_planes(const CacheView& companion,
                                                   std::span<PagePlane> out) noexcept {
  std::int32_t count = 0;
  for (const bool keys : {true, false}) {
    const Plane& p = keys ? companion.k : companion.v;
    if (!p) { continue; }
    if (!p.contiguous_rows() || p.layer_bases != nullptr) { return 0; }
    const bool side_by_side = companion.kv_heads == 1 || p.head_stride == p.row_bytes();
    const std::int32_t heads = side_by_side ? 1 : companion.kv_heads;
    for (std::int32_t i = 0; i < companion.layers * heads; ++i, ++count) {
      if (count >= static_cast<std::int32_t>(out.size())) { continue; }
      PagePlane& to = out[static_cast<std::size_t>(count)] = {};
      to.base = p.row(LayerId{i / heads}, PageId{0}, HeadId{i % heads}, Slot{0});
      to.page_stride = p.page_stride;
      to.token_stride = p.token_stride;
      to.row_bytes = p.row_bytes() * (side_by_side ? companion.kv_heads : 1);
      to.of_values = !keys;
    }
  }
  return count;
}

/// What a plan keeps, as scores and budgets: with them, `External` (sinks 0, recent 0) keeps the same rows of a companion that
/// has tables of its own. Plan all companions before the first is applied: if one cannot, nothing has happened.
///
/// \param plan         evicts the same rows from all heads and layers
/// \param[out] scores  [sequences, max_rows] 1 for a row that stays, 0 for one that goes
/// \param max_rows     at least the rows of the longest sequence
/// \param[out] budgets [sequences]
/// \param[out] obs     its scores and budgets refer to them
/// \returns `ok`; the plan's own status if it is not usable; `unequal_budget`: heads or layers keep different rows;
///   `workspace_too_small`: fewer scores or budgets than that. `obs` is unchanged then
/// \par Complexity
/// O(rows of all layers and heads); no allocation
[[nodiscard]] inline Status keep_the_same(const PlanView& plan,
                                          std::span<float> scores,
                                          std::int32_t max_rows,
                                          std::span<std::int32_t> budgets,
                                          Observation& obs) noexcept {
  if (!usable(plan.status())) { return plan.status(); }
  const auto sequences = static_cast<std::size_t>(plan.sequences());
  if (max_rows < 0 || budgets.size() < sequences ||
      scores.size() < sequences * static_cast<std::size_t>(max_rows)) {
    return Status::workspace_too_small;
  }
  for (std::int32_t s = 0; s < plan.sequences(); ++s) {
    const SequenceId id{s};
    const auto row =
        scores.subspan(static_cast<std::size_t>(s) * static_cast<std::size_t>(max_rows),
                       static_cast<std::size_t>(max_rows));
    for (std::int32_t t = 0; t < plan.tables(); ++t) {
      if (plan.table(id, t).extent_before > max_rows) { return Status::workspace_too_small; }
    }
    std::int32_t kept = 0;
    std::ranges::fill(row, 0.0F);
    plan.for_each_kept(id, LayerId{0}, HeadId{0}, [&](std::int32_t r) {
      row[static_cast<std::size_t>(r)] = 1;
      ++kept;
    });
    for (std::int32_t i = 1; i < plan.layers() * plan.kv_heads(); ++i) {
      std::int32_t others = 0;
      bool same = true;
      plan.for_each_kept(
          id, LayerId{i / plan.kv_heads()}, HeadId{i % plan.kv_heads()}, [&](std::int32_t r) {
            same = same && row[static_cast<std::size_t>(r)] == 1;
            ++others;
          });
      if (!same || others != kept) { return Status::unequal_budget; }
    }
    budgets[static_cast<std::size_t>(s)] = kept;
  }
  obs.scores = {};
  obs.scores.base = reinterpret_cast<std::byte*>(scores.data());
  obs.scores.element_bytes = sizeof(float);
  obs.scores.row_stride = sizeof(float);
  obs.scores.sequence_stride = std::int64_t{max_rows} * std::int64_t{sizeof(float)};
  obs.budgets = budgets.data();
  obs.budget_rows = {1, 0, 0};
  return Status::ok;
}

}  // namespace kvtrim
