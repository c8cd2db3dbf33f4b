// SPDX-License-Identifier: Apache-2.0
#pragma once

// One test for every engine's memory: the memory is filled and read by its own arithmetic, evicted from through the view that
// an adapter makes of it, and compared byte by byte with the same eviction on a PagedCache.

#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/engine/dense.hpp>
#include <kvtrim/engine/flashinfer.hpp>
#include <kvtrim/engine/llama_cpp.hpp>
#include <kvtrim/engine/sglang.hpp>
#include <kvtrim/engine/tensor_view.hpp>
#include <kvtrim/engine/tensorrt_llm.hpp>
#include <kvtrim/engine/vllm.hpp>
#include <kvtrim/evict/csr_tables.hpp>

#include "catch.hpp"
#include "support/instances.hpp"
#include "support/method_world.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvtrim::test {

using Index = std::int64_t;
using Ids = std::vector<std::int32_t>;

/// How an engine keeps its tables.
enum class TableKind : std::uint8_t {
  dense,        ///< [sequences, max]
  offsets,      ///< [sequences, 2, max]: K's ids, then V's
  csr,          ///< indptr, indices, last_page_len
  slots,        ///< req_to_token, rows of the batch in no order
  batch,        ///< none: sequence b is page b
  per_layer,    ///< [sequences, layers, max]
  layer_first,  ///< [layers, sequences, heads, max], lengths as well
};

/// One row of reference/layouts.md: what memory looks like, and the adapter's view of it.
struct EngineLayout {
  std::string name;
  MethodSetup setup;
  TableKind tables = TableKind::dense;
  std::int32_t pages = 24;    ///< of the pool
  std::int32_t null_id = -1;  ///< never handed out
  std::int32_t id_step = 1;   ///< `offsets`: ids of a block
  bool fixed = false;         ///< rows do not move
  bool brief = false;  ///< every third policy will do: another one of these strides has had all
  Index elements = 0;  ///< of the memory
  /// Element (of values?, layer, page, head, slot, feature) by the engine's own arithmetic.
  std::function<Index(bool, Index, Index, Index, Index, Index)> at;
  /// The view of the memory, without tables.
  std::function<CacheView(std::byte*, std::vector<std::byte*>&)> view;
};

/// Index of an element of a C-order array.
inline Index c_order(std::initializer_list<Index> extents, std::initializer_list<Index> at) {
  Index index = 0;
  auto i = at.begin();
  for (const Index extent : extents) { index = index * extent + *i++; }
  return index;
}

/// An engine with that memory, holding the rows of a world.
class EngineCache {
 public:
  static constexpr std::byte poison{0xA5};

  EngineCache(const EngineLayout& layout, MethodWorld& world) : x_(layout) {
    const MethodSetup& m = x_.setup;
    tables_ = tables_of(m.scope, m.layers, m.kv_heads);
    memory_.assign(at(x_.elements * element_bytes(m.dtype)), poison);
    for (std::int32_t p = x_.pages; p-- > 0;) {
      if (p != x_.null_id) { free_.push_back(p); }
    }
    Random random(5);
    for (std::size_t i = free_.size(); x_.tables != TableKind::batch && i > 1; --i) {
      std::swap(free_[i - 1], free_[at(random.below(static_cast<std::int32_t>(i)))]);
    }
    const Index elements = Index{m.sequences} * m.layers * m.kv_heads * m.max_rows;
    positions_.assign(at(elements), -5);
    sums_.assign(at(2 * elements), 0.0F);
    pages_.resize(at(m.sequences) * at(tables_));
    lengths_.assign(pages_.size(), 0);
    states_.resize(pages_.size());
    if (x_.tables == TableKind::batch) {
      for (std::int32_t b = 0; b < m.sequences; ++b) { pages_[at(b)] = {b}; }
    }
    const CacheView plain = world.view();
    for (std::int32_t s = 0; s < m.sequences; ++s) {
      for (std::int32_t t = 0; t < tables_; ++t) {
        const auto first = rows_to_write(s, t, plain.states[s * tables_ + t].live_rows);
        REQUIRE(first.size() == at(plain.states[s * tables_ + t].live_rows));
      }
      for_each_head([&](std::int32_t l, std::int32_t h) {
        for (std::int32_t r = 0; r < lengths_[index(s, l, h)]; ++r) { write(world, s, l, h, r, r); }
      });
    }
    take_states(world);
    encode();
  }
  EngineCache(const EngineCache&) = delete;
  EngineCache& operator=(const EngineCache&) = delete;

  CacheView view() {
    const MethodSetup& m = x_.setup;
    CacheView v = x_.view(memory_.data(), bases_);
    const DenseTable dense{.ids = ids_.data(),
                           .lengths = engine_lengths_.data(),
                           .sequences = m.sequences,
                           .row_stride = width_,
                           .max_pages = max_pages_};
    switch (x_.tables) {
      case TableKind::dense:
        set_tables(v, dense);
        v.table.null_id = x_.null_id;
        break;
      case TableKind::offsets:
        tensorrt_llm::set_offsets(v, dense);
        break;
      case TableKind::csr:
        set_tables(v,
                   CsrTable{.indptr = indptr_.data(),
                            .indices = ids_.data(),
                            .last_page_len = last_.data(),
                            .sequences = m.sequences});
        break;
      case TableKind::slots:
        gathered_.assign(at(m.sequences) * at(sglang::max_pages(requests(), v.page_size)), 0);
        REQUIRE(sglang::set_tables(v, requests(), gathered_) == Status::ok);
        break;
      case TableKind::batch:
        kvtrim::dense::set_batch(v, ids_, engine_lengths_.data());
        break;
      case TableKind::per_layer:
      case TableKind::layer_first:
        set_tables(v, dense);
        v.scope = m.scope;
        v.table.rows = v.length_rows = row_map();
        break;
    }
    v.states = states_.data();
    v.positions = SequencePlane::dense(positions_.data(), m.layers, m.kv_heads, m.max_rows);
    v.score_sums = SequencePlane::dense(sums_.data(), m.layers, m.kv_heads, m.max_rows);
    v.score_compensations = v.score_sums;
    v.score_compensations.base += sums_.size() / 2 * sizeof(float);
    return v;
  }

  /// Commits, takes back what the allocator was handed, and reads the engine's arrays.
  Report commit(const PlanRef& plan, const CacheView& v) {
    const auto before = pages_;
    Report report;
    std::multiset<std::int32_t> freed;
    std::vector<PageId> list(at(x_.pages) * at(std::max(1, x_.id_step)), null_page);
    const auto note = [&](std::span<const PageId> from) {
      for (const PageId p : from) { freed.insert(raw(p)); }
    };
    if (x_.tables == TableKind::csr) {
      Ids counts(pages_.size());
      CsrTables sink(v, indptr_.data(), ids_.data(), last_.data(), nullptr, counts, list);
      report = kvtrim::commit(plan, v, sink);
      note(sink.freed());
    } else if (x_.tables == TableKind::slots) {
      Ids slots(list.size() * at(v.page_size));
      sglang::SlotTables sink(v, requests(), engine_lengths_.data(), nullptr, slots);
      report = kvtrim::commit(plan, v, sink);
      for (const std::int32_t slot : sink.freed()) {
        if (slot % v.page_size == 0) { freed.insert(slot / v.page_size); }
      }
      CHECK(sink.freed().size() == freed.size() * at(v.page_size));
    } else {
      DenseTables sink(v, ids_.data(), engine_lengths_.data(), nullptr, list);
      report = kvtrim::commit(plan, v, sink);
      note(sink.freed());
    }
    decode();
    // What the allocator got is exactly what the tables no longer name.
    for (std::size_t i = 0; i < pages_.size(); ++i) {
      for (const std::int32_t p : before[i]) {
        if (std::find(pages_[i].begin(), pages_[i].end(), p) != pages_[i].end()) { continue; }
        for (std::int32_t id = p * x_.id_step; id < p * x_.id_step + ids_of_a_page(); ++id) {
          const auto found = freed.find(id);
          CHECK(found != freed.end());
          if (found != freed.end()) { freed.erase(found); }
        }
        free_.push_back(p);
      }
    }
    CHECK(freed.empty());
    return report;
  }

  /// The rows that the world has appended: `n` of sequence `s`.
  void append(MethodWorld& world, std::int32_t s, std::int32_t n) {
    const std::int32_t next = states_[at(s) * at(tables_)].next_position;
    std::vector<Ids> rows(at(tables_));
    for (std::int32_t t = 0; t < tables_; ++t) { rows[at(t)] = rows_to_write(s, t, n); }
    for_each_head([&](std::int32_t l, std::int32_t h) {
      std::int32_t p = next;
      for (const std::int32_t r : rows[at(table(l, h))]) { write(world, s, l, h, r, p++); }
    });
    take_states(world);
    encode();
  }

  /// Where a row differs from the world's, in words; empty: nowhere.
  std::string difference(MethodWorld& world) {
    const CacheView plain = world.view();
    std::string out;
    for (std::int32_t s = 0; s < x_.setup.sequences; ++s) {
      for_each_head([&](std::int32_t l, std::int32_t h) {
        const HeadRef head{plain, SequenceId{s}, LayerId{l}, HeadId{h}};
        const SequenceState a = head.state();
        const SequenceState b = states_[index(s, l, h)];
        const auto wrong = [&](std::string_view what, std::int32_t r) {
          if (out.empty()) {
            out = std::string(what) + " of sequence " + std::to_string(s) + ", layer " +
                  std::to_string(l) + ", head " + std::to_string(h) + ", row " + std::to_string(r);
          }
        };
        if (a.live_rows != b.live_rows || a.append_row != b.append_row || a.ordered != b.ordered ||
            a.next_position != b.next_position || a.live_rows != lengths_[index(s, l, h)]) {
          return wrong("state", b.live_rows);
        }
        for (std::int32_t r = 0; r < a.extent(); ++r) {
          if (r == a.append_row) { continue; }
          const auto key = row(false, s, l, h, r);
          const auto value = row(true, s, l, h, r);
          if (std::memcmp(key.data(), head.key(r), key.size()) != 0) { wrong("key", r); }
          if (std::memcmp(value.data(), head.value(r), value.size()) != 0) { wrong("value", r); }
          if (positions_[element(s, l, h, r)] != raw(head.position(r))) { wrong("position", r); }
          if (sums_[element(s, l, h, r)] !=
              plain.score_sums.load<float>(SequenceId{s}, LayerId{l}, HeadId{h}, r)) {
            wrong("accumulated score", r);
          }
        }
      });
    }
    return out;
  }
  /// Whether no byte was written that belongs to no page which any table ever named.
  bool rest_is_untouched() {
    std::vector<bool> ours(memory_.size());
    const MethodSetup& m = x_.setup;
    for (const std::int32_t p : ever_) {
      for (std::int32_t i = 0; i < 2 * m.layers * m.kv_heads * m.page_size; ++i) {
        const bool values = i % 2 != 0;
        const std::int32_t t = i / 2 % m.page_size;
        const std::int32_t head = i / 2 / m.page_size;
        for (std::int32_t d = 0; d < (values ? m.value_dim : m.dim); ++d) {
          const Index e = x_.at(values, head / m.kv_heads, p, head % m.kv_heads, t, d);
          for (std::int32_t b = 0; b < size(); ++b) { ours[at(e * size() + b)] = true; }
        }
      }
    }
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      if (!ours[i] && memory_[i] != poison) { return false; }
    }
    return true;
  }
  const std::vector<std::byte>& memory() const { return memory_; }
  Ids& ids() { return ids_; }
  Ids& indptr() { return indptr_; }
  Ids& last_page_len() { return last_; }
  Ids& lengths() { return engine_lengths_; }
  std::vector<SequenceState>& states() { return states_; }
  Ids arrays() const {
    Ids all = ids_;
    for (const Ids* more : {&indptr_, &last_, &engine_lengths_, &req_to_token_}) {
      all.insert(all.end(), more->begin(), more->end());
    }
    return all;
  }

 private:
  static std::size_t at(Index i) { return static_cast<std::size_t>(i); }
  std::int32_t size() const { return element_bytes(x_.setup.dtype); }
  std::int32_t ids_of_a_page() const { return x_.tables == TableKind::offsets ? 2 : 1; }
  std::int32_t table(std::int32_t l, std::int32_t h) const {
    return kvtrim::table_of(x_.setup.scope, x_.setup.kv_heads, LayerId{l}, HeadId{h});
  }
  std::size_t index(std::int32_t s, std::int32_t l, std::int32_t h) const {
    return at(s) * at(tables_) + at(table(l, h));
  }
  std::size_t element(std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t r) const {
    const MethodSetup& m = x_.setup;
    return at(((Index{s} * m.layers + l) * m.kv_heads + h) * m.max_rows + r);
  }
  template <class F>
  void for_each_head(F&& f) const {
    for (std::int32_t i = 0; i < x_.setup.layers * x_.setup.kv_heads; ++i) {
      f(i / x_.setup.kv_heads, i % x_.setup.kv_heads);
    }
  }
  RowMap row_map() const {
    const MethodSetup& m = x_.setup;
    if (x_.tables == TableKind::layer_first) {
      return {m.kv_heads, std::int64_t{m.sequences} * m.kv_heads, 1};
    }
    return {tables_, x_.tables == TableKind::per_layer ? 1 : 0, 0};
  }
  // Row of the engine's table for table `t` of sequence `s`.
  std::size_t engine_row(std::int32_t s, std::int32_t t) const {
    if (x_.tables != TableKind::layer_first) { return at(s) * at(tables_) + at(t); }
    const std::int32_t heads = x_.setup.kv_heads;
    return at((t / heads * x_.setup.sequences + s) * heads + t % heads);
  }
  sglang::Requests requests() {
    return {req_to_token_.data(), request_width, request_rows_, engine_lengths_};
  }

  // Makes room for `n` rows; which they are.
  Ids rows_to_write(std::int32_t s, std::int32_t t, std::int32_t n) {
    const std::size_t i = at(s) * at(tables_) + at(t);
    Ids rows;
    const std::int32_t hole = states_[i].append_row;
    std::int32_t extent = lengths_[i] + (hole >= 0 ? 1 : 0);
    if (hole >= 0) { rows.push_back(hole); }
    while (static_cast<std::int32_t>(rows.size()) < n) { rows.push_back(extent++); }
    while (static_cast<std::int32_t>(pages_[i].size()) < pages_for(extent, x_.setup.page_size)) {
      REQUIRE(!free_.empty());
      pages_[i].push_back(free_.back());
      free_.pop_back();
    }
    lengths_[i] += n;
    return rows;
  }
  void write(MethodWorld& world,
             std::int32_t s,
             std::int32_t l,
             std::int32_t h,
             std::int32_t r,
             std::int32_t p) {
    for (const bool values : {false, true}) {
      const auto x = values ? world.value(s, l, h, p) : world.key(s, l, h, p);
      for (std::size_t d = 0; d < x.size(); ++d) {
        store_element(place(values, s, l, h, r, static_cast<Index>(d)), x_.setup.dtype, x[d]);
      }
    }
    positions_[element(s, l, h, r)] = p;
    sums_[element(s, l, h, r)] = 3 + world.given(s, l, h, p);
  }
  std::byte* place(
      bool values, std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t r, Index d) {
    const std::int32_t n = x_.setup.page_size;
    const std::int32_t page = pages_[index(s, l, h)][at(r / n)];
    return memory_.data() + x_.at(values, l, page, h, r % n, d) * size();
  }
  std::vector<std::byte> row(
      bool values, std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t r) {
    std::vector<std::byte> out;
    for (Index d = 0; d < (values ? x_.setup.value_dim : x_.setup.dim); ++d) {
      const std::byte* const from = place(values, s, l, h, r, d);
      out.insert(out.end(), from, from + size());
    }
    return out;
  }
  void take_states(MethodWorld& world) {
    const CacheView plain = world.view();
    std::copy_n(plain.states, states_.size(), states_.begin());
  }

  // The engine's arrays from pages and lengths, as its scheduler writes them.
  void encode() {
    const MethodSetup& m = x_.setup;
    max_pages_ = x_.tables == TableKind::batch ? 1 : pages_for(m.max_rows, m.page_size);
    width_ = x_.tables == TableKind::offsets ? 2 * max_pages_ + 3 : max_pages_ + 1;
    for (const Ids& pages : pages_) { ever_.insert(pages.begin(), pages.end()); }
    engine_lengths_.assign(lengths_.size(), 0);
    for (std::int32_t i = 0; i < m.sequences * tables_; ++i) {
      engine_lengths_[engine_row(i / tables_, i % tables_)] = lengths_[at(i)];
    }
    if (x_.tables == TableKind::csr) {
      ids_.clear(), indptr_.assign(1, 0), last_.clear();
      for (std::size_t i = 0; i < pages_.size(); ++i) {
        ids_.insert(ids_.end(), pages_[i].begin(), pages_[i].end());
        indptr_.push_back(static_cast<std::int32_t>(ids_.size()));
        last_.push_back(lengths_[i] == 0 ? 0 : (lengths_[i] - 1) % m.page_size + 1);
      }
      ids_.push_back(0);  // never null
    } else if (x_.tables == TableKind::slots) {
      req_to_token_.assign(at(7 * request_width), -1);
      for (std::size_t i = 0; i < pages_.size(); ++i) {
        for (std::int32_t r = 0; r < states_[i].extent(); ++r) {
          req_to_token_[at(request_rows_[i] * request_width + r)] =
              pages_[i][at(r / m.page_size)] * m.page_size + r % m.page_size;
        }
      }
    } else if (x_.tables == TableKind::batch) {
      ids_.assign(pages_.size(), -1);
    } else {
      const std::int32_t none =
          x_.tables == TableKind::offsets ? tensorrt_llm::no_block : x_.null_id;
      ids_.assign(pages_.size() * at(width_), none);
      for (std::int32_t i = 0; i < m.sequences * tables_; ++i) {
        for (std::size_t e = 0; e < pages_[at(i)].size(); ++e) {
          const std::size_t to = engine_row(i / tables_, i % tables_) * at(width_) + e;
          ids_[to] = pages_[at(i)][e] * x_.id_step;
          if (x_.tables == TableKind::offsets) { ids_[to + at(max_pages_)] = ids_[to] + 1; }
        }
      }
    }
  }
  // And back.
  void decode() {
    const MethodSetup& m = x_.setup;
    for (std::int32_t i = 0; i < m.sequences * tables_; ++i) {
      const std::size_t row = engine_row(i / tables_, i % tables_);
      Ids& pages = pages_[at(i)];
      std::int32_t& length = lengths_[at(i)];
      length = engine_lengths_[row];
      if (x_.tables == TableKind::batch) { continue; }
      pages.clear();
      if (x_.tables == TableKind::csr) {
        pages.assign(ids_.begin() + indptr_[row], ids_.begin() + indptr_[row + 1]);
        length = pages.empty()
                     ? 0
                     : static_cast<std::int32_t>(pages.size() - 1) * m.page_size + last_[row];
        continue;
      }
      const std::int32_t used = pages_for(states_[at(i)].extent(), m.page_size);
      for (std::int32_t e = 0; e < used; ++e) {
        if (x_.tables == TableKind::slots) {
          const std::int32_t* const slots =
              &req_to_token_[at(request_rows_[row] * request_width + e * m.page_size)];
          pages.push_back(slots[0] / m.page_size);
          const std::int32_t rows =
              std::min(m.page_size, states_[at(i)].extent() - e * m.page_size);
          for (std::int32_t r = 0; r < rows; ++r) {
            CHECK(slots[r] == pages.back() * m.page_size + r);
          }
          continue;
        }
        const std::int32_t id = ids_[row * at(width_) + at(e)];
        CHECK(id % x_.id_step == 0);
        pages.push_back(id / x_.id_step);
        if (x_.tables == TableKind::offsets) {
          CHECK(ids_[row * at(width_) + at(max_pages_ + e)] == id + 1);
        }
      }
      // Nothing that left is named behind the entries in use.
      for (std::int32_t e = used; x_.tables != TableKind::slots && e < max_pages_; ++e) {
        CHECK((ids_[row * at(width_) + at(e)] ==
               (x_.tables == TableKind::offsets ? tensorrt_llm::no_block : x_.null_id)));
      }
    }
  }

  static constexpr std::int32_t request_width = 100;

  EngineLayout x_;
  std::int32_t tables_ = 1;
  std::int32_t max_pages_ = 0;
  std::int32_t width_ = 0;
  std::vector<std::byte> memory_;
  std::vector<std::byte*> bases_;
  Ids free_;
  std::set<std::int32_t> ever_;
  std::vector<Ids> pages_;  // [sequences, tables] pages (blocks) of each table
  Ids lengths_;             // [sequences, tables]
  Ids ids_, indptr_, last_, engine_lengths_, req_to_token_, gathered_;
  Ids request_rows_{4, 1};
  std::vector<SequenceState> states_;
  Ids positions_;
  std::vector<float> sums_;
};

/// A policy as the driver sees it.
struct Runner {
  std::string_view name;
  TableScope scope = TableScope::group;  ///< tables that it needs
  bool given_scores = false;
  bool pages = false;
  Removal own = Removal::automatic;
  std::function<Report(MethodWorld&, const Observation&, const PlanOptions&)> plain;
  std::function<PlanRef(
      const CacheView&, const Observation&, std::vector<std::byte>&, const PlanOptions&)>
      plan;
};

template <Policy P>
Runner runner_of(const P& policy, TableScope scope = TableScope::group, bool given = false) {
  Runner r;
  r.name = P::name;
  r.scope = scope;
  r.given_scores = given;
  r.pages = PagePolicy<P>;
  r.own = policy.removal();
  r.plain = [policy](MethodWorld& world, const Observation& obs, const PlanOptions& options) {
    return world.evict(policy, obs, options);
  };
  r.plan = [policy](const CacheView& view,
                    const Observation& obs,
                    std::vector<std::byte>& workspace,
                    const PlanOptions& options) {
    workspace.resize(plan_workspace_bytes(policy, plan_shape(view, obs)));
    return kvtrim::plan(policy, view, obs, workspace, options);
  };
  return r;
}

/// Policies of every kind: by position, by row with each sort of score, by pages, with budgets that heads share.
inline const std::vector<Runner>& runners() {
  static const std::vector<Runner> all{
      runner_of(Full()),
      runner_of(StreamingSink<SinkForm::pages>({.sinks = 2, .recent = 8})),
      runner_of(StreamingSink<SinkForm::exact>({.sinks = 2, .recent = 8})),
      runner_of(HeavyHitter<>({.heavy = 5, .recent = 3, .sinks = 2})),
      runner_of(SnapKVSelector<>({.window = 4, .budget = 10, .kernel = 1, .sinks = 2})),
      runner_of(KeyDiff({.budget = 10, .sinks = 2, .recent = 3})),
      runner_of(KeyNorm({.budget = 10, .sinks = 2, .recent = 3})),
      runner_of(QFilter({.budget = 10, .sinks = 2, .recent = 3})),
      runner_of(kvtrim::Random({.budget = 10, .sinks = 2, .recent = 3})),
      runner_of(Tova({.budget = 10, .sinks = 2})),
      runner_of(External({.budget = 10, .sinks = 1}), TableScope::group, true),
      runner_of(PageSelector<>({.budget = 12, .window = 3})),
      runner_of(PageSelector<ExternalParams>({.budget = 12, .window = 3}), TableScope::group, true),
      runner_of(PageSelector<KeyDiffParams>({.budget = 12, .window = 3})),
      runner_of(
          AdaKV<SnapKVSelector<>>({.inner = {.window = 4, .budget = 10, .kernel = 1, .sinks = 2}}),
          TableScope::head),
  };
  return all;
}

/// Runs every policy and every way of removal on a layout. What the layout cannot do must be refused, and change nothing.
inline void run_layout(const EngineLayout& layout) {
  constexpr std::array ways{Removal::automatic,
                            Removal::drop_pages,
                            Removal::overwrite_slot,
                            Removal::fill_holes,
                            Removal::stable_pack};
  for (const Runner& runner : runners()) {
    if (layout.brief && (&runner - runners().data()) % 3 != 1) { continue; }
    if (runner.scope != TableScope::group && layout.setup.scope != runner.scope) { continue; }
    for (const Removal way : ways) {
      if (runner.pages && way != Removal::automatic && way != Removal::drop_pages) { continue; }
      INFO(layout.name << ", " << runner.name << ", " << to_string(way));
      MethodWorld world(layout.setup);
      REQUIRE(world.append(0, 22) == Status::ok);
      REQUIRE(world.append(1, 9) == Status::ok);
      EngineCache engine(layout, world);
      check_layout(engine.view());
      REQUIRE(engine.difference(world) == "");
      for (const std::int32_t more : {0, 1, 3}) {
        for (std::int32_t s = 0; more > 0 && s < 2; ++s) {
          REQUIRE(world.append(s, more) == Status::ok);
          engine.append(world, s, more);
        }
        const Observation obs = world.observation(runner.given_scores);
        const CacheView view = engine.view();
        std::vector<std::byte> workspace;
        const auto memory = engine.memory();
        const Ids arrays = engine.arrays();
        const PlanRef plan = runner.plan(view, obs, workspace, {.removal = way});
        // What the layout cannot do.
        const Removal meant = way == Removal::automatic ? runner.own : way;
        const bool overwrites = meant == Removal::overwrite_slot;
        const bool no_hole = view.last_page_len != nullptr && overwrites;
        if ((layout.fixed && meant != Removal::drop_pages) || (no_hole && meant == way)) {
          const Report plain = runner.plain(world, obs, {.removal = way});
          CHECK((plan.status() == Status::bad_options || plain.evicted_rows == 0));
          CHECK((apply(plan, view) == plan.status()));
          CHECK((engine.memory() == memory && engine.arrays() == arrays));
          break;
        }
        REQUIRE((apply(plan, view) == (usable(plan.status()) ? Status::ok : plan.status())));
        const Report report = engine.commit(plan, view);
        const Report plain =
            runner.plain(world, obs, {.removal = no_hole ? Removal::stable_pack : way});
        CHECK(report.status == plain.status);
        CHECK(report.evicted_rows == plain.evicted_rows);
        const MethodSetup& m = layout.setup;  // a value inside its key moves with it
        CHECK(report.bytes_moved * (m.value_in_key ? m.dim + m.value_dim : m.dim) ==
              plain.bytes_moved * m.dim);
        const std::int32_t each = layout.tables == TableKind::offsets ? 2 : 1;
        CHECK(report.released_pages == each * plain.released_pages);
        REQUIRE(engine.difference(world) == "");
        if (!usable(plain.status)) { break; }
      }
      if (way == Removal::automatic) { CHECK(engine.rest_is_untouched()); }
    }
  }
}

}  // namespace kvtrim::test
