// SPDX-License-Identifier: Apache-2.0
#pragma once

// Renumbering rotated keys. A 16-bit key that is rotated again and again is lost (after 1,000 unit rotations in bf16, half
// of it), so what cannot be done well is refused when the mode is bound to the view, not at the first eviction.

#include <kvtrim/cache/move.hpp>
#include <kvtrim/core/error.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/core/rope.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtrim {

/// Keys of the sinks before RoPE, in fp32, for `PositionMode::sinks_follow`: [sequences, layers, kv_heads, sinks, head_dim].
struct PristineSinks {
  const float* keys = nullptr;
  std::int32_t sinks = 0;
};

/// Binds a position mode to a view. Without one, positions are kept and no key is touched.
///
/// \par Allocation
/// in the constructor only
class Rerotator {
 public:
  /// `PositionMode::keep`.
  Rerotator() = default;

  /// For caches that hold keys before RoPE (the engine rotates on read): positions are renumbered, keys are not touched.
  ///
  /// \throws std::invalid_argument if the view has no rope positions per KV head
  [[nodiscard]] static Rerotator unrotated_cache(const CacheView& view) {
    Rerotator r;
    r.mode_ = PositionMode::in_cache;
    need_rope_positions(view);
    return r;
  }

  /// For caches that hold rotated keys.
  ///
  /// \param pristine  needed for `sinks_follow`
  /// \throws std::invalid_argument, saying why, if the keys cannot be rotated: RoPE kind not standard; dtype neither f32
  ///   nor, with `CacheView::unrotated_keys` or pristine sinks, f16 or bf16; rotary range beyond the head;
  ///   number of frequencies not the model's layers * dim / 2; no rope positions per KV head
  Rerotator(const CacheView& view, const Rope& rope, PositionMode mode, PristineSinks pristine = {})
      : rope_(rope), mode_(mode), pristine_(pristine) {
    if (mode == PositionMode::keep) { return; }
    need_rope_positions(view);
    if (rope.kind != RopeKind::standard) {
      throw_invalid_argument(
          "kvtrim::Rerotator: {}",
          rope.kind == RopeKind::mrope
              ? "M-RoPE has several positions per token; use PositionMode::keep"
          : rope.kind == RopeKind::dynamic_ntk
              ? "dynamic NTK changes the frequencies with the length; use PositionMode::keep"
              : "ALiBi has no rotation to undo: rows that moved would get another bias; use "
                "PositionMode::keep");
    }
    if (rope.dim < 2 || rope.dim % 2 != 0 || rope.offset < 0 ||
        rope.offset + rope.dim > view.k.head_dim) {
      throw_invalid_argument(
          "kvtrim::Rerotator: rotary range [{}, {}) must be even and within head_dim {}",
          rope.offset,
          rope.offset + rope.dim,
          view.k.head_dim);
    }
    check_values_stay(view, rope);
    const auto expected =
        static_cast<std::size_t>(rope.dim / 2) *
        static_cast<std::size_t>(rope.same_for_all_layers ? 1 : view.layers_of_model());
    if (rope.inverse_frequencies.size() != expected) {
      throw_invalid_argument(
          "kvtrim::Rerotator: {} frequencies for {} layers of {} pairs: frequencies are per layer, "
          "or say same_for_all_layers",
          rope.inverse_frequencies.size(),
          view.layers_of_model(),
          rope.dim / 2);
    }
    source_ = mode == PositionMode::in_cache && static_cast<bool>(view.unrotated_keys);
    if (!readable(view.k.dtype)) {
      throw_invalid_argument(
          "kvtrim::Rerotator: keys of dtype {} cannot be rotated; use PositionMode::keep",
          to_string(view.k.dtype));
    }
    if (source_ &&
        (!readable(view.unrotated_keys.dtype) || view.unrotated_keys.head_dim != view.k.head_dim)) {
      throw_invalid_argument(
          "kvtrim::Rerotator: un-rotated keys of dtype {} and head_dim {} cannot be rotated into "
          "keys of head_dim {}",
          to_string(view.unrotated_keys.dtype),
          view.unrotated_keys.head_dim,
          view.k.head_dim);
    }
    if (mode == PositionMode::in_cache && view.k.dtype != DType::f32 && !source_) {
      throw_invalid_argument(
          "kvtrim::Rerotator: {} keys lose about half of their value in 1,000 rotations; keep "
          "CacheView::unrotated_keys "
          "beside them, or use PositionMode::keep",
          to_string(view.k.dtype));
    }
    if (mode == PositionMode::sinks_follow && (pristine.keys == nullptr || pristine.sinks < 1)) {
      throw_invalid_argument(
          "kvtrim::Rerotator: sinks_follow needs the sinks' keys before RoPE, but {} are given",
          pristine.sinks);
    }
    frequencies_.assign(rope.inverse_frequencies.begin(), rope.inverse_frequencies.end());
    rope_.inverse_frequencies = {};
    rotates_ = true;
  }

  /// The mode.
  [[nodiscard]] PositionMode mode() const noexcept { return mode_; }
  /// Whether keys are written.
  [[nodiscard]] bool rotates() const noexcept { return rotates_; }
  /// Sinks that follow the window.
  [[nodiscard]] std::int32_t sinks() const noexcept { return pristine_.sinks; }
  /// Whether the key of row `r` is written where it has rank `rank` among the kept rows.
  [[nodiscard]] bool turns(const HeadRef& head, std::int32_t r, std::int32_t rank) const noexcept {
    if (!rotates_) { return false; }
    if (mode_ == PositionMode::sinks_follow) { return rank < pristine_.sinks; }
    return head.view.rope_position(head.sequence, head.layer, head.head, r) != rank;
  }

  /// Brings the key at `place` to rope position `to`.
  ///
  /// \param from  its current rope position
  /// \param rank  its rank among the kept rows, by position (which pristine sink it is)
  void renumber(const HeadRef& head,
                RowPlace place,
                std::int32_t rank,
                std::int32_t from,
                std::int32_t to) const noexcept {
    if (!rotates_ || from == to) { return; }
    const auto& [view, s, l, h] = head;
    std::array<float, max_head_dim> key{};
    KVTRIM_ASSERT(view.k.head_dim <= max_head_dim);
    std::byte* const at = view.k.row(l, place.k_page, h, place.slot);
    std::int32_t delta = to - from;
    if (mode_ == PositionMode::sinks_follow) {
      const std::int64_t first =
          (static_cast<std::int64_t>(raw(s)) * view.layers + raw(l)) * view.kv_heads + raw(h);
      const float* const sink = pristine_.keys + (first * pristine_.sinks + rank) * view.k.head_dim;
      std::copy_n(sink, view.k.head_dim, key.begin());
      delta = to;
    } else if (source_) {
      load_row(
          view.unrotated_keys, view.unrotated_keys.row(l, place.k_page, h, place.slot), key.data());
      delta = to;
    } else {
      load_row(view.k, at, key.data());
    }
    const std::size_t pairs = static_cast<std::size_t>(rope_.dim / 2);
    const std::size_t first =
        rope_.same_for_all_layers ? 0 : pairs * static_cast<std::size_t>(raw(view.model_layer(l)));
    rotate_key(rope_, std::span(frequencies_).subspan(first, pairs), delta, key.data());
    store_row(view.k, at, key.data());
  }

  /// Largest head dim that can be rotated.
  static constexpr std::int32_t max_head_dim = 1024;

 private:
  static void need_rope_positions(const CacheView& view) {
    if (!view.rope_positions || (view.kv_heads > 1 && view.rope_positions.head_stride == 0) ||
        (view.layers > 1 && view.rope_positions.layer_stride == 0)) {
      throw_invalid_argument(
          "kvtrim::Rerotator: renumbering needs rope positions of its own for each of {} layers "
          "and {} KV heads",
          view.layers,
          view.kv_heads);
    }
    if (view.k.head_dim > max_head_dim) {
      throw_invalid_argument(
          "kvtrim::Rerotator: head_dim {} is above {}", view.k.head_dim, max_head_dim);
    }
  }

  // Values that are part of a key must not turn with it.
  static void check_values_stay(const CacheView& view, const Rope& rope) {
    for (std::int32_t l = 0; l < view.layers; ++l) {
      if (!detail::values_in_keys(view, LayerId{l})) { continue; }
      const std::int64_t first = detail::value_offset(view, LayerId{l});
      const std::int64_t element = element_bytes(view.k.dtype);
      if (rope.offset * element < first + view.v.row_bytes() &&
          first < (rope.offset + rope.dim) * element) {
        throw_invalid_argument(
            "kvtrim::Rerotator: rotary range [{}, {}) of the keys holds values: bytes {} to {} of "
            "each row",
            rope.offset,
            rope.offset + rope.dim,
            first,
            first + view.v.row_bytes());
      }
    }
  }

  Rope rope_;
  PositionMode mode_ = PositionMode::keep;
  PristineSinks pristine_;
  std::vector<double> frequencies_;
  bool source_ = false;
  bool rotates_ = false;
};

}  // namespace kvtrim
