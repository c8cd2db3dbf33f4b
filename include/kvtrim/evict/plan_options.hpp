// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/removal.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/evict/rerotate.hpp>

#include <span>

namespace kvtrim {

/// How to make a plan.
struct PlanOptions {
  Removal removal = Removal::automatic;     ///< `automatic`: the policy's own
  SharedPages shared = SharedPages::leave;  ///< what happens to pages that must not be written
  /// Pages that `SharedPages::copy` may take, from the front. The caller's own: in no table, none twice, none held by another
  /// (a count of at most 1).
  std::span<const PageId> spare_pages = {};
  ReservedPages reserved = ReservedPages::follow;  ///< what becomes of `CacheView::reserved_pages`
  const Rerotator* rerotator = nullptr;            ///< position mode; null: positions are kept
};

}  // namespace kvtrim
