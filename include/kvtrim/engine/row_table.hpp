// SPDX-License-Identifier: Apache-2.0
#pragma once

// For engines whose keys and values cannot be reached (llama.cpp's public API shows none): pages without planes. Rows leave,
// nothing moves, and all layers and KV heads keep the same rows.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/core/error.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/policy/policy.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace kvtrim {

/// The rows of one sequence in an engine that shows no keys and values: positions, sums of attention, and one table of pages of
/// `page_size` consecutive rows. What leaves it is a list of positions.
///
/// \par Allocation
/// in the constructor, and in `plan` when the workspace grows
/// \par Thread-safety
/// one thread
class RowTable {
 public:
  /// The model's shape, and what is scored.
  struct Params {
    std::int32_t layers = 1;     ///< layers that give scores
    std::int32_t kv_heads = 1;   ///< KV heads of a layer
    std::int32_t page_size = 1;  ///< rows that stay or go together
    std::int32_t max_rows = 0;   ///< most live rows
    bool sums = false;           ///< keep sums of attention (`Needs::accumulate`)
  };

  /// An empty sequence.
  /// \throws std::invalid_argument if an extent is below 1
  explicit RowTable(const Params& params) : p_(params) {
    if (p_.layers < 1 || p_.kv_heads < 1 || p_.page_size < 1 || p_.max_rows < 1) {
      throw_invalid_argument(
          "kvtrim::RowTable: layers {}, kv_heads {}, page_size {} and max_rows {} must be at "
          "least 1",
          p_.layers,
          p_.kv_heads,
          p_.page_size,
          p_.max_rows);
    }
    const auto rows = static_cast<std::size_t>(p_.max_rows);
    const std::size_t all = rows * static_cast<std::size_t>(p_.layers * p_.kv_heads);
    positions_.resize(rows);
    pages_.resize(static_cast<std::size_t>(pages_for(p_.max_rows, p_.page_size)));
    std::iota(pages_.begin(), pages_.end(), 0);
    sums_.resize(p_.sums ? 2 * all : 0);
    check_layout(view());
  }
  RowTable(const RowTable&) = delete;
  RowTable& operator=(const RowTable&) = delete;

  /// The parameters.
  [[nodiscard]] const Params& params() const noexcept { return p_; }
  /// Rows in the cache.
  [[nodiscard]] std::int32_t live_rows() const noexcept { return state_.live_rows; }
  /// Position of the next token.
  [[nodiscard]] std::int32_t next_position() const noexcept { return state_.next_position; }
  /// Positions of the live rows, ascending.
  [[nodiscard]] std::span<const Position> positions() const noexcept {
    return {positions_.data(), static_cast<std::size_t>(state_.live_rows)};
  }

  /// Adds the rows of the next `n` tokens.
  /// \returns `ok`; `too_many_rows`: nothing was changed
  Status append(std::int32_t n) noexcept {
    if (n < 0 || n > p_.max_rows - state_.live_rows) { return Status::too_many_rows; }
    const auto first = static_cast<std::size_t>(state_.live_rows);
    const auto count = static_cast<std::size_t>(n);
    for (std::size_t i = 0; i < count; ++i) {
      positions_[first + i] = Position{state_.next_position + static_cast<std::int32_t>(i)};
    }
    const auto rows = static_cast<std::size_t>(p_.max_rows);
    for (std::size_t head = 0; head < sums_.size() / rows; ++head) {
      std::fill_n(sums_.begin() + static_cast<std::ptrdiff_t>(head * rows + first), n, 0.0F);
    }
    state_.live_rows += n;
    state_.next_position += n;
    state_.next_rope_position = state_.next_position;
    state_.steps += 1;
    state_.generation += 1;
    return Status::ok;
  }
  /// Forgets the sequence.
  void clear() noexcept {
    const std::uint64_t generation = state_.generation + 1;
    state_ = {};
    state_.generation = generation;
  }
  /// Becomes a copy of another table of the same parameters, as a fork of its sequence.
  /// \pre the parameters are the same
  void assign(const RowTable& other) noexcept {
    KVTRIM_ASSERT(p_.max_rows == other.p_.max_rows && sums_.size() == other.sums_.size());
    state_ = other.state_;
    std::ranges::copy(other.positions_, positions_.begin());
    std::ranges::copy(other.sums_, sums_.begin());
  }
  /// Renumbers the rows 0, 1, 2, ..., as an engine that shifts them does (`llama_cpp::for_each_shift`).
  void renumber() noexcept {
    for (std::int32_t r = 0; r < state_.live_rows; ++r) {
      positions_[static_cast<std::size_t>(r)] = Position{r};
    }
    state_.next_position = state_.next_rope_position = state_.live_rows;
    state_.generation += 1;
  }

  /// The sequence as a cache of one sequence without planes. Its pages are numbered 0, 1, 2, ... in order.
  [[nodiscard]] CacheView view() noexcept {
    CacheView v;
    v.page_size = p_.page_size;
    v.pages = static_cast<std::int32_t>(pages_.size());
    v.layers = p_.layers;
    v.kv_heads = p_.kv_heads;
    v.sequences = 1;
    v.table = {.ids = pages_.data(),
               .row_stride = static_cast<std::int64_t>(pages_.size()),
               .max_pages = v.pages};
    v.states = &state_;
    v.positions = SequencePlane::dense(positions_.data(), 1, 1, p_.max_rows);
    v.positions.layer_stride = v.positions.head_stride = 0;  // common to all
    if (p_.sums) {
      v.score_sums = SequencePlane::dense(sums_.data(), p_.layers, p_.kv_heads, p_.max_rows);
      v.score_compensations = v.score_sums;
      v.score_compensations.base += sums_.size() / 2 * sizeof(float);
    }
    return v;
  }
  /// Says which rows go. The plan is valid until the next one.
  ///
  /// \param seen    what the policy needs: ready-made scores (`Observation::scores`), if it does not score by sums
  /// \param budget  rows to keep instead of the policy's own
  /// \returns the plan. Besides `plan`'s own: `planes_disagree`, `bad_options` or `unequal_budget` where rows would
  ///   move or be overwritten, or layers or KV heads keep different rows
  template <Policy P>
  [[nodiscard]] PlanRef plan(const P& policy,
                             Observation seen = {},
                             std::int32_t budget = policy_budget) {
    budget_ = budget;
    seen.budgets = &budget_;
    seen.budget_rows = {0, 0, 0};
    const CacheView now = view();
    const std::size_t bytes = plan_workspace_bytes(policy, plan_shape(now, seen));
    if (workspace_.size() < bytes) { workspace_.resize(bytes); }
    // Never overwritten: positions ascend by row.
    const Removal removal =
        policy.removal() == Removal::drop_pages ? Removal::drop_pages : Removal::stable_pack;
    return kvtrim::plan(policy, now, seen, workspace_, {.removal = removal});
  }
  /// Removes the rows that a plan of this table names, after the engine did.
  Report commit(const PlanRef& made) noexcept {
    const CacheView now = view();
    Report report;
    report.status = apply(made, now);
    if (report.status != Status::ok) { return report; }
    DenseTables tables(now, pages_.data(), nullptr, nullptr, {});
    report = kvtrim::commit(made, now, tables);
    std::iota(pages_.begin(), pages_.end(), 0);
    return report;
  }

 private:
  Params p_;
  SequenceState state_;
  std::vector<Position> positions_;  // [max_rows]
  std::vector<std::int32_t> pages_;  // their own numbers
  std::vector<float> sums_;  // [2, layers, kv_heads, max_rows]: sums, then their rounding errors
  std::vector<std::byte> workspace_;
  std::int32_t budget_ = policy_budget;
};

}  // namespace kvtrim
