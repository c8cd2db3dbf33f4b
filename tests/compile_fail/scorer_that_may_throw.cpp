// expect: this policy's scorer is not defined here
// SPDX-License-Identifier: Apache-2.0
// A scorer runs inside a plan, which is noexcept: its score() must be, too.
#include <kvtrim/evict/planner.hpp>

#if defined(KVTRIM_TEST_VALID)
#  define MARKED noexcept
#else
#  define MARKED
#endif

struct Careless {
  std::size_t scratch_bytes(const kvtrim::PlanShape&) const noexcept { return 0; }
  kvtrim::Status check(const kvtrim::CacheView&, const kvtrim::Observation&) const noexcept {
    return kvtrim::Status::ok;
  }
  void score(const kvtrim::HeadRef&,
             const kvtrim::Observation&,
             std::span<std::byte>,
             std::span<float>) const MARKED {}
};

struct Policy {
  static constexpr const char* name = "careless";
  kvtrim::Demand demand(const kvtrim::DemandInput&) const noexcept { return {}; }
  kvtrim::Removal removal() const noexcept { return kvtrim::Removal::stable_pack; }
  Careless scorer() const noexcept { return {}; }
};

kvtrim::Status use(const kvtrim::CacheView& view, std::span<std::byte> workspace) {
  return kvtrim::plan(Policy{}, view, {}, workspace).status();
}
