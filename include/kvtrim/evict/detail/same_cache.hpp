// SPDX-License-Identifier: Apache-2.0
#pragma once

// Whether a plan and a view belong together.

#include <kvtrim/cache/generation.hpp>
#include <kvtrim/evict/plan.hpp>

#include <cstdint>

namespace kvtrim::detail {

[[nodiscard]] inline bool same_shape(const PlanView& plan, const CacheView& view) noexcept {
  const PlanHeader& x = plan.header();
  return x.sequences == view.sequences && x.layers == view.layers && x.kv_heads == view.kv_heads &&
         x.scope == view.scope && x.page_size == view.page_size;
}

// Whether no table that the plan evicts from has changed since.
[[nodiscard]] inline bool fresh(const PlanView& plan, const CacheView& view) noexcept {
  bool same = true;
  plan.for_each_evicting([&](SequenceId s, std::int32_t t) {
    same = same && plan.table(s, t).generation == table_generation(view, s, t);
  });
  return same;
}

}  // namespace kvtrim::detail
