// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a selection is given: one task for each KV head, and where scores lie.

#include <kvtrim/core/sequence_plane.hpp>
#include <kvtrim/cuda/detail/device.hpp>

#include <cstdint>

namespace kvtrim::cuda {

/// What is to be chosen in one (sequence, layer, KV head).
struct SelectTask {
  std::int32_t extent = 0;  ///< entries: live rows, and the hole if there is one
  std::int32_t begin = 0;   ///< rows with a rank below this are protected
  std::int32_t end = 0;     ///< rows with this rank or a higher one are protected
  std::int32_t keep =
      0;  ///< rows that stay, the protected ones included; not above begin + live - end + competing
  std::int32_t hole = -1;          ///< entry that is not a row; -1: none
  std::int32_t next_position = 0;  ///< of the sequence, for age normalisation
  std::int32_t ordered = 1;  ///< entries are in position order; 0 needs `RowScores::positions`
  std::int32_t active = 0;   ///< 0: nothing is chosen, nothing is written
  std::int64_t list = -1;   ///< where its rows begin in `out`; -1: at item * SelectBounds::listed()
  std::int64_t scores = 0;  ///< where its entries begin in `RowScores::list`
};

/// Scores of all KV heads. Higher is kept.
struct RowScores {
  SequencePlane scores{};         ///< fp32; absent: all equal
  SequencePlane compensations{};  ///< fp32, added; absent: none
  SequencePlane positions{};      ///< int32; absent: row r is position r
  bool age_normalised = false;    ///< divide by next_position - position
  const float* list = nullptr;    ///< instead of `scores`: by `SelectTask::scores` and entry
};

/// Where scores are written by row: into a plane, or into a list in which every KV head has its place.
struct ScoreRows {
  SequencePlane plane{};
  float* list = nullptr;              ///< instead of the plane
  const SelectTask* tasks = nullptr;  ///< with a list: device, [sequences, layers, kv_heads]

  /// The score of entry `e`.
  [[nodiscard]] KVTRIM_DEVICE float* at(
      SequenceId s, LayerId l, HeadId h, std::int64_t item, std::int32_t e) const {
    return list != nullptr ? list + tasks[item].scores + e
                           : reinterpret_cast<float*>(plane.row(s, l, h, e));
  }
};

/// Bounds of a selection: what the path and the workspace depend on.
struct SelectBounds {
  std::int32_t sequences = 1;
  std::int32_t layers = 1;
  std::int32_t kv_heads = 1;
  std::int32_t max_rows = 0;  ///< entries of the longest KV head
  /// Entries of a KV head that do not stay, at most: then these alone are listed. 0: any number, all entries are listed.
  std::int32_t max_evicted = 0;

  /// Entries that are listed for a KV head, at most.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t listed() const noexcept {
    return max_evicted > 0 ? max_evicted : max_rows;
  }
};

}  // namespace kvtrim::cuda
