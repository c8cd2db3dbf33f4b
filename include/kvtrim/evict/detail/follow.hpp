// SPDX-License-Identifier: Apache-2.0
#pragma once

// Whether everything that pages hold can follow the rows that a plan moves.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/evict/detail/plan_draft.hpp>

#include <cstdint>

namespace kvtrim::detail::stage {

/// `bad_options` where a row would move that has no key: in a view without keys, rows stay where they are.
[[nodiscard]] inline Status moves_follow(const PlanDraft& draft) noexcept {
  if (draft.view.k) { return Status::ok; }
  Status status = Status::ok;
  draft.for_each_table([&](SequenceId s, std::int32_t t) {
    if (!draft.plan.table(s, t).evicts) { return; }
    draft.for_each_head(s, t, [&](const HeadRef& head) {
      if (draft.plan.head(head).moved != 0) { status = Status::bad_options; }
    });
  });
  return status;
}

}  // namespace kvtrim::detail::stage
