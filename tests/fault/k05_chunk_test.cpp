// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/window.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <numeric>

using namespace kvtrim;
using namespace kvtrim::fault;

namespace {

constexpr std::int32_t query_heads = 6;
constexpr std::int32_t kv_heads = 2;
constexpr std::int32_t dim = 8;

PagedCache::Params small(std::int32_t rows) {
  return {.pages = rows / 4 + 2,
          .page_size = 4,
          .kv_heads = kv_heads,
          .key_dim = dim,
          .value_dim = 2,
          .max_sequences = 2};
}

QueryRing ring_of(std::int32_t window) {
  QueryRing::Params p;
  p.query_heads = query_heads;
  p.head_dim = dim;
  p.window = window;
  return QueryRing(p);
}

void push(QueryRing& ring, std::int32_t first, std::int32_t n, std::int32_t salt = 77) {
  const Queries q = make_queries(first, n, query_heads, dim, salt);
  ring.push({}, {}, n, q.data.data(), q.positions.data());
}

std::vector<float> scores(
    TestCache& t, SequenceId s, const QueryRing& ring, const WindowParams& params, std::int32_t h) {
  const WindowScorer scorer(params);
  const CacheView view = t.cache.view(s);
  Observation obs;
  obs.queries = ring.queries(SequenceId{0});
  REQUIRE(scorer.check(view, obs) == Status::ok);
  std::vector<std::byte> scratch(scorer.scratch_bytes(plan_shape(view, obs)));
  std::vector<float> out(index(t.cache.live_rows(s)));
  scorer.score({view, {}, {}, HeadId{h}}, obs, scratch, out);
  return out;
}

// SnapKV's scores in plain double: softmax over what a query may see, mean over queries and group, centred mean pooling
// over the candidates.
std::vector<double> reference_scores(const std::vector<Row>& rows,
                                     std::int32_t h,
                                     std::int32_t window,
                                     std::int32_t kernel) {
  const auto n = static_cast<std::int32_t>(rows.size());
  const std::int32_t votes = std::min(n, window);
  const Queries q = make_queries(n - votes, votes, query_heads, dim);
  const std::int32_t group = query_heads / kv_heads;
  std::vector<double> sum(index(n), 0.0);
  for (std::int32_t i = 0; i < votes; ++i) {
    for (std::int32_t g = 0; g < group; ++g) {
      std::vector<double> e(index(n), 0.0);
      for (std::int32_t r = 0; r <= n - votes + i; ++r) {
        double dot = 0;
        for (std::int32_t d = 0; d < dim; ++d) {
          const float x = q.data[index((i * query_heads + h * group + g) * dim + d)];
          dot += static_cast<double>(x) * rows[index(r)].key[index(d)];
        }
        e[index(r)] = std::exp(dot / std::sqrt(static_cast<double>(dim)));
      }
      const double total = std::accumulate(e.begin(), e.end(), 0.0);
      for (std::size_t r = 0; r < e.size(); ++r) { sum[r] += e[r] / total / votes / group; }
    }
  }
  const std::int32_t candidates = std::max(0, n - window);
  std::vector<double> out(index(n), 0.0);
  for (std::int32_t r = 0; r < candidates; ++r) {
    for (std::int32_t c = r - kernel / 2; c <= r + kernel / 2; ++c) {
      if (c >= 0 && c < candidates) { out[index(r)] += sum[index(c)] / kernel; }
    }
  }
  return out;
}

// Attention of one query over rows, in double.
std::vector<double> attend(const std::vector<Row>& rows, const std::vector<double>& query) {
  std::vector<double> out(index(dim), 0.0);
  double total = 0;
  for (const Row& r : rows) {
    double dot = 0;
    for (std::size_t d = 0; d < query.size(); ++d) { dot += query[d] * r.key[d]; }
    const double e = std::exp(dot / std::sqrt(static_cast<double>(dim)));
    total += e;
    for (std::size_t d = 0; d < out.size(); ++d) {
      out[d] +=
          e * noise(r.tag, 1, static_cast<std::int32_t>(d));  // the value that the tag stands for
    }
  }
  for (double& x : out) { x /= total; }
  return out;
}

}  // namespace

TEST_CASE("B039 four chunks of 8 keep what one chunk of 32 keeps", "[chunk][fault]") {
  for (const std::int32_t chunk : {8, 32, 5}) {
    INFO("chunks of " << chunk);
    TestCache t(small(64));
    const SequenceId s = t.create();
    const StreamingSink<SinkForm::exact> policy({.sinks = 2, .recent = 6});
    for (std::int32_t n = 0; n < 32; n += chunk) {
      REQUIRE(t.append(s, std::min(chunk, 32 - n)) == Status::ok);
      REQUIRE(evict(policy, t, s).report.status == Status::ok);
      CHECK(t.cache.live_rows(s) <= 8);
    }
    CHECK(t.positions(s) == Rows{0, 1} + range(26, 32));  // sinks of the sequence, not of the chunk
  }

  // SnapKV scores once, after the last chunk, by queries 28..31 alone: others may hold anything.
  const SnapKVSelector policy({.window = 4, .budget = 8});
  std::vector<Rows> kept;
  for (const bool chunked : {false, true}) {
    TestCache t(small(64));
    const SequenceId s = t.create();
    QueryRing ring = ring_of(4);
    for (std::int32_t n = 0; n < 32; n += chunked ? 8 : 32) {
      REQUIRE(t.append(s, chunked ? 8 : 32) == Status::ok);
      push(ring, n, chunked ? 8 : 32, 77);
    }
    if (chunked) {  // the same again, but only the last four queries are those of before
      ring.reset({});
      push(ring, 0, 28, 5);
      push(ring, 28, 4, 77);
    }
    Input in;
    in.queries = ring.queries(SequenceId{0});
    REQUIRE(in.queries.count({}) == 4);
    for (std::int32_t i = 0; i < 4; ++i) { CHECK(raw(in.queries.position({}, i, 32)) == 28 + i); }
    REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
    for (const std::int32_t h : {0, 1}) {
      const Rows rows = t.positions(s, 0, h);
      CHECK(rows.size() == 8);
      CHECK(Rows(rows.end() - 4, rows.end()) == range(28, 32));
      kept.push_back(rows);
    }
  }
  CHECK(kept[0] == kept[2]);
  CHECK(kept[1] == kept[3]);
}

TEST_CASE("B042 a window of 16 over chunks of 13, 4, 8, 5 takes 0, 3, 8, 5 queries of them",
          "[chunk][fault]") {
  const Rows chunks{13, 4, 8, 5};
  QueryRing ring = ring_of(16);
  QueryRing whole = ring_of(16);
  push(whole, 0, 30);
  TestCache t(small(30));
  const SequenceId s = t.create();
  Rows first{0};
  for (const std::int32_t n : chunks) {
    REQUIRE(t.append(s, n) == Status::ok);
    push(ring, first.back(), n);
    first.push_back(first.back() + n);
  }
  const QueryBlock block = ring.queries(SequenceId{0});
  REQUIRE(block.count({}) == 16);
  Rows taken(4, 0);
  for (std::int32_t i = 0; i < 16; ++i) {
    const std::int32_t p = raw(block.position({}, i, 30));
    CHECK(p == 14 + i);
    for (std::size_t c = 0; c < 4; ++c) { taken[c] += p >= first[c] && p < first[c + 1] ? 1 : 0; }
  }
  CHECK(taken == Rows{0, 3, 8, 5});

  for (const std::int32_t h : {0, 1}) {
    const auto chunked = scores(t, s, ring, {.window = 16}, h);
    const auto once = scores(t, s, whole, {.window = 16}, h);
    CHECK(distance(chunked, once) < 1e-6);
    CHECK(distance(once, reference_scores(t.rows(s, 0, h), h, 16, 5)) < 1e-6);
  }
  const SnapKVSelector policy({.window = 16, .budget = 22});
  const CacheView view = t.cache.view(s);
  Input by_chunks, by_whole;
  by_chunks.queries = block;
  by_whole.queries = whole.queries(SequenceId{0});
  Prepared a(view, by_chunks), b(view, by_whole);
  const PlanRef of_chunks = a.plan(policy, view);
  CHECK(of_chunks.evicted_rows() == 2 * 8);
  CHECK(of_chunks == b.plan(policy, view));
}

TEST_CASE("B043 a suffix kept at absolute positions attends as the same tokens alone",
          "[chunk][fault]") {
  const auto check = [](const Rows& chunks) {
    const std::int32_t tokens = std::accumulate(chunks.begin(), chunks.end(), 0);
    const std::int32_t start = tokens - 128;
    INFO(chunks.size() << " chunks, suffix at " << start);
    const StreamingSink<SinkForm::exact> policy({.sinks = 0, .recent = 128});
    TestCache t(small(700));
    t.rotation = plain_rotation(dim);
    const SequenceId s = t.create();
    for (const std::int32_t n : chunks) {
      REQUIRE(t.append(s, n) == Status::ok);
      REQUIRE(evict(policy, t, s).report.status == Status::ok);
    }
    REQUIRE(t.positions(s, 0, 1) == range(start, start + 128));
    TestCache alone(small(128));
    alone.rotation = plain_rotation(dim);
    const SequenceId same = alone.create();
    REQUIRE(alone.append(same, 128, start) == Status::ok);  // the same tokens at 0..127
    for (const std::int32_t h : {0, 1}) {
      std::vector<double> query;
      for (std::int32_t d = 0; d < dim; ++d) { query.push_back(2.0 * noise(h, d, 43)); }
      const auto far = attend(t.ordered_rows(s, 0, h), t.rotation->turn(query, tokens - 1));
      const auto near = attend(alone.ordered_rows(same, 0, h), t.rotation->turn(query, 127));
      CHECK(distance(far, near) < 1e-5);
    }
  };
  check({128, 128, 172});                   // P = 300
  check({32, 32, 32, 32, 32, 32, 32, 32});  // P = 128
  check(Rows(256, 1));                      // P = 128, one token per chunk
  check({128, 128, 44});                    // a chunk that does not fill the ring
}

TEST_CASE("B044 every length of 1 to 70 is scored, packed and rotated as the scalar reference",
          "[chunk][fault]") {
  const std::int32_t window = 4;
  double worst_score = 0;
  for (std::int32_t n = 1; n <= 70; ++n) {
    INFO("length " << n);
    TestCache t(small(72));
    t.rotation = plain_rotation(dim);
    const SequenceId s = t.create();
    QueryRing ring = ring_of(window);
    for (std::int32_t first = 0; first < n; first += 9) {  // the same chunks for all
      const std::int32_t chunk = std::min(9, n - first);
      REQUIRE(t.append(s, chunk) == Status::ok);
      push(ring, first, chunk);
    }
    const std::int32_t budget = window + (n + 1) / 3;
    std::vector<Rows> expected;
    for (const std::int32_t h : {0, 1}) {
      const auto reference = reference_scores(t.rows(s, 0, h), h, window, 5);
      const auto computed =
          scores(t, s, ring, {.window = window, .kernel = 5, .rows = Reduction::mean}, h);
      for (std::size_t r = 0; r < reference.size(); ++r) {
        const double error = std::abs(computed[r] - reference[r]);
        worst_score = std::max(worst_score, error / std::max(1e-6, reference[r]));
      }
      Rows order = range(0, std::max(0, n - window));
      std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
        return reference[index(a)] != reference[index(b)]
                   ? reference[index(a)] > reference[index(b)]
                   : a < b;
      });
      order.resize(std::min(order.size(), index(budget - window)));
      order = order + range(std::max(0, n - window), n);
      std::sort(order.begin(), order.end());
      expected.push_back(order);
    }
    const Rerotator rerotator(t.cache.view(s), t.rotation->rope(), PositionMode::in_cache);
    Input in;
    in.queries = ring.queries(SequenceId{0});
    in.options.rerotator = &rerotator;
    const SnapKVSelector policy({.window = window, .budget = budget});
    REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
    for (const std::int32_t h : {0, 1}) {
      CHECK(t.slots(s, 0, h) == expected[index(h)]);
      CHECK(t.positions(s, 0, h) == expected[index(h)]);
      CHECK(t.ropes(s, 0, h) == range(0, static_cast<std::int32_t>(expected[index(h)].size())));
      CHECK(t.raw_key_error(s, 0, h) < 1e-5);
    }
  }
  CHECK(worst_score < 1e-5);
}
