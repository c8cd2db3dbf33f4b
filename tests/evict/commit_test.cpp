// SPDX-License-Identifier: Apache-2.0
// Engines' own pages: layouts, tables and sinks that are not PagedCache's. Rows are read back by the layout's formula.
#include <kvtrim/evict/commit.hpp>

#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/evict/evict.hpp>
#include <kvtrim/evict/plan_bytes.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "catch.hpp"
#include "support/by_score.hpp"
#include "support/random.hpp"
#include "support/tagged_cache.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

using namespace kvtrim;
using test::best;
using test::ByScore;
using test::TaggedCache;

namespace {

enum class Layout : std::uint8_t { nhd, hnd };
enum class Table : std::uint8_t { dense, csr, separate_values, per_head };

constexpr std::int32_t page_size = 4;
constexpr std::int32_t heads = 2;
constexpr std::int32_t dim = 3;
constexpr std::int32_t pages = 40;
constexpr std::int32_t max_pages = 8;

// An engine's cache of two sequences, without any state that the library would keep.
struct Engine {
  Layout layout;
  Table kind;
  std::vector<float> k, v;
  std::vector<std::int32_t> ids, indptr, last_len, lengths, first_rows, ref_counts;
  std::vector<float> scores;
  std::vector<std::int32_t> positions;
  std::vector<SequenceState> states;  // of an engine that keeps them
  CacheView view;

  Engine(Layout with_layout,
         Table with_table,
         std::array<std::int32_t, 2> rows,
         std::array<std::int32_t, 2> padding = {0, 0},
         std::int32_t null_id = -1)
      : layout(with_layout),
        kind(with_table),
        k(static_cast<std::size_t>(pages * page_size * heads * dim), -1.0F),
        v(k),
        ref_counts(pages, 0),
        scores(2 * heads * 64) {
    const PlaneShape shape{page_size, heads, dim, DType::f32};
    view.k = layout == Layout::nhd ? Plane::nhd(k.data(), shape) : Plane::hnd(k.data(), shape);
    view.v = layout == Layout::nhd ? Plane::nhd(v.data(), shape) : Plane::hnd(v.data(), shape);
    view.page_size = page_size;
    view.pages = pages;
    view.kv_heads = heads;
    view.sequences = 2;
    view.table.null_id = null_id;
    view.writable.ref_counts = ref_counts.data();
    first_rows = {padding[0], padding[1]};
    view.first_rows = first_rows.data();

    // Pages are handed out in an order of their own; page 0 is never used.
    std::int32_t next = 0;
    const auto page = [&] {
      const std::int32_t p = 1 + next++ * 7 % (pages - 1);
      ref_counts[static_cast<std::size_t>(p)] = 1;
      return p;
    };
    const std::int32_t tables = kind == Table::per_head ? heads : 1;
    const std::int32_t row = kind == Table::separate_values ? 2 * max_pages : max_pages;
    indptr.push_back(0);
    ids.assign(kind == Table::csr ? 0 : static_cast<std::size_t>(2 * tables * row), null_id);
    for (std::int32_t s = 0; s < 2; ++s) {
      const std::int32_t n = rows[static_cast<std::size_t>(s)];
      const std::int32_t first = first_rows[static_cast<std::size_t>(s)];
      const std::int32_t used = (n + first + page_size - 1) / page_size;
      for (std::int32_t t = 0; t < tables; ++t) {
        for (std::int32_t e = 0; e < used; ++e) {
          const bool is_null = e < first / page_size;
          if (kind == Table::csr) {
            ids.push_back(page());
            continue;
          }
          const auto at = static_cast<std::size_t>((s * tables + t) * row + e);
          ids[at] = is_null ? null_id : page();
          if (kind == Table::separate_values) { ids[at + max_pages] = is_null ? null_id : page(); }
        }
        lengths.push_back(n);
      }
      if (kind == Table::csr) {
        indptr.push_back(static_cast<std::int32_t>(ids.size()));
        last_len.push_back((n - 1) % page_size + 1);
      }
    }
    bind();
    for (std::int32_t s = 0; s < 2; ++s) {
      for (std::int32_t h = 0; h < heads; ++h) {
        for (std::int32_t r = 0; r < rows[static_cast<std::size_t>(s)]; ++r) {
          for (std::int32_t d = 0; d < dim; ++d) {
            k[place(s, h, r, false) + static_cast<std::size_t>(d)] = tag(s, h, r, d);
            v[place(s, h, r, true) + static_cast<std::size_t>(d)] = 0.5F + tag(s, h, r, d);
          }
        }
      }
    }
    test::Random random(4);
    for (float& x : scores) { x = static_cast<float>(random.below(30)); }
    check_layout(view);
  }

  // From now on the engine keeps states, one per table, and positions.
  void keep_states() {
    for (std::int32_t i = 0; i < 2 * heads * 64; ++i) { positions.push_back(i % 64); }
    view.positions = SequencePlane::dense(positions.data(), 1, heads, 64);
    const std::int32_t tables = kind == Table::per_head ? heads : 1;
    for (std::int32_t s = 0; s < 2; ++s) {
      for (std::int32_t t = 0; t < tables; ++t) {
        SequenceState state;
        state.live_rows = state.next_position = state.next_rope_position =
            lengths[static_cast<std::size_t>(s * tables + t)];
        states.push_back(state);
      }
    }
    view.states = states.data();
  }
  void bind() {
    view.table.ids = ids.data();
    if (kind == Table::csr) {
      view.table.indptr = indptr.data();
      view.last_page_len = last_len.data();
    } else {
      view.table.max_pages = max_pages;
      view.table.row_stride = kind == Table::separate_values ? 2 * max_pages : max_pages;
      view.table.v_offset = kind == Table::separate_values ? max_pages : 0;
      view.lengths = lengths.data();
      if (kind == Table::per_head) {
        view.scope = TableScope::head;
        view.table.rows = {heads, 0, 1};
        view.length_rows = {heads, 0, 1};
      }
    }
  }
  static float tag(std::int32_t s, std::int32_t h, std::int32_t position, std::int32_t d) {
    return static_cast<float>(position * 64 + s * 32 + h * 8 + d);
  }
  Observation observation() {
    Observation obs;
    obs.scores = SequencePlane::dense(scores.data(), 1, heads, 64);
    return obs;
  }
  std::vector<float> scores_of(std::int32_t s, std::int32_t h, std::int32_t rows) const {
    const auto begin = scores.begin() + (s * heads + h) * 64;
    return {begin, begin + rows};
  }
  std::int32_t table_row(std::int32_t s, std::int32_t h) const {
    return kind == Table::per_head ? s * heads + h : s;
  }
  std::int32_t id(std::int32_t s, std::int32_t h, std::int32_t e, bool of_values) const {
    const std::int32_t row = table_row(s, h);
    return ids[static_cast<std::size_t>(
        kind == Table::csr               ? indptr[static_cast<std::size_t>(row)] + e
        : kind == Table::separate_values ? row * 2 * max_pages + (of_values ? max_pages : 0) + e
                                         : row * max_pages + e)];
  }
  // Index of feature 0 of row r, by the layout's formula.
  std::size_t place(std::int32_t s, std::int32_t h, std::int32_t r, bool of_values) const {
    const std::int32_t at = r + first_rows[static_cast<std::size_t>(s)];
    const std::int32_t page = id(s, h, at / page_size, of_values);
    const std::int32_t slot = at % page_size;
    return static_cast<std::size_t>(layout == Layout::nhd
                                        ? ((page * page_size + slot) * heads + h) * dim
                                        : ((page * heads + h) * page_size + slot) * dim);
  }
  // Positions of the rows in slot order; empty text: every feature agrees.
  std::string read(std::int32_t s,
                   std::int32_t h,
                   std::int32_t rows,
                   std::vector<std::int32_t>& found) const {
    found.clear();
    for (std::int32_t r = 0; r < rows; ++r) {
      const auto position = static_cast<std::int32_t>(k[place(s, h, r, false)]) / 64;
      found.push_back(position);
      for (std::int32_t d = 0; d < dim; ++d) {
        if (k[place(s, h, r, false) + static_cast<std::size_t>(d)] != tag(s, h, position, d) ||
            v[place(s, h, r, true) + static_cast<std::size_t>(d)] !=
                0.5F + tag(s, h, position, d)) {
          return "row " + std::to_string(r);
        }
      }
    }
    return {};
  }
};

// A sink over CSR arrays, which have to be built anew.
struct CsrSink {
  std::vector<std::vector<std::int32_t>> rows;
  std::vector<std::int32_t> live;
  std::vector<std::int32_t>* ref_counts;
  std::vector<PageId> freed;
  void update(const TableUpdate& u) noexcept {
    auto& row = rows[static_cast<std::size_t>(raw(u.sequence))];
    row.clear();
    for (const PageId p : u.k_pages) { row.push_back(raw(p)); }
    live[static_cast<std::size_t>(raw(u.sequence))] = u.state.live_rows;
  }
  bool release(PageId p) noexcept {
    freed.push_back(p);
    return --(*ref_counts)[static_cast<std::size_t>(raw(p))] == 0;
  }
};
static_assert(TableSink<CsrSink>);

}  // namespace

TEST_CASE("commit: foreign layouts and tables keep the rows wanted and free the tail",
          "[commit][foreign]") {
  for (const Layout layout : {Layout::nhd, Layout::hnd}) {
    for (const Table table : {Table::dense, Table::csr, Table::separate_values, Table::per_head}) {
      for (const Removal way : {Removal::stable_pack, Removal::fill_holes, Removal::drop_pages}) {
        const std::array<std::int32_t, 2> rows{29, 6};
        Engine e(layout, table, rows);
        const std::int32_t keep = 7;
        const ByScore policy{.keep = keep, .way = way};
        const Observation obs = e.observation();
        std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(e.view, obs)));
        const PlanRef made = plan(policy, e.view, obs, workspace);
        INFO("layout " << static_cast<int>(layout) << " table " << static_cast<int>(table) << " "
                       << to_string(way));
        REQUIRE(usable(made.status()));
        REQUIRE(apply(made, e.view) == Status::ok);

        // What must be left: by head, and for whole pages by table.
        const auto kept_of = [&](std::int32_t h) {
          const auto own = best(e.scores_of(0, h, 29), keep);
          if (way != Removal::drop_pages) { return own; }
          std::vector<std::int32_t> wide;
          for (std::int32_t r = 0; r < 29; ++r) {
            bool stays = false;
            for (std::int32_t other = 0; other < heads; ++other) {
              if (table == Table::per_head && other != h) { continue; }
              for (const std::int32_t b : best(e.scores_of(0, other, 29), keep)) {
                stays = stays || b / page_size == r / page_size;
              }
            }
            if (stays) { wide.push_back(r); }
          }
          return wide;
        };
        const std::int32_t separate = table == Table::separate_values ? 2 : 1;
        const auto held = std::count(e.ref_counts.begin(), e.ref_counts.end(), 1);
        Report report;
        if (table == Table::csr) {
          CsrSink sink{.rows = {{}, {e.ids.begin() + e.indptr[1], e.ids.end()}},
                       .live = {0, 6},
                       .ref_counts = &e.ref_counts,
                       .freed = {}};
          report = commit(made, e.view, sink);
          e.ids.clear();
          e.indptr = {0};
          e.last_len.clear();
          for (std::size_t s = 0; s < 2; ++s) {
            e.ids.insert(e.ids.end(), sink.rows[s].begin(), sink.rows[s].end());
            e.indptr.push_back(static_cast<std::int32_t>(e.ids.size()));
            e.last_len.push_back((sink.live[s] - 1) % page_size + 1);
          }
          e.bind();
          CHECK(sink.freed.size() == static_cast<std::size_t>(report.dropped_pages));
        } else {
          std::vector<PageId> freed(64);
          DenseTables sink(e.view, e.ids.data(), e.lengths.data(), e.ref_counts.data(), freed);
          report = commit(made, e.view, sink);
          CHECK(sink.freed().size() == static_cast<std::size_t>(report.released_pages));
          for (const PageId p : sink.freed()) {
            CHECK(e.ref_counts[static_cast<std::size_t>(raw(p))] == 0);
            CHECK(std::find(e.ids.begin(), e.ids.end(), raw(p)) == e.ids.end());
          }
        }
        REQUIRE(report.status == made.status());
        std::int64_t left = 0;
        std::int64_t tables_pages = 0;
        for (std::int32_t h = 0; h < heads; ++h) {
          const auto expected = kept_of(h);
          const auto live = static_cast<std::int32_t>(expected.size());
          CHECK(e.view.live_rows(SequenceId{0}, LayerId{0}, HeadId{h}) == live);
          CHECK(e.view.live_rows(SequenceId{1}, LayerId{0}, HeadId{h}) == 6);
          std::vector<std::int32_t> positions;
          REQUIRE(e.read(0, h, live, positions) == "");
          if (way != Removal::fill_holes) { CHECK(positions == expected); }
          std::sort(positions.begin(), positions.end());
          CHECK(positions == expected);
          left += live;
          if (h == 0 || table == Table::per_head) {
            tables_pages += (live + page_size - 1) / page_size;
          }
          // The other sequence is as it was.
          REQUIRE(e.read(1, h, 6, positions) == "");
          CHECK(positions == std::vector<std::int32_t>{0, 1, 2, 3, 4, 5});
          if (table != Table::csr) {
            for (std::int32_t entry = (live + page_size - 1) / page_size; entry < max_pages;
                 ++entry) {
              CHECK(e.id(0, h, entry, false) == -1);
              CHECK(e.id(0, h, entry, true) == -1);
            }
          }
        }
        CHECK(report.kept_rows == left + 2 * 6);
        CHECK(report.evicted_rows == 2 * 29 - left);
        const std::int64_t tables_before = (table == Table::per_head ? 2 : 1) * 8;
        CHECK(report.released_pages == separate * (tables_before - tables_pages));
        CHECK(std::count(e.ref_counts.begin(), e.ref_counts.end(), 1) ==
              held - report.released_pages);
        // What is there now is a cache again.
        std::vector<std::uint64_t> scratch(static_cast<std::size_t>(check_tables_words(pages)));
        CHECK(check_tables(e.view, scratch).status == Status::ok);
      }
    }
  }
}

TEST_CASE("commit: left padding is never a row, never moved, never freed",
          "[commit][foreign][edge]") {
  for (const std::int32_t null_id : {-1, 0}) {
    for (const Table table : {Table::dense, Table::separate_values, Table::per_head}) {
      for (const Removal way : {Removal::stable_pack,
                                Removal::fill_holes,
                                Removal::overwrite_slot,
                                Removal::drop_pages}) {
        const std::array<std::int32_t, 2> rows{15, 18};
        const std::array<std::int32_t, 2> padding{3,
                                                  13};  // less than a page; three pages and a row
        Engine e(Layout::hnd, table, rows, padding, null_id);
        // The first and the last rows score best: whole pages in between go.
        for (std::size_t i = 0; i < e.scores.size(); ++i) {
          const auto r = static_cast<std::int32_t>(i % 64);
          e.scores[i] = static_cast<float>(r < 2 || r > 12 ? 50 : r % 5);
        }
        const std::int32_t keep = way == Removal::overwrite_slot ? 17 : 6;
        const ByScore policy{.keep = keep, .way = way};
        const Observation obs = e.observation();
        std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(e.view, obs)));
        const PlanRef made = plan(policy, e.view, obs, workspace);
        INFO("null " << null_id << " table " << static_cast<int>(table) << " " << to_string(way));
        REQUIRE(usable(made.status()));
        std::vector<std::vector<std::int32_t>> planned;
        for (std::int32_t s = 0; s < 2; ++s) {
          planned.emplace_back();
          made.for_each_kept(SequenceId{s}, LayerId{0}, HeadId{0}, [&](std::int32_t r) {
            planned.back().push_back(r);
          });
        }
        REQUIRE(apply(made, e.view) == Status::ok);
        std::vector<PageId> freed(64);
        DenseTables sink(e.view, e.ids.data(), e.lengths.data(), e.ref_counts.data(), freed);
        REQUIRE(usable(commit(made, e.view, sink).status));
        for (const PageId p : sink.freed()) { REQUIRE(raw(p) > 0); }
        for (std::int32_t s = 0; s < 2; ++s) {
          const std::int32_t first = padding[static_cast<std::size_t>(s)];
          const std::int32_t n = rows[static_cast<std::size_t>(s)];
          std::vector<std::int32_t> expected = best(e.scores_of(s, 0, n), keep);
          if (way == Removal::drop_pages) {
            std::vector<std::int32_t> wide;
            for (std::int32_t r = 0; r < n; ++r) {
              const bool padded =
                  (r + first) / page_size == first / page_size && first % page_size != 0;
              if (padded || std::any_of(expected.begin(), expected.end(), [&](std::int32_t b) {
                    return (b + first) / page_size == (r + first) / page_size;
                  })) {
                wide.push_back(r);
              }
            }
            expected = wide;
          }
          CHECK(planned[static_cast<std::size_t>(s)] == expected);
          for (std::int32_t h = 0; h < heads; ++h) {
            const std::int32_t live = e.view.live_rows(SequenceId{s}, LayerId{0}, HeadId{h});
            REQUIRE(live == static_cast<std::int32_t>(expected.size()));
            for (std::int32_t entry = 0; entry < first / page_size; ++entry) {
              CHECK(e.id(s, h, entry, false) == null_id);
              CHECK(e.id(s, h, entry, true) == null_id);
            }
            std::vector<std::int32_t> positions;
            REQUIRE(e.read(s, h, live, positions) == "");
            std::sort(positions.begin(), positions.end());
            CHECK(positions == expected);
          }
        }
      }
    }
  }
}

TEST_CASE("commit: an engine overwrites a slot only where its states can name the hole",
          "[commit][foreign]") {
  for (const bool keeps_states : {false, true}) {
    for (const Table table : {Table::dense, Table::separate_values, Table::per_head}) {
      Engine e(Layout::hnd, table, {18, 4}, {13, 0}, 0);
      if (keeps_states) { e.keep_states(); }
      const ByScore policy{.keep = 17, .recent = 3, .way = Removal::overwrite_slot};
      const Observation obs = e.observation();
      std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(e.view, obs)));
      const PlanRef made = plan(policy, e.view, obs, workspace);
      REQUIRE(made.status() == Status::ok);
      REQUIRE(apply(made, e.view) == Status::ok);
      std::vector<PageId> freed(8);
      DenseTables sink(e.view, e.ids.data(), e.lengths.data(), e.ref_counts.data(), freed);
      const Report report = commit(made, e.view, sink);
      REQUIRE(report.status == Status::ok);
      CHECK(report.evicted_rows == 2);
      CHECK(report.replaced == (keeps_states ? 0 : made.tables()));
      for (std::int32_t h = 0; h < heads; ++h) {
        const SequenceState state = e.view.state(SequenceId{0}, LayerId{0}, HeadId{h});
        if (!keeps_states) { CHECK(state.append_row == -1); }
        if (keeps_states) { CHECK(report.bytes_moved <= heads * 2 * dim * 4); }
        // Rows in use without the hole, as the engine will see them.
        std::vector<std::int32_t> all;
        std::vector<std::int32_t> positions;
        REQUIRE(e.read(0, h, keeps_states ? state.extent() : 17, all) == "");
        for (std::int32_t r = 0; r < static_cast<std::int32_t>(all.size()); ++r) {
          if (r != state.append_row) { positions.push_back(all[static_cast<std::size_t>(r)]); }
        }
        std::sort(positions.begin(), positions.end());
        auto list = e.scores_of(0, h, 18);
        for (std::size_t r = 15; r < 18; ++r) { list[r] = 1000; }
        CHECK(positions == best(list, 17));
      }
    }
  }
}

TEST_CASE("commit: streaming drops pages behind padding and keeps its sinks",
          "[commit][foreign][edge]") {
  Engine e(Layout::nhd, Table::dense, {20, 4}, {6, 0}, 0);
  const StreamingSink policy({.sinks = 1, .recent = 5});
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(e.view)));
  const PlanRef made = plan(policy, e.view, {}, workspace);
  REQUIRE(made.status() == Status::ok);
  REQUIRE(apply(made, e.view) == Status::ok);
  std::vector<PageId> freed(8);
  DenseTables sink(e.view, e.ids.data(), e.lengths.data(), nullptr, freed);
  REQUIRE(commit(made, e.view, sink).status == Status::ok);
  // Rows 0 and 1 share the padding's page; pages of rows 2..5, 6..9, 10..13 go; 15..19 are recent.
  std::vector<std::int32_t> positions;
  REQUIRE(e.lengths[0] == 8);
  REQUIRE(e.read(0, 0, 8, positions) == "");
  CHECK(positions == std::vector<std::int32_t>{0, 1, 14, 15, 16, 17, 18, 19});
  CHECK(sink.freed().size() == 3);
}

TEST_CASE("commit: without an apply, or after a change, or twice, nothing is written",
          "[commit][fault]") {
  const StreamingSink<SinkForm::exact> policy({.sinks = 2, .recent = 5});
  TaggedCache c({.sequences = 2, .max_rows = 40});
  REQUIRE(c.append(0, 16) == Status::ok);
  const CacheView view = c.view();
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view)));
  const PlanRef made = plan(policy, view, {}, workspace);
  auto sink = c.cache.sink_for(view);
  const auto before = c.bytes();
  Report report = commit(made, view, sink);
  CHECK(report.status == Status::not_applied);
  CHECK(report.evicted_rows == 0);
  CHECK(c.bytes() == before);

  REQUIRE(apply(made, view) == Status::ok);
  SECTION("an append of another sequence in between changes nothing for it") {
    REQUIRE(c.append(1, 1) == Status::ok);
    CHECK(c.append(0, 1) == Status::eviction_open);
    CHECK(commit(made, view, sink).status == Status::ok);
    CHECK(c.cache.live_rows(SequenceId{0}) == 7);
    CHECK(c.cache.live_rows(SequenceId{1}) == 1);
    CHECK(c.append(0, 1) == Status::ok);
    CHECK(c.fault() == "");
  }
  SECTION("twice") {
    REQUIRE(commit(made, view, sink).status == Status::ok);
    const auto done = c.bytes();
    CHECK(commit(made, view, sink).status == Status::stale_plan);
    CHECK(c.bytes() == done);
    CHECK(apply(made, view) == Status::stale_plan);
    CHECK(c.bytes() == done);
  }
  SECTION("no plan at all") {
    CHECK(commit(PlanRef(Status::unequal_budget), view, sink).status == Status::unequal_budget);
  }
}

TEST_CASE("commit: a view without states is stale by its lengths and tables", "[commit][fault]") {
  Engine e(Layout::nhd, Table::dense, {20, 4});
  const ByScore policy{.keep = 9};
  const Observation obs = e.observation();
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(e.view, obs)));
  const PlanRef made = plan(policy, e.view, obs, workspace);
  const auto k = e.k;
  const auto stale = [&] {
    CHECK(apply(made, e.view) == Status::stale_plan);
    CHECK(e.k == k);
  };
  ++e.lengths[0];
  stale();
  --e.lengths[0];
  ++e.lengths[1];  // nothing goes from it, so it may go on
  std::swap(e.ids[0], e.ids[1]);
  stale();
  std::swap(e.ids[0], e.ids[1]);
  e.ref_counts[static_cast<std::size_t>(e.ids[2])] = 2;
  stale();
  e.ref_counts[static_cast<std::size_t>(e.ids[2])] = 1;
  e.ids[7] = 33;  // beyond the rows in use: irrelevant
  Plan copy(made);
  CHECK(apply(made, e.view) == Status::ok);
  std::vector<PageId> freed(8);
  DenseTables sink(e.view, e.ids.data(), e.lengths.data(), e.ref_counts.data(), freed);
  REQUIRE(commit(made, e.view, sink).status == Status::ok);
  CHECK(apply(copy.ref(), e.view) == Status::stale_plan);
}

TEST_CASE("commit: pages that others still hold are dropped, not released", "[commit][shared]") {
  TaggedCache c({.pages = 40, .sequences = 3, .max_rows = 40});
  c.tags_checked = false;
  REQUIRE(c.append(0, 24) == Status::ok);
  c.cache.destroy(SequenceId{1});
  REQUIRE(c.cache.try_fork(SequenceId{0}) == SequenceId{1});
  const StreamingSink policy({.sinks = 4, .recent = 4});
  const Report first = c.evict(policy, c.cache.view(SequenceId{0}));
  CHECK(first.dropped_pages == 4);
  CHECK(first.released_pages == 0);
  const Report second = c.evict(policy, c.cache.view(SequenceId{1}));
  CHECK(second.dropped_pages == 4);
  CHECK(second.released_pages == 4);
  CHECK(c.fault() == "");
}

TEST_CASE("commit: pages are released tail first", "[commit]") {
  TaggedCache c({.max_rows = 40});
  REQUIRE(c.append(0, 24) == Status::ok);
  const auto table = c.cache.page_table(SequenceId{0});
  const std::vector<std::int32_t> before(table.begin(), table.begin() + 6);
  const StreamingSink policy({.sinks = 4, .recent = 4});
  const CacheView view = c.view();
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view)));
  const PlanRef made = plan(policy, view, {}, workspace);
  std::vector<std::int32_t> released;
  for (const PageId p : made.released(SequenceId{0}, 0)) { released.push_back(raw(p)); }
  CHECK(released == std::vector<std::int32_t>{before[4], before[3], before[2], before[1]});
}

TEST_CASE("commit: a list of free pages that is too short still counts all of them",
          "[commit][edge]") {
  Engine e(Layout::nhd, Table::dense, {29, 4});
  const ByScore policy{.keep = 2};
  const Observation obs = e.observation();
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(e.view, obs)));
  const PlanRef made = plan(policy, e.view, obs, workspace);
  REQUIRE(apply(made, e.view) == Status::ok);
  std::array<PageId, 3> freed{PageId{-7}, PageId{-7}, PageId{-7}};
  DenseTables sink(e.view, e.ids.data(), e.lengths.data(), nullptr, std::span(freed).first(2));
  const Report report = commit(made, e.view, sink);
  CHECK(report.released_pages == 7);  // and the other sequence's one row page stays
  CHECK(sink.freed().size() == 2);
  CHECK(freed[2] == PageId{-7});
}
