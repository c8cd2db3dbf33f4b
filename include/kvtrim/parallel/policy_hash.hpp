// SPDX-License-Identifier: Apache-2.0
#pragma once

// Parameters are aggregates, so their fields can be read one after the other. Their bytes cannot be compared instead: a
// float may be followed by bytes without a value.

#include <kvtrim/cache/generation.hpp>
#include <kvtrim/policy/policy.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvtrim {

namespace detail {

// Stands for the value of any field.
struct AnyField {
  template <class T>
  constexpr operator T() const noexcept;  // never defined: only asked for
};

template <class T, class... Fields>
[[nodiscard]] consteval std::size_t field_count() noexcept {
  if constexpr (requires { T{Fields{}..., AnyField{}}; }) {
    return field_count<T, Fields..., AnyField>();
  } else {
    return sizeof...(Fields);
  }
}

template <class T>
constexpr void hash_fields(std::uint64_t& hash, const T& x) noexcept {
  const auto all = [&](const auto&... fields) { (hash_fields(hash, fields), ...); };
  if constexpr (std::is_enum_v<T>) {
    hash = mixed(hash, static_cast<std::uint64_t>(static_cast<std::underlying_type_t<T>>(x)));
  } else if constexpr (std::is_floating_point_v<T>) {
    hash = mixed(hash, std::bit_cast<std::uint64_t>(static_cast<double>(x)));
  } else if constexpr (std::is_integral_v<T>) {
    hash = mixed(hash, static_cast<std::uint64_t>(x));
  } else if constexpr (std::is_aggregate_v<T>) {
    constexpr std::size_t n = field_count<T>();
    static_assert(n <= 10,
                  "kvtrim::policy_hash: parameters with more than 10 fields in one struct");
    hash = mixed(hash, n);
    if constexpr (n == 1) {
      const auto& [a] = x;
      all(a);
    } else if constexpr (n == 2) {
      const auto& [a, b] = x;
      all(a, b);
    } else if constexpr (n == 3) {
      const auto& [a, b, c] = x;
      all(a, b, c);
    } else if constexpr (n == 4) {
      const auto& [a, b, c, d] = x;
      all(a, b, c, d);
    } else if constexpr (n == 5) {
      const auto& [a, b, c, d, e] = x;
      all(a, b, c, d, e);
    } else if constexpr (n == 6) {
      const auto& [a, b, c, d, e, f] = x;
      all(a, b, c, d, e, f);
    } else if constexpr (n == 7) {
      const auto& [a, b, c, d, e, f, g] = x;
      all(a, b, c, d, e, f, g);
    } else if constexpr (n == 8) {
      const auto& [a, b, c, d, e, f, g, h] = x;
      all(a, b, c, d, e, f, g, h);
    } else if constexpr (n == 9) {
      const auto& [a, b, c, d, e, f, g, h, i] = x;
      all(a, b, c, d, e, f, g, h, i);
    } else if constexpr (n == 10) {
      const auto& [a, b, c, d, e, f, g, h, i, j] = x;
      all(a, b, c, d, e, f, g, h, i, j);
    }
  }
}

}  // namespace detail

/// Hash of a policy's name and of every number among its parameters, for ranks to compare (`RankHeader`). Arrays that
/// parameters refer to are not looked at.
///
/// \par Complexity
/// O(parameters); no allocation
template <Policy P>
[[nodiscard]] constexpr std::uint64_t policy_hash(const P& policy) noexcept {
  std::uint64_t hash = 0;
  for (const char c : P::name) { hash = detail::mixed(hash, static_cast<std::uint64_t>(c)); }
  if constexpr (requires { policy.params(); }) { detail::hash_fields(hash, policy.params()); }
  return hash;
}

}  // namespace kvtrim
