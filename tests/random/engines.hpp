// SPDX-License-Identifier: Apache-2.0
#pragma once

// The two kinds of cache that the random-operation test drives: a PagedCache, and an engine that owns pools, tables and
// planes and appends by itself. Over 400 lines: the second is a whole engine.

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/evict/commit.hpp>

#include "random/setup.hpp"
#include "support/fill.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace kvtrim::random_test {

/// One table as its engine holds it: entries used, then reserved ones; -1 where only padding is.
struct Table {
  Ints k, v;
  std::int32_t used = 0;
};

/// What the test needs of a cache. Sequences are numbered from 0.
class Engine {
 public:
  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  virtual ~Engine() = default;
  virtual CacheView view(std::int32_t s) = 0;  // -1: all sequences
  virtual SequenceState state(std::int32_t s, std::int32_t t) = 0;
  virtual Table table(std::int32_t s, std::int32_t t) = 0;
  virtual std::int32_t first_row(std::int32_t) { return 0; }
  virtual std::int32_t count(std::int32_t page) = 0;
  virtual std::int32_t available() = 0;
  virtual std::int32_t acquire() = 0;
  virtual void release(std::int32_t page) = 0;
  virtual bool create(std::int32_t s) = 0;
  virtual void reset(std::int32_t s, bool destroy) = 0;
  virtual Status fork(std::int32_t s, std::int32_t made) = 0;
  virtual Status extend(std::int32_t s, std::int32_t n) = 0;
  virtual Status write(std::int32_t s, std::int32_t l, const NewRows& rows) = 0;
  virtual Status truncate(std::int32_t s, std::int32_t next, bool cancel, std::int32_t rope) = 0;
  virtual Status make_private(std::int32_t s) = 0;
  virtual Report commit(const PlanRef& plan, const CacheView& view) = 0;
};

class PagedEngine : public Engine {
 public:
  explicit PagedEngine(const Setup& x)
      : x_(x),
        cache_({.pages = x.pages,
                .page_size = x.page_size,
                .layers = x.layers,
                .kv_heads = x.heads,
                .key_dim = key_dim,
                .value_dim = value_dim,
                .dtype = x.dtype,
                .scope = x.scope,
                .max_sequences = x.sequences,
                .max_rows = x.max_rows,
                .scores = x.scores,
                .unrotated_keys = x.keys == KeyForm::with_source,
                .scrub = x.scrub}) {
    test::fill_unwritten(cache_);
  }
  CacheView view(std::int32_t s) override {
    return s < 0 ? cache_.view() : cache_.view(SequenceId{s});
  }
  SequenceState state(std::int32_t s, std::int32_t t) override {
    return cache_.view().states[s * x_.tables() + t];
  }
  Table table(std::int32_t s, std::int32_t t) override {
    const CacheView all = cache_.view();
    const auto entries = cache_.page_table(SequenceId{s}, all.first_layer(t), all.first_head(t));
    Table out;
    out.k.assign(entries.begin(), std::find(entries.begin(), entries.end(), -1));
    out.v = out.k;
    out.used = static_cast<std::int32_t>(out.k.size());
    return out;
  }
  std::int32_t count(std::int32_t page) override { return cache_.pool().ref_count(PageId{page}); }
  std::int32_t available() override { return cache_.pool().available(); }
  std::int32_t acquire() override { return raw(cache_.pool().try_acquire().value()); }
  void release(std::int32_t page) override { cache_.release(PageId{page}); }
  bool create(std::int32_t s) override { return cache_.try_create() == SequenceId{s}; }
  void reset(std::int32_t s, bool destroy) override {
    destroy ? cache_.destroy(SequenceId{s}) : cache_.reset(SequenceId{s});
  }
  Status fork(std::int32_t s, std::int32_t made) override {
    Status why = Status::ok;
    const auto fork = cache_.try_fork(SequenceId{s}, &why);
    return fork && raw(*fork) != made ? Status::torn : why;
  }
  Status extend(std::int32_t s, std::int32_t n) override {
    return cache_.try_extend(SequenceId{s}, n);
  }
  Status write(std::int32_t s, std::int32_t l, const NewRows& rows) override {
    const float* const plain = x_.keys == KeyForm::with_source ? rows.plain.data() : nullptr;
    return cache_.write(
        SequenceId{s}, LayerId{l}, {rows.keys.data()}, {rows.values.data()}, {plain});
  }
  Status truncate(std::int32_t s, std::int32_t next, bool cancel, std::int32_t) override {
    return cancel ? cache_.try_cancel_step(SequenceId{s})
                  : cache_.try_truncate(SequenceId{s}, Position{next});
  }
  Status make_private(std::int32_t s) override { return cache_.try_make_private(SequenceId{s}); }
  Report commit(const PlanRef& plan, const CacheView& view) override {
    auto sink = cache_.sink_for(view);
    return kvtrim::commit(plan, view, sink);
  }

 private:
  Setup x_;
  PagedCache cache_;
};

/// An engine with tables of its own, written for clarity. The driver calls it only where its own rules allow.
class ForeignEngine : public Engine {
 public:
  ForeignEngine(const Setup& x, std::uint64_t seed) : x_(x), random_(seed) {
    const std::int64_t rows = std::int64_t{x.layers} * x.pages * x.page_size * x.heads;
    const std::int64_t bytes = rows * element_bytes(x.dtype);
    constexpr std::byte unwritten{0xFF};  // a NaN in every dtype
    keys_.assign(at(bytes * key_dim), unwritten), values_.assign(at(bytes * value_dim), unwritten);
    plain_.assign(x.keys == KeyForm::with_source ? keys_.size() : 0, unwritten);
    marks_.assign(at(rows), 99);
    max_pages_ = pages_for(x.max_rows + 2 * x.page_size, x.page_size) + 3;
    ids_.assign(at(std::int64_t{x.sequences} * x.tables() * stride()), -1);
    const std::int64_t tables = std::int64_t{x.sequences} * x.tables();
    states_.assign(at(tables), {}), lengths_.assign(at(tables), 0),
        generations_.assign(at(tables), 7);
    reserved_.assign(at(tables), 0), open_rows_.assign(at(tables), {});
    first_rows_.assign(at(x.sequences), 0), counts_.assign(at(x.pages), 0);
    unwritten_.assign(at(x.sequences) * at(x.layers), false);
    const std::int64_t elements = std::int64_t{x.sequences} * x.layers * x.heads * x.max_rows;
    for (Ints* plane : {&positions_, &ropes_, &tags_}) { plane->assign(at(elements), -5); }
    for (std::vector<float>* plane : {&sums_, &compensations_}) {
      plane->assign(x.scores ? at(elements) : 0, std::numeric_limits<float>::quiet_NaN());
    }
    free_.resize(at(x.pages));
    std::iota(free_.begin(), free_.end(), 0);
    tag_planes_.resize(at(x.sequences + 1));
    hnd_ = random_.below(2) == 0, marks_of_values_ = random_.below(2) == 0;
    for (std::int32_t s = 0; s < x.sequences; ++s) { reset(s, true); }
  }
  CacheView view(std::int32_t s) override {
    CacheView out;
    const bool one_head = x_.scope == TableScope::head && !x_.own_memory;
    const auto plane = [&](std::vector<std::byte>& memory, std::int32_t dim) {
      const PlaneShape shape{x_.page_size, one_head ? 1 : x_.heads, dim, x_.dtype};
      Plane p = hnd_ ? Plane::hnd(memory.data(), shape) : Plane::nhd(memory.data(), shape);
      if (one_head) { p.head_stride = 0; }
      p.layer_stride =
          x_.scope == TableScope::group || x_.own_memory ? x_.pages * p.page_stride : 0;
      return p;
    };
    out.k = plane(keys_, key_dim), out.v = plane(values_, value_dim);
    if (!plain_.empty()) { out.unrotated_keys = plane(plain_, key_dim); }
    out.page_size = x_.page_size, out.pages = x_.pages, out.kv_heads = x_.heads;
    out.layers = x_.layers, out.sequences = x_.sequences, out.scope = x_.scope;
    out.table.ids = ids_.data();
    out.table.rows = {x_.tables(),
                      x_.scope == TableScope::group ? 0 : x_.tables() / x_.layers,
                      x_.scope == TableScope::head ? 1 : 0};
    out.table.row_stride = stride(), out.table.max_pages = max_pages_;
    out.table.v_offset = x_.separate ? max_pages_ : 0;
    if (x_.flags) { out.table.id_mask = 0x3FFF'FFFF; }
    if (x_.lengths) { out.lengths = lengths_.data(), out.length_rows = out.table.rows; }
    if (x_.padding) { out.first_rows = first_rows_.data(); }
    if (x_.states) { out.states = states_.data(); }
    if (x_.generations) { out.generations = generations_.data(); }
    if (x_.reserved) { out.reserved_pages = reserved_.data(); }
    if (x_.refs) { out.writable.ref_counts = counts_.data(); }
    const auto rows = [&](auto& memory) {
      return SequencePlane::dense(memory.data(), x_.layers, x_.heads, x_.max_rows);
    };
    if (x_.positions) { out.positions = rows(positions_); }
    if (x_.common) { out.positions.head_stride = 0; }
    if (x_.ropes) { out.rope_positions = rows(ropes_); }
    if (x_.scores) { out.score_sums = rows(sums_), out.score_compensations = rows(compensations_); }
    if (x_.marks) {
      page_plane_.base = reinterpret_cast<std::byte*>(marks_.data());
      page_plane_.row_bytes = page_plane_.head_stride = 4;
      page_plane_.token_stride = 4 * x_.heads;
      page_plane_.page_stride = x_.page_size * page_plane_.token_stride;
      page_plane_.layer_stride = x_.pages * page_plane_.page_stride;
      page_plane_.of_values = marks_of_values_;
      SequencePlane& tags = tag_planes_[at(s + 1)];
      tags = rows(tags_);
      out.page_planes = &page_plane_, out.page_plane_count = 1;
      out.more_planes = &tags, out.more_plane_count = 1;
      if (s > 0) { tags.base += s * tags.sequence_stride; }
    }
    if (s < 0) { return out; }
    out.sequences = 1;
    out.table.ids += s * x_.tables() * stride();
    if (out.lengths != nullptr) { out.lengths += s * x_.tables(); }
    if (out.first_rows != nullptr) { out.first_rows += s; }
    if (out.states != nullptr) { out.states += s * x_.tables(); }
    if (out.generations != nullptr) { out.generations += s * x_.tables(); }
    if (out.reserved_pages != nullptr) { out.reserved_pages += s * x_.tables(); }
    for (SequencePlane* of :
         {&out.positions, &out.rope_positions, &out.score_sums, &out.score_compensations}) {
      if (*of) { of->base += s * of->sequence_stride; }
    }
    return out;
  }
  SequenceState state(std::int32_t s, std::int32_t t) override {
    SequenceState state = states_[index(s, t)];
    if (!x_.states) { state.live_rows = lengths_[index(s, t)]; }
    return state;
  }
  Table table(std::int32_t s, std::int32_t t) override {
    Table out;
    for (std::int32_t e = 0; e < size(s, t); ++e) {
      out.k.push_back(page(s, t, e, false));
      out.v.push_back(page(s, t, e, true));
    }
    out.used = static_cast<std::int32_t>(out.k.size()) - reserved_[index(s, t)];
    return out;
  }
  std::int32_t first_row(std::int32_t s) override { return first_rows_[at(s)]; }
  std::int32_t count(std::int32_t page) override { return counts_[at(page)]; }
  std::int32_t available() override { return static_cast<std::int32_t>(free_.size()); }
  std::int32_t acquire() override {
    const std::int32_t page = free_.back();
    free_.pop_back();
    counts_[at(page)] = 1;
    return page;
  }
  void release(std::int32_t page) override {
    if (--counts_[at(page)] == 0) { free_.push_back(page); }
  }
  bool create(std::int32_t) override { return true; }
  void reset(std::int32_t s, bool) override {
    for (std::int32_t t = 0; t < x_.tables(); ++t) {
      cut(s, t, 0);
      const std::uint64_t generation = states_[index(s, t)].generation;
      states_[index(s, t)] = {};
      states_[index(s, t)].generation = generation;
      lengths_[index(s, t)] = reserved_[index(s, t)] = 0;
      changed(s, t);
    }
    std::fill_n(unwritten_.begin() + s * x_.layers, x_.layers, false);
    first_rows_[at(s)] = x_.padding ? random_.below(2 * x_.page_size + 1) : 0;
  }
  Status fork(std::int32_t s, std::int32_t made) override {
    first_rows_[at(made)] = first_rows_[at(s)];
    for (std::int32_t t = 0; t < x_.tables(); ++t) {
      const std::int32_t used = size(s, t) - reserved_[index(s, t)];
      for (std::int32_t e = padding(s); e < used; ++e) {
        for (std::int32_t v = 0; v < (x_.separate ? 2 : 1); ++v) {
          id(made, t, e, v != 0) = id(s, t, e, v != 0);
          ++counts_[at(page(s, t, e, v != 0))];
        }
      }
      const std::uint64_t generation = states_[index(made, t)].generation;
      states_[index(made, t)] = states_[index(s, t)];
      states_[index(made, t)].generation = generation;
      lengths_[index(made, t)] = lengths_[index(s, t)];
      changed(made, t);
    }
    const auto rows = std::int64_t{x_.layers} * x_.heads * x_.max_rows;
    for (Ints* plane : {&positions_, &ropes_, &tags_}) {
      std::copy_n(plane->begin() + s * rows, rows, plane->begin() + made * rows);
    }
    for (std::vector<float>* plane : {&sums_, &compensations_}) {
      if (plane->empty()) { continue; }
      std::copy_n(plane->begin() + s * rows, rows, plane->begin() + made * rows);
    }
    return Status::ok;
  }
  // The rows are those that `SequenceState::append_row` and the length name; positions come with `write`.
  Status extend(std::int32_t s, std::int32_t n) override {
    for (std::int32_t t = 0; t < x_.tables(); ++t) {
      SequenceState now = state(s, t);
      Ints& rows = open_rows_[index(s, t)];
      rows.clear();
      if (now.append_row >= 0) { rows.push_back(now.append_row); }
      for (std::int32_t r = now.extent(); static_cast<std::int32_t>(rows.size()) < n; ++r) {
        rows.push_back(r);
      }
      for (const std::int32_t r : rows) { make_writable(s, t, (r + first_row(s)) / x_.page_size); }
      SequenceState& state = states_[index(s, t)];
      if (now.append_row >= 0) {
        state.ordered = state.ordered && now.append_row == now.extent() - 1;
        state.append_row = -1;
      }
      state.live_rows += n, state.next_position += n, state.next_rope_position += n;
      state.open = true;
      lengths_[index(s, t)] += n;
      reserved_[index(s, t)] = size(s, t) - needed_entries(s, this->state(s, t).live_rows);
      changed(s, t);
    }
    std::fill_n(unwritten_.begin() + s * x_.layers, x_.layers, true);
    return Status::ok;
  }
  Status write(std::int32_t s, std::int32_t l, const NewRows& data) override {
    const CacheView all = view(-1);
    for (std::int32_t h = 0; h < x_.heads; ++h) {
      const Ints& rows = open_rows_[index(s, x_.table_of(l, h))];
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const std::size_t from = i * at(x_.heads) + at(h);
        const std::int32_t place = rows[i] + first_row(s);
        const std::int32_t e = place / x_.page_size;
        const auto t = x_.table_of(l, h);
        const Slot slot{place % x_.page_size};
        const PageId k{page(s, t, e, false)}, v{page(s, t, e, true)};
        const auto store = [&](const Plane& plane, PageId page_of_row, const float* row) {
          std::byte* const to = plane.row(LayerId{l}, page_of_row, HeadId{h}, slot);
          for (std::int32_t d = 0; d < plane.head_dim; ++d) {
            store_element(to + d * element_bytes(x_.dtype), x_.dtype, row[d]);
          }
        };
        store(all.k, k, &data.keys[from * key_dim]),
            store(all.v, v, &data.values[from * value_dim]);
        if (!plain_.empty()) { store(all.unrotated_keys, k, &data.plain[from * key_dim]); }
        const std::int32_t tag = tag_of(&data.values[from * value_dim]);
        if (x_.marks) {
          std::byte* const to =
              page_plane_.row(LayerId{l}, marks_of_values_ ? v : k, HeadId{h}, slot);
          std::memcpy(to, &tag, 4);
        }
        tags_[element(s, l, h, rows[i])] = tag;
      }
    }
    unwritten_[at(s * x_.layers + l)] = false;
    const auto first = unwritten_.begin() + s * x_.layers;
    if (x_.scope == TableScope::group &&
        std::find(first, first + x_.layers, true) != first + x_.layers) {
      return Status::ok;
    }
    for (std::int32_t h = 0; h < x_.heads; ++h) {
      states_[index(s, x_.table_of(l, h))].open = false;
    }
    return Status::ok;
  }
  /// Positions of the rows of the last `extend`, and scores of 0.
  void number(
      std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t position, std::int32_t rope) {
    for (const std::int32_t r : open_rows_[index(s, x_.table_of(l, h))]) {
      positions_[element(s, l, x_.common ? 0 : h, r)] = position++;
      ropes_[element(s, l, h, r)] = rope++;
      if (x_.scores) { sums_[element(s, l, h, r)] = compensations_[element(s, l, h, r)] = 0; }
    }
  }
  /// Whether one of the `kept` rows before position `next` would move into a page that is shared.
  bool writes_shared(std::int32_t s, std::int32_t t, std::int32_t kept, std::int32_t next) {
    bool moves = false, shares = false;
    for_each_head(t, [&](std::int32_t l, std::int32_t h) {
      for (std::int32_t r = kept; r < state(s, t).extent(); ++r) {
        moves = moves || stays(s, l, h, r, next);
      }
    });
    for (std::int32_t e = padding(s); e < needed_entries(s, kept); ++e) {
      shares =
          shares || counts_[at(page(s, t, e, false))] > 1 || counts_[at(page(s, t, e, true))] > 1;
    }
    return moves && shares;
  }
  /// Cuts table `t` to the `kept` rows before position `next`. Those behind the first `kept` fill the holes, the last one first.
  void shorten(
      std::int32_t s, std::int32_t t, std::int32_t kept, std::int32_t next, std::int32_t rope) {
    SequenceState& state = states_[index(s, t)];
    for_each_head(t, [&](std::int32_t l, std::int32_t h) {
      std::int32_t from = this->state(s, t).extent();
      for (std::int32_t to = 0; x_.positions && to < kept; ++to) {
        if (stays(s, l, h, to, next)) { continue; }
        do { --from; } while (!stays(s, l, h, from, next));
        move_row(s, l, h, from, to);
        state.ordered = state.ordered && to == kept - 1;
      }
    });
    state.ordered = state.ordered || kept == 0, state.append_row = -1;
    lengths_[index(s, t)] = state.live_rows = kept;
    state.next_position = next, state.next_rope_position = rope;
    state.rows_at_eviction = std::min(state.rows_at_eviction, kept);
    state.open = false;
    if (!x_.reserved || kept == 0 || random_.below(2) == 0) { cut(s, t, needed_entries(s, kept)); }
    reserved_[index(s, t)] = size(s, t) - std::max(padding(s), needed_entries(s, kept));
    std::fill_n(unwritten_.begin() + s * x_.layers, x_.layers, false);
    changed(s, t);
  }
  /// Takes or returns pages for rows to come.
  void reserve(std::int32_t s, std::int32_t t, std::int32_t pages) {
    const std::int32_t used = size(s, t) - reserved_[index(s, t)];
    cut(s, t, used);
    pages = std::min(pages, max_pages_ - used);
    for (std::int32_t e = used; e < used + pages && available() > 1; ++e) {
      make_writable(s, t, e);
    }
    reserved_[index(s, t)] = size(s, t) - used;
    changed(s, t);
  }
  Status truncate(std::int32_t, std::int32_t, bool, std::int32_t) override { return Status::torn; }
  Status make_private(std::int32_t s) override {
    for (std::int32_t t = 0; t < x_.tables(); ++t) {
      for (std::int32_t e = padding(s); e < size(s, t); ++e) { make_writable(s, t, e); }
      changed(s, t);
    }
    return Status::ok;
  }
  Report commit(const PlanRef& plan, const CacheView& view) override {
    std::vector<PageId> freed(at(x_.pages), null_page);
    const std::ptrdiff_t table = (view.table.ids - ids_.data()) / stride();  // the first one
    DenseTables sink(view,
                     ids_.data() + table * stride(),
                     x_.lengths ? lengths_.data() + table : nullptr,
                     x_.refs ? counts_.data() : nullptr,
                     freed);
    const Report report = kvtrim::commit(plan, view, sink);
    for (const PageId p : sink.freed()) {
      counts_[at(raw(p))] = 0;
      free_.push_back(raw(p));
    }
    if (!usable(report.status)) { return report; }
    plan.for_each_evicting([&](SequenceId s, std::int32_t t) {
      reserved_[index(raw(s), t) + at(table)] = plan.table(s, t).reserved_after;
    });
    return report;
  }

 private:
  template <class F>
  void for_each_head(std::int32_t t, F&& f) {
    for (std::int32_t i = 0; i < x_.layers * x_.heads; ++i) {
      if (x_.table_of(i / x_.heads, i % x_.heads) == t) { f(i / x_.heads, i % x_.heads); }
    }
  }
  // Whether row `r` is live and before position `next`.
  bool stays(std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t r, std::int32_t next) {
    return r != states_[index(s, x_.table_of(l, h))].append_row &&
           positions_[element(s, l, x_.common ? 0 : h, r)] < next;
  }
  void move_row(
      std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t from, std::int32_t to) {
    const CacheView all = view(-1);
    const std::int32_t t = x_.table_of(l, h);
    const auto place = [&](const auto& plane, std::int32_t r, bool v) {
      const std::int32_t at_row = r + first_row(s);
      const PageId of{page(s, t, at_row / x_.page_size, v)};
      return plane.row(LayerId{l}, of, HeadId{h}, Slot{at_row % x_.page_size});
    };
    const auto one = [&](const auto& plane, bool v, std::int64_t bytes) {
      std::memcpy(place(plane, to, v), place(plane, from, v), at(bytes));
    };
    one(all.k, false, all.k.row_bytes()), one(all.v, true, all.v.row_bytes());
    if (!plain_.empty()) { one(all.unrotated_keys, false, all.k.row_bytes()); }
    if (x_.marks) { one(page_plane_, marks_of_values_, 4); }
    const auto move = [&](auto& plane, std::int32_t head) {
      plane[element(s, l, head, to)] = plane[element(s, l, head, from)];
    };
    move(positions_, x_.common ? 0 : h), move(ropes_, h), move(tags_, h);
    if (x_.scores) { move(sums_, h), move(compensations_, h); }
  }
  std::int32_t stride() const { return max_pages_ * (x_.separate ? 2 : 1); }
  std::size_t index(std::int32_t s, std::int32_t t) const { return at(s * x_.tables() + t); }
  std::size_t element(std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t r) const {
    return at(((s * x_.layers + l) * x_.heads + h) * x_.max_rows + r);
  }
  std::int32_t& id(std::int32_t s, std::int32_t t, std::int32_t e, bool v) {
    return ids_[index(s, t) * at(stride()) + at(e) + (v && x_.separate ? at(max_pages_) : 0)];
  }
  std::int32_t page(std::int32_t s, std::int32_t t, std::int32_t e, bool v) {
    const std::int32_t entry = id(s, t, e, v);
    return entry == -1 ? -1 : entry & 0x3FFF'FFFF;
  }
  std::int32_t padding(std::int32_t s) const { return first_rows_[at(s)] / x_.page_size; }
  std::int32_t needed_entries(std::int32_t s, std::int32_t rows) const {
    return rows == 0 ? 0 : pages_for(rows + first_rows_[at(s)], x_.page_size);
  }
  // Entries up to the last page.
  std::int32_t size(std::int32_t s, std::int32_t t) {
    std::int32_t e = max_pages_;
    while (e > padding(s) && id(s, t, e - 1, false) == -1) { --e; }
    return e;
  }
  void changed(std::int32_t s, std::int32_t t) {
    ++states_[index(s, t)].generation, ++generations_[index(s, t)];
  }
  void cut(std::int32_t s, std::int32_t t, std::int32_t entries) {
    for (std::int32_t e = size(s, t); e-- > std::max(padding(s), entries);) {
      for (std::int32_t v = 0; v < (x_.separate ? 2 : 1); ++v) {
        release(page(s, t, e, v != 0));
        id(s, t, e, v != 0) = -1;
      }
    }
  }
  // A page of the table's own for entry `e`: a new one, or a copy of a shared one.
  void make_writable(std::int32_t s, std::int32_t t, std::int32_t e) {
    for (std::int32_t v = 0; v < (x_.separate ? 2 : 1); ++v) {
      const std::int32_t old = page(s, t, e, v != 0);
      if (old >= 0 && counts_[at(old)] == 1) { continue; }
      const std::int32_t fresh = acquire();
      id(s, t, e, v != 0) = fresh | (x_.flags && random_.below(2) == 0 ? 0x4000'0000 : 0);
      if (old < 0) { continue; }
      copy(old, fresh, !x_.separate || v == 0, !x_.separate || v == 1);
      release(old);
    }
  }
  void copy(std::int32_t from, std::int32_t to, bool keys, bool values) {
    const CacheView all = view(-1);
    for (std::int32_t i = 0; i < x_.layers * x_.heads * x_.page_size; ++i) {
      const LayerId l{i / x_.page_size / x_.heads};
      const HeadId h{i / x_.page_size % x_.heads};
      const Slot slot{i % x_.page_size};
      const auto one = [&](const auto& plane, std::size_t bytes) {
        std::memcpy(plane.row(l, PageId{to}, h, slot), plane.row(l, PageId{from}, h, slot), bytes);
      };
      if (keys) { one(all.k, at(all.k.row_bytes())); }
      if (keys && !plain_.empty()) { one(all.unrotated_keys, at(all.k.row_bytes())); }
      if (values) { one(all.v, at(all.v.row_bytes())); }
      if (x_.marks && (marks_of_values_ ? values : keys)) { one(page_plane_, 4); }
    }
  }

  Setup x_;
  Random random_;
  bool hnd_ = false, marks_of_values_ = false;
  std::int32_t max_pages_ = 0;
  std::vector<std::byte> keys_, values_, plain_;
  std::vector<float> sums_, compensations_;
  Ints marks_, ids_, lengths_, reserved_, first_rows_, counts_, positions_, ropes_, tags_, free_;
  std::vector<SequenceState> states_;
  std::vector<std::uint64_t> generations_;
  std::vector<Ints> open_rows_;  // of the last extend, by table
  std::vector<bool> unwritten_;
  PagePlane page_plane_;
  std::vector<SequencePlane> tag_planes_;  // of all sequences, and of each alone
};

}  // namespace kvtrim::random_test
