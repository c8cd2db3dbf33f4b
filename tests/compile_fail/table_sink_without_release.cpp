// expect: constraints not satisfied
// SPDX-License-Identifier: Apache-2.0
// Pages that left a table must be handed back, and the sink says whether they are free now.
#include <kvtrim/evict/commit.hpp>

struct Tables {
  void update(const kvtrim::TableUpdate&) noexcept {}
#if defined(KVTRIM_TEST_VALID)
  bool release(kvtrim::PageId) noexcept { return true; }
#else
  void release(kvtrim::PageId) noexcept {}
#endif
};

kvtrim::Report use(const kvtrim::PlanRef& plan, const kvtrim::CacheView& view, Tables& tables) {
  return kvtrim::commit(plan, view, tables);
}
