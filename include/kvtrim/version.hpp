// SPDX-License-Identifier: Apache-2.0
#pragma once

// The same number as in CMakeLists.txt; tests/version_test.cpp fails when the two differ.

#define KVTRIM_VERSION_MAJOR 0
#define KVTRIM_VERSION_MINOR 1
#define KVTRIM_VERSION_PATCH 0
