// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/types.hpp>

#include <kvtrim/core/config.hpp>

#include <cstdint>
#include <string_view>

namespace kvtrim {

/// Outcome of an operation that can fail in normal use. Unless it says otherwise, nothing was changed.
enum class [[nodiscard]] Status : std::uint8_t {
  ok,  ///< done
  over_budget,  ///< valid plan, but rows that must stay (protected or shared) exceed the budget: they all stay
  out_of_pages,     ///< fewer free pages than needed
  stale_plan,       ///< the cache changed after the plan was made, or the plan was already applied
  not_applied,      ///< commit before apply
  unequal_budget,   ///< heads or layers of one page table would keep different counts
  chunk_too_long,   ///< the chunk leaves no room for the policy's window
  rows_unordered,   ///< pages can only be dropped where slot order is position order
  shared_page,      ///< a shared page would have to be written (`SharedPages::leave`)
  planes_disagree,  ///< a side plane cannot follow: it is common to heads that keep different rows, or to rows that part
  no_such_sequence,     ///< the sequence does not exist or was destroyed
  too_many_rows,        ///< more rows than the table of a sequence can hold
  too_many_sequences,   ///< `max_sequences` are alive
  workspace_too_small,  ///< smaller than `plan_workspace_bytes` requires
  bad_observation,  ///< what the policy needs (queries, scores, a score plane) is missing or has the wrong shape
  page_out_of_range,    ///< a used table entry is null or names a page the pool does not have
  page_twice,           ///< a page occurs twice in one table, or is writable in two sequences
  length_beyond_table,  ///< a length is negative or its rows need more pages than the table row has
  bad_plan,  ///< bytes that are not a plan, or a plan of another shape or position mode than the view's
  bad_options,  ///< a way of removal, a rerotator or a spare page that cannot serve this policy and view
  step_open,  ///< rows were reserved (`try_extend`) and not yet written in every layer of the table
  no_open_step,     ///< rows to write that no `try_extend` reserved, or that were written before
  eviction_open,    ///< a plan was applied to the table and not committed
  states_disagree,  ///< lengths and states, or two numbers of one state, contradict each other
  /// A table was changed between `apply` and `commit`: its rows moved, and it cannot be committed. The one status after
  /// which rows are lost; the plan's other tables were committed.
  torn,
  ranks_differ,  ///< ranks of one communicator do not agree on what they do; all of them are told so
  rank_missing,  ///< a rank did not arrive in time, or the communicator was broken before
};

/// Name of `s`, spelled as in the enumeration; "unknown" for a value outside it.
[[nodiscard]] constexpr std::string_view to_string(Status s) noexcept {
  return detail::enumerator_name(s,
                                 {"ok",
                                  "over_budget",
                                  "out_of_pages",
                                  "stale_plan",
                                  "not_applied",
                                  "unequal_budget",
                                  "chunk_too_long",
                                  "rows_unordered",
                                  "shared_page",
                                  "planes_disagree",
                                  "no_such_sequence",
                                  "too_many_rows",
                                  "too_many_sequences",
                                  "workspace_too_small",
                                  "bad_observation",
                                  "page_out_of_range",
                                  "page_twice",
                                  "length_beyond_table",
                                  "bad_plan",
                                  "bad_options",
                                  "step_open",
                                  "no_open_step",
                                  "eviction_open",
                                  "states_disagree",
                                  "torn",
                                  "ranks_differ",
                                  "rank_missing"});
}

/// Whether a plan with this status may be applied: `ok` or `over_budget`.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool usable(Status s) noexcept {
  return s == Status::ok || s == Status::over_budget;
}

}  // namespace kvtrim
