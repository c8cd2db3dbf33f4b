// SPDX-License-Identifier: Apache-2.0
#include "evict_any.hpp"

#include <kvtrim/kvtrim.hpp>

#include <variant>

namespace program {

std::size_t workspace_bytes(const AnyPolicy& policy, const kvtrim::PlanShape& shape) {
  return std::visit([&](const auto& p) { return kvtrim::plan_workspace_bytes(p, shape); }, policy);
}

kvtrim::Report evict_any(const AnyPolicy& policy,
                         kvtrim::PagedCache& cache,
                         const kvtrim::CacheView& view,
                         const kvtrim::Observation& seen,
                         std::span<std::byte> workspace,
                         const kvtrim::PlanOptions& options,
                         const engine::OpenMp& executor) {
  return std::visit(
      [&](const auto& p) {
        return kvtrim::evict(p, cache, view, seen, workspace, options, executor);
      },
      policy);
}

}  // namespace program
