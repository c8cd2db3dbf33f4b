// expect: include its header from <kvtrim/score/>
// SPDX-License-Identifier: Apache-2.0
// A policy's header brings its parameters alone; who plans with it includes the scorer.
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#if defined(KVTRIM_TEST_VALID)
#  include <kvtrim/score/window.hpp>
#endif

kvtrim::Status use(const kvtrim::CacheView& view, std::span<std::byte> workspace) {
  return kvtrim::plan(kvtrim::SnapKVSelector(), view, {}, workspace).status();
}
