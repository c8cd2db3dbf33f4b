// SPDX-License-Identifier: Apache-2.0
#pragma once

// The one way the library sees a cache. Everything that differs between engines (strides, dense and CSR tables,
// per-head tables, separate K and V ids, padding, holes) is behind it and `for_each_run`.

#include <kvtrim/cache/page_table.hpp>
#include <kvtrim/cache/plane.hpp>
#include <kvtrim/cache/sequence_state.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvtrim {

/// An engine's KV cache, or one layer of it, for a batch of sequences. Non-owning, trivially copyable.
///
/// A row r of (sequence, layer, KV head) is entry `(r + first_row) / page_size` of its table, slot
/// `(r + first_row) % page_size`. Rows are numbered 0..live-1, except where `Removal::overwrite_slot` has left a hole
/// (`SequenceState::append_row`), which the next append fills.
struct CacheView {
  Plane k{};  ///< keys; absent only where no row ever moves
  Plane v{};  ///< values; absent (head_dim 0), of another head_dim, or part of the keys' rows
  Plane unrotated_keys{};                ///< keys before RoPE, moved with the rows; null base: none
  std::int32_t page_size = 0;            ///< rows per page
  std::int32_t pages = 0;                ///< pages in the pool: ids are below this
  std::int32_t kv_heads = 0;             ///< KV heads per layer
  std::int32_t layers = 1;               ///< layers
  std::int32_t layer_offset = 0;         ///< which layer of the model layer 0 is
  std::int32_t model_layers = 0;         ///< layers of the model; 0: those of the view
  std::int32_t sequences = 0;            ///< sequences
  TableScope scope = TableScope::group;  ///< what one table serves
  PageTable table{};                     ///< the tables
  const std::int32_t* lengths =
      nullptr;  ///< live rows, indexed by `length_rows`; null: taken from `states`
  const std::int32_t* last_page_len =
      nullptr;           ///< CSR: rows in the last page, by table row, instead of `lengths`
  RowMap length_rows{};  ///< index of a length
  const std::int32_t* first_rows = nullptr;  ///< [sequences] left padding in rows; null: none
  SequenceState* states = nullptr;  ///< [sequences, tables_per_sequence]; null: fresh prompts
  /// [sequences, tables_per_sequence] raised at every change of a table, by the engine and by the library: for engines
  /// without states, so that a plan is known to be stale; null: none.
  std::uint64_t* generations = nullptr;
  /// [sequences, tables_per_sequence] entries behind the used ones that the engine keeps for rows to come (drafts, look-ahead);
  /// null: none.
  const std::int32_t* reserved_pages = nullptr;
  Writable writable{};  ///< pages that may be written
  /// A row's slot follows from its position (null pages stand where others went), so no row moves: only whole pages leave, and
  /// never one that the next row falls into.
  bool fixed_rows = false;
  SequencePlane positions{};       ///< int32, `Position` of each row; absent: row r is position r
  SequencePlane rope_positions{};  ///< int32; absent: the same as the positions
  SequencePlane score_sums{};      ///< float, accumulated scores; absent if no policy needs them
  SequencePlane score_compensations{};  ///< float, rounding error of `score_sums`
  const PagePlane* page_planes =
      nullptr;                        ///< [page_plane_count] further data that moves with the rows
  std::int32_t page_plane_count = 0;  ///< how many
  const SequencePlane* more_planes = nullptr;  ///< [more_plane_count] further data indexed by row
  std::int32_t more_plane_count = 0;           ///< how many

  /// Layer of the model that layer `l` of the view is: what is indexed by it serves views of all layers and of one alike.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr LayerId model_layer(LayerId l) const noexcept {
    return LayerId{layer_offset + raw(l)};
  }
  /// Layers of the model.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t layers_of_model() const noexcept {
    return model_layers > 0 ? model_layers : layers;
  }
  /// Whether the view's layers are layers of the model.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool is_of_model() const noexcept {
    return layer_offset >= 0 && model_layers >= 0 && layer_offset <= layers_of_model() - layers;
  }

  /// Whether the view has such a sequence, layer and KV head: what all that follows takes for granted.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool has(SequenceId s,
                                                      LayerId l,
                                                      HeadId h) const noexcept {
    return raw(s) >= 0 && raw(s) < sequences && raw(l) >= 0 && raw(l) < layers && raw(h) >= 0 &&
           raw(h) < kv_heads;
  }

  /// Tables of one sequence: 1, layers, or layers * kv_heads.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t tables_per_sequence() const noexcept {
    return tables_of(scope, layers, kv_heads);
  }
  /// Index of the table that serves (layer, KV head).
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t table_of(LayerId l,
                                                                   HeadId h) const noexcept {
    return kvtrim::table_of(scope, kv_heads, l, h);
  }
  /// First layer that table `t` of a sequence serves.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr LayerId first_layer(std::int32_t t) const noexcept {
    return LayerId{scope == TableScope::group ? 0 : scope == TableScope::layer ? t : t / kv_heads};
  }
  /// First KV head that table `t` of a sequence serves.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr HeadId first_head(std::int32_t t) const noexcept {
    return HeadId{scope == TableScope::head ? t % kv_heads : 0};
  }
  /// Layers that one table serves.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t layers_per_table() const noexcept {
    return scope == TableScope::group ? layers : 1;
  }
  /// KV heads of a layer that one table serves.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t heads_per_table() const noexcept {
    return scope == TableScope::head ? 1 : kv_heads;
  }

  /// Index of table `t` of sequence `s` in `states`, `generations` and `reserved_pages`.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int64_t table_index(
      SequenceId s, std::int32_t t) const noexcept {
    return static_cast<std::int64_t>(raw(s)) * tables_per_sequence() + t;
  }
  /// Entries behind the used ones of table `t` that are kept for rows to come.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t reserved(SequenceId s,
                                                                   std::int32_t t) const noexcept {
    return reserved_pages == nullptr ? 0 : reserved_pages[table_index(s, t)];
  }

  /// Live rows of (sequence, layer, KV head).
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t live_rows(SequenceId s,
                                                                    LayerId l,
                                                                    HeadId h) const noexcept {
    KVTRIM_ASSERT(has(s, l, h) && "no such sequence, layer or KV head of the view");
    if (last_page_len != nullptr) {
      // 64 bits: the numbers are not trusted yet. What is no number of rows is refused as a length of -1.
      const std::int64_t n = std::int64_t{table.capacity(s, l, h)} - reserved(s, table_of(l, h));
      if (n == 0) { return 0; }
      const std::int64_t rows = (n - 1) * page_size + last_page_len[table.rows(s, l, h)];
      return n < 0 || rows < 0 || rows > 0x7FFF'FFFF ? -1 : static_cast<std::int32_t>(rows);
    }
    if (lengths != nullptr) { return lengths[length_rows(s, l, h)]; }
    // Not through `state`, which calls this function: functions that call each other are not inlined in a kernel.
    return states == nullptr ? 0 : states[table_index(s, table_of(l, h))].live_rows;
  }

  /// State of (sequence, layer, KV head); where the engine keeps none, that of a prompt from which nothing was evicted.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr SequenceState state(SequenceId s,
                                                                 LayerId l,
                                                                 HeadId h) const noexcept {
    KVTRIM_ASSERT(has(s, l, h) && "no such sequence, layer or KV head of the view");
    if (states != nullptr) { return states[table_index(s, table_of(l, h))]; }
    SequenceState fresh;
    fresh.live_rows = lengths != nullptr || last_page_len != nullptr ? live_rows(s, l, h) : 0;
    fresh.next_position = fresh.live_rows;
    fresh.next_rope_position = fresh.live_rows;
    return fresh;
  }

  /// Rows of left padding of sequence `s`.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t first_row(SequenceId s) const noexcept {
    return first_rows == nullptr ? 0 : first_rows[raw(s)];
  }

  /// Position of row `r`.
  [[nodiscard]] KVTRIM_HOST_DEVICE Position position(SequenceId s,
                                                     LayerId l,
                                                     HeadId h,
                                                     std::int32_t r) const noexcept {
    return positions ? positions.load<Position>(s, l, h, r) : Position{r};
  }

  /// Whether the positions of table `t`'s rows are known: there is a plane, or no row has gone as far as the states tell.
  [[nodiscard]] KVTRIM_HOST_DEVICE bool knows_positions(SequenceId s,
                                                        std::int32_t t) const noexcept {
    if (positions || states == nullptr) { return true; }
    const SequenceState& state = states[table_index(s, t)];
    return state.next_position == state.live_rows && state.append_row < 0;
  }

  /// Rope position of row `r`: what its key is rotated to.
  [[nodiscard]] KVTRIM_HOST_DEVICE std::int32_t rope_position(SequenceId s,
                                                              LayerId l,
                                                              HeadId h,
                                                              std::int32_t r) const noexcept {
    return rope_positions ? rope_positions.load<std::int32_t>(s, l, h, r)
                          : raw(position(s, l, h, r));
  }

  /// Page of entry `i` of a table, for the keys.
  [[nodiscard]] KVTRIM_HOST_DEVICE PageId k_page(SequenceId s,
                                                 LayerId l,
                                                 HeadId h,
                                                 std::int32_t i) const noexcept {
    KVTRIM_ASSERT(has(s, l, h) && "no such sequence, layer or KV head of the view");
    return table.page(table.row(s, l, h)[i]);
  }
  /// Page of entry `i` of a table, for the values.
  [[nodiscard]] KVTRIM_HOST_DEVICE PageId v_page(SequenceId s,
                                                 LayerId l,
                                                 HeadId h,
                                                 std::int32_t i) const noexcept {
    KVTRIM_ASSERT(has(s, l, h) && "no such sequence, layer or KV head of the view");
    return table.page(table.row(s, l, h)[i + table.v_offset]);
  }

  /// First byte of the key of row `r`.
  [[nodiscard]] KVTRIM_HOST_DEVICE std::byte* key(SequenceId s,
                                                  LayerId l,
                                                  HeadId h,
                                                  std::int32_t r) const noexcept {
    const std::int32_t place = r + first_row(s);
    return k.row(l, k_page(s, l, h, place / page_size), h, Slot{place % page_size});
  }
  /// First byte of the value of row `r`.
  [[nodiscard]] KVTRIM_HOST_DEVICE std::byte* value(SequenceId s,
                                                    LayerId l,
                                                    HeadId h,
                                                    std::int32_t r) const noexcept {
    const std::int32_t place = r + first_row(s);
    return v.row(l, v_page(s, l, h, place / page_size), h, Slot{place % page_size});
  }
};
static_assert(std::is_trivially_copyable_v<CacheView>);

namespace detail {
/// A view whose keys are the values of `view`: code that walks keys can then walk values, which are a plane and a table too.
[[nodiscard]] inline CacheView value_view(const CacheView& view) noexcept {
  CacheView values = view;
  values.k = view.v;
  values.table.ids += view.table.v_offset;
  values.table.v_offset = 0;
  return values;
}
}  // namespace detail

}  // namespace kvtrim
