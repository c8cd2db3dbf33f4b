// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where a plan lies on the device. The host holds pointers and bounds only; what the plan says is read on the device, or
// on the host behind an event.

#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/detail/head_place.cuh>
#include <kvtrim/cuda/detail/workspace.hpp>
#include <kvtrim/cuda/select/select_task.cuh>
#include <kvtrim/evict/plan.hpp>
#include <kvtrim/score/scorer.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

/// What a plan does, and its outcome. Written by the plan kernels; `apply` and `commit` change `status` if they refuse.
struct DeviceReport {
  /// `ok` or `over_budget`; otherwise that of the first sequence that is refused (`DevicePlan::refusals`), in the order in which
  /// the host finds faults, or of what refuses all: the others may be applied.
  Status status = Status::ok;
  std::int32_t released = 0;  ///< ids in `DevicePlan::released`
  std::int32_t spares_needed =
      0;  ///< spare pages that the plan takes; with `out_of_pages`, the number it would take
  std::int32_t refused = 0;         ///< sequences that are refused: they stay as they are
  std::int32_t first_refused = -1;  ///< the one whose status is the report's; -1: none, or all
  std::int32_t first_table = -1;    ///< its table
  // Of the sequences that are not refused:
  std::int64_t nan_count = 0;    ///< NaN among the scores that compete
  std::int64_t kept = 0;         ///< rows that stay, over layers and KV heads
  std::int64_t evicted = 0;      ///< rows that go
  std::int64_t bytes_moved = 0;  ///< of keys, values and page planes
};

/// Why a sequence is refused.
struct DeviceRefusal {
  Status status = Status::ok;  ///< `ok`: it is not
  std::int32_t table = -1;     ///< of the sequence, where the fault was found; -1: it is no table's
};

namespace detail {

inline constexpr int move_tile = 32;  // rows that a block moves at a time

enum class DeviceStage : std::int32_t { planned, applied, committed };

struct PlanControl {
  unsigned long long view;  // what the plan was made from: `view_mark`
  DeviceStage stage;
  Status status;           // the plan's own; the report has that of the last call
  Status all;              // why every sequence is refused; ok: they are not
  std::int32_t evicting;   // tables from which something goes
  std::int32_t go;         // the movers may move
  std::int32_t changed;    // of the tables that evict, some are not what they were
  std::int32_t whole;      // tables that may be committed
  std::int32_t torn;       // tables that were changed after their rows were moved
  std::int32_t ended;      // tables whose sequence ended since
  std::int32_t free_base;  // pages in the engine's free list before this plan's
  std::int32_t arrived;    // blocks that are done, of a launch whose last block goes on
  PositionMode positions;  // the plan's
};

// Phases of a plan, in the order in which the host finds their faults. Entries count only if something goes. Each reads only
// the faults of the phases before it.
inline constexpr int phase_length = 0;
inline constexpr int phase_scores = 1;
inline constexpr int phase_open = 2;
inline constexpr int phase_entries = 3;
inline constexpr int phase_select = 4;
inline constexpr int phase_close = 5;
inline constexpr int phases = 6;

// A fault: table, status; all bits set: none.
inline constexpr unsigned long long no_fault = ~0ULL;
KVTRIM_HOST_DEVICE constexpr unsigned long long fault_of(std::int32_t table, Status status) {
  return static_cast<unsigned long long>(table) << 8U | static_cast<unsigned long long>(status);
}

/// What one block of the checking launch found, for all blocks of the next one.
struct CheckNote {
  std::int64_t entries = 0;  ///< of the tables that it looked at
  std::int32_t bad_planes = 0;
  std::int32_t too_long = 0;  // one is longer than the bound
};
inline constexpr int most_check_blocks = 1024;

/// What closing a table adds to the report.
struct TableTotals {
  std::int64_t bytes_moved = 0;
  std::int64_t nan_count = 0;
  std::int32_t tiles = 0;           ///< of rows that move through lists
  std::int32_t first_replaced = 0;  ///< first row on a spare page, where some pages are replaced
};

/// Whether all rows go into spare pages: what is written is not what is read. Otherwise some pages are replaced, or none.
KVTRIM_DEVICE bool all_pages_replaced(const TablePlan& table, std::int32_t page_size) {
  return table.spare_pages > 0 &&
         table.spare_pages == table.pages_after - table.first_row / page_size;
}

}  // namespace detail

/// Bounds of a plan. A cache whose sequences are never all as long as the longest one says how many rows they have in all; a
/// step that never evicts more than a few rows says how many.
struct PlanBounds : PlanShape {
  std::int64_t total_rows =
      0;  ///< rows of all sequences, padding, holes and rows of reserved pages included; 0: max_rows each
  /// Pools that a page id can be of: several where layers or KV heads have memory of their own; 0: one for each table of a
  /// sequence.
  std::int32_t pools = 0;
  /// Rows that leave a KV head in one plan, and a hole that closes, at most: then these alone are listed, and none that stays.
  /// 0: any number, all rows are listed. For `HeavyHitter`, whose rows come one by one, its `interval`.
  std::int32_t max_evicted = 0;

  PlanBounds() = default;
  PlanBounds(const PlanShape& shape, std::int64_t total = 0, std::int32_t evicted = 0) noexcept
      : PlanShape(shape), total_rows(total), max_evicted(evicted) {}

  /// Entries of all page tables at most.
  [[nodiscard]] std::int64_t entries() const noexcept {
    const std::int64_t tables = tables_of(scope, layers, kv_heads);
    const std::int32_t size = page_size < 1 ? 1 : page_size;
    const std::int64_t all = static_cast<std::int64_t>(sequences) * pages_for(max_rows, size);
    const std::int64_t some = total_rows / size + sequences;  // each may end within a page
    return tables * (total_rows > 0 && some < all ? some : all);
  }
};

/// The rows of a KV head that stay, and those that go with the hole among them, both ascending. On the device.
struct RowLists {
  const std::int32_t* kept;  ///< null: not listed
  const std::int32_t* gone;
  std::int32_t gone_count;

  /// Number of rows that go and lie below `row`.
  [[nodiscard]] KVTRIM_HOST_DEVICE std::int32_t gone_below(std::int32_t row) const noexcept {
    return first_gone([row](std::int32_t r, std::int32_t) { return r >= row; });
  }
  /// The row that is number `k` of those that stay.
  [[nodiscard]] KVTRIM_HOST_DEVICE std::int32_t kept_row(std::int32_t k) const noexcept {
    if (kept != nullptr) { return kept[k]; }
    return k + first_gone([k](std::int32_t r, std::int32_t i) { return r - i > k; });
  }

 private:
  template <class IsBehind>
  [[nodiscard]] KVTRIM_HOST_DEVICE std::int32_t first_gone(IsBehind is_behind) const noexcept {
    std::int32_t low = 0;
    std::int32_t high = gone_count;
    while (low < high) {
      const std::int32_t middle = low + (high - low) / 2;
      if (is_behind(gone[middle], middle)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

/// A plan's arrays on the device, by the bounds of its shape. Trivially copyable.
struct DevicePlan {
  std::int32_t sequences = 0;
  std::int32_t layers = 0;
  std::int32_t kv_heads = 0;
  std::int32_t tables = 0;  ///< per sequence
  std::int32_t page_size = 1;
  std::int32_t max_rows = 0;
  std::int32_t max_pages = 0;
  std::int64_t entries = 0;  ///< room for page table entries, of all tables
  TableScope scope = TableScope::group;
  DeviceReport* report = nullptr;    ///< [1]
  TablePlan* table_plans = nullptr;  ///< [sequences, tables]: new lengths, ways of removal
  HeadPlan* head_plans = nullptr;    ///< [sequences, layers, kv_heads]; of tables that evict
  /// By `lists_of`: rows that stay, then the others, or the others alone; null: there is no room for such lists, which plans by
  /// pages do not need
  std::int32_t* rows = nullptr;
  std::int32_t max_evicted = 0;     ///< as `PlanBounds::max_evicted`
  std::int32_t* pages = nullptr;    ///< [2, entries]: K ids afterwards, by `pages_of`; V ids
  std::int32_t* sources = nullptr;  ///< [entries]: entry that each had before; -1: a spare page
  std::int32_t* entry_starts = nullptr;  ///< [sequences, tables] + 1: where a table's entries begin
  std::int32_t* released =
      nullptr;  ///< [report->released]: ids that leave a table, tail first per table
  SelectTask* tasks = nullptr;  ///< internal
  /// internal: [sequences, tables]: rows compete by score; then, where pages are shared, rows are chosen again
  std::int32_t* active = nullptr;
  DeviceRefusal* refusals = nullptr;      ///< [sequences]: which are refused, and why
  std::int32_t* nan_counts = nullptr;     ///< internal: [sequences, layers, kv_heads]
  std::int32_t* released_rows = nullptr;  ///< internal: [2 * entries]
  std::int32_t* tile_starts = nullptr;    ///< internal: [heads]: tiles of the table's heads before
  std::int32_t* table_tiles = nullptr;    ///< internal: [sequences, tables] + 1: tiles before
  std::int32_t* list_starts =
      nullptr;  ///< internal: [sequences, tables, 2]: in `released`, in the spare pages
  std::uint8_t* released_free =
      nullptr;  ///< internal: 1 for the ids in `released` without an owner
  std::int32_t* free_starts =
      nullptr;  ///< internal: [sequences, tables]: how many of a table's are free, then free ones before
  unsigned long long* generations = nullptr;        ///< internal: [sequences, tables], as planned
  unsigned long long* moved_generations = nullptr;  ///< internal: the same once rows are moved
  unsigned long long* owners = nullptr;             ///< internal: [pools, pool_pages]
  std::int64_t pool_pages = 0;                      ///< internal
  std::int32_t pools = 0;                           ///< internal
  unsigned long long* faults = nullptr;    ///< internal: [sequences + 1, phases]; last: all
  std::int32_t* checks = nullptr;          ///< internal: [sequences, tables]
  detail::CheckNote* notes = nullptr;      ///< internal: [most_check_blocks]
  detail::TableTotals* totals = nullptr;   ///< internal: [sequences, tables]
  detail::PlanControl* control = nullptr;  ///< internal: [1]

  [[nodiscard]] KVTRIM_HOST_DEVICE std::int64_t heads() const noexcept {
    return static_cast<std::int64_t>(sequences) * layers * kv_heads;
  }
  [[nodiscard]] KVTRIM_HOST_DEVICE std::int64_t all_tables() const noexcept {
    return static_cast<std::int64_t>(sequences) * tables;
  }
  /// Index of (sequence, layer, KV head).
  [[nodiscard]] KVTRIM_HOST_DEVICE std::int64_t head_index(SequenceId s,
                                                           LayerId l,
                                                           HeadId h) const noexcept {
    return (static_cast<std::int64_t>(raw(s)) * layers + raw(l)) * kv_heads + raw(h);
  }
  /// What that index stands for.
  [[nodiscard]] KVTRIM_HOST_DEVICE detail::HeadPlace head_at(std::int64_t head) const noexcept {
    return detail::head_place(static_cast<std::int32_t>(head), layers, kv_heads);
  }
  /// Index of table `t` of a sequence.
  [[nodiscard]] KVTRIM_HOST_DEVICE std::int64_t table_index(SequenceId s,
                                                            std::int32_t t) const noexcept {
    return static_cast<std::int64_t>(raw(s)) * tables + t;
  }
  /// Where what is listed by entry for each head begins for a KV head: a table's heads are neighbours. On the device.
  [[nodiscard]] KVTRIM_HOST_DEVICE std::int64_t first_of(std::int64_t head) const noexcept {
    const detail::HeadPlace at = head_at(head);
    const std::int32_t t = table_of(scope, kv_heads, at.l, at.h);
    const std::int64_t table = table_index(at.s, t);
    const std::int32_t heads = heads_a_table();
    const std::int32_t mine = scope == TableScope::group   ? raw(at.l) * kv_heads + raw(at.h)
                              : scope == TableScope::layer ? raw(at.h)
                                                           : 0;
    return static_cast<std::int64_t>(first_entry(table)) * heads +
           static_cast<std::int64_t>(mine) * room(table);
  }
  /// KV heads that one table serves.
  [[nodiscard]] KVTRIM_HOST_DEVICE std::int32_t heads_a_table() const noexcept {
    return scope == TableScope::group   ? layers * kv_heads
           : scope == TableScope::layer ? kv_heads
                                        : 1;
  }
  /// Where a KV head's part of `rows` begins. On the device.
  [[nodiscard]] KVTRIM_HOST_DEVICE std::int64_t list_of(std::int64_t head) const noexcept {
    return max_evicted > 0 ? head * max_evicted : first_of(head) * page_size;
  }
  /// The rows of a KV head that stay and go, if its rows were listed. On the device.
  [[nodiscard]] KVTRIM_HOST_DEVICE RowLists lists_of(std::int64_t head) const noexcept {
    if (rows == nullptr) { return {nullptr, nullptr, 0}; }
    const SelectTask& task = tasks[head];
    const std::int32_t* const mine = rows + list_of(head);
    const bool all = max_evicted == 0;
    return {all ? mine : nullptr, all ? mine + task.keep : mine, task.extent - task.keep};
  }
  /// First entry of a table, and how many it has.
  [[nodiscard]] KVTRIM_HOST_DEVICE std::int32_t first_entry(std::int64_t table) const noexcept {
    return entry_starts[table];
  }
  [[nodiscard]] KVTRIM_HOST_DEVICE std::int32_t room(std::int64_t table) const noexcept {
    return entry_starts[table + 1] - entry_starts[table];
  }
  /// K ids of a table afterwards; V ids are `entries` further on. On the device.
  [[nodiscard]] KVTRIM_HOST_DEVICE std::int32_t* pages_of(std::int64_t table) const noexcept {
    return pages + first_entry(table);
  }
  /// Entries that they had before. On the device.
  [[nodiscard]] KVTRIM_HOST_DEVICE std::int32_t* sources_of(std::int64_t table) const noexcept {
    return sources + first_entry(table);
  }
};

namespace detail {

/// Notes what is wrong with a sequence. Launches whose blocks note faults of a phase do not read them.
KVTRIM_DEVICE void note_fault(
    const DevicePlan& plan, int phase, SequenceId s, std::int32_t table, Status status) {
  atomicMin(&plan.faults[static_cast<std::int64_t>(raw(s)) * phases + phase],
            fault_of(table, status));
}
/// Notes what is wrong with all of them.
KVTRIM_DEVICE void note_fault_of_all(const DevicePlan& plan, int phase, Status status) {
  note_fault(plan, phase, SequenceId{plan.sequences}, 0, status);
}
/// Whether a sequence, or all, had a fault in a phase before this one.
KVTRIM_DEVICE bool failed_before(const DevicePlan& plan, SequenceId s, int phase) {
  const unsigned long long* const own = plan.faults + static_cast<std::int64_t>(raw(s)) * phases;
  const unsigned long long* const common =
      plan.faults + static_cast<std::int64_t>(plan.sequences) * phases;
  bool failed = false;
  for (int i = 0; i < phase; ++i) {
    failed = failed || own[i] != no_fault || common[i] != no_fault;
  }
  return failed;
}

/// The tables that a block looks at, neighbours, in launches whose blocks must know how many entries are before theirs.
struct TableRange {
  std::int64_t first;
  std::int64_t last;
};
KVTRIM_DEVICE TableRange tables_of_block(const DevicePlan& plan) {
  const std::int64_t all = plan.all_tables();
  const std::int64_t each = (all + gridDim.x - 1) / gridDim.x;
  const std::int64_t first = blockIdx.x * each;
  return {first < all ? first : all, first + each < all ? first + each : all};
}
/// Blocks of such launches, for so many pieces of work.
[[nodiscard]] inline unsigned check_grid(std::int64_t pieces) noexcept {
  const unsigned blocks = bounded_grid(pieces);
  return blocks < most_check_blocks ? blocks : most_check_blocks;
}

[[nodiscard]] inline DevicePlan take_plan(WorkspaceLayout& layout,
                                          const PlanBounds& shape) noexcept {
  DevicePlan p;
  p.sequences = shape.sequences;
  p.layers = shape.layers;
  p.kv_heads = shape.kv_heads;
  p.tables = tables_of(shape.scope, shape.layers, shape.kv_heads);
  p.page_size = shape.page_size;
  p.max_rows = shape.max_rows;
  p.max_pages = pages_for(shape.max_rows, shape.page_size < 1 ? 1 : shape.page_size);
  p.entries = shape.entries();
  p.scope = shape.scope;
  p.pool_pages = shape.pages;
  p.pools = shape.pools > 0 && shape.pools < p.tables ? shape.pools : p.tables;
  p.max_evicted = shape.max_evicted;
  p.report = layout.take<DeviceReport>(1);
  p.control = layout.take<PlanControl>(1);
  p.table_plans = layout.take<TablePlan>(p.all_tables());
  p.head_plans = layout.take<HeadPlan>(p.heads());
  p.tasks = layout.take<SelectTask>(p.heads());
  p.active = layout.take<std::int32_t>(p.all_tables());
  p.nan_counts = layout.take<std::int32_t>(p.heads());
  p.tile_starts = layout.take<std::int32_t>(p.heads());
  p.table_tiles = layout.take<std::int32_t>(p.all_tables() + 1);
  p.list_starts = layout.take<std::int32_t>(2 * p.all_tables());
  p.entry_starts = layout.take<std::int32_t>(p.all_tables() + 1);
  p.pages = layout.take<std::int32_t>(2 * p.entries);
  p.sources = layout.take<std::int32_t>(p.entries);
  p.released_rows = layout.take<std::int32_t>(2 * p.entries);
  p.released = layout.take<std::int32_t>(2 * p.entries);
  p.released_free = layout.take<std::uint8_t>(2 * p.entries);
  p.generations = layout.take<unsigned long long>(p.all_tables());
  p.moved_generations = layout.take<unsigned long long>(p.all_tables());
  p.owners = layout.take<unsigned long long>(p.pools * p.pool_pages);
  p.refusals = layout.take<DeviceRefusal>(p.sequences);
  p.faults = layout.take<unsigned long long>((static_cast<std::int64_t>(p.sequences) + 1) * phases);
  p.checks = layout.take<std::int32_t>(p.all_tables());
  p.notes = layout.take<CheckNote>(most_check_blocks);
  p.totals = layout.take<TableTotals>(p.all_tables());
  p.free_starts = layout.take<std::int32_t>(p.all_tables());
  return p;
}

/// Bytes of the lists of rows: the last ones of a workspace, so that a plan by pages needs none. They are written when the scorer
/// has ended, and lie where it worked.
[[nodiscard]] inline std::size_t row_list_bytes(const PlanBounds& shape) noexcept {
  WorkspaceLayout counts;
  const DevicePlan p = take_plan(counts, shape);
  WorkspaceLayout layout;
  static_cast<void>(layout.take<std::int32_t>(
      p.max_evicted > 0 ? p.heads() * p.max_evicted : p.entries * p.heads_a_table() * p.page_size));
  return layout.bytes();
}
/// Bytes of a list of scores by row.
[[nodiscard]] inline std::size_t score_list_bytes(const PlanBounds& shape) noexcept {
  WorkspaceLayout counts;
  const DevicePlan p = take_plan(counts, shape);
  WorkspaceLayout layout;
  static_cast<void>(layout.take<float>(p.entries * p.heads_a_table() * p.page_size));
  return layout.bytes();
}

}  // namespace detail

/// Device memory of a plan, and the bounds it was sized for. One per stream.
struct PlanWorkspace {
  PlanBounds shape{};      ///< upper bounds; `max_rows` counts left padding and a hole too
  void* memory = nullptr;  ///< device, aligned to 256 bytes
  std::size_t bytes = 0;   ///< at least `cuda::plan_workspace_bytes(policy, shape)`
};

/// Where the plan in `workspace` lies. Pure: no device memory is read.
[[nodiscard]] inline DevicePlan device_plan(const PlanWorkspace& workspace) noexcept {
  detail::WorkspaceLayout layout(workspace.memory, workspace.bytes);
  DevicePlan p = detail::take_plan(layout, workspace.shape);
  if (!layout.ok()) { return {}; }
  const std::size_t lists = detail::row_list_bytes(workspace.shape);
  const std::size_t end =
      workspace.bytes / detail::WorkspaceLayout::alignment * detail::WorkspaceLayout::alignment;
  if (end >= layout.bytes() + lists) {
    p.rows =
        reinterpret_cast<std::int32_t*>(static_cast<std::byte*>(workspace.memory) + end - lists);
  }
  return p;
}

}  // namespace kvtrim::cuda
