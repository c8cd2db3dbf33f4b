// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/order_key.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/select/protection.hpp>
#include <kvtrim/select/top_k.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace kvtrim {

/// Whether a row may be chosen at all.
enum class RowKind : std::uint8_t {
  free,    ///< protected or a candidate, by its rank
  locked,  ///< it stays, whatever its score
  dropped  ///< it goes, whatever its score
};

/// Memory of `choose_rows`, each [rows].
struct RowScratch {
  std::span<std::uint32_t> keys;
  std::span<std::int32_t> ranks;   ///< candidate -> rank
  std::span<std::int32_t> picked;  ///< candidates that stay
  std::span<std::uint8_t> keep;    ///< by rank: 1 where the row stays; the result
};

/// Chooses the rows that stay: the protected and the locked ones, then the best of the others.
///
/// \param live         rows, by their rank in position order
/// \param range        ranks that compete
/// \param keep         rows that stay in all
/// \param kind_of      f(rank) -> RowKind
/// \param score_of     f(rank) -> float; NaN allowed
/// \param first_stage  rows, protected ones included, after which `rescore()` is called and the others are chosen by new
///   scores; -1: one stage
/// \returns NaN among the scores of the candidates
/// \par Ties
/// the lower rank stays. NaN: lowest
/// \par Complexity
/// O(rows); no allocation
template <class KindOf, class ScoreOf, class Rescore>
std::int64_t choose_rows(std::int32_t live,
                         const CandidateRange& range,
                         std::int32_t keep,
                         const KindOf& kind_of,
                         const ScoreOf& score_of,
                         std::int32_t first_stage,
                         const Rescore& rescore,
                         const RowScratch& scratch) noexcept {
  const auto index = [](std::int32_t i) { return static_cast<std::size_t>(i); };
  std::int32_t wanted = keep;
  std::int32_t competing = 0;
  for (std::int32_t rank = 0; rank < live; ++rank) {
    const bool candidate = rank >= range.begin && rank < range.end;
    const RowKind kind = kind_of(rank);
    const bool stays = kind == RowKind::locked || (!candidate && kind == RowKind::free);
    scratch.keep[index(rank)] = stays ? 1 : 0;
    wanted -= stays ? 1 : 0;
    if (candidate && kind == RowKind::free) { scratch.ranks[index(competing++)] = rank; }
  }
  std::int64_t nan = 0;
  for (std::int32_t i = 0; i < competing; ++i) {
    const float score = score_of(scratch.ranks[index(i)]);
    scratch.keys[index(i)] = order_key(score);
    nan += is_nan(score) ? 1 : 0;
  }
  const auto pick = [&](std::int32_t count) {
    const auto picked = scratch.picked.first(index(std::clamp(count, 0, competing)));
    top_k(scratch.keys.first(index(competing)), picked);
    for (const std::int32_t i : picked) { scratch.keep[index(scratch.ranks[index(i)])] = 1; }
    wanted -= static_cast<std::int32_t>(picked.size());
  };
  if (first_stage >= 0) {
    pick(std::min(first_stage - (live - range.count()), wanted));
    rescore();
    const std::int32_t all = std::exchange(competing, 0);
    for (std::int32_t i = 0; i < all; ++i) {
      const std::int32_t rank = scratch.ranks[index(i)];
      if (scratch.keep[index(rank)] != 0) { continue; }
      scratch.keys[index(competing)] = order_key(score_of(rank));
      scratch.ranks[index(competing++)] = rank;
    }
  }
  pick(wanted);
  return nan;
}

}  // namespace kvtrim
