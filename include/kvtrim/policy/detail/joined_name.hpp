// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace kvtrim::detail {

/// Two names, one after the other, as a constant.
template <const std::string_view& First, const std::string_view& Second>
struct JoinedName {
  static constexpr auto text = [] {
    std::array<char, First.size() + Second.size()> out{};
    for (std::size_t i = 0; i < First.size(); ++i) { out[i] = First[i]; }
    for (std::size_t i = 0; i < Second.size(); ++i) { out[First.size() + i] = Second[i]; }
    return out;
  }();
  static constexpr std::string_view value{text.data(), text.size()};
};

}  // namespace kvtrim::detail
