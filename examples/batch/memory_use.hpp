// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a run keeps in memory besides the model: pages, and what goes with them. More streams in the same pages are no gain if
// what goes with them takes as much.

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/cache/sequence_state.hpp>
#include <kvtrim/core/types.hpp>

#include <algorithm>
#include <cstdint>

namespace batch {

/// Bytes, as allocated.
struct MemoryUse {
  std::int64_t pages = 0;      ///< keys and values
  std::int64_t positions = 0;  ///< position and rope position of each row
  std::int64_t scores = 0;     ///< accumulated scores and their compensations
  std::int64_t tables = 0;     ///< page tables, states and owners of pages
  std::int64_t recorder = 0;   ///< query rings, moments and scratch
  std::int64_t workspace = 0;  ///< of plans

  [[nodiscard]] constexpr std::int64_t sum() const noexcept {
    return pages + positions + scores + tables + recorder + workspace;
  }
};

/// Of a cache that is made of `params`, without recorder and workspace.
[[nodiscard]] inline MemoryUse memory_use(const kvtrim::PagedCache::Params& params,
                                          std::int64_t page_bytes) {
  const std::int64_t tables = kvtrim::tables_of(params.scope, params.layers, params.kv_heads);
  const std::int64_t rows =
      std::int64_t{params.max_sequences} * params.layers * params.kv_heads * params.max_rows;
  const std::int64_t table_pages = kvtrim::pages_for(params.max_rows, params.page_size);
  MemoryUse use;
  use.pages = params.pages * page_bytes;
  use.positions = rows * 8;
  use.scores = params.scores ? rows * 8 : 0;
  use.tables = params.max_sequences * tables *
                   (table_pages * 4 + std::int64_t{sizeof(kvtrim::SequenceState)}) +
               std::int64_t{params.pages} * 8;
  return use;
}

/// The streams that fit into `bytes` under a policy, when everything is counted and one of them is being read.
///
/// \param each       bytes that go with each stream (positions, tables, ...)
/// \param fixed      bytes whatever the number of streams
/// \param running    bytes of pages of a stream after its cut
/// \param reading    bytes of pages of the one that is being read
[[nodiscard]] constexpr std::int64_t streams_within(std::int64_t bytes,
                                                    std::int64_t each,
                                                    std::int64_t fixed,
                                                    std::int64_t running,
                                                    std::int64_t reading) noexcept {
  const std::int64_t first = fixed + each + std::max(running, reading);
  return bytes < first ? 0 : 1 + (bytes - first) / std::max<std::int64_t>(1, each + running);
}

}  // namespace batch
