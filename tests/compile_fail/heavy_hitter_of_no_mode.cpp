// expect: kvtrim::HeavyHitter: Mode must be one of HeavyMode: real_drop, greedy, promote
// SPDX-License-Identifier: Apache-2.0
// A number that is none of the published algorithms.
#include <kvtrim/policy/heavy_hitter.hpp>

#if defined(KVTRIM_TEST_VALID)
kvtrim::HeavyHitter<kvtrim::AccumulateParams, kvtrim::HeavyMode::greedy> made;
#else
kvtrim::HeavyHitter<kvtrim::AccumulateParams, static_cast<kvtrim::HeavyMode>(7)> made;
#endif
