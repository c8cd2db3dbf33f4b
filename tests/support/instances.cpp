// SPDX-License-Identifier: Apache-2.0
#include "support/instances.hpp"

#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/q_filter.hpp>
#include <kvtrim/score/random.hpp>
#include <kvtrim/score/tova.hpp>
#include <kvtrim/score/window.hpp>

namespace kvtrim {

#define KVTRIM_INSTANCES_HERE(...) KVTRIM_INSTANCES(, __VA_ARGS__)
KVTRIM_INSTANCES_OF(KVTRIM_INSTANCES_HERE)
KVTRIM_COMMON_INSTANCES()

}  // namespace kvtrim
