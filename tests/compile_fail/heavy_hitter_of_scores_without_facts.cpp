// expect: kvtrim::HeavyHitter: Scores must be parameters of a score
// SPDX-License-Identifier: Apache-2.0
// Parameters that do not say what they protect, or that check nothing.
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_norm.hpp>

struct MyScores {
  int size = 1;
};

#if defined(KVTRIM_TEST_VALID)
kvtrim::HeavyHitter<kvtrim::KeyNormParams> made;
#else
kvtrim::HeavyHitter<MyScores> made;
#endif
