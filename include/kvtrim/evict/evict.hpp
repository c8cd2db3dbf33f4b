// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/evict/planner.hpp>

#include <cstddef>
#include <span>

namespace kvtrim {

/// Plans, applies and commits an eviction of a `PagedCache` in one call, on the calling thread or the executor's.
///
/// \param view       `cache.view()` or `cache.view(sequence)`
/// \param workspace  as for `plan`
/// \returns the report; unless its status is `ok` or `over_budget`, nothing was changed
template <Policy P, Executor E = Serial>
Report evict(const P& policy,
             PagedCache& cache,
             const CacheView& view,
             const Observation& obs,
             std::span<std::byte> workspace,
             const PlanOptions& options = {},
             const E& executor = {}) noexcept {
  const PlanRef made = plan(policy, view, obs, workspace, options, executor);
  const Rerotator keep;
  const Status applied =
      apply(made, view, options.rerotator != nullptr ? *options.rerotator : keep, executor);
  Report report;
  report.status = applied;
  if (applied != Status::ok) { return report; }
  auto sink = cache.sink_for(view);
  return commit(made, view, sink);
}

}  // namespace kvtrim
