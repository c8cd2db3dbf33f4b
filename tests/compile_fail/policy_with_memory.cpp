// expect: is_trivially_copyable
// SPDX-License-Identifier: Apache-2.0
// A policy is a value that serves all sequences and threads: it cannot own anything.
#include <kvtrim/evict/planner.hpp>

#include <vector>

struct Policy {
  static constexpr const char* name = "with memory";
  kvtrim::Demand demand(const kvtrim::DemandInput&) const noexcept { return {}; }
  kvtrim::Removal removal() const noexcept { return kvtrim::Removal::stable_pack; }
  kvtrim::NoScores scorer() const noexcept { return {}; }
#if !defined(KVTRIM_TEST_VALID)
  std::vector<float> history;
#endif
};

kvtrim::Status use(const kvtrim::CacheView& view, std::span<std::byte> workspace) {
  return kvtrim::plan(Policy{}, view, {}, workspace).status();
}
