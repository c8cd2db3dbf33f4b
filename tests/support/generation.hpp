// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/generation.hpp>

#include <cstdint>

namespace kvtrim::test {

// One number for all tables of a view.
inline std::uint64_t generation_of(const CacheView& view) {
  std::uint64_t all = 0;
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
      all = all * 31 + table_generation(view, SequenceId{s}, t);
    }
  }
  return all;
}

}  // namespace kvtrim::test
