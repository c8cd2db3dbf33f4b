// expect: no match|too few arguments
// SPDX-License-Identifier: Apache-2.0
// An item is called with its worker, whose memory it uses. The concept sees for_each's signature, not this call.
#include <kvtrim/evict/apply.hpp>

struct Pool {
  std::int32_t workers() const { return 1; }
  template <class F>
  void for_each(std::int64_t n, F&& f) const noexcept {
    for (std::int64_t i = 0; i < n; ++i) {
#if defined(KVTRIM_TEST_VALID)
      f(i, 0);
#else
      f(i);
#endif
    }
  }
};

kvtrim::Status use(const kvtrim::PlanRef& plan, const kvtrim::CacheView& view) {
  return kvtrim::apply(plan, view, {}, Pool{});
}
