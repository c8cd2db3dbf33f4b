// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/config.hpp>

#include <cstdint>
#include <string_view>

namespace kvtrim {

/// Outcome of an operation that can fail in normal use. Unless it says otherwise, nothing was changed.
enum class [[nodiscard]] Status : std::uint8_t {
  ok,  ///< done
  over_budget,  ///< valid plan, but rows that must stay (protected or shared) exceed the budget: they all stay
  out_of_pages,      ///< fewer free pages than needed
  stale_plan,        ///< the cache changed after the plan was made, or the plan was already applied
  not_applied,       ///< commit before apply
  unequal_budget,    ///< heads or layers of one page table would keep different counts
  chunk_too_long,    ///< the chunk leaves no room for the policy's window
  rows_unordered,    ///< pages can only be dropped where slot order is position order
  shared_page,       ///< a shared page would have to be written (`SharedPages::leave`)
  planes_disagree,   ///< heads keep different rows, but a side plane is common to them
  no_such_sequence,  ///< the sequence does not exist or was destroyed
  too_many_rows,     ///< more rows than the table of a sequence can hold
  too_many_sequences,   ///< `max_sequences` are alive
  workspace_too_small,  ///< smaller than `plan_workspace_bytes` requires
  bad_observation,  ///< what the policy needs (queries, scores, a score plane) is missing or has the wrong shape
  page_out_of_range,    ///< a used table entry is null or names a page the pool does not have
  page_twice,           ///< a page occurs twice in one table, or is writable in two sequences
  length_beyond_table,  ///< a length is negative or its rows need more pages than the table row has
  bad_plan,  ///< bytes that are not a plan, or a plan of another shape or position mode than the view's
  bad_options,  ///< a way of removal, a rerotator or a spare page that cannot serve this policy and view
};

/// Name of `s`, spelled as in the enumeration; "unknown" for a value outside it.
[[nodiscard]] constexpr std::string_view to_string(Status s) noexcept {
  switch (s) {
    case Status::ok:
      return "ok";
    case Status::over_budget:
      return "over_budget";
    case Status::out_of_pages:
      return "out_of_pages";
    case Status::stale_plan:
      return "stale_plan";
    case Status::not_applied:
      return "not_applied";
    case Status::unequal_budget:
      return "unequal_budget";
    case Status::chunk_too_long:
      return "chunk_too_long";
    case Status::rows_unordered:
      return "rows_unordered";
    case Status::shared_page:
      return "shared_page";
    case Status::planes_disagree:
      return "planes_disagree";
    case Status::no_such_sequence:
      return "no_such_sequence";
    case Status::too_many_rows:
      return "too_many_rows";
    case Status::too_many_sequences:
      return "too_many_sequences";
    case Status::workspace_too_small:
      return "workspace_too_small";
    case Status::bad_observation:
      return "bad_observation";
    case Status::page_out_of_range:
      return "page_out_of_range";
    case Status::page_twice:
      return "page_twice";
    case Status::length_beyond_table:
      return "length_beyond_table";
    case Status::bad_plan:
      return "bad_plan";
    case Status::bad_options:
      return "bad_options";
  }
  return "unknown";
}

/// Whether a plan with this status may be applied: `ok` or `over_budget`.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool usable(Status s) noexcept {
  return s == Status::ok || s == Status::over_budget;
}

}  // namespace kvtrim
