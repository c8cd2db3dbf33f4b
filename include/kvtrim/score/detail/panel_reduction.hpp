// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/observe/detail/packet.hpp>
#include <kvtrim/observe/detail/tile_product.hpp>
#include <kvtrim/policy/window_params.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace kvtrim::detail {

/// One number for each row of a panel, in registers.
using Panel = Packet[panel_packets];
/// Reads a panel from memory.
inline void load_panel(const float* from, Panel& to) noexcept {
  for (std::int32_t p = 0; p < panel_packets; ++p) {
    to[p] = pload<Packet>(from + p * packet_floats);
  }
}
/// Writes a panel to memory.
inline void store_panel(const Panel& from, float* to) noexcept {
  for (std::int32_t p = 0; p < panel_packets; ++p) { pstore(to + p * packet_floats, from[p]); }
}

/// Reduces one panel's probabilities: over the rows of a query head, then over the heads. Queries come in their order.
class PanelReduction {
 public:
  /// \param votes  rows of each query head, at least 1
  PanelReduction(const WindowParams& params, std::int32_t votes) noexcept
      : params_(params), votes_(votes), head_end_(votes) {}

  /// Adds the probabilities of query `q`.
  void add(std::int32_t q, Panel& x) noexcept {
    while (q >= head_end_) {
      close_head();
      head_end_ += votes_;
    }
    if (votes_seen_++ > 0) {
      for (std::int32_t p = 0; p < panel_packets; ++p) {
        const Packet before = pload<Packet>(rows_ + p * packet_floats);
        x[p] = params_.rows == Reduction::max ? pmax(before, x[p]) : padd(before, x[p]);
      }
    }
    store_panel(x, rows_);
  }
  /// Writes the scores of `count` rows, and begins again.
  void finish(float* scores, std::int32_t count) noexcept {
    close_head();
    for (std::int32_t i = 0; i < count; ++i) {
      scores[i] = heads_seen_ == 0                   ? std::numeric_limits<float>::quiet_NaN()
                  : params_.group == Reduction::mean ? heads_[i] / static_cast<float>(heads_seen_)
                                                     : heads_[i];
    }
    head_end_ = votes_;
    heads_seen_ = 0;
  }

 private:
  void close_head() noexcept {
    if (votes_seen_ == 0) { return; }
    for (std::int32_t i = 0; i < panel_rows; ++i) {
      const float x =
          params_.rows == Reduction::mean ? rows_[i] / static_cast<float>(votes_seen_) : rows_[i];
      heads_[i] = heads_seen_ == 0                  ? x
                  : params_.group == Reduction::max ? std::max(heads_[i], x)
                                                    : heads_[i] + x;
    }
    ++heads_seen_;
    votes_seen_ = 0;
  }

  const WindowParams& params_;
  std::int32_t votes_;
  std::int32_t head_end_;
  std::int32_t votes_seen_ = 0;
  std::int32_t heads_seen_ = 0;
  alignas(64) float rows_[panel_rows];
  alignas(64) float heads_[panel_rows];
};

}  // namespace kvtrim::detail
