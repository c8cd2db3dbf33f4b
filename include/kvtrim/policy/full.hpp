// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/policy/policy.hpp>

#include <string_view>

namespace kvtrim {

/// Keeps everything: the baseline, and the policy for layers that must not be touched.
///
/// \par Source
/// none
struct Full {
  static constexpr std::string_view name = "full";
  /// All rows.
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    return {in.live, {}, 0, Status::ok};
  }
  /// Never used.
  [[nodiscard]] constexpr Removal removal() const noexcept { return Removal::stable_pack; }
  /// None.
  [[nodiscard]] constexpr NoScores scorer() const noexcept { return {}; }
};
static_assert(Policy<Full>);

}  // namespace kvtrim
