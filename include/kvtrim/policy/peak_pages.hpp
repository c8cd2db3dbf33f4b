// SPDX-License-Identifier: Apache-2.0
#pragma once

// A policy acts between steps, so memory must hold what a step adds before anything goes. The lengths are followed step by
// step, with the policy's own demands: whatever a policy's rules are, also a user's, its peak needs no formula of its own.

#include <kvtrim/budget/adaptive.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/select/protection.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace kvtrim {

/// When an engine lets a policy cut a sequence.
enum class CutTimes : std::uint8_t {
  after_prompt,  ///< once, at the end of the prompt; what is generated stays
  each_step,     ///< at the end of the prompt, and after each token that is generated
  each_chunk,    ///< after each chunk of the prompt, and after each token that is generated
};

/// What `peak_pages` must know besides lengths.
struct PeakOptions {
  CutTimes cuts = CutTimes::after_prompt;  ///< the peak is highest where cuts are fewest
  std::int32_t budget = -1;  ///< given at run time (`Observation::budgets`); -1: the policy's own
  std::int32_t layers = 1;  ///< layers of the model, for budgets that differ by layer (`PyramidKV`)
};

/// Pages of one table; of a sequence: times its tables.
struct PeakPages {
  std::int64_t prompt = 0;   ///< most of them while the prompt is read, its last chunk included
  std::int64_t running = 0;  ///< most of them after the cut at the end of the prompt
  /// The larger of both.
  [[nodiscard]] constexpr std::int64_t most() const noexcept { return std::max(prompt, running); }

  friend constexpr bool operator==(const PeakPages&, const PeakPages&) = default;
};

namespace detail {

// Rows that a cut by way `way` leaves in a table of `in.live` rows; of heads that share a budget, on average and at most.
template <Policy P>
[[nodiscard]] constexpr std::int32_t rows_after_cut(const P& policy,
                                                    const DemandInput& in,
                                                    Removal way) {
  const Demand demand = policy.demand(in);
  if (!usable(demand.status) || demand.keep >= in.live) { return in.live; }
  const CandidateRange range = candidates(demand.protection, in.live);
  const std::int32_t keep = std::max(demand.keep, in.live - range.count());
  if constexpr (AdaptivePolicy<P>) {  // rounded by head: up to half a row more for each
    const bool rounded = policy.adaptive().form == AdaptiveForm::floor_rounded;
    return std::min(in.live, keep + (rounded ? 1 : 0));
  } else if constexpr (PagePolicy<P> || std::is_same_v<decltype(policy.scorer()), NoScores>) {
    if (!PagePolicy<P> && way != Removal::drop_pages) { return keep; }
    // Whole pages of candidates may go: all of them, or those that exceed the budget.
    const std::int32_t begin = pages_for(range.begin, in.page_size);
    const std::int32_t pages = std::max(0, range.end / in.page_size - begin);
    const std::int32_t fixed = in.live - pages * in.page_size;
    const std::int32_t room =
        PagePolicy<P> ? std::clamp((keep - fixed) / in.page_size, 0, pages) : 0;
    return fixed + room * in.page_size;
  } else {
    return keep;
  }
}

// Follows the length of one table.
template <Policy P>
class PeakFollower {
 public:
  constexpr PeakFollower(const P& policy,
                         std::int32_t page_size,
                         std::int32_t layer,
                         const PeakOptions& options) noexcept
      : policy_(policy) {
    in_.page_size = page_size;
    in_.budget = options.budget;
    in_.layer = LayerId{layer};
    in_.layers = options.layers;
  }

  constexpr void append(std::int32_t rows) noexcept {
    in_.live += rows;
    in_.state.live_rows = in_.live;
    in_.state.next_position += rows;
    hole_ = false;
  }
  constexpr void cut() {
    const std::int32_t left = rows_after_cut(policy_, in_, policy_.removal());
    if (left == in_.live) { return; }
    hole_ = in_.live - left == 1 && policy_.removal() == Removal::overwrite_slot;
    unequal_ = AdaptivePolicy<P>;
    in_.live = in_.state.live_rows = in_.state.rows_at_eviction = left;
  }
  // A slot that the next row will overwrite keeps its page. Of heads that share a budget each may open a page of its own:
  // together they have at most these pages times their number.
  [[nodiscard]] constexpr std::int64_t pages() const noexcept {
    const std::int64_t rows = in_.live + std::int64_t{hole_ ? 1 : 0};
    const std::int64_t size = in_.page_size;
    return (rows + (unequal_ && rows > 0 ? size - 1 : 0) + size - 1) / size;
  }

 private:
  const P& policy_;
  DemandInput in_;
  bool hole_ = false;
  bool unequal_ = false;
};

}  // namespace detail

/// Most pages that a sequence ever has under `policy`, in each of its tables: what its prompt takes until it is cut, and what
/// it takes from then on, with the page that a step may open before the policy acts. No run has more; a run under a policy
/// with a fixed budget gets there.
///
/// Where heads share a budget (`AdaKV`) or layers have different ones (`PyramidKV`), a table's pages are the average of an
/// upper bound, rounded up: times the sequence's tables, they bound its pages. Holds for tables without left padding and
/// without pages that others share, and for the policy's own way of removal.
///
/// \param prompt      rows of the prompt
/// \param new_tokens  rows added after it, one a step
/// \param page_size   rows per page
/// \param chunk       rows of the prompt that are read at a time; matters where each chunk is cut
/// \pre of heads that share a budget, `policy.demand` looks at nothing but their rows, as all of the library's budgets do
/// \throws std::invalid_argument if a length is negative, `page_size`, `chunk` or `options.layers` below 1, or
///   prompt + new_tokens beyond 31 bits
/// \par Complexity
/// O(layers * (prompt / chunk + new_tokens)) demands, or O(layers) where nothing is cut after the prompt; constexpr where the
/// policy's demand is; no allocation
/// \par Source
/// own
template <Policy P>
[[nodiscard]] constexpr PeakPages peak_pages(const P& policy,
                                             std::int64_t prompt,
                                             std::int64_t new_tokens,
                                             std::int64_t page_size,
                                             std::int64_t chunk,
                                             const PeakOptions& options = {}) {
  detail::check_sizes("kvtrim::peak_pages",
                      detail::Sizes{{"prompt", prompt},
                                    {"new_tokens", new_tokens},
                                    {"page_size", page_size, 1},
                                    {"chunk", chunk, 1},
                                    {"layers", options.layers, 1}});
  detail::check_sizes("kvtrim::peak_pages",
                      detail::Sizes{{"prompt + new_tokens", prompt + new_tokens}});
  PeakPages sum;
  for (std::int32_t layer = 0; layer < options.layers; ++layer) {
    detail::PeakFollower<P> table(policy, static_cast<std::int32_t>(page_size), layer, options);
    PeakPages peak;
    const bool cuts = options.cuts == CutTimes::each_chunk;
    for (std::int64_t row = 0; row < prompt; row += cuts ? chunk : prompt) {
      if (row > 0) { table.cut(); }
      table.append(static_cast<std::int32_t>(std::min(cuts ? chunk : prompt, prompt - row)));
      peak.prompt = std::max(peak.prompt, table.pages());
    }
    table.cut();
    peak.running = table.pages();
    const bool grows = options.cuts == CutTimes::after_prompt;
    const std::int64_t step = grows ? std::max<std::int64_t>(1, new_tokens) : 1;
    for (std::int64_t row = 0; row < new_tokens; row += step) {
      table.append(static_cast<std::int32_t>(step));
      peak.running = std::max(peak.running, table.pages());
      if (!grows) { table.cut(); }
    }
    sum.prompt += peak.prompt;
    sum.running += peak.running;
  }
  const std::int64_t layers = options.layers;
  return {(sum.prompt + layers - 1) / layers, (sum.running + layers - 1) / layers};
}

}  // namespace kvtrim
