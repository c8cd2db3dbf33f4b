// expect: constraints not satisfied
// SPDX-License-Identifier: Apache-2.0
// A commit cannot stop between two tables: what writes them must not throw.
#include <kvtrim/evict/commit.hpp>

struct Tables {
#if defined(KVTRIM_TEST_VALID)
  void update(const kvtrim::TableUpdate&) noexcept {}
#else
  void update(const kvtrim::TableUpdate&) {}
#endif
  bool release(kvtrim::PageId) noexcept { return true; }
};

kvtrim::Report use(const kvtrim::PlanRef& plan, const kvtrim::CacheView& view, Tables& tables) {
  return kvtrim::commit(plan, view, tables);
}
