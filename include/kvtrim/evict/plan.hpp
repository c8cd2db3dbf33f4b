// SPDX-License-Identifier: Apache-2.0
#pragma once

// A plan is one block of bytes without pointers: a header, then arrays at offsets given in the header. So a plan can be
// copied, compared, written to a file and read back. Over 400 lines: the format, its accessors and the check of bytes
// from outside must agree.

#include <kvtrim/cache/table_update.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

namespace kvtrim {

/// What happens to one page table.
struct TablePlan {
  Status status = Status::ok;
  Removal removal = Removal::stable_pack;  ///< how rows are removed
  bool evicts = false;                     ///< whether anything goes
  bool ordered_after = true;               ///< slot order is position order afterwards
  std::int32_t live_before = 0;            ///< live rows
  std::int32_t live_after = 0;             ///< rows that stay
  std::int32_t extent_before = 0;          ///< rows in use, a hole included
  std::int32_t first_row = 0;              ///< rows of left padding
  std::int32_t append_row = -1;            ///< row of the next append, if it is a hole
  std::int32_t pages_before = 0;           ///< entries in use
  std::int32_t pages_after = 0;            ///< entries afterwards
  std::int32_t released =
      0;  ///< pages that leave the table (K and V ids counted separately where they differ)
  std::int32_t shared_kept = 0;  ///< leading shared pages that stay as they are
  std::int32_t spare_pages = 0;  ///< spare pages that replace shared ones
};

/// What happens to one KV head of one layer.
struct HeadPlan {
  std::int32_t kept = 0;       ///< rows listed as kept (`stable_pack`, `fill_holes`)
  std::int32_t evicted = 0;    ///< rows that go
  std::int32_t victim = -1;    ///< `overwrite_slot`: the row that goes
  std::int32_t has_ranks = 0;  ///< slot order is not position order, so ranks are listed
  std::int64_t moved = 0;      ///< rows that change their place
};

namespace detail {

inline constexpr std::uint32_t plan_magic = 0x4B56'5431;  // "KVT1"
enum class PlanStage : std::uint32_t { planned, applied, committed };

struct PlanHeader {
  std::uint32_t magic = plan_magic;
  PlanStage stage = PlanStage::planned;
  Status status = Status::ok;
  PositionMode positions = PositionMode::keep;
  TableScope scope = TableScope::group;
  bool separate_values = false;
  std::int32_t sequences = 0;
  std::int32_t layers = 0;
  std::int32_t kv_heads = 0;
  std::int32_t tables = 0;  // per sequence
  std::int32_t page_size = 0;
  std::int32_t max_rows = 0;
  std::int32_t max_pages = 0;
  std::int32_t spares_needed = 0;
  std::int64_t nan_count = 0;
  std::int64_t bytes_moved = 0;
  std::int64_t kept_rows = 0;
  std::int64_t evicted_rows = 0;
  std::uint64_t generation = 0;
  // Byte offsets of the arrays.
  std::int64_t table_plans = 0;  // TablePlan [sequences, tables]
  std::int64_t head_plans = 0;   // HeadPlan [sequences, layers, kv_heads]
  std::int64_t rows =
      0;  // int32 [sequences, layers, kv_heads, max_rows]: kept rows, then evicted positions
  std::int64_t ranks = 0;     // int32, same shape as rows: rank of each kept row
  std::int64_t pages = 0;     // int32 [sequences, tables, 2, max_pages]: K and V pages afterwards
  std::int64_t sources = 0;   // int32 [sequences, tables, max_pages]: entry each of them had before
  std::int64_t released = 0;  // int32 [sequences, tables, 2 * max_pages]: tail first
  std::int64_t bytes = 0;     // of the whole plan
};

// Calls f(from, to, index in the list) for each kept row, in an order in which no row is overwritten before it is read.
template <class F>
void for_each_target(std::span<const std::int32_t> kept, Removal removal, F&& f) noexcept {
  const auto n = static_cast<std::int32_t>(kept.size());
  const auto row = [&](std::int32_t i) { return kept[static_cast<std::size_t>(i)]; };
  if (removal != Removal::fill_holes) {
    for (std::int32_t i = 0; i < n; ++i) { f(row(i), i, i); }
    return;
  }
  std::int32_t stay = 0;  // rows below n stay; the others fill the holes below n, ascending
  while (stay < n && row(stay) < n) { ++stay; }
  std::int32_t filler = stay;
  std::int32_t i = 0;
  for (std::int32_t to = 0; to < n; ++to) {
    if (i < stay && row(i) == to) {
      f(to, to, i++);
    } else {
      f(row(filler), to, filler);
      ++filler;
    }
  }
}

}  // namespace detail

/// A plan in memory that it does not own: cheap to copy, valid as long as that memory is.
///
/// Rows are numbered as in the table at the time the plan was made.
class PlanView {
 public:
  /// No plan: empty, and safe to apply.
  PlanView() = default;
  /// Used by `plan()`.
  explicit PlanView(detail::PlanHeader* header) noexcept : header_(header) {}
  /// A plan that could not be made.
  explicit PlanView(Status status) noexcept : failure_(status) {}

  /// `ok` or `over_budget`: the plan may be applied. Anything else: nothing was planned.
  [[nodiscard]] Status status() const noexcept {
    return header_ == nullptr ? failure_ : header_->status;
  }
  /// Whether nothing goes.
  [[nodiscard]] bool empty() const noexcept {
    return header_ == nullptr || header_->evicted_rows == 0;
  }
  /// Rows that go, summed over layers and KV heads.
  [[nodiscard]] std::int64_t evicted_rows() const noexcept {
    return header_ == nullptr ? 0 : header_->evicted_rows;
  }
  /// Rows that stay, summed over layers and KV heads.
  [[nodiscard]] std::int64_t kept_rows() const noexcept {
    return header_ == nullptr ? 0 : header_->kept_rows;
  }
  /// Bytes of keys, values and page planes that apply will move.
  [[nodiscard]] std::int64_t bytes_moved() const noexcept {
    return header_ == nullptr ? 0 : header_->bytes_moved;
  }
  /// NaN among the candidates' scores.
  [[nodiscard]] std::int64_t nan_count() const noexcept {
    return header_ == nullptr ? 0 : header_->nan_count;
  }
  /// Spare pages that the plan takes; with `out_of_pages`, the number it would need.
  [[nodiscard]] std::int32_t spares_needed() const noexcept {
    return header_ == nullptr ? 0 : header_->spares_needed;
  }
  /// Position mode that it was made for.
  [[nodiscard]] PositionMode positions() const noexcept {
    return header_ == nullptr ? PositionMode::keep : header_->positions;
  }
  /// Sequences, layers, KV heads, tables per sequence.
  [[nodiscard]] std::int32_t sequences() const noexcept {
    return header_ == nullptr ? 0 : header_->sequences;
  }
  [[nodiscard]] std::int32_t layers() const noexcept {
    return header_ == nullptr ? 0 : header_->layers;
  }
  [[nodiscard]] std::int32_t kv_heads() const noexcept {
    return header_ == nullptr ? 0 : header_->kv_heads;
  }
  [[nodiscard]] std::int32_t tables() const noexcept {
    return header_ == nullptr ? 0 : header_->tables;
  }

  /// Plan of table `t` of sequence `s`.
  [[nodiscard]] TablePlan& table(SequenceId s, std::int32_t t) const noexcept {
    return array<TablePlan>(
        header_->table_plans)[raw(s) * static_cast<std::int64_t>(header_->tables) + t];
  }
  /// Index of the table that serves (layer, KV head).
  [[nodiscard]] std::int32_t table_of(LayerId l, HeadId h) const noexcept {
    return kvtrim::table_of(header_->scope, header_->kv_heads, l, h);
  }
  /// Plan of (sequence, layer, KV head).
  [[nodiscard]] HeadPlan& head(SequenceId s, LayerId l, HeadId h) const noexcept {
    return array<HeadPlan>(header_->head_plans)[head_index(s, l, h)];
  }
  /// Rows listed as kept, ascending. Empty for `drop_pages` and `overwrite_slot`: use `for_each_kept` for any way of removal.
  [[nodiscard]] std::span<std::int32_t> kept_list(SequenceId s,
                                                  LayerId l,
                                                  HeadId h) const noexcept {
    return {rows(s, l, h), static_cast<std::size_t>(head(s, l, h).kept)};
  }
  /// Rank by position of each row of `kept_list`; empty if rows are in position order.
  [[nodiscard]] std::span<std::int32_t> ranks(SequenceId s, LayerId l, HeadId h) const noexcept {
    return {array<std::int32_t>(header_->ranks) + head_index(s, l, h) * header_->max_rows,
            head(s, l, h).has_ranks != 0 ? static_cast<std::size_t>(head(s, l, h).kept) : 0};
  }
  /// Positions of the rows that go, ascending.
  [[nodiscard]] std::span<const Position> evicted(SequenceId s,
                                                  LayerId l,
                                                  HeadId h) const noexcept {
    const HeadPlan& plan = head(s, l, h);
    return {reinterpret_cast<const Position*>(rows(s, l, h) + plan.kept),
            static_cast<std::size_t>(plan.evicted)};
  }
  /// Pages that leave table `t`, tail first.
  [[nodiscard]] std::span<const PageId> released(SequenceId s, std::int32_t t) const noexcept {
    return {reinterpret_cast<const PageId*>(array<std::int32_t>(header_->released) +
                                            table_index(s, t) * 2 * header_->max_pages),
            static_cast<std::size_t>(table(s, t).released)};
  }
  /// Pages of the keys of table `t` afterwards.
  [[nodiscard]] std::span<PageId> k_pages(SequenceId s, std::int32_t t) const noexcept {
    return {page_row(s, t), static_cast<std::size_t>(table(s, t).pages_after)};
  }
  /// Pages of the values of table `t` afterwards.
  [[nodiscard]] std::span<PageId> v_pages(SequenceId s, std::int32_t t) const noexcept {
    return {page_row(s, t) + (header_->separate_values ? header_->max_pages : 0),
            static_cast<std::size_t>(table(s, t).pages_after)};
  }
  /// Entry that each page of `k_pages` had before; -1: a spare page.
  [[nodiscard]] std::span<std::int32_t> sources(SequenceId s, std::int32_t t) const noexcept {
    return {array<std::int32_t>(header_->sources) + table_index(s, t) * header_->max_pages,
            static_cast<std::size_t>(table(s, t).pages_after)};
  }

  /// Calls f(row) for each row of (sequence, layer, KV head) that stays, ascending.
  template <class F>
  void for_each_kept(SequenceId s, LayerId l, HeadId h, F&& f) const {
    const std::int32_t t = table_of(l, h);
    const TablePlan& plan = table(s, t);
    if (!plan.evicts || plan.removal == Removal::overwrite_slot) {
      const std::int32_t gone = plan.evicts ? head(s, l, h).victim : plan.append_row;
      for (std::int32_t r = 0; r < plan.extent_before; ++r) {
        if (r != gone) { f(r); }
      }
    } else if (plan.removal == Removal::drop_pages) {
      for (const std::int32_t e : sources(s, t)) {
        const std::int32_t begin = e * header_->page_size - plan.first_row;
        const std::int32_t end = std::min(begin + header_->page_size, plan.extent_before);
        for (std::int32_t r = std::max(0, begin); r < end; ++r) { f(r); }
      }
    } else {
      for (const std::int32_t r : kept_list(s, l, h)) { f(r); }
    }
  }

  /// Bytes of the plan; the serialised form (`Plan::from_bytes`).
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
    return {reinterpret_cast<const std::byte*>(header_),
            header_ == nullptr ? 0 : static_cast<std::size_t>(header_->bytes)};
  }
  /// Used by the stages.
  [[nodiscard]] detail::PlanHeader* header() const noexcept { return header_; }
  /// Used by the planner: storage for kept rows and evicted positions, [max_rows].
  [[nodiscard]] std::int32_t* rows(SequenceId s, LayerId l, HeadId h) const noexcept {
    return array<std::int32_t>(header_->rows) + head_index(s, l, h) * header_->max_rows;
  }

  /// Whether two plans do the same.
  [[nodiscard]] friend bool operator==(const PlanView& a, const PlanView& b) {
    if (a.header_ == nullptr || b.header_ == nullptr) {
      return a.header_ == b.header_ && a.failure_ == b.failure_;
    }
    const auto& x = *a.header_;
    const auto& y = *b.header_;
    if (x.status != y.status || x.scope != y.scope || x.positions != y.positions ||
        x.sequences != y.sequences || x.layers != y.layers || x.kv_heads != y.kv_heads ||
        x.page_size != y.page_size || x.evicted_rows != y.evicted_rows) {
      return false;
    }
    const auto list = [](const PlanView& p, SequenceId s, LayerId l, HeadId h) {
      std::vector<std::int32_t> kept;
      p.for_each_kept(s, l, h, [&](std::int32_t r) { kept.push_back(r); });
      return kept;
    };
    for (std::int32_t s = 0; s < x.sequences; ++s) {
      for (std::int32_t t = 0; t < x.tables; ++t) {
        const SequenceId q{s};
        if (!std::ranges::equal(a.k_pages(q, t), b.k_pages(q, t)) ||
            !std::ranges::equal(a.v_pages(q, t), b.v_pages(q, t)) ||
            !std::ranges::equal(a.released(q, t), b.released(q, t)) ||
            a.table(q, t).append_row != b.table(q, t).append_row ||
            a.table(q, t).evicts != b.table(q, t).evicts ||
            (a.table(q, t).evicts && a.table(q, t).removal != b.table(q, t).removal)) {
          return false;
        }
      }
      for (std::int32_t l = 0; l < x.layers; ++l) {
        for (std::int32_t h = 0; h < x.kv_heads; ++h) {
          if (list(a, SequenceId{s}, LayerId{l}, HeadId{h}) !=
              list(b, SequenceId{s}, LayerId{l}, HeadId{h})) {
            return false;
          }
        }
      }
    }
    return true;
  }

 private:
  template <class T>
  [[nodiscard]] T* array(std::int64_t offset) const noexcept {
    return reinterpret_cast<T*>(reinterpret_cast<std::byte*>(header_) + offset);
  }
  [[nodiscard]] std::int64_t head_index(SequenceId s, LayerId l, HeadId h) const noexcept {
    return (static_cast<std::int64_t>(raw(s)) * header_->layers + raw(l)) * header_->kv_heads +
           raw(h);
  }
  [[nodiscard]] std::int64_t table_index(SequenceId s, std::int32_t t) const noexcept {
    return static_cast<std::int64_t>(raw(s)) * header_->tables + t;
  }
  [[nodiscard]] PageId* page_row(SequenceId s, std::int32_t t) const noexcept {
    return reinterpret_cast<PageId*>(array<std::int32_t>(header_->pages) +
                                     table_index(s, t) * 2 * header_->max_pages);
  }

  detail::PlanHeader* header_ = nullptr;
  Status failure_ = Status::ok;
};

/// A plan that owns its memory: to keep, to send, to compare later.
///
/// \par Allocation
/// on construction and copy
class Plan {
 public:
  /// No plan.
  Plan() = default;
  /// Copies `view`.
  explicit Plan(const PlanView& view) : bytes_(view.bytes().begin(), view.bytes().end()) {
    if (bytes_.empty()) { failure_ = view.status(); }
  }
  /// Reads a plan back from what `PlanView::bytes` gave.
  ///
  /// \returns an empty plan with status `bad_observation` if `bytes` are not a plan: if any count, offset, row or enumerator
  ///   is out of its range. Whether the plan fits a cache is checked by `apply`
  [[nodiscard]] static Plan from_bytes(std::span<const std::byte> bytes) {
    Plan plan;
    plan.failure_ = Status::bad_observation;
    if (!has_layout(bytes)) { return plan; }
    plan.bytes_.assign(bytes.begin(), bytes.end());
    if (!has_sound_lists(plan.view())) { plan.bytes_.clear(); }
    return plan;
  }
  /// The plan; valid while this object is neither changed nor moved from.
  [[nodiscard]] PlanView view() noexcept {
    return bytes_.empty() ? PlanView(failure_)
                          : PlanView(reinterpret_cast<detail::PlanHeader*>(bytes_.data()));
  }
  /// Whether nothing goes; true for a plan that was moved from.
  [[nodiscard]] bool empty() noexcept { return view().empty(); }

 private:
  // Whether the header's counts and offsets are those of a block of this size, and every bool is valid.
  [[nodiscard]] static bool has_layout(std::span<const std::byte> bytes) noexcept {
    using detail::PlanHeader;
    const auto size = static_cast<std::int64_t>(bytes.size());
    if (size < static_cast<std::int64_t>(sizeof(PlanHeader))) { return false; }
    const auto is_bool = [&](std::int64_t at) {
      return std::to_integer<unsigned>(bytes[static_cast<std::size_t>(at)]) <= 1U;
    };
    if (!is_bool(offsetof(PlanHeader, separate_values))) { return false; }
    PlanHeader x;
    std::memcpy(static_cast<void*>(&x), bytes.data(), sizeof x);
    if (x.magic != detail::plan_magic || x.bytes != size ||
        x.stage > detail::PlanStage::committed || x.status > Status::length_beyond_table ||
        x.positions > PositionMode::sinks_follow || x.scope > TableScope::head || x.page_size < 1 ||
        x.max_rows < 0 || x.max_pages != pages_for(x.max_rows, x.page_size) ||
        x.spares_needed < 0) {
      return false;
    }
    // A product of counts, or -1 if it exceeds the size of the block.
    const auto product = [&](std::initializer_list<std::int64_t> counts) {
      std::int64_t n = 1;
      for (const std::int64_t c : counts) {
        if (c < 0 || (c > 0 && n > size / c)) { return std::int64_t{-1}; }
        n *= c;
      }
      return n;
    };
    const std::int64_t heads = product({x.sequences, x.layers, x.kv_heads});
    const std::int64_t tables = product({x.sequences, x.tables});
    if (heads < 0 || tables < 0 ||
        x.tables != (x.scope == TableScope::group   ? 1
                     : x.scope == TableScope::layer ? x.layers
                                                    : product({x.layers, x.kv_heads}))) {
      return false;
    }
    std::int64_t end = sizeof x;
    const auto holds = [&](std::int64_t offset, std::int64_t count, std::int64_t element_bytes) {
      const std::int64_t needed = count < 0 ? -1 : product({count, element_bytes});
      const bool fits = needed >= 0 && offset >= end && offset % 8 == 0 && offset <= size - needed;
      end = offset + needed;
      return fits;
    };
    if (!holds(x.table_plans, tables, sizeof(TablePlan)) ||
        !holds(x.head_plans, heads, sizeof(HeadPlan)) ||
        !holds(x.rows, product({heads, x.max_rows}), 4) ||
        !holds(x.ranks, product({heads, x.max_rows}), 4) ||
        !holds(x.pages, product({tables, 2, x.max_pages}), 4) ||
        !holds(x.sources, product({tables, x.max_pages}), 4) ||
        !holds(x.released, product({tables, 2, x.max_pages}), 4)) {
      return false;
    }
    for (std::int64_t t = 0; t < tables; ++t) {
      const std::int64_t at = x.table_plans + t * static_cast<std::int64_t>(sizeof(TablePlan));
      if (!is_bool(at + static_cast<std::int64_t>(offsetof(TablePlan, evicts))) ||
          !is_bool(at + static_cast<std::int64_t>(offsetof(TablePlan, ordered_after)))) {
        return false;
      }
    }
    return true;
  }

  // Whether every list fits its space, and names rows and entries that the table had.
  [[nodiscard]] static bool has_sound_lists(const PlanView& plan) noexcept {
    const detail::PlanHeader& x = *plan.header();
    const auto within = [](std::int32_t i, std::int32_t low, std::int32_t high) {
      return i >= low && i <= high;
    };
    const auto sound_table = [&](SequenceId s, std::int32_t t) {
      const TablePlan& p = plan.table(s, t);
      return p.status <= Status::length_beyond_table && p.removal <= Removal::stable_pack &&
             within(p.extent_before, 0, x.max_rows) && within(p.live_before, 0, p.extent_before) &&
             within(p.live_after, 0, p.live_before) && within(p.append_row, -1, p.extent_before) &&
             within(p.first_row, 0, x.max_rows - p.extent_before) &&
             within(p.pages_before, 0, x.max_pages) && within(p.pages_after, 0, p.pages_before) &&
             within(p.released, 0, 2 * x.max_pages) && within(p.shared_kept, 0, p.pages_after) &&
             within(p.spare_pages, 0, p.pages_after) &&
             std::ranges::all_of(plan.sources(s, t), [&](std::int32_t e) {
               return within(e, -1, p.pages_before - 1) &&
                      (e >= 0 || !p.evicts || p.removal != Removal::drop_pages);
             });
    };
    const auto sound_head = [&](SequenceId s, LayerId l, HeadId h) {
      const TablePlan& p = plan.table(s, plan.table_of(l, h));
      const HeadPlan& q = plan.head(s, l, h);
      const bool packs =
          p.evicts && p.removal != Removal::overwrite_slot && p.removal != Removal::drop_pages;
      const bool counts = within(q.kept, 0, x.max_rows) &&
                          within(q.evicted, 0, x.max_rows - q.kept) &&
                          within(q.victim, -1, p.extent_before - 1) && within(q.has_ranks, 0, 1) &&
                          (!packs || q.kept == p.live_after) &&
                          (!p.evicts || p.removal != Removal::overwrite_slot || q.victim >= 0);
      std::int32_t last = -1;
      return counts &&
             std::ranges::all_of(plan.kept_list(s, l, h),
                                 [&](std::int32_t r) {
                                   const bool ascends = within(r, last + 1, p.extent_before - 1);
                                   last = r;
                                   return ascends;
                                 }) &&
             std::ranges::all_of(plan.ranks(s, l, h),
                                 [&](std::int32_t r) { return within(r, 0, q.kept - 1); });
    };
    std::int64_t evicted = 0;
    std::int64_t kept = 0;
    for (std::int32_t s = 0; s < x.sequences; ++s) {
      for (std::int32_t t = 0; t < x.tables; ++t) {
        if (!sound_table(SequenceId{s}, t)) { return false; }
      }
      for (std::int32_t l = 0; l < x.layers; ++l) {
        for (std::int32_t h = 0; h < x.kv_heads; ++h) {
          if (!sound_head(SequenceId{s}, LayerId{l}, HeadId{h})) { return false; }
          const std::int32_t gone = plan.head(SequenceId{s}, LayerId{l}, HeadId{h}).evicted;
          evicted += gone;
          kept +=
              plan.table(SequenceId{s}, plan.table_of(LayerId{l}, HeadId{h})).live_before - gone;
        }
      }
    }
    return evicted == x.evicted_rows && kept == x.kept_rows;
  }

  std::vector<std::byte> bytes_;
  Status failure_ = Status::ok;
};

/// A plan in words, one line per table: for logs and tests.
[[nodiscard]] inline std::string to_string(const PlanView& plan) {
  std::string text = "plan: ";
  text += to_string(plan.status());
  text += ", evicts " + std::to_string(plan.evicted_rows()) + " rows, keeps " +
          std::to_string(plan.kept_rows()) + ", moves " + std::to_string(plan.bytes_moved()) +
          " bytes, positions ";
  text += to_string(plan.positions());
  text += '\n';
  for (std::int32_t s = 0; s < plan.sequences(); ++s) {
    for (std::int32_t t = 0; t < plan.tables(); ++t) {
      const TablePlan& table = plan.table(SequenceId{s}, t);
      text += "  sequence " + std::to_string(s) + " table " + std::to_string(t) + ": " +
              std::to_string(table.live_before) + " -> " + std::to_string(table.live_after) +
              " rows, " + std::to_string(table.pages_before) + " -> " +
              std::to_string(table.pages_after) + " pages, ";
      text += table.evicts ? to_string(table.removal) : std::string_view("nothing to do");
      text += '\n';
    }
  }
  return text;
}

}  // namespace kvtrim
