// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/version.hpp>

#include "catch.hpp"

#include <string>

TEST_CASE("version: the header and CMake's project say the same", "[version]") {
  CHECK(std::to_string(KVTRIM_VERSION_MAJOR) + "." + std::to_string(KVTRIM_VERSION_MINOR) + "." +
            std::to_string(KVTRIM_VERSION_PATCH) ==
        KVTRIM_TEST_PROJECT_VERSION);
}
