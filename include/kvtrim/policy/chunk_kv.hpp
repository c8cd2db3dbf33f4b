// SPDX-License-Identifier: Apache-2.0
#pragma once

// A chunk that holds a protected row stays whole, as in kvpress, where marking the window's rows raises the chunk that
// they share with older rows.

#include <kvtrim/core/error.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/detail/joined_name.hpp>
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/policy/window_params.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string_view>

namespace kvtrim {

/// Parameters of `ChunkedScorer`: a token score, and how many tokens share it.
///
/// \tparam Scores  parameters of a score (`ScoreParams`)
/// \par Source
/// Liu et al., 2025, arXiv:2502.00299; the size as kvpress
template <class Scores>
struct Chunked {
  static_assert(
      ScoreParams<Scores>,
      "kvtrim::Chunked: Scores must be parameters of a score with the members name, title, "
      "protects and check(who), as kvtrim::KeyNormParams has them");
  static constexpr std::string_view name = detail::name_around<"chunked", Scores>;
  static constexpr std::string_view title = detail::title_around<"kvtrim::Chunked", Scores>;
  static constexpr Protection protects = Scores::protects;

  Scores scores{};          ///< of a token
  std::int32_t chunk = 20;  ///< tokens of a chunk; chunk c begins at position c * chunk

  /// \throws std::invalid_argument if the chunk is below 1, or a parameter of the scores out of range; with
  ///   exact ones also if the chunk is above `exact_scores`, or scores may be above 1
  constexpr void check(std::string_view who) const {
    detail::check_sizes(who, detail::Sizes{{"chunk", chunk, 1}});
    scores.check(who);
    detail::check_exact_addends(who, scores);
    if (sums() == Sums::exact && chunk > exact_scores) {
      throw_invalid_argument("{}: an exact sum of the scores of {} rows, but it holds at most {}",
                             who,
                             chunk,
                             exact_scores);
    }
  }
  /// As for the scores: exact ones are also added up exactly over the rows of a chunk and the heads.
  [[nodiscard]] constexpr Sums sums() const noexcept { return detail::sums_of(scores); }
  /// As for the scores.
  [[nodiscard]] constexpr std::int32_t unscored() const noexcept {
    return detail::unscored_rows(scores);
  }
  /// As for the scores, and what chunk borders go by: the rows' positions and the next one.
  [[nodiscard]] constexpr Needs needs() const noexcept {
    Needs n = detail::own_needs(scores);
    n.positions = n.states = true;
    return n;
  }
};
static_assert(ScoreParams<Chunked<WindowParams>>);

/// Keeps the chunks of consecutive tokens that score highest, the same for all KV heads of a layer.
///
/// Chunks that hold one of the first `sinks` or the last `recent` tokens always stay whole. Never more than `budget` rows
/// stay: a budget that cuts a chunk keeps its lower positions. Chunk borders go by position, so they are the same at the
/// next eviction; a chunk that was cut competes with what is left of it. Use it at the end of a prompt, or while
/// generating.
///
/// \tparam Scores  parameters of a score (`ScoreParams`)
/// \par Ties
/// the lower position is kept. NaN: a chunk with a NaN row goes first
/// \par Complexity
/// as `ChunkedScorer`; selection O(rows)
/// \par Source
/// Liu et al., 2025, arXiv:2502.00299, with kvpress's chunk of 20 and SnapKV's scores; differs: a budget in rows, not
/// in chunks (kvpress's is `kvpress_chunk_rows`); no reuse of one layer's chunks for the next
template <class Scores = WindowParams>
class ChunkKV {
  static_assert(
      ScoreParams<Scores>,
      "kvtrim::ChunkKV: Scores must be parameters of a score with the members name, title, "
      "protects and check(who), as kvtrim::KeyNormParams has them");

 public:
  /// Parameters.
  struct Params {
    std::int64_t budget = 1024;                     ///< rows that stay
    std::int64_t chunk = 20;                        ///< tokens of a chunk
    std::int64_t sinks = Scores::protects.sinks;    ///< first rows, always kept
    std::int64_t recent = Scores::protects.recent;  ///< last rows, always kept
    Scores scores{};                                ///< of a token
  };
  static constexpr std::string_view name =
      detail::name_unless_default<"chunkkv", Scores, WindowParams>;

  /// Chunks of 20, a budget of 1,024 rows.
  constexpr ChunkKV() : ChunkKV(Params{}) {}

  /// \throws std::invalid_argument if the chunk is below 1, a size negative or beyond 31 bits, the budget below what
  ///   may have to stay (the sinks up to the end of their last chunk, recent + chunk - 1), `recent` below the window of
  ///   the scores, or a parameter of the scores out of range
  explicit constexpr ChunkKV(const Params& params) : params_(params) {
    constexpr std::string_view who = "kvtrim::ChunkKV";
    const Params& p = params_;
    detail::check_sizes(who, detail::Sizes{{"chunk", p.chunk, 1}});
    const std::int64_t most = std::numeric_limits<std::int32_t>::max() - p.chunk;
    detail::check_sizes(
        who,
        detail::Sizes{
            {"sinks", p.sinks, 0, most}, {"recent", p.recent, 0, most}, {"budget", p.budget, 1}});
    const std::int64_t first = (p.sinks + p.chunk - 1) / p.chunk * p.chunk;
    const std::int64_t last = p.recent > 0 ? p.recent + p.chunk - 1 : 0;
    if (p.budget < first + last) {
      throw_invalid_argument(
          "{}: budget {} must be at least {}: sinks {} and recent {} in whole chunks of {}",
          who,
          p.budget,
          first + last,
          p.sinks,
          p.recent,
          p.chunk);
    }
    scorer().check(who);
    detail::check_unscored(who, detail::Size{"recent", p.recent}, p.scores);
  }

  /// The parameters.
  [[nodiscard]] constexpr const Params& params() const noexcept { return params_; }

  /// Rows that stay.
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    const std::int64_t chunk = params_.chunk;
    const std::int64_t next = in.state.next_position;
    const std::int64_t window = std::max<std::int64_t>(0, next - params_.recent) / chunk * chunk;
    const std::int64_t first = (params_.sinks + chunk - 1) / chunk * chunk;
    const std::int64_t recent = params_.recent > 0 ? next - window : 0;
    return {std::min(in.budget_or(params_.budget), in.live),
            {static_cast<std::int32_t>(first),
             static_cast<std::int32_t>(std::min<std::int64_t>(recent, in.live))},
            0,
            Status::ok};
  }
  /// Rows close up in order.
  [[nodiscard]] constexpr Removal removal() const noexcept { return Removal::stable_pack; }
  /// The token score, averaged over chunks.
  [[nodiscard]] constexpr Chunked<Scores> scorer() const noexcept {
    return {params_.scores, static_cast<std::int32_t>(params_.chunk)};
  }

 private:
  Params params_;
};
static_assert(Policy<ChunkKV<>>);

/// Rows that kvpress's ChunkKV keeps of `tokens`: as many chunks as its truncated fraction says, at least one, including
/// the last, partly filled one. For comparisons only.
///
/// \par Source
/// kvpress 0.5.5, `ChunkKVPress`, for scores that protect the end of the prompt; as written
[[nodiscard]] constexpr std::int32_t kvpress_chunk_rows(std::int32_t tokens,
                                                        double removed,
                                                        std::int32_t chunk) noexcept {
  const std::int32_t chunks = (tokens + chunk - 1) / chunk;
  const auto kept = std::max(1, static_cast<std::int32_t>(chunks * (1.0 - removed)));
  return std::min(tokens, kept * chunk - (chunks * chunk - tokens));
}

}  // namespace kvtrim
