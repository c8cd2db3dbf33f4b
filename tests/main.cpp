// SPDX-License-Identifier: Apache-2.0
// The main function for Catch2 v2; v3 brings its own in Catch2::Catch2WithMain.
#define CATCH_CONFIG_MAIN
#include "catch.hpp"
