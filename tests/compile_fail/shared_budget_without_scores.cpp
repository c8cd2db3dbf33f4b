// expect: kvtrim::AdaKV: heads compete by the scores of their rows
// SPDX-License-Identifier: Apache-2.0
// A shared budget needs scores: Full keeps by position.
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/full.hpp>
#include <kvtrim/policy/key_norm.hpp>

#if defined(KVTRIM_TEST_VALID)
kvtrim::AdaKV<kvtrim::KeyNorm> policy;
#else
kvtrim::AdaKV<kvtrim::Full> policy;
#endif
