// SPDX-License-Identifier: Apache-2.0
#pragma once

// A scheduler that runs ahead of its workers must know what an eviction gives back before it is planned. Where a budget is
// fixed, its scores decide which rows go, but not how many.

#include <kvtrim/core/error.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/policy/peak_pages.hpp>
#include <kvtrim/policy/policy.hpp>

#include <cstdint>
#include <type_traits>

namespace kvtrim {

/// Rows that a cut by `policy` leaves in one table, and pages that leave it.
struct CutCounts {
  std::int32_t rows = 0;   ///< live rows afterwards
  std::int32_t pages = 0;  ///< pages that leave (with separate ids of K and V: pairs of them)
};

/// What the next cut of a table does, before there is a plan: exactly what a plan then says, if it is `ok`.
///
/// Holds for tables without left padding, pages that others share and reserved entries, and policies that protect the last row.
///
/// \param policy  one with a budget of each head's own
/// \param in      the table, as the planner would tell the policy of it
/// \param way     way of removal; `automatic`: the policy's own. Without states or positions, and in compressed rows, the planner
///   packs where a policy would overwrite: say `stable_pack` then
/// \throws std::invalid_argument if whole pages leave by the scores of their rows, which only a plan can count
/// \par Complexity
/// O(1), constexpr where the policy's demand is; no allocation
/// \par Source
/// own
template <Policy P>
[[nodiscard]] constexpr CutCounts cut_counts(const P& policy,
                                             const DemandInput& in,
                                             Removal way = Removal::automatic) {
  static_assert(!AdaptivePolicy<P>,
                "kvtrim::released_pages: heads that share a budget divide it by their scores; use "
                "kvtrim::peak_pages for what they have at most");
  if (way == Removal::automatic) { way = policy.removal(); }
  constexpr bool by_position =
      std::is_same_v<std::remove_cvref_t<decltype(policy.scorer())>, NoScores>;
  if (way == Removal::drop_pages && !PagePolicy<P> && !by_position) {
    throw_invalid_argument(
        "kvtrim::released_pages: {} drops those of {} rows' pages of {} that no best row is in: "
        "only a plan knows how many",
        P::name,
        in.live,
        in.page_size);
  }
  const std::int32_t left = detail::rows_after_cut(policy, in, way);
  // The slot that the next row overwrites keeps its page.
  const bool hole = way == Removal::overwrite_slot && in.live - left == 1;
  return {left, pages_for(in.live, in.page_size) - pages_for(left + (hole ? 1 : 0), in.page_size)};
}

/// Pages that leave a table of `live_rows` rows, of which none has gone before; for others, `cut_counts`.
///
/// \throws as `cut_counts`; std::invalid_argument if `live_rows` is negative or `page_size` below 1
/// \par Source
/// own
template <Policy P>
[[nodiscard]] constexpr std::int32_t released_pages(const P& policy,
                                                    std::int32_t live_rows,
                                                    std::int32_t page_size,
                                                    Removal way = Removal::automatic) {
  detail::check_sizes("kvtrim::released_pages",
                      detail::Sizes{{"live_rows", live_rows}, {"page_size", page_size, 1}});
  DemandInput in;
  in.live = in.state.live_rows = in.state.next_position = live_rows;
  in.page_size = page_size;
  return cut_counts(policy, in, way).pages;
}

}  // namespace kvtrim
