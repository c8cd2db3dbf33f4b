// SPDX-License-Identifier: Apache-2.0
#pragma once

// Position modes on the device: which keys can be rotated to new rope positions, and one of them rotated. The specification is
// evict/rerotate.hpp, and so is the rule: f32 keys, or f16 and bf16 keys with a plane of un-rotated ones or with pristine sinks.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/core/rope.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/row_plane.cuh>
#include <kvtrim/cuda/observe/detail/key_tiles.cuh>
#include <kvtrim/evict/rerotate.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

/// A model's RoPE with its frequencies on the device; the fields of `Rope`.
struct DeviceRope {
  const double* inverse_frequencies = nullptr;  ///< [layers of the model, dim / 2], or [dim / 2]
  std::int32_t dim = 0;                         ///< rotated features; even
  std::int32_t offset = 0;                      ///< first rotated feature
  RopePairs pairs = RopePairs::half_split;      ///< which features are rotated together
  RopeKind kind = RopeKind::standard;           ///< only `standard` can be rotated
  bool same_for_all_layers = false;             ///< one array of frequencies serves all layers
};

/// Position mode of a plan on the device: the counterpart of `Rerotator`.
struct DeviceRotation {
  PositionMode mode = PositionMode::keep;  ///< `keep`: nothing else is looked at
  DeviceRope rope{};                       ///< what the keys were rotated with
  /// `sinks_follow`: keys on the device, of all sequences, layers and KV heads of the view
  PristineSinks pristine{};
  /// The cache holds keys before RoPE (the engine rotates on read): positions are renumbered (`in_cache`), no key is touched.
  bool unrotated_cache = false;
};

namespace detail {

/// What a kernel needs to turn a key.
struct KeyTurn {
  DeviceRope rope{};
  PositionMode mode = PositionMode::keep;
  PristineSinks pristine{};
  bool from_unrotated = false;  // keys come from `CacheView::unrotated_keys`
  bool touches_keys = true;
  std::int32_t unit = 1;  // features per load: 4 or 1
};

/// One row of keys.
struct KeyPlace {
  LayerId layer;
  HeadId head;
  PageId page;
  Slot slot;
};

/// Cosine and sine of delta positions at this frequency: the angle is reduced in double, as on the CPU. In half turns,
/// because sincosf's slow path, which no reduced angle takes, would cost local memory.
KVTRIM_DEVICE float2 rotation(double frequency, std::int32_t delta) {
  constexpr double inverse_turn = 0.159154943091895335768883763372514362;
  const double turns = delta * frequency * inverse_turn;
  const auto half_turns = static_cast<float>(2 * (turns - rint(turns)));
  float2 r;
  sincospif(half_turns, &r.y, &r.x);
  return r;
}

// Features of `bytes` as floats, and back.
template <class T>
KVTRIM_DEVICE float element_at(const std::byte* p) {
  return to_float(*reinterpret_cast<const T*>(p));
}
KVTRIM_DEVICE float read_feature(const std::byte* p, DType dtype) {
  return dtype == DType::f32   ? element_at<float>(p)
         : dtype == DType::f16 ? element_at<__half>(p)
                               : element_at<__nv_bfloat16>(p);
}
KVTRIM_DEVICE void write_feature(std::byte* p, DType dtype, float x) {
  if (dtype == DType::f32) {
    *reinterpret_cast<float*>(p) = x;
  } else if (dtype == DType::f16) {
    *reinterpret_cast<__half*>(p) = from_float<__half>(x);
  } else {
    *reinterpret_cast<__nv_bfloat16*>(p) = from_float<__nv_bfloat16>(x);
  }
}

/// Rotates one key. For a whole warp.
///
/// \param item    (sequence, layer, KV head) as one index: where its sinks' keys lie
/// \param rank    among the rows that stay, by position
/// \param before  rope position that it has
/// \param after   the one it gets
KVTRIM_DEVICE void turn_key(const CacheView& view,
                            const KeyTurn& turn,
                            const KeyPlace& at,
                            std::int64_t item,
                            std::int32_t rank,
                            std::int32_t before,
                            std::int32_t after) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::int32_t half = turn.rope.dim / 2;
  const Plane& to = view.k;
  const double* const frequencies =
      turn.rope.inverse_frequencies +
      (turn.rope.same_for_all_layers ? 0 : raw(view.model_layer(at.layer)) * half);
  std::byte* const key = to.row(at.layer, at.page, at.head, at.slot);
  const std::byte* from = key;
  std::int32_t delta = after - before;
  const float* sink = nullptr;
  if (turn.mode == PositionMode::sinks_follow) {
    sink = turn.pristine.keys + (item * turn.pristine.sinks + rank) * to.head_dim;
    delta = after;
  } else if (turn.from_unrotated) {
    from = view.unrotated_keys.row(at.layer, at.page, at.head, at.slot);
    delta = after;
  }
  const auto read = [&](std::int32_t d) {
    return sink != nullptr       ? sink[d]
           : turn.from_unrotated ? read_feature(from + view.unrotated_keys.feature_offset(d),
                                                view.unrotated_keys.dtype)
                                 : read_feature(from + to.feature_offset(d), to.dtype);
  };
  if (from != key || sink != nullptr) {  // features that RoPE leaves alone come from the source too
    for (std::int32_t d = lane; d < to.head_dim; d += 32) {
      if (d < turn.rope.offset || d >= turn.rope.offset + turn.rope.dim) {
        write_feature(key + to.feature_offset(d), to.dtype, read(d));
      }
    }
  }
  if (turn.unit == 4) {  // f32 keys in place: the halves of four pairs, or two pairs, per 16 bytes
    for (std::int32_t j = 4 * lane;
         j < (turn.rope.pairs == RopePairs::half_split ? half : turn.rope.dim);
         j += 128) {
      auto* const first = reinterpret_cast<float4*>(key + (turn.rope.offset + j) * 4);
      if (turn.rope.pairs == RopePairs::half_split) {
        auto* const second = reinterpret_cast<float4*>(key + (turn.rope.offset + j + half) * 4);
        float4 x = *first;
        float4 y = *second;
        const auto rotate = [&](float& u, float& v, std::int32_t pair) {
          const float2 r = rotation(frequencies[pair], delta);
          const float rotated = u * r.x - v * r.y;
          v = u * r.y + v * r.x;
          u = rotated;
        };
        rotate(x.x, y.x, j);
        rotate(x.y, y.y, j + 1);
        rotate(x.z, y.z, j + 2);
        rotate(x.w, y.w, j + 3);
        *first = x;
        *second = y;
      } else {
        float4 x = *first;
        const float2 r = rotation(frequencies[j / 2], delta);
        const float2 q = rotation(frequencies[j / 2 + 1], delta);
        *first = make_float4(x.x * r.x - x.y * r.y,
                             x.x * r.y + x.y * r.x,
                             x.z * q.x - x.w * q.y,
                             x.z * q.y + x.w * q.x);
      }
    }
  } else {
    for (std::int32_t j = lane; j < half; j += 32) {
      const bool split = turn.rope.pairs == RopePairs::half_split;
      const std::int32_t first = turn.rope.offset + (split ? j : 2 * j);
      const std::int32_t second = turn.rope.offset + (split ? j + half : 2 * j + 1);
      const float x = read(first);
      const float y = read(second);
      const float2 r = rotation(frequencies[j], delta);
      write_feature(key + to.feature_offset(first), to.dtype, x * r.x - y * r.y);
      write_feature(key + to.feature_offset(second), to.dtype, x * r.y + y * r.x);
    }
  }
}

/// Whether float pairs can be loaded 16 bytes at a time.
[[nodiscard]] inline bool rotates_by_four(const CacheView& view, const DeviceRope& rope) noexcept {
  const Plane& k = view.k;
  const std::int32_t step = rope.pairs == RopePairs::half_split ? rope.dim / 2 : rope.dim;
  return k.dtype == DType::f32 && k.contiguous_rows() && k.layer_bases == nullptr &&
         aligned_to(16, k.base) &&
         (k.layer_stride | k.page_stride | k.token_stride | k.head_stride) % 16 == 0 &&
         rope.offset % 4 == 0 && step % 4 == 0;
}

/// Whether values are part of the features that turn.
[[nodiscard]] inline bool turns_values(const CacheView& view, const DeviceRope& rope) noexcept {
  if (!values_in_keys(view)) { return false; }
  const std::int64_t first =
      view.k.layer_bases != nullptr ? 0 : kvtrim::detail::value_offset(view, LayerId{0});
  const std::int64_t element = element_bytes(view.k.dtype);
  return rope.offset * element < first + view.v.row_bytes() &&
         first < (rope.offset + rope.dim) * element;
}

/// Whether keys can be rotated so. Host bounds only.
[[nodiscard]] inline bool can_rotate(const CacheView& view,
                                     const DeviceRotation& rotation) noexcept {
  const SequencePlane& stands = view.rope_positions;
  if (!float_plane(stands) || (view.kv_heads > 1 && stands.head_stride == 0) ||
      (view.layers > 1 && stands.layer_stride == 0)) {
    return false;
  }
  if (rotation.unrotated_cache) { return rotation.mode == PositionMode::in_cache; }
  const DeviceRope& rope = rotation.rope;
  const bool source =
      rotation.mode == PositionMode::in_cache && static_cast<bool>(view.unrotated_keys);
  const Plane& k = view.k;
  const auto element = static_cast<std::size_t>(element_bytes(k.dtype));
  if (rope.kind != RopeKind::standard || rope.inverse_frequencies == nullptr || rope.dim < 2 ||
      rope.dim % 2 != 0 || rope.offset < 0 || rope.offset + rope.dim > k.head_dim ||
      !readable(k.dtype) || (k.base == nullptr && k.layer_bases == nullptr) ||
      !aligned_to(element, k.base) ||
      ((k.layer_bases != nullptr ? 0 : k.layer_stride) | k.page_stride | k.token_stride |
       k.head_stride | k.feature_stride) %
              static_cast<std::int64_t>(element) !=
          0 ||
      !view.is_of_model() || turns_values(view, rope)) {
    return false;
  }
  if (source &&
      (!readable(view.unrotated_keys.dtype) || view.unrotated_keys.head_dim != k.head_dim)) {
    return false;
  }
  // 1,000 rotations of 16-bit keys lose half of them.
  if (rotation.mode == PositionMode::in_cache && k.dtype != DType::f32 && !source) { return false; }
  return rotation.mode != PositionMode::sinks_follow ||
         (rotation.pristine.keys != nullptr && rotation.pristine.sinks >= 1);
}

[[nodiscard]] inline KeyTurn key_turn(const CacheView& view,
                                      const DeviceRotation& rotation) noexcept {
  KeyTurn turn;
  turn.rope = rotation.rope;
  turn.mode = rotation.mode;
  turn.pristine = rotation.pristine;
  turn.from_unrotated =
      rotation.mode == PositionMode::in_cache && static_cast<bool>(view.unrotated_keys);
  turn.touches_keys = !rotation.unrotated_cache;
  turn.unit = !turn.from_unrotated && rotation.mode == PositionMode::in_cache &&
                      rotates_by_four(view, rotation.rope)
                  ? 4
                  : 1;
  return turn;
}

}  // namespace detail

}  // namespace kvtrim::cuda
