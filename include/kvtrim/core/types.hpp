// SPDX-License-Identifier: Apache-2.0
#pragma once

// Index spaces are types: a page cannot be passed where a head is meant. Counts (rows, pages, heads) are plain
// std::int32_t, byte offsets std::int64_t.

#include <kvtrim/core/config.hpp>

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace kvtrim {

/// Page of a pool, as the engine's tables name it.
enum class PageId : std::int32_t {};
/// Place of a row inside its page, 0..page_size-1.
enum class Slot : std::int32_t {};
/// Where a token was in its sequence, from 0. Never changes: order, ties, age and reports use it.
enum class Position : std::int32_t {};
/// Sequence of a batch: an index into the view, 0..sequences-1.
enum class SequenceId : std::int32_t {};
/// Layer of a view, 0..layers-1.
enum class LayerId : std::int32_t {};
/// KV head of a layer, 0..kv_heads-1.
enum class HeadId : std::int32_t {};

/// No page: what a table holds where a page was dropped or never was.
inline constexpr PageId null_page{-1};

/// The integer behind an index type.
template <class E>
  requires std::is_enum_v<E>
KVTRIM_HOST_DEVICE constexpr std::int32_t raw(E e) noexcept {
  return static_cast<std::int32_t>(e);
}

/// Pages needed for `rows` rows at `page_size` rows per page.
/// \pre `rows >= 0 && page_size > 0`
KVTRIM_HOST_DEVICE constexpr std::int32_t pages_for(std::int32_t rows,
                                                    std::int32_t page_size) noexcept {
  return static_cast<std::int32_t>((static_cast<std::int64_t>(rows) + page_size - 1) / page_size);
}

/// Which (layer, KV head) pairs one page table and one length serve.
enum class TableScope : std::uint8_t {
  group,  ///< all layers and heads of the view (vLLM, FlashInfer, SGLang)
  layer,  ///< all heads of one layer
  head,   ///< one KV head of one layer
};

/// Page tables per sequence: 1, layers, or layers * kv_heads.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t tables_of(TableScope scope,
                                                                  std::int32_t layers,
                                                                  std::int32_t kv_heads) noexcept {
  return scope == TableScope::group ? 1 : scope == TableScope::layer ? layers : layers * kv_heads;
}

/// Index of the sequence's table that serves (layer, KV head).
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t table_of(TableScope scope,
                                                                 std::int32_t kv_heads,
                                                                 LayerId l,
                                                                 HeadId h) noexcept {
  return scope == TableScope::group   ? 0
         : scope == TableScope::layer ? raw(l)
                                      : raw(l) * kv_heads + raw(h);
}

namespace detail {
/// Name of an enumerator, where they count from 0; "unknown" for a value outside the enumeration.
template <class E, std::size_t N>
[[nodiscard]] constexpr std::string_view enumerator_name(
    E e, const std::string_view (&names)[N]) noexcept {
  const auto i = static_cast<std::size_t>(e);
  return i < N ? names[i] : "unknown";
}
}  // namespace detail

}  // namespace kvtrim
