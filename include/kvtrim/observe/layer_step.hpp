// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/observe/observation.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

namespace kvtrim {

/// Softmax probabilities of a step, for engines that have them: fp32, [sequences, query heads, query rows, live rows].
struct StepProbabilities {
  const float* data = nullptr;       ///< sequence 0, head 0, query row 0, row 0; null: none
  std::int64_t sequence_stride = 0;  ///< floats between sequences
  std::int64_t head_stride = 0;      ///< floats between query heads
  std::int64_t row_stride = 0;       ///< floats between query rows
};

/// What attention over one layer has just seen, for a view's sequences: a prompt, a chunk of one, or a decode step.
///
/// Sequences without rows take no part; their slots are not looked at.
struct LayerStep {
  LayerId layer{};  ///< of the model, also where the view shows only some (`layer_offset`)
  std::span<const std::int32_t> sequences{};  ///< [view.sequences] slots; empty: i lies in slot i
  QueryBlock queries{};    ///< after RoPE, of this layer alone (as layer 0), with LSE and positions
  QueryBlock unrotated{};  ///< the same rows before RoPE; for moments
  StepProbabilities probabilities{};  ///< for sums, instead of an LSE

  /// The layer, as `view` counts.
  [[nodiscard]] constexpr LayerId layer_of(const CacheView& view) const noexcept {
    return LayerId{raw(layer) - view.layer_offset};
  }
  /// Slot of the view's sequence `s`.
  [[nodiscard]] constexpr std::int32_t slot(SequenceId s) const noexcept {
    return sequences.empty() ? raw(s) : sequences[static_cast<std::size_t>(raw(s))];
  }
};
static_assert(std::is_trivially_copyable_v<LayerStep>);

/// Parameters of `Recorder`: the model's shape, and what the engine offers.
struct RecorderParams {
  std::int32_t sequences = 1;    ///< slots
  std::int32_t layers = 1;       ///< of the model
  std::int32_t query_heads = 1;  ///< a multiple of the KV heads
  std::int32_t kv_heads = 1;     ///< KV heads
  std::int32_t head_dim = 0;     ///< features of a query
  std::int32_t workers = 1;      ///< most workers of the executors that `record` is called with
  bool lse = false;              ///< steps come with their LSE: sums need it, window scores use it
  bool probabilities = false;    ///< steps may come with probabilities, for sums
  HeadVectors filters{};         ///< not copied; layer 0 is the model's
  OutputProjection output{};     ///< not copied; layer 0 is the model's
};

/// Why a step was refused, with the numbers.
struct RecordFault {
  Status status = Status::ok;
  std::string_view what{};     ///< which number, by the name of its member: "layer", "positions"
  std::int32_t sequence = -1;  ///< of the view; -1: of the whole step
  std::int64_t value = 0;      ///< what was found
  std::int64_t expected = 0;   ///< what it must be, or stay below, or be at least: `what` says
};

}  // namespace kvtrim
