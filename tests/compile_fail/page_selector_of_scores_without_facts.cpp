// expect: kvtrim::PageSelector: (Token)?Scores must be parameters of a score
// SPDX-License-Identifier: Apache-2.0
// Parameters that do not say what they protect, or that check nothing.
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/page_selector.hpp>

struct MyScores {
  int size = 1;
};

#if defined(KVTRIM_TEST_VALID)
kvtrim::PageSelector<kvtrim::KeyNormParams> made;
#else
kvtrim::PageSelector<MyScores> made;
#endif
