// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/kvtrim.hpp>

static_assert(KVTRIM_VERSION_MAJOR == 0 && KVTRIM_VERSION_MINOR == 1);

int main() {}
