// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sequences are known by slots, the engine's own numbers of them; what a slot has seen lies in a block (`SlotBlocks`), which
// forks share until one of them records. Over 400 lines: one class; a step is checked against all it has seen, then recorded.

#include <kvtrim/cache/head_ref.hpp>
#include <kvtrim/core/executor.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/observe/accumulate.hpp>
#include <kvtrim/observe/column_sums.hpp>
#include <kvtrim/observe/detail/check_step.hpp>
#include <kvtrim/observe/detail/recorder_parts.hpp>
#include <kvtrim/observe/detail/slot_blocks.hpp>
#include <kvtrim/observe/layer_step.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/observe/query_moments.hpp>
#include <kvtrim/observe/query_ring.hpp>
#include <kvtrim/policy/needs.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace kvtrim {

/// Gathers what policies need to have seen, layer by layer of each step, and shows it to a plan.
///
/// It owns the last queries, the moments and its scratch, in host memory. Accumulated attention lies in the view's score
/// planes, which are zeroed by whoever appends rows (`PagedCache` does). Filters and the output projection stay the
/// engine's. An LSE of a step before an eviction counts rows that are gone: window scores use it as it is.
///
/// ```
/// Recorder recorder(needs(policy), {.layers = 32, .query_heads = 32, .kv_heads = 8, .head_dim = 128});
/// recorder.record(view, {.layer = layer, .queries = block});                     // per layer of a step
/// evict(policy, cache, view, recorder.observation(), workspace);                 // after it
/// ```
///
/// \par Complexity
/// `record`: that of `QueryRing::push`, `QueryMoments::accumulate`, `accumulate_column_sums` or `accumulate_probabilities`,
/// as far as they are needed; `fork` O(1), and the first `record` of one of two that share copies what the slot has seen
/// \par Allocation
/// in the constructor only: `bytes(needs, params)`
/// \par Thread-safety
/// one thread; `record` works on all of the executor's
/// \par Source
/// own: what is gathered is named with `QueryRing`, `QueryMoments` and `accumulate_column_sums`
class Recorder {
 public:
  /// The model's shape, and what the engine offers.
  using Params = RecorderParams;

  /// Makes a recorder that has seen nothing.
  ///
  /// \throws std::invalid_argument if an extent is below 1, the KV heads do not divide the query heads, a need is out of
  ///   range, the engine does not offer what is needed, or filters or output projection are of another model
  Recorder(const Needs& needs, const Params& params)
      : needs_(needs), p_((detail::check_recorder(needs, params), params)), blocks_(p_.sequences) {
    if (needs.window > 0) { ring_.emplace(detail::ring_params(needs, params)); }
    if (needs.moments) { moments_.emplace(detail::moment_params(needs, params)); }
    const std::size_t slots = index(params.sequences);
    const std::size_t layers = slots * index(params.layers);
    scratch_.resize(detail::record_scratch_bytes(needs, params) * index(params.workers));
    batch_.resize(slots);
    marks_.assign(slots, 0);
    seen_.assign(layers, 0);
    stale_.assign(layers, 0);
  }

  /// Bytes that a recorder allocates: known before it is made. Moments are by far the largest, 8 * head_dim^2 for each query
  /// head of each layer and slot.
  [[nodiscard]] static std::size_t bytes(const Needs& needs, const Params& params) noexcept {
    const std::size_t slots = index(params.sequences);
    const std::size_t parts[]{
        needs.window > 0 ? QueryRing::bytes(detail::ring_params(needs, params)) : 0,
        needs.moments ? QueryMoments::bytes(detail::moment_params(needs, params)) : 0};
    for (const std::size_t part : parts) {
      if (part > static_cast<std::size_t>(too_large / 4)) { return part; }
    }
    return parts[0] + parts[1] +
           detail::record_scratch_bytes(needs, params) * index(params.workers) +
           detail::SlotBlocks::bytes(params.sequences) +
           slots * (sizeof(std::int32_t) + sizeof(std::int64_t)) +
           slots * index(params.layers) * (sizeof(std::int64_t) + sizeof(std::uint8_t));
  }

  /// Records one layer of one step, after its rows were written and before the next step.
  ///
  /// \param view  the batch's sequences; sums read its keys and write its score planes
  /// \returns `ok`; otherwise nothing was recorded and `fault` has the numbers. `workspace_too_small`: more workers than
  ///   `Params::workers`. `bad_observation`: a layer, slot, shape or LSE is missing or out of range, a slot occurs twice,
  ///   score planes are absent, a row is a hole, or positions do not ascend from those in the window. Without positions the
  ///   step must follow the last one that was recorded: `truncate` first where tokens were taken back
  template <Executor E = Serial>
  Status record(const CacheView& view, const LayerStep& step, const E& executor = {}) noexcept {
    fault_ = check(view, step, static_cast<std::int32_t>(executor.workers()));
    if (fault_.status != Status::ok) { return fault_.status; }
    for_each_sequence(view, step, [&](std::int32_t, std::int32_t slot) { own(slot); });
    executor.for_each(static_cast<std::int64_t>(view.sequences) * p_.kv_heads,
                      [&](std::int64_t item, std::int32_t worker) noexcept {
                        const std::int32_t i = static_cast<std::int32_t>(item) / p_.kv_heads;
                        if (step.queries.count(SequenceId{i}) == 0) { return; }
                        const auto h = static_cast<std::int32_t>(item) - i * p_.kv_heads;
                        record_head(view, step, i, h, worker);
                      });
    for_each_sequence(view, step, [&](std::int32_t i, std::int32_t slot) {
      const SequenceId from{i}, to{blocks_[slot]};
      const std::int32_t rows = step.queries.count(from);
      if (ring_) {
        ring_->advance(to, step.layer, step.queries, from, next_position(view, step, i));
      }
      if (moments_) { moments_->advance(to, step.layer, rows); }
      seen_[layer_index(raw(to), raw(step.layer))] += rows;
      stale_[layer_index(raw(to), raw(step.layer))] = 1;
    });
    scale_ = step.queries.scale;
    soft_cap_ = step.queries.soft_cap;
    return Status::ok;
  }

  /// What the sequences of a view have shown: sequence i of the view is `slots[i]`, its layer 0 is layer `first`. Valid until
  /// the next call of a member function that is not const.
  ///
  /// Moments are finished here, once after each change. Queries are left out while a step is under way in these layers, or
  /// if one of them was not recorded; statistics if none of the slots has any: `plan` then answers `bad_observation`.
  ///
  /// \param layers  0: all from `first` on
  /// \returns nothing at all, and a `fault`, if a slot or layer is out of range or there are more slots than `sequences`
  [[nodiscard]] Observation observation(std::span<const std::int32_t> slots,
                                        LayerId first = {},
                                        std::int32_t layers = 0) noexcept {
    fault_ = detail::check_range(p_, slots, first, layers);
    if (fault_.status != Status::ok) { return {}; }
    for (std::size_t i = 0; i < slots.size(); ++i) { batch_[i] = blocks_[slots[i]]; }
    return observation_of(slots.size(), first, layers > 0 ? layers : p_.layers - raw(first));
  }
  /// The same for a view of all slots and layers.
  [[nodiscard]] Observation observation() noexcept {
    fault_ = {};
    std::copy(blocks_.all().begin(), blocks_.all().end(), batch_.begin());
    return observation_of(batch_.size(), {}, p_.layers);
  }

  /// What of `needs` the observation of these slots and layers would lack, by the name of its member, first things first;
  /// empty: nothing. Token scores are the caller's, planes and states the view's: they are not looked at.
  ///
  /// \returns "slots" if a slot or layer is out of range; "window", "accumulate", "moments", "filters" or "output"
  [[nodiscard]] std::string_view missing(const Needs& needs,
                                         std::span<const std::int32_t> slots,
                                         LayerId first = {},
                                         std::int32_t layers = 0) const noexcept {
    if (detail::check_range(p_, slots, first, layers).status != Status::ok) { return "slots"; }
    const std::int32_t end = layers > 0 ? raw(first) + layers : p_.layers;
    const auto all_slots = [&](auto&& good) {
      return std::all_of(
          slots.begin(), slots.end(), [&](std::int32_t s) { return good(SequenceId{blocks_[s]}); });
    };
    const bool seen = all_slots([&](SequenceId block) {
      bool each = true;
      for (std::int32_t l = raw(first); l < end; ++l) {
        each = each && seen_[layer_index(raw(block), l)] > 0;
      }
      return each;
    });
    if (needs.window > 0) {
      const bool kept = ring_ && needs.window <= needs_.window && all_slots([&](SequenceId block) {
                          return ring_->count(block, first) > 0 &&
                                 ring_->complete(block, first, end - raw(first));
                        });
      if (!kept) { return "window"; }
    }
    if (needs.accumulate) {
      const auto& own = needs_.accumulate;
      const bool same = own && own->adds_as(*needs.accumulate);
      if (!same || !seen) { return "accumulate"; }
    }
    if (needs.moments && (needs_.moments != needs.moments || !seen)) { return "moments"; }
    if (needs.filters && !p_.filters) { return "filters"; }
    return needs.output && !p_.output ? "output" : "";
  }
  /// The same for a policy.
  template <Policy P>
  [[nodiscard]] std::string_view missing(const P& policy,
                                         std::span<const std::int32_t> slots,
                                         LayerId first = {},
                                         std::int32_t layers = 0) const {
    return missing(kvtrim::needs(policy), slots, first, layers);
  }

  /// Lets slot `to` have seen what `from` has, as a fork of the sequence does. Nothing is copied until one of them records
  /// or is truncated.
  /// \pre both are below `Params::sequences`
  void fork(std::int32_t from, std::int32_t to) noexcept {
    KVTRIM_ASSERT(blocks_.has(from) && blocks_.has(to));
    if (blocks_.has(from) && blocks_.has(to)) { blocks_.fork(from, to); }
  }

  /// Forgets what slot `slot` has seen, for its next sequence.
  /// \pre it is below `Params::sequences`
  void reset(std::int32_t slot) noexcept {
    KVTRIM_ASSERT(blocks_.has(slot));
    if (!blocks_.has(slot)) { return; }
    const std::int32_t block = blocks_.own(slot, [](std::int32_t, std::int32_t) {});
    if (ring_) { ring_->reset(SequenceId{block}); }
    if (moments_) { moments_->reset(SequenceId{block}); }
    for (std::int32_t l = 0; l < p_.layers; ++l) {
      seen_[layer_index(block, l)] = 0;
      stale_[layer_index(block, l)] = 1;
    }
  }

  /// Drops the queries from position `next` on out of the window, as a truncation of the sequence does; also after a step
  /// that was given up half-way. Moments keep what they saw, and so do sums of rows that stay: the queries of tokens that
  /// are taken back go on to count.
  /// \pre the slot is below `Params::sequences`, `next` not negative
  void truncate(std::int32_t slot, Position next) noexcept {
    KVTRIM_ASSERT(blocks_.has(slot) && raw(next) >= 0);
    if (blocks_.has(slot) && ring_) { ring_->truncate(SequenceId{own(slot)}, next); }
  }

  /// Why the last `record` or `observation` was refused; `ok` if it was not.
  [[nodiscard]] const RecordFault& fault() const noexcept { return fault_; }
  /// What is gathered.
  [[nodiscard]] const Needs& needs() const noexcept { return needs_; }
  /// The parameters.
  [[nodiscard]] const Params& params() const noexcept { return p_; }

 private:
  static constexpr std::size_t index(std::int64_t i) noexcept {
    return static_cast<std::size_t>(i);
  }
  [[nodiscard]] std::size_t layer_index(std::int32_t block, std::int32_t l) const noexcept {
    return index(block) * index(p_.layers) + index(l);
  }
  // Calls f(sequence of the view, slot) for each that takes part.
  template <class F>
  void for_each_sequence(const CacheView& view, const LayerStep& step, F&& f) noexcept {
    for (std::int32_t i = 0; i < view.sequences; ++i) {
      if (step.queries.count(SequenceId{i}) > 0) { f(i, step.slot(SequenceId{i})); }
    }
  }
  [[nodiscard]] static std::int32_t next_position(const CacheView& view,
                                                  const LayerStep& step,
                                                  std::int32_t i) noexcept {
    if (step.queries.positions != nullptr) { return 0; }  // nothing reads it
    return view.state(SequenceId{i}, step.layer_of(view), HeadId{0}).next_position;
  }

  // Everything that can be wrong, before anything is written.
  [[nodiscard]] RecordFault check(const CacheView& view,
                                  const LayerStep& step,
                                  std::int32_t workers) noexcept {
    RecordFault fault = detail::check_step(view, step, needs_, p_, workers);
    ++step_;
    for (std::int32_t i = 0; fault.status == Status::ok && i < view.sequences; ++i) {
      fault = check_slot(step, i);
    }
    for (std::int32_t i = 0; fault.status == Status::ok && i < view.sequences; ++i) {
      const SequenceId s{i};
      if (step.queries.count(s) == 0) { continue; }
      fault = detail::check_sequence(view, step, needs_, i);
      if (fault.status == Status::ok && ring_) {
        fault = detail::check_positions(step.queries,
                                        i,
                                        next_position(view, step, i),
                                        ring_->last(SequenceId{blocks_[step.slot(s)]}, step.layer));
      }
    }
    return fault;
  }

  // Whether its slot exists, and is that of no sequence before it.
  [[nodiscard]] RecordFault check_slot(const LayerStep& step, std::int32_t i) noexcept {
    const std::int32_t rows = step.queries.count(SequenceId{i}), slot = step.slot(SequenceId{i});
    if (rows < 0) { return detail::bad_step("rows", rows, 0, i); }
    if (rows == 0) { return {}; }
    if (!blocks_.has(slot)) { return detail::bad_step("slot", slot, p_.sequences, i); }
    if (std::exchange(marks_[index(slot)], step_) == step_) {
      return detail::bad_step("slot used twice", slot, slot, i);
    }
    return {};
  }

  void record_head(const CacheView& view,
                   const LayerStep& step,
                   std::int32_t i,
                   std::int32_t h,
                   std::int32_t worker) noexcept {
    const SequenceId from{i}, to{blocks_[step.slot(SequenceId{i})]};
    const std::int32_t group = p_.query_heads / p_.kv_heads;
    if (ring_) { ring_->store(to, step.layer, step.queries, from, h * group, group); }
    if (moments_) {
      moments_->add_heads(to, step.layer, step.unrotated, from, LayerId{0}, h * group, group);
    }
    if (!needs_.accumulate) { return; }
    const HeadRef head{view, from, step.layer_of(view), HeadId{h}};
    const StepProbabilities& given = step.probabilities;
    if (given.data == nullptr) {
      const std::size_t share = scratch_.size() / index(p_.workers);
      accumulate_column_sums(*needs_.accumulate,
                             head,
                             step.queries,
                             LayerId{0},
                             std::span(scratch_).subspan(index(worker) * share, share));
      return;
    }
    const float* const data =
        given.data + i * given.sequence_stride + h * group * given.head_stride;
    for (std::int32_t r = 0; r < step.queries.count(from); ++r) {
      accumulate_probabilities(
          *needs_.accumulate, head, {data + r * given.row_stride, group, given.head_stride});
    }
  }

  // The slot's block, which is then its alone.
  std::int32_t own(std::int32_t slot) noexcept {
    return blocks_.own(slot, [&](std::int32_t shared, std::int32_t block) {
      if (ring_) { ring_->fork(SequenceId{shared}, SequenceId{block}); }
      if (moments_) { moments_->fork(SequenceId{shared}, SequenceId{block}); }
      for (std::int32_t l = 0; l < p_.layers; ++l) {
        seen_[layer_index(block, l)] = seen_[layer_index(shared, l)];
        stale_[layer_index(block, l)] = stale_[layer_index(shared, l)];
      }
    });
  }

  // Of the first `count` blocks of the batch.
  [[nodiscard]] Observation observation_of(std::size_t count,
                                           LayerId first,
                                           std::int32_t layers) noexcept {
    const auto batch = std::span(batch_).first(count);
    Observation seen;
    if (ring_) {
      seen.queries = ring_->queries();
      seen.queries.data += raw(first) * seen.queries.layer_stride;
      if (seen.queries.lse != nullptr) {
        seen.queries.lse += raw(first) * seen.queries.lse_layer_stride;
      }
      seen.queries.slots = batch_.data();
      seen.queries.scale = scale_;
      seen.queries.soft_cap = soft_cap_;
      for (std::size_t i = 0; i < count; ++i) {
        if (ring_->complete(SequenceId{batch[i]}, first, layers)) { continue; }
        seen.queries = {};
        fault_ = {Status::bad_observation,
                  "window",
                  static_cast<std::int32_t>(i),
                  ring_->count(SequenceId{batch[i]}, first),
                  needs_.window};
        break;
      }
    }
    if (moments_) {
      bool any = false;
      for (const std::int32_t block : batch) {
        for (std::int32_t l = raw(first); l < raw(first) + layers; ++l) {
          any = any || seen_[layer_index(block, l)] > 0;
          std::uint8_t& stale = stale_[layer_index(block, l)];
          if (stale != 0) { moments_->finish(SequenceId{block}, LayerId{l}); }
          stale = 0;
        }
      }
      if (any) { seen.statistics = statistics_from(first, layers); }
    }
    seen.filters = p_.filters;
    if (seen.filters) { seen.filters.data += raw(first) * seen.filters.layer_stride; }
    seen.output = p_.output;
    if (seen.output) { seen.output.data += raw(first) * seen.output.layer_stride; }
    return seen;
  }
  [[nodiscard]] QueryStatistics statistics_from(LayerId first, std::int32_t layers) const noexcept {
    if (!moments_) { return {}; }
    QueryStatistics s = moments_->statistics();
    const std::int64_t means = static_cast<std::int64_t>(raw(first)) * s.query_heads * s.dim;
    s.mean += means;
    s.covariance += means * s.dim;
    s.slots = batch_.data();
    s.slot_layers = p_.layers;
    s.layers = layers;
    return s;
  }

  Needs needs_;
  Params p_;
  detail::SlotBlocks blocks_;  // where what each slot has seen lies in ring and moments
  std::optional<QueryRing> ring_;
  std::optional<QueryMoments> moments_;
  std::vector<std::byte> scratch_;   // [workers]
  std::vector<std::int32_t> batch_;  // [slots] blocks of the last observation
  std::vector<std::int64_t> marks_;  // [slots] last step that it took part in
  std::vector<std::int64_t> seen_;   // [blocks, layers] queries recorded
  std::vector<std::uint8_t> stale_;  // [blocks, layers] moments changed since they were finished
  std::int64_t step_ = 0;            // count of checks
  float scale_ = 0;                  // of the queries' logits, as the last step had it
  float soft_cap_ = 0;
  RecordFault fault_;
};

}  // namespace kvtrim
