// SPDX-License-Identifier: Apache-2.0
#pragma once

// Eviction by any policy: compiled once (evict_any.cpp), for all programs.

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/evict/plan_options.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/observe/plan_shape.hpp>

#include <cstddef>
#include <span>

#include "engine/openmp.hpp"
#include "policy_spec.hpp"

namespace program {

/// `kvtrim::plan_workspace_bytes` of the policy inside.
[[nodiscard]] std::size_t workspace_bytes(const AnyPolicy& policy, const kvtrim::PlanShape& shape);

/// `kvtrim::evict` by the policy inside.
kvtrim::Report evict_any(const AnyPolicy& policy,
                         kvtrim::PagedCache& cache,
                         const kvtrim::CacheView& view,
                         const kvtrim::Observation& seen,
                         std::span<std::byte> workspace,
                         const kvtrim::PlanOptions& options,
                         const engine::OpenMp& executor);

}  // namespace program
