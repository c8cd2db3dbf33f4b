// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which bytes a plane covers, and whether two planes share any. Strides nest in every cache that is one: what the smaller
// ones reach lies within the next larger one. So two planes are compared stride by stride, from the largest down, without
// looking at elements.

#include <kvtrim/cache/plane.hpp>
#include <kvtrim/core/saturating.hpp>
#include <kvtrim/core/types.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::detail {

enum class AxisName : std::int64_t { feature, pack, token, head, page, layer, row, sequence };

[[nodiscard]] constexpr std::string_view to_string(AxisName n) noexcept {
  return enumerator_name(n,
                         {"feature", "pack", "token", "head", "page", "layer", "row", "sequence"});
}

// Without padding: a copy in shared memory reads no byte that was not written.
struct Axis {
  std::int64_t stride;
  std::int64_t extent;
  AxisName name;
};

// Elements of `bytes` bytes at all multiples of the strides: axes with more than one element, by descending stride. Trivial,
// so that a kernel can keep one in shared memory; `clear` comes first, `close` last.
class Region {
 public:
  KVTRIM_HOST_DEVICE constexpr void clear(std::int64_t bytes) noexcept {
    count_ = 0;
    bytes_ = bytes;
  }

  KVTRIM_HOST_DEVICE constexpr void add(AxisName name,
                                        std::int64_t stride,
                                        std::int64_t extent) noexcept {
    if (extent <= 1) { return; }
    std::int32_t i = count_++;
    for (; i > 0 && axes_[i - 1].stride < stride; --i) { axes_[i] = axes_[i - 1]; }
    axes_[i] = {stride, extent, name};
  }

  // The last call: no axis is added any more.
  KVTRIM_HOST_DEVICE constexpr void close() noexcept {
    reach_[count_] = bytes_;
    for (std::int32_t i = count_; i-- > 0;) {  // without sign: beyond 64 bits it wraps around
      reach_[i] = static_cast<std::int64_t>(static_cast<std::uint64_t>(reach_[i + 1]) +
                                            static_cast<std::uint64_t>(axes_[i].extent - 1) *
                                                static_cast<std::uint64_t>(axes_[i].stride));
    }
  }

  // The smallest axis that reaches beyond 64 bits; -1: none does.
  [[nodiscard]] constexpr std::int32_t overflow() const noexcept {
    for (std::int32_t i = count_; i-- > 0;) {
      constexpr std::int64_t most =
          too_large / 2;  // so that two regions' distance is a number, too
      const Axis& a = axes_[i];
      const std::int64_t rest = most - (reach_[i + 1] < 0 ? 0 : reach_[i + 1]);
      if (a.stride > 0 && a.extent - 1 > rest / a.stride) { return i; }
    }
    return -1;
  }

  // Bytes from the first element to the end of the last one, over the axes from number `level` on.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int64_t reach(std::int32_t level) const noexcept {
    return reach_[level];
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
  std::int64_t reach_[7];
  std::int32_t count_;
  std::int64_t bytes_;
};

// Remainder of `d`, not negative. By subtraction: a division of 64 bits is a call in a kernel, which costs local memory.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int64_t floor_mod(std::int64_t d,
                                                                  std::int64_t divisor) noexcept {
  std::int64_t rest = d < 0 ? -d : d;
  std::int64_t multiple = divisor;
  while (multiple <= rest / 2) { multiple *= 2; }
  for (; multiple >= divisor; multiple /= 2) { rest -= rest >= multiple ? multiple : 0; }
  return d < 0 && rest != 0 ? divisor - rest : rest;
}

// Whether `b`, that begins `delta` bytes after `a`, shares no byte with it. Where the strides of the two differ at a level
// at which their bytes are interleaved, the answer is no.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool apart(const Region& a,
                                                      const Region& b,
                                                      std::int64_t delta) noexcept {
  const auto are_apart = [&](std::int64_t d, std::int32_t level) {
    return d >= a.reach(level) || d + b.reach(level) <= 0;
  };
  if (are_apart(delta, 0)) { return true; }
  // At each level, b's element within one step of the common stride, and the end of the one before it: two paths.
  const std::int32_t levels = a.count() < b.count() ? a.count() : b.count();
  for (std::uint32_t path = 0; path < (1U << static_cast<unsigned>(levels)); ++path) {
    std::int64_t d = delta;
    for (std::int32_t level = 0; !are_apart(d, level); ++level) {
      if (level == levels || a.axis(level).stride != b.axis(level).stride) { return false; }
      const std::int64_t stride = a.axis(level).stride;
      d = floor_mod(d, stride);
      if ((path >> static_cast<unsigned>(level) & 1U) != 0) { d -= stride; }
    }
  }
  return true;
}

}  // namespace kvtrim::detail
