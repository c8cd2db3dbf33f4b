// expect: constraints not satisfied
// SPDX-License-Identifier: Apache-2.0
// Moves cannot stop half way: what runs them must not throw.
#include <kvtrim/evict/apply.hpp>

struct Pool {
  std::int32_t workers() const { return 2; }
  template <class F>
#if defined(KVTRIM_TEST_VALID)
  void for_each(std::int64_t n, F&& f) const noexcept {
#else
  void for_each(std::int64_t n, F&& f) const {
#endif
      for (std::int64_t i = 0; i < n; ++i) {
        f(i, 0);
}
}
}
;

kvtrim::Status use(const kvtrim::PlanRef& plan, const kvtrim::CacheView& view) {
  return kvtrim::apply(plan, view, {}, Pool{});
}
