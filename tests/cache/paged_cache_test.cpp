// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/cache/paged_cache.hpp>

#include "catch.hpp"
#include "support/generation.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

using namespace kvtrim;

namespace {

constexpr std::array all_scopes{TableScope::group, TableScope::layer, TableScope::head};

// A token's features say which token, layer, head and plane they belong to. Exact in float.
float feature(
    std::int32_t tag, std::int32_t layer, std::int32_t head, std::int32_t d, bool of_values) {
  return static_cast<float>((((tag * 2 + layer) * 4 + head) * 4 + d) * 2 + (of_values ? 1 : 0)) +
         1.0F;
}

// Writes the tokens that the last extend reserved.
void write(PagedCache& cache, SequenceId s, const std::vector<std::int32_t>& tags) {
  const auto& p = cache.params();
  std::vector<float> keys, values, plain;
  for (std::int32_t l = 0; l < p.layers; ++l) {
    keys.clear();
    values.clear();
    for (const std::int32_t tag : tags) {
      for (std::int32_t h = 0; h < p.kv_heads; ++h) {
        for (std::int32_t d = 0; d < p.key_dim; ++d) {
          keys.push_back(feature(tag, l, h, d, false));
        }
        for (std::int32_t d = 0; d < p.value_dim; ++d) {
          values.push_back(feature(tag, l, h, d, true));
        }
      }
    }
    plain.assign(keys.begin(), keys.end());
    for (float& x : plain) { x = -x; }
    REQUIRE(cache.write(s,
                        LayerId{l},
                        {keys.data()},
                        {values.data()},
                        p.unrotated_keys ? RowSource{plain.data()} : RowSource{}) ==
            kvtrim::Status::ok);
  }
}

Status append(PagedCache& cache, SequenceId s, const std::vector<std::int32_t>& tags) {
  const Status status = cache.try_extend(s, static_cast<std::int32_t>(tags.size()));
  if (status == Status::ok && !tags.empty()) { write(cache, s, tags); }
  return status;
}

std::vector<std::int32_t> tags_from(std::int32_t first, std::int32_t n) {
  std::vector<std::int32_t> tags;
  for (std::int32_t i = 0; i < n; ++i) { tags.push_back(first + i); }
  return tags;
}

struct Token {
  std::int32_t position;
  std::int32_t tag;
  friend bool operator==(const Token&, const Token&) = default;
  friend bool operator<(const Token& a, const Token& b) { return a.position < b.position; }
};

// What a visitor sees of one head; `torn` if a row's features are not all of one token.
struct Seen {
  std::vector<Token> tokens;
  std::int32_t torn = 0;
};

Seen seen_of(PagedCache& cache, SequenceId s, std::int32_t l, std::int32_t h) {
  const CacheView view = cache.view();
  const auto& p = cache.params();
  std::vector<float> key(static_cast<std::size_t>(p.key_dim)),
      value(static_cast<std::size_t>(p.value_dim));
  Seen out;
  for_each_run({view, s, LayerId{l}, HeadId{h}}, [&](const Run& run) {
    for (std::int32_t i = 0; i < run.count; ++i) {
      const Slot slot{raw(run.slot) + i};
      load_row(view.k, view.k.row(LayerId{l}, run.k_page, HeadId{h}, slot), key.data());
      load_row(view.v, view.v.row(LayerId{l}, run.v_page, HeadId{h}, slot), value.data());
      const auto tag = static_cast<std::int32_t>((key[0] - 1) / 64);
      for (std::int32_t d = 0; d < p.key_dim; ++d) {
        out.torn += key[static_cast<std::size_t>(d)] == feature(tag, l, h, d, false) ? 0 : 1;
      }
      for (std::int32_t d = 0; d < p.value_dim; ++d) {
        out.torn += value[static_cast<std::size_t>(d)] == feature(tag, l, h, d, true) ? 0 : 1;
      }
      if (p.unrotated_keys) {
        load_row(view.unrotated_keys,
                 view.unrotated_keys.row(LayerId{l}, run.k_page, HeadId{h}, slot),
                 key.data());
        out.torn += key[0] == -feature(tag, l, h, 0, false) ? 0 : 1;
      }
      out.tokens.push_back({raw(view.position(s, LayerId{l}, HeadId{h}, run.row + i)), tag});
    }
  });
  return out;
}

// Whether all heads of all layers hold `expected`, in this order.
bool holds(PagedCache& cache, SequenceId s, const std::vector<Token>& expected) {
  for (std::int32_t l = 0; l < cache.params().layers; ++l) {
    for (std::int32_t h = 0; h < cache.params().kv_heads; ++h) {
      const Seen seen = seen_of(cache, s, l, h);
      if (seen.torn != 0 || seen.tokens != expected) { return false; }
      if (cache.live_rows(s, LayerId{l}, HeadId{h}) != static_cast<std::int32_t>(expected.size())) {
        return false;
      }
    }
  }
  return true;
}

std::vector<Token> tokens(std::int32_t first_tag, std::int32_t n) {
  std::vector<Token> out;
  for (std::int32_t i = 0; i < n; ++i) { out.push_back({i, first_tag + i}); }
  return out;
}

template <class F>
void for_each_table(const PagedCache& cache, F&& f) {
  const auto& p = cache.params();
  const std::int32_t layers = p.scope == TableScope::group ? 1 : p.layers;
  const std::int32_t heads = p.scope == TableScope::head ? p.kv_heads : 1;
  for (std::int32_t l = 0; l < layers; ++l) {
    for (std::int32_t h = 0; h < heads; ++h) { f(l * heads + h, LayerId{l}, HeadId{h}); }
  }
}

// Everything that a failed operation must not change.
struct Snapshot {
  std::vector<std::int32_t> numbers;
  std::vector<std::uint64_t> generations;
  std::vector<std::byte> rows;
  friend bool operator==(const Snapshot&, const Snapshot&) = default;
};

void add_rows(PagedCache& cache, SequenceId s, std::vector<std::byte>& out) {
  const CacheView view = cache.view();
  for (std::int32_t l = 0; l < view.layers; ++l) {
    for (std::int32_t h = 0; h < view.kv_heads; ++h) {
      for_each_run({view, s, LayerId{l}, HeadId{h}}, [&](const Run& run) {
        for (std::int32_t i = 0; i < run.count; ++i) {
          const Slot slot{raw(run.slot) + i};
          const std::byte* const key = view.k.row(LayerId{l}, run.k_page, HeadId{h}, slot);
          const std::byte* const value = view.v.row(LayerId{l}, run.v_page, HeadId{h}, slot);
          out.insert(out.end(), key, key + view.k.row_bytes());
          out.insert(out.end(), value, value + view.v.row_bytes());
        }
      });
    }
  }
}

Snapshot snapshot(PagedCache& cache) {
  Snapshot out;
  const auto& p = cache.params();
  const CacheView view = cache.view();
  for (std::int32_t i = 0; i < p.max_sequences; ++i) {
    const SequenceId s{i};
    out.numbers.push_back(cache.alive(s) ? 1 : 0);
    for_each_table(cache, [&](std::int32_t, LayerId l, HeadId h) {
      const auto table = cache.page_table(s, l, h);
      out.numbers.insert(out.numbers.end(), table.begin(), table.end());
      const SequenceState& state = cache.state(s, l, h);
      for (const std::int32_t x : {state.live_rows,
                                   state.next_position,
                                   state.next_rope_position,
                                   state.append_row,
                                   state.steps,
                                   state.rows_at_eviction,
                                   state.ordered ? 1 : 0}) {
        out.numbers.push_back(x);
      }
      out.generations.push_back(state.generation);
    });
    for (std::int32_t l = 0; l < p.layers; ++l) {
      for (std::int32_t h = 0; h < p.kv_heads; ++h) {
        for_each_run({view, s, LayerId{l}, HeadId{h}}, [&](const Run& run) {
          for (std::int32_t r = run.row; r < run.row + run.count; ++r) {
            out.numbers.push_back(raw(view.position(s, LayerId{l}, HeadId{h}, r)));
            out.numbers.push_back(view.rope_position(s, LayerId{l}, HeadId{h}, r));
          }
        });
      }
    }
    add_rows(cache, s, out.rows);
  }
  for (std::int32_t page = 0; page < p.pages; ++page) {
    out.numbers.push_back(cache.pool().ref_count(PageId{page}));
  }
  out.numbers.push_back(cache.pool().available());
  return out;
}

// Free and used pages add up, and each count is the number of tables that name the page.
bool pool_adds_up(PagedCache& cache) {
  const auto& p = cache.params();
  std::vector<std::int32_t> named(static_cast<std::size_t>(p.pages), 0);
  bool rest_null = true;
  for (std::int32_t i = 0; i < p.max_sequences; ++i) {
    for_each_table(cache, [&](std::int32_t, LayerId l, HeadId h) {
      const SequenceState& state = cache.state(SequenceId{i}, l, h);
      const auto table = cache.page_table(SequenceId{i}, l, h);
      const std::int32_t extent = state.live_rows + (state.append_row >= 0 ? 1 : 0);
      const auto used = static_cast<std::size_t>((extent + p.page_size - 1) / p.page_size);
      for (std::size_t e = 0; e < table.size(); ++e) {
        if (e < used) {
          ++named.at(static_cast<std::size_t>(table[e]));
        } else {
          rest_null = rest_null && table[e] == -1;
        }
      }
    });
  }
  std::int32_t used = 0;
  bool equal = true;
  for (std::int32_t page = 0; page < p.pages; ++page) {
    const std::int32_t count = named[static_cast<std::size_t>(page)];
    equal = equal && cache.pool().ref_count(PageId{page}) == count;
    used += count > 0 ? 1 : 0;
  }
  return rest_null && equal && cache.pool().in_use() == used &&
         cache.pool().available() == p.pages - used;
}

// Stores what an eviction would have left, through the sink: table `t` keeps its first `pages` pages.
void update_table(PagedCache& cache,
                  SequenceId s,
                  std::int32_t t,
                  LayerId l,
                  HeadId h,
                  const SequenceState& state,
                  std::int32_t skip_pages = 0) {
  const std::int32_t P = cache.params().page_size;
  const SequenceState before = cache.state(s, l, h);
  const std::int32_t had = pages_for(before.extent(), P);
  const std::int32_t keeps = pages_for(state.extent(), P);
  std::vector<PageId> pages, released;
  for (std::int32_t e = 0; e < had; ++e) {
    const PageId page{cache.page_table(s, l, h)[static_cast<std::size_t>(e)]};
    (e < skip_pages || e >= skip_pages + keeps ? released : pages).push_back(page);
  }
  cache.update({s, t, l, h, pages, pages, had, state});
  for (auto page = released.rbegin(); page != released.rend(); ++page) { cache.release(*page); }
}

// Evicts row `row` of every head and leaves its slot to the next append, as the overwriting way does.
void make_hole(PagedCache& cache, SequenceId s, std::int32_t row) {
  for_each_table(cache, [&](std::int32_t t, LayerId l, HeadId h) {
    SequenceState state = cache.state(s, l, h);
    --state.live_rows;
    state.append_row = row;
    update_table(cache, s, t, l, h, state);
  });
}

// Evicts the rows of the first page by closing up the table.
void drop_first_page(PagedCache& cache, SequenceId s) {
  const std::int32_t P = cache.params().page_size;
  const CacheView view = cache.view();
  for_each_table(cache, [&](std::int32_t t, LayerId l, HeadId h) {
    SequenceState state = cache.state(s, l, h);
    for (std::int32_t dl = 0; dl < view.layers_per_table(); ++dl) {
      for (std::int32_t dh = 0; dh < view.heads_per_table(); ++dh) {
        const LayerId layer{raw(l) + dl};
        const HeadId head{raw(h) + dh};
        for (std::int32_t r = 0; r < state.extent() - P; ++r) {
          move_sequence_data({view, s, layer, head}, r + P, r);
        }
      }
    }
    const bool hole_dropped = state.append_row >= 0 && state.append_row < P;
    state.live_rows -= hole_dropped ? P - 1 : P;
    state.append_row = state.append_row < 0 || hole_dropped ? -1 : state.append_row - P;
    update_table(cache, s, t, l, h, state, 1);
  });
}

PagedCache::Params small(TableScope scope, std::int32_t page_size = 4, std::int32_t pages = 60) {
  PagedCache::Params p;
  p.pages = pages;
  p.page_size = page_size;
  p.layers = 2;
  p.kv_heads = 3;
  p.key_dim = 3;
  p.value_dim = 2;
  p.scope = scope;
  p.max_sequences = 3;
  p.max_rows = 40;
  return p;
}

std::int32_t tables_of(const PagedCache::Params& p) {
  return p.scope == TableScope::group   ? 1
         : p.scope == TableScope::layer ? p.layers
                                        : p.layers * p.kv_heads;
}

}  // namespace

TEST_CASE("paged_cache: live rows and their bytes are summed over layers and heads",
          "[paged_cache]") {
  for (const TableScope scope : all_scopes) {
    for (const DType dtype : {DType::f32, DType::f16}) {
      PagedCache::Params p = small(scope);
      p.dtype = dtype;
      PagedCache cache(p);
      const SequenceId a = *cache.try_create();
      CHECK(cache.total_live_rows(a) == 0);
      REQUIRE(append(cache, a, tags_from(0, 9)) == Status::ok);
      std::int64_t rows = 0;
      for (std::int32_t l = 0; l < 2; ++l) {
        for (std::int32_t h = 0; h < 3; ++h) rows += cache.live_rows(a, LayerId{l}, HeadId{h});
      }
      CHECK(rows == 54);
      CHECK(cache.total_live_rows(a) == rows);
      CHECK(cache.live_bytes(a) == rows * (3 + 2) * element_bytes(dtype));
    }
  }
}

TEST_CASE("paged_cache: rows are read back as written, in every scope, page size and head count",
          "[paged_cache][property]") {
  for (const TableScope scope : all_scopes) {
    for (const std::int32_t page_size : {1, 4, 16}) {
      for (const std::int32_t kv_heads : {1, 3}) {
        PagedCache::Params p = small(scope, page_size, 300);
        p.kv_heads = kv_heads;
        p.unrotated_keys = page_size == 4;
        PagedCache cache(p);
        const SequenceId a = *cache.try_create();
        const SequenceId b = *cache.try_create();
        std::vector<Token> in_a, in_b;
        for (const std::int32_t n : {1, 3, 0, 5, 7, 16}) {
          const auto first = static_cast<std::int32_t>(in_a.size());
          REQUIRE(append(cache, a, tags_from(first, n)) == Status::ok);
          for (std::int32_t i = 0; i < n; ++i) { in_a.push_back({first + i, first + i}); }
          REQUIRE(append(cache, b, {100 + n}) == Status::ok);
          in_b.push_back({static_cast<std::int32_t>(in_b.size()), 100 + n});
          CHECK(holds(cache, a, in_a));
          CHECK(holds(cache, b, in_b));
          CHECK(pool_adds_up(cache));
        }
        CHECK(cache.pool().in_use() ==
              tables_of(p) * (pages_for(32, page_size) + pages_for(6, page_size)));
        CHECK(raw(cache.next_position(a)) == 32);
        CHECK(cache.next_rope_position(a) == 32);
        CHECK_NOTHROW(check_layout(cache.view()));
        std::vector<std::uint64_t> scratch(static_cast<std::size_t>(check_tables_words(p.pages)));
        CHECK(check_tables(cache.view(), scratch).status == Status::ok);
        // The view of one sequence is its sequence 0.
        const CacheView alone = cache.view(b);
        CHECK(alone.live_rows({}, LayerId{1}, {}) == 6);
        CHECK(alone.key({}, LayerId{1}, HeadId{kv_heads - 1}, 5) ==
              cache.view().key(b, LayerId{1}, HeadId{kv_heads - 1}, 5));
        CHECK(alone.position({}, LayerId{1}, HeadId{kv_heads - 1}, 5) == Position{5});
      }
    }
  }
}

TEST_CASE("paged_cache: f16 and bf16 caches hold the values rounded to nearest even",
          "[paged_cache]") {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    PagedCache::Params p = small(TableScope::head);
    p.layers = 1;
    p.kv_heads = 1;
    p.key_dim = 4;
    p.value_dim = 4;
    p.dtype = type;
    PagedCache cache(p);
    const SequenceId s = *cache.try_create();
    REQUIRE(cache.try_extend(s, 1) == Status::ok);
    const int bits = type == DType::f32 ? 23 : type == DType::f16 ? 10 : 7;
    const float half = std::ldexp(1.0F, -bits - 1);  // half a step above 1; f32 has no such value
    const std::array<float, 4> keys{
        1.0F + half, 1.0F + 3 * half, 1.0F + half * 1.25F, -(1.0F + half)};
    const std::array<float, 4> values{1.0F + 2 * half, 2.0F + 2 * half, 2.0F + 6 * half, 0.0F};
    REQUIRE(cache.write(s, {}, {keys.data()}, {values.data()}) == kvtrim::Status::ok);
    std::array<float, 4> k{}, v{};
    const CacheView view = cache.view();
    load_row(view.k, view.key(s, {}, {}, 0), k.data());
    load_row(view.v, view.value(s, {}, {}, 0), v.data());
    if (type == DType::f32) {
      CHECK(k == keys);
      CHECK(v == values);
    } else {
      CHECK(k == std::array<float, 4>{1.0F, 1.0F + 4 * half, 1.0F + 2 * half, -1.0F});
      CHECK(v == std::array<float, 4>{1.0F + 2 * half, 2.0F, 2.0F + 8 * half, 0.0F});
    }
    CHECK(cache.page_bytes() == 4 * 8 * element_bytes(type));
  }
}

TEST_CASE("paged_cache: rows are read from any strides", "[paged_cache]") {
  PagedCache::Params p = small(TableScope::group);
  p.layers = 1;
  PagedCache cache(p);
  const SequenceId s = *cache.try_create();
  REQUIRE(cache.try_extend(s, 5) == Status::ok);
  // An engine's [heads, tokens, 8] with q, k and v in one row: keys at 0, values at 4.
  std::vector<float> rows(3 * 5 * 8);
  for (std::int32_t h = 0; h < 3; ++h) {
    for (std::int32_t i = 0; i < 5; ++i) {
      float* const row = rows.data() + (h * 5 + i) * 8;
      for (std::int32_t d = 0; d < 3; ++d) { row[d] = feature(i, 0, h, d, false); }
      for (std::int32_t d = 0; d < 2; ++d) { row[4 + d] = feature(i, 0, h, d, true); }
    }
  }
  REQUIRE(cache.write(s, {}, {rows.data(), 8, 40}, {rows.data() + 4, 8, 40}) == kvtrim::Status::ok);
  CHECK(holds(cache, s, tokens(0, 5)));
}

TEST_CASE("paged_cache: a page's bytes are those of all that it serves", "[paged_cache]") {
  const std::int64_t row = (3 + 2) * 4;
  CHECK(PagedCache(small(TableScope::group)).page_bytes() == row * 4 * 3 * 2);
  CHECK(PagedCache(small(TableScope::layer)).page_bytes() == row * 4 * 3);
  CHECK(PagedCache(small(TableScope::head)).page_bytes() == row * 4);
}

TEST_CASE("paged_cache: new rows have a score of 0, also where evicted rows had one",
          "[paged_cache]") {
  PagedCache::Params p = small(TableScope::layer);
  p.scores = true;
  PagedCache cache(p);
  const SequenceId s = *cache.try_create();
  const CacheView view = cache.view();
  for (int round = 0; round < 2; ++round) {
    REQUIRE(append(cache, s, tags_from(0, 6)) == Status::ok);
    for (std::int32_t l = 0; l < 2; ++l) {
      for (std::int32_t h = 0; h < 3; ++h) {
        for (std::int32_t r = 0; r < 6; ++r) {
          CHECK(view.score_sums.at<float>(s, LayerId{l}, HeadId{h}, r) == 0.0F);
          CHECK(view.score_compensations.at<float>(s, LayerId{l}, HeadId{h}, r) == 0.0F);
          view.score_sums.at<float>(s, LayerId{l}, HeadId{h}, r) = 5;
          view.score_compensations.at<float>(s, LayerId{l}, HeadId{h}, r) = 6;
        }
      }
    }
    cache.reset(s);
  }
  CHECK_FALSE(static_cast<bool>(PagedCache(small(TableScope::layer)).view().score_sums));
}

TEST_CASE("paged_cache: a fork shares all pages and copies positions and scores", "[paged_cache]") {
  for (const TableScope scope : all_scopes) {
    PagedCache::Params p = small(scope);
    p.scores = true;
    PagedCache cache(p);
    const SequenceId a = *cache.try_create();
    REQUIRE(append(cache, a, tags_from(0, 10)) == Status::ok);
    const CacheView view = cache.view();
    view.score_sums.at<float>(a, LayerId{1}, HeadId{2}, 9) = 3;
    view.rope_positions.at<std::int32_t>(a, LayerId{1}, HeadId{2}, 9) = 42;
    const std::int32_t used = cache.pool().in_use();
    const SequenceId b = *cache.try_fork(a);
    CHECK(cache.pool().in_use() == used);  // not one page
    for_each_table(cache, [&](std::int32_t, LayerId l, HeadId h) {
      const auto in_a = cache.page_table(a, l, h);
      const auto in_b = cache.page_table(b, l, h);
      CHECK(std::equal(in_a.begin(), in_a.end(), in_b.begin(), in_b.end()));
      for (std::size_t e = 0; e < 3; ++e) { CHECK(cache.pool().ref_count(PageId{in_a[e]}) == 2); }
      CHECK(cache.state(a, l, h).generation != cache.state(b, l, h).generation);
    });
    CHECK(holds(cache, b, tokens(0, 10)));
    CHECK(raw(cache.next_position(b)) == 10);
    CHECK(view.score_sums.at<float>(b, LayerId{1}, HeadId{2}, 9) == 3.0F);
    CHECK(view.rope_position(b, LayerId{1}, HeadId{2}, 9) == 42);
    view.score_sums.at<float>(b, LayerId{1}, HeadId{2}, 9) = 8;  // side data is not shared
    CHECK(view.score_sums.at<float>(a, LayerId{1}, HeadId{2}, 9) == 3.0F);
    CHECK(pool_adds_up(cache));
  }
}

TEST_CASE(
    "paged_cache: an append after a fork copies the shared last page and leaves the other's bytes "
    "alone",
    "[paged_cache]") {
  for (const TableScope scope : all_scopes) {
    for (const bool parent_first : {true, false}) {
      PagedCache::Params p = small(scope);
      p.unrotated_keys = true;
      PagedCache cache(p);
      const SequenceId a = *cache.try_create();
      REQUIRE(append(cache, a, tags_from(0, 10)) == Status::ok);
      const SequenceId b = *cache.try_fork(a);
      const SequenceId first = parent_first ? a : b;
      const SequenceId second = parent_first ? b : a;
      std::vector<std::byte> before, after;
      add_rows(cache, second, before);
      const std::int32_t used = cache.pool().in_use();

      REQUIRE(append(cache, first, {50, 51, 52}) ==
              Status::ok);  // row 10, 11 of the shared page; 12 of a new one
      add_rows(cache, second, after);
      CHECK(after == before);
      CHECK(cache.pool().in_use() == used + 2 * tables_of(p));
      auto expected = tokens(0, 10);
      for (std::int32_t i = 0; i < 3; ++i) { expected.push_back({10 + i, 50 + i}); }
      CHECK(holds(cache, first, expected));
      CHECK(holds(cache, second, tokens(0, 10)));

      // Now the second holds the page alone: it writes in place.
      REQUIRE(append(cache, second, {60}) == Status::ok);
      CHECK(cache.pool().in_use() == used + 2 * tables_of(p));
      expected.resize(10);
      expected.push_back({10, 60});
      CHECK(holds(cache, second, expected));
      CHECK(pool_adds_up(cache));
    }
  }
}

TEST_CASE("paged_cache: after a fork at a page border nothing is copied", "[paged_cache][edge]") {
  PagedCache cache(small(TableScope::group));
  const SequenceId a = *cache.try_create();
  REQUIRE(append(cache, a, tags_from(0, 8)) == Status::ok);
  const SequenceId b = *cache.try_fork(a);
  REQUIRE(append(cache, b, {9}) == Status::ok);
  CHECK(cache.pool().in_use() == 3);
  CHECK(cache.pool().ref_count(PageId{cache.page_table(a)[1]}) == 2);
}

TEST_CASE("paged_cache: out of pages in the middle of an extend changes nothing",
          "[paged_cache][edge]") {
  for (const TableScope scope : all_scopes) {
    const std::int32_t tables = tables_of(small(scope));
    // 6 rows: 2 pages per table. 3 more rows: 1 more page per table; the pool is one page short in total.
    PagedCache cache(small(scope, 4, 3 * tables - 1));
    const SequenceId s = *cache.try_create();
    REQUIRE(append(cache, s, tags_from(0, 6)) == Status::ok);
    const Snapshot before = snapshot(cache);
    CHECK(cache.try_extend(s, 3) == Status::out_of_pages);
    CHECK(snapshot(cache) == before);
    CHECK(append(cache, s, {6, 7}) == Status::ok);  // what still fits does
    CHECK(holds(cache, s, tokens(0, 8)));
    CHECK(pool_adds_up(cache));
  }
}

TEST_CASE("paged_cache: the pages of copy-on-write count in an extend, all or nothing",
          "[paged_cache][edge]") {
  for (const TableScope scope : all_scopes) {
    const std::int32_t tables = tables_of(small(scope));
    PagedCache cache(small(scope, 4,
                           3 * tables - 1));  // 2 shared per table; one too few
    const SequenceId a = *cache.try_create();
    REQUIRE(append(cache, a, tags_from(0, 6)) == Status::ok);
    const SequenceId b = *cache.try_fork(a);
    const Snapshot before = snapshot(cache);
    CHECK(cache.try_extend(b, 1) == Status::out_of_pages);
    CHECK(snapshot(cache) == before);
    cache.destroy(a);
    CHECK(append(cache, b, {6}) == Status::ok);
    CHECK(holds(cache, b, tokens(0, 7)));
  }
}

TEST_CASE("paged_cache: more rows than a table holds is reported before pages are counted",
          "[paged_cache][edge]") {
  PagedCache cache(small(TableScope::head, 4, 1000));
  const SequenceId s = *cache.try_create();
  REQUIRE(append(cache, s, tags_from(0, 39)) == Status::ok);
  const Snapshot before = snapshot(cache);
  CHECK(cache.try_extend(s, 2) == Status::too_many_rows);
  CHECK(cache.try_extend(s, 2147483647) == Status::too_many_rows);
  CHECK(snapshot(cache) == before);
  CHECK(append(cache, s, {39}) == Status::ok);
  CHECK(cache.try_extend(s, 1) == Status::too_many_rows);
  CHECK(cache.try_extend(s, 0) == Status::ok);
  CHECK(holds(cache, s, tokens(0, 40)));
}

TEST_CASE("paged_cache: sequences end and begin again, and none is given when all are alive",
          "[paged_cache][edge]") {
  PagedCache cache(small(TableScope::group));
  CHECK_FALSE(cache.alive(SequenceId{0}));
  CHECK(cache.try_create() == SequenceId{0});
  CHECK(cache.try_create() == SequenceId{1});
  REQUIRE(append(cache, SequenceId{1}, tags_from(0, 5)) == Status::ok);
  CHECK(cache.try_fork(SequenceId{1}) == SequenceId{2});
  CHECK(cache.try_create() == std::nullopt);
  const Snapshot before = snapshot(cache);
  CHECK(cache.try_fork(SequenceId{1}) == std::nullopt);
  CHECK(snapshot(cache) == before);
  cache.destroy(SequenceId{1});
  CHECK_FALSE(cache.alive(SequenceId{1}));
  CHECK_FALSE(cache.alive(SequenceId{-1}));
  CHECK_FALSE(cache.alive(SequenceId{3}));
  CHECK(cache.try_extend(SequenceId{1}, 1) == Status::no_such_sequence);
  CHECK(cache.try_truncate(SequenceId{1}, Position{0}) == Status::no_such_sequence);
  CHECK(cache.try_remove_last(SequenceId{7}, 1) == Status::no_such_sequence);
  CHECK(holds(cache, SequenceId{2}, tokens(0, 5)));  // the fork lives on
  CHECK(cache.try_create() == SequenceId{1});
  CHECK(cache.live_rows(SequenceId{1}) == 0);
  CHECK(pool_adds_up(cache));
}

TEST_CASE("paged_cache: impossible parameters are refused with their numbers",
          "[paged_cache][edge]") {
  using Catch::Matchers::ContainsSubstring;
  const auto with = [](auto change) {
    PagedCache::Params p = small(TableScope::group);
    change(p);
    return p;
  };
  CHECK_THROWS_WITH(PagedCache(with([](auto& p) { p.page_size = 0; })),
                    ContainsSubstring("page_size 0"));
  CHECK_THROWS_AS(PagedCache(with([](auto& p) { p.layers = 0; })), std::invalid_argument);
  CHECK_THROWS_AS(PagedCache(with([](auto& p) { p.kv_heads = 0; })), std::invalid_argument);
  CHECK_THROWS_WITH(PagedCache(with([](auto& p) { p.key_dim = -3; })),
                    ContainsSubstring("key_dim -3"));
  CHECK_THROWS_AS(PagedCache(with([](auto& p) { p.value_dim = -1; })), std::invalid_argument);
  CHECK_THROWS_AS(PagedCache(with([](auto& p) { p.max_sequences = 0; })), std::invalid_argument);
  CHECK_THROWS_WITH(PagedCache(with([](auto& p) { p.pages = -4; })), ContainsSubstring("pages -4"));
  CHECK_THROWS_WITH(PagedCache(with([](auto& p) { p.max_rows = -4; })),
                    ContainsSubstring("max_rows -4"));
  CHECK_THROWS_WITH(PagedCache(with([](auto& p) { p.dtype = DType::i8; })),
                    ContainsSubstring("i8"));
  CHECK_THROWS_AS(PagedCache(with([](auto& p) { p.pages = 1 << 30; })), std::length_error);
  PagedCache none(with([](auto& p) { p.pages = 0, p.max_rows = 0; }));
  CHECK(none.try_extend(*none.try_create(), 1) == Status::too_many_rows);
  CHECK(PagedCache(with([](auto& p) { p.max_rows = 0, p.value_dim = 0; })).params().max_rows ==
        240);
  CHECK(PagedCache(with([](auto& p) { p.value_dim = 0; })).params().value_dim == 3);
}

TEST_CASE("paged_cache: a moved cache keeps its rows, and views of it stay valid",
          "[paged_cache]") {
  PagedCache cache(small(TableScope::layer));
  const SequenceId s = *cache.try_create();
  REQUIRE(append(cache, s, tags_from(0, 6)) == Status::ok);
  const CacheView view = cache.view();
  PagedCache moved(std::move(cache));
  CHECK(holds(moved, s, tokens(0, 6)));
  CHECK(view.key(s, {}, {}, 5) == moved.view().key(s, {}, {}, 5));
  CHECK(view.live_rows(s, LayerId{1}, {}) == 6);
}

TEST_CASE("paged_cache: truncation forgets tokens by position and frees whole pages",
          "[paged_cache]") {
  for (const TableScope scope : all_scopes) {
    for (std::int32_t next = 0; next <= 12; ++next) {
      PagedCache::Params p = small(scope);
      PagedCache cache(p);
      const SequenceId s = *cache.try_create();
      REQUIRE(append(cache, s, tags_from(0, 10)) == Status::ok);
      CHECK(cache.try_truncate(s, Position{next}) == Status::ok);
      const std::int32_t rows = std::min(next, 10);
      CHECK(holds(cache, s, tokens(0, rows)));
      CHECK(raw(cache.next_position(s)) == rows);
      CHECK(cache.next_rope_position(s) == rows);
      CHECK(cache.pool().in_use() == tables_of(p) * ((rows + 3) / 4));
      CHECK(pool_adds_up(cache));
      REQUIRE(append(cache, s, {90}) == Status::ok);
      auto expected = tokens(0, rows);
      expected.push_back({rows, 90});
      CHECK(holds(cache, s, expected));
    }
  }
}

TEST_CASE("paged_cache: truncation after an eviction forgets by position, not by row",
          "[paged_cache]") {
  for (const TableScope scope : all_scopes) {
    PagedCache cache(small(scope));
    const SequenceId s = *cache.try_create();
    REQUIRE(append(cache, s, tags_from(0, 14)) == Status::ok);
    drop_first_page(cache, s);  // rows 0..9 hold positions 4..13
    CHECK(cache.try_truncate(s, Position{11}) == Status::ok);
    std::vector<Token> expected;
    for (std::int32_t i = 4; i < 11; ++i) { expected.push_back({i, i}); }
    CHECK(holds(cache, s, expected));
    CHECK(raw(cache.next_position(s)) == 11);
    CHECK(cache.next_rope_position(s) == 11);  // positions were kept
    CHECK(cache.try_truncate(s, Position{2}) == Status::ok);
    CHECK(holds(cache, s, {}));
    CHECK(raw(cache.next_position(s)) == 2);
    CHECK(cache.pool().in_use() == 0);
    CHECK(pool_adds_up(cache));
  }
}

TEST_CASE("paged_cache: with in-cache rope positions a truncation takes back one for each row",
          "[paged_cache]") {
  PagedCache cache(small(TableScope::group));
  const SequenceId s = *cache.try_create();
  REQUIRE(append(cache, s, tags_from(0, 14)) == Status::ok);
  drop_first_page(cache, s);
  SequenceState state = cache.state(s);
  state.next_rope_position = 10;  // rows 0..9 were rotated to 0..9
  update_table(cache, s, 0, {}, {}, state);
  const CacheView view = cache.view(s);
  for (std::int32_t r = 0; r < 10; ++r) {
    for (std::int32_t l = 0; l < view.layers; ++l) {
      for (std::int32_t h = 0; h < view.kv_heads; ++h) {
        view.rope_positions.at<std::int32_t>({}, LayerId{l}, HeadId{h}, r) = r;
      }
    }
  }
  REQUIRE(append(cache, s, {14}) == Status::ok);
  CHECK(cache.try_truncate(s, Position{12}) == Status::ok);
  CHECK(cache.live_rows(s) == 8);
  CHECK(cache.next_rope_position(s) == 8);
  CHECK(raw(cache.next_position(s)) == 12);
  // Positions 2 and 3 were evicted: no row goes with them.
  CHECK(cache.try_truncate(s, Position{2}) == Status::ok);
  CHECK(cache.live_rows(s) == 0);
  CHECK(cache.next_rope_position(s) == 0);
  CHECK(raw(cache.next_position(s)) == 2);
}

TEST_CASE("paged_cache: make_private copies the shared pages, and only those, all or nothing",
          "[paged_cache][edge]") {
  for (const TableScope scope : all_scopes) {
    const std::int32_t tables = tables_of(small(scope));
    // Two shared pages and an own one per table; first there is room for all copies but one, then for all.
    PagedCache::Params p = small(scope, 4, 5 * tables);
    p.unrotated_keys = true;
    PagedCache cache(p);
    const SequenceId a = *cache.try_create();
    REQUIRE(append(cache, a, tags_from(0, 8)) == Status::ok);
    const SequenceId b = *cache.try_fork(a);
    REQUIRE(append(cache, b, {8}) == Status::ok);
    const auto taken = cache.pool().try_acquire();
    REQUIRE(taken);
    const Snapshot before = snapshot(cache);
    CHECK(cache.try_make_private(b) == Status::out_of_pages);
    CHECK(snapshot(cache) == before);

    cache.release(*taken);
    std::vector<std::byte> rows_before, rows_after;
    add_rows(cache, a, rows_before);
    const std::uint64_t generation = cache.state(b).generation;
    const std::int32_t own = cache.page_table(b)[2];
    CHECK(cache.try_make_private(b) == Status::ok);
    CHECK(cache.state(b).generation > generation);
    CHECK(cache.page_table(b)[2] == own);
    CHECK(cache.pool().in_use() == 5 * tables);
    for (std::size_t e = 0; e < 3; ++e) {
      CHECK(cache.pool().ref_count(PageId{cache.page_table(b)[e]}) == 1);
    }
    CHECK(holds(cache, b, tokens(0, 9)));
    add_rows(cache, a, rows_after);
    CHECK(rows_after == rows_before);
    CHECK(pool_adds_up(cache));

    const Snapshot after = snapshot(cache);
    CHECK(cache.try_make_private(b) == Status::ok);  // nothing is shared any longer
    CHECK(cache.try_make_private(a) == Status::ok);
    CHECK(snapshot(cache) == after);
    CHECK(cache.try_make_private(SequenceId{2}) == Status::no_such_sequence);
  }
}

TEST_CASE("paged_cache: an append fills the hole first, with the newest position",
          "[paged_cache][edge]") {
  for (const TableScope scope : all_scopes) {
    PagedCache::Params p = small(scope);
    p.scores = true;
    PagedCache cache(p);
    const SequenceId s = *cache.try_create();
    REQUIRE(append(cache, s, tags_from(0, 8)) == Status::ok);
    cache.view().score_sums.at<float>(s, {}, {}, 2) = 9;
    make_hole(cache, s, 2);
    CHECK(cache.live_rows(s) == 7);
    CHECK(holds(cache, s, {{0, 0}, {1, 1}, {3, 3}, {4, 4}, {5, 5}, {6, 6}, {7, 7}}));
    const std::int32_t used = cache.pool().in_use();
    REQUIRE(append(cache, s, {8}) == Status::ok);
    CHECK(cache.pool().in_use() == used);
    CHECK(holds(cache, s, {{0, 0}, {1, 1}, {8, 8}, {3, 3}, {4, 4}, {5, 5}, {6, 6}, {7, 7}}));
    CHECK_FALSE(cache.state(s).ordered);
    CHECK(cache.view().score_sums.at<float>(s, {}, {}, 2) == 0.0F);

    make_hole(cache, s, 3);
    REQUIRE(append(cache, s, {9, 10, 11}) == Status::ok);  // the hole, then the tail
    CHECK(holds(
        cache,
        s,
        {{0, 0}, {1, 1}, {8, 8}, {9, 9}, {4, 4}, {5, 5}, {6, 6}, {7, 7}, {10, 10}, {11, 11}}));
    CHECK(pool_adds_up(cache));
  }
}

TEST_CASE("paged_cache: a hole in the last row keeps the order when it is filled",
          "[paged_cache][edge]") {
  PagedCache cache(small(TableScope::group));
  const SequenceId s = *cache.try_create();
  REQUIRE(append(cache, s, tags_from(0, 6)) == Status::ok);
  make_hole(cache, s, 5);
  REQUIRE(append(cache, s, {6, 7}) == Status::ok);
  CHECK(cache.state(s).ordered);
  CHECK(holds(cache, s, {{0, 0}, {1, 1}, {2, 2}, {3, 3}, {4, 4}, {6, 6}, {7, 7}}));
}

TEST_CASE(
    "paged_cache: a hole in a shared page, and a shared tail, are both copied before they are "
    "written",
    "[paged_cache][edge]") {
  for (const TableScope scope : all_scopes) {
    PagedCache::Params p = small(scope);
    PagedCache cache(p);
    const SequenceId a = *cache.try_create();
    REQUIRE(append(cache, a, tags_from(0, 10)) == Status::ok);
    make_hole(cache, a, 1);
    const SequenceId b = *cache.try_fork(a);
    std::vector<std::byte> before, after;
    add_rows(cache, a, before);
    const std::int32_t used = cache.pool().in_use();
    REQUIRE(append(cache, b, {50, 51}) == Status::ok);
    CHECK(cache.pool().in_use() == used + 2 * tables_of(p));
    add_rows(cache, a, after);
    CHECK(before == after);
    CHECK(holds(cache,
                b,
                {{0, 0},
                 {10, 50},
                 {2, 2},
                 {3, 3},
                 {4, 4},
                 {5, 5},
                 {6, 6},
                 {7, 7},
                 {8, 8},
                 {9, 9},
                 {11, 51}}));
    CHECK(pool_adds_up(cache));
  }
}

TEST_CASE("paged_cache: truncation of unordered rows moves the rest together",
          "[paged_cache][edge]") {
  for (const TableScope scope : all_scopes) {
    for (const std::int32_t hole : {0, 2, 5, 9}) {
      for (std::int32_t next = 0; next <= 12; ++next) {
        PagedCache::Params p = small(scope);
        p.unrotated_keys = true;
        PagedCache cache(p);
        const SequenceId s = *cache.try_create();
        REQUIRE(append(cache, s, tags_from(0, 10)) == Status::ok);
        make_hole(cache, s, 3);
        REQUIRE(append(cache, s, {10}) == Status::ok);  // 0 1 2 10 4 5 6 7 8 9
        make_hole(cache, s, hole);
        std::vector<Token> expected;
        for (std::int32_t i = 0; i < 11; ++i) {
          if (i != 3 && i != hole && i < next) { expected.push_back({i, i}); }
        }
        INFO("hole " << hole << ", next " << next);
        REQUIRE(cache.try_truncate(s, Position{next}) == Status::ok);
        for (std::int32_t l = 0; l < 2; ++l) {
          for (std::int32_t h = 0; h < 3; ++h) {
            Seen seen = seen_of(cache, s, l, h);
            CHECK(seen.torn == 0);
            std::sort(seen.tokens.begin(), seen.tokens.end());
            CHECK(seen.tokens == expected);
          }
        }
        CHECK(raw(cache.next_position(s)) == std::min(next, 11));
        CHECK(pool_adds_up(cache));
      }
    }
  }
}

TEST_CASE("paged_cache: a truncation that moves a row into the hole ends the order",
          "[paged_cache][edge]") {
  PagedCache cache(small(TableScope::group));
  const SequenceId s = *cache.try_create();
  REQUIRE(append(cache, s, tags_from(0, 6)) == Status::ok);
  make_hole(cache, s, 2);
  REQUIRE(cache.state(s).ordered);
  REQUIRE(cache.try_truncate(s, Position{5}) == Status::ok);
  CHECK(holds(cache, s, {{0, 0}, {1, 1}, {4, 4}, {3, 3}}));
  CHECK_FALSE(cache.state(s).ordered);
  REQUIRE(cache.try_truncate(s, Position{0}) == Status::ok);
  CHECK(cache.state(s).ordered);  // nothing is in order
}

TEST_CASE(
    "paged_cache: a truncation that would write a shared page is refused, one that forgets nothing "
    "is not",
    "[paged_cache][edge]") {
  for (const TableScope scope : all_scopes) {
    PagedCache cache(small(scope));
    const SequenceId a = *cache.try_create();
    REQUIRE(append(cache, a, tags_from(0, 10)) == Status::ok);
    make_hole(cache, a, 2);
    const SequenceId b = *cache.try_fork(a);
    const Snapshot before = snapshot(cache);
    CHECK(cache.try_truncate(b, Position{8}) == Status::shared_page);
    CHECK(snapshot(cache) == before);
    CHECK(cache.try_truncate(b, Position{10}) == Status::ok);
    CHECK(cache.try_truncate(b, Position{99}) == Status::ok);
    CHECK(cache.try_remove_last(b, 0) == Status::ok);
    CHECK(snapshot(cache).numbers == before.numbers);
    CHECK(cache.try_truncate(b, Position{2}) == Status::ok);  // nothing moves: rows 0 and 1
    CHECK(holds(cache, b, tokens(0, 2)));
    CHECK(pool_adds_up(cache));
  }
}

TEST_CASE(
    "paged_cache: a truncation that would leave heads of one table with different counts is "
    "refused",
    "[paged_cache][edge]") {
  PagedCache cache(small(TableScope::layer));
  const SequenceId s = *cache.try_create();
  REQUIRE(append(cache, s, tags_from(0, 6)) == Status::ok);
  // Head 1 of layer 1 kept positions 0 and 3, the others 0 and 1.
  const CacheView view = cache.view();
  for_each_table(cache, [&](std::int32_t t, LayerId l, HeadId h) {
    SequenceState state = cache.state(s, l, h);
    state.live_rows = 2;
    update_table(cache, s, t, l, h, state);
  });
  view.positions.at<Position>(s, LayerId{1}, HeadId{1}, 1) = Position{3};
  const Snapshot before = snapshot(cache);
  CHECK(cache.try_truncate(s, Position{2}) == Status::unequal_budget);
  CHECK(snapshot(cache) == before);
  CHECK(cache.try_truncate(s, Position{4}) == Status::ok);
  CHECK(cache.live_rows(s, LayerId{1}) == 2);
}

TEST_CASE("paged_cache: every change raises the generation, and so the view's hash",
          "[paged_cache]") {
  PagedCache cache(small(TableScope::layer));
  const SequenceId s = *cache.try_create();
  std::uint64_t state = cache.state(s).generation;
  std::uint64_t view = test::generation_of(cache.view());
  const auto raised = [&] {
    const bool both =
        cache.state(s).generation > state && test::generation_of(cache.view()) != view;
    state = cache.state(s).generation;
    view = test::generation_of(cache.view());
    return both;
  };
  REQUIRE(append(cache, s, tags_from(0, 6)) == Status::ok);
  CHECK(raised());
  REQUIRE(cache.try_truncate(s, Position{5}) == Status::ok);
  CHECK(raised());
  REQUIRE(append(cache, s, {5}) == Status::ok);  // the same lengths and pages as before
  CHECK(raised());
  make_hole(cache, s, 1);
  CHECK(raised());
  cache.reset(s);
  CHECK(raised());
}

TEST_CASE("paged_cache: steps count the extends since an eviction", "[paged_cache]") {
  PagedCache cache(small(TableScope::group));
  const SequenceId s = *cache.try_create();
  REQUIRE(append(cache, s, tags_from(0, 6)) == Status::ok);
  REQUIRE(append(cache, s, {6}) == Status::ok);
  REQUIRE(cache.try_extend(s, 0) == Status::ok);
  CHECK(cache.state(s).steps == 2);
  cache.reset(s);
  CHECK(cache.state(s).steps == 0);
}

TEST_CASE(
    "B013 paged_cache: the sequence's length is the same whichever layer is asked; live rows are "
    "the layer's",
    "[paged_cache][fault]") {
  PagedCache cache(small(TableScope::layer));
  const SequenceId s = *cache.try_create();
  for (std::int32_t i = 0; i < 10; ++i) {
    REQUIRE(append(cache, s, {i}) == Status::ok);
    if (i < 4) { continue; }
    // Layer 0 slides over 4 rows: the oldest goes, the others move down.
    const CacheView view = cache.view();
    for (std::int32_t h = 0; h < 3; ++h) {
      for (std::int32_t r = 0; r < 4; ++r) {
        const HeadRef head{view, s, LayerId{0}, HeadId{h}};
        move_page_data(head, place_of(head, r + 1), place_of(head, r));
        move_sequence_data(head, r + 1, r);
      }
    }
    SequenceState state = cache.state(s);
    state.live_rows = 4;
    update_table(cache, s, 0, LayerId{0}, {}, state);
  }
  CHECK(raw(cache.next_position(s)) == 10);
  for (std::int32_t l = 0; l < 2; ++l) { CHECK(cache.state(s, LayerId{l}).next_position == 10); }
  CHECK(cache.live_rows(s, LayerId{0}) == 4);
  CHECK(cache.live_rows(s, LayerId{1}) == 10);
  CHECK(seen_of(cache, s, 0, 2).tokens == std::vector<Token>{{6, 6}, {7, 7}, {8, 8}, {9, 9}});
  CHECK(seen_of(cache, s, 1, 2).tokens == tokens(0, 10));
  CHECK(pool_adds_up(cache));
}

TEST_CASE(
    "B015 paged_cache: append 6, reset, append 3 gives 3 rows at positions 0..2 in the pages of 3 "
    "rows",
    "[paged_cache][fault]") {
  for (const TableScope scope : all_scopes) {
    PagedCache::Params p = small(scope);
    p.scores = true;
    PagedCache cache(p);
    const SequenceId s = *cache.try_create();
    REQUIRE(append(cache, s, tags_from(0, 6)) == Status::ok);
    make_hole(cache, s, 2);
    cache.reset(s);
    CHECK(cache.pool().in_use() == 0);
    REQUIRE(append(cache, s, tags_from(70, 3)) == Status::ok);
    CHECK(cache.live_rows(s) == 3);
    CHECK(holds(cache, s, tokens(70, 3)));
    CHECK(cache.state(s).append_row < 0);
    CHECK(cache.state(s).ordered);
    CHECK(cache.state(s).steps == 1);
    CHECK(cache.next_rope_position(s) == 3);
    CHECK(cache.pool().in_use() == tables_of(p) * 1);
    for (std::int32_t r = 0; r < 3; ++r) {
      CHECK(cache.view().score_sums.at<float>(s, {}, {}, r) == 0.0F);
    }
    CHECK(pool_adds_up(cache));
  }
}

TEST_CASE(
    "B016 paged_cache: truncate to 0 leaves nothing, remove 5 of 3 leaves nothing, remove 0 "
    "changes nothing",
    "[paged_cache][fault]") {
  for (const TableScope scope : all_scopes) {
    PagedCache cache(small(scope));
    const SequenceId s = *cache.try_create();
    REQUIRE(append(cache, s, tags_from(0, 3)) == Status::ok);
    const Snapshot before = snapshot(cache);
    CHECK(cache.try_remove_last(s, 0) == Status::ok);
    CHECK(snapshot(cache) == before);

    CHECK(cache.try_truncate(s, Position{0}) == Status::ok);
    CHECK(holds(cache, s, {}));
    CHECK(cache.pool().in_use() == 0);

    REQUIRE(append(cache, s, tags_from(0, 3)) == Status::ok);
    CHECK(cache.try_remove_last(s, 5) == Status::ok);
    CHECK(holds(cache, s, {}));
    CHECK(cache.pool().in_use() == 0);
    CHECK(raw(cache.next_position(s)) == 0);

    REQUIRE(append(cache, s, tags_from(0, 3)) == Status::ok);
    CHECK(cache.try_remove_last(s, 2) == Status::ok);
    CHECK(holds(cache, s, tokens(0, 1)));
    CHECK(pool_adds_up(cache));
  }
}

TEST_CASE("B089 paged_cache: 6 of 8 freed pages can be given out at once while an old view exists",
          "[paged_cache][fault]") {
  PagedCache::Params p = small(TableScope::group, 4, 8);
  PagedCache cache(p);
  const SequenceId s = *cache.try_create();
  REQUIRE(append(cache, s, tags_from(0, 32)) == Status::ok);
  const CacheView old = cache.view();
  const CacheView old_alone = cache.view(s);
  CHECK(cache.pool().available() == 0);
  SequenceState state = cache.state(s);
  state.live_rows = 8;
  update_table(cache, s, 0, {}, {}, state);
  CHECK(cache.pool().available() == 6);
  const SequenceId other = *cache.try_create();
  CHECK(append(cache, other, tags_from(40, 24)) == Status::ok);
  CHECK(holds(cache, s, tokens(0, 8)));
  CHECK(holds(cache, other, tokens(40, 24)));
  CHECK(old.live_rows(s, {}, {}) == 8);  // a view looks at the tables: it owns no page and no copy
  CHECK(old_alone.live_rows({}, {}, {}) == 8);
}

TEST_CASE("B094 paged_cache: 10,000 sequences created, filled and destroyed leave nothing behind",
          "[paged_cache][fault]") {
  for (const TableScope scope : all_scopes) {
    PagedCache::Params p = small(scope);
    p.scores = true;
    PagedCache cache(p);
    const CacheView before = cache.view();
    std::int32_t wrong = 0;
    for (std::int32_t i = 0; i < 10'000; ++i) {
      const auto s = cache.try_create();
      REQUIRE(s);
      wrong += append(cache, *s, tags_from(i, i % 9)) == Status::ok ? 0 : 1;
      wrong += cache.live_rows(*s) == i % 9 && raw(cache.next_position(*s)) == i % 9 ? 0 : 1;
      cache.destroy(*s);
    }
    CHECK(wrong == 0);
    CHECK(cache.pool().available() == p.pages);
    CHECK(pool_adds_up(cache));
    CHECK(cache.try_create() == SequenceId{0});
    // State lies in arrays sized by the constructor, and these are the same ones.
    CHECK(cache.view().states == before.states);
    CHECK(cache.view().score_sums.base == before.score_sums.base);
  }
}

TEST_CASE("B097 paged_cache: 8 pages are found on both sides of live ones, without compaction",
          "[paged_cache][fault]") {
  PagedCache::Params p = small(TableScope::group, 4, 12);
  PagedCache cache(p);
  const SequenceId low = *cache.try_create();
  const SequenceId middle = *cache.try_create();
  const SequenceId high = *cache.try_create();
  for (const SequenceId s : {low, middle, high}) {
    REQUIRE(append(cache, s, tags_from(raw(s) * 20, 16)) == Status::ok);
  }
  for (std::size_t e = 0; e < 4; ++e) {
    REQUIRE(cache.page_table(middle)[e] == static_cast<std::int32_t>(e) + 4);
  }
  cache.destroy(low);
  cache.destroy(high);
  const SequenceId wide = *cache.try_create();
  CHECK(append(cache, wide, tags_from(100, 32)) == Status::ok);
  CHECK(holds(cache, wide, tokens(100, 32)));
  CHECK(holds(cache, middle, tokens(20, 16)));
  for (std::size_t e = 0; e < 4; ++e) {
    CHECK(cache.page_table(middle)[e] == static_cast<std::int32_t>(e) + 4);
  }
}

TEST_CASE("paged_cache: no operation on one sequence changes a byte, a row or a number of another",
          "[paged_cache][fault]") {
  for (const TableScope scope : all_scopes) {
    PagedCache::Params p = small(scope, 4, 200);
    p.max_sequences = 4;
    PagedCache cache(p);
    const SequenceId quiet = *cache.try_create();
    const SequenceId a = *cache.try_create();
    REQUIRE(append(cache, quiet, tags_from(200, 7)) == Status::ok);
    REQUIRE(append(cache, a, tags_from(0, 6)) == Status::ok);
    const SequenceId fork = *cache.try_fork(quiet);
    const auto of_quiet = [&] {
      Snapshot out;
      add_rows(cache, quiet, out.rows);
      for_each_table(cache, [&](std::int32_t, LayerId l, HeadId h) {
        const auto table = cache.page_table(quiet, l, h);
        out.numbers.insert(out.numbers.end(), table.begin(), table.end());
        out.numbers.push_back(cache.live_rows(quiet, l, h));
        out.generations.push_back(cache.state(quiet, l, h).generation);
      });
      return out;
    };
    const Snapshot before = of_quiet();
    REQUIRE(append(cache, a, tags_from(6, 9)) == Status::ok);
    CHECK(of_quiet() == before);
    REQUIRE(append(cache, fork, tags_from(300, 5)) == Status::ok);
    CHECK(of_quiet() == before);
    REQUIRE(cache.try_truncate(fork, Position{3}) == Status::ok);
    CHECK(of_quiet() == before);
    REQUIRE(append(cache, fork, {310}) == Status::ok);
    CHECK(of_quiet() == before);
    make_hole(cache, a, 1);
    REQUIRE(append(cache, a, {20}) == Status::ok);
    REQUIRE(cache.try_truncate(a, Position{5}) == Status::ok);
    CHECK(of_quiet() == before);
    cache.reset(fork);
    cache.destroy(a);
    CHECK(of_quiet() == before);
    CHECK(holds(cache, quiet, tokens(200, 7)));
  }
}

namespace {

// The same operations in the plainest form: a list of tokens.
struct Model {
  bool alive = false;
  std::vector<Token> tokens;
  std::int32_t next = 0;
};

std::vector<Token> sorted(std::vector<Token> tokens) {
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

// Rows of every head, as a set; in slot order where the cache says that it is position order.
bool agrees(PagedCache& cache, SequenceId s, const Model& model) {
  for (std::int32_t l = 0; l < cache.params().layers; ++l) {
    for (std::int32_t h = 0; h < cache.params().kv_heads; ++h) {
      const Seen seen = seen_of(cache, s, l, h);
      const SequenceState& state = cache.state(s, LayerId{l}, HeadId{h});
      const auto in_order = sorted(seen.tokens);
      if (seen.torn != 0 || in_order != model.tokens) { return false; }
      if (state.ordered && seen.tokens != in_order) { return false; }
      if (state.live_rows != static_cast<std::int32_t>(model.tokens.size())) { return false; }
      if (state.next_position != model.next || state.next_rope_position != model.next) {
        return false;
      }
    }
  }
  return true;
}

// Evicts one row of the first head's order from the model: what row `row` holds there. All heads agree.
void forget_row(PagedCache& cache, SequenceId s, std::int32_t row, Model& model) {
  const std::int32_t position = raw(cache.view().position(s, {}, {}, row));
  std::erase_if(model.tokens, [&](const Token& t) { return t.position == position; });
}

}  // namespace

TEST_CASE(
    "B090 paged_cache: 10,000 random operations keep free + in use = total, counts = owners, and "
    "every row",
    "[paged_cache][fault][property]") {
  for (const TableScope scope : all_scopes) {
    for (const std::int32_t page_size : {1, 4, 16}) {
      PagedCache::Params p;
      p.page_size = page_size;
      p.layers = 2;
      p.kv_heads = 2;
      p.key_dim = 2;
      p.value_dim = 1;
      p.scope = scope;
      p.max_sequences = 4;
      p.max_rows = 30;
      const std::int32_t tables = tables_of(p);
      p.pages = tables * (page_size == 16 ? 6 : 70 / page_size);  // often too few
      PagedCache cache(p);
      std::vector<Model> models(4);
      std::mt19937 rng(static_cast<std::uint32_t>(page_size) * 7U +
                       static_cast<std::uint32_t>(scope));
      const auto below = [&](std::int32_t n) {
        return static_cast<std::int32_t>(rng() % static_cast<std::uint32_t>(n));
      };
      std::int32_t tag = 0;
      std::int32_t broken = 0, appended = 0, refused = 0, forked = 0, shared = 0, holes = 0,
                   dropped = 0;
      for (std::int32_t step = 0; step < 10'000; ++step) {
        const SequenceId s{below(4)};
        Model& model = models[static_cast<std::size_t>(raw(s))];
        if (!model.alive) {
          const auto made = cache.try_create();
          if (!made) {
            ++broken;
            break;
          }
          models[static_cast<std::size_t>(raw(*made))] = {true, {}, 0};
          continue;
        }
        const auto live = static_cast<std::int32_t>(model.tokens.size());
        const bool hole = cache.state(s).append_row >= 0;
        const std::int32_t kind = below(21);
        if (kind < 9) {
          const std::int32_t n = 1 + below(7);
          const Status status = append(cache, s, tags_from(tag, n));
          if (status == Status::ok) {
            for (std::int32_t i = 0; i < n; ++i) { model.tokens.push_back({model.next++, tag++}); }
            ++appended;
          } else {
            ++refused;
            broken += live + n > p.max_rows ? status != Status::too_many_rows
                                            : status != Status::out_of_pages;
          }
        } else if (kind < 11) {
          const std::int32_t next = below(model.next + 2);
          const Status status = cache.try_truncate(s, Position{next});
          if (status == Status::ok) {
            std::erase_if(model.tokens, [&](const Token& t) { return t.position >= next; });
            model.next = std::min(model.next, next);
          } else {
            ++shared;
            broken += status != Status::shared_page;
          }
        } else if (kind < 12) {
          const std::int32_t n = below(4);
          if (cache.try_remove_last(s, n) == Status::ok) {
            model.next = std::max(0, model.next - n);
            std::erase_if(model.tokens, [&](const Token& t) { return t.position >= model.next; });
          }
        } else if (kind < 15) {
          const auto made = cache.try_fork(s);
          const bool room =
              std::any_of(models.begin(), models.end(), [](const Model& m) { return !m.alive; });
          broken += made.has_value() != room;
          if (made) {
            models[static_cast<std::size_t>(raw(*made))] = model;
            ++forked;
          }
        } else if (kind < 16) {
          cache.reset(s);
          model = {true, {}, 0};
        } else if (kind < 17) {
          cache.destroy(s);
          model = {};
        } else if (kind < 19) {
          if (live > 0 && !hole) {  // an eviction by overwriting
            const std::int32_t row = below(live);
            forget_row(cache, s, row, model);
            make_hole(cache, s, row);
            ++holes;
          }
        } else if (kind == 20) {
          const Status status = cache.try_make_private(s);
          broken += status != Status::ok && status != Status::out_of_pages;
        } else if (live >= page_size && !hole && cache.state(s).ordered) {  // an eviction of a page
          model.tokens.erase(model.tokens.begin(), model.tokens.begin() + page_size);
          drop_first_page(cache, s);
          ++dropped;
        }
        broken += !pool_adds_up(cache);
        broken += !agrees(cache, s, model);
        if (step % 20 == 0) {
          for (std::int32_t i = 0; i < 4; ++i) {
            if (models[static_cast<std::size_t>(i)].alive) {
              broken += !agrees(cache, SequenceId{i}, models[static_cast<std::size_t>(i)]);
            }
          }
        }
        if (broken != 0) {
          INFO("step " << step << ", kind " << kind << ", page size " << page_size << ", scope "
                       << static_cast<int>(scope));
          REQUIRE(broken == 0);
        }
      }
      // The walk met every kind of outcome.
      CHECK(broken == 0);
      INFO("page size " << page_size << ": " << appended << ' ' << refused << ' ' << forked << ' '
                        << shared << ' ' << holes << ' ' << dropped);
      CHECK((appended > 1000 && refused > 100 && forked > 100 && shared >= 1 && holes > 100 &&
             dropped > 30));
      for (std::int32_t i = 0; i < 4; ++i) {
        if (cache.alive(SequenceId{i})) { cache.destroy(SequenceId{i}); }
      }
      CHECK(cache.pool().available() == p.pages);
    }
  }
}

TEST_CASE("paged_cache: scrub leaves no byte of what nobody holds, and touches nothing else",
          "[paged_cache]") {
  for (const bool scrub : {false, true}) {
    for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
      PagedCache cache({.pages = 40,
                        .page_size = 4,
                        .layers = 2,
                        .kv_heads = 2,
                        .key_dim = 3,
                        .scope = scope,
                        .max_sequences = 3,
                        .max_rows = 16,
                        .scores = true,
                        .unrotated_keys = true,
                        .scrub = scrub});
      const std::vector<float> ones(7 * 2 * 3, 1.0F);
      const auto append = [&](SequenceId s, std::int32_t n) {
        REQUIRE(cache.try_extend(s, n) == Status::ok);
        for (const std::int32_t l : {0, 1}) {
          REQUIRE(cache.write(s, LayerId{l}, {ones.data()}, {ones.data()}, {ones.data()}) ==
                  Status::ok);
        }
      };
      // Bytes other than 0 in pages that are free, and in those that are not.
      const auto dirty = [&](bool held) {
        const CacheView view = cache.view();
        std::int64_t count = 0;
        for (const Plane& plane : {view.k, view.v, view.unrotated_keys}) {
          for (std::int32_t l = 0; l < (scope == TableScope::group ? 2 : 1); ++l) {
            for (std::int32_t p = 0; p < 40; ++p) {
              if ((cache.pool().ref_count(PageId{p}) > 0) != held) { continue; }
              const std::byte* const block = plane.row(LayerId{l}, PageId{p}, {}, {});
              count += std::count_if(
                  block, block + plane.page_stride, [](std::byte b) { return b != std::byte{0}; });
            }
          }
        }
        return count;
      };
      const CacheView view = cache.view();
      for (const Plane& plane : {view.k, view.v, view.unrotated_keys}) {  // as fresh pages may be
        std::memset(plane.base,
                    0,
                    static_cast<std::size_t>(plane.page_stride) * 40 *
                        (scope == TableScope::group ? 2 : 1));
      }
      const SequenceId a = cache.try_create().value();
      append(a, 7);
      append(a, 7);
      const SequenceId b = cache.try_fork(a).value();
      append(b, 1);  // a copy of the shared last page
      const std::int64_t of_b = dirty(true);
      REQUIRE(cache.try_remove_last(a, 13) == Status::ok);
      REQUIRE(cache.try_make_private(b) == Status::ok);
      cache.destroy(a);
      CHECK((dirty(false) == 0) == scrub);
      cache.destroy(b);
      CHECK(of_b > 0);
      CHECK((dirty(false) == 0) == scrub);
      CHECK(dirty(true) == 0);
      std::int64_t rows = 0;
      for (const SequenceId s : {a, b}) {
        for (std::int32_t r = 0; r < 16; ++r) {
          rows += cache.view().positions.load<std::int32_t>(s, LayerId{1}, HeadId{1}, r) != 0;
        }
      }
      if (scrub) { CHECK(rows == 0); }
    }
  }
}
