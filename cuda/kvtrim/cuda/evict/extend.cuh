// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows for the next tokens, on the device: the counterpart of `PagedCache::try_extend` and `written`.
//
// Who gets pages is decided for all sequences in their order, so that the same cache always gets the same pages. Every block
// decides it anew, from states that nobody changes before the last block does, and fills in the rows of its own sequences. The
// blocks are so few that they read about a million states in all. Over 400 lines: one launch does it, and its parts share what
// was decided.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/device_tables.cuh>

#include <cstdint>

namespace kvtrim::cuda {

/// What `extend` is given besides the cache.
struct DeviceExtend {
  const std::int32_t* rows = nullptr;  ///< device, [sequences]: new rows of each; null: `each`
  std::int32_t each = 1;               ///< new rows of every sequence
  std::int32_t max_rows =
      0;  ///< rows that a table may have, padding included; 0: as many as its entries hold
  Status* statuses = nullptr;  ///< device, [sequences]: receives what became of each
  /// Device, [sequences, layers]: which layers are not written yet, for `written` layer by layer; null: it is for all at once.
  std::uint8_t* unwritten = nullptr;
};

namespace detail {

inline constexpr int extend_threads = 256;

KVTRIM_DEVICE std::int32_t rows_to_add(const DeviceExtend& what, SequenceId s) {
  return what.rows != nullptr ? what.rows[raw(s)] : what.each;
}

/// What a longer table takes.
struct Extension {
  Status status = Status::ok;
  std::int32_t first_entry = 0;  // of the new pages
  std::int32_t entries = 0;      // how many there are
};

/// Whether the page of entry `e`, which is in use, may be written.
KVTRIM_DEVICE Status
target_status(const CacheView& view, SequenceId s, LayerId l, HeadId h, std::int32_t e) {
  const PageId k = view.k_page(s, l, h, e);
  const PageId v = view.v_page(s, l, h, e);
  const auto in_pool = [&](PageId p, bool of_values) {
    return raw(p) >= 0 && raw(p) < view.pages && view.table.on_step(p, of_values);
  };
  if (!in_pool(k, false) || !in_pool(v, view.table.v_offset != 0)) {
    return Status::page_out_of_range;
  }
  return view.writable(k, l, h) && view.writable(v, l, h) ? Status::ok : Status::shared_page;
}

/// What table `t` of a sequence needs for `n` more rows.
KVTRIM_DEVICE Extension extension_of(
    const CacheView& view, const DeviceExtend& what, SequenceId s, std::int32_t t, std::int32_t n) {
  Extension x;
  const LayerId l = view.first_layer(t);
  const HeadId h = view.first_head(t);
  const SequenceState state = view.state(s, l, h);
  x.status = kvtrim::detail::check_length(view, s, t).status;
  if (x.status != Status::ok) { return x; }
  if (state.open) { x.status = Status::step_open; }
  if (state.applied) { x.status = Status::eviction_open; }
  if (x.status != Status::ok || n == 0) { return x; }
  const std::int64_t first = view.first_row(s);
  const std::int64_t rows = std::int64_t{state.live_rows} + n + first;
  std::int64_t most = std::int64_t{view.table.max_pages} * view.page_size;
  if (what.max_rows > 0 && what.max_rows < most) { most = what.max_rows; }
  if (n < 0 || rows > most) {
    x.status = n < 0 ? Status::bad_options : Status::too_many_rows;
    return x;
  }
  const auto used = static_cast<std::int32_t>(kvtrim::detail::used_entries(view, s, l, h));
  x.first_entry = used;
  x.entries = pages_for(static_cast<std::int32_t>(rows), view.page_size) - used;
  // Rows go into the hole, and behind the last row of a page that is not full.
  const bool hole = state.append_row >= 0;
  const auto hole_entry = static_cast<std::int32_t>((state.append_row + first) / view.page_size);
  const auto tail_entry = static_cast<std::int32_t>((state.extent() + first) / view.page_size);
  if (hole && hole_entry < used) { x.status = target_status(view, s, l, h, hole_entry); }
  if (n > (hole ? 1 : 0) && tail_entry < used && x.status == Status::ok) {
    x.status = target_status(view, s, l, h, tail_entry);
  }
  return x;
}

/// Row of new token `i`: the first one fills the hole.
KVTRIM_DEVICE std::int32_t new_row(const SequenceState& state, std::int32_t i) {
  const bool hole = state.append_row >= 0;
  return hole && i == 0 ? state.append_row : state.extent() + i - (hole ? 1 : 0);
}

struct ExtendShared {
  BlockScan<extend_threads, std::int32_t> counts;
  unsigned long long faults[extend_threads];  // of sequences: order, table, status; all bits: none
  std::int32_t pages[extend_threads];         // that they need
  std::int32_t first[extend_threads];         // how many are taken before
  std::int32_t last;
};

/// Decides for sequences [base, base + count) who is extended: what is left of `shared.faults` says so. `taken` is how many pages
/// are taken from the list so far. For a whole block.
KVTRIM_DEVICE void share_pages(const CacheView& view,
                               const DeviceExtend& what,
                               std::int32_t there,
                               std::int32_t base,
                               std::int32_t count,
                               std::int32_t& taken,
                               ExtendShared& shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t tables = view.tables_per_sequence();
  const std::int32_t each = view.table.v_offset != 0 ? 2 : 1;
  shared.faults[thread] = ~0ULL;
  shared.pages[thread] = 0;
  __syncthreads();
  for (std::int64_t j = thread; j < std::int64_t{count} * tables; j += extend_threads) {
    const auto k = static_cast<std::int32_t>(j / tables);
    const auto t = static_cast<std::int32_t>(j % tables);
    const SequenceId s{base + k};
    const Extension x = extension_of(view, what, s, t, rows_to_add(what, s));
    if (x.status == Status::ok) {
      if (x.entries > 0) { atomicAdd(&shared.pages[k], x.entries * each); }
      continue;
    }
    // As the host: an eviction, then a step under way, anywhere in the sequence; then the first table's fault.
    const unsigned long long order = x.status == Status::eviction_open ? 0
                                     : x.status == Status::step_open   ? 1
                                                                       : 2;
    atomicMin(&shared.faults[k],
              order << 56U | static_cast<unsigned long long>(t) << 8U |
                  static_cast<unsigned long long>(x.status));
  }
  __syncthreads();
  const std::int32_t mine = shared.faults[thread] == ~0ULL ? shared.pages[thread] : 0;
  std::int32_t all = 0;
  const std::int32_t before = block_sum_before(mine, shared.counts, all);
  shared.first[thread] = taken + before;
  if (all <= there - taken) {
    taken += all;
    __syncthreads();
    return;
  }
  // Too few: in the order of sequences, whoever still finds enough.
  __syncthreads();
  if (thread == 0) {
    std::int32_t next = taken;
    for (std::int32_t k = 0; k < count; ++k) {
      if (shared.faults[k] != ~0ULL) { continue; }
      if (shared.pages[k] > there - next) {
        shared.faults[k] = static_cast<unsigned long long>(Status::out_of_pages);
        continue;
      }
      shared.first[k] = next;
      next += shared.pages[k];
    }
    shared.last = next;
  }
  __syncthreads();
  taken = shared.last;
  __syncthreads();
}

/// Puts new pages into the tables of a sequence, each with this one owner. False if the list names pages that the pool does not
/// have: nothing was written. For a whole block.
KVTRIM_DEVICE bool take_pages(const CacheView& view,
                              const DeviceTables& out,
                              const DeviceExtend& what,
                              SequenceId s,
                              std::int32_t there,
                              std::int32_t first,
                              std::int32_t count,
                              ExtendShared& shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t each = view.table.v_offset != 0 ? 2 : 1;
  const std::int32_t* const top = out.free.ids + (there - first);  // taken from the end
  bool bad = false;
  for (std::int32_t k = thread; k < count; k += extend_threads) {
    const PageId p{top[-1 - k]};
    bad = bad || raw(p) < 0 || raw(p) >= view.pages || !view.table.on_step(p, k % each == 1);
  }
  if (__syncthreads_or(bad) != 0) { return false; }
  const std::int32_t tables = view.tables_per_sequence();
  std::int32_t done = 0;
  for (std::int32_t base = 0; base < tables; base += extend_threads) {
    const std::int32_t t = base + thread;
    Extension x;
    if (t < tables) { x = extension_of(view, what, s, t, rows_to_add(what, s)); }
    std::int32_t here = 0;
    const std::int32_t mine = x.entries > 0 ? x.entries : 0;
    const std::int32_t before = done + block_sum_before(mine, shared.counts, here);
    done += here;
    if (mine == 0) { continue; }
    const LayerId l = view.first_layer(t);
    const HeadId h = view.first_head(t);
    std::int32_t* const entries =
        out.ids + view.table.rows(s, l, h) * view.table.row_stride + x.first_entry;
    const auto take = [&](std::int64_t entry, std::int32_t page) {
      entries[entry] = page;
      if (out.ref_counts != nullptr) {
        out.ref_counts[view.writable.index(PageId{page}, l, h)] = 1;
      }
    };
    for (std::int32_t e = 0; e < mine; ++e) {
      take(e, top[-1 - (before + e) * each]);
      if (each == 2) { take(e + view.table.v_offset, top[-2 - (before + e) * each]); }
    }
  }
  return true;
}

/// Gives the new rows of a sequence their positions and scores of 0. For a whole block.
KVTRIM_DEVICE void fill_rows(const CacheView& view, SequenceId s, std::int32_t n) {
  using kvtrim::detail::moves_with;
  const std::int64_t heads = static_cast<std::int64_t>(view.layers) * view.kv_heads;
  for (std::int64_t x = threadIdx.x; x < heads * n; x += extend_threads) {
    const auto head = static_cast<std::int32_t>(x / n);
    const auto i = static_cast<std::int32_t>(x % n);
    const LayerId l{head / view.kv_heads};
    const HeadId h{head % view.kv_heads};
    const SequenceState state = view.state(s, l, h);
    const std::int32_t row = new_row(state, i);
    const auto put = [&](const SequencePlane& p, auto value) {
      if (moves_with(p, l, h)) { p.at<decltype(value)>(s, l, h, row) = value; }
    };
    put(view.positions, state.next_position + i);
    put(view.rope_positions, state.next_rope_position + i);
    put(view.score_sums, 0.0F);
    put(view.score_compensations, 0.0F);
  }
}

/// The state of a table that got `n` more rows.
KVTRIM_DEVICE void extend_state(SequenceState& state, std::int32_t n) {
  if (state.append_row >= 0) {
    // The new row in the hole is newer than the rows that follow it.
    state.ordered = state.ordered && state.append_row == state.extent() - 1;
    state.append_row = -1;
  }
  state.live_rows += n;
  state.next_position += n;
  state.next_rope_position += n;
  ++state.steps;
  ++state.generation;
  state.open = true;
}

// A block: every sequence whose number is its own modulo the blocks. The last block changes the states.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(extend_threads, 2)
    extend_kernel(CacheView view, DeviceTables out, DeviceExtend what) {
  KVTRIM_SHARED(ExtendShared, shared, );
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t listed = *out.free.count;
  const std::int32_t there = listed < 0                   ? 0
                             : listed < out.free.capacity ? listed
                                                          : out.free.capacity;
  std::int32_t taken = 0;
  for (std::int32_t base = 0; base < view.sequences; base += extend_threads) {
    const std::int32_t rest = view.sequences - base;
    const std::int32_t count = rest < extend_threads ? rest : extend_threads;
    share_pages(view, what, there, base, count, taken, shared);
    for (std::int32_t k = 0; k < count; ++k) {
      const SequenceId s{base + k};
      if (raw(s) % static_cast<std::int32_t>(gridDim.x) != static_cast<std::int32_t>(blockIdx.x)) {
        continue;
      }
      const unsigned long long fault = shared.faults[k];
      Status status = fault == ~0ULL ? Status::ok : static_cast<Status>(fault & 0xFFU);
      const std::int32_t n = rows_to_add(what, s);
      if (status == Status::ok && n > 0) {
        if (take_pages(view, out, what, s, there, shared.first[k], shared.pages[k], shared)) {
          fill_rows(view, s, n);
          for (std::int32_t l = thread; what.unwritten != nullptr && l < view.layers;
               l += extend_threads) {
            what.unwritten[static_cast<std::int64_t>(raw(s)) * view.layers + l] = 1;
          }
        } else {
          status = Status::page_out_of_range;
        }
      }
      if (thread == 0) { what.statuses[raw(s)] = status; }
    }
    __syncthreads();
  }
  if (!last_block(out.free.count + 1, &shared.last)) { return; }
  const std::int32_t tables = view.tables_per_sequence();
  for (std::int64_t i = thread; i < std::int64_t{view.sequences} * tables; i += extend_threads) {
    const SequenceId s{static_cast<std::int32_t>(i / tables)};
    const auto t = static_cast<std::int32_t>(i % tables);
    const std::int32_t n = rows_to_add(what, s);
    if (what.statuses[raw(s)] != Status::ok || n == 0) { continue; }
    SequenceState state = view.states[i];
    extend_state(state, n);
    view.states[i] = state;
    if (view.generations != nullptr) { ++view.generations[i]; }
    if (out.lengths != nullptr) {
      out.lengths[view.length_rows(s, view.first_layer(t), view.first_head(t))] = state.live_rows;
    }
  }
  if (thread == 0) { *out.free.count = there - taken; }
}

// A thread: one sequence.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(extend_threads)
    written_kernel(CacheView view, LayerId layer, std::uint8_t* unwritten) {
  const std::int32_t first = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  const auto step = static_cast<std::int32_t>(gridDim.x * blockDim.x);
  const bool all = raw(layer) < 0;
  for (std::int32_t i = first; i < view.sequences; i += step) {
    const SequenceId s{i};
    bool left = false;
    if (unwritten != nullptr) {
      std::uint8_t* const layers = unwritten + static_cast<std::int64_t>(i) * view.layers;
      for (std::int32_t l = 0; l < view.layers; ++l) {
        if (all || l == raw(layer)) { layers[l] = 0; }
        left = left || layers[l] != 0;
      }
    }
    if (all || view.scope == TableScope::group) {
      for (std::int32_t t = 0; !left && t < view.tables_per_sequence(); ++t) {
        view.states[view.table_index(s, t)].open = false;
      }
      continue;
    }
    for (std::int32_t h = 0; h < (view.scope == TableScope::head ? view.kv_heads : 1); ++h) {
      view.states[view.table_index(s, view.table_of(layer, HeadId{h}))].open = false;
    }
  }
}

/// Blocks of `extend_kernel`: each looks at every table.
[[nodiscard]] inline unsigned extend_grid(const CacheView& view) noexcept {
  const std::int64_t tables =
      static_cast<std::int64_t>(view.sequences) * view.tables_per_sequence();
  const std::int64_t most = (std::int64_t{1} << 20U) / (tables < 1 ? 1 : tables);
  const std::int64_t wanted = bounded_grid(view.sequences);
  return static_cast<unsigned>(wanted < most ? wanted : most < 1 ? 1 : most);
}

}  // namespace detail

/// Reserves rows for the next tokens of every sequence in all layers, all or nothing for each sequence, and opens a step.
///
/// The rows get their positions, and scores of 0; what else is indexed by row (`CacheView::more_planes`) is the engine's. The first
/// row fills the hole that the last eviction left. New pages are taken from the end of `tables.free`, in the order of
/// sequences, and have one owner; a sequence that does not find enough takes none.
///
/// \param view    pointers inside it are device pointers; a dense table with states, without reserved pages
/// \param tables  the engine's arrays, writable; `tables.free` is the list of free pages
/// \param what    how many rows; where the statuses go: `ok`; `out_of_pages`, `too_many_rows`, `step_open`, `eviction_open`,
///   `shared_page` (a new row would fall into a page that others hold: the host copies it), `page_out_of_range` (in the table, or
///   in the list), `bad_options` (a negative number) or a fault of the length: nothing was changed
/// \returns `cudaErrorInvalidValue` before any launch for a view or arrays of another kind; otherwise the launch's status
/// \par Complexity
/// O(tables + new rows * layers * KV heads)
/// \par Stream
/// asynchronous on `stream`, one launch; never synchronises, allocates nothing, may be captured into a graph
[[nodiscard]] inline cudaError_t extend(const CacheView& view,
                                        const DeviceTables& tables,
                                        const DeviceExtend& what,
                                        cudaStream_t stream) noexcept {
  const auto fits_int32 = [](const SequencePlane& p) { return !p || p.element_bytes == 4; };
  if (view.sequences < 0 || view.layers < 1 || view.kv_heads < 1 || view.page_size < 1 ||
      view.states == nullptr || view.table.indptr != nullptr || view.table.ids == nullptr ||
      view.last_page_len != nullptr || view.reserved_pages != nullptr || tables.ids == nullptr ||
      (view.lengths != nullptr && tables.lengths == nullptr) || !tables.free ||
      tables.free.capacity < 0 || what.statuses == nullptr || what.each < 0 ||
      !fits_int32(view.positions) || !fits_int32(view.rope_positions) ||
      !fits_int32(view.score_sums) || !fits_int32(view.score_compensations)) {
    return cudaErrorInvalidValue;
  }
  if (view.sequences == 0) { return cudaSuccess; }
  return detail::launch(detail::extend_kernel<>,
                        dim3(detail::extend_grid(view)),
                        dim3(detail::extend_threads),
                        0,
                        stream,
                        view,
                        tables,
                        what);
}

/// Marks a layer of the open step as written in every sequence: the tables whose layers are all written are closed. For all
/// layers at once, `DeviceStepOptions::written` needs no launch of its own.
///
/// \param layer      of the view; -1: all
/// \param unwritten  as given to `extend`; needed where one table serves several layers and `layer` is one of them
/// \returns `cudaErrorInvalidValue` before any launch if there is no such layer, no states, or no `unwritten` where it is needed
/// \par Complexity
/// O(sequences * layers)
/// \par Stream
/// asynchronous on `stream`, one launch; may be captured into a graph
[[nodiscard]] inline cudaError_t written(const CacheView& view,
                                         LayerId layer,
                                         std::uint8_t* unwritten,
                                         cudaStream_t stream) noexcept {
  const bool one_of_several = raw(layer) >= 0 && view.scope == TableScope::group && view.layers > 1;
  if (view.states == nullptr || view.sequences < 0 || raw(layer) < -1 ||
      raw(layer) >= view.layers || (one_of_several && unwritten == nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (view.sequences == 0) { return cudaSuccess; }
  const std::int64_t blocks =
      (static_cast<std::int64_t>(view.sequences) + detail::extend_threads - 1) /
      detail::extend_threads;
  return detail::launch(detail::written_kernel<>,
                        dim3(detail::bounded_grid(blocks)),
                        dim3(detail::extend_threads),
                        0,
                        stream,
                        view,
                        layer,
                        unwritten);
}

}  // namespace kvtrim::cuda
