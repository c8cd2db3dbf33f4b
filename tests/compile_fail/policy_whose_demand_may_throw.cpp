// expect: constraints not satisfied
// SPDX-License-Identifier: Apache-2.0
// Plans are noexcept, so demand() must be too.
#include <kvtrim/evict/planner.hpp>

#if defined(KVTRIM_TEST_VALID)
#  define MARKED noexcept
#else
#  define MARKED
#endif

struct Policy {
  static constexpr const char* name = "throws";
  kvtrim::Demand demand(const kvtrim::DemandInput&) const MARKED { return {}; }
  kvtrim::Removal removal() const noexcept { return kvtrim::Removal::stable_pack; }
  kvtrim::NoScores scorer() const noexcept { return {}; }
};

kvtrim::Status use(const kvtrim::CacheView& view, std::span<std::byte> workspace) {
  return kvtrim::plan(Policy{}, view, {}, workspace).status();
}
