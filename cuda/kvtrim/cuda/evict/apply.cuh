// SPDX-License-Identifier: Apache-2.0
#pragma once

// Gather-compaction: moves what a device plan says (keys, values, page planes and sequence planes), all ways of removal in one
// launch. The specification is kvtrim::apply.
//
// Moves through lists (holes filled from the tail, an overwritten slot, a pack into spare pages) read and write disjoint
// rows: tiles of 32 rows, no barrier between them. A pack in place reads what it will overwrite: one block walks one chain
// (sequence, layer, KV head, plane) forward, all reads of a tile before its writes, with the next tile's reads in flight.
// Over 400 lines: both kinds of move share the planes.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/check.cuh>
#include <kvtrim/cuda/evict/detail/finish.cuh>
#include <kvtrim/cuda/evict/detail/fits.cuh>
#include <kvtrim/cuda/evict/detail/references.cuh>
#include <kvtrim/cuda/evict/detail/renumber.cuh>
#include <kvtrim/cuda/evict/detail/row_plane.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

namespace detail {

inline constexpr int move_threads = 256;
inline constexpr int pack_batch = 4;  // units per thread in a tile of a chain
inline constexpr int pack_stages = 2;
inline constexpr std::size_t pack_shared_bytes =
    sizeof(uint4) * pack_stages * pack_batch * move_threads;

/// One unit of global memory that is not used again: bypasses the first-level cache, evicted first from the second.
template <class T>
KVTRIM_DEVICE T load_once(const std::byte* p) {
  return __ldcs(reinterpret_cast<const T*>(p));
}
template <class T>
KVTRIM_DEVICE void store_once(std::byte* p, T value) {
  __stcs(reinterpret_cast<T*>(p), value);
}

/// Pages and slot of a row.
struct DevicePlace {
  PageId k_page;
  PageId v_page;
  Slot slot;
};

/// Place of a row according to the current tables.
KVTRIM_DEVICE DevicePlace
old_place(const CacheView& view, SequenceId s, LayerId l, HeadId h, std::int32_t row) {
  const std::int32_t at = row + view.first_row(s);
  return {view.k_page(s, l, h, at / view.page_size),
          view.v_page(s, l, h, at / view.page_size),
          Slot{at % view.page_size}};
}
/// Place of a row according to the plan.
KVTRIM_DEVICE DevicePlace new_place(const DevicePlan& plan,
                                    std::int64_t table,
                                    std::int32_t first_row,
                                    std::int32_t row) {
  const std::int32_t at = row + first_row;
  const std::int32_t* const pages = plan.pages_of(table) + at / plan.page_size;
  return {PageId{pages[0]}, PageId{pages[plan.entries]}, Slot{at % plan.page_size}};
}
KVTRIM_DEVICE std::byte* row_in(const RowPlane& p, LayerId l, HeadId h, const DevicePlace& at) {
  return p.row(l, p.of_values ? at.v_page : at.k_page, h, at.slot);
}

/// Move `k` of a KV head that moves through a list; with `every_row`, of row `k`: from -1, it stays where it is.
struct Move {
  std::int32_t from;
  std::int32_t to;
};
KVTRIM_DEVICE Move move_of(const DevicePlan& plan,
                           const TablePlan& table,
                           const HeadPlan& head,
                           std::int64_t table_index,
                           std::int64_t index,
                           std::int32_t k,
                           bool every_row) {
  if (table.removal == Removal::overwrite_slot) {
    return {table.append_row >= 0 ? table.append_row : table.extent_before - 1, head.victim};
  }
  const RowLists rows = plan.lists_of(index);
  if (every_row) {  // holes are filled, and some pages replaced
    const std::int32_t holes = rows.gone_below(k);
    if (holes < rows.gone_count && rows.gone[holes] == k) {
      return {rows.kept_row(head.kept - rows.gone_below(head.kept) + holes), k};
    }
    return {plan.sources_of(table_index)[(k + table.first_row) / plan.page_size] < 0 ? k : -1, k};
  }
  if (table.spare_pages > 0) { return {rows.kept_row(k), k}; }
  return {rows.kept_row(head.kept - static_cast<std::int32_t>(head.moved) + k), rows.gone[k]};
}

/// Rows that a block moves.
struct MoveShared {
  DevicePlace from[move_tile];
  DevicePlace to[move_tile];
  Move rows[move_tile];
  std::int32_t count;  // of the rows of a tile, those that move
};

/// Copies the rows of the tile in units of `T`, with four of them in flight in each thread.
template <class T>
KVTRIM_DEVICE void move_units(
    const RowPlane& p, LayerId l, HeadId h, int count, const MoveShared& shared) {
  constexpr int batch = 4;
  const int units = p.units;
  const int all = count * units;
  for (int base = static_cast<int>(threadIdx.x); base < all; base += batch * move_threads) {
    T values[batch];
    std::byte* targets[batch];
    KVTRIM_UNROLL
    for (int j = 0; j < batch; ++j) {
      const int u = base + j * move_threads;
      if (u < all) {
        const int row = u / units;
        const std::int64_t offset = p.offset(u - row * units);
        targets[j] = row_in(p, l, h, shared.to[row]) + offset;
        values[j] = load_once<T>(row_in(p, l, h, shared.from[row]) + offset);
      }
    }
    KVTRIM_UNROLL
    for (int j = 0; j < batch; ++j) {
      if (base + j * move_threads < all) { store_once(targets[j], values[j]); }
    }
  }
}

/// Index of the last of `starts[0, n)` that is not above `value`; they ascend, and the first is not above it.
KVTRIM_DEVICE std::int64_t last_not_above(const std::int32_t* starts,
                                          std::int64_t n,
                                          std::int32_t value) {
  std::int64_t low = 0;
  std::int64_t high = n;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    if (starts[middle] <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// A block: a tile of 32 rows of one KV head, all planes. Out of place, the sequence planes are left to the chains: they close
// up where they lie.
template <bool Fast>
KVTRIM_DEVICE void move_tiles(const CacheView& view,
                              const DevicePlan& plan,
                              const RowPlanes& planes,
                              MoveShared& shared) {
  const auto thread = static_cast<int>(threadIdx.x);
  const std::int32_t heads = plan.heads_a_table();
  const std::int32_t tiles = plan.table_tiles[plan.all_tables()];
  for (std::int32_t tile = static_cast<std::int32_t>(blockIdx.x); tile < tiles;
       tile += static_cast<std::int32_t>(gridDim.x)) {
    const std::int64_t table_index = last_not_above(plan.table_tiles, plan.all_tables(), tile);
    const std::int32_t of_table = tile - plan.table_tiles[table_index];
    const std::int64_t index =
        table_index * heads +
        last_not_above(plan.tile_starts + table_index * heads, heads, of_table);
    const auto [s, l, h] = plan.head_at(index);
    const TablePlan table = plan.table_plans[table_index];
    const HeadPlan head = plan.head_plans[index];
    const std::int32_t first = (of_table - plan.tile_starts[index]) * move_tile;
    const bool every_row = table.removal == Removal::fill_holes && table.spare_pages > 0;
    const auto rest = (every_row ? head.kept : static_cast<std::int32_t>(head.moved)) - first;
    int count = rest < move_tile ? rest : move_tile;
    if (every_row) {
      if (thread == 0) { shared.count = 0; }
      __syncthreads();
    }
    if (thread < count) {
      const Move move = move_of(plan, table, head, table_index, index, first + thread, every_row);
      const int slot = !every_row ? thread : move.from >= 0 ? atomicAdd(&shared.count, 1) : -1;
      if (slot >= 0) {
        shared.rows[slot] = move;
        shared.from[slot] = old_place(view, s, l, h, move.from);
        // An overwritten slot may lie in a page that leaves the table along with this plan's last row.
        shared.to[slot] = table.spare_pages > 0
                              ? new_place(plan, table_index, table.first_row, move.to)
                              : old_place(view, s, l, h, move.to);
      }
    }
    __syncthreads();
    if (every_row) { count = shared.count; }
    for (int i = 0; i < planes.count; ++i) {
      if constexpr (Fast) {
        move_units<uint4>(planes.at[i], l, h, count, shared);
      } else {
        with_unit(planes.at[i].unit, [&](auto unit) {
          move_units<decltype(unit)>(planes.at[i], l, h, count, shared);
        });
      }
    }
    for (int i = 0; i < view.page_plane_count; ++i) {
      if (!kvtrim::detail::moves_with(view, view.page_planes[i], l, h)) { continue; }
      const RowPlane p = row_plane(view.page_planes[i]);
      with_unit(p.unit, [&](auto unit) { move_units<decltype(unit)>(p, l, h, count, shared); });
    }
    const bool closes_up = table.spare_pages > 0 && !every_row;
    for (int i = 0; !closes_up && i < sequence_plane_count(view); ++i) {
      const SequencePlane p = sequence_plane(view, i);
      if (!kvtrim::detail::moves_with(p, l, h)) { continue; }
      const std::int32_t unit_bytes = unit_of(p);
      const int units = p.element_bytes / unit_bytes;
      with_unit(unit_bytes, [&](auto unit) {
        using T = decltype(unit);
        for (int u = thread; u < count * units; u += move_threads) {
          const Move move = shared.rows[u / units];
          const std::int64_t offset = u % units * std::int64_t{unit_bytes};
          store_once(p.row(s, l, h, move.to) + offset,
                     load_once<T>(p.row(s, l, h, move.from) + offset));
        }
      });
    }
    __syncthreads();
  }
}

/// A chain: rows of one KV head in one plane, from `begin` on.
struct Chain {
  SequenceId s;
  LayerId l;
  HeadId h;
  std::int64_t table_index;
  TablePlan table;
  RowLists rows;
  const std::int32_t* sources;
  std::int32_t begin;
  std::int32_t end;
};
/// Row that moves to place `to`.
KVTRIM_DEVICE std::int32_t source_of(const DevicePlan& plan, const Chain& chain, std::int32_t to) {
  if (chain.table.removal != Removal::drop_pages) { return chain.rows.kept_row(to); }
  const std::int32_t at = to + chain.table.first_row;
  return chain.sources[at / plan.page_size] * plan.page_size + at % plan.page_size -
         chain.table.first_row;
}

/// Walks a chain in units of `T` through registers: all reads of a tile, a barrier, its writes.
///
/// \param from, to_address  `std::byte*(std::int32_t row, std::int32_t unit)`: where a row was, and where it goes
template <class T, class From, class To>
KVTRIM_DEVICE void pack_units(
    const DevicePlan& plan, const Chain& chain, int units, From from, To to_address) {
  std::int32_t row = chain.begin;
  int skip = 0;  // units of `row` already done
  while (row < chain.end) {
    const int u = skip + static_cast<int>(threadIdx.x);
    const std::int32_t to = row + u / units;
    T value{};
    const bool in = to < chain.end;
    if (in) { value = load_once<T>(from(source_of(plan, chain, to), u % units)); }
    __syncthreads();
    if (in) { store_once(to_address(to, u % units), value); }
    __syncthreads();
    row += (skip + move_threads) / units;
    skip = (skip + move_threads) % units;
  }
}

/// The same in units of 16 bytes through a ring in shared memory, filled by asynchronous copies. A thread stores what it
/// fetched itself; the barrier is for the rows, not for the ring.
KVTRIM_DEVICE void pack_vectors(const CacheView& view,
                                const DevicePlan& plan,
                                const Chain& chain,
                                const RowPlane& p) {
  KVTRIM_DYNAMIC_SHARED(uint4, ring);
  constexpr int tile = pack_batch * move_threads;
  const int units = p.units;
  std::int32_t row = chain.begin;
  int skip = 0;
  const auto fetch = [&](std::int32_t first, int done, int stage) {
    KVTRIM_UNROLL
    for (int j = 0; j < pack_batch; ++j) {
      const int u = done + j * move_threads + static_cast<int>(threadIdx.x);
      const std::int32_t to = first + u / units;
      if (to < chain.end) {
        const DevicePlace from =
            old_place(view, chain.s, chain.l, chain.h, chain.rows.kept_row(to));
        async_copy_16(&ring[stage * tile + j * move_threads + static_cast<int>(threadIdx.x)],
                      row_in(p, chain.l, chain.h, from) + (u % units) * std::int64_t{16});
      }
    }
    async_commit();
  };
  fetch(row, skip, 0);
  for (int stage = 0; row < chain.end; stage ^= 1) {
    const std::int32_t next_row = row + (skip + tile) / units;
    const int next_skip = (skip + tile) % units;
    fetch(next_row, next_skip, stage ^ 1);  // rows from `next_row` on are not written by this tile
    async_wait<1>();
    __syncthreads();  // every row of this tile has been read
    KVTRIM_UNROLL
    for (int j = 0; j < pack_batch; ++j) {
      const int u = skip + j * move_threads + static_cast<int>(threadIdx.x);
      const std::int32_t to = row + u / units;
      if (to < chain.end) {
        const DevicePlace place = new_place(plan, chain.table_index, chain.table.first_row, to);
        store_once(row_in(p, chain.l, chain.h, place) + (u % units) * std::int64_t{16},
                   ring[stage * tile + j * move_threads + static_cast<int>(threadIdx.x)]);
      }
    }
    row = next_row;
    skip = next_skip;
  }
  async_wait<0>();
  __syncthreads();
}

// A block: one chain at a time.
template <bool Fast>
KVTRIM_DEVICE void pack_chains(const CacheView& view,
                               const DevicePlan& plan,
                               const RowPlanes& planes) {
  const int in_pages = planes.count + view.page_plane_count;
  const int all_planes = in_pages + sequence_plane_count(view);
  const std::int64_t chains = plan.heads() * all_planes;
  for (std::int64_t c = blockIdx.x; c < chains; c += gridDim.x) {
    const std::int64_t index = c / all_planes;
    const auto which = static_cast<int>(c % all_planes);
    const HeadPlace at = plan.head_at(index);
    Chain chain;
    chain.h = at.h;
    chain.l = at.l;
    chain.s = at.s;
    chain.table_index = plan.table_index(chain.s, view.table_of(chain.l, chain.h));
    chain.table = plan.table_plans[chain.table_index];
    const Removal removal = chain.table.removal;
    if (!chain.table.evicts || removal == Removal::fill_holes ||
        removal == Removal::overwrite_slot) {
      continue;
    }
    const bool moves_pages =
        removal == Removal::stable_pack && !all_pages_replaced(chain.table, view.page_size);
    if (which < in_pages && !moves_pages) { continue; }
    chain.rows = plan.lists_of(index);
    chain.sources = plan.sources_of(chain.table_index);
    chain.end = chain.table.live_after;
    // Rows that keep their place are numbered anew behind a page that leaves.
    const std::int32_t gap = removal == Removal::stable_pack ? chain.rows.gone[0] : 0;
    chain.begin = which < in_pages && chain.table.spare_pages == 0
                      ? chain.end - static_cast<std::int32_t>(plan.head_plans[index].moved)
                  : gap < chain.end ? gap
                                    : chain.end;
    if (which < in_pages && chain.table.spare_pages > 0) {
      const std::int32_t replaced = plan.totals[chain.table_index].first_replaced;
      chain.begin = replaced < chain.begin ? replaced : chain.begin;
    }
    if (which < in_pages) {
      const bool side = which >= planes.count;
      if (side && !kvtrim::detail::moves_with(
                      view, view.page_planes[which - planes.count], chain.l, chain.h)) {
        continue;
      }
      if constexpr (Fast) {
        if (!side) {
          pack_vectors(view, plan, chain, planes.at[which]);
          continue;
        }
      }
      const RowPlane p =
          side ? row_plane(view.page_planes[which - planes.count]) : planes.at[which];
      with_unit(p.unit, [&](auto unit) {
        const auto address = [&](const DevicePlace& place, std::int32_t u) {
          return row_in(p, chain.l, chain.h, place) + p.offset(u);
        };
        pack_units<decltype(unit)>(
            plan,
            chain,
            p.units,
            [&](std::int32_t row, std::int32_t u) {
              return address(old_place(view, chain.s, chain.l, chain.h, row), u);
            },
            [&](std::int32_t row, std::int32_t u) {
              return address(new_place(plan, chain.table_index, chain.table.first_row, row), u);
            });
      });
      continue;
    }
    const SequencePlane p = sequence_plane(view, which - in_pages);
    if (!kvtrim::detail::moves_with(p, chain.l, chain.h)) { continue; }
    const std::int32_t unit_bytes = unit_of(p);
    with_unit(unit_bytes, [&](auto unit) {
      const auto address = [&](std::int32_t row, std::int32_t u) {
        return p.row(chain.s, chain.l, chain.h, row) + u * unit_bytes;
      };
      pack_units<decltype(unit)>(plan, chain, p.element_bytes / unit_bytes, address, address);
    });
  }
}

/// What follows the moves in the same launch, where nothing comes between `apply` and `commit`: pages that leave are listed and
/// lose a reference.
struct LeaveInput {
  bool leaves = false;
  DeviceTables out{};
};

struct MoveKernelShared {
  MoveShared move;
  ReferenceShared references;
};

// A block: tiles that move through lists, then chains, then tables. None reads what another one writes.
template <bool Fast>
__global__ void KVTRIM_LAUNCH_BOUNDS(move_threads, 2)
    move_kernel(CacheView view, DevicePlan plan, RowPlanes planes, LeaveInput leave) {
  static_assert(move_threads == table_threads);
  KVTRIM_SHARED(MoveKernelShared, shared, );
  if (plan.control->go == 0) {
    const bool first = blockIdx.x == 0 && threadIdx.x == 0;
    if (first && leave.leaves && leave.out.freed_count != nullptr) { *leave.out.freed_count = 0; }
    return;
  }
  move_tiles<Fast>(view, plan, planes, shared.move);
  pack_chains<Fast>(view, plan, planes);
  if (!leave.leaves) { return; }
  for (std::int64_t i = blockIdx.x; i < plan.all_tables(); i += gridDim.x) {
    const TablePlan table = plan.table_plans[i];
    if (table.evicts) { list_released(plan, i, table); }
    drop_references(view, plan, i, table, leave.out, shared.references);
  }
  if (last_block(&plan.control->arrived, &shared.references.last)) {
    count_free_pages(plan, leave.out, shared.references);
  }
}

/// Queues the moves.
[[nodiscard]] inline cudaError_t move_rows(const CacheView& view,
                                           const DevicePlan& plan,
                                           const LeaveInput& leave,
                                           cudaStream_t stream) noexcept {
  const RowPlanes planes = row_planes(view);
  const std::int64_t tiles =
      plan.heads() * ((static_cast<std::int64_t>(plan.max_rows) + move_tile - 1) / move_tile);
  const std::int64_t chains =
      plan.heads() * (planes.count + view.page_plane_count + sequence_plane_count(view));
  return launch(planes.fast ? move_kernel<true> : move_kernel<false>,
                dim3(bounded_grid(tiles > chains ? tiles : chains)),
                dim3(move_threads),
                pack_shared_bytes,
                stream,
                view,
                plan,
                planes,
                leave);
}

}  // namespace detail

/// Moves what the plan in `workspace` says, and brings keys to their new rope positions. Tables and lengths stay unchanged until
/// `commit`.
///
/// Sequences that the plan refuses stay as they are. Writes nothing if the plan was applied before, if it is not for this cache
/// (a later plan was made in the same workspace), or if a table that it evicts from is no longer what the plan was made from:
/// then the report's status is `stale_plan` (never if nothing goes); or if it was made with another position mode: `bad_plan`.
/// Other tables may have changed.
///
/// \param workspace  as given to `plan`
/// \param view       as given to `plan`
/// \param rotation   as given to `plan`
/// \returns `cudaErrorInvalidValue` before any launch for a misaligned plane, a workspace that holds no plan or keys that cannot be
///   rotated so; otherwise the launches' status
/// \par Complexity
/// O(rows that move)
/// \par Stream
/// asynchronous on `stream`; never synchronises, allocates nothing. Released pages may be handed on only behind an event
/// recorded after this
[[nodiscard]] inline cudaError_t apply(const PlanWorkspace& workspace,
                                       const CacheView& view,
                                       cudaStream_t stream,
                                       const DeviceRotation& rotation = {}) noexcept {
  using namespace detail;
  const DevicePlan plan = device_plan(workspace);
  if (plan.report == nullptr || !detail::fits(view, workspace.shape) ||
      !rotation_fits(view, rotation, plan.max_rows)) {
    return cudaErrorInvalidValue;
  }
  if (view.sequences == 0) { return cudaSuccess; }
  cudaError_t e = launch(compare_kernel<>,
                         dim3(bounded_grid(plan.all_tables())),
                         dim3(table_threads),
                         0,
                         stream,
                         view,
                         plan,
                         view_mark(view),
                         ComparePass::apply);
  if (e == cudaSuccess) {
    e = launch(gate_kernel<>,
               dim3(1),
               dim3(table_threads),
               0,
               stream,
               view,
               plan,
               view_mark(view),
               ComparePass::apply,
               rotation.mode);
  }
  if (e == cudaSuccess) { e = move_rows(view, plan, {}, stream); }
  return e != cudaSuccess ? e : renumber_rows(view, plan, rotation, stream);
}

}  // namespace kvtrim::cuda
