// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a prompt's last queries pay to its rows, in all scored layers: for SnapKV's scores and others of a window.

#include <kvtrim/core/sequence_plane.hpp>
#include <kvtrim/engine/row_table.hpp>
#include <kvtrim/policy/window_params.hpp>
#include <kvtrim/score/window_probabilities.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "score_tap.hpp"

namespace llama_example {

/// The window of the prompt that was read last; its forks have the same rows.
class PromptWindow {
 public:
  /// Keeps one layer; layer 0 comes first.
  void keep(const LayerScores& s) {
    if (s.layer == 0) shape_ = s, values_.clear();
    values_.insert(
        values_.end(), s.data, s.data + static_cast<std::int64_t>(s.heads) * s.queries * s.rows);
  }

  /// Scores of the prompt's rows, [layers, KV heads, rows]; valid until the next call.
  /// \throws std::runtime_error if the table has other rows than the prompt
  [[nodiscard]] kvtrim::SequencePlane scores(const kvtrim::WindowParams& params,
                                             const kvtrim::RowTable& table) {
    const auto& [layer, sequence, heads, queries, count, data] = shape_;
    if (count == 0 || count != table.live_rows() || count != table.next_position()) {
      throw std::runtime_error("the window's queries saw a prompt of " + std::to_string(count) +
                               " rows, but the sequence has " + std::to_string(table.live_rows()) +
                               ": evict once, at the end of the prompt");
    }
    const auto rows = static_cast<std::size_t>(count);
    const std::int32_t units = table.params().layers * table.params().kv_heads;
    const std::int32_t group = heads / table.params().kv_heads;
    const std::int32_t votes = std::min(params.window, queries);
    const std::int64_t head_stride = static_cast<std::int64_t>(queries) * count;
    const float* last = values_.data() + static_cast<std::ptrdiff_t>(queries - votes) * count;
    scores_.resize(rows * static_cast<std::size_t>(units));
    scratch_.resize(rows);
    for (std::int32_t u = 0; u < units; ++u, last += group * head_stride) {
      kvtrim::score_window(params,
                           {.data = last,
                            .group = group,
                            .votes = votes,
                            .head_stride = head_stride,
                            .vote_stride = count},
                           scratch_,
                           std::span(scores_).subspan(static_cast<std::size_t>(u) * rows, rows));
    }
    return kvtrim::SequencePlane::dense(
        scores_.data(), table.params().layers, table.params().kv_heads, count);
  }

 private:
  LayerScores shape_;          // of layer 0; its data is gone
  std::vector<float> values_;  // [layers, query heads, queries, rows]
  std::vector<float> scores_;
  std::vector<float> scratch_;  // [rows]
};

}  // namespace llama_example
