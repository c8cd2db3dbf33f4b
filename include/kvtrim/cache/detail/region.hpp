// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which bytes a plane covers, and whether two planes share any. Strides nest in every cache that is one: what the smaller
// ones reach lies within the next larger one. So two planes are compared stride by stride, from the largest down, without
// looking at elements.

#include <kvtrim/cache/plane.hpp>
#include <kvtrim/core/types.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::detail {

enum class AxisName : std::uint8_t { feature, pack, token, head, page, layer, row, sequence };

[[nodiscard]] constexpr std::string_view to_string(AxisName n) noexcept {
  return enumerator_name(n,
                         {"feature", "pack", "token", "head", "page", "layer", "row", "sequence"});
}

struct Axis {
  std::int64_t stride = 0;
  std::int64_t extent = 1;
  AxisName name = AxisName::feature;
};

// Elements of `bytes` bytes at all multiples of the strides: axes with more than one element, by descending stride.
class Region {
 public:
  KVTRIM_HOST_DEVICE constexpr explicit Region(std::int64_t bytes = 0) noexcept : bytes_(bytes) {}

  KVTRIM_HOST_DEVICE constexpr void add(AxisName name,
                                        std::int64_t stride,
                                        std::int64_t extent) noexcept {
    if (extent <= 1) { return; }
    std::int32_t i = count_++;
    for (; i > 0 && axes_[i - 1].stride < stride; --i) { axes_[i] = axes_[i - 1]; }
    axes_[i] = {stride, extent, name};
  }

  // Bytes from the first element to the end of the last one, over the axes from number `level` on.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int64_t reach(std::int32_t level) const noexcept {
    std::int64_t reach = bytes_;
    for (std::int32_t i = level; i < count_; ++i) {
      reach += (axes_[i].extent - 1) * axes_[i].stride;
    }
    return reach;
  }
  // The smallest axis that does not step over all that the smaller ones reach; -1: elements do not overlap.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t overlap() const noexcept {
    for (std::int32_t i = count_; i-- > 0;) {
      if (axes_[i].stride < reach(i + 1)) { return i; }
    }
    return -1;
  }
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t count() const noexcept { return count_; }
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr const Axis& axis(std::int32_t i) const noexcept {
    return axes_[i];
  }

 private:
  Axis axes_[6];
  std::int32_t count_ = 0;
  std::int64_t bytes_ = 0;
};

// Whether `b`, that begins `delta` bytes after `a`, shares no byte with it. Where the strides of the two differ at a level
// at which their bytes are interleaved, the answer is no.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool apart(const Region& a,
                                                      const Region& b,
                                                      std::int64_t delta) noexcept {
  struct Open {
    std::int64_t delta;
    std::int32_t level;
  };
  Open open[8]{};
  open[0] = {delta, 0};
  for (std::int32_t n = 1; n > 0;) {
    const Open at = open[--n];
    if (at.delta >= a.reach(at.level) || at.delta + b.reach(at.level) <= 0) { continue; }
    if (at.level >= a.count() || at.level >= b.count()) { return false; }
    const std::int64_t stride = a.axis(at.level).stride;
    if (stride != b.axis(at.level).stride) { return false; }
    // Inside one step of the common stride: b's element there, and the end of the one before it.
    const std::int64_t rest = (at.delta % stride + stride) % stride;
    open[n++] = {rest, at.level + 1};
    open[n++] = {rest - stride, at.level + 1};
  }
  return true;
}

}  // namespace kvtrim::detail
