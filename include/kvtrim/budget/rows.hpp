// SPDX-License-Identifier: Apache-2.0
#pragma once

// A fraction removed is a decimal number: 0.9 means nine tenths, not the double nearest to it. Read as a double,
// 10 * (1 - 0.9) truncates to 0 and 1000 * (1 - 0.9) to 99; both are known faults of other systems.

#include <kvtrim/core/types.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>

namespace kvtrim {

namespace detail {
/// Units of 1e-9 in `removed`, which is rounded to nine decimals.
[[nodiscard]] constexpr std::int64_t decimal_units(double removed) noexcept {
  return static_cast<std::int64_t>(removed * 1e9 + (removed < 0 ? -0.5 : 0.5));
}
}  // namespace detail

/// Rows to keep of `rows` when the fraction `removed` goes: `rows * (1 - removed)` rounded to the nearest integer, halves
/// up, and at least 1 if there is any row.
///
/// \param rows     live rows, >= 0
/// \param removed  fraction removed, 0..1, read as a decimal of up to nine digits
/// \returns exact: (15, 0.9) gives 2, (1000, 0.9) gives 100, (2, 0.6) gives 1; 0 only for 0 rows
/// \par Complexity
/// O(1)
/// \par Source
/// own rule; the truncation of kvpress is `kvpress_rows`
[[nodiscard]] constexpr std::int32_t rows_kept(std::int32_t rows, double removed) noexcept {
  constexpr std::int64_t one = 1'000'000'000;
  const std::int64_t kept_units =
      std::clamp<std::int64_t>(one - detail::decimal_units(removed), 0, one);
  const std::int64_t kept = (std::int64_t{2} * rows * kept_units + one) / (2 * one);
  if (rows < 1) { return 0; }
  return static_cast<std::int32_t>(kept < 1 ? 1 : kept);
}

/// Rows to keep as kvpress counts them: `rows * (1 - removed)` in double, truncated. For comparisons only.
///
/// \returns a count that may be 0, or one less than exact: (10, 0.9) gives 0, (1000, 0.8) gives 199
/// \par Source
/// kvpress 0.5.5, `ScorerPress`; as written
[[nodiscard]] constexpr std::int32_t kvpress_rows(std::int32_t rows, double removed) noexcept {
  return static_cast<std::int32_t>(static_cast<double>(rows) * (1.0 - removed));
}

/// Says how many rows a (layer, KV head) may keep, protected rows included. Knows nothing about scores.
///
/// | expression     | returns           | meaning                          |
/// |----------------|-------------------|----------------------------------|
/// | `b.rows(live)` | to `std::int32_t` | rows to keep of `live` live rows |
///
/// Semantics the compiler cannot check: the result is not negative, not above `live`, and monotone in `live`.
template <class B>
concept Budget = requires(const B& b, std::int32_t live) {
  { b.rows(live) } noexcept -> std::convertible_to<std::int32_t>;
};

namespace detail {
struct BudgetArchetype {
  [[nodiscard]] constexpr std::int32_t rows(std::int32_t live) const noexcept { return live; }
};
static_assert(Budget<BudgetArchetype>);
}  // namespace detail

/// A number of rows.
struct FixedBudget {
  std::int32_t budget = 0;  ///< rows
  /// `min(budget, live)`.
  [[nodiscard]] constexpr std::int32_t rows(std::int32_t live) const noexcept {
    return budget < live ? budget : live;
  }
};
static_assert(Budget<FixedBudget>);

/// A fraction of the rows; see `rows_kept`.
struct FractionBudget {
  double removed = 0;  ///< fraction removed, 0..1
  /// `rows_kept(live, removed)`.
  [[nodiscard]] constexpr std::int32_t rows(std::int32_t live) const noexcept {
    return rows_kept(live, removed);
  }
};
static_assert(Budget<FractionBudget>);

}  // namespace kvtrim
