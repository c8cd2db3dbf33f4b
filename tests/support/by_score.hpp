// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/policy/policy.hpp>
#include <kvtrim/score/external.hpp>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace kvtrim::test {

/// The smallest policy with scores: keeps the `keep` best rows by `Observation::scores`.
struct ByScore {
  static constexpr std::string_view name = "by_score";
  std::int32_t keep = 0;
  std::int32_t sinks = 0;
  std::int32_t recent = 0;
  Removal way = Removal::stable_pack;

  Demand demand(const DemandInput& in) const noexcept {
    return {in.budget >= 0 ? in.budget : keep, {sinks, recent}, recent, Status::ok};
  }
  Removal removal() const noexcept { return way; }
  ExternalScorer scorer() const noexcept { return {}; }
};
static_assert(Policy<ByScore>);

/// Indices of the `keep` best of `scores`, ascending; equal ones: the lower index.
inline std::vector<std::int32_t> best(const std::vector<float>& scores, std::int32_t keep) {
  std::vector<std::pair<float, std::int32_t>> order;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    order.emplace_back(-scores[i], static_cast<std::int32_t>(i));
  }
  std::sort(order.begin(), order.end());
  std::vector<std::int32_t> indices;
  for (std::size_t i = 0; i < order.size() && static_cast<std::int32_t>(i) < keep; ++i) {
    indices.push_back(order[i].second);
  }
  std::sort(indices.begin(), indices.end());
  return indices;
}

}  // namespace kvtrim::test
