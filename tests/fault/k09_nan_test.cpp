// SPDX-License-Identifier: Apache-2.0
// B067's page tables are a test of the view; here a plan is made, applied and committed over them.
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/window.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstring>

using namespace kvtrim;
using namespace kvtrim::fault;

namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

// What a run over a cache came to.
struct Result {
  std::vector<std::vector<float>> keys;
  Rows positions;
  std::vector<float> scores;
  std::int64_t nan = 0;
  friend bool operator==(const Result&, const Result&) = default;
};

// Memory in which any access ends the process, except to what was opened.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) : bytes_(bytes) {
    void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    base_ = p == MAP_FAILED ? nullptr : static_cast<std::byte*>(p);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() {
    if (base_ != nullptr) { munmap(base_, bytes_); }
  }
  [[nodiscard]] std::byte* open(std::size_t from, std::size_t bytes) const {
    return base_ != nullptr && mprotect(base_ + from, bytes, PROT_READ | PROT_WRITE) == 0
               ? base_ + from
               : nullptr;
  }

 private:
  std::size_t bytes_;
  std::byte* base_ = nullptr;
};

}  // namespace

TEST_CASE("B062 NaN in the unfilled rows of the last page reaches nothing", "[nan][fault]") {
  const auto run = [](float filler, DType dtype, Removal way) {
    PagedCache::Params p{
        .pages = 6, .page_size = 4, .kv_heads = 2, .key_dim = 8, .value_dim = 2, .dtype = dtype};
    p.unrotated_keys = dtype != DType::f32;
    TestCache t(p);
    t.rotation = plain_rotation(8);
    const SequenceId s = t.filled(13);
    const CacheView view = t.cache.view(s);
    const std::vector<float> tail(8, filler);
    for (const std::int32_t h : {0, 1}) {
      for (std::int32_t slot = 1; slot < 4; ++slot) {
        const PageId last = view.k_page({}, {}, HeadId{h}, 3);
        store_row(view.k, view.k.row({}, last, HeadId{h}, Slot{slot}), tail.data());
        store_row(view.v, view.v.row({}, last, HeadId{h}, Slot{slot}), tail.data());
      }
    }
    const Queries q = make_queries(11, 2, 6, 8);
    Input in;
    in.queries.data = q.data.data();
    in.queries.query_heads = 6;
    in.queries.rows = 2;
    in.queries.row_stride = 6 * 8;
    in.queries.head_stride = 8;
    Observation obs;
    obs.queries = in.queries;
    const WindowScorer scorer({.window = 2});
    std::vector<std::byte> scratch(scorer.scratch_bytes(plan_shape(view, obs)));
    Result result;
    result.scores.resize(13);
    scorer.score({view, {}, {}, HeadId{1}}, obs, scratch, result.scores);
    const Rerotator rerotator(view, t.rotation->rope(), PositionMode::in_cache);
    in.options.rerotator = &rerotator;
    in.options.removal = way;
    const Outcome out = evict(SnapKVSelector({.window = 2, .budget = 7}), t, s, in);
    REQUIRE(out.report.status == Status::ok);
    result.nan = out.nan_count;
    for (const std::int32_t h : {0, 1}) {
      for (const Row& r : t.rows(s, 0, h)) { result.keys.push_back(r.key); }
      result.positions = result.positions + t.positions(s, 0, h);
    }
    return result;
  };
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Removal way : {Removal::stable_pack, Removal::fill_holes}) {
      const Result zeros = run(0.0F, dtype, way);
      CHECK(zeros.positions.size() == 14);
      CHECK(zeros.nan == 0);
      CHECK(run(nan_value, dtype, way) == zeros);  // so all of it is finite, too
      CHECK(run(infinity, dtype, way) == zeros);
    }
  }
}

TEST_CASE("B064 NaN in the score of a row that is not a candidate changes nothing",
          "[nan][fault]") {
  for (const Removal way : {Removal::stable_pack, Removal::fill_holes, Removal::overwrite_slot}) {
    for (const std::int32_t budget : {7, 11}) {  // 11 of 12: one row goes, as in a decode step
      const auto run = [&](float masked) {
        TestCache t({.pages = 4, .page_size = 4, .kv_heads = 2, .key_dim = 2, .value_dim = 2});
        const SequenceId s = t.filled(12);
        Input in;
        in.score = [&](std::int32_t, std::int32_t p, std::int32_t, std::int32_t h) {
          return p < 2 || p >= 9 ? masked : noise(p, h);
        };
        in.budgets = {budget};
        in.options.removal = way;
        const Outcome out = evict(HeavyHitter({.heavy = 2, .recent = 3, .sinks = 2}), t, s, in);
        CHECK(out.report.status == Status::ok);
        CHECK(out.nan_count == 0);
        return t.positions(s, 0, 0) + t.positions(s, 0, 1);
      };
      const Rows with_zero = run(0.0F);
      CHECK(with_zero.size() == 2 * index(budget));
      CHECK(run(nan_value) == with_zero);
      CHECK(run(-infinity) == with_zero);
      CHECK(run(infinity) == with_zero);
    }
  }
}

TEST_CASE("B065 NaN ranks lowest and is counted, -inf with it, then the tie rule", "[nan][fault]") {
  // Pages of one row, as in the case: page 0 is the sink, two of the pages 1..4 go.
  const auto gone = [](std::vector<float> scores, std::int64_t nan, Removal way) {
    TestCache t({.pages = 6, .page_size = 1, .kv_heads = 1, .key_dim = 2, .value_dim = 2});
    const SequenceId s = t.filled(5);
    Input in;
    in.score = scores_of(std::move(scores));
    in.options.removal = way;
    const HeavyHitter<AccumulateParams, HeavyMode::greedy> policy(
        {.heavy = 2, .recent = 0, .sinks = 1});
    const Outcome out = evict(policy, t, s, in);
    CHECK(out.report.status == Status::ok);
    CHECK(out.report.nan_count == nan);
    CHECK(out.report.released_pages == 2);
    CHECK(t.cache.live_rows(s) == 3);
    return out.evicted.at(0);
  };
  for (const Removal way : {Removal::stable_pack, Removal::fill_holes, Removal::drop_pages}) {
    INFO(to_string(way));
    CHECK(gone({0, 20, nan_value, 12, 8}, 1, way) == Rows{2, 4});
    CHECK(gone({0, 20, -nan_value, 12, 8}, 1, way) == Rows{2, 4});
    CHECK(gone({0, 5, 5, -infinity, 5}, 0, way) == Rows{3, 4});
    CHECK(gone({0, nan_value, nan_value, nan_value, nan_value}, 4, way) == Rows{3, 4});
    CHECK(gone({0, nan_value, -infinity, -1e38F, -0.0F}, 1, way) == Rows{1, 2});
    CHECK(gone({0, -infinity, infinity, nan_value, 0}, 1, way) == Rows{1, 3});
  }
}

TEST_CASE("B067 no stage touches a null or reserved page beyond the length, nor the entries there",
          "[nan][fault]") {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  // Pages 1..3 of the pool are open; page 0 is reserved and guarded, as is all around the pool.
  const Guarded memory(6 * page);
  const Guarded tables(2 * page);
  REQUIRE(memory.open(2 * page, 3 * page) != nullptr);
  std::byte* const pool = memory.open(2 * page, 3 * page) - page;
  std::byte* const table = tables.open(0, page);
  REQUIRE(table != nullptr);
  const auto row_bytes = static_cast<std::int32_t>(page / 4);  // 4 slots; key and value in one row
  const std::int32_t dim = row_bytes / 8;
  CacheView view;
  view.page_size = 4;
  view.pages = 4;
  view.kv_heads = 1;
  view.sequences = 2;
  view.k = Plane::nhd(pool, {4, 1, dim, DType::f32});
  view.k.token_stride = row_bytes;
  view.k.page_stride = static_cast<std::int64_t>(page);
  view.v = view.k;
  view.v.base += row_bytes / 2;
  view.table.row_stride = 2;
  view.table.max_pages = 2;

  const auto run = [&](const auto& policy, std::int32_t null_id, std::int32_t rows, Removal way) {
    // Sequence 1's row of the table ends where the guard begins: its second entry is not mapped.
    auto* const ids = reinterpret_cast<std::int32_t*>(table + page) - 3;
    std::array<std::int32_t, 2> lengths{4 + rows, rows};
    ids[0] = 2;
    ids[1] = rows > 0 ? 1 : null_id;
    ids[2] = rows > 0 ? 3 : null_id;
    view.table.ids = ids;
    view.table.null_id = null_id;
    view.lengths = lengths.data();
    std::vector<float> row(index(dim));
    for (const std::int32_t s : {0, 1}) {
      for (std::int32_t r = 0; r < lengths[index(s)]; ++r) {
        std::fill(row.begin(), row.end(), static_cast<float>(10 * s + r));
        store_row(view.v, view.value(SequenceId{s}, {}, {}, r), row.data());
        for (std::int32_t d = 0; d < dim; ++d) { row[index(d)] = noise(s, r, d); }
        store_row(view.k, view.key(SequenceId{s}, {}, {}, r), row.data());
      }
    }
    const Queries q = make_queries(0, 2, 1, dim);
    Input in;
    in.queries.data = q.data.data();
    in.queries.query_heads = 1;
    in.queries.rows = 2;
    in.queries.row_stride = dim;
    in.options.removal = way;
    std::array<PageId, 8> freed{};
    DenseTables sink(view, ids, lengths.data(), nullptr, freed);
    if constexpr (std::is_same_v<std::decay_t<decltype(policy)>, HeavyHitter<>>) {
      in.score = [](std::int32_t s, std::int32_t p, std::int32_t, std::int32_t) {
        return noise(s, p);
      };
    }
    // Without states nothing could tell the order of rows that lose it.
    const bool refused = way == Removal::fill_holes;
    CHECK(evict_into(policy, view, sink, in).report.status ==
          (refused ? Status::bad_options : Status::ok));
    CHECK((refused || lengths[0] <= 8));
    for (const PageId p : sink.freed()) { CHECK((raw(p) >= 1 && raw(p) <= 3)); }
    for (const std::int32_t s : {0, 1}) {
      std::int32_t seen = 0;
      for_each_run({view, SequenceId{s}, {}, {}}, [&](const Run& r) { seen += r.count; });
      CHECK(seen == lengths[index(s)]);
    }
  };
  for (const std::int32_t null_id : {-1, 0}) {
    for (std::int32_t rows = 0; rows <= 4; ++rows) {
      INFO("null page " << null_id << ", rows " << rows);
      run(StreamingSink({.sinks = 1, .recent = 1}), null_id, rows, Removal::automatic);
      run(StreamingSink({.sinks = 0, .recent = 1}), null_id, rows, Removal::automatic);
      for (const Removal way : {Removal::stable_pack, Removal::fill_holes}) {
        run(StreamingSink({.sinks = 1, .recent = 2}), null_id, rows, way);
        run(HeavyHitter({.heavy = 1, .recent = 1}), null_id, rows, way);
        run(SnapKVSelector({.window = 2, .budget = 3}), null_id, rows, way);
      }
    }
  }
}

TEST_CASE("B064 what was in a page before it was written changes no row and no byte that is read",
          "[nan][fault]") {
  // Every cache of these tests is filled with signalling NaN before it is used; here the same steps on one that is zero.
  const auto steps = [](std::uint32_t word) {
    TestCache t({.pages = 40,
                 .page_size = 4,
                 .layers = 2,
                 .kv_heads = 2,
                 .key_dim = 4,
                 .value_dim = 2,
                 .max_sequences = 2,
                 .scores = true,
                 .unrotated_keys = true});
    test::fill_unwritten(t.cache, word);
    t.rotation = plain_rotation(4);
    const SequenceId s = t.filled(21);
    const SequenceId fork = t.cache.try_fork(s).value();
    const Rerotator rerotator(t.cache.view(), t.rotation->rope(), PositionMode::in_cache);
    Input in;
    in.options.rerotator = &rerotator;
    in.options.shared = SharedPages::copy;
    std::vector<PageId> spares;
    for (std::int32_t i = 0; i < 6; ++i) { spares.push_back(t.cache.pool().try_acquire().value()); }
    in.options.spare_pages = spares;
    std::vector<float> seen;
    const auto look = [&](SequenceId q) {
      for (std::int32_t i = 0; i < 4; ++i) {
        for (const Row& r : t.rows(q, i / 2, i % 2)) {
          for (const std::int32_t x : {r.row, r.position, r.rope, r.tag}) {
            seen.push_back(static_cast<float>(x));
          }
          seen.insert(seen.end(), r.key.begin(), r.key.end());
        }
      }
    };
    const Queries q = make_queries(17, 4, 4, 4);
    Input window = in;
    window.queries = {.data = q.data.data(), .query_heads = 4, .rows = 4};
    window.queries.row_stride = 16, window.queries.head_stride = 4;
    REQUIRE(evict(SnapKVSelector({.window = 4, .budget = 13}), t, s, window).report.status ==
            Status::ok);
    look(s), look(fork);
    in.options.spare_pages = {}, in.options.shared = SharedPages::leave;
    for (std::int32_t token = 0; token < 9; ++token) {
      REQUIRE(t.append(s, 1) == Status::ok);
      REQUIRE(evict(HeavyHitter({.heavy = 6, .recent = 4}), t, s, in).report.status == Status::ok);
      look(s);
    }
    return seen;
  };
  const auto zeros = steps(0);
  CHECK(std::ranges::all_of(zeros, [](float x) { return std::isfinite(x); }));
  CHECK((steps(test::signalling_nan) == zeros));
}
