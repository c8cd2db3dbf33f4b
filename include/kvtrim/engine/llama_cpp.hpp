// SPDX-License-Identifier: Apache-2.0
#pragma once

// llama.cpp names tokens by position (`llama_memory_seq_rm`, `_seq_add`) and its attention's columns by cell, and has no
// call that maps one to the other. Here is what lies between those and a plan; no header of llama.cpp is included.

#include <kvtrim/core/config.hpp>
#include <kvtrim/core/error.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/engine/tensor_view.hpp>
#include <kvtrim/evict/plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace kvtrim::llama_cpp {

/// The cells of one stream and layer, for engines that have llama.cpp's tensors in hand: keys `[cells, H, D]`, values the same
/// with flash attention, otherwise transposed, `[H, Dv, cells]`. A cell is a page of one row; the table of a sequence is
/// `CellMap::rows`. llama.cpp knows each cell's position, so no row moves: whole cells leave, the same in all heads and layers.
/// \throws as `tensor_view`
[[nodiscard]] inline CacheView cells_view(const Tensor<3>& keys,
                                          const Tensor<3>& values,
                                          bool transposed) {
  CacheView view = tensor_view(keys, "PHD", values, transposed ? "HDP" : "PHD");
  view.fixed_rows = true;
  return view;
}

/// The same for quantised keys and values (which need flash attention): `[cells, H, D]` in blocks of 32 features.
///
/// \param keys      `Plane::blocks` of one layer and stream
/// \param values    the same
/// \param cells     of the stream
/// \param kv_heads  of the layer
/// \throws std::invalid_argument if `cells` is below 1
[[nodiscard]] inline CacheView cells_view(const Plane& keys,
                                          const Plane& values,
                                          std::int32_t cells,
                                          std::int32_t kv_heads) {
  if (cells < 1) {
    throw_invalid_argument("kvtrim::llama_cpp::cells_view: {} cells must be at least 1", cells);
  }
  CacheView view;
  view.k = keys;
  view.v = values;
  view.page_size = 1;
  view.pages = cells;
  view.kv_heads = kv_heads;
  view.fixed_rows = true;
  return view;
}

/// Positions [begin, end), never negative: the bounds of one `llama_memory_seq_rm` or `llama_memory_seq_add`, where a negative
/// bound would mean "from the first" or "to the last".
struct PositionRange {
  std::int32_t begin = 0;  ///< first position
  std::int32_t end = 0;    ///< one past the last

  /// Whether two ranges are the same.
  [[nodiscard]] friend constexpr bool operator==(PositionRange, PositionRange) = default;
};

/// Calls f(PositionRange) for each run of consecutive positions.
///
/// \param positions  ascending
/// \par Complexity
/// O(positions); no allocation
template <class F>
constexpr void for_each_range(std::span<const Position> positions, F&& f) {
  for (std::size_t i = 0; i < positions.size();) {
    std::size_t end = i + 1;
    while (end < positions.size() && raw(positions[end]) == raw(positions[end - 1]) + 1) { ++end; }
    f(PositionRange{raw(positions[i]), raw(positions[end - 1]) + 1});
    i = end;
  }
}

/// Calls f(PositionRange) for each contiguous range of positions that leaves sequence `s`: one `llama_memory_seq_rm` each.
///
/// \returns `ok`; the plan's status if it is not usable. `unequal_budget`: layers or KV heads keep different rows, but a cell
///   holds the row of all of them. `bad_options`: positions are unknown. f was not called then
/// \par Complexity
/// O(evicted rows of all layers and KV heads); no allocation
template <class F>
Status for_each_evicted_range(const PlanView& plan, SequenceId s, F&& f) {
  if (!usable(plan.status())) { return plan.status(); }
  if (plan.empty()) { return Status::ok; }
  if (!plan.positions_known()) { return Status::bad_options; }
  const auto gone = plan.evicted(s, LayerId{0}, HeadId{0});
  for (std::int32_t i = 0; i < plan.layers() * plan.kv_heads(); ++i) {
    const auto other = plan.evicted(s, LayerId{i / plan.kv_heads()}, HeadId{i % plan.kv_heads()});
    if (!std::ranges::equal(gone, other)) { return Status::unequal_budget; }
  }
  for_each_range(gone, f);
  return Status::ok;
}

/// Calls f(PositionRange, delta) for what `llama_memory_seq_add` must add so that the positions become 0, 1, 2, ...; in the
/// order in which no range meets one that was moved before it. Ranges that stay are left out.
///
/// \param positions  of the rows that are left, ascending
/// \par Complexity
/// O(positions); no allocation
template <class F>
constexpr void for_each_shift(std::span<const Position> positions, F&& f) {
  std::int32_t rank = 0;
  for_each_range(positions, [&](PositionRange range) {
    if (range.begin != rank) { f(range, rank - range.begin); }
    rank += range.end - range.begin;
  });
}

/// Layer in the name of a tensor of the graph: 12 of "kq_soft_max-12" with the stem "kq_soft_max-", or of "cache_k_l12 (view)"
/// with "cache_k_l"; -1: another tensor.
[[nodiscard]] constexpr std::int32_t layer_of(std::string_view name,
                                              std::string_view stem) noexcept {
  if (!name.starts_with(stem)) { return -1; }
  name.remove_prefix(stem.size());
  std::int32_t layer = -1;
  while (!name.empty() && name.front() >= '0' && name.front() <= '9' && layer < 100'000) {
    layer = std::max(0, layer) * 10 + (name.front() - '0');
    name.remove_prefix(1);
  }
  return name.empty() || name.starts_with(' ') ? layer : -1;
}

/// Which cell of a unified cache holds which position of which sequence: the engine's own copy of what llama.cpp knows.
///
/// It is told of every write (the cells of a micro-batch are `src[1]` of the `GGML_OP_SET_ROWS` into `cache_k`, in batch order)
/// and of every `llama_memory_seq_rm`, `_seq_cp` and `_seq_add`; `first_wrong_column` compares it with a mask.
///
/// \par Complexity
/// `write` O(1); the others O(rows of the sequence) unless they say otherwise
/// \par Thread-safety
/// one thread
class CellMap {
 public:
  /// An empty cache.
  /// \throws std::invalid_argument if either is below 1
  CellMap(std::int32_t cells, std::int32_t sequences) {
    if (cells < 1 || sequences < 1) {
      throw_invalid_argument(
          "kvtrim::llama_cpp::CellMap: cells {} and sequences {} must be at least 1",
          cells,
          sequences);
    }
    holders_.assign(index(cells), 0);
    at_.assign(index(cells), Position{-1});
    rows_.resize(index(sequences));
  }

  /// Cells of the cache.
  [[nodiscard]] std::int32_t cells() const noexcept {
    return static_cast<std::int32_t>(holders_.size());
  }
  /// Sequences that it may hold.
  [[nodiscard]] std::int32_t sequences() const noexcept {
    return static_cast<std::int32_t>(rows_.size());
  }
  /// Cells in use; one that sequences share counts once.
  [[nodiscard]] std::int32_t used() const noexcept { return used_; }
  /// Cells in use at most, so far.
  [[nodiscard]] std::int32_t peak() const noexcept { return peak_; }
  /// Cells of a sequence, by ascending position: row r of the sequence is column `rows(s)[r]` of the attention.
  /// \pre 0 <= s < sequences()
  [[nodiscard]] std::span<const std::int32_t> rows(std::int32_t s) const noexcept {
    KVTRIM_ASSERT(has(s));
    return rows_[index(s)];
  }
  /// Position that a cell holds.
  /// \pre 0 <= cell < cells(), and it is in use
  [[nodiscard]] Position position(std::int32_t cell) const noexcept { return at_[index(cell)]; }

  /// A token was written.
  ///
  /// \returns `ok`; otherwise nothing was changed. `page_out_of_range`: no such cell; `no_such_sequence`; `page_twice`: the cell
  ///   is in use; `states_disagree`: the position is not above those of the sequence
  Status write(std::int64_t cell, std::int32_t s, Position position) {
    if (cell < 0 || cell >= cells()) { return Status::page_out_of_range; }
    if (!has(s)) { return Status::no_such_sequence; }
    if (holders_[index(cell)] != 0) { return Status::page_twice; }
    std::vector<std::int32_t>& rows = rows_[index(s)];
    if (raw(position) < 0 || (!rows.empty() && position <= at_[index(rows.back())])) {
      return Status::states_disagree;
    }
    rows.push_back(static_cast<std::int32_t>(cell));
    holders_[index(cell)] = 1;
    at_[index(cell)] = position;
    peak_ = std::max(peak_, ++used_);
    return Status::ok;
  }
  /// `llama_memory_seq_cp` of all positions: `to` has the cells of `from`, and nothing else.
  /// \pre both are sequences; `to` is empty
  void copy(std::int32_t from, std::int32_t to) {
    KVTRIM_ASSERT(has(from) && has(to) && from != to && rows_[index(to)].empty());
    rows_[index(to)] = rows_[index(from)];
    for (const std::int32_t cell : rows_[index(to)]) { ++holders_[index(cell)]; }
  }
  /// `llama_memory_seq_rm(memory, s, range.begin, range.end)` succeeded.
  /// \pre 0 <= s < sequences()
  void remove(std::int32_t s, PositionRange range) noexcept {
    KVTRIM_ASSERT(has(s));
    std::vector<std::int32_t>& rows = rows_[index(s)];
    const auto gone = std::remove_if(rows.begin(), rows.end(), [&](std::int32_t cell) {
      if (!within(cell, range)) { return false; }
      if (--holders_[index(cell)] == 0) { --used_; }
      return true;
    });
    rows.erase(gone, rows.end());
  }
  /// The sequence ended.
  /// \pre 0 <= s < sequences()
  void clear(std::int32_t s) noexcept { remove(s, {0, 0x7FFF'FFFF}); }
  /// `llama_memory_seq_add(memory, s, range.begin, range.end, delta)` was called. Cells whose position becomes negative are free
  /// afterwards, as in llama.cpp.
  /// \pre 0 <= s < sequences(); no cell of `s` is shared (its position is one for all); the order of the sequence's positions
  ///   stays (`for_each_shift`)
  void shift(std::int32_t s, PositionRange range, std::int32_t delta) noexcept {
    KVTRIM_ASSERT(has(s));
    if (range.begin < -delta) { remove(s, {range.begin, std::min(range.end, -delta)}); }
    for (const std::int32_t cell : rows_[index(s)]) {
      KVTRIM_ASSERT(holders_[index(cell)] == 1);
      if (within(cell, range)) { at_[index(cell)] = Position{raw(at_[index(cell)]) + delta}; }
    }
  }

  /// First column of a mask's row that contradicts this map; -1: none. A query of sequence `s` at `position` sees exactly the
  /// sequence's cells up to its position (in a layer without a sliding window).
  ///
  /// \param mask  one query's row of `src[1]` of `kq_soft_max`: -infinity where it sees nothing
  /// \par Complexity
  /// O(columns + rows of the sequence), O(columns * rows) if there is one; no allocation
  [[nodiscard]] std::int32_t first_wrong_column(std::int32_t s,
                                                Position position,
                                                std::span<const float> mask) const noexcept {
    const std::span<const std::int32_t> cells = rows(s);
    const auto later =
        std::upper_bound(cells.begin(), cells.end(), position, [&](Position p, std::int32_t c) {
          return p < at_[index(c)];
        });
    const auto seen = cells.first(static_cast<std::size_t>(later - cells.begin()));
    for (const std::int32_t cell : seen) {
      if (index(cell) >= mask.size() || !shows(mask[index(cell)])) { return cell; }
    }
    if (visible(mask) == static_cast<std::int32_t>(seen.size())) { return -1; }
    for (std::size_t c = 0; c < mask.size(); ++c) {
      if (shows(mask[c]) && std::ranges::find(seen, static_cast<std::int32_t>(c)) == seen.end()) {
        return static_cast<std::int32_t>(c);
      }
    }
    return -1;
  }
  /// Columns that a mask's row shows.
  [[nodiscard]] static std::int32_t visible(std::span<const float> mask) noexcept {
    return static_cast<std::int32_t>(std::count_if(mask.begin(), mask.end(), shows));
  }

 private:
  static constexpr std::size_t index(std::int64_t i) noexcept {
    return static_cast<std::size_t>(i);
  }
  // Finite biases (ALiBi's) are far above what stands for minus infinity.
  static constexpr bool shows(float mask) noexcept { return mask > -1e30F; }
  [[nodiscard]] bool has(std::int32_t s) const noexcept { return s >= 0 && s < sequences(); }
  [[nodiscard]] bool within(std::int32_t cell, PositionRange range) const noexcept {
    const std::int32_t position = raw(at_[index(cell)]);
    return position >= range.begin && position < range.end;
  }

  std::vector<std::int32_t> holders_;            // [cells] sequences that hold it
  std::vector<Position> at_;                     // [cells]
  std::vector<std::vector<std::int32_t>> rows_;  // [sequences] cells by ascending position
  std::int32_t used_ = 0;
  std::int32_t peak_ = 0;
};

/// Copies what one query pays to the rows of a sequence out of a row of the attention, whose columns are cells.
///
/// \param columns     a row of `kq_soft_max`, at least as wide as the highest of `cells`
/// \param cells       `CellMap::rows`
/// \param[out] by_row as many as `cells`
/// \par Complexity
/// O(cells); no allocation
inline void gather_rows(std::span<const float> columns,
                        std::span<const std::int32_t> cells,
                        float* by_row) noexcept {
  for (std::size_t r = 0; r < cells.size(); ++r) {
    KVTRIM_ASSERT(static_cast<std::size_t>(cells[r]) < columns.size());
    by_row[r] = columns[static_cast<std::size_t>(cells[r])];
  }
}

}  // namespace kvtrim::llama_cpp
