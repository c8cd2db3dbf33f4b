// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace program {

/// A value from outside as a `T`: what `json.get<T>()` does, except that a whole number must be one, and in the range of `T`.
/// (nlohmann-json's own conversion cuts 1.5, wraps 2^32, and is undefined for 1e300.) Vectors and arrays: each element.
///
/// \throws nlohmann::json::exception for another type, std::runtime_error for such a number
template <class T>
[[nodiscard]] T strict(const nlohmann::json& json) {
  if constexpr (std::integral<T> && !std::same_as<T, bool>) {
    const bool fits = json.is_number_unsigned()  ? std::in_range<T>(json.get<std::uint64_t>())
                      : json.is_number_integer() ? std::in_range<T>(json.get<std::int64_t>())
                                                 : !json.is_number() && !json.is_boolean();
    if (!fits) {
      throw std::runtime_error(json.dump() + " is no whole number from " +
                               std::to_string(std::numeric_limits<T>::min()) + " to " +
                               std::to_string(std::numeric_limits<T>::max()));
    }
    return json.get<T>();
  } else if constexpr (requires(T t) { t.push_back(strict<typename T::value_type>(json)); } &&
                       !std::same_as<T, std::string> && !std::same_as<T, nlohmann::json>) {
    T all;
    for (const nlohmann::json& one : json.get_ref<const nlohmann::json::array_t&>()) {
      all.push_back(strict<typename T::value_type>(one));
    }
    return all;
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    T all{};
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] = strict<typename T::value_type>(json.at(i));
    }
    return all;
  } else {
    return json.get<T>();
  }
}

}  // namespace program
