// expect: kvtrim::CriticalKV: scores are rescaled row by row
// SPDX-License-Identifier: Apache-2.0
// Pages have no rows to choose again.
#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>

#if defined(KVTRIM_TEST_VALID)
kvtrim::CriticalKV<kvtrim::SnapKVSelector<>> policy;
#else
kvtrim::CriticalKV<kvtrim::PageSelector<>> policy;
#endif
