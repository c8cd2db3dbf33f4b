// expect: include its header from <kvtrim/score/>
// SPDX-License-Identifier: Apache-2.0
// A policy's header brings only its parameters; code that plans with it includes the scorer.
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#if defined(KVTRIM_TEST_VALID)
#  include <kvtrim/score/window.hpp>
#endif

kvtrim::Status use(const kvtrim::CacheView& view, std::span<std::byte> workspace) {
  return kvtrim::plan(kvtrim::SnapKVSelector(), view, {}, workspace).status();
}
