// SPDX-License-Identifier: Apache-2.0
#pragma once

// What must hold of a view's strides, checked once, where the view is created. Rows move plane by plane, so no byte may belong to
// two planes, or to two rows of one: it would be moved twice, from where it no longer is. Over 400 lines: the checks of planes
// share their regions and names.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/detail/parts.hpp>
#include <kvtrim/cache/required_bytes.hpp>
#include <kvtrim/core/error.hpp>
#include <kvtrim/core/saturating.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

namespace kvtrim {

namespace detail {

[[nodiscard]] inline std::string name_of_part(std::int32_t i) {
  return i == 0   ? "keys"
         : i == 1 ? "values"
         : i == 2 ? "unrotated keys"
                  : "page plane " + std::to_string(i - first_page_plane);
}

// Each stride must step over everything that the smaller ones reach.
inline void check_region(std::string_view plane, const Region& region) {
  if (const std::int32_t far = region.overflow(); far >= 0) {
    throw_invalid_argument(
        "kvtrim::CacheView: {} reach beyond 64 bits: {} {}s at a stride of {} bytes",
        plane,
        region.axis(far).extent,
        to_string(region.axis(far).name),
        region.axis(far).stride);
  }
  const std::int32_t i = region.overlap();
  if (i < 0) { return; }
  throw_invalid_argument(
      "kvtrim::CacheView: {} overlap: {} stride of {} bytes, but its elements reach over {} bytes",
      plane,
      to_string(region.axis(i).name),
      region.axis(i).stride,
      region.reach(i + 1));
}

// Whether scales are where rows may look for them, and those of rows move with these.
inline void check_scales(const CacheView& view, const Plane& p, std::string_view name) {
  const Scales& s = p.scales;
  const bool quantised = element_bytes(p.dtype) == 1;
  if ((s.base != nullptr || s.in_row != 0) &&
      (!quantised || (s.base != nullptr && s.in_row != 0) ||
       (s.in_row != 0 && (s.in_row < p.head_dim || !p.contiguous_rows())))) {
    throw_invalid_argument(
        "kvtrim::CacheView: {} of dtype {} and {} features have scales {}{}",
        name,
        to_string(p.dtype),
        p.head_dim,
        s.base != nullptr ? "of their own" : "",
        s.in_row != 0 ? " in their rows, " + std::to_string(s.in_row) + " bytes behind the first"
                      : std::string());
  }
  static_cast<void>(required(view, s, "scales of " + std::string(name)));
  if (!s.beside_rows()) { return; }
  for (std::int32_t i = 0; i < view.page_plane_count; ++i) {
    const PagePlane& q = view.page_planes[i];
    if (q.base == s.base && q.layer_stride == s.layer_stride && q.page_stride == s.page_stride &&
        q.token_stride == s.token_stride && q.head_stride == s.head_stride && q.row_bytes == 4) {
      return;
    }
  }
  throw_invalid_argument(
      "kvtrim::CacheView: scales of {} have a page stride of {} and a token stride of {} bytes, "
      "but "
      "are none of the {} page planes: they would stay behind when rows move",
      name,
      s.page_stride,
      s.token_stride,
      view.page_plane_count);
}

inline void check_plane(const CacheView& view, const Plane& p, std::string_view name) {
  if (p.dtype == DType::opaque ? p.opaque_row_bytes < 1 : p.head_dim < 1 || p.pack < 1) {
    throw_invalid_argument("kvtrim::CacheView: {}: head_dim {}, pack {}, opaque_row_bytes {}",
                           name,
                           p.head_dim,
                           p.pack,
                           p.opaque_row_bytes);
  }
  if (p.format != BlockFormat::none && !readable(p)) {
    throw_invalid_argument(
        "kvtrim::CacheView: {}: rows of {} bytes of {} features as dtype {} in blocks of {}",
        name,
        p.opaque_row_bytes,
        p.head_dim,
        to_string(p.dtype),
        to_string(p.format));
  }
  check_scales(view, p, name);
  check_region(name, region_of(view, p));
}

// Whether heads and tables can be counted, and places in tables are within 64 bits.
inline void check_extents(const CacheView& view) {
  const std::int64_t heads = saturated_product({view.sequences, view.layers, view.kv_heads});
  if (heads > std::numeric_limits<std::int32_t>::max()) {
    throw_invalid_argument(
        "kvtrim::CacheView: {} sequences of {} layers of {} KV heads are more than {} heads",
        view.sequences,
        view.layers,
        view.kv_heads,
        std::numeric_limits<std::int32_t>::max());
  }
  const PageTable& table = view.table;
  const auto size = [](std::int64_t x) { return x < 0 ? -(x + 1) : x; };
  const auto row = [&](const RowMap& rows) {
    return saturated_sum({saturated_product({size(rows.sequence), view.sequences}),
                          saturated_product({size(rows.layer), view.layers}),
                          saturated_product({size(rows.head), view.kv_heads})});
  };
  const std::int64_t last = saturated_sum(
      {saturated_product({row(table.rows), std::max<std::int64_t>(1, size(table.row_stride))}),
       size(table.v_offset),
       size(table.max_pages)});
  const std::int64_t most = too_large / static_cast<std::int64_t>(sizeof(std::int32_t));
  if (last > most || row(view.length_rows) > most) {
    throw_invalid_argument(
        "kvtrim::CacheView: places in the page tables are beyond 64 bits: row stride {}, v_offset "
        "{}, rows {} a sequence, {} a layer, {} a head",
        table.row_stride,
        table.v_offset,
        table.rows.sequence,
        table.rows.layer,
        table.rows.head);
  }
}

// Whether all layers and heads that a table serves have one row of ids and one length: only the first one's are checked.
inline void check_one_row(const CacheView& view, std::string_view name, const RowMap& rows) {
  const bool layers = view.scope == TableScope::group && view.layers > 1 && rows.layer != 0;
  const bool heads = view.scope != TableScope::head && view.kv_heads > 1 && rows.head != 0;
  if (!layers && !heads) { return; }
  throw_invalid_argument(
      "kvtrim::CacheView: {} differ by {}: {} from one to the next; but one table serves them all "
      "(TableScope)",
      name,
      layers ? "layer" : "KV head",
      layers ? rows.layer : rows.head);
}

// Whether each table has ids and a length of its own: an eviction writes them.
inline void check_own_rows(const CacheView& view,
                           std::string_view name,
                           const RowMap& rows,
                           std::int64_t stride,
                           std::int64_t each,
                           std::int64_t second = 0) {
  Region r{};
  const auto add = [&](AxisName axis, std::int64_t step, std::int32_t extent) {
    const std::int64_t reach = signed_product(step, stride);
    r.add(axis, reach < 0 ? -reach : reach, extent);
  };
  r.clear(each);
  add(AxisName::head, rows.head, view.heads_per_table() == 1 ? view.kv_heads : 1);
  add(AxisName::layer, rows.layer, view.layers_per_table() == 1 ? view.layers : 1);
  add(AxisName::sequence, rows.sequence, view.sequences);
  r.close();
  if (each == 0) { return; }
  const std::int32_t i = r.overflow() >= 0 ? -1 : r.overlap();
  if (i >= 0) {
    throw_invalid_argument(
        "kvtrim::CacheView: {} of two tables overlap: {} from one {} to the next, but they take {}",
        name,
        r.axis(i).stride,
        to_string(r.axis(i).name),
        r.reach(i + 1));
  }
  if (second != 0 && !apart(r, r, second)) {
    throw_invalid_argument(
        "kvtrim::CacheView: {} of keys and of values overlap: the latter begin {} behind the "
        "former",
        name,
        second);
  }
}

// Which of the planes there may be are there.
inline void check_presence(const CacheView& view) {
  if (view.table.ids == nullptr) { throw_invalid_argument("kvtrim::CacheView: page ids are null"); }
  for (std::int32_t i = 0; i < 2; ++i) {
    const Plane& p = i == 0 ? view.k : view.v;
    if (!p && p.head_dim != 0) {
      throw_invalid_argument(
          "kvtrim::CacheView: {} are null, but have head_dim {}; a cache without them says 0",
          name_of_part(i),
          p.head_dim);
    }
  }
  if (!view.k && (view.v || view.unrotated_keys)) {
    throw_invalid_argument("kvtrim::CacheView: {}, but no keys",
                           view.v ? "values" : "unrotated keys");
  }
  if (view.lengths == nullptr && view.last_page_len == nullptr && view.states == nullptr) {
    throw_invalid_argument("kvtrim::CacheView: no lengths, last_page_len or states");
  }
}

// Whether heads and layers that share a table have elements of their own.
inline void check_strides(const CacheView& view) {
  for (std::int32_t i = 0; i < first_page_plane; ++i) {
    const Plane p = plane_of(view, i);
    if (p && view.scope != TableScope::head && view.kv_heads > 1 && p.head_stride == 0) {
      throw_invalid_argument(
          "kvtrim::CacheView: {} KV heads share a table, so they need a head stride, but {} have "
          "none",
          view.kv_heads,
          name_of_part(i));
    }
    if (p && view.scope == TableScope::group && view.layers > 1 && !has_own_layers(p)) {
      throw_invalid_argument(
          "kvtrim::CacheView: {} layers share a table, so they need a layer stride, but {} have "
          "none",
          view.layers,
          name_of_part(i));
    }
  }
}

// Whether pages of the same number, where the keys keep them apart, are other memory in all planes.
inline void check_pools(const CacheView& view) {
  if (has_own_heads(view) && view.layers > 1 && !has_own_layers(view.k)) {
    throw_invalid_argument(
        "kvtrim::CacheView: KV heads have pages of their own (head stride of {} bytes), so {} "
        "layers need a layer stride; where all take pages from one pool, the head stride is 0",
        view.k.head_stride,
        view.layers);
  }
  const auto check = [&](std::int32_t i, std::int64_t layer_stride, std::int64_t head_stride) {
    if (follows_pools(view, layer_stride != 0, head_stride != 0)) { return; }
    throw_invalid_argument(
        "kvtrim::CacheView: {} have a layer stride of {} and a head stride of {} bytes, the keys "
        "{} and {}: pages that are other memory there would be the same here",
        name_of_part(i),
        layer_stride,
        head_stride,
        view.k.layer_stride,
        view.k.head_stride);
  };
  const auto layer_stride = [](const Plane& p) {
    return has_own_layers(p) ? std::max<std::int64_t>(1, p.layer_stride) : 0;
  };
  if (view.v) { check(1, layer_stride(view.v), view.v.head_stride); }
  if (view.unrotated_keys) {
    check(2, layer_stride(view.unrotated_keys), view.unrotated_keys.head_stride);
  }
  for (std::int32_t i = 0; i < view.page_plane_count; ++i) {
    const PagePlane& p = view.page_planes[i];
    if (!p.constant()) { check(first_page_plane + i, p.layer_stride, p.head_stride); }
  }
}

inline void check_page_planes(const CacheView& view) {
  for (std::int32_t i = 0; i < view.page_plane_count; ++i) {
    const PagePlane& p = view.page_planes[i];
    const std::string name = name_of_part(first_page_plane + i);
    if (p.base == nullptr || p.row_bytes < 1) {
      throw_invalid_argument("kvtrim::CacheView: {} of {} bytes a row{}",
                             name,
                             p.row_bytes,
                             p.base == nullptr ? " is null" : "");
    }
    if (!has_sound_entries(view, p)) {
      throw_invalid_argument(
          "kvtrim::CacheView: {}: {} tokens an entry, at a token stride of {} bytes, in pages of "
          "{}",
          name,
          p.tokens_per_entry,
          p.token_stride,
          view.page_size);
    }
    check_region(name, region_of(view, p));
  }
}

inline void check_sequence_planes(const CacheView& view) {
  constexpr std::int32_t named = 4;
  const auto plane = [&](std::int32_t i) {
    const SequencePlane* const own[]{
        &view.positions, &view.rope_positions, &view.score_sums, &view.score_compensations};
    return i < named ? *own[i] : view.more_planes[i - named];
  };
  const auto name = [](std::int32_t i) {
    constexpr const char* names[]{
        "positions", "rope positions", "score sums", "score compensations"};
    return i < named ? names[i] : "sequence plane " + std::to_string(i - named);
  };
  const PageTable& table = view.table;
  const auto most_rows = static_cast<std::int32_t>(std::min<std::int64_t>(
      std::numeric_limits<std::int32_t>::max(),
      table.indptr != nullptr ? std::numeric_limits<std::int32_t>::max()
                              : std::int64_t{std::max(0, table.max_pages)} * view.page_size));
  for (std::int32_t i = 0; i < named + view.more_plane_count; ++i) {
    const SequencePlane p = plane(i);
    if (!p) { continue; }
    if (p.element_bytes < 1 || (i < named && p.element_bytes != 4)) {
      throw_invalid_argument(
          "kvtrim::CacheView: {} have elements of {} bytes", name(i), p.element_bytes);
    }
    check_region(name(i), region_of(view, p));
    static_cast<void>(required(view, p, most_rows, name(i)));
    // Those of the view are read and written as numbers, the others as bytes.
    const bool aligned = address_of(p.base) % 4 == 0 && p.row_stride % 4 == 0 &&
                         (view.sequences <= 1 || p.sequence_stride % 4 == 0) &&
                         (view.layers <= 1 || p.layer_stride % 4 == 0) &&
                         (view.kv_heads <= 1 || p.head_stride % 4 == 0);
    if (i < named && !aligned) {
      throw_invalid_argument(
          "kvtrim::CacheView: {} are not aligned: their base and their strides of {}, {}, {} and "
          "{} bytes must be multiples of 4",
          name(i),
          p.sequence_stride,
          p.layer_stride,
          p.head_stride,
          p.row_stride);
    }
    for (std::int32_t j = 0; j < i; ++j) {
      const SequencePlane q = plane(j);
      const std::int64_t delta = address_of(p.base) - address_of(q.base);
      if (!q || apart(region_of(view, q), region_of(view, p), delta)) { continue; }
      throw_invalid_argument("kvtrim::CacheView: {} and {} overlap: they begin {} bytes apart",
                             name(j),
                             name(i),
                             delta);
    }
  }
}

// Base `l` of plane `i` and base `m` of plane `j`.
inline void check_pair(
    const CacheView& view, std::int32_t i, std::int32_t l, std::int32_t j, std::int32_t m) {
  Region a{};
  Region b{};
  fill_part(a, view, i);
  fill_part(b, view, j);
  const std::int64_t delta = base_of(view, j, m) - base_of(view, i, l);
  if (is_contained(view, i, l, j, m) || apart(a, b, delta)) { return; }
  if (i == j) {
    throw_invalid_argument(
        "kvtrim::CacheView: {} of layers {} and {} overlap: their bases are {} bytes apart, a "
        "layer reaches over {}; a layer that uses another one's rows owns none and is no layer of "
        "the view",
        name_of_part(i),
        l,
        m,
        delta,
        a.reach(0));
  }
  const auto of_layer = [&](std::int32_t part, std::int32_t layer) {
    return bases_of(view, part) > 1 ? " of layer " + std::to_string(layer) : std::string();
  };
  throw_invalid_argument(
      "kvtrim::CacheView: {}{} and {}{} overlap: the latter begin {} bytes behind the former, "
      "which reach over {} bytes",
      name_of_part(i),
      of_layer(i, l),
      name_of_part(j),
      of_layer(j, m),
      delta,
      a.reach(0));
}

// Whether any byte belongs to two planes, or to two layers of one.
inline void check_sharing(const CacheView& view) {
  for (std::int32_t i = 0; i < parts_of(view); ++i) {
    for (std::int32_t j = i; j < parts_of(view); ++j) {
      if (!share_pages(view, i, j)) { continue; }
      for (std::int32_t l = 0; l < bases_of(view, i); ++l) {
        for (std::int32_t m = i == j ? l + 1 : 0; m < bases_of(view, j); ++m) {
          check_pair(view, i, l, j, m);
        }
      }
    }
  }
}

}  // namespace detail

/// Throws unless the extents and strides of `view` can be those of a cache. Call it once, where the view is created, on the
/// host: the arrays of layer bases and of planes are read.
///
/// A cache without values (`v` null, of head_dim 0) is one, and so is a view without keys and values: rows are then chosen by
/// scores that are given, and pages dropped. Values may be part of the keys' rows.
///
/// Layers that use another layer's keys and values (Gemma 3n: the last 15 of 35 layers read rows that layers 18 and 19 wrote)
/// own no memory and are no layers of the view: `layers` is 20, and `layer_bases` names the 20 owners. What the sharing
/// layers show (their queries, their probabilities) is recorded under the owner, as further query heads or accumulated;
/// eviction from the owner is then eviction for all of its users.
///
/// \throws std::invalid_argument if an extent is below 1, a base is null, elements, planes or layers overlap or reach beyond
///   64 bits, positions or scores are not aligned to 4 bytes, a layer or head lacks a stride that its table, or the keys, call
///   for, or has ids or a length of its own where one table serves several (the message gives the numbers). How large the
///   buffers must be: `required_bytes`
/// \par Complexity
/// O((planes * layers)^2) with `layer_bases`, O(planes^2) without
inline void check_layout(const CacheView& view) {
  if (view.page_size < 1 || view.kv_heads < 1 || view.layers < 1 || view.sequences < 0 ||
      view.pages < 0) {
    throw_invalid_argument(
        "kvtrim::CacheView: page_size {}, kv_heads {} and layers {} must be at least 1, sequences "
        "{} and pages {} at least 0",
        view.page_size,
        view.kv_heads,
        view.layers,
        view.sequences,
        view.pages);
  }
  if (!view.is_of_model()) {
    throw_invalid_argument(
        "kvtrim::CacheView: layer_offset {} and {} layers are beyond model_layers {}{}",
        view.layer_offset,
        view.layers,
        view.model_layers,
        view.model_layers == 0 ? " (those of the view)" : "");
  }
  detail::check_extents(view);
  detail::check_presence(view);
  detail::check_one_row(view, "rows of the page tables", view.table.rows);
  if (view.lengths != nullptr) { detail::check_one_row(view, "lengths", view.length_rows); }
  if (view.lengths != nullptr) { detail::check_own_rows(view, "lengths", view.length_rows, 1, 1); }
  const PageTable& table = view.table;
  if (table.indptr != nullptr) {
    detail::check_own_rows(view, "row starts", table.rows, 1, 1);
  } else {
    const std::int32_t entries = std::max(0, table.max_pages);
    detail::check_own_rows(view, "ids", table.rows, table.row_stride, entries, table.v_offset);
  }
  if (view.writable.ref_counts != nullptr) {
    static_cast<void>(detail::required_counts(view, "ref_counts"));
  }
  if (view.writable.bits != nullptr) { static_cast<void>(detail::required_bits(view)); }
  detail::check_strides(view);
  detail::check_pools(view);
  if (view.k) { detail::check_plane(view, view.k, "keys"); }
  if (view.v) { detail::check_plane(view, view.v, "values"); }
  if (view.unrotated_keys) { detail::check_plane(view, view.unrotated_keys, "unrotated keys"); }
  detail::check_page_planes(view);
  detail::check_sequence_planes(view);
  detail::check_sharing(view);
}

}  // namespace kvtrim
