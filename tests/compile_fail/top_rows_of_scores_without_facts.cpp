// expect: kvtrim::TopRows: (Token)?Scores must be parameters of a score
// SPDX-License-Identifier: Apache-2.0
// Parameters that do not say what they protect, or that check nothing.
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/top_rows.hpp>

struct MyScores {
  int size = 1;
};

#if defined(KVTRIM_TEST_VALID)
kvtrim::TopRows<kvtrim::KeyNormParams> made;
#else
kvtrim::TopRows<MyScores> made;
#endif
