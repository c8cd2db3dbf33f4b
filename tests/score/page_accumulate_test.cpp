// SPDX-License-Identifier: Apache-2.0
#include "score_fixture.hpp"

#include <kvtrim/evict/planner.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/page_accumulate.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/instances.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

using namespace score_test;

namespace {

constexpr std::int32_t layers = 3, heads = 2, group = 3, dim = 8, window = 5;
constexpr std::array lengths{41, 0, 70, 9, 24};
constexpr auto sequences = static_cast<std::int32_t>(lengths.size());

// A batch of sequences with its own keys, queries and accumulated scores in every layer.
struct Batch {
  Batch(TableScope scope, std::int32_t page_size, std::uint32_t seed)
      : cache({.pages = sequences * 6 * (pages_for(72, page_size) + 1),
               .page_size = page_size,
               .layers = layers,
               .kv_heads = heads,
               .key_dim = dim,
               .value_dim = 1,
               .scope = scope,
               .max_sequences = sequences,
               .max_rows = 72,
               .scores = true}) {
    std::mt19937 rng(seed);
    const auto draw = [&] {
      return static_cast<float>(static_cast<std::int32_t>(rng() % 2001) - 1000) / 700;
    };
    for (std::int32_t s = 0; s < sequences; ++s) {
      const std::int32_t n = lengths[at(s)];
      REQUIRE(cache.try_create().has_value());
      REQUIRE(cache.try_extend(SequenceId{s}, n) == Status::ok);
      for (std::int32_t l = 0; l < layers; ++l) {
        std::vector<float> keys(at(n * heads * dim + 1));
        std::generate(keys.begin(), keys.end(), draw);
        REQUIRE(cache.write(SequenceId{s}, LayerId{l}, {keys.data()}, {keys.data()}) ==
                (n == 0 ? Status::no_open_step : Status::ok));
      }
    }
    queries.resize(at(sequences * layers * heads * group * window * dim));
    std::generate(queries.begin(), queries.end(), draw);
    rows.resize(at(sequences * layers * heads * 72));
    std::generate(rows.begin(), rows.end(), [&] { return std::abs(draw()); });
    const CacheView view = cache.view();
    for (std::int32_t s = 0; s < sequences; ++s) {
      for (std::int32_t l = 0; l < layers; ++l) {
        for (std::int32_t h = 0; h < heads; ++h) {
          for (std::int32_t r = 0; r < lengths[at(s)]; ++r) {
            view.score_sums.at<float>(SequenceId{s}, LayerId{l}, HeadId{h}, r) = std::abs(draw());
          }
        }
      }
    }
  }

  // What a plan over all layers is given.
  Observation all(bool external) {
    Observation obs;
    obs.queries.data = queries.data();
    obs.queries.query_heads = heads * group;
    obs.queries.rows = window;
    obs.queries.row_stride = dim;
    obs.queries.head_stride = window * dim;
    obs.queries.layer_stride = heads * group * obs.queries.head_stride;
    obs.queries.sequence_stride = layers * obs.queries.layer_stride;
    if (external) { obs.scores = SequencePlane::dense(rows.data(), layers, heads, 72); }
    return obs;
  }
  // Layer `l` alone, in memory that the next layer will use again.
  Observation one(std::int32_t l, bool external) {
    Observation obs = all(external);
    const std::int64_t size = obs.queries.layer_stride;
    layer.resize(at(sequences * size));
    for (std::int32_t s = 0; s < sequences; ++s) {
      std::copy_n(queries.data() + s * obs.queries.sequence_stride + l * size,
                  size,
                  layer.data() + s * size);
    }
    obs.queries.data = layer.data();
    obs.queries.layer_stride = 0;
    obs.queries.sequence_stride = size;
    return obs;
  }

  PagedCache cache;
  std::vector<float> queries;  // [sequences, layers, heads * group, window, dim]
  std::vector<float> rows;     // [sequences, layers, heads, 72]
  std::vector<float> layer;
};

struct PageSums {
  explicit PageSums(const CacheView& view)
      : pages(pages_for(72, view.page_size)),
        data(at(sequences * layers * heads * pages), nan_f),
        array{data.data(), layers * heads * pages, pages} {}
  std::int64_t pages;
  std::vector<float> data;
  PageScoreArray array;
};

template <class T>
Status accumulate(const PageSelector<T>& policy, Batch& b, PageSums& sums, bool external) {
  const CacheView view = b.cache.view();
  for (std::int32_t l = 0; l < layers; ++l) {
    const Observation obs = b.one(l, external);
    Scratch scratch(page_accumulate_bytes(policy, plan_shape(view, obs)));
    const Status status =
        accumulate_page_scores(policy, view, LayerId{l}, obs, sums.array, scratch);
    if (status != Status::ok) { return status; }
  }
  return Status::ok;
}

struct Kept {
  Status status = Status::ok;
  std::vector<std::vector<std::int32_t>> rows;  // [sequences, layers, heads]
  bool operator==(const Kept&) const = default;
};

template <class P>
Kept kept_by(const P& policy, const CacheView& view, const Observation& obs) {
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
  const PlanRef made = plan(policy, view, obs, workspace);
  Kept k;
  k.status = made.status();
  if (!usable(k.status)) { return k; }
  for (std::int32_t s = 0; s < sequences; ++s) {
    for (std::int32_t l = 0; l < layers; ++l) {
      for (std::int32_t h = 0; h < heads; ++h) {
        auto& list = k.rows.emplace_back();
        made.for_each_kept(
            SequenceId{s}, LayerId{l}, HeadId{h}, [&](std::int32_t r) { list.push_back(r); });
      }
    }
  }
  return k;
}

// Tables of one set of pages: layer by layer, head by head.
std::int32_t set_of(PageUnit unit, TableScope scope, std::int32_t l, std::int32_t h) {
  if (unit == PageUnit::per_group || scope == TableScope::group) { return 0; }
  if (unit == PageUnit::per_layer || scope == TableScope::layer) { return l; }
  return l * heads + h;
}

// The sums written out: each head's rows, its pages, added in the order of layers and heads.
template <class T>
void check_sums(const PageSelector<T>& policy, Batch& b, const PageSums& sums, bool external) {
  const CacheView view = b.cache.view();
  const Observation obs = b.all(external);
  const typename ScorerOf<T>::type scorer(policy.scorer());
  std::vector<float> expected(sums.data.size(), nan_f);
  std::vector<bool> begun(sums.data.size());
  for (std::int32_t s = 0; s < sequences; ++s) {
    for (std::int32_t l = 0; l < layers; ++l) {
      for (std::int32_t h = 0; h < heads; ++h) {
        std::vector<float> rows(at(lengths[at(s)]));
        Scratch scratch(scorer.scratch_bytes(plan_shape(view, obs)));
        if (external) {
          ExternalScorer{}.score({view, SequenceId{s}, LayerId{l}, HeadId{h}}, obs, scratch, rows);
        } else {
          scorer.score({view, SequenceId{s}, LayerId{l}, HeadId{h}}, obs, scratch, rows);
        }
        std::vector<float> pages(at(pages_for(lengths[at(s)], view.page_size)));
        std::vector<float> page(at(view.page_size));
        page_scores(policy.page_scores(), rows, 0, view.page_size, page, pages);
        const std::size_t first =
            at((s * layers * heads + set_of(policy.unit(), view.scope, l, h)) * sums.pages);
        for (std::size_t p = 0; p < pages.size(); ++p) {
          float& x = expected[first + p];
          x = !begun[first + p]                              ? pages[p]
              : policy.page_scores().heads == Reduction::max ? std::max(x, pages[p])
                                                             : x + pages[p];
          begun[first + p] = true;
        }
      }
    }
  }
  CHECK(bits_of(sums.data) == bits_of(expected));  // and not a float more was written
}

template <class T>
void run(T scores, bool external = false) {
  std::uint32_t seed = 1;
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    for (const PageUnit unit : {PageUnit::per_table, PageUnit::per_layer, PageUnit::per_group}) {
      for (const std::int32_t page_size : {1, 4, 16}) {
        for (const Reduction over_heads : {Reduction::sum, Reduction::max}) {
          INFO("scope " << static_cast<int>(scope) << ", unit " << static_cast<int>(unit)
                        << ", page size " << page_size);
          typename PageSelector<T>::Params p;
          p.scores = scores;
          p.unit = unit;
          p.budget = 29;
          p.window = window;
          p.pages.heads = over_heads;
          p.pages.reduction = seed % 2 == 0 ? PageReduction::top_m : PageReduction::max;
          const PageSelector<T> policy(p);
          Batch b(scope, page_size, seed++);
          const CacheView view = b.cache.view();
          PageSums sums(view);
          REQUIRE(accumulate(policy, b, sums, external) == Status::ok);
          check_sums(policy, b, sums, external);
          const Kept own = kept_by(policy, view, b.all(external));
          Observation given;
          given.page_scores = sums.array;
          CHECK(kept_by(policy, view, given) == own);
          if (scope == TableScope::group && unit == PageUnit::per_layer) {
            CHECK(own.status == Status::unequal_budget);  // finer than the table
          } else {
            CHECK(usable(own.status));
            CHECK(own.rows[0].size() < 41);
          }
          // A second time over what is there: the first layer overwrites.
          REQUIRE(accumulate(policy, b, sums, external) == Status::ok);
          check_sums(policy, b, sums, external);
        }
      }
    }
  }
}

constexpr WindowParams small_window{.window = window,
                                    .kernel = 3,
                                    .rows = Reduction::max,
                                    .group = Reduction::mean,
                                    .pooling = Pooling::average,
                                    .columns = PoolColumns::all_columns};

}  // namespace

TEST_CASE("page_accumulate: layer by layer, window scores sum to what a plan of all layers sums",
          "[page_accumulate][window]") {
  run(small_window);
}

TEST_CASE("page_accumulate: likewise KeyDiff's", "[page_accumulate][key_diff]") {
  run(KeyDiffParams{});
}

TEST_CASE("page_accumulate: likewise accumulated attention", "[page_accumulate][accumulate]") {
  run(AccumulateParams{});
}

TEST_CASE("page_accumulate: likewise the caller's scores, which replace any policy's",
          "[page_accumulate][external]") {
  run(ExternalParams{}, true);
  run(small_window, true);
}

TEST_CASE("page_accumulate: too small a workspace is a status, and nothing is added",
          "[page_accumulate][edge]") {
  typename PageSelector<>::Params p;
  p.scores = small_window;
  p.budget = 29;
  p.window = window;
  const PageSelector<> policy(p);
  Batch b(TableScope::layer, 4, 3);
  const CacheView view = b.cache.view();
  const Observation obs = b.one(1, false);
  const std::size_t bytes = page_accumulate_bytes(policy, plan_shape(view, obs));
  std::vector<std::byte> memory(bytes + 64);
  PageSums sums(view);
  const auto before = bits_of(sums.data);
  // The first sequence has 41 rows, the third 70: what is enough for the one is not for the other.
  for (std::size_t n = 0; n < bytes; n += n + 64 < bytes ? 64 : 1) {
    const Status status = accumulate_page_scores(
        policy, view, LayerId{1}, obs, sums.array, std::span(memory).first(n));
    if (status != Status::workspace_too_small || bits_of(sums.data) != before) {
      FAIL_CHECK("with " << n << " of " << bytes << " bytes: " << to_string(status));
      break;
    }
  }
  for (std::size_t shift = 0; shift < 64; shift += 7) {  // any alignment will do
    CHECK(accumulate_page_scores(
              policy, view, LayerId{1}, obs, sums.array, std::span(memory).subspan(shift, bytes)) ==
          Status::ok);
  }
}

TEST_CASE("page_accumulate: exact sums over heads do not fit an array of floats, maxima do",
          "[page_accumulate][edge]") {
  typename PageSelector<>::Params p;
  p.scores = small_window;
  p.scores.sums = Sums::exact;
  Batch b(TableScope::layer, 4, 4);
  PageSums sums(b.cache.view());
  const auto before = bits_of(sums.data);
  p.pages.heads = Reduction::sum;
  CHECK(accumulate(PageSelector<>(p), b, sums, false) == Status::bad_observation);
  CHECK(bits_of(sums.data) == before);
  p.pages.heads = Reduction::max;
  CHECK(accumulate(PageSelector<>(p), b, sums, false) == Status::ok);
}

TEST_CASE("page_accumulate: what the scorer needs and has not is a bad observation",
          "[page_accumulate][edge]") {
  typename PageSelector<>::Params p;
  p.scores = small_window;
  const PageSelector<> policy(p);
  Batch b(TableScope::layer, 4, 4);
  const CacheView view = b.cache.view();
  PageSums sums(view);
  const auto before = bits_of(sums.data);
  std::vector<std::byte> memory(1 << 20);
  CHECK(accumulate_page_scores(policy, view, LayerId{0}, {}, sums.array, memory) ==
        Status::bad_observation);
  Observation obs = b.one(0, false);
  obs.queries.query_heads = 5;
  CHECK(accumulate_page_scores(policy, view, LayerId{0}, obs, sums.array, memory) ==
        Status::bad_observation);
  CHECK(accumulate_page_scores(
            PageSelector<ExternalParams>{}, view, LayerId{0}, {}, sums.array, memory) ==
        Status::bad_observation);
  CHECK(bits_of(sums.data) == before);
}

TEST_CASE("page_accumulate: a table with a hole is scored within its rows",
          "[page_accumulate][edge]") {
  typename PageSelector<>::Params p;
  p.scores = small_window;
  const PageSelector<> policy(p);
  Batch b(TableScope::group, 4, 5);
  const CacheView view = b.cache.view();
  view.states[0].live_rows = 40;
  view.states[0].append_row = 7;
  PageSums sums(view);
  REQUIRE(accumulate(policy, b, sums, false) == Status::ok);
  for (std::int64_t page = 0; page < sums.pages; ++page) {
    INFO("page " << page);
    CHECK(std::isnan(sums.data[at(page)]) == (page > 40 / 4));
  }
}

TEST_CASE("page_accumulate: a sequence's NaN stay in it", "[page_accumulate][nan]") {
  typename PageSelector<>::Params p;
  p.scores = small_window;
  p.budget = 29;
  p.window = window;
  p.unit = PageUnit::per_group;
  const PageSelector<> policy(p);
  Batch clean(TableScope::layer, 4, 6);
  Batch spoilt(TableScope::layer, 4, 6);
  const std::size_t layer_size = at(heads * group * window * dim);
  // Sequence 0 has no vote in layer 1.
  std::fill_n(spoilt.queries.begin() + static_cast<std::ptrdiff_t>(layer_size), layer_size, nan_f);
  PageSums a(clean.cache.view());
  PageSums c(spoilt.cache.view());
  REQUIRE(accumulate(policy, clean, a, false) == Status::ok);
  REQUIRE(accumulate(policy, spoilt, c, false) == Status::ok);
  const auto first = static_cast<std::ptrdiff_t>(a.array.sequence_stride);
  const auto tail = [&](const PageSums& x) {
    return bits_of({x.data.begin() + first, x.data.end()});
  };
  CHECK(tail(a) == tail(c));
  for (std::int32_t page = 0; page < pages_for(41, 4); ++page) {
    CHECK(std::isfinite(c.data[at(page)]));  // the other layers decide
  }
  CHECK(usable(kept_by(policy, spoilt.cache.view(), spoilt.all(false)).status));
}
