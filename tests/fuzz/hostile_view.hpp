// SPDX-License-Identifier: Apache-2.0
#pragma once

// A view made of bytes: a sound cache, then any number of its fields and of the words in its tables, lengths and states
// replaced. Each array is a block of its own with exactly the bytes that `required_bytes` asks for.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/required_bytes.hpp>
#include <kvtrim/observe/plan_shape.hpp>

#include "fuzz/fuzz.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

namespace kvtrim::fuzz {

class HostileView {
 public:
  /// False: the input asks for more memory than a test has, or for bytes that cannot be counted.
  bool make(Reader& in) {
    try {
      shape(in);
      change_fields(in);
      return fill(in);
    } catch (const std::invalid_argument&) { return false; }
  }

  CacheView view;
  std::int32_t max_rows = 0;
  std::int32_t *ids = nullptr, *lengths = nullptr, *counts = nullptr;

  /// Whether any word of the tables names page `p`.
  bool names(PageId p) const {
    for (std::size_t i = 0; i < id_count_; ++i) {
      if (view.table.page(first_id_[i]) == p) { return true; }
    }
    return false;
  }
  /// A block of exactly so many bytes, for whatever belongs to the view.
  std::byte* block(ByteRange range) {
    blocks_.push_back(std::make_unique<std::byte[]>(at(range.end - range.begin)));
    return blocks_.back().get() - range.begin;
  }

 private:
  static constexpr std::int64_t most_bytes = 1 << 18;
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  // Stands for "there is such an array" until its size is known.
  static inline std::int64_t somewhere[8] = {};
  template <class T>
  static T* placeholder() {
    return reinterpret_cast<T*>(somewhere);
  }

  void shape(Reader& in) {
    view.page_size = 1 + in.below(6);
    view.pages = in.below(20);
    view.kv_heads = 1 + in.below(3);
    view.layers = 1 + in.below(3);
    view.sequences = in.below(4);
    view.scope = static_cast<TableScope>(in.below(3));
    flags_ = in.number<std::uint32_t>();
    const auto has = [&](unsigned bit) { return ((flags_ >> bit) & 1U) != 0; };
    // What came later than the committed inputs is in the last byte of a quarter of all: quantised elements and where their
    // scales are, ids that count pieces of blocks, rows that stay in their slots.
    const std::uint8_t last = in.last();
    more_ = last >> 6U == 2 ? last & 63U : 0;
    const auto scales = static_cast<ScalesAt>(more_ % 4);
    view.fixed_rows = (more_ & 4U) != 0;
    if ((more_ & 8U) != 0) { view.table.id_step = 2 + in.below(2); }
    const bool own = view.scope != TableScope::head || has(2);
    const auto make = [&](bool hnd, ScalesAt at_scale) {
      const bool in_rows = at_scale == ScalesAt::in_rows;
      const DType dtype = at_scale == ScalesAt::none ? (has(0) ? DType::f16 : DType::f32)
                          : (more_ & 16U) != 0       ? DType::i8
                                                     : DType::f8e4m3;
      const std::int32_t dim = has(1) ? 8 : 2;
      const PlaneShape plane{
          view.page_size, own ? view.kv_heads : 1, dim + (in_rows ? 4 : 0), dtype};
      Plane p = hnd                  ? Plane::hnd(placeholder<std::byte>(), plane)
                : has(4) && !in_rows ? Plane::transposed(placeholder<std::byte>(), plane)
                                     : Plane::nhd(placeholder<std::byte>(), plane);
      if (!own) { p.head_stride = 0; }
      p.layer_stride = own || view.scope == TableScope::group ? view.pages * p.page_stride : 0;
      if (view.scope == TableScope::layer && has(3)) { p.layer_stride = 0; }
      p.head_dim = dim;
      if (in_rows) { p.scales.in_row = dim; }
      if (at_scale == ScalesAt::common) {
        p.scales.base = placeholder<std::byte>();
        if ((more_ & 32U) != 0) {
          p.scales.head_stride = 4, p.scales.layer_stride = 4 * view.kv_heads;
        }
      }
      return p;
    };
    view.k = make(has(5), scales);
    if (has(6)) { view.v = make(has(7), (more_ & 32U) != 0 ? scales : ScalesAt::none); }
    if (has(8)) { view.unrotated_keys = make(has(5), ScalesAt::none); }
    const std::int32_t tables = view.tables_per_sequence();
    view.table.ids = placeholder<std::int32_t>();
    view.table.max_pages = in.below(8);
    view.table.rows = {tables,
                       view.scope == TableScope::group ? 0 : tables / view.layers,
                       view.scope == TableScope::head ? 1 : 0};
    view.table.v_offset = has(9) ? view.table.max_pages : 0;
    view.table.row_stride = view.table.max_pages * (has(9) ? 2 : 1);
    if (has(10)) { view.table.indptr = placeholder<std::int32_t>(); }
    if (has(11)) { view.table.id_mask = 0x3FFF'FFFF; }
    if (has(12)) { view.states = placeholder<SequenceState>(); }
    if (has(13) || !has(12)) { view.lengths = placeholder<std::int32_t>(); }
    if (has(10) && has(14)) { view.last_page_len = placeholder<std::int32_t>(); }
    view.length_rows = view.table.rows;
    if (has(15)) { view.first_rows = placeholder<std::int32_t>(); }
    if (has(16)) { view.generations = placeholder<std::uint64_t>(); }
    if (has(17)) { view.reserved_pages = placeholder<std::int32_t>(); }
    if (has(18)) { view.writable.ref_counts = placeholder<std::int32_t>(); }
    if (has(19)) { view.writable.bits = placeholder<std::uint64_t>(); }
    const auto rows = [&] {
      return SequencePlane::dense(placeholder<float>(), view.layers, view.kv_heads, 48);
    };
    if (has(20)) { view.positions = rows(); }
    if (has(21)) { view.rope_positions = rows(); }
    if (has(22)) { view.score_sums = view.score_compensations = rows(); }
    page_planes_.resize(has(23) ? 1 + at(in.below(2)) : 0);
    const std::size_t first_scales = page_planes_.size();
    if (scales == ScalesAt::beside) {
      for (Plane* plane : {&view.k, &view.v}) {
        if (!*plane || element_bytes(plane->dtype) != 1) { continue; }
        scaled_.push_back({plane, page_planes_.size()});
        page_planes_.emplace_back();
      }
    }
    for (std::size_t i = 0; i < page_planes_.size(); ++i) {
      PagePlane& p = page_planes_[i];
      p.base = placeholder<std::byte>();
      p.row_bytes = i < first_scales ? 1 + in.below(5) : 4;
      p.head_stride = own ? p.row_bytes : 0;
      p.token_stride = p.row_bytes * (own ? view.kv_heads : 1);
      p.page_stride = view.page_size * p.token_stride;
      p.layer_stride = view.k.layer_stride == 0 ? 0 : view.pages * p.page_stride;
      p.of_values = has(24);
    }
    for (const Scaled& x : scaled_) {
      PagePlane& p = page_planes_[x.plane_of_scales];
      p.of_values = x.plane == &view.v;
      x.plane->scales = {p.base, p.layer_stride, p.page_stride, p.token_stride, p.head_stride};
    }
    more_planes_.assign(has(25) ? 1 : 0, rows());
    view.page_planes = page_planes_.data();
    view.page_plane_count = static_cast<std::int32_t>(page_planes_.size());
    view.more_planes = more_planes_.data();
    view.more_plane_count = static_cast<std::int32_t>(more_planes_.size());
  }

  static std::int64_t any_number(Reader& in) {
    switch (in.below(4)) {
      case 0:
        return in.number<std::int8_t>();
      case 1:
        return in.number<std::int32_t>();
      case 2:
        return std::int64_t{1} << (in.number<std::uint8_t>() % 63);
      default:
        return in.number<std::int64_t>();
    }
  }

  void change_fields(Reader& in) {
    std::vector<std::int64_t*> wide{&view.table.rows.sequence,
                                    &view.table.rows.layer,
                                    &view.table.rows.head,
                                    &view.table.row_stride,
                                    &view.table.v_offset,
                                    &view.length_rows.sequence,
                                    &view.length_rows.layer,
                                    &view.length_rows.head,
                                    &view.writable.layer_stride,
                                    &view.writable.head_stride};
    std::vector<std::int32_t*> narrow{&view.table.max_pages,
                                      &view.table.null_id,
                                      &view.table.id_mask,
                                      &view.page_size,
                                      &view.pages,
                                      &view.kv_heads,
                                      &view.layers,
                                      &view.sequences,
                                      &view.layer_offset,
                                      &view.model_layers};
    for (Plane* p : {&view.k, &view.v, &view.unrotated_keys}) {
      for (std::int64_t* x : {&p->layer_stride,
                              &p->page_stride,
                              &p->token_stride,
                              &p->head_stride,
                              &p->feature_stride,
                              &p->pack_stride}) {
        wide.push_back(x);
      }
      for (std::int32_t* x : {&p->pack, &p->head_dim, &p->opaque_row_bytes}) {
        narrow.push_back(x);
      }
    }
    for (Plane* p : {&view.k, &view.v}) {
      if (p->scales.base == nullptr && p->scales.in_row == 0) { continue; }
      Scales& q = p->scales;
      for (std::int64_t* x : {&q.layer_stride, &q.page_stride, &q.token_stride, &q.head_stride}) {
        wide.push_back(x);
      }
      narrow.push_back(&q.in_row);
    }
    if (view.table.id_step != 1) { narrow.push_back(&view.table.id_step); }
    for (PagePlane& p : page_planes_) {
      for (std::int64_t* x :
           {&p.layer_stride, &p.page_stride, &p.token_stride, &p.head_stride, &p.row_bytes}) {
        wide.push_back(x);
      }
      narrow.push_back(&p.tokens_per_entry);
    }
    std::vector<SequencePlane*> planes{
        &view.positions, &view.rope_positions, &view.score_sums, &view.score_compensations};
    for (SequencePlane& p : more_planes_) { planes.push_back(&p); }
    for (SequencePlane* p : planes) {
      for (std::int64_t* x :
           {&p->sequence_stride, &p->layer_stride, &p->head_stride, &p->row_stride}) {
        wide.push_back(x);
      }
      narrow.push_back(&p->element_bytes);
    }
    for (std::int32_t n = in.below(4); n > 0; --n) {
      const std::size_t which = in.number<std::uint8_t>() % (wide.size() + narrow.size() + 1);
      if (which < wide.size()) {
        *wide[which] = any_number(in);
      } else if (which < wide.size() + narrow.size()) {
        *narrow[which - wide.size()] = static_cast<std::int32_t>(any_number(in));
      } else {
        const auto dtype = static_cast<DType>(in.below(7));
        (in.coin() ? view.k : view.v).dtype = dtype;
      }
    }
    // What `check_layout` refuses, which can only be asked once everything has its place.
    for (const Plane* p : {&view.k, &view.v, &view.unrotated_keys}) {
      if (*p && p->dtype != DType::opaque && (p->pack < 1 || p->head_dim < 1)) {
        throw std::invalid_argument("a plane");
      }
    }
    for (const PagePlane& p : page_planes_) {
      if (p.tokens_per_entry < 1) { throw std::invalid_argument("a page plane"); }
    }
    if (view.page_size < 1 || view.kv_heads < 1 || view.layers < 1 || view.sequences < 0 ||
        view.pages < 0 || view.page_size > 64 || view.kv_heads > 64 || view.layers > 64 ||
        view.sequences > 64 || view.pages > 4096) {
      throw std::invalid_argument("extents");
    }
  }

  template <class T>
  T* numbers(ByteRange range, T*& first, std::size_t& count) {
    if (range.end - range.begin > most_bytes) { throw std::invalid_argument("too large"); }
    std::byte* const base = block(range);
    first = reinterpret_cast<T*>(base + range.begin);
    count = at(range.end - range.begin) / sizeof(T);
    return reinterpret_cast<T*>(base);
  }
  std::byte* bytes(ByteRange range) {
    // Below the first: strides that are negative, which `check_layout` refuses.
    if (range.end < range.begin || range.end - range.begin > most_bytes) {
      throw std::invalid_argument("too large");
    }
    return block(range);
  }

  bool fill(Reader& in) {
    const bool csr = view.table.indptr != nullptr;
    struct Words {
      std::int32_t* first;
      std::size_t count;
    };
    std::array<Words, 7>
        words{};  // ids, indptr, lengths, last_page_len, first_rows, reserved, counts
    const auto change = [&](std::size_t begin, std::size_t end) {
      for (std::int32_t n = in.below(6); n > 0; --n) {
        const Words& w = words[begin + in.number<std::uint8_t>() % (end - begin)];
        const std::size_t i = in.number<std::uint8_t>();
        const auto value = static_cast<std::int32_t>(any_number(in));
        if (w.count > 0) { w.first[i % w.count] = value; }
      }
    };
    // The ranges of the ids follow from the words of indptr, and those of the planes from the lengths.
    if (csr) {
      const ByteRange range = detail::PlaceRange("").add(view, view.table.rows).add(1, 2).bytes(4);
      view.table.indptr = numbers(range, words[1].first, words[1].count);
      for (std::size_t i = 0; i < words[1].count; ++i) {
        words[1].first[i] = static_cast<std::int32_t>(i) * std::max(0, view.table.max_pages % 8);
      }
      change(1, 2);
    }
    const RequiredBytes need = required_bytes(view, 0);
    view.table.ids = ids = numbers(need.ids, words[0].first, words[0].count);
    for (std::size_t i = 0; i < words[0].count; ++i) {
      words[0].first[i] =
          static_cast<std::int32_t>(i * (flags_ >> 26U) % at(std::max(1, view.pages)));
      if ((flags_ >> 26U) == 0) { words[0].first[i] = static_cast<std::int32_t>(i); }
    }
    // Ids of keys are multiples of the step, those of values, where they are apart, one more.
    const std::int32_t step = view.table.id_step;
    for (std::size_t i = 0; step > 1 && i < words[0].count; ++i) {
      const bool of_values = view.table.v_offset > 0 && !csr &&
                             static_cast<std::int64_t>(i) / view.table.v_offset % 2 == 1;
      words[0].first[i] = words[0].first[i] / step * step + (of_values ? 1 : 0);
    }
    first_id_ = words[0].first, id_count_ = words[0].count;
    const auto fill_words = [&](std::size_t which, ByteRange range, auto f) {
      std::int32_t* const base = numbers(range, words[which].first, words[which].count);
      for (std::size_t i = 0; i < words[which].count; ++i) { words[which].first[i] = f(); }
      return base;
    };
    const std::int32_t room = std::max(0, view.table.max_pages % 8) * view.page_size + 1;
    if (view.lengths != nullptr) {
      view.lengths = lengths = fill_words(2, need.lengths, [&] { return in.below(room); });
    }
    if (view.last_page_len != nullptr) {
      view.last_page_len =
          fill_words(3, need.last_page_len, [&] { return 1 + in.below(view.page_size); });
    }
    if (view.first_rows != nullptr) {
      view.first_rows =
          fill_words(4, need.first_rows, [&] { return in.below(view.page_size + 1); });
    }
    if (view.reserved_pages != nullptr) {
      view.reserved_pages = fill_words(5, need.reserved_pages, [&] { return in.below(2); });
    }
    if (view.writable.ref_counts != nullptr) {
      view.writable.ref_counts = counts =
          fill_words(6, need.ref_counts, [&] { return 1 + in.below(4) / 3; });
    }
    change(0, 1);
    change(2, 7);
    if (view.writable.bits != nullptr) {
      std::uint64_t* first = nullptr;
      std::size_t count = 0;
      view.writable.bits = numbers(need.writable_bits, first, count);
      for (std::size_t i = 0; i < count; ++i) { first[i] = in.number<std::uint64_t>() | 0xFFFF; }
    }
    if (view.generations != nullptr) {
      std::uint64_t* first = nullptr;
      std::size_t count = 0;
      view.generations = numbers(need.generations, first, count);
      std::fill_n(first, count, 7);
    }
    if (view.states != nullptr) { fill_states(in, need.states); }
    max_rows = plan_shape(view).max_rows;
    const RequiredBytes all = required_bytes(view, max_rows);
    require(all.ids == need.ids && all.states == need.states, "ranges of tables depend on lengths");
    const auto plane = [&](Plane& p, ByteRange range) {
      if (p) { p.base = bytes(range); }
    };
    plane(view.k, all.keys), plane(view.v, all.values);
    plane(view.unrotated_keys, all.unrotated_keys);
    if (view.v && view.k && in.below(8) == 1) {  // values within the keys' buffer
      const std::int64_t offset = in.number<std::uint8_t>();
      view.k.base = bytes({0, std::max(all.keys.end, offset + all.values.end)});
      view.v.base = view.k.base + offset;
    }
    for (PagePlane& p : page_planes_) { p.base = bytes(required_bytes(view, p)); }
    const auto scales = [&](Plane& p, ByteRange range) {
      if (p.scales.base != nullptr) { p.scales.base = bytes(range); }
    };
    scales(view.k, all.key_scales), scales(view.v, all.value_scales);
    for (const Scaled& x : scaled_) {  // the same memory, as long as both want as much of it
      const PagePlane& p = page_planes_[x.plane_of_scales];
      const ByteRange range = required_bytes(view, p);
      const ByteRange wanted = x.plane == &view.k ? all.key_scales : all.value_scales;
      if (range == wanted) { x.plane->scales.base = p.base; }
    }
    for (SequencePlane& p : more_planes_) { p.base = bytes(required_bytes(view, p, max_rows)); }
    const auto rows = [&](SequencePlane& p, ByteRange range) {
      if (p) { p.base = bytes(range); }
    };
    rows(view.positions, all.positions), rows(view.rope_positions, all.rope_positions);
    rows(view.score_sums, all.score_sums), rows(view.score_compensations, all.score_compensations);
    number_rows(view.positions), number_rows(view.rope_positions);
    return true;
  }

  void fill_states(Reader& in, ByteRange range) {
    SequenceState* first = nullptr;
    std::size_t count = 0;
    view.states = numbers(range, first, count);
    for (std::int32_t s = 0; s < view.sequences; ++s) {
      for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
        SequenceState& state = view.states[view.table_index(SequenceId{s}, t)];
        state = {};
        const std::int32_t room = std::max(0, view.table.max_pages % 8) * view.page_size + 1;
        state.live_rows =
            view.lengths != nullptr
                ? lengths[view.length_rows(SequenceId{s}, view.first_layer(t), view.first_head(t))]
                : in.below(room);
        state.next_position = state.next_rope_position = std::max(0, state.live_rows);
        if (in.below(4) == 1) {
          state.append_row = in.below(room);
          state.next_position = std::min(state.next_position, 0x7FFF'FFF0) + 3;
        }
        state.ordered = in.below(4) != 1;
        state.open = in.below(16) == 1, state.applied = in.below(16) == 1;
      }
    }
    for (std::int32_t n = in.below(3); n > 0 && count > 0; --n) {
      SequenceState& state = first[in.number<std::uint8_t>() % count];
      std::int32_t* const fields[]{&state.live_rows,
                                   &state.next_position,
                                   &state.next_rope_position,
                                   &state.append_row,
                                   &state.steps,
                                   &state.rows_at_eviction};
      *fields[in.below(6)] = static_cast<std::int32_t>(any_number(in));
    }
  }

  // Row r is position r, as far as the plane reaches.
  void number_rows(const SequencePlane& p) {
    if (!p || p.element_bytes != 4 || p.row_stride % 4 != 0) { return; }
    for (std::int32_t s = 0; s < view.sequences; ++s) {
      for (std::int32_t l = 0; l < view.layers; ++l) {
        for (std::int32_t h = 0; h < view.kv_heads; ++h) {
          for (std::int32_t r = 0; r < max_rows; ++r) {
            std::memcpy(p.row(SequenceId{s}, LayerId{l}, HeadId{h}, r), &r, 4);
          }
        }
      }
    }
  }

  enum class ScalesAt : std::uint8_t { none, common, beside, in_rows };
  struct Scaled {
    Plane* plane;
    std::size_t plane_of_scales;
  };

  std::uint32_t flags_ = 0, more_ = 0;
  std::vector<Scaled> scaled_;
  const std::int32_t* first_id_ = nullptr;
  std::size_t id_count_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> blocks_;
  std::vector<PagePlane> page_planes_;
  std::vector<SequencePlane> more_planes_;
};

}  // namespace kvtrim::fuzz
