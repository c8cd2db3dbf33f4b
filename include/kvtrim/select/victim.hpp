// SPDX-License-Identifier: Apache-2.0
#pragma once

// One row too many, the case of every decode step: found in one pass, without sorting.

#include <kvtrim/core/order_key.hpp>
#include <kvtrim/core/sequence_plane.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/select/protection.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// The row that goes, and how many of the candidates' scores are NaN.
struct Victim {
  std::int32_t row = -1;
  std::int64_t nan_count = 0;
};

/// Finds the candidate with the lowest score.
///
/// \param scores         [rows] higher is kept; NaN allowed
/// \param positions      [rows] where rows are out of order; null: row r has rank r
/// \param range          ranks, in position order, of the candidates; not empty
/// \param next_position  position of the sequence's next token: above all others
/// \param scratch        [rows] used where rows are out of order
/// \par Ties
/// of equal scores the highest position goes. NaN: lowest, counted
/// \par Complexity
/// O(rows); no allocation
[[nodiscard]] inline Victim lowest_row(std::span<const float> scores,
                                       Int32View positions,
                                       const CandidateRange& range,
                                       std::int32_t next_position,
                                       std::span<std::int32_t> scratch) noexcept {
  const auto rows = static_cast<std::int32_t>(scores.size());
  std::int32_t first = range.begin;
  std::int32_t last = range.end;
  // Where rows are out of order: the first ones are the positions below `range.begin`, the last ones the highest
  // positions, if so many of them are live; otherwise both borders are looked for.
  std::int32_t begin_position = range.begin;
  std::int32_t end_position = next_position - (rows - range.end);
  if (positions != nullptr) {
    first = 0;
    last = rows;
    std::int32_t before = 0;
    std::int32_t behind = 0;
    for (std::int32_t r = 0; r < rows; ++r) {
      before += positions[r] < begin_position ? 1 : 0;
      behind += positions[r] >= end_position ? 1 : 0;
    }
    if (before != range.begin || behind != rows - range.end) {
      const auto begin = scratch.begin();
      for (std::int32_t r = 0; r < rows; ++r) { begin[r] = positions[r]; }
      std::nth_element(begin, begin + range.begin, begin + rows);
      begin_position = scratch[static_cast<std::size_t>(range.begin)];
      std::nth_element(begin, begin + range.end - 1, begin + rows);
      end_position = scratch[static_cast<std::size_t>(range.end - 1)] + 1;
    }
  }
  // The lowest key, then, among rows of that key, the last position. A block's keys are looked at again only where its
  // lowest is the lowest so far, so that the first look needs no branch.
  constexpr std::int32_t block = 512;
  constexpr std::uint32_t none = ~std::uint32_t{0};  // above every key
  std::uint32_t keys[block];
  std::uint32_t lowest = none;
  Victim victim;
  for (std::int32_t begin = first; begin < last; begin += block) {
    const std::int32_t n = std::min(block, last - begin);
    const float* const score = scores.data() + begin;
    std::uint32_t nans = 0;
    if (positions == nullptr) {
      for (std::int32_t i = 0; i < n; ++i) {
        keys[i] = order_key(score[i]);
        nans += is_nan(score[i]) ? 1U : 0U;
      }
    } else {
      const Int32View at = positions + begin;
      for (std::int32_t i = 0; i < n; ++i) {
        // No short circuit: a branch per row would cost more than the comparison.
        const bool candidate = static_cast<unsigned>(at[i] >= begin_position) &
                               static_cast<unsigned>(at[i] < end_position);
        keys[i] = candidate ? order_key(score[i]) : none;
        nans += static_cast<unsigned>(candidate) & static_cast<unsigned>(is_nan(score[i]));
      }
    }
    victim.nan_count += nans;
    std::uint32_t least = none;
    for (std::int32_t i = 0; i < n; ++i) { least = std::min(least, keys[i]); }
    if (least == none || least > lowest) { continue; }
    const auto position_of = [&](std::int32_t r) {
      return positions == nullptr ? r : positions[r];
    };
    for (std::int32_t i = 0; i < n; ++i) {
      if (keys[i] == least &&
          (least < lowest || position_of(begin + i) > position_of(victim.row))) {
        lowest = least;
        victim.row = begin + i;
      }
    }
  }
  return victim;
}

}  // namespace kvtrim
