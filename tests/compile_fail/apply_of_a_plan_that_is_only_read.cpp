// expect: PlanRef
// SPDX-License-Identifier: Apache-2.0
// A plan that is only read cannot be applied: its stage could not advance, and it could be applied again.
#include <kvtrim/evict/apply.hpp>

kvtrim::Status use(const kvtrim::PlanRef& plan, const kvtrim::CacheView& view) {
#if defined(KVTRIM_TEST_VALID)
  return kvtrim::apply(plan, view);
#else
  const kvtrim::PlanView& read = plan;
  return kvtrim::apply(read, view);
#endif
}
