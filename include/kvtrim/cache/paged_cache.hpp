// SPDX-License-Identifier: Apache-2.0
#pragma once

// The embedded cache: for engines without one of their own, for tests and examples. Pages are [kv_heads, page_size, dim]
// of one or all layers, or [page_size, dim] of one head, depending on `TableScope`. Over 400 lines: one class, whose
// operations must keep tables, counts and side planes in step.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/cache/page_pool.hpp>
#include <kvtrim/cache/table_update.hpp>
#include <kvtrim/core/error.hpp>
#include <kvtrim/core/saturating.hpp>
#include <kvtrim/core/status.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace kvtrim {

/// Where the keys or values of new rows are read from: [n, kv_heads, dim] floats.
struct RowSource {
  const float* data = nullptr;    ///< token 0, KV head 0
  std::int64_t token_stride = 0;  ///< floats between tokens; 0: kv_heads * dim
  std::int64_t head_stride = 0;   ///< floats between KV heads; 0: dim
};

/// A paged KV cache in host memory, with ref-counted pages, prefix sharing by fork, and copy-on-write.
///
/// \par Allocation
/// in the constructor only. Memory is touched when it is first written.
/// \par Thread-safety
/// one thread at a time; `write` from many threads for different (sequence, layer)
class PagedCache {
 public:
  /// What a cache is made of.
  struct Params {
    std::int32_t pages = 0;                ///< pages in the pool
    std::int32_t page_size = 16;           ///< rows per page
    std::int32_t layers = 1;               ///< layers
    std::int32_t kv_heads = 1;             ///< KV heads per layer
    std::int32_t key_dim = 0;              ///< features of a key
    std::int32_t value_dim = 0;            ///< features of a value; 0: same as the keys
    DType dtype = DType::f32;              ///< f32, f16 or bf16
    TableScope scope = TableScope::group;  ///< what one page table, and hence one page, serves
    std::int32_t max_sequences = 1;        ///< sequences alive at the same time
    std::int32_t max_rows = 0;             ///< rows that a table can hold; 0: as many as the pool
    bool scores = false;                   ///< planes for accumulated scores (`HeavyHitter`)
    bool unrotated_keys =
        false;  ///< also keep keys before RoPE, for in-cache positions of 16-bit keys
    /// Write zeros over what nobody holds any longer: a page (keys, values, un-rotated keys) when its last owner lets it go,
    /// positions and scores of a sequence when it ends. Rows that leave a page which stays are overwritten by later ones only.
    bool scrub = false;
  };

  /// Makes an empty cache.
  ///
  /// \throws std::invalid_argument if an extent is below 1 (`max_rows`, `value_dim`, `pages`: below 0) or the dtype is
  ///   not f32, f16 or bf16
  /// \throws std::length_error if a count or a size in bytes does not fit its integer
  explicit PagedCache(const Params& params) : params_(checked(params)), pool_(params.pages) {
    const auto& p = params_;
    tables_ = tables_of(p.scope, p.layers, p.kv_heads);
    max_pages_ = pages_for(p.max_rows, p.page_size);
    const auto tables = static_cast<std::size_t>(tables_) * index(p.max_sequences);
    ids_.assign(tables * index(max_pages_), raw(null_page));
    states_.assign(tables, {});
    writes_.assign(tables, {});
    unwritten_.assign(index(p.max_sequences) * index(p.layers), 0);
    unwritten_layers_.assign(index(p.max_sequences), 0);
    alive_.assign(index(p.max_sequences), false);
    k_ = make_plane(keys_, p.key_dim);
    v_ = make_plane(values_, p.value_dim);
    if (p.unrotated_keys) { u_ = make_plane(unrotated_, p.key_dim); }
    const std::size_t elements =
        index(p.max_sequences) * index(p.layers) * index(p.kv_heads) * index(p.max_rows);
    positions_ = std::make_unique_for_overwrite<Position[]>(elements);
    rope_positions_ = std::make_unique_for_overwrite<std::int32_t[]>(elements);
    if (p.scores) {
      sums_ = std::make_unique_for_overwrite<float[]>(elements);
      compensations_ = std::make_unique_for_overwrite<float[]>(elements);
    }
  }

  PagedCache(const PagedCache&) = delete;
  PagedCache& operator=(const PagedCache&) = delete;
  /// Moves the cache. Views of it stay valid; the source may only be destroyed.
  PagedCache(PagedCache&&) = default;
  PagedCache& operator=(PagedCache&&) = default;
  ~PagedCache() = default;

  /// Starts an empty sequence.
  ///
  /// \returns the sequence, or `std::nullopt` when `max_sequences` are alive
  [[nodiscard]] std::optional<SequenceId> try_create() noexcept {
    for (std::size_t i = 0; i < alive_.size(); ++i) {
      if (!alive_[i]) {
        alive_[i] = true;
        return SequenceId{static_cast<std::int32_t>(i)};
      }
    }
    return std::nullopt;
  }

  /// Ends sequence `s`: its pages lose one owner each.
  /// \pre `alive(s)`
  void destroy(SequenceId s) noexcept {
    reset(s);
    alive_[index(raw(s))] = false;
  }

  /// Whether `s` was created and not destroyed.
  [[nodiscard]] bool alive(SequenceId s) const noexcept {
    return raw(s) >= 0 && raw(s) < params_.max_sequences && alive_[index(raw(s))];
  }

  /// Starts a sequence with the rows of `s`: pages are shared, positions and scores copied.
  ///
  /// \param[out] why  where there is none: `too_many_sequences`, `no_such_sequence`, `step_open`, `eviction_open`
  /// \returns the new sequence, or `std::nullopt`: nothing was changed
  /// \par Complexity
  /// O(pages + rows * layers * KV heads); no key or value is copied
  [[nodiscard]] std::optional<SequenceId> try_fork(SequenceId s, Status* why = nullptr) noexcept {
    const Status between = between_steps(s);
    const auto made = between == Status::ok ? try_create() : std::nullopt;
    if (!made) {
      if (why != nullptr) { *why = between == Status::ok ? Status::too_many_sequences : between; }
      return std::nullopt;
    }
    const CacheView all = view();
    for (std::int32_t t = 0; t < tables_; ++t) {
      const SequenceState& from = state_of(s, t);
      std::int32_t* const entries = row_of(*made, t);
      const std::int32_t used = pages_for(from.extent(), params_.page_size);
      std::copy_n(row_of(s, t), used, entries);
      for (std::int32_t e = 0; e < used; ++e) { pool_.retain(PageId{entries[e]}); }
      state_of(*made, t) = from;
      touch(*made, t);
      for_each_head(all, s, t, [&](const HeadRef& head) {
        detail::for_each_sequence_plane(all, [&](const SequencePlane& plane) {
          if (!plane) { return; }
          std::memcpy(plane.row(*made, head.layer, head.head, 0),
                      plane.row(s, head.layer, head.head, 0),
                      index(from.extent()) * index(plane.element_bytes));
        });
      });
    }
    return made;
  }

  /// Gives sequence `s` a copy of every page that it shares, so that all of its pages may be written and freed.
  ///
  /// \returns `ok`; `out_of_pages`, `eviction_open` or `no_such_sequence`: nothing was changed
  /// \par Complexity
  /// O(bytes of the shared pages)
  Status try_make_private(SequenceId s) noexcept {
    if (const Status now = between_steps(s); now != Status::ok && now != Status::step_open) {
      return now;
    }
    const auto for_each_shared = [&](auto&& f) {
      for (std::int32_t t = 0; t < tables_; ++t) {
        std::int32_t* const entries = row_of(s, t);
        for (std::int32_t e = 0; e < pages_for(state_of(s, t).extent(), params_.page_size); ++e) {
          if (pool_.ref_count(PageId{entries[e]}) > 1) { f(t, entries[e]); }
        }
      }
    };
    std::int32_t needed = 0;
    for_each_shared([&](std::int32_t, std::int32_t&) { ++needed; });
    if (needed > pool_.available()) { return Status::out_of_pages; }
    for_each_shared([&](std::int32_t t, std::int32_t& entry) { own_page(s, t, entry); });
    return Status::ok;
  }

  /// Empties sequence `s`: rows, positions, scores and state go together; pages lose one owner each. Allowed at any time: an
  /// open step ends, and an applied plan is not committed to it.
  /// \pre `alive(s)`
  void reset(SequenceId s) noexcept {
    KVTRIM_ASSERT(alive(s));
    for (std::int32_t t = 0; t < tables_; ++t) {
      release_tail(s, t, 0);
      state_of(s, t) = {};
      writes_[table_index(s, t)] = {};
      touch(s, t);
    }
    open_layers(s, 0);
    if (params_.scrub) { scrub_rows(s); }
  }

  /// Reserves `n` rows in all layers for the next `n` tokens, all or nothing. `write` them afterwards, layer by layer.
  ///
  /// The rows get their positions and scores of 0. A shared last page is copied first. A step is open from now on until every
  /// layer is written (each table by itself: until the layers that it serves are).
  ///
  /// \returns `ok`; `out_of_pages`, `too_many_rows`, `step_open`, `eviction_open` or `no_such_sequence`: nothing was changed
  /// \par Complexity
  /// O(tables + n * layers * KV heads)
  Status try_extend(SequenceId s, std::int32_t n) noexcept {
    KVTRIM_ASSERT(n >= 0);
    if (const Status now = between_steps(s); now != Status::ok || n == 0) { return now; }
    std::int64_t needed = 0;
    for (std::int32_t t = 0; t < tables_; ++t) {
      const SequenceState& state = state_of(s, t);
      const std::int64_t extent = state.live_rows + static_cast<std::int64_t>(n);
      if (extent > params_.max_rows) { return Status::too_many_rows; }
      needed += pages_for(static_cast<std::int32_t>(extent), params_.page_size) -
                pages_for(state.extent(), params_.page_size);
      needed += for_each_shared_target(s, t, n, [](std::int32_t) {});
    }
    if (needed > pool_.available()) { return Status::out_of_pages; }
    const CacheView all = view();
    for (std::int32_t t = 0; t < tables_; ++t) { extend_table(all, s, t, n); }
    open_layers(s, 1);
    return Status::ok;
  }

  /// Writes the keys and values of the rows that the last `try_extend` reserved, in `layer`, rounded to the cache's dtype, and
  /// marks the layer as written.
  ///
  /// \param keys      [n, kv_heads, key_dim], rotated as attention uses them
  /// \param values    [n, kv_heads, value_dim]
  /// \param unrotated [n, kv_heads, key_dim] keys before RoPE; only with `Params::unrotated_keys`
  /// \pre `layer` is one of the cache
  /// \returns `ok`; `no_open_step` (there is none, or the layer is written), `eviction_open`, `no_such_sequence`: nothing was
  ///   changed
  /// \par Thread-safety
  /// calls for different (sequence, layer) from many threads
  Status write(SequenceId s,
               LayerId layer,
               RowSource keys,
               RowSource values,
               RowSource unrotated = {}) noexcept {
    if (!alive(s)) { return Status::no_such_sequence; }
    if (unwritten_[layer_index(s, layer)] == 0) { return closed(s, layer); }
    const CacheView all = view();
    KVTRIM_ASSERT((unrotated.data != nullptr) == params_.unrotated_keys);
    for (std::int32_t h = 0; h < params_.kv_heads; ++h) {
      const HeadId head{h};
      const Write& w = writes_[table_index(s, all.table_of(layer, head))];
      for (std::int32_t i = 0; i < w.count; ++i) {
        const RowPlace at = place_of({all, s, layer, head}, w.row(i));
        store_row(
            k_, k_.row(layer, at.k_page, head, at.slot), element(keys, i, h, params_.key_dim));
        store_row(
            v_, v_.row(layer, at.v_page, head, at.slot), element(values, i, h, params_.value_dim));
        if (params_.unrotated_keys) {
          store_row(u_,
                    u_.row(layer, at.k_page, head, at.slot),
                    element(unrotated, i, h, params_.key_dim));
        }
      }
    }
    return written(s, layer);
  }

  /// Marks `layer` of the open step as written: for engines that write the new rows through the view.
  ///
  /// \returns as `write`
  Status written(SequenceId s, LayerId layer) noexcept {
    if (!alive(s)) { return Status::no_such_sequence; }
    if (std::exchange(unwritten_[layer_index(s, layer)], std::uint8_t{0}) == 0) {
      return closed(s, layer);
    }
    // Other threads may be writing other layers of a table.
    const bool last = std::atomic_ref(unwritten_layers_[index(raw(s))]).fetch_sub(1) == 1;
    if (params_.scope == TableScope::group && !last) { return Status::ok; }
    const std::int32_t heads = params_.scope == TableScope::head ? params_.kv_heads : 1;
    for (std::int32_t h = 0; h < heads; ++h) {
      state_of(s, table_of(layer, HeadId{h})).open = false;
    }
    return Status::ok;
  }

  /// Forgets the tokens from position `next` on, so that the next token is at `next`.
  ///
  /// If slot order is no longer position order, rows move within the sequence's own pages.
  ///
  /// \returns `ok` (also when there is nothing to forget); `unequal_budget` if heads of one table would be left with
  ///   different counts, `shared_page` if a shared page would have to be written, `step_open`, `eviction_open`,
  ///   `no_such_sequence`: nothing was changed
  /// \pre `next` is not negative
  Status try_truncate(SequenceId s, Position next) noexcept {
    KVTRIM_ASSERT(raw(next) >= 0);
    if (const Status now = between_steps(s); now != Status::ok) { return now; }
    // Nothing to forget: rows, shared pages and any hole are left alone.
    return next >= next_position(s) ? Status::ok : truncate(s, next);
  }

  /// Takes back the rows of the open step, for a step that failed.
  ///
  /// \returns `ok`; `no_open_step`, `eviction_open`, `no_such_sequence` or as `try_truncate`: nothing was changed
  Status try_cancel_step(SequenceId s) noexcept {
    const Status now = between_steps(s);
    if (now != Status::step_open) { return now == Status::ok ? Status::no_open_step : now; }
    // Layers that are written may have been evicted from since: only an open table knows how many rows there are.
    std::int32_t t = 0;
    while (!state_of(s, t).open) { ++t; }
    return truncate(s, Position{raw(next_position(s)) - writes_[table_index(s, t)].count});
  }

  /// Forgets the last `n` tokens, or all if there are fewer. See `try_truncate`.
  /// \pre `n` is not negative; none is forgotten then
  Status try_remove_last(SequenceId s, std::int32_t n) noexcept {
    KVTRIM_ASSERT(n >= 0);
    if (!alive(s)) { return Status::no_such_sequence; }
    const std::int32_t next = raw(next_position(s));
    return try_truncate(s, Position{next - std::clamp(n, 0, next)});
  }

  /// View of all `max_sequences` sequences; those that are not alive have no rows.
  [[nodiscard]] CacheView view() noexcept { return view_of(0, params_.max_sequences); }
  /// View of sequence `s` alone, as sequence 0.
  /// \pre `s` is below `max_sequences`, also in what follows; `l` and `h` are a layer and a KV head of the cache
  [[nodiscard]] CacheView view(SequenceId s) noexcept { return view_of(raw(s), 1); }
  /// View of some layers of sequence `s` alone, as sequence 0: to evict layer by layer, at the end of a prompt, from those that
  /// are written.
  ///
  /// \pre layers have tables of their own (`TableScope::layer` or `head`), and these are layers of the cache
  [[nodiscard]] CacheView view(SequenceId s, LayerId first, std::int32_t layers) noexcept {
    KVTRIM_ASSERT(params_.scope != TableScope::group && "layers share a table");
    KVTRIM_ASSERT(raw(first) >= 0 && layers >= 1 && raw(first) <= params_.layers - layers &&
                  "no such layers of the cache");
    CacheView some = view(s);
    const std::int64_t tables = static_cast<std::int64_t>(raw(first)) * (tables_ / params_.layers);
    some.table.ids += tables * max_pages_;
    some.states += tables;
    for (SequencePlane* plane :
         {&some.positions, &some.rope_positions, &some.score_sums, &some.score_compensations}) {
      if (*plane) { plane->base += raw(first) * plane->layer_stride; }
    }
    some.layers = layers;
    some.layer_offset = raw(first);
    some.model_layers = params_.layers;
    return some;
  }

  /// Live rows of (sequence, layer, KV head): what attention reads, and what slots are derived from.
  [[nodiscard]] std::int32_t live_rows(SequenceId s, LayerId l = {}, HeadId h = {}) const noexcept {
    return state(s, l, h).live_rows;
  }
  /// Live rows of sequence `s`, summed over layers and KV heads.
  [[nodiscard]] std::int64_t total_live_rows(SequenceId s) const noexcept {
    std::int64_t rows = 0;
    for (std::int32_t t = 0; t < tables_; ++t) { rows += states_[table_index(s, t)].live_rows; }
    return rows * (params_.layers * params_.kv_heads / tables_);
  }
  /// Bytes of keys and values of these rows.
  [[nodiscard]] std::int64_t live_bytes(SequenceId s) const noexcept {
    return total_live_rows(s) * (params_.key_dim + params_.value_dim) *
           element_bytes(params_.dtype);
  }
  /// Position of the next token: the number of tokens seen, evicted ones included. The same for all layers.
  [[nodiscard]] Position next_position(SequenceId s) const noexcept {
    return Position{state(s).next_position};
  }
  /// What the next key and query of this layer and head are rotated to.
  [[nodiscard]] std::int32_t next_rope_position(SequenceId s,
                                                LayerId l = {},
                                                HeadId h = {}) const noexcept {
    return state(s, l, h).next_rope_position;
  }
  /// State of (sequence, layer, KV head).
  [[nodiscard]] const SequenceState& state(SequenceId s,
                                           LayerId l = {},
                                           HeadId h = {}) const noexcept {
    return states_[table_index(s, table_of(l, h))];
  }
  /// Page table of (sequence, layer, KV head), [max pages per table]: live pages first, then -1.
  [[nodiscard]] std::span<const std::int32_t> page_table(SequenceId s,
                                                         LayerId l = {},
                                                         HeadId h = {}) const noexcept {
    return {ids_.data() + table_index(s, table_of(l, h)) * index(max_pages_), index(max_pages_)};
  }

  /// The pool. Pages taken from it directly belong to the caller.
  [[nodiscard]] PagePool& pool() noexcept { return pool_; }
  /// The pool, for reading.
  [[nodiscard]] const PagePool& pool() const noexcept { return pool_; }
  /// The parameters, with defaults filled in.
  [[nodiscard]] const Params& params() const noexcept { return params_; }
  /// Bytes of keys and values of one page (all layers and heads that a page serves).
  [[nodiscard]] std::int64_t page_bytes() const noexcept {
    return (k_.page_stride + v_.page_stride) *
           (params_.scope == TableScope::group ? params_.layers : 1);
  }

  /// Stores a table after an eviction (`TableSink`).
  void update(const TableUpdate& u) noexcept {
    std::int32_t* const entries = row_of(u.sequence, u.table);
    for (std::size_t e = 0; e < u.k_pages.size(); ++e) { entries[e] = raw(u.k_pages[e]); }
    for (auto e = static_cast<std::int32_t>(u.k_pages.size()); e < u.pages_before; ++e) {
      entries[e] = raw(null_page);
    }
    state_of(u.sequence, u.table) = u.state;
    writes_[table_index(u.sequence, u.table)] = {};
    touch(u.sequence, u.table);
  }
  /// Drops one reference of a page (`TableSink`).
  bool release(PageId p) noexcept {
    const bool free = pool_.release(p);
    if (free && params_.scrub) { scrub_page(p); }
    return free;
  }

  /// A `TableSink` for plans over a view of this cache.
  class Sink {
   public:
    /// Stores a table; its sequence and its number are counted from the view's first one.
    void update(TableUpdate u) noexcept {
      u.sequence = SequenceId{raw(u.sequence) + first_};
      u.table += first_table_;
      cache_->update(u);
    }
    /// Drops one reference of a page.
    bool release(PageId p) noexcept { return cache_->release(p); }

   private:
    friend class PagedCache;
    Sink(PagedCache& cache, std::int32_t first, std::int32_t first_table) noexcept
        : cache_(&cache), first_(first), first_table_(first_table) {}
    PagedCache* cache_;
    std::int32_t first_;
    std::int32_t first_table_;
  };

  /// The sink for a view of this cache.
  [[nodiscard]] Sink sink_for(const CacheView& view) noexcept {
    const auto first = static_cast<std::int32_t>(view.states - states_.data());
    return {*this, first / tables_, first % tables_};
  }

 private:
  // Rows reserved by the last extend: the hole first, if there was one, then the tail.
  struct Write {
    std::int32_t hole = -1;
    std::int32_t begin = 0;
    std::int32_t count = 0;
    [[nodiscard]] std::int32_t row(std::int32_t i) const noexcept {
      return hole < 0 ? begin + i : i == 0 ? hole : begin + i - 1;
    }
  };
  struct Truncation {
    Status status = Status::ok;
    std::int32_t kept = 0;
  };

  static std::size_t index(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

  static Params checked(Params p) {
    if (p.page_size < 1 || p.layers < 1 || p.kv_heads < 1 || p.key_dim < 1 || p.max_sequences < 1 ||
        p.pages < 0 || p.value_dim < 0 || p.max_rows < 0) {
      throw_invalid_argument(
          "kvtrim::PagedCache: page_size {}, layers {}, kv_heads {}, key_dim {} and max_sequences "
          "{} must be at least 1; "
          "pages {}, value_dim {} and max_rows {} at least 0",
          p.page_size,
          p.layers,
          p.kv_heads,
          p.key_dim,
          p.max_sequences,
          p.pages,
          p.value_dim,
          p.max_rows);
    }
    if (!readable(p.dtype)) {
      throw_invalid_argument("kvtrim::PagedCache: dtype {} is not f32, f16 or bf16",
                             to_string(p.dtype));
    }
    const std::int64_t pool_rows = static_cast<std::int64_t>(p.pages) * p.page_size;
    if (pool_rows > std::numeric_limits<std::int32_t>::max()) {
      throw_length_error(
          "kvtrim::PagedCache: {} pages of {} rows do not fit 31 bits", p.pages, p.page_size);
    }
    if (p.value_dim == 0) { p.value_dim = p.key_dim; }
    if (p.max_rows == 0) { p.max_rows = static_cast<std::int32_t>(pool_rows); }
    const std::int64_t heads = saturated_product({p.max_sequences, p.layers, p.kv_heads});
    const std::int64_t page_layers = p.scope == TableScope::group ? p.layers : 1;
    const std::int64_t page_heads = p.scope == TableScope::head ? 1 : p.kv_heads;
    const std::int64_t largest = std::max(saturated_product({heads, p.max_rows, 4}),
                                          saturated_product({p.pages,
                                                             p.page_size,
                                                             page_layers,
                                                             page_heads,
                                                             std::max(p.key_dim, p.value_dim),
                                                             element_bytes(p.dtype)}));
    if (heads > std::numeric_limits<std::int32_t>::max() || largest > too_large / 2) {
      throw_length_error(
          "kvtrim::PagedCache: {} sequences of {} layers of {} KV heads with {} rows, {} pages of "
          "{} rows and {} features: more heads than 31 bits, or bytes than 63 bits, can count",
          p.max_sequences,
          p.layers,
          p.kv_heads,
          p.max_rows,
          p.pages,
          p.page_size,
          std::max(p.key_dim, p.value_dim));
    }
    return p;
  }

  Plane make_plane(std::unique_ptr<std::byte[]>& memory, std::int32_t dim) {
    const auto& p = params_;
    const PlaneShape shape{p.page_size, p.scope == TableScope::head ? 1 : p.kv_heads, dim, p.dtype};
    Plane plane = Plane::hnd(nullptr, shape);
    if (p.scope == TableScope::head) { plane.head_stride = 0; }
    if (p.scope == TableScope::group) { plane.layer_stride = p.pages * plane.page_stride; }
    const std::int64_t layers = p.scope == TableScope::group ? p.layers : 1;
    memory =
        std::make_unique_for_overwrite<std::byte[]>(index(layers * p.pages * plane.page_stride));
    plane.base = memory.get();
    return plane;
  }

  // Every id of a caller goes through one of the next three.
  [[nodiscard]] std::int32_t table_of(LayerId l, HeadId h) const noexcept {
    KVTRIM_ASSERT(raw(l) >= 0 && raw(l) < params_.layers && "no such layer of the cache");
    KVTRIM_ASSERT(raw(h) >= 0 && raw(h) < params_.kv_heads && "no such KV head of the cache");
    return kvtrim::table_of(params_.scope, params_.kv_heads, l, h);
  }
  [[nodiscard]] std::size_t table_index(SequenceId s, std::int32_t t) const noexcept {
    KVTRIM_ASSERT(raw(s) >= 0 && raw(s) < params_.max_sequences && "no such sequence of the cache");
    return index(static_cast<std::int64_t>(raw(s)) * tables_ + t);
  }
  SequenceState& state_of(SequenceId s, std::int32_t t) noexcept {
    return states_[table_index(s, t)];
  }
  std::int32_t* row_of(SequenceId s, std::int32_t t) noexcept {
    return ids_.data() + table_index(s, t) * index(max_pages_);
  }
  void touch(SequenceId s, std::int32_t t) noexcept { state_of(s, t).generation = ++clock_; }
  [[nodiscard]] std::size_t layer_index(SequenceId s, LayerId l) const noexcept {
    KVTRIM_ASSERT(raw(l) >= 0 && raw(l) < params_.layers && "no such layer of the cache");
    return index(static_cast<std::int64_t>(raw(s)) * params_.layers + raw(l));
  }
  // Why a layer cannot be written.
  [[nodiscard]] Status closed(SequenceId s, LayerId layer) const noexcept {
    bool applied = false;
    for (std::int32_t h = 0; h < params_.kv_heads; ++h) {
      applied = applied || state(s, layer, HeadId{h}).applied;
    }
    return applied ? Status::eviction_open : Status::no_open_step;
  }
  // Marks all layers as to be written, or none.
  void open_layers(SequenceId s, std::uint8_t open) noexcept {
    std::fill_n(unwritten_.begin() + static_cast<std::ptrdiff_t>(layer_index(s, LayerId{0})),
                params_.layers,
                open);
    unwritten_layers_[index(raw(s))] = open * params_.layers;
  }
  // `ok` if the sequence is alive, every reserved row is written and every applied plan committed.
  [[nodiscard]] Status between_steps(SequenceId s) const noexcept {
    if (!alive(s)) { return Status::no_such_sequence; }
    Status status = Status::ok;
    for (std::int32_t t = 0; t < tables_; ++t) {
      const SequenceState& state = states_[table_index(s, t)];
      if (state.open) { status = Status::step_open; }
      if (state.applied) { return Status::eviction_open; }
    }
    return status;
  }

  [[nodiscard]] const float* element(const RowSource& source,
                                     std::int32_t token,
                                     std::int32_t head,
                                     std::int32_t dim) const noexcept {
    const std::int64_t head_stride = source.head_stride == 0 ? dim : source.head_stride;
    const std::int64_t token_stride = source.token_stride == 0
                                          ? params_.kv_heads * static_cast<std::int64_t>(dim)
                                          : source.token_stride;
    return source.data + token * token_stride + head * head_stride;
  }

  // Calls f(entry) for each shared page that an extend by n writes to, each at most once; returns how many.
  template <class F>
  std::int32_t for_each_shared_target(SequenceId s,
                                      std::int32_t t,
                                      std::int32_t n,
                                      F&& f) noexcept {
    const SequenceState& state = state_of(s, t);
    const std::int32_t hole = state.append_row < 0 ? -1 : state.append_row / params_.page_size;
    const bool tail_written = n > (hole >= 0 ? 1 : 0) && state.extent() % params_.page_size != 0;
    const std::int32_t tail = tail_written ? state.extent() / params_.page_size : -1;
    std::int32_t count = 0;
    const auto shared = [&](std::int32_t e) {
      return e >= 0 && pool_.ref_count(PageId{row_of(s, t)[e]}) > 1;
    };
    if (n > 0 && shared(hole)) { ++count, f(hole); }
    if (n > 0 && tail != hole && shared(tail)) { ++count, f(tail); }
    return count;
  }

  // Calls f(plane, layer, bytes) for the blocks that make up a page.
  template <class F>
  void for_each_block(F&& f) noexcept {
    const std::int32_t layers = params_.scope == TableScope::group ? params_.layers : 1;
    for (const Plane& plane : {k_, v_, u_}) {
      if (plane.base == nullptr) { continue; }
      for (std::int32_t l = 0; l < layers; ++l) { f(plane, LayerId{l}, index(plane.page_stride)); }
    }
  }
  void copy_page(PageId from, PageId to) noexcept {
    for_each_block([&](const Plane& plane, LayerId l, std::size_t bytes) {
      std::memcpy(
          plane.row(l, to, HeadId{0}, Slot{0}), plane.row(l, from, HeadId{0}, Slot{0}), bytes);
    });
  }
  void scrub_page(PageId p) noexcept {
    for_each_block([&](const Plane& plane, LayerId l, std::size_t bytes) {
      std::memset(plane.row(l, p, HeadId{0}, Slot{0}), 0, bytes);
    });
  }
  void scrub_rows(SequenceId s) noexcept {
    const CacheView all = view();
    detail::for_each_sequence_plane(all, [&](const SequencePlane& plane) {
      if (plane) { std::memset(plane.row(s, {}, {}, 0), 0, index(plane.sequence_stride)); }
    });
  }

  // Replaces the shared page of a table entry by a copy. There is a free page.
  void own_page(SequenceId s, std::int32_t t, std::int32_t& entry) noexcept {
    const auto own = pool_.try_acquire();
    KVTRIM_ASSERT(own.has_value());
    const PageId page = own.value_or(null_page);
    copy_page(PageId{entry}, page);
    release(PageId{entry});
    entry = raw(page);
    touch(s, t);
  }

  void extend_table(const CacheView& all, SequenceId s, std::int32_t t, std::int32_t n) noexcept {
    std::int32_t* const entries = row_of(s, t);
    for_each_shared_target(s, t, n, [&](std::int32_t e) { own_page(s, t, entries[e]); });
    SequenceState& state = state_of(s, t);
    const bool fills_hole = n > 0 && state.append_row >= 0;
    const Write w{fills_hole ? state.append_row : -1, state.extent(), n};
    const std::int32_t extent = w.begin + n - (fills_hole ? 1 : 0);
    for (std::int32_t e = pages_for(w.begin, params_.page_size);
         e < pages_for(extent, params_.page_size);
         ++e) {
      entries[e] = raw(pool_.try_acquire().value_or(null_page));  // counted before
    }
    for_each_head(all, s, t, [&](const HeadRef& head) {
      const LayerId l = head.layer;
      const HeadId h = head.head;
      for (std::int32_t i = 0; i < n; ++i) {
        all.positions.at<Position>(s, l, h, w.row(i)) = Position{state.next_position + i};
        all.rope_positions.at<std::int32_t>(s, l, h, w.row(i)) = state.next_rope_position + i;
        if (all.score_sums) {
          all.score_sums.at<float>(s, l, h, w.row(i)) = 0;
          all.score_compensations.at<float>(s, l, h, w.row(i)) = 0;
        }
      }
    });
    writes_[table_index(s, t)] = w;
    state.open = true;
    if (fills_hole) {
      state.append_row = -1;
      // The new row in the hole is newer than the rows that follow it.
      state.ordered = state.ordered && w.hole == w.begin - 1;
    }
    state.live_rows += n;
    state.next_position += n;
    state.next_rope_position += n;
    ++state.steps;
    touch(s, t);
  }

  // Rows that stay, the same for every head of the table, and whether shared pages can be left unwritten.
  Truncation truncated_rows(const CacheView& all,
                            SequenceId s,
                            std::int32_t t,
                            Position next) noexcept {
    const SequenceState& state = state_of(s, t);
    Truncation result;
    bool first = true;
    for_each_head(all, s, t, [&](const HeadRef& head) {
      std::int32_t kept = 0;
      std::int32_t last = -1;
      for (std::int32_t r = 0; r < state.extent(); ++r) {
        if (r != state.append_row && head.position(r) < next) { ++kept, last = r; }
      }
      if (!first && kept != result.kept) { result.status = Status::unequal_budget; }
      first = false;
      result.kept = kept;
      if (last >= kept) {  // rows move down, perhaps into a page that is shared
        for (std::int32_t e = 0; e < pages_for(kept, params_.page_size); ++e) {
          if (pool_.ref_count(PageId{row_of(s, t)[e]}) > 1 && result.status == Status::ok) {
            result.status = Status::shared_page;
          }
        }
      }
    });
    return result;
  }

  // Rope position of the token at `next`: counted back from the first row behind it, from which on rope positions were
  // given one by one; after those that stay, where rows have gone in between and the others were numbered anew.
  [[nodiscard]] static std::int32_t rope_position_at(const CacheView& all,
                                                     SequenceId s,
                                                     std::int32_t t,
                                                     Position next) noexcept {
    const SequenceState state = all.states[all.table_index(s, t)];
    std::int32_t rope = 0;
    for_each_head(all, s, t, [&](const HeadRef& head) {
      std::int32_t position = state.next_position;
      std::int32_t stands = state.next_rope_position;
      for (std::int32_t r = 0; r < state.extent(); ++r) {
        if (r == state.append_row) { continue; }
        const std::int32_t at = all.rope_position(s, head.layer, head.head, r);
        if (head.position(r) < next) {
          rope = std::max(rope, at + 1);
        } else if (raw(head.position(r)) < position) {
          position = raw(head.position(r)), stands = at;
        }
      }
      rope = std::max(rope, stands - (position - raw(next)));
    });
    return rope;
  }

  [[nodiscard]] Status truncate(SequenceId s, Position next) noexcept {
    const CacheView all = view();
    for (std::int32_t t = 0; t < tables_; ++t) {
      if (const Status status = truncated_rows(all, s, t, next).status; status != Status::ok) {
        return status;
      }
    }
    for (std::int32_t t = 0; t < tables_; ++t) { truncate_table(all, s, t, next); }
    open_layers(s, 0);
    return Status::ok;
  }

  void truncate_table(const CacheView& all, SequenceId s, std::int32_t t, Position next) noexcept {
    SequenceState& state = state_of(s, t);
    const std::int32_t kept = truncated_rows(all, s, t, next).kept;
    const std::int32_t rope = rope_position_at(all, s, t, next);
    for_each_head(all, s, t, [&](const HeadRef& head) {
      const auto stays = [&](std::int32_t r) {
        return r != state.append_row && head.position(r) < next;
      };
      std::int32_t from = state.extent() - 1;
      for (std::int32_t to = 0; to < kept; ++to) {
        if (stays(to)) { continue; }
        while (!stays(from)) { --from; }
        move_page_data(head, place_of(head, from), place_of(head, to));
        move_sequence_data(head, from, to);
        state.ordered = state.ordered && to == kept - 1;  // newer than the rows that follow
        --from;
      }
    });
    state.ordered = state.ordered || kept == 0;
    release_tail(s, t, pages_for(kept, params_.page_size));
    state.next_rope_position = rope;
    state.next_position = raw(next);
    state.live_rows = kept;
    state.rows_at_eviction = std::min(state.rows_at_eviction, kept);
    state.append_row = -1;
    state.open = false;
    writes_[table_index(s, t)] = {};
    touch(s, t);
  }

  // Releases the pages from entry `first` on, tail first.
  void release_tail(SequenceId s, std::int32_t t, std::int32_t first) noexcept {
    std::int32_t* const entries = row_of(s, t);
    for (std::int32_t e = pages_for(state_of(s, t).extent(), params_.page_size); e-- > first;) {
      release(PageId{entries[e]});
      entries[e] = raw(null_page);
    }
  }

  CacheView view_of(std::int32_t first, std::int32_t sequences) noexcept {
    const auto& p = params_;
    CacheView view;
    view.k = k_;
    view.v = v_;
    view.unrotated_keys = u_;
    view.page_size = p.page_size;
    view.pages = p.pages;
    view.kv_heads = p.kv_heads;
    view.layers = p.layers;
    view.sequences = sequences;
    view.scope = p.scope;
    view.table.ids = ids_.data() + table_index(SequenceId{first}, 0) * index(max_pages_);
    view.table.rows = {tables_,
                       p.scope == TableScope::group ? 0 : tables_ / p.layers,
                       p.scope == TableScope::head ? 1 : 0};
    view.table.row_stride = max_pages_;
    view.table.max_pages = max_pages_;
    view.states = states_.data() + table_index(SequenceId{first}, 0);
    view.writable.ref_counts = pool_.ref_counts();
    const std::size_t offset =
        index(first) * index(p.layers) * index(p.kv_heads) * index(p.max_rows);
    const auto plane = [&](auto& memory) {
      return memory == nullptr
                 ? SequencePlane{}
                 : SequencePlane::dense(memory.get() + offset, p.layers, p.kv_heads, p.max_rows);
    };
    view.positions = plane(positions_);
    view.rope_positions = plane(rope_positions_);
    view.score_sums = plane(sums_);
    view.score_compensations = plane(compensations_);
    return view;
  }

  Params params_;
  PagePool pool_;
  std::int32_t tables_ = 0;
  std::int32_t max_pages_ = 0;
  std::vector<std::int32_t> ids_;  // [max_sequences, tables, max_pages]
  std::vector<SequenceState> states_;
  std::vector<Write> writes_;
  std::vector<std::uint8_t> unwritten_;         // [max_sequences, layers] of the open step
  std::vector<std::int32_t> unwritten_layers_;  // [max_sequences]
  std::vector<bool> alive_;
  std::uint64_t clock_ = 0;
  Plane k_, v_, u_;
  std::unique_ptr<std::byte[]> keys_, values_, unrotated_;
  std::unique_ptr<Position[]>
      positions_;  // [max_sequences, layers, kv_heads, max_rows], as the next three
  std::unique_ptr<std::int32_t[]> rope_positions_;
  std::unique_ptr<float[]> sums_, compensations_;
};
static_assert(TableSink<PagedCache>);
static_assert(TableSink<PagedCache::Sink>);

}  // namespace kvtrim
