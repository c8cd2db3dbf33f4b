// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention in double, as a textbook writes it, and caches in every shape to compare it with. Values are multiples of
// 1/64 below 2, which f32, f16 and bf16 all hold exactly: what is stored is what the reference reads.

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/core/arena.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/policy/window_params.hpp>

#include "catch.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace score_test {

using namespace kvtrim;

constexpr float nan_f = std::numeric_limits<float>::quiet_NaN();
constexpr float inf_f = std::numeric_limits<float>::infinity();

inline std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// One layer of one sequence.
struct Data {
  std::int32_t kv_heads = 1;
  std::int32_t group = 1;
  std::int32_t dim = 16;
  std::int32_t tokens = 0;
  std::vector<float> keys;     // [tokens, kv_heads, dim]
  std::vector<float> queries;  // [heads, tokens, dim]

  std::int32_t heads() const { return kv_heads * group; }
  float* key(std::int32_t token, std::int32_t h) {
    return keys.data() + (static_cast<std::ptrdiff_t>(token) * kv_heads + h) * dim;
  }
  const float* key(std::int32_t token, std::int32_t h) const {
    return keys.data() + (static_cast<std::ptrdiff_t>(token) * kv_heads + h) * dim;
  }
  float* query(std::int32_t head, std::int32_t token) {
    return queries.data() + (static_cast<std::ptrdiff_t>(head) * tokens + token) * dim;
  }
  const float* query(std::int32_t head, std::int32_t token) const {
    return queries.data() + (static_cast<std::ptrdiff_t>(head) * tokens + token) * dim;
  }
};

inline Data make_data(std::int32_t kv_heads,
                      std::int32_t group,
                      std::int32_t dim,
                      std::int32_t tokens,
                      std::uint32_t seed) {
  Data d{kv_heads, group, dim, tokens, {}, {}};
  std::mt19937 rng(seed);
  const auto draw = [&] {
    return static_cast<float>(static_cast<std::int32_t>(rng() % 256) - 128) / 64;
  };
  d.keys.resize(at(static_cast<std::int64_t>(tokens) * kv_heads * dim));
  d.queries.resize(at(static_cast<std::int64_t>(tokens) * kv_heads * group * dim));
  std::generate(d.keys.begin(), d.keys.end(), draw);
  std::generate(d.queries.begin(), d.queries.end(), draw);
  return d;
}

// --- the reference ----------------------------------------------------------------------

/// Queries of one KV head and the keys they look at.
struct Head {
  std::vector<std::vector<double>> keys;                  // [row][dim]
  std::vector<std::int32_t> positions;                    // [row]
  std::vector<std::vector<std::vector<double>>> queries;  // [head of the group][i][dim]
  std::vector<std::int32_t> query_positions;              // [i]
  std::vector<std::vector<double>> lse;                   // [head of the group][i]; empty: computed
  double scale = 0;
  double soft_cap = 0;
};

inline std::vector<double> doubles(const float* x, std::int32_t n) {
  return {x, x + n};
}

/// KV head `h`, rows in the order of `tokens` (empty: all, in order), queries of tokens [first, first + count).
inline Head head_of(const Data& d,
                    std::int32_t h,
                    std::int32_t first,
                    std::int32_t count,
                    std::vector<std::int32_t> tokens = {}) {
  if (tokens.empty()) {
    tokens.resize(at(d.tokens));
    std::iota(tokens.begin(), tokens.end(), 0);
  }
  Head out;
  out.scale = 1 / std::sqrt(static_cast<double>(d.dim));
  out.positions = tokens;
  for (const std::int32_t t : tokens) { out.keys.push_back(doubles(d.key(t, h), d.dim)); }
  out.queries.resize(at(d.group));
  for (std::int32_t i = first; i < first + count; ++i) {
    out.query_positions.push_back(i);
    for (std::int32_t g = 0; g < d.group; ++g) {
      out.queries[at(g)].push_back(doubles(d.query(h * d.group + g, i), d.dim));
    }
  }
  return out;
}

inline bool all_finite(const std::vector<double>& x) {
  return std::all_of(x.begin(), x.end(), [](double v) { return std::isfinite(v); });
}
inline bool sees(const Head& p, std::size_t i, std::size_t row) {
  return p.positions[row] <= p.query_positions[i] && all_finite(p.keys[row]);
}
inline double logit_of(const Head& p, std::size_t g, std::size_t i, std::size_t row) {
  const auto& q = p.queries[g][i];
  const double x = p.scale * std::inner_product(q.begin(), q.end(), p.keys[row].begin(), 0.0);
  return p.soft_cap > 0 ? p.soft_cap * std::tanh(x / p.soft_cap) : x;
}
inline double lse_of(const Head& p, std::size_t g, std::size_t i) {
  double sum = 0;
  for (std::size_t r = 0; r < p.keys.size(); ++r) {
    if (sees(p, i, r)) { sum += std::exp(logit_of(p, g, i, r)); }
  }
  return std::log(sum);
}

/// Probabilities [head of the group][i][row]; an empty row where the query has no vote.
using Probabilities3 = std::vector<std::vector<std::vector<double>>>;
inline Probabilities3 probabilities_of(const Head& p) {
  Probabilities3 out(p.queries.size());
  for (std::size_t g = 0; g < p.queries.size(); ++g) {
    for (std::size_t i = 0; i < p.query_positions.size(); ++i) {
      auto& row = out[g].emplace_back();
      const double lse = p.lse.empty() ? lse_of(p, g, i) : p.lse[g][i];
      if (!all_finite(p.queries[g][i]) || !std::isfinite(lse)) { continue; }
      for (std::size_t r = 0; r < p.keys.size(); ++r) {
        row.push_back(sees(p, i, r) ? std::exp(logit_of(p, g, i, r) - lse) : 0.0);
      }
    }
  }
  return out;
}

inline double reduce(Reduction how, const std::vector<double>& x) {
  if (how == Reduction::max) { return *std::max_element(x.begin(), x.end()); }
  const double sum = std::accumulate(x.begin(), x.end(), 0.0);
  return how == Reduction::sum ? sum : sum / static_cast<double>(x.size());
}

/// Rows, then the group, then pooling over columns in position order; window columns 0.
inline std::vector<double> window_scores(const Head& p,
                                         const Probabilities3& probabilities,
                                         const WindowParams& params) {
  const std::size_t rows = p.keys.size();
  std::vector<double> raw_scores;
  for (std::size_t r = 0; r < rows; ++r) {
    std::vector<double> heads;
    for (const auto& head : probabilities) {
      std::vector<double> votes;
      for (const auto& query : head) {
        if (!query.empty()) { votes.push_back(query[r]); }
      }
      if (!votes.empty()) { heads.push_back(reduce(params.rows, votes)); }
    }
    raw_scores.push_back(heads.empty() || !all_finite(p.keys[r])
                             ? std::numeric_limits<double>::quiet_NaN()
                             : reduce(params.group, heads));
  }
  std::vector<std::size_t> order(rows);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return p.positions[a] < p.positions[b];
  });
  const auto n = static_cast<std::int64_t>(rows);
  const std::int64_t scored = std::max<std::int64_t>(0, n - params.window);
  const std::int64_t columns = params.columns == PoolColumns::all_columns ? n : scored;
  std::vector<double> out(rows, 0.0);
  for (std::int64_t i = 0; i < scored; ++i) {
    double sum = 0;
    double largest = std::numeric_limits<double>::quiet_NaN();
    for (std::int64_t j = i - params.kernel / 2; j <= i + params.kernel / 2; ++j) {
      if (j < 0 || j >= columns) { continue; }
      const double x = raw_scores[order[at(j)]];
      sum += x;
      largest = std::fmax(largest, x);  // a NaN loses
    }
    out[order[at(i)]] = params.pooling == Pooling::max ? largest : sum / params.kernel;
  }
  return out;
}

// --- caches ------------------------------------------------------------------------------

struct CacheOptions {
  DType dtype = DType::f32;
  std::int32_t page_size = 4;
  bool shuffled_pages = false;  // pages handed out in random order
  std::int32_t others = 0;      // sequences before and after, as long as the one that is looked at
  bool scores = false;          // planes for accumulated scores
  std::vector<std::int32_t> order = {};  // row r holds token order[r]; empty: in order
  TableScope scope = TableScope::group;
};

/// A cache with one sequence of interest; every byte that was never written is a NaN.
class TestCache {
 public:
  explicit TestCache(const Data& d, const CacheOptions& o = {})
      : data_(d), options_(o), cache_(params_of(d, o)) {
    PagePool& pool = cache_.pool();
    if (o.shuffled_pages) {
      std::vector<PageId> pages;
      while (const auto p = pool.try_acquire()) { pages.push_back(*p); }
      std::shuffle(pages.begin(), pages.end(), std::mt19937(99));
      for (const PageId p : pages) { pool.release(p); }
    }
    const CacheView view = cache_.view();
    std::memset(view.k.base, 0xFF, at(view.k.page_stride * view.pages));
    std::vector<float> other(d.keys.size(), 1.5F);
    for (std::int32_t i = 0; i < o.others; ++i) { append(other, d.tokens + i % 3); }
    sequence_ = append(keys_in_order(), d.tokens);
    for (std::int32_t i = 0; i < o.others; ++i) {
      append(other, d.tokens - std::min(d.tokens, i % 3));
    }
    if (!o.order.empty()) {
      for (std::int32_t h = 0; h < d.kv_heads; ++h) {
        for (std::int32_t r = 0; r < d.tokens; ++r) {
          view.positions.at<Position>(sequence_, LayerId{0}, HeadId{h}, r) =
              Position{o.order[at(r)]};
        }
      }
      for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
        view.states[raw(sequence_) * view.tables_per_sequence() + t].ordered = false;
      }
    }
  }

  CacheView view() { return cache_.view(); }
  PagedCache& cache() { return cache_; }
  SequenceId sequence() const { return sequence_; }

 private:
  static PagedCache::Params params_of(const Data& d, const CacheOptions& o) {
    PagedCache::Params p;
    p.page_size = o.page_size;
    p.kv_heads = d.kv_heads;
    p.key_dim = d.dim;
    p.value_dim = 1;
    p.dtype = o.dtype;
    p.scope = o.scope;
    p.max_sequences = 1 + 2 * o.others;
    p.max_rows = d.tokens + 3;
    p.pages = (pages_for(p.max_rows, p.page_size) * p.max_sequences + 3) *
              (o.scope == TableScope::head ? d.kv_heads : 1);
    p.scores = o.scores;
    return p;
  }
  std::vector<float> keys_in_order() const {
    if (options_.order.empty()) { return data_.keys; }
    std::vector<float> out;
    for (const std::int32_t t : options_.order) {
      out.insert(out.end(), data_.key(t, 0), data_.key(t, 0) + data_.kv_heads * data_.dim);
    }
    return out;
  }
  SequenceId append(std::vector<float> keys, std::int32_t tokens) {
    keys.resize(at(static_cast<std::int64_t>(tokens) * data_.kv_heads * data_.dim), 1.5F);
    const std::vector<float> values(at(static_cast<std::int64_t>(tokens) * data_.kv_heads), 0.0F);
    const auto s = cache_.try_create();
    REQUIRE(s.has_value());
    REQUIRE(cache_.try_extend(*s, tokens) == Status::ok);
    REQUIRE(cache_.write(*s, LayerId{0}, {keys.data()}, {values.data()}) ==
            (tokens == 0 ? Status::no_open_step : Status::ok));
    return *s;
  }

  const Data& data_;
  CacheOptions options_;
  PagedCache cache_;
  SequenceId sequence_{};
};

enum class LseForm { computed, natural, binary };

/// Queries of tokens [first, first + count) for every sequence of a batch alike.
struct Queries {
  Queries(const Data& d, std::int32_t first, std::int32_t count, LseForm form) {
    block.data = d.queries.data() + static_cast<std::ptrdiff_t>(first) * d.dim;
    block.query_heads = d.heads();
    block.rows = count;
    block.head_stride = static_cast<std::int64_t>(d.tokens) * d.dim;
    block.row_stride = d.dim;
    if (form == LseForm::computed) { return; }
    set_lse(d, first, count, form, {});
  }
  Queries(const Queries&) = delete;
  Queries& operator=(const Queries&) = delete;

  /// LSE of the logits that `change` (scale, cap, keys) makes of the plain ones.
  template <class Change>
  void set_lse(const Data& d, std::int32_t first, std::int32_t count, LseForm form, Change change) {
    lse.clear();
    for (std::int32_t h = 0; h < d.kv_heads; ++h) {
      Head p = head_of(d, h, first, count);
      change(p);
      for (std::int32_t g = 0; g < d.group; ++g) {
        for (std::int32_t i = 0; i < count; ++i) {
          const double x = lse_of(p, at(g), at(i));
          lse.push_back(static_cast<float>(form == LseForm::binary ? x / std::log(2.0) : x));
        }
      }
    }
    block.lse = lse.data();
    block.lse_head_stride = count;
    block.lse_base = form == LseForm::binary ? LseBase::two : LseBase::e;
  }
  void set_lse(
      const Data& d, std::int32_t first, std::int32_t count, LseForm form, std::nullptr_t = {}) {
    set_lse(d, first, count, form, [](Head&) {});
  }

  QueryBlock block;
  std::vector<float> lse;  // [heads, count]
};

/// Memory for one call, filled with NaN before.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes, unsigned char fill = 0xFF)
      : bytes_(bytes, static_cast<std::byte>(fill)) {}
  operator std::span<std::byte>() { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

template <class S>
std::vector<float> scores_of(const S& scorer,
                             const CacheView& view,
                             SequenceId s,
                             HeadId h,
                             const Observation& obs,
                             unsigned char fill = 0xFF) {
  const LayerId l{0};
  REQUIRE(scorer.check(view, obs) == Status::ok);
  Scratch scratch(scorer.scratch_bytes(plan_shape(view, obs)), fill);
  const std::int32_t hole = view.state(s, l, h).append_row >= 0 ? 1 : 0;
  std::vector<float> out(at(view.live_rows(s, l, h) + hole), -7.0F);
  scorer.score({view, s, l, h}, obs, scratch, out);
  return out;
}

// --- comparing ---------------------------------------------------------------------------

/// Largest |got - expected|, relative to |expected|; infinite where one alone is NaN or the sizes differ. Scores of
/// probabilities that are summed exactly are also rounded to units, which is not counted.
inline double error_of(const std::vector<float>& got,
                       const std::vector<double>& expected,
                       Sums sums = Sums::floating) {
  const double allowed = sums == Sums::exact ? 2 / exact_one : 0;
  if (got.size() != expected.size()) { return HUGE_VAL; }
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto x = static_cast<double>(got[i]);
    const double y = expected[i];
    if (std::isnan(x) != std::isnan(y)) { return HUGE_VAL; }
    if (std::isnan(x) || x == y) { continue; }
    worst = std::max(worst, std::max(0.0, std::fabs(x - y) - allowed) / std::fabs(y));
  }
  return worst;
}

inline std::vector<std::uint32_t> bits_of(const std::vector<float>& x) {
  std::vector<std::uint32_t> out;
  for (const float v : x) { out.push_back(std::bit_cast<std::uint32_t>(v)); }
  return out;
}

inline std::vector<std::int32_t> shuffled(std::int32_t n, std::uint32_t seed) {
  std::vector<std::int32_t> out(at(n));
  std::iota(out.begin(), out.end(), 0);
  std::shuffle(out.begin(), out.end(), std::mt19937(seed));
  return out;
}

/// Runs the items in a random order, on random workers.
struct Shuffled {
  std::int32_t count = 3;
  std::uint32_t seed = 1;
  std::int32_t workers() const { return count; }
  template <class F>
  void for_each(std::int64_t n, F&& f) const noexcept {
    std::mt19937 rng(seed);
    for (const std::int32_t item : shuffled(static_cast<std::int32_t>(n), seed)) {
      f(std::int64_t{item}, static_cast<std::int32_t>(rng() % static_cast<std::uint32_t>(count)));
    }
  }
};
static_assert(Executor<Shuffled>);

}  // namespace score_test
