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
  std::span<const PageId> spare_pages =
      {};  ///< free pages that `SharedPages::copy` may take, from the front
  const Rerotator* rerotator = nullptr;  ///< position mode; null: positions are kept
};

}  // namespace kvtrim
