// SPDX-License-Identifier: Apache-2.0
// Ranks are simulated: each holds a part of the rows or of the query heads, and what they hand out is reduced here.
#include "score_fixture.hpp"

#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/score/exact_window.hpp>
#include <kvtrim/score/window.hpp>
#include <kvtrim/score/window_probabilities.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

using namespace score_test;

namespace {

constexpr Reduction all_reductions[] = {Reduction::mean, Reduction::sum, Reduction::max};

WindowParams exact_params(std::int32_t window,
                          Reduction rows = Reduction::mean,
                          Reduction group = Reduction::mean) {
  WindowParams p{.window = window, .kernel = 1, .rows = rows, .group = group};
  p.own_columns = true;  // every column is compared
  p.sums = Sums::exact;
  return p;
}

// One rank: some tokens of KV head 0, and the queries of the window.
struct Rank {
  Rank(const Data& d, std::vector<std::int32_t> own, std::int32_t window, LseForm form)
      : tokens(std::move(own)),
        keys(part(d, tokens)),
        cache(keys, {.page_size = 4}),
        queries(d, d.tokens - window, window, form) {
    for (std::size_t r = 0; r < tokens.size(); ++r) {
      view.positions.at<Position>(
          SequenceId{0}, LayerId{0}, HeadId{0}, static_cast<std::int32_t>(r)) = Position{tokens[r]};
    }
    for (std::int32_t i = 0; i < window; ++i) {
      positions.push_back(Position{d.tokens - window + i});
    }
    queries.block.positions = positions.data();
  }
  static Data part(const Data& d, const std::vector<std::int32_t>& tokens) {
    Data out{d.kv_heads, d.group, d.dim, static_cast<std::int32_t>(tokens.size()), {}, {}};
    for (const std::int32_t t : tokens) {
      out.keys.insert(out.keys.end(), d.key(t, 0), d.key(t, 0) + d.kv_heads * d.dim);
    }
    return out;
  }

  std::vector<std::int32_t> tokens;
  Data keys;
  TestCache cache;
  CacheView view = cache.view();
  Queries queries;
  std::vector<Position> positions;
};

using Buffer = std::span<std::uint64_t>;

// What an all-reduce does, over ranks in any order.
void all_reduce(const std::vector<Buffer>& ranks, bool by_max) {
  for (const Buffer& rank : ranks) { REQUIRE(rank.size() == ranks.front().size()); }
  for (std::size_t i = 0; i < ranks.front().size(); ++i) {
    std::uint64_t all = 0;
    for (const Buffer& rank : ranks) { all = by_max ? std::max(all, rank[i]) : all + rank[i]; }
    for (const Buffer& rank : ranks) { rank[i] = all; }
  }
}

// Scores by token of one sequence whose rows lie on several ranks.
std::vector<float> scores_over(std::deque<Rank>& ranks, const WindowParams& params) {
  std::deque<ExactWindow> windows;
  std::deque<Scratch> scratch;
  std::vector<Buffer> maxima, denominators;
  std::size_t rows = 0;
  for (Rank& rank : ranks) {
    Observation obs;
    obs.queries = rank.queries.block;
    REQUIRE(WindowScorer(params).check(rank.view, obs) == Status::ok);
    scratch.emplace_back(ExactWindow::scratch_bytes(params, plan_shape(rank.view, obs)));
    windows.emplace_back(params,
                         HeadRef{rank.view, SequenceId{0}, LayerId{0}, HeadId{0}},
                         rank.queries.block,
                         scratch.back());
    maxima.push_back(windows.back().maxima());
    rows += rank.tokens.size();
  }
  all_reduce(maxima, true);
  for (ExactWindow& w : windows) { denominators.push_back(w.denominators()); }
  all_reduce(denominators, false);
  std::vector<float> out(rows, -7.0F);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const auto columns = windows[i].columns();
    REQUIRE(columns.size() == ranks[i].tokens.size());
    for (std::size_t r = 0; r < columns.size(); ++r) { out[at(ranks[i].tokens[r])] = columns[r]; }
  }
  return out;
}

std::vector<std::int32_t> all_tokens(std::int32_t n) {
  std::vector<std::int32_t> out(at(n));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

// Tokens to ranks: contiguous, or each token anywhere; ranks may be empty.
std::vector<std::vector<std::int32_t>> parts_of(std::int32_t tokens,
                                                std::size_t ranks,
                                                std::mt19937& rng) {
  std::vector<std::vector<std::int32_t>> out(ranks);
  const bool contiguous = rng() % 2 == 0;
  for (std::int32_t t = 0; t < tokens; ++t) {
    const std::size_t r = contiguous ? at(t) * ranks / at(tokens) : rng() % ranks;
    out[r].push_back(t);
  }
  if (rng() % 3 == 0) {  // one rank gives its rows away
    auto& to = out[(ranks - 1) / 2];
    const auto from = std::move(out.back());
    out.back().clear();
    if (ranks == 1) {
      to = from;
    } else {
      to.insert(to.end(), from.begin(), from.end());
    }
  }
  return out;
}

// Faults that scores must survive.
struct Fault {
  const char* name;
  std::function<void(Data&)> put;
};
const std::vector<Fault> faults{
    {"none", [](Data&) {}},
    {"all equal", [](Data& d) { std::fill(d.keys.begin(), d.keys.end(), 0.5F); }},
    {"a key is NaN", [](Data& d) { d.key(d.tokens / 3, 0)[1] = nan_f; }},
    {"a key is infinite", [](Data& d) { d.key(d.tokens / 2, 0)[0] = -inf_f; }},
    {"a query is NaN", [](Data& d) { d.query(0, d.tokens - 1)[0] = nan_f; }},
    {"all queries are NaN", [](Data& d) { std::fill(d.queries.begin(), d.queries.end(), nan_f); }},
    {"a logit overflows",
     [](Data& d) {
       std::fill_n(d.key(2, 0), d.dim, 1e30F);
       std::fill_n(d.query(d.group - 1, d.tokens - 2), d.dim, 1e30F);
     }},
    {"one row takes all", [](Data& d) { std::fill_n(d.key(1, 0), d.dim, 60.0F); }},
    {"all keys are NaN", [](Data& d) { std::fill(d.keys.begin(), d.keys.end(), nan_f); }},
};

}  // namespace

TEST_CASE("exact_window: any ranks, with rows in any order, give one rank's bits",
          "[exact_window][property][nan]") {
  std::mt19937 rng(1);
  for (const Fault& fault : faults) {
    for (int trial = 0; trial < 12; ++trial) {
      const std::int32_t window = std::vector<std::int32_t>{1, 6, 8}[rng() % 3];
      const std::int32_t tokens = window + static_cast<std::int32_t>(rng() % 120);
      Data d = make_data(1,
                         1 + static_cast<std::int32_t>(rng() % 3),
                         16,
                         std::max(4, tokens),
                         static_cast<std::uint32_t>(rng()));
      fault.put(d);
      const WindowParams params =
          exact_params(window, all_reductions[rng() % 3], all_reductions[rng() % 3]);
      const LseForm form = rng() % 3 == 0 ? LseForm::natural : LseForm::computed;
      std::deque<Rank> one;
      one.emplace_back(d, all_tokens(d.tokens), window, form);
      const auto expected = scores_over(one, params);
      for (const std::size_t ranks : {1U, 2U, 3U, 4U, 8U}) {
        std::deque<Rank> several;
        for (auto& tokens_of : parts_of(d.tokens, ranks, rng)) {
          std::shuffle(tokens_of.begin(), tokens_of.end(), rng);
          several.emplace_back(d, tokens_of, window, form);
        }
        if (bits_of(scores_over(several, params)) != bits_of(expected)) {
          FAIL_CHECK(fault.name << ", " << ranks << " ranks, " << d.tokens << " tokens, LSE "
                                << static_cast<int>(form));
        }
      }
      // And WindowScorer, which takes all steps at once, is that one rank.
      Observation obs;
      obs.queries = one.front().queries.block;
      CHECK(bits_of(
                scores_of(WindowScorer(params), one.front().view, SequenceId{0}, HeadId{0}, obs)) ==
            bits_of(expected));
    }
  }
}

TEST_CASE(
    "exact_window: query heads of one KV head on several ranks, in any order, give one rank's bits",
    "[exact_window][property]") {
  std::mt19937 rng(2);
  constexpr std::int32_t group = 8;
  for (const Reduction rows : all_reductions) {
    for (const Reduction heads : all_reductions) {
      for (const bool fault : {false, true}) {
        Data d = make_data(1, group, 16, 70, static_cast<std::uint32_t>(rng()));
        if (fault) {
          d.query(3, 69)[0] = nan_f;  // heads with different numbers of votes
          d.key(5, 0)[0] = nan_f;
        }
        const WindowParams params = exact_params(6, rows, heads);
        std::deque<Rank> one;
        one.emplace_back(d, all_tokens(70), 6, LseForm::computed);
        const auto expected = scores_over(one, params);
        for (const std::int32_t ranks : {1, 2, 4}) {
          const auto order = shuffled(group, static_cast<std::uint32_t>(rng()));
          const std::int32_t each = group / ranks;
          std::deque<Data> data;
          std::deque<Rank> parts;
          std::deque<Scratch> scratch;
          std::deque<ExactWindow> windows;
          std::vector<Buffer> sums;
          for (std::int32_t r = 0; r < ranks; ++r) {
            Data own{1, each, 16, 70, d.keys, {}};
            for (std::int32_t g = 0; g < each; ++g) {
              const float* const q = d.query(order[at(r * each + g)], 0);
              own.queries.insert(own.queries.end(), q, q + 70 * 16);
            }
            data.push_back(std::move(own));
            Rank& rank = parts.emplace_back(data.back(), all_tokens(70), 6, LseForm::computed);
            Observation obs;
            obs.queries = rank.queries.block;
            scratch.emplace_back(ExactWindow::scratch_bytes(params, plan_shape(rank.view, obs)));
            windows.emplace_back(params,
                                 HeadRef{rank.view, SequenceId{0}, LayerId{0}, HeadId{0}},
                                 rank.queries.block,
                                 scratch.back());
            sums.push_back(windows.back().row_sums());
          }
          all_reduce(sums, heads == Reduction::max);
          for (ExactWindow& w : windows) {
            const auto columns = w.columns();
            CHECK(bits_of({columns.begin(), columns.end()}) == bits_of(expected));
          }
        }
      }
    }
  }
}

TEST_CASE(
    "exact_window: scores are the floating form's within the stated error, NaN where they are",
    "[exact_window][nan][property]") {
  std::mt19937 rng(3);
  for (const Fault& fault : faults) {
    for (const LseForm form : {LseForm::computed, LseForm::natural, LseForm::binary}) {
      for (int trial = 0; trial < 6; ++trial) {
        Data d = make_data(1,
                           3,
                           16,
                           30 + static_cast<std::int32_t>(rng() % 260),
                           static_cast<std::uint32_t>(rng()));
        WindowParams params{.window = 9,
                            .kernel = 5,
                            .rows = all_reductions[rng() % 3],
                            .group = all_reductions[rng() % 3]};
        params.pooling = rng() % 2 == 0 ? Pooling::average : Pooling::max;
        Queries queries(d, d.tokens - 9, 9, form);  // the LSE is that of good data
        fault.put(d);
        std::vector<std::int32_t> order;
        if (rng() % 2 == 0) { order = shuffled(d.tokens, static_cast<std::uint32_t>(rng())); }
        TestCache cache(d, {.page_size = 16, .order = order});
        Observation obs;
        obs.queries = queries.block;
        const auto scores = [&](Sums sums) {
          params.sums = sums;
          return scores_of(WindowScorer(params), cache.view(), SequenceId{0}, HeadId{0}, obs);
        };
        const auto floating = scores(Sums::floating);
        if (form != LseForm::computed && floating != scores(Sums::exact) &&
            *std::max_element(floating.begin(), floating.end()) > 1.0F) {
          continue;  // an LSE of other keys: probabilities above 1, which the exact form cuts off
        }
        const double error =
            error_of(scores(Sums::exact), {floating.begin(), floating.end()}, Sums::exact);
        INFO(fault.name << ", LSE " << static_cast<int>(form) << ", tokens " << d.tokens);
        CHECK(error < 2e-6);
      }
    }
  }
}

TEST_CASE("exact_window: probabilities above 1 count as 1", "[exact_window][edge]") {
  const Data d = make_data(1, 2, 16, 40, 4);
  Queries queries(d, 36, 4, LseForm::natural);
  std::fill(queries.lse.begin(), queries.lse.end(), -1e30F);  // every exponential overflows
  TestCache cache(d);
  Observation obs;
  obs.queries = queries.block;
  WindowParams params{.window = 4, .kernel = 1};
  params.sums = Sums::exact;
  const auto got = scores_of(WindowScorer(params), cache.view(), SequenceId{0}, HeadId{0}, obs);
  for (std::size_t r = 0; r < 36; ++r) { CHECK(got[r] == 1.0F); }
}

TEST_CASE(
    "exact_window: probabilities that attention computed are reduced to the same bits in any order",
    "[exact_window][property]") {
  std::mt19937 rng(5);
  std::uniform_real_distribution<float> share(0, 0.01F);
  constexpr std::int32_t rows = 100, group = 4, votes = 6;
  std::vector<float> p(at(group * votes * rows));
  for (float& x : p) { x = share(rng); }
  for (const Reduction over_rows : all_reductions) {
    for (const Reduction heads : all_reductions) {
      const WindowParams params = exact_params(votes, over_rows, heads);
      const auto scores = [&](const std::vector<float>& from) {
        std::vector<float> scratch(rows), out(rows);
        score_window(params, {from.data(), group, votes, votes * rows, rows}, scratch, out);
        return out;
      };
      std::vector<float> other(p.size());
      const auto heads_order = shuffled(group, 6), votes_order = shuffled(votes, 7);
      for (std::int32_t g = 0; g < group; ++g) {
        for (std::int32_t i = 0; i < votes; ++i) {
          std::copy_n(p.data() + (heads_order[at(g)] * votes + votes_order[at(i)]) * rows,
                      rows,
                      other.data() + (g * votes + i) * rows);
        }
      }
      CHECK(bits_of(scores(p)) == bits_of(scores(other)));
      WindowParams floating = params;
      floating.sums = Sums::floating;
      std::vector<float> scratch(rows), out(rows);
      score_window(floating, {p.data(), group, votes, votes * rows, rows}, scratch, out);
      CHECK(error_of(scores(p), {out.begin(), out.end()}, Sums::exact) < 1e-6);
    }
  }
}

TEST_CASE("exact_window: more addends than 64 bits hold are refused", "[exact_window][edge]") {
  CHECK_NOTHROW(WindowParams{.window = 16'777'216}.check("who"));
  WindowParams params{.window = 16'777'216};
  params.sums = Sums::exact;
  const auto text_of = [](auto&& make) -> std::string {
    try {
      make();
    } catch (const std::invalid_argument& e) { return e.what(); }
    return "not refused";
  };
  const std::string numbers = "an exact sum of 16777216 addends, but 64 bits hold at most 16777215";
  CHECK(text_of([&] { params.check("who"); }) == "who: " + numbers);
  CHECK(text_of([] {
          SnapKVSelector<>({.window = 16'777'216, .budget = 20'000'000, .sums = Sums::exact});
        }) == "kvtrim::SnapKVSelector: " + numbers);
  // Rows and heads are known from the view and the queries alone; nothing is read.
  const Data d = make_data(1, 2, 16, 40, 8);
  TestCache cache(d);
  const Queries queries(d, 36, 4, LseForm::computed);
  Observation obs;
  obs.queries = queries.block;
  params.window = 4;
  CacheView view = cache.view();
  for (const std::int32_t rows : {16'777'215, 16'777'216}) {
    view.states[0].live_rows = rows;
    const std::int32_t lengths[] = {rows};
    view.lengths = lengths;
    const bool fits = rows == 16'777'215;
    CHECK(WindowScorer(params).check(view, obs) == (fits ? Status::ok : Status::bad_observation));
    CHECK(WindowScorer({.window = 4}).check(view, obs) == Status::ok);
  }
  view = cache.view();
  view.states[0].live_rows = 40;
  obs.queries.query_heads = 4'194'304;  // of one KV head, 4 votes each
  CHECK(WindowScorer(params).check(view, obs) == Status::bad_observation);
}
