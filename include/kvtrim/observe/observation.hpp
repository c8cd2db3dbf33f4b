// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/page_table.hpp>
#include <kvtrim/cache/plane.hpp>
#include <kvtrim/core/types.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// Base of the logarithm in an engine's LSE.
enum class LseBase : std::uint8_t {
  e,    ///< natural (FlashAttention)
  two,  ///< binary (FlashInfer)
};

/// Queries as attention uses them: after RoPE, before the scale. fp32, indexed [slot, layer, query head, row].
///
/// The slot of a sequence is where it lies in the arrays: the engine's own number of it, which stays while batches change.
/// Query head h belongs to KV head `h / (query_heads / kv_heads)`.
struct QueryBlock {
  const float* data = nullptr;               ///< slot 0, layer 0, head 0, row 0; null: no queries
  std::int32_t query_heads = 0;              ///< a multiple of the KV heads
  std::int32_t rows = 0;                     ///< rows per sequence if `row_counts` is null
  const std::int32_t* row_firsts = nullptr;  ///< [slots] first row (ragged batches, rings); null: 0
  const std::int32_t* row_counts = nullptr;  ///< [slots] rows; null: `rows` each
  std::int64_t sequence_stride = 0;     ///< floats between slots; 0 if `row_firsts` index one array
  std::int64_t layer_stride = 0;        ///< floats between layers
  std::int64_t head_stride = 0;         ///< floats between query heads
  std::int64_t row_stride = 0;          ///< floats between rows
  const Position* positions = nullptr;  ///< position of a row; null: the last rows of the sequence
  std::int64_t position_sequence_stride = 0;  ///< positions between slots
  const float* lse = nullptr;  ///< log-sum-exp of the scaled, causal logits; null: computed
  std::int64_t lse_sequence_stride = 0;  ///< floats
  std::int64_t lse_layer_stride = 0;     ///< floats
  std::int64_t lse_head_stride = 0;      ///< floats
  LseBase lse_base = LseBase::e;         ///< base of `lse`
  float scale = 0;                       ///< factor of the logits; 0: 1 / sqrt(head_dim)
  float soft_cap = 0;                    ///< c * tanh(logit / c); 0: none
  const std::int32_t* slots = nullptr;  ///< [sequences] where each lies; null: sequence s in slot s

  /// Slot of sequence `s`.
  [[nodiscard]] constexpr std::int32_t slot(SequenceId s) const noexcept {
    return slots == nullptr ? raw(s) : slots[raw(s)];
  }
  /// Rows of sequence `s`.
  [[nodiscard]] constexpr std::int32_t count(SequenceId s) const noexcept {
    return row_counts == nullptr ? rows : row_counts[slot(s)];
  }
  /// Row `i` of sequence `s`.
  [[nodiscard]] const float* row(SequenceId s,
                                 LayerId l,
                                 std::int32_t head,
                                 std::int32_t i) const noexcept {
    return data + slot(s) * sequence_stride + raw(l) * layer_stride + head * head_stride +
           (first(s) + i) * row_stride;
  }
  /// LSE of row `i`.
  [[nodiscard]] float lse_of(SequenceId s,
                             LayerId l,
                             std::int32_t head,
                             std::int32_t i) const noexcept {
    return lse[slot(s) * lse_sequence_stride + raw(l) * lse_layer_stride + head * lse_head_stride +
               first(s) + i];
  }
  /// Position of row `i`, if the next token of the sequence is at `next_position`.
  [[nodiscard]] Position position(SequenceId s,
                                  std::int32_t i,
                                  std::int32_t next_position) const noexcept {
    return positions != nullptr ? positions[slot(s) * position_sequence_stride + first(s) + i]
                                : Position{next_position - count(s) + i};
  }

 private:
  [[nodiscard]] constexpr std::int64_t first(SequenceId s) const noexcept {
    return row_firsts == nullptr ? 0 : row_firsts[slot(s)];
  }
};

namespace detail {
/// The scale to use: the caller's, or 1 / sqrt(head_dim).
[[nodiscard]] inline float scale_of(const QueryBlock& queries, std::int32_t head_dim) noexcept {
  return queries.scale != 0 ? queries.scale : 1.0F / std::sqrt(static_cast<float>(head_dim));
}

/// LSE as a natural logarithm.
[[nodiscard]] inline float natural(float lse, LseBase base) noexcept {
  return base == LseBase::e ? lse : lse * 0.693147180559945309417F;
}
}  // namespace detail

/// One vector per (layer, KV head), fp32: QFilter's directions.
struct HeadVectors {
  const float* data = nullptr;    ///< layer 0, KV head 0; null: none
  std::int32_t dim = 0;           ///< elements of a vector
  std::int64_t layer_stride = 0;  ///< floats between layers
  std::int64_t head_stride = 0;   ///< floats between KV heads

  /// Whether they are present.
  [[nodiscard]] constexpr explicit operator bool() const noexcept { return data != nullptr; }
  /// Vector of (layer, KV head).
  [[nodiscard]] const float* of(LayerId l, HeadId h) const noexcept {
    return data + raw(l) * layer_stride + raw(h) * head_stride;
  }
};

/// Mean and covariance of the queries before RoPE, per query head: of this prompt, or of a calibration set.
struct QueryStatistics {
  const float* mean = nullptr;        ///< [slots, layers, query_heads, dim]; null: none
  const float* covariance = nullptr;  ///< [slots, layers, query_heads, dim, dim]; null: zero
  std::int32_t query_heads = 0;       ///< a multiple of the KV heads
  std::int32_t dim = 0;               ///< head dim of the queries
  std::int32_t layers = 0;            ///< layers in the arrays, from the view's first on
  bool per_sequence = false;  ///< one array per slot; false: one serves all (a calibration set)
  const std::int32_t* slots = nullptr;  ///< [sequences] where each lies; null: sequence s in slot s
  std::int32_t slot_layers = 0;         ///< layers from one slot to the next; 0: `layers`

  /// Whether they are present.
  [[nodiscard]] constexpr explicit operator bool() const noexcept { return mean != nullptr; }
  /// Mean of a query head, [dim].
  [[nodiscard]] const float* mean_of(SequenceId s, LayerId l, std::int32_t head) const noexcept {
    return mean + index_of(s, l, head) * dim;
  }
  /// Covariance of a query head, [dim, dim].
  [[nodiscard]] const float* covariance_of(SequenceId s,
                                           LayerId l,
                                           std::int32_t head) const noexcept {
    return covariance + index_of(s, l, head) * dim * dim;
  }

 private:
  [[nodiscard]] std::int64_t index_of(SequenceId s, LayerId l, std::int32_t head) const noexcept {
    const std::int64_t slot = !per_sequence ? 0 : slots == nullptr ? raw(s) : slots[raw(s)];
    return (slot * (slot_layers > 0 ? slot_layers : layers) + raw(l)) * query_heads + head;
  }
};

/// The attention's output projection, split by query head: W_O of head h maps a value to the residual stream.
struct OutputProjection {
  const float* data = nullptr;    ///< [layers, query_heads, value_dim, hidden], fp32; null: none
  std::int32_t query_heads = 0;   ///< a multiple of the KV heads
  std::int32_t value_dim = 0;     ///< head dim of the values
  std::int32_t hidden = 0;        ///< width of the residual stream
  std::int64_t layer_stride = 0;  ///< floats between layers

  /// Whether it is present.
  [[nodiscard]] constexpr explicit operator bool() const noexcept { return data != nullptr; }
  /// Matrix of a query head, [value_dim, hidden].
  [[nodiscard]] const float* of(LayerId l, std::int32_t head) const noexcept {
    return data + raw(l) * layer_stride + static_cast<std::int64_t>(head) * value_dim * hidden;
  }
};

/// Page scores of a batch, added up layer by layer: [sequences, page sets, pages].
struct PageScoreArray {
  float* data = nullptr;             ///< sequence 0, page set 0, page 0; null: none
  std::int64_t sequence_stride = 0;  ///< floats between sequences
  std::int64_t unit_stride = 0;      ///< floats between page sets of a sequence

  /// Scores of one page set.
  [[nodiscard]] std::span<float> of(SequenceId s,
                                    std::int32_t unit,
                                    std::int32_t pages) const noexcept {
    return {data + raw(s) * sequence_stride + unit * unit_stride, static_cast<std::size_t>(pages)};
  }
};

/// The one negative number among `Observation::budgets`: the policy's own budget.
inline constexpr std::int32_t policy_budget = -1;

/// What a plan may look at besides the cache. Every array begins with the view's first layer.
///
/// \par Source
/// own: each scorer's header names its paper
struct Observation {
  QueryBlock queries{};    ///< for policies that score by the prompt's last queries
  SequencePlane scores{};  ///< ready-made fp32 scores by row, used instead of the policy's scorer
  HeadVectors filters{};   ///< for QFilter
  QueryStatistics statistics{};           ///< for ExpectedAttention
  OutputProjection output{};              ///< for CriticalKV and `OutputNorm`
  PageScoreArray page_scores{};           ///< from `accumulate_page_scores`, for page policies
  const std::int32_t* budgets = nullptr;  ///< rows to keep, or `policy_budget`; null: the policy's
  RowMap budget_rows{};                   ///< index of (sequence, layer, KV head) in `budgets`

  /// Budget given for (sequence, layer, KV head); `policy_budget`: none.
  [[nodiscard]] std::int32_t budget(SequenceId s, LayerId l, HeadId h) const noexcept {
    return budgets == nullptr ? policy_budget : budgets[budget_rows(s, l, h)];
  }
};

}  // namespace kvtrim
