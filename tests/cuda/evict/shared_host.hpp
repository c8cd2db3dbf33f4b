// SPDX-License-Identifier: Apache-2.0
#pragma once

// The host's plans of caches in which some pages must not be written; shared_host.cpp lists the policies.

#include <kvtrim/evict/plan_bytes.hpp>
#include <kvtrim/evict/plan_options.hpp>

#include "cuda/evict/host_reference.hpp"

namespace kvtrim::test {

/// `kvtrim::plan` with memory of its own.
template <class P>
Plan host_plan_by(const P& policy,
                  const CacheView& view,
                  const Observation& obs,
                  const PlanOptions& options);

}  // namespace kvtrim::test
