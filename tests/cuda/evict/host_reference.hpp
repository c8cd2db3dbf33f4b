// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CPU side of the parity tests, compiled apart: its scorers include Eigen, which no .cu may see.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/evict/plan.hpp>
#include <kvtrim/evict/plan_bytes.hpp>
#include <kvtrim/evict/plan_options.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/observe/plan_shape.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include <algorithm>
#include <string_view>

namespace kvtrim::test {

/// Keeps the rows with the best ready-made scores.
struct ByScore {
  static constexpr std::string_view name = "by_score";
  std::int32_t keep = 0;
  Protection protection{};
  Removal way = Removal::stable_pack;
  std::int32_t by_layer = 0;  // more rows in each further layer of the model

  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    return {in.budget >= 0 ? in.budget : std::min(keep + by_layer * raw(in.layer), in.live),
            protection,
            protection.recent,
            Status::ok};
  }
  [[nodiscard]] constexpr Removal removal() const noexcept { return way; }
  [[nodiscard]] constexpr ExternalParams scorer() const noexcept { return {}; }
};
static_assert(Policy<ByScore>);

/// `kvtrim::plan` with memory of its own; host_reference.cpp lists the policies that it is compiled for.
template <class P>
Plan host_plan(const P& policy,
               const CacheView& view,
               const Observation& obs,
               Removal removal,
               ReservedPages reserved = ReservedPages::follow);

/// The same with all options.
template <class P>
Plan host_plan(const P& policy,
               const CacheView& view,
               const Observation& obs,
               const PlanOptions& options);

}  // namespace kvtrim::test
