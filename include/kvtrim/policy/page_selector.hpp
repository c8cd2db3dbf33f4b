// SPDX-License-Identifier: Apache-2.0
#pragma once

// Whole pages stay or go: no byte moves, only the page table changes. So this policy also serves engines with one table
// for all layers, and the pages are free as soon as the table is written.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/detail/joined_name.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/policy/window_params.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <string_view>

namespace kvtrim {

/// How the scores of a page's rows become one number.
enum class PageReduction : std::uint8_t {
  max,    ///< its best row
  mean,   ///< all its rows
  top_m,  ///< the mean of its m best rows
};

/// What makes heads comparable before their page scores are added.
enum class HeadNorm : std::uint8_t {
  none,  ///< as they are
  sum,   ///< divided by the sum of the magnitudes of the head's scores
};

/// Parameters of `page_scores`.
struct PageScoreParams {
  HeadNorm norm = HeadNorm::sum;                 ///< per KV head
  PageReduction reduction = PageReduction::max;  ///< over a page's rows
  std::int32_t top_m = 4;                        ///< rows of `top_m`
  Reduction heads = Reduction::sum;  ///< over KV heads and layers of one page set; mean = sum
  Sums sums = Sums::floating;        ///< of magnitudes and heads; in `PageSelector` as the scores'
};

/// What shares one set of pages. Never finer than what a page table serves.
enum class PageUnit : std::uint8_t {
  per_table,  ///< as fine as the tables allow: per head, per layer or per group
  per_layer,  ///< one set for all KV heads of a layer
  per_group,  ///< one set for all layers
};

/// How `PageSelector` scores tokens by default: the most attention that any of the window's queries pays to a row,
/// averaged over the group and smoothed over 9 columns.
inline constexpr WindowParams page_window_scores{.window = 16,
                                                 .kernel = 9,
                                                 .rows = Reduction::max,
                                                 .group = Reduction::mean,
                                                 .pooling = Pooling::average,
                                                 .columns = PoolColumns::all_columns};

namespace detail {
template <class TokenScores>
inline constexpr TokenScores default_page_scores{};
template <>
inline constexpr WindowParams default_page_scores<WindowParams> = page_window_scores;
}  // namespace detail

/// Keeps the pages that hold what matters, by any token score; 0 bytes are moved.
///
/// A page is scored by its rows, the scores of KV heads (and layers) that share a page set are added, and the best pages
/// stay. The pages of the sinks, of the last `window` rows and a partly filled last page always stay. As many whole pages
/// are kept as fit into `budget` rows: never more rows than that, and at most page_size - 1 fewer. During generation the
/// same call drops the worst page each time the budget is exceeded, which is every page_size steps.
///
/// \tparam TokenScores  parameters of the token's score (`ScoreParams`)
/// \par Ties
/// the lower page is kept. NaN: taken as the lowest score inside a page (`page_scores`), and counted in the report
/// \par Complexity
/// as the token scorer; selection O(rows) per KV head and O(pages) per table
/// \par Source
/// own; the measurements that chose the defaults are in bench/README.md
template <class TokenScores = WindowParams>
class PageSelector {
  static_assert(ScoreParams<TokenScores>,
                "kvtrim::PageSelector: TokenScores must be parameters of a score with the members "
                "name, title, protects and check(who), as kvtrim::KeyNormParams has them");

 public:
  /// Parameters.
  struct Params {
    TokenScores scores = detail::default_page_scores<TokenScores>;  ///< how a token is scored
    PageScoreParams pages{.heads = Reduction::max};                 ///< from tokens to pages
    PageUnit unit = PageUnit::per_table;                            ///< what shares a page set
    std::int64_t budget = 1024;                                     ///< rows that stay at most
    std::int64_t budget_pages = 0;  ///< pages that stay at most, instead of `budget`
    std::int64_t sinks = 1;         ///< first rows, whose pages always stay
    std::int64_t window = 16;       ///< last rows, whose pages always stay
  };
  static constexpr std::string_view name =
      detail::name_unless_default<"page", TokenScores, WindowParams>;

  /// A budget of 1,024 rows.
  constexpr PageSelector() : PageSelector(Params{}) {}

  /// \throws std::invalid_argument if a size is negative or beyond 31 bits, the budget is below sinks + window, top_m is
  ///   below 1, or a parameter of the scores is out of range; if sums of pages are exact and those of the scores are not, or
  ///   scores that may be above 1 would be added up exactly over heads (`norm` none, `heads` sum)
  explicit constexpr PageSelector(const Params& params) : params_(params) {
    constexpr std::string_view who = "kvtrim::PageSelector";
    const Params& p = params_;
    const std::int64_t least = p.budget_pages == 0 ? 1 : p.budget;  // not looked at beside pages
    detail::check_sizes(who,
                        detail::Sizes{{"sinks", p.sinks},
                                      {"window", p.window},
                                      {"budget_pages", p.budget_pages},
                                      {"budget", p.budget, least}});
    if (p.budget_pages == 0) {
      detail::check_budget(who, p.budget, detail::Sizes{{"sinks", p.sinks}, {"window", p.window}});
    }
    p.scores.check(who);
    detail::check_sizes(who, detail::Sizes{{"top_m", p.pages.top_m, 1}});
    const Sums own = detail::sums_of(p.scores);
    if (p.pages.sums == Sums::exact && own != Sums::exact) {
      throw_invalid_argument(
          "{}: sums of pages are exact, but those of the scores {} are not: over ranks, such "
          "scores go with norm none and the maximum over heads, which need no sums",
          who,
          TokenScores::name);
    }
    if (p.pages.norm == HeadNorm::none && p.pages.heads != Reduction::max) {
      detail::check_exact_addends(who, p.scores);
    }
    params_.pages.sums = own;
  }

  /// The parameters.
  [[nodiscard]] constexpr const Params& params() const noexcept { return params_; }

  /// Rows that stay at most.
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    const std::int64_t own = params_.budget_pages > 0 ? params_.budget_pages * in.page_size -
                                                            in.first_row % std::max(1, in.page_size)
                                                      : params_.budget;
    const std::int64_t budget = in.budget >= 0 ? in.budget : own;
    const auto window = static_cast<std::int32_t>(params_.window);
    return {static_cast<std::int32_t>(std::min<std::int64_t>(budget, in.live)),
            {static_cast<std::int32_t>(params_.sinks), window},
            window,
            Status::ok};
  }
  /// Pages leave the table.
  [[nodiscard]] constexpr Removal removal() const noexcept { return Removal::drop_pages; }
  /// The token scorer.
  [[nodiscard]] constexpr const TokenScores& scorer() const noexcept { return params_.scores; }
  /// From token scores to page scores.
  [[nodiscard]] constexpr const PageScoreParams& page_scores() const noexcept {
    return params_.pages;
  }
  /// What shares a page set.
  [[nodiscard]] constexpr PageUnit unit() const noexcept { return params_.unit; }
  /// Besides its scores: tables as fine as the page sets.
  [[nodiscard]] constexpr Needs needs() const noexcept {
    return {.scope = params_.unit == PageUnit::per_table   ? TableScope::head
                     : params_.unit == PageUnit::per_layer ? TableScope::layer
                                                           : TableScope::group};
  }

 private:
  Params params_;
};
static_assert(Policy<PageSelector<>>);

/// The configuration for contexts whose question comes after the eviction: the `surprisal` of each token, averaged over 7
/// neighbours, as `Observation::scores`; a page counts as its best token; 4 sinks, the last 16 rows. See bench/README.md.
[[nodiscard]] constexpr PageSelector<ExternalParams>::Params agnostic_pages(
    std::int64_t budget) noexcept {
  PageSelector<ExternalParams>::Params p;
  p.pages.norm = HeadNorm::none;
  p.budget = budget;
  p.sinks = 4;
  p.window = 16;
  return p;
}

/// A policy that chooses pages.
///
/// | expression        | returns           | meaning                       |
/// |-------------------|-------------------|-------------------------------|
/// | `p.page_scores()` | `PageScoreParams` | from token scores to pages    |
/// | `p.unit()`        | `PageUnit`        | what shares one set of pages  |
template <class P>
concept PagePolicy = Policy<P> && requires(const P& p) {
  { p.page_scores() } noexcept -> std::convertible_to<PageScoreParams>;
  { p.unit() } noexcept -> std::same_as<PageUnit>;
};
static_assert(PagePolicy<PageSelector<>>);

/// The page set that table `t` of a sequence belongs to.
[[nodiscard]] constexpr std::int32_t unit_of(PageUnit unit,
                                             const CacheView& view,
                                             std::int32_t t) noexcept {
  return unit == PageUnit::per_table   ? t
         : unit == PageUnit::per_group ? 0
                                       : raw(view.first_layer(t));
}

}  // namespace kvtrim
