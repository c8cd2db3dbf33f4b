// SPDX-License-Identifier: Apache-2.0
#pragma once

// Accumulated attention lives in two sequence planes, a sum and its rounding error, which are forked, cut and moved
// together with the rows. Nothing here writes to a page.

#include <kvtrim/cache/head_ref.hpp>
#include <kvtrim/core/compensated.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/observe/detail/packet.hpp>
#include <kvtrim/policy/accumulate_params.hpp>

#include <algorithm>
#include <cstdint>

namespace kvtrim {

/// Softmax probabilities of one query, as an engine has them: [query heads of the KV head, live rows].
struct Probabilities {
  const float* data = nullptr;   ///< head 0 of the group, row 0
  std::int32_t group = 1;        ///< query heads of the KV head
  std::int64_t head_stride = 0;  ///< floats between them
};

namespace detail {
/// Adds a step's exact sum over `group` query heads to row `r` of an accumulated score, which decays by `factor` before.
inline void add_units(const HeadRef& head,
                      std::int32_t r,
                      std::uint64_t units,
                      std::int32_t group,
                      double factor) noexcept {
  const auto [view, s, l, h] = head;
  float& sum = view.score_sums.at<float>(s, l, h, r);
  float& compensation = view.score_compensations.at<float>(s, l, h, r);
  if (factor != 1.0) { scale_compensated(sum, compensation, factor); }
  // In two floats: one alone would round a sum of many queries to 24 bits.
  const double value = static_cast<double>(units) / (static_cast<double>(group) * exact_one);
  const auto high = static_cast<float>(value);
  add_compensated(sum, compensation, high);
  add_compensated(sum, compensation, static_cast<float>(value - static_cast<double>(high)));
}
}  // namespace detail

/// Adds one query's probabilities to the accumulated scores of one KV head.
///
/// \param probabilities  by row of the table; a value that is not finite is added as it is, and its row then ranks lowest
/// \pre `view.score_sums` and `view.score_compensations` are present; no hole
/// With `Sums::exact` the sum over the group has the same bits in any order of heads; a value that is not finite then counts
/// as 0, or as 1 if it is +inf.
///
/// \par Complexity
/// O(group * live rows) time; no allocation
/// \par Source
/// Zhang et al., 2023, arXiv:2306.14048 (H2O); the group mean is ours (the paper has no grouped heads), as kvpress's
inline void accumulate_probabilities(const AccumulateParams& params,
                                     const HeadRef& head,
                                     const Probabilities& probabilities) noexcept {
  using detail::Packet;
  constexpr std::int32_t width = detail::packet_floats;
  const auto [view, s, l, h] = head;
  const std::int32_t live = head.live_rows();
  if (params.sums == Sums::exact) {
    for (std::int32_t r = 0; r < live; ++r) {
      std::uint64_t units = 0;
      for (std::int32_t g = 0; g < probabilities.group; ++g) {
        const float p = probabilities.data[g * probabilities.head_stride + r];
        units += exact_units(params.squared ? p * p : p);
      }
      detail::add_units(head, r, units, probabilities.group, static_cast<double>(params.decay));
    }
    return;
  }
  const Packet share = detail::pset1<Packet>(1.0F / static_cast<float>(probabilities.group));
  float* const all_sums = view.score_sums.array<float>(s, l, h);
  float* const all_compensations = view.score_compensations.array<float>(s, l, h);
  const bool dense = all_sums != nullptr && all_compensations != nullptr;
  for (std::int32_t r = 0; r < live; r += width) {
    // The last rows, and planes that are not contiguous, go through the same instructions on a copy: same bits.
    const std::int32_t n = std::min(width, live - r);
    alignas(64) float copied_sums[width] = {};
    alignas(64) float copied_compensations[width] = {};
    const bool direct = dense && n == width;
    float* const sums = direct ? all_sums + r : copied_sums;
    float* const compensations = direct ? all_compensations + r : copied_compensations;
    for (std::int32_t i = 0; !direct && i < n; ++i) {
      sums[i] = view.score_sums.at<float>(s, l, h, r + i);
      compensations[i] = view.score_compensations.at<float>(s, l, h, r + i);
    }
    Packet x = detail::pset1<Packet>(0.0F);
    for (std::int32_t g = 0; g < probabilities.group; ++g) {
      const float* p = probabilities.data + g * probabilities.head_stride + r;
      alignas(64) float copied[width] = {};
      if (n < width) {
        std::copy_n(p, n, copied);
        p = copied;
      }
      const Packet y = detail::ploadu<Packet>(p);
      x = detail::padd(x, params.squared ? detail::pmul(y, y) : y);
    }
    x = detail::pmul(x, share);
    if (params.decay != 1.0F) {
      for (std::int32_t i = 0; i < n; ++i) {
        scale_compensated(sums[i], compensations[i], static_cast<double>(params.decay));
      }
    }
    // add_compensated
    const Packet sum = detail::ploadu<Packet>(sums);
    const Packet total = detail::padd(sum, x);
    const Packet part = detail::psub(total, sum);
    const Packet rest = detail::padd(
        detail::ploadu<Packet>(compensations),
        detail::padd(detail::psub(sum, detail::psub(total, part)), detail::psub(x, part)));
    const Packet fresh = detail::padd(total, rest);
    detail::pstoreu(sums, fresh);
    detail::pstoreu(compensations, detail::psub(rest, detail::psub(fresh, total)));
    for (std::int32_t i = 0; !direct && i < n; ++i) {
      view.score_sums.at<float>(s, l, h, r + i) = sums[i];
      view.score_compensations.at<float>(s, l, h, r + i) = compensations[i];
    }
  }
}

}  // namespace kvtrim
