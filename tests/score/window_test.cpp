// SPDX-License-Identifier: Apache-2.0
#include "score_fixture.hpp"

#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/instances.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

using namespace score_test;

namespace {

constexpr LseForm all_forms[] = {LseForm::computed, LseForm::natural, LseForm::binary};
constexpr Sums both_sums[] = {Sums::floating, Sums::exact};
constexpr Reduction all_reductions[] = {Reduction::mean, Reduction::sum, Reduction::max};
constexpr double tolerance = 1e-5;

// Data, cache and observation of one comparison; the window's queries unless told otherwise.
struct Case {
  Case(const Data& d, std::int32_t window, LseForm form, const CacheOptions& o = {})
      : first(std::max(0, d.tokens - window)),
        cache(d, o),
        queries(d, first, d.tokens - first, form) {
    obs.queries = queries.block;
  }
  std::int32_t first;
  TestCache cache;
  Queries queries;
  Observation obs;
};

std::vector<float> scores_of(Case& c, const WindowParams& params, std::int32_t h) {
  return score_test::scores_of(
      WindowScorer(params), c.cache.view(), c.cache.sequence(), HeadId{h}, c.obs);
}

}  // namespace

TEST_CASE(
    "window: every reduction, pooling and group size equals a double reference, at every length",
    "[window][property]") {
  constexpr std::int32_t window = 7;
  std::mt19937 rng(1);
  double worst = 0;
  for (const std::int32_t group : {1, 3, 8}) {
    for (const std::int32_t tokens : {0, 1, 5, 7, 8, 21, 40}) {
      const Data d = make_data(2, group, 16, tokens, static_cast<std::uint32_t>(rng()));
      for (const LseForm form : all_forms) {
        for (const bool ordered : {true, false}) {
          CacheOptions o;
          o.page_size = std::vector<std::int32_t>{1, 4, 16}[rng() % 3];
          o.dtype = std::vector<DType>{DType::f32, DType::f16, DType::bf16}[rng() % 3];
          if (!ordered) { o.order = shuffled(tokens, static_cast<std::uint32_t>(rng())); }
          Case c(d, window, form, o);
          const std::int32_t h = static_cast<std::int32_t>(rng() % 2);
          const Head p = head_of(d, h, c.first, tokens - c.first, o.order);
          const Probabilities3 probabilities = probabilities_of(p);
          for (const Reduction rows : all_reductions) {
            for (const Reduction heads : all_reductions) {
              for (const Pooling pooling : {Pooling::average, Pooling::max}) {
                for (const std::int32_t kernel : {1, 3, 5, 15}) {
                  for (const PoolColumns columns :
                       {PoolColumns::candidates, PoolColumns::all_columns}) {
                    // All combinations with every length and group; one LSE form and order in three.
                    if (rng() % 3 != 0) { continue; }
                    WindowParams params{window, kernel, rows, heads, pooling, columns};
                    params.sums = both_sums[rng() % 2];
                    const double error = error_of(scores_of(c, params, h),
                                                  window_scores(p, probabilities, params),
                                                  params.sums);
                    if (error > tolerance) {
                      FAIL_CHECK("group " << group << ", tokens " << tokens << ", rows "
                                          << static_cast<int>(rows) << ", group reduction "
                                          << static_cast<int>(heads) << ", pooling "
                                          << static_cast<int>(pooling) << ", kernel " << kernel
                                          << ", columns " << static_cast<int>(columns) << ", form "
                                          << static_cast<int>(form) << ", page size " << o.page_size
                                          << ", ordered " << ordered << ", sums "
                                          << static_cast<int>(params.sums) << ": error " << error);
                    }
                    worst = std::max(worst, error);
                  }
                }
              }
            }
          }
        }
      }
    }
  }
  CHECK(worst > 0);  // something was compared
}

TEST_CASE("window: page size, dtype, LSE form, scale and soft cap equal a double reference",
          "[window][property]") {
  constexpr std::int32_t window = 5;
  constexpr std::int32_t tokens = 33;
  const WindowParams params{.window = window, .kernel = 3};
  for (const std::int32_t group : {1, 3, 8}) {
    const Data d = make_data(2, group, 8, tokens, static_cast<std::uint32_t>(group));
    for (const std::int32_t page_size : {1, 4, 16}) {
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        for (const LseForm form : all_forms) {
          for (const float scale : {0.0F, 1.0F, 0.125F}) {
            for (const float cap : {0.0F, 2.0F, 30.0F}) {
              Case c(d, window, LseForm::computed, {.dtype = dtype, .page_size = page_size});
              const auto change = [&](Head& p) {
                if (scale != 0) { p.scale = static_cast<double>(scale); }
                p.soft_cap = static_cast<double>(cap);
              };
              if (form != LseForm::computed) {
                c.queries.set_lse(d, c.first, window, form, change);
                c.obs.queries = c.queries.block;
              }
              c.obs.queries.scale = scale;
              c.obs.queries.soft_cap = cap;
              for (std::int32_t h = 0; h < 2; ++h) {
                Head p = head_of(d, h, c.first, window);
                change(p);
                const double error = error_of(scores_of(c, params, h),
                                              window_scores(p, probabilities_of(p), params));
                INFO("group " << group << ", page size " << page_size << ", dtype "
                              << std::string(to_string(dtype)) << ", form "
                              << static_cast<int>(form) << ", scale " << scale << ", cap " << cap);
                CHECK(error < tolerance);
              }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("window: prompts of several tiles equal a double reference", "[window]") {
  const WindowParams params{.window = 16, .kernel = 5};
  for (const std::int32_t dim : {16, 80, 256}) {
    for (const std::int32_t tokens : {95, 96, 97, 239, 240, 241, 481}) {
      const Data d = make_data(1, 2, dim, tokens, static_cast<std::uint32_t>(dim + tokens));
      for (const LseForm form : {LseForm::computed, LseForm::natural}) {
        for (const bool ordered : {true, false}) {
          CacheOptions o{.page_size = 16};
          if (!ordered) { o.order = shuffled(tokens, 5); }
          Case c(d, 16, form, o);
          const Head p = head_of(d, 0, c.first, 16, o.order);
          INFO("dim " << dim << ", tokens " << tokens << ", form " << static_cast<int>(form));
          CHECK(error_of(scores_of(c, params, 0), window_scores(p, probabilities_of(p), params)) <
                tolerance);
        }
      }
    }
  }
}

TEST_CASE("window: more query rows than products take at once equal a double reference",
          "[window]") {
  const Data d = make_data(1, 16, 8, 100, 6);  // 16 heads * 33 rows = 528 > 128
  for (const LseForm form : all_forms) {
    Case c(d, 33, form);
    const WindowParams params{.window = 33, .kernel = 1};
    const Head p = head_of(d, 0, 67, 33);
    CHECK(error_of(scores_of(c, params, 0), window_scores(p, probabilities_of(p), params)) <
          tolerance);
  }
}

TEST_CASE("window: a query does not see the rows after it", "[window]") {
  Data d = make_data(1, 1, 8, 12, 7);
  const WindowParams params{.window = 4, .kernel = 1, .rows = Reduction::max};
  for (const LseForm form : {LseForm::computed, LseForm::natural}) {
    std::vector<float> before;
    // The last key takes all of the last query's attention, and none of the others'.
    std::copy_n(d.query(0, 11), 8, d.key(11, 0));
    for (const float much : {1.0F, 64.0F}) {
      for (std::int32_t i = 0; i < 8; ++i) { d.key(11, 0)[i] *= much; }
      Case c(d, 4, form);
      const Head p = head_of(d, 0, 8, 3);  // without the last query
      const auto expected = window_scores(p, probabilities_of(p), params);
      if (much > 1) { CHECK(error_of(scores_of(c, params, 0), expected) < tolerance); }
    }
  }
}

TEST_CASE("window: the last `window` of the rows given vote, and fewer do where fewer are given",
          "[window]") {
  const Data d = make_data(2, 3, 16, 40, 8);
  for (const LseForm form : all_forms) {
    for (const std::int32_t given : {1, 3, 8, 9, 40}) {
      TestCache cache(d);
      const Queries queries(d, 40 - given, given, form);
      Observation obs;
      obs.queries = queries.block;
      const WindowParams params{.window = 8, .kernel = 5};
      const std::int32_t votes = std::min(8, given);
      for (std::int32_t h = 0; h < 2; ++h) {
        const Head p = head_of(d, h, 40 - votes, votes);
        INFO("given " << given << ", form " << static_cast<int>(form));
        CHECK(error_of(score_test::scores_of(
                           WindowScorer(params), cache.view(), SequenceId{0}, HeadId{h}, obs),
                       window_scores(p, probabilities_of(p), params)) < tolerance);
      }
    }
  }
}

TEST_CASE("window: a prompt within the window scores 0 everywhere", "[window][edge]") {
  for (const std::int32_t tokens : {0, 1, 31, 32}) {
    const Data d = make_data(1, 2, 16, tokens, 9);
    for (const LseForm form : all_forms) {
      Case c(d, 32, form);
      CHECK(scores_of(c, {}, 0) == std::vector<float>(at(tokens), 0.0F));
    }
  }
}

TEST_CASE("window: a sequence without queries scores NaN, and nothing divides by its votes",
          "[window][edge][nan]") {
  const Data d = make_data(2, 3, 16, 20, 10);
  for (const LseForm form : all_forms) {
    TestCache cache(d, {.others = 1});
    const Queries queries(d, 16, 4, form);
    const std::int32_t counts[] = {4, 0, 4};
    Observation obs;
    obs.queries = queries.block;
    obs.queries.row_counts = counts;
    const auto got = score_test::scores_of(
        WindowScorer({.window = 4, .kernel = 3}), cache.view(), SequenceId{1}, HeadId{0}, obs);
    for (std::size_t r = 0; r < 20; ++r) { CHECK((r < 16 ? is_nan(got[r]) : got[r] == 0)); }
  }
}

TEST_CASE("window: ragged batches read each sequence's own rows of queries", "[window]") {
  const std::vector<std::int32_t> lengths{9, 0, 30, 4, 17};
  constexpr std::int32_t window = 6;
  constexpr std::int32_t dim = 8;
  std::vector<Data> all;
  std::int32_t rows = 0;
  std::vector<std::int32_t> firsts;
  std::vector<std::int32_t> counts;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    all.push_back(make_data(2, 3, dim, lengths[i], static_cast<std::uint32_t>(20 + i)));
    firsts.push_back(rows);
    counts.push_back(std::min(window, lengths[i]));
    rows += counts.back();
  }
  for (const bool padded : {false, true}) {
    for (const bool with_lse : {false, true}) {
      // [heads, rows of all sequences] packed, or [sequences, heads, window] padded with NaN at the end.
      const std::int64_t per_sequence = padded ? 6 * window : 0;
      const std::int64_t head_rows = padded ? window : rows;
      std::vector<float> queries(at(padded ? 5 * per_sequence * dim : 6 * rows * dim), nan_f);
      std::vector<float> lse(queries.size() / dim, nan_f);
      PagedCache cache({.pages = 64,
                        .page_size = 4,
                        .kv_heads = 2,
                        .key_dim = dim,
                        .value_dim = 1,
                        .max_sequences = 5,
                        .max_rows = 32});
      for (std::int32_t s = 0; s < 5; ++s) {
        const Data& d = all[at(s)];
        REQUIRE(cache.try_create().has_value());
        REQUIRE(cache.try_extend(SequenceId{s}, d.tokens) == Status::ok);
        const std::vector<float> values(at(2 * d.tokens), 0.0F);
        REQUIRE(cache.write(SequenceId{s}, LayerId{0}, {d.keys.data()}, {values.data()}) ==
                (d.tokens == 0 ? Status::no_open_step : Status::ok));
        for (std::int32_t head = 0; head < 6; ++head) {
          const Head p = head_of(d, head / 3, d.tokens - counts[at(s)], counts[at(s)]);
          for (std::int32_t i = 0; i < counts[at(s)]; ++i) {
            const std::int64_t row =
                s * per_sequence + head * head_rows + (padded ? 0 : firsts[at(s)]) + i;
            std::copy_n(
                d.query(head, d.tokens - counts[at(s)] + i), dim, queries.data() + row * dim);
            lse[at(row)] = static_cast<float>(lse_of(p, at(head % 3), at(i)));
          }
        }
      }
      Observation obs;
      obs.queries.data = queries.data();
      obs.queries.query_heads = 6;
      obs.queries.row_firsts = padded ? nullptr : firsts.data();
      obs.queries.row_counts = counts.data();
      obs.queries.sequence_stride = per_sequence * dim;
      obs.queries.head_stride = head_rows * dim;
      obs.queries.row_stride = dim;
      obs.queries.lse = with_lse ? lse.data() : nullptr;
      obs.queries.lse_sequence_stride = per_sequence;
      obs.queries.lse_head_stride = head_rows;
      const WindowParams params{.window = window, .kernel = 3};
      for (std::int32_t s = 0; s < 5; ++s) {
        for (std::int32_t h = 0; h < 2; ++h) {
          const Data& d = all[at(s)];
          const Head p = head_of(d, h, d.tokens - counts[at(s)], counts[at(s)]);
          INFO("sequence " << s << ", padded " << padded << ", lse " << with_lse);
          CHECK(error_of(score_test::scores_of(
                             WindowScorer(params), cache.view(), SequenceId{s}, HeadId{h}, obs),
                         window_scores(p, probabilities_of(p), params)) < tolerance);
        }
      }
    }
  }
}

TEST_CASE("window: layers and per-head tables read their own queries and keys", "[window]") {
  const Data one = make_data(2, 3, 8, 19, 30);
  const Data two = make_data(2, 3, 8, 19, 31);
  std::vector<float> queries = one.queries;
  queries.insert(queries.end(), two.queries.begin(), two.queries.end());
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    PagedCache cache({.pages = 64,
                      .page_size = 4,
                      .layers = 2,
                      .kv_heads = 2,
                      .key_dim = 8,
                      .value_dim = 1,
                      .scope = scope,
                      .max_rows = 19});
    REQUIRE(cache.try_create().has_value());
    REQUIRE(cache.try_extend(SequenceId{0}, 19) == Status::ok);
    const std::vector<float> values(38, 0.0F);
    REQUIRE(cache.write(SequenceId{0}, LayerId{0}, {one.keys.data()}, {values.data()}) ==
            kvtrim::Status::ok);
    REQUIRE(cache.write(SequenceId{0}, LayerId{1}, {two.keys.data()}, {values.data()}) ==
            kvtrim::Status::ok);
    Observation obs;
    obs.queries.data = queries.data() + 13 * 8;
    obs.queries.query_heads = 6;
    obs.queries.rows = 6;
    obs.queries.row_stride = 8;
    obs.queries.head_stride = 19 * 8;
    obs.queries.layer_stride = 6 * 19 * 8;
    const WindowParams params{.window = 6, .kernel = 3};
    const CacheView view = cache.view();
    const WindowScorer scorer(params);
    for (std::int32_t l = 0; l < 2; ++l) {
      for (std::int32_t h = 0; h < 2; ++h) {
        Scratch scratch(scorer.scratch_bytes(plan_shape(view, obs)));
        std::vector<float> out(19);
        scorer.score({view, SequenceId{0}, LayerId{l}, HeadId{h}}, obs, scratch, out);
        const Head p = head_of(l == 0 ? one : two, h, 13, 6);
        CHECK(error_of(out, window_scores(p, probabilities_of(p), params)) < tolerance);
      }
    }
  }
}

TEST_CASE(
    "window: packed keys, strided features and left padding score as plain pages do, bit for bit",
    "[window]") {
  // An engine's own pages: legacy vLLM keys, transposed keys, NHD; rows start behind `padding` slots.
  const Data d = make_data(2, 2, 16, 37, 32);
  const WindowParams params{.window = 5, .kernel = 3};
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    Case plain(d, 5, LseForm::natural, {.dtype = dtype});
    for (const std::int32_t layout : {0, 1, 2, 3}) {
      for (const std::int32_t padding : {0, 3, 9}) {
        const PlaneShape shape{8, 2, 16, dtype};
        std::vector<std::byte> memory(at(8 * 8 * 2 * 16 * 4), std::byte{0xFF});
        CacheView view;
        view.k = layout == 0   ? Plane::nhd(memory.data(), shape)
                 : layout == 1 ? Plane::hnd(memory.data(), shape)
                 : layout == 2 ? Plane::vllm_packed_keys(memory.data(), shape)
                               : Plane::transposed(memory.data(), shape);
        view.v = view.k;
        view.page_size = 8;
        view.pages = 8;
        view.kv_heads = 2;
        view.sequences = 1;
        const std::int32_t ids[] = {5, 2, 7, 0, 3, 6};
        const std::int32_t length = 37;
        view.table.ids = ids;
        view.table.row_stride = view.table.max_pages = 6;
        view.lengths = &length;
        view.first_rows = &padding;
        for (std::int32_t r = 0; r < 37; ++r) {
          for (std::int32_t h = 0; h < 2; ++h) {
            store_row(view.k, view.key(SequenceId{0}, LayerId{0}, HeadId{h}, r), d.key(r, h));
          }
        }
        for (std::int32_t h = 0; h < 2; ++h) {
          INFO("layout " << layout << ", padding " << padding);
          CHECK(bits_of(score_test::scores_of(
                    WindowScorer(params), view, SequenceId{0}, HeadId{h}, plain.obs)) ==
                bits_of(scores_of(plain, params, h)));
        }
      }
    }
  }
}

TEST_CASE("window: a hole is left out, and scores 0", "[window][edge]") {
  const Data d = make_data(1, 2, 8, 30, 33);
  const WindowParams params{.window = 5, .kernel = 3};
  for (const LseForm form : {LseForm::computed, LseForm::natural}) {
    for (const bool ordered : {true, false}) {
      CacheOptions plain_options;
      if (!ordered) { plain_options.order = shuffled(30, 3); }
      Case plain(d, 5, form, plain_options);
      const auto expected = scores_of(plain, params, 0);
      for (const std::int32_t hole : {0, 3, 4, 17, 29, 30}) {
        // The same rows, with one of NaN and of a position in between pushed in.
        Data holed = d;
        std::vector<std::int32_t> order = plain_options.order;
        if (order.empty()) {
          order = shuffled(0, 0), order.resize(30), std::iota(order.begin(), order.end(), 0);
        }
        holed.tokens = 31;
        holed.keys.resize(31 * 8, nan_f);  // token 30: not a number
        order.insert(order.begin() + hole, 30);
        TestCache cache(holed, {.order = order});
        const CacheView view = cache.view();
        SequenceState& state = view.states[0];
        state.live_rows = 30;
        state.append_row = hole;
        state.next_position = 30;
        state.ordered = ordered;
        auto got =
            score_test::scores_of(WindowScorer(params), view, SequenceId{0}, HeadId{0}, plain.obs);
        REQUIRE(got.size() == 31);
        INFO("hole " << hole << ", ordered " << ordered << ", form " << static_cast<int>(form));
        CHECK(got[at(hole)] == 0);
        got.erase(got.begin() + hole);
        CHECK(bits_of(got) == bits_of(expected));
      }
    }
  }
}

TEST_CASE("window: a key that is not finite scores NaN and takes no part", "[window][nan]") {
  const Data clean = make_data(1, 3, 8, 25, 34);
  const WindowParams params{.window = 4, .kernel = 1};
  for (const LseForm form : all_forms) {
    for (const float poison : {nan_f, inf_f, -inf_f}) {
      for (const std::int32_t row : {0, 11, 20, 22, 24}) {
        Data d = clean;
        d.key(row, 0)[row % 8] = poison;
        for (const bool ordered : {true, false}) {
          CacheOptions o;
          if (!ordered) { o.order = shuffled(25, 4); }
          Case c(d, 4, form, o);
          const Head p = head_of(d, 0, 21, 4, o.order);
          const auto got = scores_of(c, params, 0);
          INFO("row " << row << ", poison " << poison << ", form " << static_cast<int>(form));
          CHECK(error_of(got, window_scores(p, probabilities_of(p), params)) < tolerance);
          CHECK(std::count_if(got.begin(), got.end(), [](float x) { return is_nan(x); }) ==
                (row < 21 ? 1 : 0));
        }
      }
    }
  }
}

TEST_CASE("window: with an LSE, a key that is not finite changes no other row's bits",
          "[window][nan]") {
  const Data clean = make_data(1, 3, 8, 250, 35);
  const WindowParams params{.window = 4, .kernel = 1};
  Case good(clean, 4, LseForm::natural);
  const auto expected = bits_of(scores_of(good, params, 0));
  for (const std::int32_t row : {0, 100, 239, 240}) {
    Data d = clean;
    d.key(row, 0)[3] = nan_f;
    TestCache cache(d);
    auto got = bits_of(score_test::scores_of(
        WindowScorer(params), cache.view(), SequenceId{0}, HeadId{0}, good.obs));
    CHECK(got[at(row)] != expected[at(row)]);
    got[at(row)] = expected[at(row)];
    CHECK(got == expected);
  }
}

TEST_CASE("window: average pooling spreads NaN over the kernel, max pooling passes it by",
          "[window][nan]") {
  Data d = make_data(1, 2, 8, 25, 36);
  d.key(10, 0)[0] = nan_f;
  d.key(0, 0)[0] = inf_f;
  for (const Pooling pooling : {Pooling::average, Pooling::max}) {
    const WindowParams params{.window = 4, .kernel = 5, .pooling = pooling};
    Case c(d, 4, LseForm::computed);
    const Head p = head_of(d, 0, 21, 4);
    const auto got = scores_of(c, params, 0);
    CHECK(error_of(got, window_scores(p, probabilities_of(p), params)) < tolerance);
    CHECK(std::count_if(got.begin(), got.end(), [](float x) { return is_nan(x); }) ==
          (pooling == Pooling::average ? 3 + 5 : 0));
  }
}

TEST_CASE("window: a query or an LSE that is not finite has no vote", "[window][nan]") {
  const Data clean = make_data(1, 3, 8, 25, 37);
  for (const LseForm form : all_forms) {
    for (const float poison : {nan_f, inf_f, -inf_f}) {
      for (const Reduction rows : all_reductions) {
        for (const std::int32_t silent_heads : {0, 1, 3}) {  // heads without any vote
          Data d = clean;
          d.query(1, 22)[5] = poison;
          d.query(2, 24)[0] = poison;
          for (std::int32_t g = 0; g < silent_heads; ++g) {
            for (std::int32_t i = 21; i < 25; ++i) { d.query(g, i)[i % 8] = poison; }
          }
          const WindowParams params{.window = 4, .kernel = 3, .rows = rows};
          Case c(d, 4, form);
          const Head p = head_of(d, 0, 21, 4);
          const auto got = scores_of(c, params, 0);
          INFO("form " << static_cast<int>(form) << ", poison " << poison << ", rows "
                       << static_cast<int>(rows) << ", silent heads " << silent_heads);
          CHECK(error_of(got, window_scores(p, probabilities_of(p), params)) < tolerance);
          CHECK(is_nan(got[0]) == (silent_heads == 3));
        }
      }
    }
    if (form == LseForm::computed) { continue; }
    for (const float poison : {nan_f, inf_f, -inf_f}) {
      Case c(clean, 4, form);
      c.queries.lse[1 * 4 + 2] = poison;
      Head p = head_of(clean, 0, 21, 4);
      p.queries[1][2][0] = HUGE_VAL;
      const WindowParams params{.window = 4, .kernel = 3};
      CHECK(error_of(scores_of(c, params, 0), window_scores(p, probabilities_of(p), params)) <
            tolerance);
    }
  }
}

TEST_CASE("window: a query that sees no live row has no vote", "[window][nan][edge]") {
  // Queries with positions of their own, all rows they could see evicted since.
  const Data d = make_data(1, 2, 8, 20, 38);
  TestCache cache(d);
  for (std::int32_t r = 0; r < 20; ++r) {
    cache.view().positions.at<Position>(SequenceId{0}, LayerId{0}, HeadId{0}, r) =
        Position{r + 100};
  }
  const Queries queries(d, 16, 4, LseForm::computed);
  const Position positions[] = {Position{50}, Position{110}, Position{118}, Position{119}};
  Observation obs;
  obs.queries = queries.block;
  obs.queries.positions = positions;
  Head p = head_of(d, 0, 16, 4);
  for (std::int32_t& position : p.positions) { position += 100; }
  p.query_positions = {50, 110, 118, 119};
  const WindowParams params{.window = 4, .kernel = 3};
  CHECK(error_of(score_test::scores_of(
                     WindowScorer(params), cache.view(), SequenceId{0}, HeadId{0}, obs),
                 window_scores(p, probabilities_of(p), params)) < tolerance);
}

TEST_CASE("window: a query whose logits overflow has no vote, and silences no other",
          "[window][nan]") {
  Data d = make_data(1, 2, 8, 20, 43);
  for (std::int32_t g = 0; g < 2; ++g) {
    for (std::int32_t i = 16; i < 20; ++i) { d.query(g, i)[0] = g == 0 && i == 17 ? 1e30F : 0.0F; }
  }
  d.key(5, 0)[0] = 1e30F;  // finite, as is the query
  Case c(d, 4, LseForm::computed);
  Head p = head_of(d, 0, 16, 4);
  p.queries[0][1][0] = HUGE_VAL;
  const WindowParams params{.window = 4, .kernel = 3};
  CHECK(error_of(scores_of(c, params, 0), window_scores(p, probabilities_of(p), params)) <
        tolerance);
}

TEST_CASE("window: f16 subnormals and the largest f16 are read exactly", "[window]") {
  Data d = make_data(1, 1, 8, 20, 39);
  d.key(3, 0)[0] = 0x1p-24F;
  d.key(4, 0)[1] = -0x3FFp-24F;
  d.key(5, 0)[2] = 65504.0F;
  d.key(6, 0)[2] = -65504.0F;
  for (std::int32_t i = 16; i < 20; ++i) { d.query(0, i)[2] = 0x1p-14F; }
  Case c(d, 4, LseForm::computed, {.dtype = DType::f16});
  c.obs.queries.scale = 0.25F;
  Head p = head_of(d, 0, 16, 4);
  p.scale = 0.25;
  const WindowParams params{.window = 4, .kernel = 1};
  CHECK(error_of(scores_of(c, params, 0), window_scores(p, probabilities_of(p), params)) <
        tolerance);
}

TEST_CASE("window: no bit depends on page size, page place, batch, executor or old scratch",
          "[window][property]") {
  for (const std::int32_t dim : {16, 64, 80, 128, 256}) {
    const std::int32_t tokens = dim == 256 ? 205 : 491;  // three tiles
    const Data d = make_data(2, 3, dim, tokens, static_cast<std::uint32_t>(dim));
    const WindowParams params{.window = 9, .kernel = 5};
    const WindowScorer scorer(params);
    for (const LseForm form : {LseForm::computed, LseForm::natural}) {
      Case first(d, 9, form, {.page_size = 16});
      const std::vector<std::vector<std::uint32_t>> expected{bits_of(scores_of(first, params, 0)),
                                                             bits_of(scores_of(first, params, 1))};
      const auto same = [&](CacheView view, SequenceId s, unsigned char fill) {
        for (std::int32_t h = 0; h < 2; ++h) {
          if (bits_of(score_test::scores_of(scorer, view, s, HeadId{h}, first.obs, fill)) !=
              expected[at(h)]) {
            return false;
          }
        }
        return true;
      };
      for (const std::int32_t page_size : {1, 3, 4, 16, 32}) {
        for (const bool alone : {true, false}) {
          TestCache cache(
              d, {.page_size = page_size, .shuffled_pages = !alone, .others = alone ? 0 : 2});
          INFO("dim " << dim << ", form " << static_cast<int>(form) << ", page size " << page_size
                      << ", alone " << alone);
          CHECK(same(cache.view(), cache.sequence(), alone ? 0xFF : 0x00));
        }
      }
      TestCache per_head(d, {.page_size = 16, .scope = TableScope::head});
      CHECK(same(per_head.view(), SequenceId{0}, 0x7F));

      // All sequences and heads through executors, each worker with its own memory used again and again.
      TestCache batch(d, {.page_size = 4, .others = 1});
      const CacheView view = batch.view();
      const Shuffled executor{3, static_cast<std::uint32_t>(dim)};
      const std::size_t bytes = scorer.scratch_bytes(plan_shape(view, first.obs));
      std::vector<std::vector<std::byte>> scratch(3, std::vector<std::byte>(bytes + 64));
      std::vector<std::vector<float>> out(6, std::vector<float>(at(tokens + 3)));
      const auto item = [&](std::int64_t n, std::int32_t worker) {
        const SequenceId s{static_cast<std::int32_t>(n / 2)};
        const HeadId h{static_cast<std::int32_t>(n % 2)};
        out[at(n)].resize(at(view.live_rows(s, LayerId{0}, h)));
        // Any alignment will do.
        const auto memory = std::span(scratch[at(worker)]).subspan(at(n * 7), bytes);
        scorer.score({view, s, LayerId{0}, h}, first.obs, memory, out[at(n)]);
      };
      executor.for_each(6, item);
      CHECK(bits_of(out[2]) == expected[0]);
      CHECK(bits_of(out[3]) == expected[1]);
      out.assign(6, {});
      std::vector<std::thread> threads;
      for (std::int32_t w = 0; w < 3; ++w) {
        threads.emplace_back([&, w] {
          for (std::int64_t n = w; n < 6; n += 3) { item(n, w); }
        });
      }
      for (auto& t : threads) { t.join(); }
      CHECK(bits_of(out[2]) == expected[0]);
      CHECK(bits_of(out[3]) == expected[1]);
    }
  }
}

TEST_CASE("window: SnapKVSelector keeps the same rows on any executor, page size and place",
          "[window][policy][property]") {
  const Data d = make_data(2, 3, 16, 300, 40);
  const SnapKVSelector policy({.window = 8, .budget = 60});
  std::vector<std::vector<std::int32_t>> expected;
  for (const std::int32_t page_size : {16, 1, 3, 32}) {
    for (const bool shuffle : {false, true}) {
      Case c(d,
             8,
             LseForm::computed,
             {.page_size = page_size, .shuffled_pages = shuffle, .others = 1});
      const CacheView view = c.cache.view();
      const Shuffled executor;
      std::vector<std::byte> one(plan_workspace_bytes(policy, plan_shape(view, c.obs)),
                                 std::byte{0xFF});
      std::vector<std::byte> three(plan_workspace_bytes(policy, plan_shape(view, c.obs, 3)),
                                   std::byte{0xFF});
      const std::array plans{plan(policy, view, c.obs, one),
                             plan(policy, view, c.obs, three, {}, executor)};
      for (const auto& made : plans) {
        REQUIRE(made.status() == Status::ok);
        std::vector<std::vector<std::int32_t>> kept(2);
        for (std::int32_t h = 0; h < 2; ++h) {
          made.for_each_kept(c.cache.sequence(), LayerId{0}, HeadId{h}, [&](std::int32_t r) {
            kept[at(h)].push_back(r);
          });
        }
        if (expected.empty()) { expected = kept; }
        CHECK(kept == expected);
        CHECK(kept[0].size() == 60);
      }
    }
  }
}

TEST_CASE(
    "window: scratch_bytes grows with every field of the shape and is enough for smaller ones",
    "[window]") {
  const WindowScorer scorer({.window = 9, .kernel = 5});
  PlanShape shape;
  shape.kv_heads = 2;
  shape.query_heads = 6;
  shape.query_rows = 5;
  shape.head_dim = 64;
  shape.max_rows = 100;
  const std::size_t bytes = scorer.scratch_bytes(shape);
  CHECK(scorer.scratch_bytes(shape) == bytes);
  PlanShape larger = shape;
  larger.max_rows = 500;
  CHECK(scorer.scratch_bytes(larger) > bytes);
  larger = shape;
  larger.query_heads = 12;
  CHECK(scorer.scratch_bytes(larger) > bytes);
  larger = shape;
  larger.query_rows = 9;
  const std::size_t full = scorer.scratch_bytes(larger);
  CHECK(full > bytes);
  larger.query_rows = 1'000'000;  // no more than the window vote
  CHECK(scorer.scratch_bytes(larger) == full);
  for (std::int32_t dim = 1; dim < 700; ++dim) {  // tiles get shorter: the sum must not
    PlanShape a = shape;
    PlanShape b = shape;
    a.head_dim = dim;
    b.head_dim = dim + 1;
    if (scorer.scratch_bytes(b) < scorer.scratch_bytes(a)) {
      FAIL_CHECK("head_dim " << dim << ": " << scorer.scratch_bytes(a) << ", then "
                             << scorer.scratch_bytes(b));
      break;
    }
  }
}

TEST_CASE("window: check names a missing or misshapen observation", "[window][edge]") {
  const Data d = make_data(2, 3, 8, 12, 41);
  Case c(d, 4, LseForm::computed);
  const WindowScorer scorer({.window = 4});
  CacheView view = c.cache.view();
  CHECK(scorer.check(view, c.obs) == Status::ok);
  CHECK(scorer.check(view, {}) == Status::bad_observation);
  Observation bad = c.obs;
  for (const std::int32_t heads : {0, 1, 3, 5}) {
    bad.queries.query_heads = heads;
    CHECK(scorer.check(view, bad) == Status::bad_observation);
  }
  for (const DType dtype : {DType::f8e4m3, DType::f8e5m2}) {
    view.k.dtype = dtype;
    CHECK(scorer.check(view, c.obs) == Status::ok);
  }
  for (const DType dtype : {DType::i8, DType::opaque}) {  // without scales, of no known format
    view.k.dtype = dtype;
    CHECK(scorer.check(view, c.obs) == Status::bad_observation);
  }
}
