// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/core/rope.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/policy/peak_pages.hpp>

#include <cstdint>
#include <span>

#include "program/evictor.hpp"
#include "program/policy_spec.hpp"
#include "request.hpp"

namespace batch {

/// What requests take of a pool: the pages of all tables of a stream.
struct Footprint {
  const program::PolicySpec* policy;
  kvtrim::PagedCache::Params cache;
  kvtrim::Rope rope;
  std::int64_t prefix = 0;  ///< tokens of the common prefix, whose whole pages no stream owns
  std::int64_t chunk = 128;

  /// Rows that stay after a cut.
  [[nodiscard]] std::int32_t keep(const Request& request) const;
  /// The policy that keeps them.
  [[nodiscard]] program::AnyPolicy policy_for(std::int32_t keep) const;
  /// Most pages while the prompt is read, and after its cut.
  [[nodiscard]] kvtrim::PeakPages peak(const Request& request) const;
  /// Pages of the prefix.
  [[nodiscard]] std::int64_t prefix_pages() const;
  /// Streams that the pool holds at most: where requests differ, of the smallest.
  [[nodiscard]] std::int64_t streams(std::span<const Request> requests) const;
};

/// Rows and pages of a sequence that no other has.
struct Own {
  std::int64_t rows = 0;
  std::int64_t pages = 0;
};
/// Counted in all tables; pages that are shared are full.
[[nodiscard]] Own own_of(const kvtrim::PagedCache& cache, kvtrim::SequenceId s);

}  // namespace batch
