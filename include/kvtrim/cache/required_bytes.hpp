// SPDX-License-Identifier: Apache-2.0
#pragma once

// How much memory a view takes for granted. No call reads or writes a byte outside of it, whatever the tables, lengths and
// states say, as long as `check_layout` and `check_tables` accept them: an engine that compares these ranges with its buffers
// knows that nothing else is touched.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/detail/parts.hpp>
#include <kvtrim/core/error.hpp>
#include <kvtrim/core/saturating.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvtrim {

/// Bytes counted from the pointer that a view has: from `begin` (0; below where tables are numbered backwards) to before `end`.
/// Empty: there is no array, or nothing is read of it.
struct ByteRange {
  std::int64_t begin = 0;  ///< first byte, at most 0
  std::int64_t end = 0;    ///< one past the last byte
  friend bool operator==(const ByteRange&, const ByteRange&) = default;
};

/// What the arrays of a view must hold. Those of its own words (`layer_bases`, `page_planes`, `more_planes`) have as many
/// elements as it says.
struct RequiredBytes {
  ByteRange keys;                 ///< from `k.base`, or from each of `k.layer_bases`
  ByteRange values;               ///< likewise
  ByteRange unrotated_keys;       ///< likewise
  ByteRange key_scales;           ///< `k.scales.base`
  ByteRange value_scales;         ///< `v.scales.base`
  ByteRange ids;                  ///< `table.ids`
  ByteRange indptr;               ///< `table.indptr`
  ByteRange lengths;              ///< `lengths`
  ByteRange last_page_len;        ///< `last_page_len`
  ByteRange first_rows;           ///< `first_rows`
  ByteRange states;               ///< `states`
  ByteRange generations;          ///< `generations`
  ByteRange reserved_pages;       ///< `reserved_pages`
  ByteRange ref_counts;           ///< `writable.ref_counts`
  ByteRange writable_bits;        ///< `writable.bits`
  ByteRange positions;            ///< `positions.base`
  ByteRange rope_positions;       ///< `rope_positions.base`
  ByteRange score_sums;           ///< `score_sums.base`
  ByteRange score_compensations;  ///< `score_compensations.base`
  friend bool operator==(const RequiredBytes&, const RequiredBytes&) = default;
};

namespace detail {

// Product of two numbers of either sign; at most `too_large`, at least its negative.
[[nodiscard]] constexpr std::int64_t signed_product(std::int64_t a, std::int64_t b) noexcept {
  const auto size = [](std::int64_t x) { return x < -too_large ? too_large : x < 0 ? -x : x; };
  const std::int64_t product = saturated_product({size(a), size(b)});
  return (a < 0) == (b < 0) ? product : -product;
}

// The places that sums of multiples of strides reach.
class PlaceRange {
 public:
  explicit PlaceRange(std::string_view name) noexcept : name_(name) {}

  // Multiples 0 .. extent - 1 of a stride.
  PlaceRange& add(std::int64_t stride, std::int64_t extent) noexcept {
    empty_ = empty_ || extent < 1;
    const std::int64_t far = extent <= 1 ? 0 : signed_product(stride, extent - 1);
    std::int64_t& side = far < 0 ? below_ : above_;
    side = saturated_sum({side, far < 0 ? -far : far});
    return *this;
  }
  // The places of table rows, or of lengths.
  PlaceRange& add(const CacheView& view, const RowMap& rows, std::int64_t stride = 1) noexcept {
    return add(signed_product(rows.sequence, stride), view.sequences)
        .add(signed_product(rows.layer, stride), view.layers)
        .add(signed_product(rows.head, stride), view.kv_heads);
  }

  // Bytes of elements of `each` bytes at these places.
  [[nodiscard]] ByteRange bytes(std::int64_t each) const {
    if (empty_) { return {}; }
    const std::int64_t below = saturated_product({below_, each});
    const std::int64_t above = saturated_product({saturated_sum({above_, 1}), each});
    if (std::max(below, above) > too_large / 2) {
      throw_invalid_argument(
          "kvtrim::CacheView: {} reach beyond 64 bits: {} elements of {} bytes before the first "
          "one, {} behind it",
          name_,
          below_,
          each,
          above_);
    }
    return {-below, above};
  }

 private:
  std::string_view name_;
  std::int64_t below_ = 0;
  std::int64_t above_ = 0;
  bool empty_ = false;
};

[[nodiscard]] inline ByteRange required(std::string_view name, const Region& region, bool empty) {
  if (region.overflow() >= 0) {
    throw_invalid_argument("kvtrim::CacheView: {} reach beyond 64 bits", name);
  }
  return empty ? ByteRange{} : ByteRange{0, region.reach(0)};
}

[[nodiscard]] inline ByteRange required(const CacheView& view,
                                        const Plane& plane,
                                        std::string_view name) {
  return plane ? required(name, region_of(view, plane), view.pages < 1) : ByteRange{};
}

[[nodiscard]] inline ByteRange required(const CacheView& view,
                                        const Scales& scales,
                                        std::string_view name) {
  if (scales.base == nullptr) { return {}; }
  return PlaceRange(name)
      .add(scales.layer_stride, view.layers)
      .add(scales.page_stride, view.pages)
      .add(scales.token_stride, view.page_size)
      .add(scales.head_stride, view.kv_heads)
      .add(1, sizeof(float))
      .bytes(1);
}

[[nodiscard]] inline ByteRange required(const CacheView& view,
                                        const SequencePlane& plane,
                                        std::int32_t max_rows,
                                        std::string_view name) {
  if (!plane) { return {}; }
  PlaceRange places(name);
  places.add(plane.sequence_stride, view.sequences)
      .add(plane.layer_stride, view.layers)
      .add(plane.head_stride, view.kv_heads)
      .add(plane.row_stride, max_rows)
      .add(1, plane.element_bytes);
  return places.bytes(1);
}

[[nodiscard]] inline ByteRange required_ids(const CacheView& view) {
  const PageTable& table = view.table;
  PlaceRange places("page ids");
  places.add(table.v_offset, 2);
  if (table.indptr == nullptr) {
    return places.add(view, table.rows, table.row_stride).add(1, table.max_pages).bytes(4);
  }
  std::int64_t first = 0;
  std::int64_t end = 0;
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
      const std::int64_t r = table.rows(SequenceId{s}, view.first_layer(t), view.first_head(t));
      if (table.indptr[r + 1] <= table.indptr[r]) { continue; }
      first = std::min<std::int64_t>(first, table.indptr[r]);
      end = std::max<std::int64_t>(end, table.indptr[r + 1]);
    }
  }
  return first == end ? ByteRange{}
                      : places.add(-1, 1 - first).add(1, std::max<std::int64_t>(1, end)).bytes(4);
}

[[nodiscard]] inline ByteRange required_counts(const CacheView& view, std::string_view name) {
  const Writable& w = view.writable;
  PlaceRange places(name);
  return places.add(1, view.pages)
      .add(w.layer_stride,
           view.layers)  // whatever the tables are: a spare page must be free in every pool
      .add(w.head_stride, view.kv_heads)
      .bytes(4);
}

[[nodiscard]] inline ByteRange required_bits(const CacheView& view) {
  const ByteRange as_counts = required_counts(view, "writable bits");
  if (as_counts.begin < 0) {
    throw_invalid_argument(
        "kvtrim::CacheView: writable bits have no places below 0: layer_stride {}, head_stride {}",
        view.writable.layer_stride,
        view.writable.head_stride);
  }
  return {0, (as_counts.end / 4 + 63) / 64 * 8};
}

}  // namespace detail

/// Bytes that a page plane of `view` must hold.
/// \throws std::invalid_argument as below
[[nodiscard]] inline ByteRange required_bytes(const CacheView& view, const PagePlane& plane) {
  return detail::required("page plane", detail::region_of(view, plane), view.pages < 1);
}

/// Bytes that a sequence plane of `view` must hold for tables of up to `max_rows` rows.
/// \throws std::invalid_argument as below
[[nodiscard]] inline ByteRange required_bytes(const CacheView& view,
                                              const SequencePlane& plane,
                                              std::int32_t max_rows) {
  return detail::required(view, plane, max_rows, "sequence plane");
}

/// Bytes that the arrays of `view` must hold: what an engine compares with its buffers, once, where it makes the view.
///
/// Those of the tables follow from the room that a table has, of planes in pages from the number of pages. With CSR tables
/// `indptr` is read, so that the range of the ids is that of the tables as they are.
///
/// \param max_rows  most rows that a table will have, a hole counted and padding not; `plan_shape(view).max_rows` is enough
///   for the tables as they are
/// \pre `check_layout(view)` passed
/// \throws std::invalid_argument if a range is beyond 64 bits (the message gives the numbers), or bits have places below 0
/// \par Complexity
/// O(1); O(tables) with CSR
[[nodiscard]] inline RequiredBytes required_bytes(const CacheView& view, std::int32_t max_rows) {
  using detail::PlaceRange;
  const auto present = [](const void* array, ByteRange range) {
    return array == nullptr ? ByteRange{} : range;
  };
  const auto per_table = [&](std::string_view name, const void* array, std::size_t bytes) {
    PlaceRange places(name);
    return present(array,
                   places.add(view.tables_per_sequence(), view.sequences)
                       .add(1, view.tables_per_sequence())
                       .bytes(static_cast<std::int64_t>(bytes)));
  };
  const auto by_row = [&](std::string_view name, const RowMap& rows, std::int64_t elements) {
    return PlaceRange(name).add(view, rows).add(1, elements).bytes(4);
  };
  RequiredBytes all;
  all.keys = detail::required(view, view.k, "keys");
  all.values = detail::required(view, view.v, "values");
  all.unrotated_keys = detail::required(view, view.unrotated_keys, "unrotated keys");
  all.key_scales = detail::required(view, view.k.scales, "scales of keys");
  all.value_scales = detail::required(view, view.v.scales, "scales of values");
  all.ids = view.table.ids == nullptr ? ByteRange{} : detail::required_ids(view);
  all.indptr = present(view.table.indptr, by_row("indptr", view.table.rows, 2));
  all.lengths = present(view.lengths, by_row("lengths", view.length_rows, 1));
  all.last_page_len = present(view.last_page_len, by_row("last_page_len", view.table.rows, 1));
  all.first_rows = present(view.first_rows, PlaceRange("").add(1, view.sequences).bytes(4));
  all.states = per_table("states", view.states, sizeof(SequenceState));
  all.generations = per_table("generations", view.generations, sizeof(std::uint64_t));
  all.reserved_pages = per_table("reserved_pages", view.reserved_pages, sizeof(std::int32_t));
  const Writable& writable = view.writable;
  if (writable.ref_counts != nullptr) {
    all.ref_counts = detail::required_counts(view, "ref_counts");
  }
  if (writable.bits != nullptr) { all.writable_bits = detail::required_bits(view); }
  all.positions = detail::required(view, view.positions, max_rows, "positions");
  all.rope_positions = detail::required(view, view.rope_positions, max_rows, "rope positions");
  all.score_sums = detail::required(view, view.score_sums, max_rows, "score sums");
  all.score_compensations =
      detail::required(view, view.score_compensations, max_rows, "score compensations");
  return all;
}

}  // namespace kvtrim
