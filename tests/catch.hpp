// SPDX-License-Identifier: Apache-2.0
#pragma once

// Catch2 v3 where it is installed, v2 (Debian 12) otherwise. The tests use v3's names
// (Catch::Approx, Catch::Matchers::ContainsSubstring, WithinAbs, WithinRel); v2 gets them here.
#if __has_include(<catch2/catch_all.hpp>)
#  include <catch2/catch_all.hpp>
#else
#  include <catch2/catch.hpp>

#  include <string>

namespace Catch {
using Detail::Approx;
namespace Matchers {
inline auto ContainsSubstring(const std::string& part) {
  return Contains(part);
}
}  // namespace Matchers
}  // namespace Catch
#endif
