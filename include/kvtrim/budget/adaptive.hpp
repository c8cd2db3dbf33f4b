// SPDX-License-Identifier: Apache-2.0
#pragma once

// Heads compete for one budget: a head whose scores are spread out gets rows from one whose scores are not. Heads then
// have different lengths, so this frees memory only where each head has its own page table.

#include <kvtrim/core/arena.hpp>
#include <kvtrim/core/order_key.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/select/top_k.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// How a head is kept from getting too little.
enum class AdaptiveForm : std::uint8_t {
  safeguard,  ///< its best `safeguard * budget` rows stay, the others compete (kvpress)
  floor,  ///< (1 - safeguard) of the rows it wins + `safeguard` of its equal share (the authors' code); exact total
  /// The same, each head rounded on its own, and its share rounded down before, as in that code: the total may be above the
  /// budget by half a row per head, or below by less than one and a half.
  floor_rounded,
};

/// Which heads share one budget.
enum class AdaptiveOver : std::uint8_t {
  heads_of_layer,  ///< the KV heads of a layer (Ada-KV)
  all_heads,       ///< all layers and KV heads of a sequence
};

/// Parameters of `adaptive_rows`.
///
/// \par Source
/// Feng et al., 2024, arXiv:2407.11550 (Ada-KV)
struct AdaptiveParams {
  double safeguard = 0.2;                            ///< within 0 and 1
  AdaptiveForm form = AdaptiveForm::safeguard;       ///< how it is applied
  AdaptiveOver over = AdaptiveOver::heads_of_layer;  ///< which heads share
};

/// One head that takes part.
struct AdaptiveHead {
  std::span<const std::uint64_t> keys;  ///< `row_key` of its candidates, in any order
  std::int32_t fixed = 0;               ///< protected rows, which stay whatever their scores
  std::int32_t budget = 0;              ///< rows it would keep if all heads got the same
  std::int32_t rows = 0;                ///< output: rows it keeps, protected ones included

  /// Rows that compete.
  [[nodiscard]] constexpr std::int64_t candidates() const noexcept {
    return static_cast<std::int64_t>(keys.size());
  }
};

/// Working memory of `adaptive_rows`.
struct AdaptiveScratch {
  std::span<std::uint32_t> scores;  // of the rows that compete, head after head
  std::span<std::int32_t> words;    // of the radix select
  std::span<std::uint64_t> ties;    // (position, head) of the rows at the threshold
  std::span<std::uint64_t> head;    // keys of one head
  std::span<std::int64_t> wins;     // of each head

  /// Takes the memory for `heads` heads of at most `rows` rows.
  [[nodiscard]] static AdaptiveScratch take(Arena& arena,
                                            std::int64_t heads,
                                            std::int64_t rows) noexcept {
    AdaptiveScratch s;
    s.scores = arena.take<std::uint32_t>(heads * rows);
    s.words = arena.take<std::int32_t>(heads * rows);
    s.ties = arena.take<std::uint64_t>(heads * rows);
    s.head = arena.take<std::uint64_t>(rows);
    s.wins = arena.take<std::int64_t>(heads);
    return s;
  }
};

namespace detail {

// The lowest of the `k` highest of `keys`, which are reordered. \pre 1 <= k <= keys.size()
[[nodiscard]] inline std::uint64_t kth_highest(std::span<std::uint64_t> keys,
                                               std::int64_t k) noexcept {
  const auto at = keys.begin() + (static_cast<std::ptrdiff_t>(keys.size()) - k);
  std::nth_element(keys.begin(), at, keys.end());
  return *at;
}

// wins[i] = candidates of head i among the `k` best of all heads; keys at or above the head's limit do not compete.
// Equal scores: the lower position, then the lower head. \pre k is not above the number of rows that compete
template <class Limit>
void count_wins(std::span<const AdaptiveHead> heads,
                std::int64_t k,
                Limit&& limit,
                const AdaptiveScratch& s) noexcept {
  std::size_t n = 0;
  for (std::size_t i = 0; i < heads.size(); ++i) {
    s.wins[i] = 0;
    const std::uint64_t below = limit(i);
    for (const std::uint64_t key : heads[i].keys) {
      if (key < below) { s.scores[n++] = static_cast<std::uint32_t>(key >> 32U); }
    }
  }
  if (k < 1) { return; }
  const Threshold threshold =
      threshold_of(s.scores.first(n), s.words.first(static_cast<std::size_t>(k)));
  std::size_t ties = 0;
  for (std::size_t i = 0; i < heads.size(); ++i) {
    const std::uint64_t below = limit(i);
    for (const std::uint64_t key : heads[i].keys) {
      if (key >= below) { continue; }
      const auto score = static_cast<std::uint32_t>(key >> 32U);
      s.wins[i] += score > threshold.key ? 1 : 0;
      if (score == threshold.key) { s.ties[ties++] = (key << 32U) | (0xFFFF'FFFFU - i); }
    }
  }
  const auto tied = s.ties.first(ties);
  const std::uint64_t last = kth_highest(tied, threshold.equal);
  for (const std::uint64_t tie : tied) {
    if (tie >= last) { ++s.wins[static_cast<std::size_t>(0xFFFF'FFFFU - (tie & 0xFFFF'FFFFU))]; }
  }
}

// What is shared, before anything is known of scores. `Head`: `candidates()`, `fixed`, `budget` and `rows`, as an
// `AdaptiveHead` has them.
//
// \returns rows to hand out to candidates
template <class Head>
[[nodiscard]] std::int64_t rows_to_share(std::span<const Head> heads) noexcept {
  std::int64_t total = 0;
  std::int64_t competing = 0;
  for (const Head& h : heads) {
    total += h.budget - h.fixed;
    competing += h.candidates();
  }
  return std::clamp<std::int64_t>(total, 0, competing);
}

// Gives each head its fixed rows and, with a safeguard, its best rows.
//
// \returns rows that are left for those that compete
template <class Head>
[[nodiscard]] std::int64_t give_safe_rows(const AdaptiveParams& params,
                                          std::span<Head> heads) noexcept {
  std::int64_t left = rows_to_share(std::span<const Head>(heads));
  for (Head& h : heads) {
    h.rows = h.fixed;
    if (params.form != AdaptiveForm::safeguard) { continue; }
    // The best rows of each head come first: they stay unless there is no room even for them.
    const auto safe = static_cast<std::int64_t>(h.budget * params.safeguard) - h.fixed;
    const auto own = std::clamp<std::int64_t>(std::min(safe, h.candidates()), 0, left);
    h.rows += static_cast<std::int32_t>(own);
    left -= own;
  }
  return left;
}

// Gives each head what it won (wins[i] rows) of the rows that `give_safe_rows` left.
template <class Head>
void give_won_rows(const AdaptiveParams& params,
                   std::span<Head> heads,
                   std::span<const std::int64_t> wins) noexcept {
  if (params.form == AdaptiveForm::safeguard) {
    for (std::size_t i = 0; i < heads.size(); ++i) {
      heads[i].rows += static_cast<std::int32_t>(wins[i]);
    }
    return;
  }
  const auto room = [&](const Head& h) -> std::int64_t {
    return h.fixed + h.candidates() - h.rows;
  };
  const auto share = [&](std::size_t i) {
    const double equal = std::max(0, heads[i].budget - heads[i].fixed);
    const double won = static_cast<double>(wins[i]) * (1 - params.safeguard);
    return params.form == AdaptiveForm::floor ? won + equal * params.safeguard
                                              : won + std::floor(equal * params.safeguard);
  };
  std::int64_t left = rows_to_share(std::span<const Head>(heads));
  for (std::size_t i = 0; i < heads.size(); ++i) {
    Head& h = heads[i];
    h.rows = h.fixed;
    const bool exact = params.form == AdaptiveForm::floor;
    const auto rows =
        static_cast<std::int64_t>(exact ? std::floor(share(i)) : std::nearbyint(share(i)));
    const std::int64_t most = exact ? std::min(left, room(h)) : room(h);
    h.rows += static_cast<std::int32_t>(std::min(rows, most));
    left -= h.rows - h.fixed;
  }
  if (params.form == AdaptiveForm::floor_rounded) { return; }
  while (left > 0) {  // the head with most still due; one without room passes
    std::size_t next = heads.size();
    double most = 0;
    for (std::size_t i = 0; i < heads.size(); ++i) {
      const double due = share(i) - (heads[i].rows - heads[i].fixed);
      if (room(heads[i]) > 0 && (next == heads.size() || due > most)) {
        next = i;
        most = due;
      }
    }
    Head& h = heads[next];
    // One row, or as many as it lags behind.
    const auto rows = std::clamp<std::int64_t>(
        static_cast<std::int64_t>(most), 1, std::min<std::int64_t>(left, room(h)));
    h.rows += static_cast<std::int32_t>(rows);
    left -= rows;
  }
}

}  // namespace detail

/// Shares the sum of the heads' budgets among them by their scores.
///
/// \param[in,out] heads  `rows` is written: at least `fixed`, at most `fixed` + candidates. Their sum is the sum of the
///   budgets, or all rows if there are fewer, or the protected rows if there are more
/// \param scratch  taken for at least as many heads and rows
/// \pre there are fewer than 2^32 heads, and fewer than 2^31 candidates in all of them together
/// \par Ties
/// the lower position, then the lower head. NaN: lowest class
/// \par Complexity
/// O(candidates) on average, O(heads^2) for the remainders of the floor forms; no allocation
/// \par Source
/// Feng et al., 2024, arXiv:2407.11550; differs: `floor` hands out what rounding leaves, by largest remainder
inline void adaptive_rows(const AdaptiveParams& params,
                          std::span<AdaptiveHead> heads,
                          const AdaptiveScratch& scratch) noexcept {
  const std::int64_t left = detail::give_safe_rows(params, heads);
  // The lowest key of each head's safe rows; what is below competes. `head` holds the keys of one head at a time, so
  // limits are not stored but derived from `rows` when needed: twice, which is still O(candidates).
  const auto limit = [&](std::size_t i) {
    const AdaptiveHead& h = heads[i];
    if (h.rows == h.fixed) { return ~std::uint64_t{0}; }
    const auto keys = scratch.head.first(h.keys.size());
    std::copy(h.keys.begin(), h.keys.end(), keys.begin());
    return detail::kth_highest(keys, h.rows - h.fixed);
  };
  detail::count_wins(heads, left, limit, scratch);
  detail::give_won_rows(
      params, heads, std::span<const std::int64_t>(scratch.wins.first(heads.size())));
}

}  // namespace kvtrim
