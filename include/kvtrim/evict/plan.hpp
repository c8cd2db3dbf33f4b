// SPDX-License-Identifier: Apache-2.0
#pragma once

// A plan is one block of bytes without pointers: a header, then arrays whose places follow from its counts. So a plan can
// be copied, compared, written to a file and read back (plan_bytes.hpp).

#include <kvtrim/core/arena.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/core/saturating.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace kvtrim {

/// What happens to one page table.
struct TablePlan {
  Status status = Status::ok;
  Removal removal = Removal::stable_pack;  ///< how rows are removed
  bool evicts = false;                     ///< whether anything goes
  bool ordered_after = true;               ///< slot order is position order afterwards
  bool replaced = false;                   ///< `stable_pack` in place of the way that was asked for
  bool positions_known = true;  ///< otherwise rows went before and nothing tells their positions
  std::uint16_t zero =
      0;  ///< so that no byte is without a value: plans are sent and compared as bytes
  std::int32_t live_before = 0;      ///< live rows
  std::int32_t live_after = 0;       ///< rows that stay
  std::int32_t extent_before = 0;    ///< rows in use, a hole included
  std::int32_t first_row = 0;        ///< rows of left padding
  std::int32_t append_row = -1;      ///< row of the next append, if it is a hole
  std::int32_t pages_before = 0;     ///< entries in use
  std::int32_t pages_after = 0;      ///< entries afterwards
  std::int32_t released = 0;         ///< pages that leave (K and V ids counted separately)
  std::int32_t shared_kept = 0;      ///< leading shared pages that stay as they are
  std::int32_t spare_pages = 0;      ///< spare pages that replace shared ones
  std::int32_t reserved_before = 0;  ///< entries behind the used ones, for rows to come
  std::int32_t reserved_after = 0;   ///< those of them that stay, behind `pages_after`
  std::uint64_t generation = 0;      ///< of the table, if it evicts (`table_generation`)
};

static_assert(std::has_unique_object_representations_v<TablePlan>);

/// What happens to one KV head of one layer.
struct HeadPlan {
  std::int32_t kept = 0;       ///< rows listed as kept (`stable_pack`, `fill_holes`)
  std::int32_t evicted = 0;    ///< rows that go
  std::int32_t victim = -1;    ///< `overwrite_slot`: the row that goes
  std::int32_t has_ranks = 0;  ///< slot order is not position order, so ranks are listed
  std::int64_t moved = 0;      ///< rows that change their place
};
static_assert(std::has_unique_object_representations_v<HeadPlan>);

namespace detail {

inline constexpr std::uint32_t plan_magic = 0x4B56'5433;  // "KVT3"
// `unchecked`: read from bytes, without the view it is for.
enum class PlanStage : std::uint32_t { planned, applied, committed, unchecked };

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
  std::int32_t page_size = 1;
  std::int32_t max_rows = 0;
  std::int32_t spares_needed = 0;
  std::int64_t nan_count = 0;
  std::int64_t bytes_moved = 0;
  std::int64_t kept_rows = 0;
  std::int64_t evicted_rows = 0;
};
inline constexpr PlanHeader no_plan{};

// Byte offsets of the arrays behind a header.
struct PlanLayout {
  std::int64_t tables = 0;       // of a sequence
  std::int64_t max_pages = 0;    // of a table
  std::int64_t table_plans = 0;  // TablePlan [sequences, tables]
  std::int64_t head_plans = 0;   // HeadPlan [sequences, layers, kv_heads]
  std::int64_t rows = 0;         // int32 [heads, max_rows]: kept rows, then evicted positions
  std::int64_t ranks = 0;        // int32, as rows: rank of each kept row
  std::int64_t pages = 0;     // int32 [sequences, tables, 2, max_pages]: K and V pages afterwards
  std::int64_t sources = 0;   // int32 [sequences, tables, max_pages]: entry each of them had before
  std::int64_t released = 0;  // int32 [sequences, tables, 2 * max_pages]: tail first
  std::int64_t bytes = 0;     // of the whole plan

  constexpr explicit PlanLayout(const PlanHeader& x) noexcept
      : tables(tables_of(x.scope, x.layers, x.kv_heads)),
        max_pages(pages_for(x.max_rows, std::max(1, x.page_size))) {
    const std::int64_t all_tables = x.sequences * tables;
    const std::int64_t heads = static_cast<std::int64_t>(x.sequences) * x.layers * x.kv_heads;
    const auto place = [this](std::int64_t count, std::int64_t element_bytes) {
      constexpr std::int64_t alignment = Arena::alignment;
      const std::int64_t at = bytes;
      const std::int64_t length = saturated_product({count, element_bytes});
      bytes = saturated_sum({bytes, length, alignment - 1}) / alignment * alignment;
      return at;
    };
    static_cast<void>(place(1, sizeof(PlanHeader)));
    table_plans = place(all_tables, sizeof(TablePlan));
    head_plans = place(heads, sizeof(HeadPlan));
    rows = place(heads * x.max_rows, 4);
    ranks = place(heads * x.max_rows, 4);
    pages = place(all_tables * max_pages, 8);
    sources = place(all_tables * max_pages, 4);
    released = place(all_tables * max_pages, 8);
  }
};

}  // namespace detail

/// A plan in memory that it does not own, to read: cheap to copy, valid as long as that memory is.
///
/// Rows are numbered as in the table at the time the plan was made. Sequences, tables, layers and KV heads are those of the
/// view that it was made from: any other is a precondition broken.
class PlanView {
 public:
  /// No plan: empty.
  PlanView() = default;
  /// Used by `plan()`.
  explicit PlanView(const detail::PlanHeader& header) noexcept
      : header_(&header), layout_(header) {}
  /// A plan that could not be made.
  explicit PlanView(Status status) noexcept : failure_(status) {}

  /// `ok` or `over_budget`: the plan may be applied. Anything else: nothing was planned.
  [[nodiscard]] Status status() const noexcept {
    return failure_ != Status::ok ? failure_ : header_->status;
  }
  /// Whether nothing goes.
  [[nodiscard]] bool empty() const noexcept { return header_->evicted_rows == 0; }
  /// Rows that go, summed over layers and KV heads.
  [[nodiscard]] std::int64_t evicted_rows() const noexcept { return header_->evicted_rows; }
  /// Rows that stay, summed over layers and KV heads.
  [[nodiscard]] std::int64_t kept_rows() const noexcept { return header_->kept_rows; }
  /// Bytes of keys, values and page planes that apply will move.
  [[nodiscard]] std::int64_t bytes_moved() const noexcept { return header_->bytes_moved; }
  /// NaN among the candidates' scores.
  [[nodiscard]] std::int64_t nan_count() const noexcept { return header_->nan_count; }
  /// Spare pages that the plan takes; with `out_of_pages`, the number it would need.
  [[nodiscard]] std::int32_t spares_needed() const noexcept { return header_->spares_needed; }
  /// Position mode that it was made for.
  [[nodiscard]] PositionMode positions() const noexcept { return header_->positions; }
  /// Sequences of the view it was made from.
  [[nodiscard]] std::int32_t sequences() const noexcept { return header_->sequences; }
  /// Its layers.
  [[nodiscard]] std::int32_t layers() const noexcept { return header_->layers; }
  /// Its KV heads.
  [[nodiscard]] std::int32_t kv_heads() const noexcept { return header_->kv_heads; }
  /// Its tables per sequence.
  [[nodiscard]] std::int32_t tables() const noexcept {
    return static_cast<std::int32_t>(layout_.tables);
  }
  /// Which of them serves (layer, KV head).
  [[nodiscard]] std::int32_t table_of(LayerId l, HeadId h) const noexcept {
    return kvtrim::table_of(header_->scope, header_->kv_heads, l, h);
  }

  /// Plan of table `t` of sequence `s`.
  [[nodiscard]] const TablePlan& table(SequenceId s, std::int32_t t) const noexcept {
    return array<TablePlan>(layout_.table_plans)[table_index(s, t)];
  }
  /// Plan of (sequence, layer, KV head).
  [[nodiscard]] const HeadPlan& head(SequenceId s, LayerId l, HeadId h) const noexcept {
    return array<HeadPlan>(layout_.head_plans)[head_index(s, l, h)];
  }
  /// Rows listed as kept, ascending. Empty for `drop_pages` and `overwrite_slot`: use `for_each_kept` for any way of removal.
  [[nodiscard]] std::span<const std::int32_t> kept_list(SequenceId s,
                                                        LayerId l,
                                                        HeadId h) const noexcept {
    return {rows(s, l, h), static_cast<std::size_t>(head(s, l, h).kept)};
  }
  /// Rank by position of each row of `kept_list`; empty if rows are in position order.
  [[nodiscard]] std::span<const std::int32_t> ranks(SequenceId s,
                                                    LayerId l,
                                                    HeadId h) const noexcept {
    const HeadPlan& plan = head(s, l, h);
    return {array<std::int32_t>(layout_.ranks) + head_index(s, l, h) * header_->max_rows,
            plan.has_ranks != 0 ? static_cast<std::size_t>(plan.kept) : 0};
  }
  /// Positions of the rows that go, ascending; rows of the table where `TablePlan::positions_known` is false.
  [[nodiscard]] std::span<const Position> evicted(SequenceId s,
                                                  LayerId l,
                                                  HeadId h) const noexcept {
    const HeadPlan& plan = head(s, l, h);
    return {reinterpret_cast<const Position*>(rows(s, l, h) + plan.kept),
            static_cast<std::size_t>(plan.evicted)};
  }
  /// Pages that leave table `t`, tail first.
  [[nodiscard]] std::span<const PageId> released(SequenceId s, std::int32_t t) const noexcept {
    return {array<PageId>(layout_.released) + table_index(s, t) * 2 * layout_.max_pages,
            static_cast<std::size_t>(table(s, t).released)};
  }
  /// Whether `evicted` lists positions for every table that evicts; false where rows have gone before and the view has no
  /// plane of positions.
  [[nodiscard]] bool positions_known() const noexcept {
    bool known = true;
    for_each_evicting(
        [&](SequenceId s, std::int32_t t) { known = known && table(s, t).positions_known; });
    return known;
  }
  /// Pages of the keys of table `t` afterwards, reserved ones last; empty if nothing goes from it.
  [[nodiscard]] std::span<const PageId> k_pages(SequenceId s, std::int32_t t) const noexcept {
    return {array<PageId>(layout_.pages) + table_index(s, t) * 2 * layout_.max_pages,
            entries_after(s, t)};
  }
  /// Pages of the values of table `t` afterwards.
  [[nodiscard]] std::span<const PageId> v_pages(SequenceId s, std::int32_t t) const noexcept {
    const auto keys = k_pages(s, t);
    return {keys.data() + (header_->separate_values ? layout_.max_pages : 0), keys.size()};
  }
  /// Entry that each page of `k_pages` had before; -1: a spare page.
  [[nodiscard]] std::span<const std::int32_t> sources(SequenceId s, std::int32_t t) const noexcept {
    return {array<std::int32_t>(layout_.sources) + table_index(s, t) * layout_.max_pages,
            entries_after(s, t)};
  }

  /// Calls f(sequence, table) for the tables from which rows go.
  template <class F>
  void for_each_evicting(F&& f) const {
    for (std::int32_t s = 0; s < sequences(); ++s) {
      for (std::int32_t t = 0; t < tables(); ++t) {
        if (table(SequenceId{s}, t).evicts) { f(SequenceId{s}, t); }
      }
    }
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
            header_ == &detail::no_plan ? 0 : static_cast<std::size_t>(layout_.bytes)};
  }
  /// Used by the stages.
  [[nodiscard]] const detail::PlanHeader& header() const noexcept { return *header_; }
  /// Used by the stages: storage of kept rows and evicted positions, [max_rows].
  [[nodiscard]] const std::int32_t* rows(SequenceId s, LayerId l, HeadId h) const noexcept {
    return array<std::int32_t>(layout_.rows) + head_index(s, l, h) * header_->max_rows;
  }

  /// Whether two plans do the same.
  [[nodiscard]] friend bool operator==(const PlanView& a, const PlanView& b) {
    const detail::PlanHeader& x = *a.header_;
    const detail::PlanHeader& y = *b.header_;
    if (a.status() != b.status() || x.scope != y.scope || x.positions != y.positions ||
        x.sequences != y.sequences || x.layers != y.layers || x.kv_heads != y.kv_heads ||
        x.page_size != y.page_size || x.evicted_rows != y.evicted_rows) {
      return false;
    }
    const auto kept = [](const PlanView& plan, std::int64_t head) {
      std::vector<std::int32_t> list;
      const std::int64_t layer = head / plan.kv_heads();
      plan.for_each_kept(SequenceId{static_cast<std::int32_t>(layer / plan.layers())},
                         LayerId{static_cast<std::int32_t>(layer % plan.layers())},
                         HeadId{static_cast<std::int32_t>(head % plan.kv_heads())},
                         [&](std::int32_t r) { list.push_back(r); });
      return list;
    };
    bool same = true;
    for (std::int32_t i = 0; same && i < x.sequences * a.tables(); ++i) {
      const SequenceId s{i / a.tables()};
      const std::int32_t t = i % a.tables();
      const TablePlan& p = a.table(s, t);
      const TablePlan& q = b.table(s, t);
      same = std::ranges::equal(a.k_pages(s, t), b.k_pages(s, t)) &&
             std::ranges::equal(a.v_pages(s, t), b.v_pages(s, t)) &&
             std::ranges::equal(a.released(s, t), b.released(s, t)) &&
             p.append_row == q.append_row && p.evicts == q.evicts &&
             (!p.evicts || p.removal == q.removal);
    }
    const std::int64_t heads = static_cast<std::int64_t>(x.sequences) * x.layers * x.kv_heads;
    for (std::int64_t i = 0; same && i < heads; ++i) { same = kept(a, i) == kept(b, i); }
    return same;
  }

 private:
  template <class T>
  [[nodiscard]] const T* array(std::int64_t offset) const noexcept {
    return reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(header_) + offset);
  }
  // Every id of a caller goes through one of the next two.
  [[nodiscard]] std::int64_t head_index(SequenceId s, LayerId l, HeadId h) const noexcept {
    KVTRIM_ASSERT(raw(s) >= 0 && raw(s) < header_->sequences && "no such sequence of the plan");
    KVTRIM_ASSERT(raw(l) >= 0 && raw(l) < header_->layers && "no such layer of the plan");
    KVTRIM_ASSERT(raw(h) >= 0 && raw(h) < header_->kv_heads && "no such KV head of the plan");
    return (static_cast<std::int64_t>(raw(s)) * header_->layers + raw(l)) * header_->kv_heads +
           raw(h);
  }
  [[nodiscard]] std::int64_t table_index(SequenceId s, std::int32_t t) const noexcept {
    KVTRIM_ASSERT(raw(s) >= 0 && raw(s) < header_->sequences && "no such sequence of the plan");
    KVTRIM_ASSERT(t >= 0 && t < layout_.tables && "no such table of the plan");
    return raw(s) * layout_.tables + t;
  }
  [[nodiscard]] std::size_t entries_after(SequenceId s, std::int32_t t) const noexcept {
    const TablePlan& plan = table(s, t);
    return plan.evicts ? static_cast<std::size_t>(plan.pages_after + plan.reserved_after) : 0;
  }

  const detail::PlanHeader* header_ = &detail::no_plan;
  detail::PlanLayout layout_{detail::no_plan};
  Status failure_ = Status::ok;
};

/// A plan that may be applied and committed, once: a `PlanView`, and the right to advance its stage.
class PlanRef : public PlanView {
 public:
  /// No plan: empty, and safe to apply.
  PlanRef() = default;
  /// Used by `plan()`.
  explicit PlanRef(detail::PlanHeader& header) noexcept : PlanView(header), own_(&header) {}
  /// A plan that could not be made.
  explicit PlanRef(Status status) noexcept : PlanView(status) {}

  /// Used by `apply` and `commit`; null: there is no plan.
  [[nodiscard]] detail::PlanHeader* own_header() const noexcept { return own_; }
  /// Used by `apply`: the plan lies in memory that this object may write.
  [[nodiscard]] TablePlan& own_table(SequenceId s, std::int32_t t) const noexcept {
    return const_cast<TablePlan&>(table(s, t));
  }

 private:
  detail::PlanHeader* own_ = nullptr;
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
