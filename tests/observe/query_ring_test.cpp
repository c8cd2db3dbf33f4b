// SPDX-License-Identifier: Apache-2.0
#include "score/score_fixture.hpp"

#include <kvtrim/observe/query_ring.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

using namespace score_test;

namespace {

// Query of (layer, token, head): features that say which.
float feature(std::int32_t l, std::int32_t token, std::int32_t head, std::int32_t d) {
  return static_cast<float>(((l * 1000 + token) * 8 + head) * 4 + d);
}

// Pushes tokens [first, first + n) into every layer. Positions are 3 * token + 1.
void push(QueryRing& ring, SequenceId s, std::int32_t first, std::int32_t n) {
  const auto& p = ring.params();
  std::vector<Position> positions;
  for (std::int32_t i = 0; i < n; ++i) { positions.push_back(Position{3 * (first + i) + 1}); }
  for (std::int32_t l = 0; l < p.layers; ++l) {
    std::vector<float> queries;
    for (std::int32_t i = 0; i < n; ++i) {
      for (std::int32_t h = 0; h < p.query_heads; ++h) {
        for (std::int32_t d = 0; d < p.head_dim; ++d) {
          queries.push_back(feature(l, first + i, h, d));
        }
      }
    }
    std::vector<float> lse;
    for (std::int32_t h = 0; h < p.query_heads; ++h) {
      for (std::int32_t i = 0; i < n; ++i) { lse.push_back(-feature(l, first + i, h, 0)); }
    }
    lse.push_back(0);  // not null, though empty
    ring.push(s, LayerId{l}, n, queries.data(), positions.data(), p.lse ? lse.data() : nullptr);
  }
}

// Whether the block holds tokens [seen - min(seen, window), seen) of sequence `s`, ascending.
bool holds(const QueryRing& ring, const QueryBlock& b, SequenceId s, std::int32_t seen) {
  const auto& p = ring.params();
  const std::int32_t count = std::min(seen, p.window);
  bool same = b.count(s) == count && b.query_heads == p.query_heads && (b.lse != nullptr) == p.lse;
  for (std::int32_t i = 0; same && i < count; ++i) {
    const std::int32_t token = seen - count + i;
    same = b.position(s, i, 12345) == Position{3 * token + 1};
    for (std::int32_t l = 0; l < p.layers; ++l) {
      for (std::int32_t h = 0; h < p.query_heads; ++h) {
        for (std::int32_t d = 0; d < p.head_dim; ++d) {
          same = same && b.row(s, LayerId{l}, h, i)[d] == feature(l, token, h, d);
        }
        same = same && (!p.lse || b.lse_of(s, LayerId{l}, h, i) == -feature(l, token, h, 0));
      }
    }
  }
  return same;
}

}  // namespace

TEST_CASE("query_ring: holds the last queries in order of position after any chunking",
          "[query_ring][property]") {
  std::mt19937 rng(1);
  for (const std::int32_t window : {1, 4, 16}) {
    for (const bool lse : {false, true}) {
      for (std::int32_t run = 0; run < 20; ++run) {
        QueryRing ring({.sequences = 3,
                        .layers = 2,
                        .query_heads = 3,
                        .head_dim = 2,
                        .window = window,
                        .lse = lse});
        std::vector<std::int32_t> seen(3, 0);
        for (std::int32_t step = 0; step < 12; ++step) {
          const auto s = static_cast<std::int32_t>(rng() % 3);
          const auto n =
              static_cast<std::int32_t>(rng() % static_cast<std::uint32_t>(2 * window + 2));
          push(ring, SequenceId{s}, seen[at(s)], n);
          seen[at(s)] += n;
          for (std::int32_t q = 0; q < 3; ++q) {
            REQUIRE(holds(ring, ring.queries(), SequenceId{q}, seen[at(q)]));
            const QueryBlock alone = ring.queries(SequenceId{q});
            REQUIRE(alone.row(SequenceId{0}, LayerId{1}, 2, 0) ==
                    ring.queries().row(SequenceId{q}, LayerId{1}, 2, 0));
            REQUIRE(alone.count(SequenceId{0}) == ring.queries().count(SequenceId{q}));
            if (lse && seen[at(q)] > 0) {
              REQUIRE(alone.lse_of(SequenceId{0}, LayerId{1}, 2, 0) ==
                      ring.queries().lse_of(SequenceId{q}, LayerId{1}, 2, 0));
            }
            if (seen[at(q)] > 0) {
              REQUIRE(alone.position(SequenceId{0}, 0, 0) ==
                      ring.queries().position(SequenceId{q}, 0, 0));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("query_ring: a reset forgets one sequence, a fork copies one", "[query_ring]") {
  QueryRing ring(
      {.sequences = 3, .layers = 2, .query_heads = 3, .head_dim = 2, .window = 4, .lse = true});
  push(ring, SequenceId{0}, 0, 7);
  push(ring, SequenceId{1}, 0, 3);
  ring.fork(SequenceId{0}, SequenceId{2});
  CHECK(holds(ring, ring.queries(), SequenceId{2}, 7));
  push(ring, SequenceId{2}, 7, 2);  // the two go their own ways
  push(ring, SequenceId{0}, 7, 3);
  CHECK(holds(ring, ring.queries(), SequenceId{2}, 9));
  CHECK(holds(ring, ring.queries(), SequenceId{0}, 10));
  ring.reset(SequenceId{0});
  CHECK(ring.queries().count(SequenceId{0}) == 0);
  push(ring, SequenceId{0}, 0, 2);
  CHECK(holds(ring, ring.queries(), SequenceId{0}, 2));
  CHECK(holds(ring, ring.queries(), SequenceId{1}, 3));
  CHECK(holds(ring, ring.queries(), SequenceId{2}, 9));
  push(ring, SequenceId{0}, 2, 5);
  CHECK(holds(ring, ring.queries(), SequenceId{0}, 7));
}

TEST_CASE("query_ring: B042 a window over several chunks scores as one chunk does",
          "[query_ring][fault]") {
  // Prompt 30, window 16, chunks 13, 4, 8, 5: the window takes 0, 3, 8 and 5 queries of them.
  constexpr std::int32_t tokens = 30;
  const Data d = make_data(2, 3, 8, tokens, 42);
  for (const bool with_lse : {false, true}) {
    TestCache cache(d);
    const Queries whole(d, 0, tokens, LseForm::natural);
    QueryRing ring({.query_heads = 6, .head_dim = 8, .window = 16, .lse = with_lse});
    std::int32_t first = 0;
    std::vector<std::int32_t> share;
    for (const std::int32_t n : {13, 4, 8, 5}) {
      std::vector<float> queries;
      std::vector<float> lse;
      std::vector<Position> positions;
      for (std::int32_t i = first; i < first + n; ++i) {
        for (std::int32_t h = 0; h < 6; ++h) {
          queries.insert(queries.end(), d.query(h, i), d.query(h, i) + 8);
        }
        positions.push_back(Position{i});
      }
      for (std::int32_t h = 0; h < 6; ++h) {
        for (std::int32_t i = first; i < first + n; ++i) {
          lse.push_back(whole.lse[at(h * tokens + i)]);
        }
      }
      ring.push(SequenceId{0},
                LayerId{0},
                n,
                queries.data(),
                positions.data(),
                with_lse ? lse.data() : nullptr);
      first += n;
      share.push_back(std::max(0, std::min(n, first - 14)));
    }
    CHECK(share == std::vector<std::int32_t>{0, 3, 8, 5});
    Observation chunks;
    chunks.queries = ring.queries();
    Observation once;
    once.queries = whole.block;
    if (!with_lse) { once.queries.lse = nullptr; }
    CHECK(chunks.queries.count(SequenceId{0}) == 16);
    const WindowParams params{.window = 16, .kernel = 5};
    for (std::int32_t h = 0; h < 2; ++h) {
      const auto got =
          scores_of(WindowScorer(params), cache.view(), SequenceId{0}, HeadId{h}, chunks);
      CHECK(bits_of(got) ==
            bits_of(scores_of(WindowScorer(params), cache.view(), SequenceId{0}, HeadId{h}, once)));
      const Head p = head_of(d, h, 14, 16);
      CHECK(error_of(got, window_scores(p, probabilities_of(p), params)) < 1e-5);
    }
  }
}

TEST_CASE("query_ring: truncation drops the last queries, and the next ones follow the rest",
          "[query_ring]") {
  for (const std::int32_t seen : {3, 7, 8, 13, 16}) {
    for (std::int32_t drop = 0; drop <= 9; ++drop) {
      QueryRing ring({.sequences = 2, .layers = 2, .query_heads = 2, .head_dim = 2, .window = 8});
      push(ring, SequenceId{1}, 0, seen);
      const std::int32_t left = std::max(0, std::min(seen, 8) - drop);
      const std::int32_t end = std::max(0, seen - drop);
      ring.truncate(SequenceId{1}, Position{3 * end + 1});  // the position of token `end`
      const auto shows = [&](std::int32_t first, std::int32_t n) {
        const QueryBlock b = ring.queries(SequenceId{1});
        bool same = b.count(SequenceId{0}) == n && ring.count(SequenceId{1}, LayerId{1}) == n &&
                    ring.complete(SequenceId{1}, LayerId{0}, 2);
        for (std::int32_t i = 0; same && i < n; ++i) {
          same = b.position(SequenceId{0}, i, 0) == Position{3 * (first + i) + 1} &&
                 b.row(SequenceId{0}, LayerId{1}, 1, i)[1] == feature(1, first + i, 1, 1);
        }
        return same;
      };
      INFO("seen " << seen << ", dropped " << drop);
      CHECK(shows(seen - drop - left, left));
      CHECK(raw(ring.last(SequenceId{1}, LayerId{1})) == (drop == 0 ? 3 * seen - 2 : 3 * end));
      push(ring, SequenceId{1}, end, 3);
      CHECK(shows(std::max(end - left, end + 3 - 8), std::min(8, left + 3)));
      CHECK(ring.count(SequenceId{0}, LayerId{0}) == 0);
    }
  }
}

TEST_CASE("query_ring: says which layers are behind, also by a whole window", "[query_ring]") {
  QueryRing ring({.layers = 2, .query_heads = 1, .head_dim = 1, .window = 4});
  const SequenceId s{0};
  CHECK(ring.complete(s, LayerId{0}, 2));
  const std::vector<float> queries(8);
  for (const std::int32_t n : {2, 4, 8}) {
    std::vector<Position> positions;
    for (std::int32_t i = 0; i < n; ++i) { positions.push_back(Position{100 * n + i}); }
    ring.push(s, LayerId{0}, n, queries.data(), positions.data());
    CHECK(ring.complete(s, LayerId{0}, 1));
    CHECK_FALSE(ring.complete(s, LayerId{1}, 1));
    CHECK_FALSE(ring.complete(s, LayerId{0}, 2));
    ring.push(s, LayerId{1}, n, queries.data(), positions.data());
    CHECK(ring.complete(s, LayerId{0}, 2));
    CHECK(ring.last(s, LayerId{1}) == positions.back());
  }
  ring.reset(s);
  CHECK(ring.last(s, LayerId{1}) == Position{-1});
}

TEST_CASE("query_ring: an extent below 1 is refused", "[query_ring][edge]") {
  const QueryRing::Params good{.head_dim = 4};
  CHECK_NOTHROW(QueryRing(good));
  for (std::int32_t i = 0; i < 5; ++i) {
    for (const std::int32_t n : {0, -1}) {
      QueryRing::Params p = good;
      (i == 0   ? p.sequences
       : i == 1 ? p.layers
       : i == 2 ? p.query_heads
       : i == 3 ? p.head_dim
                : p.window) = n;
      CHECK_THROWS_AS(QueryRing(p), std::invalid_argument);
    }
  }
  QueryRing::Params p = good;
  p.window = 0;
  CHECK_THROWS_WITH(QueryRing(p),
                    Catch::Matchers::ContainsSubstring("kvtrim::QueryRing") &&
                        Catch::Matchers::ContainsSubstring("window 0"));
}
