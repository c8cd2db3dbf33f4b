// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/cache/required_bytes.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace kvtrim::test {

inline constexpr std::uint32_t signalling_nan = 0x7FA0'0000;  ///< as f32; two NaN as bf16

/// Fills whatever a cache has not written yet with `word`, so that what is read too early is noticed. Under valgrind
/// (KVTRIM_TEST_UNWRITTEN set) the memory stays as it is: valgrind knows.
inline void fill_unwritten(PagedCache& cache, std::uint32_t word = signalling_nan) {
  if (std::getenv("KVTRIM_TEST_UNWRITTEN") != nullptr) { return; }
  const CacheView view = cache.view();
  const RequiredBytes all = required_bytes(view, cache.params().max_rows);
  const auto fill = [&](std::byte* base, ByteRange range) {
    if (range.end > 1 << 22) { return; }  // memory that a test maps and does not touch
    for (std::int64_t i = 0; i + 4 <= range.end; i += 4) { std::memcpy(base + i, &word, 4); }
  };
  fill(view.k.base, all.keys), fill(view.v.base, all.values);
  fill(view.unrotated_keys.base, all.unrotated_keys);
  fill(view.positions.base, all.positions), fill(view.rope_positions.base, all.rope_positions);
  fill(view.score_sums.base, all.score_sums);
  fill(view.score_compensations.base, all.score_compensations);
}

}  // namespace kvtrim::test
