// expect: kvtrim::SnapKVSelector: Scores must be parameters of a score
// SPDX-License-Identifier: Apache-2.0
// Parameters that do not say what they protect, or that check nothing.
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>

struct MyScores {
  int size = 1;
};

#if defined(KVTRIM_TEST_VALID)
kvtrim::SnapKVSelector<kvtrim::KeyNormParams> made;
#else
kvtrim::SnapKVSelector<MyScores> made;
#endif
