// SPDX-License-Identifier: Apache-2.0
#include "score/score_fixture.hpp"

#include <kvtrim/observe/column_sums.hpp>
#include <kvtrim/score/accumulated.hpp>

#include "catch.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

using namespace score_test;

namespace {

constexpr double tolerance = 1e-5;

// The n x n double reference: for each row, sum over the queries, decayed once per query, of the group's mean.
std::vector<double> sums_of(const Head& p, const AccumulateParams& params) {
  const Probabilities3 probabilities = probabilities_of(p);
  std::vector<double> sums(p.keys.size(), 0.0);
  for (std::size_t i = 0; i < p.query_positions.size(); ++i) {
    for (std::size_t r = 0; r < sums.size(); ++r) {
      double mean = 0;
      for (const auto& head : probabilities) {
        const double x = head[i].empty() ? 0.0 : head[i][r];
        mean += (params.squared ? x * x : x) / static_cast<double>(probabilities.size());
      }
      sums[r] = sums[r] * static_cast<double>(params.decay) + mean;
    }
  }
  for (std::size_t r = 0; r < sums.size(); ++r) {
    if (!all_finite(p.keys[r])) { sums[r] = std::nan(""); }
  }
  return sums;
}

void accumulate(const AccumulateParams& params,
                TestCache& cache,
                std::int32_t h,
                const QueryBlock& queries) {
  const CacheView view = cache.view();
  Scratch scratch(column_sums_scratch_bytes(view.k.head_dim));
  accumulate_column_sums(
      params, {view, cache.sequence(), LayerId{0}, HeadId{h}}, queries, LayerId{0}, scratch);
}

std::vector<float> totals_of(TestCache& cache, std::int32_t h) {
  return scores_of(AccumulatedScorer({}), cache.view(), cache.sequence(), HeadId{h}, {});
}

}  // namespace

TEST_CASE("column_sums: equal the n x n reference in double for every parameter",
          "[column_sums][property]") {
  std::int32_t n = 0;
  for (const std::int32_t group : {1, 3, 8}) {
    for (const std::int32_t tokens : {0, 1, 2, 45}) {
      const Data d = make_data(2, group, 8, tokens, static_cast<std::uint32_t>(100 + tokens));
      for (const AccumulateParams params :
           {AccumulateParams{},
            AccumulateParams{.squared = true},
            AccumulateParams{.decay = 0.9F},
            AccumulateParams{.sums = Sums::exact},
            AccumulateParams{.decay = 0.5F, .squared = true, .sums = Sums::exact},
            AccumulateParams{.decay = 0.5F, .squared = true}}) {
        for (const LseForm form : {LseForm::natural, LseForm::binary}) {
          for (const float cap : {0.0F, 5.0F}) {
            for (const bool ordered : {true, false}) {
              CacheOptions o{.scores = true};
              o.page_size = std::vector<std::int32_t>{1, 4, 16}[at(n) % 3];
              o.dtype = std::vector<DType>{DType::f32, DType::f16, DType::bf16}[at(n) / 3 % 3];
              const float scale = n / 9 % 2 == 0 ? 0.0F : 0.5F;
              ++n;
              if (!ordered) { o.order = shuffled(tokens, 7); }
              const auto change = [&](Head& p) {
                if (scale != 0) { p.scale = static_cast<double>(scale); }
                p.soft_cap = static_cast<double>(cap);
              };
              TestCache cache(d, o);
              Queries queries(d, 0, tokens, LseForm::computed);
              queries.set_lse(d, 0, tokens, form, change);
              queries.lse.reserve(1);  // not null, though empty
              queries.block.lse = queries.lse.data();
              queries.block.scale = scale;
              queries.block.soft_cap = cap;
              const std::int32_t h = n % 2;
              accumulate(params, cache, h, queries.block);
              Head p = head_of(d, h, 0, tokens, o.order);
              change(p);
              INFO("group " << group << ", tokens " << tokens << ", decay " << params.decay
                            << ", squared " << params.squared << ", form " << static_cast<int>(form)
                            << ", cap " << cap << ", ordered " << ordered << ", dtype "
                            << std::string(to_string(o.dtype)));
              CHECK(error_of(totals_of(cache, h), sums_of(p, params), params.sums) < tolerance);
              for (const float x : totals_of(cache, 1 - h)) { REQUIRE(x == 0); }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("column_sums: prompts of many tiles and blocks of queries equal the reference",
          "[column_sums]") {
  for (const std::int32_t tokens : {127, 128, 129, 239, 241, 500}) {
    const Data d = make_data(1, 2, 16, tokens, static_cast<std::uint32_t>(tokens));
    TestCache cache(d, {.scores = true});
    const Queries queries(d, 0, tokens, LseForm::natural);
    accumulate({}, cache, 0, queries.block);
    const auto got = totals_of(cache, 0);
    INFO("tokens " << tokens);
    CHECK(error_of(got, sums_of(head_of(d, 0, 0, tokens), {})) < tolerance);
    double total = 0;
    for (const float x : got) { total += static_cast<double>(x); }
    CHECK(total == Catch::Approx(tokens).epsilon(1e-5));  // each query hands out 1
  }
}

TEST_CASE(
    "column_sums: exact sums have the same bits for any order of heads and any blocks of queries",
    "[column_sums][property]") {
  for (const std::int32_t tokens : {45, 300}) {
    for (const bool fault : {false, true}) {
      const std::int32_t group = 3;
      Data d = make_data(1, group, 16, tokens, static_cast<std::uint32_t>(tokens));
      if (fault) {
        d.key(7, 0)[0] = nan_f;
        d.query(1, 20)[0] = inf_f;
      }
      const Queries queries(d, 0, tokens, LseForm::natural);
      // Queries without a vote before the others move those into other blocks.
      const auto sums = [&](const AccumulateParams& params,
                            std::int32_t before,
                            const std::vector<std::int32_t>& heads) {
        TestCache cache(d, {.scores = true});
        std::vector<float> rows, lse;
        for (const std::int32_t g : heads) {
          rows.insert(rows.end(), at(before * d.dim), nan_f);
          rows.insert(rows.end(), d.query(g, 0), d.query(g, 0) + tokens * d.dim);
          lse.insert(lse.end(), at(before), nan_f);
          lse.insert(
              lse.end(), queries.lse.begin() + g * tokens, queries.lse.begin() + (g + 1) * tokens);
        }
        std::vector<Position> positions(at(before), Position{0});
        for (std::int32_t i = 0; i < tokens; ++i) { positions.push_back(Position{i}); }
        QueryBlock block = queries.block;
        block.data = rows.data();
        block.rows = before + tokens;
        block.head_stride = static_cast<std::int64_t>(block.rows) * d.dim;
        block.lse = lse.data();
        block.lse_head_stride = block.rows;
        block.positions = positions.data();
        accumulate(params, cache, 0, block);
        return totals_of(cache, 0);
      };
      for (const bool squared : {false, true}) {
        const AccumulateParams params{.squared = squared, .sums = Sums::exact};
        const auto one = sums(params, 0, {0, 1, 2});
        INFO("tokens " << tokens << ", fault " << fault << ", squared " << squared);
        for (const std::int32_t before : {0, 5, 33}) {
          CHECK(bits_of(sums(params, before, {2, 0, 1})) == bits_of(one));
          CHECK(bits_of(sums(params, before, {1, 2, 0})) == bits_of(one));
        }
        if (!fault) {
          CHECK(error_of(one, sums_of(head_of(d, 0, 0, tokens), params), Sums::exact) < tolerance);
        }
      }
      // The floating form has other bits, or this would show nothing.
      if (tokens == 300) {
        CHECK(bits_of(sums({}, 5, {2, 0, 1})) != bits_of(sums({}, 0, {0, 1, 2})));
      }
    }
  }
}

TEST_CASE("column_sums: chunks add up to the one-shot sums within 1e-6",
          "[column_sums][property]") {
  constexpr std::int32_t tokens = 300;
  const Data d = make_data(1, 3, 16, tokens, 200);
  for (const AccumulateParams params :
       {AccumulateParams{}, AccumulateParams{.decay = 0.97F, .squared = true}}) {
    TestCache whole(d, {.scores = true});
    const Queries all(d, 0, tokens, LseForm::natural);
    accumulate(params, whole, 0, all.block);
    std::vector<double> expected;
    for (const float x : totals_of(whole, 0)) { expected.push_back(static_cast<double>(x)); }
    for (const std::vector<std::int32_t>& cut : {std::vector<std::int32_t>{1, 299},
                                                 {13, 4, 8, 5, 270},
                                                 {128, 128, 44},
                                                 std::vector<std::int32_t>(300, 1)}) {
      PagedCache cache(
          {.pages = 80, .page_size = 4, .key_dim = 16, .value_dim = 1, .scores = true});
      REQUIRE(cache.try_create().has_value());
      Scratch scratch(column_sums_scratch_bytes(16));
      std::int32_t first = 0;
      for (const std::int32_t n : cut) {
        REQUIRE(cache.try_extend(SequenceId{0}, n) == Status::ok);
        const std::vector<float> values(at(n), 0.0F);
        REQUIRE(cache.write(SequenceId{0}, LayerId{0}, {d.key(first, 0)}, {values.data()}) ==
                kvtrim::Status::ok);
        QueryBlock chunk = all.block;
        chunk.data += first * 16;
        chunk.rows = n;
        chunk.lse += first;
        accumulate_column_sums(params,
                               {cache.view(), SequenceId{0}, LayerId{0}, HeadId{0}},
                               chunk,
                               LayerId{0},
                               scratch);
        first += n;
      }
      const auto got = scores_of(AccumulatedScorer({}), cache.view(), SequenceId{0}, HeadId{0}, {});
      INFO(cut.size() << " chunks, decay " << params.decay);
      CHECK(error_of(got, expected) < 1e-6);
    }
  }
}

TEST_CASE("column_sums: a long prompt's sums stay within 1e-6 of double",
          "[column_sums][property]") {
  // Equal keys: query i gives exp(-LSE) to each row, so that the rest is summation. Softmax gives 1 / (i + 1); constant
  // addends are what a plain fp32 sum drifts with.
  constexpr std::int32_t tokens = 2048;
  const Data d{
      1, 1, 1, tokens, std::vector<float>(at(tokens), 0.0F), std::vector<float>(at(tokens), 0.0F)};
  for (const double constant : {0.0, 0.3, 0.1, 0.7, 0.011}) {
    TestCache cache(d, {.page_size = 64, .scores = true});
    Queries queries(d, 0, 0, LseForm::natural);
    std::vector<float> lse(at(tokens));
    std::vector<double> expected(at(tokens), 0.0);
    double sum = 0;
    for (std::int32_t i = tokens; i-- > 0;) {
      lse[at(i)] = static_cast<float>(-std::log(constant > 0 ? constant : 1.0 / (i + 1)));
      sum += std::exp(-static_cast<double>(lse[at(i)]));
      expected[at(i)] = sum;
    }
    queries.block.rows = tokens;
    queries.block.head_stride = tokens;
    queries.block.lse = lse.data();
    queries.block.lse_head_stride = tokens;
    accumulate({}, cache, 0, queries.block);
    INFO("constant " << constant);
    CHECK(error_of(totals_of(cache, 0), expected) < 1e-6);
  }
}

TEST_CASE("column_sums: a key that is not finite becomes NaN, and no other bit changes",
          "[column_sums][nan]") {
  const Data clean = make_data(1, 3, 8, 260, 201);
  const Queries queries(clean, 0, 260, LseForm::natural);
  TestCache good(clean, {.scores = true});
  accumulate({}, good, 0, queries.block);
  const auto expected = bits_of(totals_of(good, 0));
  for (const float poison : {nan_f, inf_f, -inf_f}) {
    for (const std::int32_t row : {0, 100, 239, 240, 259}) {
      Data d = clean;
      d.key(row, 0)[7] = poison;
      TestCache cache(d, {.scores = true});
      accumulate({}, cache, 0, queries.block);
      const auto got = totals_of(cache, 0);
      INFO("row " << row << ", poison " << poison);
      CHECK(is_nan(got[at(row)]));
      auto bits = bits_of(got);
      bits[at(row)] = expected[at(row)];
      CHECK(bits == expected);
    }
  }
}

TEST_CASE("column_sums: a query or an LSE that is not finite is left out", "[column_sums][nan]") {
  const Data clean = make_data(1, 3, 8, 50, 202);
  for (const float poison : {nan_f, inf_f, -inf_f}) {
    for (const bool in_lse : {false, true}) {
      Data d = clean;
      Queries queries(d, 0, 50, LseForm::natural);
      for (const auto& [head, i] : {std::pair{0, 0}, {1, 31}, {2, 31}, {2, 49}}) {
        if (in_lse) {
          queries.lse[at(head * 50 + i)] = poison;
        } else {
          d.query(head, i)[3] = poison;
        }
      }
      TestCache cache(d, {.scores = true});
      accumulate({}, cache, 0, queries.block);
      if (in_lse) {  // the reference knows them by their queries
        for (const auto& [head, i] : {std::pair{0, 0}, {1, 31}, {2, 31}, {2, 49}}) {
          d.query(head, i)[3] = poison;
        }
      }
      INFO("poison " << poison << ", in the LSE " << in_lse);
      CHECK(error_of(totals_of(cache, 0), sums_of(head_of(d, 0, 0, 50), {})) < tolerance);
    }
  }
}

TEST_CASE("column_sums: queries with positions of their own see the rows up to them",
          "[column_sums]") {
  // Rows were evicted in between: positions have gaps, slots are out of order.
  const Data d = make_data(1, 2, 8, 30, 203);
  for (const bool ordered : {true, false}) {
    CacheOptions o{.scores = true};
    o.order = ordered ? shuffled(0, 0) : shuffled(30, 9);
    TestCache cache(d, o);
    std::vector<std::int32_t> tokens = o.order;
    if (ordered) { tokens.resize(30), std::iota(tokens.begin(), tokens.end(), 0); }
    Head p = head_of(d, 0, 20, 10, tokens);
    for (std::int32_t r = 0; r < 30; ++r) {
      const std::int32_t position = 3 * tokens[at(r)] + 2;
      cache.view().positions.at<Position>(SequenceId{0}, LayerId{0}, HeadId{0}, r) =
          Position{position};
      p.positions[at(r)] = position;
    }
    std::vector<Position> positions;
    for (std::int32_t i = 0; i < 10; ++i) {
      positions.push_back(Position{9 * i + 3});
      p.query_positions[at(i)] = 9 * i + 3;
    }
    Queries queries(d, 20, 10, LseForm::computed);
    queries.set_lse(d, 20, 10, LseForm::natural, [&](Head& q) { q = p; });
    queries.block.positions = positions.data();
    accumulate({}, cache, 0, queries.block);
    CHECK(error_of(totals_of(cache, 0), sums_of(p, {})) < tolerance);
  }
}

TEST_CASE("column_sums: layers and per-head tables are told apart, in the cache and in the queries",
          "[column_sums]") {
  const Data one = make_data(2, 3, 8, 19, 205);
  const Data two = make_data(2, 3, 8, 19, 206);
  const Queries queries_one(one, 0, 19, LseForm::natural);
  const Queries queries_two(two, 0, 19, LseForm::natural);
  const auto joined = [](std::vector<float> a, const std::vector<float>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  // [layers, heads, rows], the cache's layer 1 once as layer 1 and once as layer 0.
  const std::vector<float> queries[] = {joined(one.queries, two.queries),
                                        joined(two.queries, one.queries)};
  const std::vector<float> lse[] = {joined(queries_one.lse, queries_two.lse),
                                    joined(queries_two.lse, queries_one.lse)};
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    PagedCache cache({.pages = 64,
                      .page_size = 4,
                      .layers = 2,
                      .kv_heads = 2,
                      .key_dim = 8,
                      .value_dim = 1,
                      .scope = scope,
                      .max_rows = 19,
                      .scores = true});
    REQUIRE(cache.try_create().has_value());
    REQUIRE(cache.try_extend(SequenceId{0}, 19) == Status::ok);
    const std::vector<float> values(38, 0.0F);
    REQUIRE(cache.write(SequenceId{0}, LayerId{0}, {one.keys.data()}, {values.data()}) ==
            kvtrim::Status::ok);
    REQUIRE(cache.write(SequenceId{0}, LayerId{1}, {two.keys.data()}, {values.data()}) ==
            kvtrim::Status::ok);
    const CacheView view = cache.view();
    Scratch scratch(column_sums_scratch_bytes(8));
    std::vector<float> out(19);
    for (std::int32_t h = 0; h < 2; ++h) {
      const auto expected = sums_of(head_of(two, h, 0, 19), {});
      for (const std::int32_t query_layer : {1, 0}) {
        QueryBlock all = queries_one.block;
        all.data = queries[1 - query_layer].data();
        all.layer_stride = 6 * 19 * 8;
        all.lse = lse[1 - query_layer].data();
        all.lse_layer_stride = 6 * 19;
        for (std::int32_t r = 0; r < 19; ++r) {
          view.score_sums.at<float>(SequenceId{0}, LayerId{1}, HeadId{h}, r) = 0;
          view.score_compensations.at<float>(SequenceId{0}, LayerId{1}, HeadId{h}, r) = 0;
        }
        accumulate_column_sums(
            {}, {view, SequenceId{0}, LayerId{1}, HeadId{h}}, all, LayerId{query_layer}, scratch);
        AccumulatedScorer({}).score({view, SequenceId{0}, LayerId{1}, HeadId{h}}, {}, {}, out);
        CHECK(error_of(out, expected) < tolerance);
      }
      AccumulatedScorer({}).score({view, SequenceId{0}, LayerId{0}, HeadId{h}}, {}, {}, out);
      CHECK(out == std::vector<float>(19, 0.0F));
    }
  }
}

TEST_CASE("column_sums: no bit depends on page size, page place, batch or old scratch",
          "[column_sums][property]") {
  for (const std::int32_t dim : {16, 64, 80, 128, 256}) {
    const std::int32_t tokens = dim == 256 ? 205 : 250;
    const Data d = make_data(2, 3, dim, tokens, static_cast<std::uint32_t>(dim));
    const Queries queries(d, tokens - 37, 37, LseForm::natural);
    std::vector<std::vector<std::uint32_t>> expected;
    for (const std::int32_t page_size : {16, 1, 3, 4, 32}) {
      for (const bool alone : {true, false}) {
        TestCache cache(d,
                        {.page_size = page_size,
                         .shuffled_pages = !alone,
                         .others = alone ? 0 : 2,
                         .scores = true});
        const CacheView view = cache.view();
        Shuffled{3, 5}.for_each(view.sequences * 2, [&](std::int64_t item, std::int32_t) {
          const SequenceId s{static_cast<std::int32_t>(item / 2)};
          if (view.live_rows(s, LayerId{0}, HeadId{0}) == 0) { return; }
          Scratch scratch(column_sums_scratch_bytes(dim), alone ? 0xFF : 0x00);
          accumulate_column_sums({.decay = 0.99F},
                                 {view, s, LayerId{0}, HeadId{static_cast<std::int32_t>(item % 2)}},
                                 queries.block,
                                 LayerId{0},
                                 scratch);
        });
        std::vector<std::vector<std::uint32_t>> bits;
        for (std::int32_t h = 0; h < 2; ++h) {
          std::vector<float> planes;  // both of them
          for (std::int32_t r = 0; r < tokens; ++r) {
            planes.push_back(view.score_sums.at<float>(cache.sequence(), LayerId{0}, HeadId{h}, r));
            planes.push_back(
                view.score_compensations.at<float>(cache.sequence(), LayerId{0}, HeadId{h}, r));
          }
          bits.push_back(bits_of(planes));
        }
        if (expected.empty()) { expected = bits; }
        INFO("dim " << dim << ", page size " << page_size << ", alone " << alone);
        CHECK(bits == expected);
      }
    }
  }
}

TEST_CASE("column_sums: working space is one tile, whatever the rows", "[column_sums]") {
  // 2,000 rows in what 20 need, with a guard behind it.
  for (const std::int32_t dim : {16, 128, 256}) {
    const std::size_t bytes = column_sums_scratch_bytes(dim);
    CHECK(bytes < (std::size_t{1} << 20));
    const Data d = make_data(1, 1, dim, dim == 16 ? 2000 : 500, 204);
    TestCache cache(d, {.scores = true});
    Queries queries(d, d.tokens - 2, 2, LseForm::natural);
    std::vector<std::byte> memory(bytes + 64, std::byte{0x5A});
    accumulate_column_sums({},
                           {cache.view(), SequenceId{0}, LayerId{0}, HeadId{0}},
                           queries.block,
                           LayerId{0},
                           std::span(memory).first(bytes));
    CHECK(std::all_of(memory.begin() + static_cast<std::ptrdiff_t>(bytes),
                      memory.end(),
                      [](std::byte b) { return b == std::byte{0x5A}; }));
    CHECK(error_of(totals_of(cache, 0), sums_of(head_of(d, 0, d.tokens - 2, 2), {})) < tolerance);
  }
}
