// SPDX-License-Identifier: Apache-2.0
#pragma once

// A cache in which every number is a function of what it belongs to, and an observation with all that any method needs:
// queries, filters, statistics, W_O, accumulated attention. Whatever moved, the row at a position can be checked.

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/evict/evict.hpp>
#include <kvtrim/evict/planner.hpp>
#include "catch.hpp"
#include "support/instances.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <stdexcept>
#include <vector>

namespace kvtrim::test {

/// What the keys of a world look like.
enum class Keys : std::uint8_t { random, constant, zero };

/// How a view's keys lie in memory.
enum class Layout : std::uint8_t { nhd, hnd, packed, transposed };

struct MethodSetup {
  std::int32_t layers = 2;
  std::int32_t kv_heads = 2;
  std::int32_t group = 3;
  std::int32_t dim = 8;
  std::int32_t value_dim = 6;
  std::int32_t hidden = 10;
  std::int32_t window = 8;  ///< queries of the observation, at most
  std::int32_t page_size = 4;
  std::int32_t sequences = 1;
  std::int32_t max_rows = 96;
  TableScope scope = TableScope::group;
  DType dtype = DType::f32;  ///< all numbers are exact in each of f32, f16, bf16
  bool shuffled = false;     ///< pages handed out in no order
  std::int32_t first_name =
      0;  ///< sequence s holds what sequence first_name + s of another world holds
  Keys keys = Keys::random;
  bool value_in_key = false;        ///< a value is the first features of its key (MLA)
  std::set<std::int32_t> bad = {};  ///< positions whose keys and values are NaN, in all heads
};

class MethodWorld {
 public:
  explicit MethodWorld(const MethodSetup& setup) : setup_(setup), cache_(params_of(setup)) {
    if (setup.shuffled) {
      std::vector<PageId> taken;
      while (const auto p = cache_.pool().try_acquire()) { taken.push_back(*p); }
      Random random(17);
      for (std::size_t i = taken.size(); i > 1; --i) {
        std::swap(taken[i - 1], taken[at(random.below(static_cast<std::int32_t>(i)))]);
      }
      for (const PageId p : taken) { cache_.pool().release(p); }
    }
    for (std::int32_t s = 0; s < setup.sequences; ++s) {
      if (!cache_.try_create()) { throw std::runtime_error("no sequence"); }
    }
    const std::int32_t heads = setup.kv_heads * setup.group;
    for (std::int32_t l = 0; l < setup.layers; ++l) {
      for (std::int32_t h = 0; h < setup.kv_heads; ++h) { add(filters_, 3, 0, l, h, 0, setup.dim); }
      for (std::int32_t h = 0; h < heads; ++h) {
        for (std::int32_t d = 0; d < setup.value_dim; ++d) {
          add(output_, 4, 0, l, h, d, setup.hidden);
        }
        add(means_, 5, 0, l, h, 0, setup.dim);
        // A covariance: a multiple of the identity and one direction more.
        const auto x = numbers(6, 0, l, h, 0, setup.dim);
        for (std::int32_t i = 0; i < setup.dim; ++i) {
          for (std::int32_t j = 0; j < setup.dim; ++j) {
            covariances_.push_back(x[at(i)] * x[at(j)] / 8 + (i == j ? 0.25F : 0.0F));
          }
        }
      }
    }
  }

  /// `n` numbers of [-2, 2), exact in 16-bit floats.
  static std::vector<float> numbers(std::int32_t kind,
                                    std::int32_t name,
                                    std::int32_t l,
                                    std::int32_t h,
                                    std::int32_t position,
                                    std::int32_t n) {
    Random random(((static_cast<std::uint64_t>(kind) * 64 + static_cast<std::uint64_t>(name)) * 64 +
                   static_cast<std::uint64_t>(l * 8 + h)) *
                      4096 +
                  static_cast<std::uint64_t>(position));
    std::vector<float> out(at(n));
    for (float& x : out) { x = static_cast<float>(random.below(256) - 128) / 64; }
    return out;
  }
  std::vector<float> key(std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t p) const {
    auto out = numbers(0, s + setup_.first_name, l, h, p, setup_.dim);
    if (setup_.keys == Keys::constant) { std::fill(out.begin(), out.end(), 1.5F); }
    if (setup_.keys == Keys::zero) { std::fill(out.begin(), out.end(), 0.0F); }
    if (setup_.bad.contains(p)) { out[at(p % setup_.dim)] = nan(); }
    return out;
  }
  std::vector<float> value(std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t p) const {
    auto out = numbers(1, s + setup_.first_name, l, h, p, setup_.value_dim);
    if (setup_.value_in_key) {
      out = key(s, l, h, p);
      out.resize(at(setup_.value_dim));
    }
    if (setup_.bad.contains(p)) { out[at(p % setup_.value_dim)] = nan(); }
    return out;
  }
  std::vector<float> query(std::int32_t s,
                           std::int32_t l,
                           std::int32_t head,
                           std::int32_t p) const {
    return numbers(2, s + setup_.first_name, l, head, p, setup_.dim);
  }
  /// The score that the caller gives a row: few values, so that some are equal.
  float given(std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t p) const {
    if (setup_.bad.contains(p)) { return nan(); }
    return static_cast<float>(
        static_cast<std::int32_t>(4 * numbers(7, s + setup_.first_name, l, h, p, 1)[0]));
  }

  /// Appends the next `n` tokens of sequence `s`; their attention is accumulated.
  Status append(std::int32_t s, std::int32_t n) {
    const SequenceId id{s};
    const std::int32_t first = raw(cache_.next_position(id));
    if (const Status status = cache_.try_extend(id, n); status != Status::ok) { return status; }
    for (std::int32_t l = 0; l < setup_.layers; ++l) {
      std::vector<float> keys, values;
      for (std::int32_t p = first; p < first + n; ++p) {
        for (std::int32_t h = 0; h < setup_.kv_heads; ++h) {
          const auto k = key(s, l, h, p);
          const auto v = value(s, l, h, p);
          keys.insert(keys.end(), k.begin(), k.end());
          values.insert(values.end(), v.begin(), v.end());
        }
      }
      REQUIRE((n == 0 ||
               cache_.write(id, LayerId{l}, {keys.data()}, {values.data()}) == kvtrim::Status::ok));
    }
    for_each_row(s, [&](std::int32_t l, std::int32_t h, std::int32_t r, std::int32_t p) {
      if (p >= first) {
        view().score_sums.at<float>(id, LayerId{l}, HeadId{h}, r) = 3 + given(s, l, h, p);
      }
    });
    return Status::ok;
  }

  /// Everything that a method may need, for the cache as it is now; ready-made scores only on request.
  Observation observation(bool with_scores = false) {
    const std::int32_t heads = setup_.kv_heads * setup_.group;
    queries_.clear();
    counts_.clear();
    for (std::int32_t s = 0; s < setup_.sequences; ++s) {
      const std::int32_t next = raw(cache_.next_position(SequenceId{s}));
      counts_.push_back(std::min(next, setup_.window));
      for (std::int32_t l = 0; l < setup_.layers; ++l) {
        for (std::int32_t h = 0; h < heads; ++h) {
          for (std::int32_t i = 0; i < setup_.window; ++i) {
            const std::int32_t p = std::max(0, next - counts_.back() + i);
            add(queries_, query(s, l, h, p));
          }
        }
      }
    }
    Observation obs;
    QueryBlock& q = obs.queries;
    q.data = queries_.data();
    q.query_heads = heads;
    q.rows = setup_.window;
    q.row_counts = counts_.data();
    q.row_stride = setup_.dim;
    q.head_stride = static_cast<std::int64_t>(setup_.window) * setup_.dim;
    q.layer_stride = heads * q.head_stride;
    q.sequence_stride = setup_.layers * q.layer_stride;
    obs.filters = {filters_.data(),
                   setup_.dim,
                   static_cast<std::int64_t>(setup_.kv_heads) * setup_.dim,
                   setup_.dim};
    obs.statistics = {means_.data(), covariances_.data(), heads, setup_.dim, setup_.layers, false};
    obs.output = {output_.data(),
                  heads,
                  setup_.value_dim,
                  setup_.hidden,
                  static_cast<std::int64_t>(heads) * setup_.value_dim * setup_.hidden};
    if (!with_scores) { return obs; }
    scores_.assign(
        at(setup_.sequences) * at(setup_.layers) * at(setup_.kv_heads) * at(setup_.max_rows),
        -7.0F);
    obs.scores =
        SequencePlane::dense(scores_.data(), setup_.layers, setup_.kv_heads, setup_.max_rows);
    for (std::int32_t s = 0; s < setup_.sequences; ++s) {
      for_each_row(s, [&](std::int32_t l, std::int32_t h, std::int32_t r, std::int32_t p) {
        obs.scores.at<float>(SequenceId{s}, LayerId{l}, HeadId{h}, r) = given(s, l, h, p);
      });
    }
    return obs;
  }

  template <Policy P>
  Report evict(const P& policy, const Observation& obs, const PlanOptions& options = {}) {
    const CacheView v = view();
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(v, obs)));
    return kvtrim::evict(policy, cache_, v, obs, workspace, options);
  }

  /// Positions of the live rows in slot order.
  std::vector<std::int32_t> positions(std::int32_t s, std::int32_t l, std::int32_t h) {
    std::vector<std::int32_t> out;
    for_each_row(s, [&](std::int32_t row_l, std::int32_t row_h, std::int32_t, std::int32_t p) {
      if (row_l == l && row_h == h) { out.push_back(p); }
    });
    return out;
  }
  /// The same for all layers and heads, one after the other, each sorted.
  std::vector<std::vector<std::int32_t>> kept(std::int32_t s) {
    std::vector<std::vector<std::int32_t>> out;
    for (std::int32_t l = 0; l < setup_.layers; ++l) {
      for (std::int32_t h = 0; h < setup_.kv_heads; ++h) {
        out.push_back(positions(s, l, h));
        std::sort(out.back().begin(), out.back().end());
      }
    }
    return out;
  }
  /// Whether every live row has key, value and accumulated score of its position. f32 only.
  bool rows_belong_to_their_positions() {
    bool right = true;
    const CacheView v = view();
    for (std::int32_t s = 0; s < setup_.sequences; ++s) {
      for_each_row(s, [&](std::int32_t l, std::int32_t h, std::int32_t r, std::int32_t p) {
        const SequenceId id{s};
        const auto k = key(s, l, h, p);
        const auto x = value(s, l, h, p);
        const float sum = 3 + given(s, l, h, p);
        right = right &&
                std::memcmp(v.key(id, LayerId{l}, HeadId{h}, r), k.data(), k.size() * 4) == 0 &&
                std::memcmp(v.value(id, LayerId{l}, HeadId{h}, r), x.data(), x.size() * 4) == 0 &&
                std::memcmp(v.score_sums.row(id, LayerId{l}, HeadId{h}, r), &sum, 4) == 0;
      });
    }
    return right;
  }

  /// A view of the same pages whose keys were copied to another layout.
  CacheView relaid(Layout layout) {
    CacheView v = cache_.view();
    const bool per_head = setup_.scope == TableScope::head;
    const PlaneShape shape{
        setup_.page_size, per_head ? 1 : setup_.kv_heads, setup_.dim, DType::f32};
    const std::int64_t floats =
        static_cast<std::int64_t>(v.pages) * setup_.page_size * shape.kv_heads * setup_.dim;
    copy_.assign(at(floats * setup_.layers), nan());
    Plane to = layout == Layout::nhd      ? Plane::nhd(copy_.data(), shape)
               : layout == Layout::hnd    ? Plane::hnd(copy_.data(), shape)
               : layout == Layout::packed ? Plane::vllm_packed_keys(copy_.data(), shape)
                                          : Plane::transposed(copy_.data(), shape);
    to.layer_stride = setup_.scope == TableScope::group ? floats * 4 : 0;
    if (per_head) { to.head_stride = 0; }
    for (std::int32_t s = 0; s < setup_.sequences; ++s) {
      for_each_row(s, [&](std::int32_t l, std::int32_t h, std::int32_t r, std::int32_t) {
        const SequenceId id{s};
        std::vector<float> row(at(setup_.dim));
        load_row(v.k, v.key(id, LayerId{l}, HeadId{h}, r), row.data());
        const PageId page = v.k_page(id, LayerId{l}, HeadId{h}, r / setup_.page_size);
        store_row(to, to.row(LayerId{l}, page, HeadId{h}, Slot{r % setup_.page_size}), row.data());
      });
    }
    v.k = to;
    return v;
  }

  /// Calls f(layer, head, row, position) for each live row.
  template <class F>
  void for_each_row(std::int32_t s, F&& f) {
    const CacheView v = cache_.view();
    for (std::int32_t l = 0; l < setup_.layers; ++l) {
      for (std::int32_t h = 0; h < setup_.kv_heads; ++h) {
        const SequenceState state = v.state(SequenceId{s}, LayerId{l}, HeadId{h});
        for (std::int32_t r = 0; r < state.extent(); ++r) {
          if (r == state.append_row) { continue; }
          f(l, h, r, raw(v.position(SequenceId{s}, LayerId{l}, HeadId{h}, r)));
        }
      }
    }
  }

  CacheView view() { return cache_.view(); }
  PagedCache& cache() { return cache_; }
  const MethodSetup& setup() const { return setup_; }

 private:
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  static float nan() { return std::numeric_limits<float>::quiet_NaN(); }
  static void add(std::vector<float>& to, const std::vector<float>& x) {
    to.insert(to.end(), x.begin(), x.end());
  }
  static void add(std::vector<float>& to,
                  std::int32_t kind,
                  std::int32_t name,
                  std::int32_t l,
                  std::int32_t h,
                  std::int32_t position,
                  std::int32_t n) {
    add(to, numbers(kind, name, l, h, position, n));
  }
  static PagedCache::Params params_of(const MethodSetup& s) {
    return {.pages = s.sequences * tables_of(s.scope, s.layers, s.kv_heads) *
                     (pages_for(s.max_rows, s.page_size) + 1),
            .page_size = s.page_size,
            .layers = s.layers,
            .kv_heads = s.kv_heads,
            .key_dim = s.dim,
            .value_dim = s.value_dim,
            .dtype = s.dtype,
            .scope = s.scope,
            .max_sequences = s.sequences,
            .max_rows = s.max_rows,
            .scores = true};
  }

  MethodSetup setup_;
  PagedCache cache_;
  std::vector<float> queries_, filters_, output_, means_, covariances_, scores_, copy_;
  std::vector<std::int32_t> counts_;
};

}  // namespace kvtrim::test
