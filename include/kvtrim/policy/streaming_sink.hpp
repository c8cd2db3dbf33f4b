// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/error.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/policy.hpp>

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace kvtrim {

/// How `StreamingSink` treats page borders.
enum class SinkForm : std::uint8_t {
  pages,  ///< whole pages leave the table: 0 bytes moved, a little more than sinks + recent rows stay
  exact,  ///< exactly sinks + recent rows stay; a decode step overwrites the oldest recent slot
};

/// Keeps the first `sinks` and the last `recent` rows: attention sinks and a sliding window.
///
/// Acts between steps, so a query sees up to sinks + recent rows plus those of its own step; `make_room` cuts before the
/// step instead. In `pages` form, with pages of N rows, sinks + recent to ceil(sinks / N) * N + recent + N - 1 rows stay.
///
/// \tparam Form  how page borders are treated
/// \par Ties
/// none: there are no scores. Rows are counted in position order
/// \par Complexity
/// demand O(1); a page drop is O(pages of the table)
/// \par Source
/// Xiao et al., 2023, arXiv:2309.17453; differs: positions are kept unless `PositionMode::in_cache` is asked for, and
/// `pages` is the default form
template <SinkForm Form = SinkForm::pages>
class StreamingSink {
  static_assert(Form == SinkForm::pages || Form == SinkForm::exact,
                "kvtrim::StreamingSink: Form must be SinkForm::pages or SinkForm::exact");

 public:
  /// Parameters.
  struct Params {
    std::int64_t sinks = 4;      ///< first rows, always kept
    std::int64_t recent = 1024;  ///< last rows, always kept
    std::int64_t capacity = 0;   ///< rows of the cache: recent is cut to what fits; 0: no limit
    /// Rows that stay at most after a cut, whole pages counted: recent is cut to hard_budget - sinks, and in `pages` form
    /// the window shrinks to a page border; if not even one page fits, one stays and the plan is `over_budget`. 0: no limit
    std::int64_t hard_budget = 0;
  };
  static constexpr std::string_view name = "streaming";

  /// The paper's sizes.
  constexpr StreamingSink() : StreamingSink(Params{}) {}

  /// \throws std::invalid_argument if recent is below 1, sinks are negative, either is beyond 31 bits, sinks are not
  ///   below the capacity, or the hard budget leaves no window
  explicit constexpr StreamingSink(Params params) : params_(params) {
    detail::check_sizes("kvtrim::StreamingSink",
                        detail::Sizes{{"sinks", params_.sinks}, {"recent", params_.recent, 1}});
    detail::check_sizes("kvtrim::StreamingSink",
                        detail::Sizes{{"sinks + recent", params_.sinks + params_.recent}});
    const detail::Size limits[]{{"capacity", params_.capacity},
                                {"hard_budget", params_.hard_budget}};
    for (const detail::Size& limit : limits) {
      if (limit.value == 0) { continue; }
      if (limit.value <= params_.sinks) {
        throw_invalid_argument("kvtrim::StreamingSink: {} {} must be above sinks {}",
                               limit.name,
                               limit.value,
                               params_.sinks);
      }
      params_.recent = std::min(params_.recent, limit.value - params_.sinks);
    }
  }

  /// The parameters, with recent cut to the capacity and the hard budget.
  [[nodiscard]] constexpr const Params& params() const noexcept { return params_; }

  /// The same policy, to be applied before `n` new rows are added: cuts to sinks + recent - n, so that no query sees more
  /// than sinks + recent rows. The plan's status is `chunk_too_long` for n above `max_chunk()`.
  [[nodiscard]] constexpr StreamingSink make_room(std::int32_t n) const noexcept {
    StreamingSink other = *this;
    other.incoming_ = n;
    return other;
  }
  /// Longest chunk that `make_room` can make room for.
  [[nodiscard]] constexpr std::int32_t max_chunk() const noexcept {
    return static_cast<std::int32_t>(params_.recent);
  }

  /// Most pages of one table that are ever in use (just before a cut), when at most `chunk` rows are added between cuts.
  [[nodiscard]] constexpr std::int32_t max_pages(std::int32_t page_size,
                                                 std::int32_t chunk = 1) const noexcept {
    const std::int64_t window = params_.recent + chunk + page_size - 1;
    return pages_for(static_cast<std::int32_t>(params_.sinks), page_size) +
           static_cast<std::int32_t>((window + page_size - 1) / page_size);
  }

  /// Rows that stay.
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    const auto sinks = static_cast<std::int32_t>(params_.sinks);
    std::int32_t recent = static_cast<std::int32_t>(params_.recent);
    if (in.budget >= 0) { recent = std::max(0, in.budget - sinks); }
    if (params_.hard_budget > 0) {
      recent = static_cast<std::int32_t>(
          std::min<std::int64_t>(recent, params_.hard_budget - params_.sinks));
    }
    if (incoming_ > recent) { return {in.live, {}, 0, Status::chunk_too_long}; }
    // A budget below the sinks still keeps all of them: the planner compares `keep` with what is protected.
    const bool below_sinks = in.budget >= 0 && in.budget < sinks;
    const std::int32_t most = below_sinks ? in.budget : sinks + recent;
    if (static_cast<std::int64_t>(in.live) + incoming_ <= most) {
      return {in.live, {sinks, recent}, recent, Status::ok};
    }
    recent -= incoming_;
    Status status = Status::ok;
    if constexpr (Form == SinkForm::pages) {
      if (params_.hard_budget > 0 && rows_on_pages(in, recent) + incoming_ > params_.hard_budget) {
        const std::int32_t window = whole_page_window(in);
        recent = std::min(recent, std::max(1, window));
        if (window < 1) { status = Status::over_budget; }
      }
    }
    return {below_sinks ? in.budget : sinks + recent, {sinks, recent}, recent, status};
  }

  /// Depends on the form.
  [[nodiscard]] constexpr Removal removal() const noexcept {
    return Form == SinkForm::pages ? Removal::drop_pages : Removal::overwrite_slot;
  }
  /// None.
  [[nodiscard]] constexpr NoScores scorer() const noexcept { return {}; }

 private:
  // Rows of the pages that hold sinks or left padding.
  [[nodiscard]] constexpr std::int64_t sink_rows(const DemandInput& in) const noexcept {
    const std::int64_t end = params_.sinks + in.first_row + in.page_size - 1;
    return end / in.page_size * in.page_size - in.first_row;
  }
  // Rows of the whole pages that a window of `recent` rows keeps, those of the sinks included.
  [[nodiscard]] constexpr std::int64_t rows_on_pages(const DemandInput& in,
                                                     std::int32_t recent) const noexcept {
    const std::int64_t first = static_cast<std::int64_t>(in.live) - recent + in.first_row;
    const std::int64_t begin =
        recent == 0 ? in.live : first / in.page_size * in.page_size - in.first_row;
    return std::min<std::int64_t>(in.live,
                                  sink_rows(in) + std::max<std::int64_t>(0, in.live - begin));
  }
  // Longest window that starts on a page border and keeps sink pages + window + chunk within the hard budget; below 1
  // if there is none.
  [[nodiscard]] constexpr std::int32_t whole_page_window(const DemandInput& in) const noexcept {
    const std::int64_t most = params_.hard_budget - incoming_ - sink_rows(in);
    if (most < 1) { return 0; }
    const std::int64_t first = std::max<std::int64_t>(0, in.live - most) + in.first_row;
    const std::int64_t border =
        (first + in.page_size - 1) / in.page_size * in.page_size - in.first_row;
    return static_cast<std::int32_t>(std::max<std::int64_t>(0, in.live - border));
  }

  Params params_;
  std::int32_t incoming_ = 0;
};
static_assert(Policy<StreamingSink<>>);
static_assert(Policy<StreamingSink<SinkForm::exact>>);

}  // namespace kvtrim
