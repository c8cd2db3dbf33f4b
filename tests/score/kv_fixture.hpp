// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys and values of one layer in caches of every shape, for scores that look at both. Numbers are multiples of 1/64
// below 2, which f32, f16 and bf16 all hold exactly.

#include "score_fixture.hpp"

#include <kvtrim/cache/paged_cache.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace score_test {

/// Keys and values of one sequence.
struct KvData {
  std::int32_t kv_heads = 1;
  std::int32_t dim = 16;
  std::int32_t value_dim = 16;
  std::int32_t tokens = 0;
  std::vector<float> keys;    // [tokens, kv_heads, dim]
  std::vector<float> values;  // [tokens, kv_heads, value_dim]

  float* key(std::int32_t token, std::int32_t h) {
    return keys.data() + (static_cast<std::ptrdiff_t>(token) * kv_heads + h) * dim;
  }
  float* value(std::int32_t token, std::int32_t h) {
    return values.data() + (static_cast<std::ptrdiff_t>(token) * kv_heads + h) * value_dim;
  }
  const float* key(std::int32_t token, std::int32_t h) const {
    return keys.data() + (static_cast<std::ptrdiff_t>(token) * kv_heads + h) * dim;
  }
  const float* value(std::int32_t token, std::int32_t h) const {
    return values.data() + (static_cast<std::ptrdiff_t>(token) * kv_heads + h) * value_dim;
  }
};

inline KvData make_kv(std::int32_t kv_heads,
                      std::int32_t dim,
                      std::int32_t value_dim,
                      std::int32_t tokens,
                      std::uint32_t seed) {
  KvData d{kv_heads, dim, value_dim, tokens, {}, {}};
  std::mt19937 rng(seed);
  const auto draw = [&] {
    return static_cast<float>(static_cast<std::int32_t>(rng() % 256) - 128) / 64;
  };
  d.keys.resize(at(static_cast<std::int64_t>(tokens) * kv_heads * dim));
  d.values.resize(at(static_cast<std::int64_t>(tokens) * kv_heads * value_dim));
  std::generate(d.keys.begin(), d.keys.end(), draw);
  std::generate(d.values.begin(), d.values.end(), draw);
  return d;
}

/// A cache with one sequence of interest; every byte that was never written is a NaN.
class KvCache {
 public:
  explicit KvCache(const KvData& d, const CacheOptions& o = {}) : cache_(params_of(d, o)) {
    PagePool& pool = cache_.pool();
    if (o.shuffled_pages) {
      std::vector<PageId> pages;
      while (const auto p = pool.try_acquire()) { pages.push_back(*p); }
      std::shuffle(pages.begin(), pages.end(), std::mt19937(99));
      for (const PageId p : pages) { pool.release(p); }
    }
    const CacheView view = cache_.view();
    std::memset(view.k.base, 0xFF, at(view.k.page_stride * view.pages));
    std::memset(view.v.base, 0xFF, at(view.v.page_stride * view.pages));
    KvData other = d;
    std::reverse(other.keys.begin(), other.keys.end());
    for (std::int32_t i = 0; i < o.others; ++i) { append(other); }
    KvData rows = d;
    for (std::int32_t r = 0; r < d.tokens && !o.order.empty(); ++r) {
      std::copy_n(d.key(o.order[at(r)], 0), d.kv_heads * d.dim, rows.key(r, 0));
      std::copy_n(d.value(o.order[at(r)], 0), d.kv_heads * d.value_dim, rows.value(r, 0));
    }
    sequence_ = append(rows);
    for (std::int32_t i = 0; i < o.others; ++i) { append(other); }
    for (std::int32_t h = 0; h < d.kv_heads && !o.order.empty(); ++h) {
      for (std::int32_t r = 0; r < d.tokens; ++r) {
        view.positions.at<Position>(sequence_, LayerId{0}, HeadId{h}, r) = Position{o.order[at(r)]};
      }
    }
    for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
      view.states[raw(sequence_) * view.tables_per_sequence() + t].ordered = o.order.empty();
    }
  }

  CacheView view() { return cache_.view(); }
  PagedCache& cache() { return cache_; }
  SequenceId sequence() const { return sequence_; }

 private:
  static PagedCache::Params params_of(const KvData& d, const CacheOptions& o) {
    PagedCache::Params p;
    p.page_size = o.page_size;
    p.kv_heads = d.kv_heads;
    p.key_dim = d.dim;
    p.value_dim = d.value_dim;
    p.dtype = o.dtype;
    p.scope = o.scope;
    p.max_sequences = 1 + 2 * o.others;
    p.max_rows = d.tokens + 3;
    p.pages = (pages_for(p.max_rows, p.page_size) * p.max_sequences + 3) *
              (o.scope == TableScope::head ? d.kv_heads : 1);
    return p;
  }
  SequenceId append(const KvData& d) {
    const auto s = cache_.try_create();
    REQUIRE(s.has_value());
    REQUIRE(cache_.try_extend(*s, d.tokens) == Status::ok);
    REQUIRE(cache_.write(*s, LayerId{0}, {d.keys.data()}, {d.values.data()}) == kvtrim::Status::ok);
    return *s;
  }

  PagedCache cache_;
  SequenceId sequence_{};
};

/// Rows [tokens][dim] of one KV head in double, in position order.
inline std::vector<std::vector<double>> keys_of(const KvData& d, std::int32_t h) {
  std::vector<std::vector<double>> out;
  for (std::int32_t t = 0; t < d.tokens; ++t) { out.push_back(doubles(d.key(t, h), d.dim)); }
  return out;
}
inline std::vector<std::vector<double>> values_of(const KvData& d, std::int32_t h) {
  std::vector<std::vector<double>> out;
  for (std::int32_t t = 0; t < d.tokens; ++t) {
    out.push_back(doubles(d.value(t, h), d.value_dim));
  }
  return out;
}

/// Scores by token that rows in `order` should have.
inline std::vector<double> in_order(const std::vector<double>& by_token,
                                    const std::vector<std::int32_t>& order) {
  std::vector<double> out;
  for (const std::int32_t t : order) { out.push_back(by_token[at(t)]); }
  return out;
}

/// Calls f(cache, options, description) for caches that must give the same bits.
template <class F>
void for_each_place(const KvData& d, F&& f) {
  for (const std::int32_t page_size : {16, 1, 3, 4, 32}) {
    for (const bool alone : {true, false}) {
      KvCache c(d, {.page_size = page_size, .shuffled_pages = !alone, .others = alone ? 0 : 2});
      INFO("page size " << page_size << ", alone " << alone);
      f(c);
    }
  }
  KvCache per_head(d, {.page_size = 16, .scope = TableScope::head});
  INFO("one table per head");
  f(per_head);
}

}  // namespace score_test
