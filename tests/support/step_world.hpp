// SPDX-License-Identifier: Apache-2.0
#pragma once

// What attention hands over in a step of a MethodWorld: queries before and after RoPE, LSE and probabilities in double, for
// any batch of its sequences in any order. `ByHand` records it as an engine without a Recorder would.

#include <kvtrim/observe/accumulate.hpp>
#include <kvtrim/observe/column_sums.hpp>
#include <kvtrim/observe/layer_step.hpp>
#include <kvtrim/observe/query_moments.hpp>
#include <kvtrim/observe/query_ring.hpp>
#include <kvtrim/policy/needs.hpp>

#include "support/method_world.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

namespace kvtrim::test {

/// A sequence of a world, and how many of its last tokens a step has computed.
struct Segment {
  std::int32_t sequence;
  std::int32_t tokens;
};
using Batch = std::vector<Segment>;

/// Appends rows as `MethodWorld::append` does, with sums of 0.
inline void append_rows(MethodWorld& world, const Batch& batch) {
  for (const Segment& b : batch) {
    const std::int32_t first = raw(world.cache().next_position(SequenceId{b.sequence}));
    if (world.append(b.sequence, b.tokens) != Status::ok) { throw std::runtime_error("no room"); }
    const CacheView v = world.view();
    world.for_each_row(b.sequence,
                       [&](std::int32_t l, std::int32_t h, std::int32_t r, std::int32_t p) {
                         if (p < first) { return; }
                         const SequenceId s{b.sequence};
                         v.score_sums.at<float>(s, LayerId{l}, HeadId{h}, r) = 0;
                         v.score_compensations.at<float>(s, LayerId{l}, HeadId{h}, r) = 0;
                       });
  }
}

/// One layer of a step.
class StepData {
 public:
  StepData(MethodWorld& world, const Batch& batch, std::int32_t layer)
      : heads_(world.setup().kv_heads * world.setup().group), dim_(world.setup().dim) {
    for (const Segment& b : batch) {
      firsts_.push_back(total_);
      counts_.push_back(b.tokens);
      slots_.push_back(b.sequence);
      total_ += b.tokens;
    }
    rows_ = world.setup().max_rows;
    lse_.resize(at(heads_) * at(total_));
    probabilities_.resize(at(heads_) * at(total_) * at(rows_));
    for (std::size_t i = 0; i < batch.size(); ++i) { fill(world, batch[i], firsts_[i], layer); }
  }
  StepData(const StepData&) = delete;
  StepData& operator=(const StepData&) = delete;

  /// For a view of the batch: its sequence i is `batch[i]`.
  LayerStep step(std::int32_t layer, bool lse) const {
    LayerStep step;
    step.layer = LayerId{layer};
    step.sequences = slots_;
    step.queries = block(lse);
    step.unrotated = block(false);
    step.unrotated.data = unrotated_.data();
    return step;
  }
  /// The rows of segment i alone, as sequence 0.
  QueryBlock block_of(std::size_t i, bool rotated) const {
    QueryBlock b = block(true);
    b.rows = counts_[i];
    b.row_counts = nullptr;
    b.row_firsts = nullptr;
    const std::ptrdiff_t first = firsts_[i];
    b.data = (rotated ? queries_ : unrotated_).data() + first * heads_ * dim_;
    b.lse += first;
    b.positions += first;
    return b;
  }
  const float* probabilities_of(std::size_t i) const {
    return probabilities_.data() + static_cast<std::ptrdiff_t>(firsts_[i]) * rows_;
  }
  std::size_t size() const { return slots_.size(); }
  std::int32_t slot(std::size_t i) const { return slots_[i]; }
  std::int64_t head_stride() const { return static_cast<std::int64_t>(total_) * rows_; }
  std::int32_t row_stride() const { return rows_; }
  std::vector<std::int32_t>& slots() { return slots_; }
  std::vector<Position>& positions() { return positions_; }

 private:
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

  QueryBlock block(bool lse) const {
    QueryBlock b;
    b.data = queries_.data();
    b.query_heads = heads_;
    b.row_firsts = firsts_.data();
    b.row_counts = counts_.data();
    b.row_stride = static_cast<std::int64_t>(heads_) * dim_;
    b.head_stride = dim_;
    b.positions = positions_.data();
    b.lse = lse ? lse_.data() : nullptr;
    b.lse_head_stride = total_;
    return b;
  }

  void fill(MethodWorld& world, const Segment& b, std::int32_t first, std::int32_t layer) {
    const std::int32_t next = raw(world.cache().next_position(SequenceId{b.sequence}));
    for (std::int32_t t = 0; t < b.tokens; ++t) {
      const std::int32_t p = next - b.tokens + t;
      positions_.push_back(Position{p});
      for (std::int32_t h = 0; h < heads_; ++h) {
        const auto q = world.query(b.sequence, layer, h, p);
        const auto u =
            MethodWorld::numbers(8, b.sequence + world.setup().first_name, layer, h, p, dim_);
        queries_.insert(queries_.end(), q.begin(), q.end());
        unrotated_.insert(unrotated_.end(), u.begin(), u.end());
      }
    }
    world.for_each_row(
        b.sequence, [&](std::int32_t l, std::int32_t kv_head, std::int32_t r, std::int32_t p) {
          if (l != layer) { return; }
          const auto k = world.key(b.sequence, l, kv_head, p);
          for (std::int32_t g = 0; g < world.setup().group; ++g) {
            const std::int32_t h = kv_head * world.setup().group + g;
            for (std::int32_t t = 0; t < b.tokens; ++t) {
              if (p > next - b.tokens + t) { continue; }
              double dot = 0;
              for (std::int32_t d = 0; d < dim_; ++d) {
                dot += static_cast<double>(k[at(d)]) *
                       static_cast<double>(queries_[at(((first + t) * heads_ + h) * dim_ + d)]);
              }
              const double weight = std::exp(dot / std::sqrt(static_cast<double>(dim_)));
              probabilities_[at((h * total_ + first + t) * rows_ + r)] = static_cast<float>(weight);
              lse_[at(h * total_ + first + t)] += static_cast<float>(weight);
            }
          }
        });
    for (std::int32_t h = 0; h < heads_; ++h) {
      for (std::int32_t t = first; t < first + b.tokens; ++t) {
        float& sum = lse_[at(h * total_ + t)];
        for (std::int32_t r = 0; r < rows_; ++r) {
          probabilities_[at((h * total_ + t) * rows_ + r)] /= sum;
        }
        sum = std::log(sum);
      }
    }
  }

  std::int32_t heads_, dim_, total_ = 0, rows_ = 0;
  std::vector<float> queries_, unrotated_, lse_, probabilities_;
  std::vector<Position> positions_;
  std::vector<std::int32_t> firsts_, counts_, slots_;
};

/// A view of sequences 0..n-1 of a world in reverse order: what an engine's batch looks like that was filled from the back.
class ReversedView {
 public:
  explicit ReversedView(MethodWorld& world) : view(world.view()) {
    const std::int32_t last = view.sequences - 1;
    const std::int32_t tables = view.tables_per_sequence();
    for (std::int32_t s = last; s >= 0; --s) {
      states_.insert(states_.end(), view.states + s * tables, view.states + (s + 1) * tables);
    }
    view.states = states_.data();
    view.table.ids += last * view.table.rows.sequence * view.table.row_stride;
    view.table.rows.sequence = -view.table.rows.sequence;
    for (SequencePlane* plane :
         {&view.positions, &view.rope_positions, &view.score_sums, &view.score_compensations}) {
      if (!*plane) { continue; }
      plane->base += last * plane->sequence_stride;
      plane->sequence_stride = -plane->sequence_stride;
    }
  }
  ReversedView(const ReversedView&) = delete;
  ReversedView& operator=(const ReversedView&) = delete;

  CacheView view;

 private:
  std::vector<SequenceState> states_;
};

/// The calls that a Recorder replaces, sequence by sequence.
class ByHand {
 public:
  ByHand(const Needs& needs, const MethodSetup& setup, bool lse) : needs_(needs), setup_(setup) {
    const std::int32_t heads = setup.kv_heads * setup.group;
    if (needs.window > 0) {
      ring.emplace(QueryRing::Params{.sequences = setup.sequences,
                                     .layers = setup.layers,
                                     .query_heads = heads,
                                     .head_dim = setup.dim,
                                     .window = needs.window,
                                     .lse = lse});
    }
    if (needs.moments) {
      moments.emplace(QueryMoments::Params{.sequences = setup.sequences,
                                           .layers = setup.layers,
                                           .query_heads = heads,
                                           .head_dim = setup.dim,
                                           .sinks = needs.moments->sinks});
    }
  }

  void record(MethodWorld& world, const StepData& data, std::int32_t layer, bool probabilities) {
    const CacheView view = world.view();
    const LayerId l{layer};
    std::vector<std::byte> scratch(column_sums_scratch_bytes(setup_.dim));
    for (std::size_t i = 0; i < data.size(); ++i) {
      const SequenceId s{data.slot(i)};
      QueryBlock block = data.block_of(i, true);
      const std::int32_t n = block.rows;
      if (ring) {
        std::vector<float> lse;  // not null, though it may be empty
        lse.reserve(1);
        for (std::int32_t h = 0; h < block.query_heads; ++h) {
          for (std::int32_t t = 0; t < n; ++t) { lse.push_back(block.lse_of({}, {}, h, t)); }
        }
        const bool kept = ring->params().lse;
        ring->push(s, l, n, block.data, block.positions, kept ? lse.data() : nullptr);
      }
      if (moments) { moments->accumulate(s, l, data.block_of(i, false), LayerId{0}); }
      for (std::int32_t h = 0; needs_.accumulate && h < setup_.kv_heads; ++h) {
        if (!probabilities) {
          accumulate_column_sums(
              *needs_.accumulate, {view, s, l, HeadId{h}}, block, LayerId{0}, scratch);
        }
        for (std::int32_t t = 0; probabilities && t < n; ++t) {
          accumulate_probabilities(*needs_.accumulate,
                                   {view, s, l, HeadId{h}},
                                   {data.probabilities_of(i) + t * data.row_stride() +
                                        h * setup_.group * data.head_stride(),
                                    setup_.group,
                                    data.head_stride()});
        }
      }
    }
  }

  Observation observation(MethodWorld& world) {
    Observation seen = world.observation();  // filters, W_O
    seen.queries = {};
    seen.statistics = {};
    if (ring) { seen.queries = ring->queries(); }
    if (moments) {
      for (std::int32_t s = 0; s < setup_.sequences; ++s) { moments->finish(SequenceId{s}); }
      seen.statistics = moments->statistics();
    }
    return seen;
  }

  std::optional<QueryRing> ring;
  std::optional<QueryMoments> moments;

 private:
  Needs needs_;
  MethodSetup setup_;
};

/// Bits of the accumulated scores of a world's rows.
inline std::vector<std::uint32_t> sum_bits(MethodWorld& world) {
  std::vector<std::uint32_t> bits;
  const CacheView v = world.view();
  for (std::int32_t s = 0; s < v.sequences; ++s) {
    world.for_each_row(s, [&](std::int32_t l, std::int32_t h, std::int32_t r, std::int32_t) {
      for (const SequencePlane& plane : {v.score_sums, v.score_compensations}) {
        std::uint32_t x;
        std::memcpy(&x, plane.row(SequenceId{s}, LayerId{l}, HeadId{h}, r), sizeof x);
        bits.push_back(x);
      }
    });
  }
  return bits;
}

}  // namespace kvtrim::test
