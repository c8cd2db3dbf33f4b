// expect: constraints not satisfied
// SPDX-License-Identifier: Apache-2.0
// A workspace is divided among the workers, so an executor must say how many there are.
#include <kvtrim/evict/apply.hpp>

struct Pool {
#if defined(KVTRIM_TEST_VALID)
  std::int32_t workers() const { return 2; }
#endif
  template <class F>
  void for_each(std::int64_t n, F&& f) const noexcept {
    for (std::int64_t i = 0; i < n; ++i) { f(i, 0); }
  }
};

kvtrim::Status use(const kvtrim::PlanRef& plan, const kvtrim::CacheView& view) {
  return kvtrim::apply(plan, view, {}, Pool{});
}
