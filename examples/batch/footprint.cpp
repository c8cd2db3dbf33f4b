// SPDX-License-Identifier: Apache-2.0
#include "footprint.hpp"

#include <kvtrim/core/types.hpp>

#include <algorithm>

namespace batch {

std::int32_t Footprint::keep(const Request& request) const {
  return policy->rows_to_keep(
      static_cast<std::int32_t>(prefix + static_cast<std::int64_t>(request.prompt.size())), 0);
}

program::AnyPolicy Footprint::policy_for(std::int32_t keep) const {
  return policy->make(keep, kvtrim::SinkForm::pages, rope);
}

kvtrim::PeakPages Footprint::peak(const Request& request) const {
  const std::int32_t rows = keep(request);
  kvtrim::PeakPages peak = program::peak_pages_of(
      policy_for(rows),
      prefix + static_cast<std::int64_t>(request.prompt.size()),
      request.max_tokens - 1,  // the last token is not read
      cache.page_size,
      chunk,
      {.cuts = policy->acts_once() ? kvtrim::CutTimes::after_prompt : kvtrim::CutTimes::each_step,
       .budget = rows,
       .layers = cache.layers});
  // Whole pages of the prefix are its own. A cut may drop them from the stream's table in favour of rows of the stream.
  const std::int64_t shared = prefix / cache.page_size;
  peak.prompt -= shared;
  if (policy->name() == "full") peak.running -= shared;
  const std::int64_t tables = kvtrim::tables_of(cache.scope, cache.layers, cache.kv_heads);
  return {peak.prompt * tables, peak.running * tables};
}

std::int64_t Footprint::prefix_pages() const {
  return std::int64_t{kvtrim::tables_of(cache.scope, cache.layers, cache.kv_heads)} *
         kvtrim::pages_for(static_cast<std::int32_t>(prefix), cache.page_size);
}

std::int64_t Footprint::streams(std::span<const Request> requests) const {
  std::int64_t most = cache.pages, running = cache.pages;
  for (const Request& r : requests) {
    const kvtrim::PeakPages p = peak(r);
    most = std::min(most, p.most());
    running = std::min(running, p.running);
  }
  const std::int64_t rest = cache.pages - prefix_pages() - most;
  return rest < 0 ? 0 : 1 + rest / std::max<std::int64_t>(1, running);
}

Own own_of(const kvtrim::PagedCache& cache, kvtrim::SequenceId s) {
  const auto& p = cache.params();
  Own own;
  const std::int32_t layers = p.scope == kvtrim::TableScope::group ? 1 : p.layers;
  const std::int32_t heads = p.scope == kvtrim::TableScope::head ? p.kv_heads : 1;
  for (std::int32_t l = 0; l < layers; ++l) {
    for (std::int32_t h = 0; h < heads; ++h) {
      const kvtrim::LayerId layer{l};
      const kvtrim::HeadId head{h};
      own.rows += cache.live_rows(s, layer, head);
      for (const std::int32_t page : cache.page_table(s, layer, head)) {
        if (page < 0) break;
        if (cache.pool().ref_count(kvtrim::PageId{page}) > 1) {
          own.rows -= p.page_size;
        } else {
          ++own.pages;
        }
      }
    }
  }
  return own;
}

}  // namespace batch
