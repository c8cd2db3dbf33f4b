// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/removal.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/evict/rerotate.hpp>

#include <span>

namespace kvtrim {

/// How a plan is to be made.
struct PlanOptions {
  Removal removal = Removal::automatic;     ///< the policy's own, or this one
  SharedPages shared = SharedPages::leave;  ///< what happens to pages that must not be written
  std::span<const PageId> spare_pages =
      {};  ///< free pages that `SharedPages::copy` may take, from the front
  const Rerotator* rerotator = nullptr;  ///< position mode; null: positions are kept
};

}  // namespace kvtrim
