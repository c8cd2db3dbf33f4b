// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a KV cache weighs, from the shape of a model and numbers of rows: no cache, no model and no policy is needed. How many
// rows or pages a policy keeps, `peak_pages` says.

#include <kvtrim/core/dtype.hpp>
#include <kvtrim/core/error.hpp>
#include <kvtrim/core/saturating.hpp>
#include <kvtrim/core/types.hpp>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace kvtrim {

/// Layers of one kind: what they keep of a token.
struct LayerShape {
  std::int32_t layers = 1;     ///< layers of this kind
  std::int32_t kv_heads = 1;   ///< KV heads of each
  std::int32_t key_dim = 0;    ///< features of a key
  std::int32_t value_dim = 0;  ///< features of a value; 0: the value is part of the key (MLA)
  std::int32_t window = 0;     ///< last rows that attention sees (sliding window); 0: all

  friend constexpr bool operator==(const LayerShape&, const LayerShape&) = default;
};

namespace detail {

// Numbers that are not negative, and whose product can be counted.
[[nodiscard]] constexpr std::int64_t checked_product(std::string_view who,
                                                     std::initializer_list<std::int64_t> factors) {
  std::int64_t product = 1;
  for (const std::int64_t f : factors) {
    if (f < 0 || saturated_product({product, f}) == too_large) {
      throw_length_error("{}: {} times {} does not fit 63 bits", who, product, f);
    }
    product *= f;
  }
  return product;
}

constexpr void check_shape(std::string_view who, const LayerShape& s) {
  if (s.layers < 1 || s.kv_heads < 1 || s.key_dim < 1 || s.value_dim < 0 || s.window < 0) {
    throw_invalid_argument(
        "{}: layers {}, kv_heads {} and key_dim {} must be at least 1, value_dim {} and window {} "
        "at least 0",
        who,
        s.layers,
        s.kv_heads,
        s.key_dim,
        s.value_dim,
        s.window);
  }
}

constexpr void check_page_size(std::string_view who, std::int64_t page_size) {
  if (page_size < 1) {
    throw_invalid_argument("{}: page_size {} must be at least 1", who, page_size);
  }
}

}  // namespace detail

/// Bytes of one token's keys and values in all layers and KV heads of `shape`.
///
/// \throws std::invalid_argument if an extent is below 1 (`value_dim`, `window`: below 0), or `dtype` is opaque, whose rows
///   have no size of their own; std::length_error if the result does not fit 63 bits
/// \par Complexity
/// O(1), constexpr; no allocation
[[nodiscard]] constexpr std::int64_t token_bytes(const LayerShape& shape, DType dtype) {
  constexpr std::string_view who = "kvtrim::token_bytes";
  detail::check_shape(who, shape);
  if (element_bytes(dtype) == 0) {
    throw_invalid_argument("{}: rows of dtype {} have no known size", who, to_string(dtype));
  }
  const std::int64_t features = std::int64_t{shape.key_dim} + shape.value_dim;
  return detail::checked_product(who,
                                 {shape.layers, shape.kv_heads, features, element_bytes(dtype)});
}

/// Rows that layers of `shape` keep of a context of `tokens`: no more than their window.
/// \par Complexity
/// O(1), constexpr; no allocation
[[nodiscard]] constexpr std::int64_t window_rows(const LayerShape& shape,
                                                 std::int64_t tokens) noexcept {
  return shape.window > 0 ? std::min<std::int64_t>(tokens, shape.window) : tokens;
}

/// Bytes of `rows` rows in every layer and KV head of `shape`. Windows are not applied: see `window_rows`.
///
/// \throws as `token_bytes`; std::length_error if `rows` is negative or the result does not fit 63 bits
/// \par Complexity
/// O(1), constexpr; no allocation
[[nodiscard]] constexpr std::int64_t cache_bytes(const LayerShape& shape,
                                                 DType dtype,
                                                 std::int64_t rows) {
  return detail::checked_product("kvtrim::cache_bytes", {token_bytes(shape, dtype), rows});
}

/// Bytes of one page: of all layers and heads that it serves, as in `PagedCache::page_bytes`.
///
/// \param page_size  rows per page
/// \param scope      what one page table, and hence one page, serves
/// \throws as `token_bytes`; std::invalid_argument if `page_size` is below 1
/// \par Complexity
/// O(1), constexpr; no allocation
[[nodiscard]] constexpr std::int64_t page_bytes(const LayerShape& shape,
                                                DType dtype,
                                                std::int32_t page_size,
                                                TableScope scope) {
  constexpr std::string_view who = "kvtrim::page_bytes";
  detail::check_page_size(who, page_size);
  LayerShape served = shape;
  detail::check_shape(who, shape);
  if (scope != TableScope::group) { served.layers = 1; }
  if (scope == TableScope::head) { served.kv_heads = 1; }
  return detail::checked_product(who, {token_bytes(served, dtype), page_size});
}

/// Pages of a sequence with `pages_per_table` pages in each of its tables.
///
/// \throws std::invalid_argument if an extent of the shape is out of range; std::length_error if `pages_per_table` is negative
///   or the result does not fit 63 bits
/// \par Complexity
/// O(1), constexpr; no allocation
[[nodiscard]] constexpr std::int64_t sequence_pages(const LayerShape& shape,
                                                    TableScope scope,
                                                    std::int64_t pages_per_table) {
  constexpr std::string_view who = "kvtrim::sequence_pages";
  detail::check_shape(who, shape);
  const std::int64_t layers = scope == TableScope::group ? 1 : shape.layers;
  const std::int64_t heads = scope == TableScope::head ? shape.kv_heads : 1;
  return detail::checked_product(who, {layers, heads, pages_per_table});
}

/// Streams that a memory of `capacity` holds at once, when one of them is being started and needs `first`, and each of the
/// others `each`; in bytes or in pages, but all in the same. With `first` = `each`: in steady state.
///
/// \throws std::invalid_argument if `capacity` is negative, or `each` or `first` below 1
/// \par Complexity
/// O(1), constexpr; no allocation
[[nodiscard]] constexpr std::int64_t streams_that_fit(std::int64_t capacity,
                                                      std::int64_t each,
                                                      std::int64_t first) {
  if (capacity < 0 || each < 1 || first < 1) {
    throw_invalid_argument(
        "kvtrim::streams_that_fit: capacity {} must be at least 0, each {} and first {} at least 1",
        capacity,
        each,
        first);
  }
  return capacity < first ? 0 : (capacity - first) / each + 1;
}

}  // namespace kvtrim
