// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the fault tests share: caches whose rows say which token they are, evictions with scores by position, and a
// rotation in double that does not call the library. The value of a row is {tag, layer * 16 + head}; its key is a fixed
// function of (tag, layer, head), rotated to the row's rope position where the cache has a rotation.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/evict/rerotate.hpp>
#include <kvtrim/observe/query_ring.hpp>

#include "catch.hpp"
#include "support/fill.hpp"
#include "support/instances.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kvtrim::fault {

using Rows = std::vector<std::int32_t>;

inline std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// first, first + 1, ..., last - 1.
inline Rows range(std::int32_t first, std::int32_t last) {
  Rows out(index(std::max(0, last - first)));
  std::iota(out.begin(), out.end(), first);
  return out;
}
inline Rows operator+(Rows a, const Rows& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// A number in (-1, 1) that depends on all of the arguments and on nothing else.
inline float noise(std::int32_t a, std::int32_t b = 0, std::int32_t c = 0, std::int32_t d = 0) {
  std::uint64_t x = 0x9E37'79B9'7F4A'7C15U;
  for (const std::int32_t i : {a, b, c, d}) {
    x = (x ^ static_cast<std::uint32_t>(i)) * 0xD6E8'FEB8'6659'FD93U;
    x ^= x >> 32U;
  }
  return static_cast<float>(x >> 40U) / 8'388'608.0F - 1.0F;
}

/// RoPE of a model, and its plain form in double.
struct Rotation {
  std::vector<double> frequencies;  ///< [layers, dim / 2], or [dim / 2] for all layers
  std::int32_t dim = 0;
  std::int32_t offset = 0;
  RopePairs pairs = RopePairs::half_split;
  bool same_for_all_layers = true;

  [[nodiscard]] Rope rope() const {
    Rope r;
    r.inverse_frequencies = frequencies;
    r.dim = dim;
    r.offset = offset;
    r.pairs = pairs;
    r.same_for_all_layers = same_for_all_layers;
    return r;
  }

  [[nodiscard]] std::vector<double> turn(std::vector<double> key,
                                         std::int64_t delta,
                                         std::int32_t layer = 0) const {
    const std::size_t half = index(dim / 2);
    for (std::size_t j = 0; j < half; ++j) {
      const double angle = static_cast<double>(delta) *
                           frequencies[(same_for_all_layers ? 0 : half * index(layer)) + j];
      const std::size_t first =
          index(offset) + (pairs == RopePairs::half_split ? j : std::size_t{2} * j);
      const std::size_t second = first + (pairs == RopePairs::half_split ? half : 1);
      const double x = key[first];
      const double y = key[second];
      key[first] = x * std::cos(angle) - y * std::sin(angle);
      key[second] = x * std::sin(angle) + y * std::cos(angle);
    }
    return key;
  }
};

/// Half-split RoPE with base 10,000 over the whole head, the same for all layers.
inline Rotation plain_rotation(std::int32_t dim, double base = 10'000.0) {
  Rotation r;
  for (std::int32_t j = 0; j < dim / 2; ++j) {
    r.frequencies.push_back(std::pow(base, -2.0 * j / dim));
  }
  r.dim = dim;
  return r;
}

template <class T>
std::vector<double> to_double(const std::vector<T>& v) {
  return {v.begin(), v.end()};
}

/// Largest absolute difference.
template <class A, class B>
double distance(const std::vector<A>& a, const std::vector<B>& b) {
  double d = a.size() == b.size() ? 0.0 : std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double x = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    d = std::isnan(x) ? std::numeric_limits<double>::infinity() : std::max(d, x);
  }
  return d;
}

/// One live row, as a reader of the cache sees it.
struct Row {
  std::int32_t row = 0;
  std::int32_t position = 0;
  std::int32_t rope = 0;
  std::int32_t tag = 0;
  bool own = false;  ///< the value is of this layer and head
  std::vector<float> key;
};

/// A `PagedCache` with tagged rows.
class TestCache {
 public:
  explicit TestCache(const PagedCache::Params& params) : cache(params) {
    test::fill_unwritten(cache);
  }

  PagedCache cache;
  std::optional<Rotation> rotation;  ///< keys are rotated to their rope position; none: raw
  std::function<std::vector<float>(std::int32_t, std::int32_t, std::int32_t)> raw_key =
      [this](std::int32_t tag, std::int32_t l, std::int32_t h) {
        std::vector<float> key(index(cache.params().key_dim));
        for (std::size_t d = 0; d < key.size(); ++d) {
          key[d] = noise(tag, l, h, static_cast<std::int32_t>(d));
        }
        return key;
      };

  SequenceId create() { return cache.try_create().value(); }

  /// A sequence of `n` tokens.
  SequenceId filled(std::int32_t n) {
    const SequenceId s = create();
    if (append(s, n) != Status::ok) { throw std::runtime_error("the pool is too small"); }
    return s;
  }

  /// One step: `n` tokens, tagged 1000 * sequence + position unless a first tag is given.
  Status append(SequenceId s, std::int32_t n, std::int32_t first_tag = -1) {
    const auto& p = cache.params();
    if (first_tag < 0) { first_tag = 1000 * raw(s) + raw(cache.next_position(s)); }
    const Status status = cache.try_extend(s, n);
    if (status != Status::ok) { return status; }
    for (std::int32_t l = 0; l < p.layers; ++l) {
      std::vector<float> keys, values, unrotated;
      for (std::int32_t i = 0; i < n; ++i) {
        for (std::int32_t h = 0; h < p.kv_heads; ++h) {
          const std::vector<float> key = raw_key(first_tag + i, l, h);
          unrotated.insert(unrotated.end(), key.begin(), key.end());
          std::vector<double> turned = to_double(key);
          if (rotation) {
            const std::int32_t at = cache.next_rope_position(s, LayerId{l}, HeadId{h}) - n + i;
            turned = rotation->turn(turned, at, l);
          }
          for (const double x : turned) { keys.push_back(static_cast<float>(x)); }
          std::vector<float> value(index(p.value_dim), 0.0F);
          value[0] = static_cast<float>(first_tag + i);
          if (value.size() > 1) { value[1] = static_cast<float>(l * 16 + h); }
          values.insert(values.end(), value.begin(), value.end());
        }
      }
      const Status written =
          cache.write(s,
                      LayerId{l},
                      {keys.data()},
                      {values.data()},
                      p.unrotated_keys ? RowSource{unrotated.data()} : RowSource{});
      REQUIRE(written == (n == 0 ? Status::no_open_step : Status::ok));
    }
    return status;
  }

  /// The live rows in slot order.
  std::vector<Row> rows(SequenceId s, std::int32_t l = 0, std::int32_t h = 0) {
    std::vector<Row> out;
    const CacheView view = cache.view(s);
    const LayerId layer{l};
    const HeadId head{h};
    for_each_run({view, SequenceId{0}, layer, head}, [&](const Run& run) {
      for (std::int32_t i = 0; i < run.count; ++i) {
        const Slot slot{raw(run.slot) + i};
        Row r;
        r.row = run.row + i;
        r.position = raw(view.position(SequenceId{0}, layer, head, r.row));
        r.rope = view.rope_position(SequenceId{0}, layer, head, r.row);
        r.key.resize(index(view.k.head_dim));
        load_row(view.k, view.k.row(layer, run.k_page, head, slot), r.key.data());
        std::vector<float> value(index(view.v.head_dim));
        load_row(view.v, view.v.row(layer, run.v_page, head, slot), value.data());
        r.tag = static_cast<std::int32_t>(value[0]);
        r.own = value.size() < 2 || value[1] == static_cast<float>(l * 16 + h);
        out.push_back(std::move(r));
      }
    });
    return out;
  }

  /// The live rows in position order.
  std::vector<Row> ordered_rows(SequenceId s, std::int32_t l = 0, std::int32_t h = 0) {
    std::vector<Row> out = rows(s, l, h);
    std::sort(
        out.begin(), out.end(), [](const Row& a, const Row& b) { return a.position < b.position; });
    return out;
  }

  /// Positions of the live rows, in slot order.
  Rows slots(SequenceId s, std::int32_t l = 0, std::int32_t h = 0) {
    Rows out;
    for (const Row& r : rows(s, l, h)) { out.push_back(r.position); }
    return out;
  }

  /// Positions of the live rows, ascending. -1 stands for a row whose value is not that of its position.
  Rows positions(SequenceId s, std::int32_t l = 0, std::int32_t h = 0) {
    Rows out;
    for (const Row& r : ordered_rows(s, l, h)) {
      out.push_back(r.own && r.tag % 1000 == r.position % 1000 ? r.position : -1);
    }
    return out;
  }

  /// Rope positions of the live rows, in position order.
  Rows ropes(SequenceId s, std::int32_t l = 0, std::int32_t h = 0) {
    Rows out;
    for (const Row& r : ordered_rows(s, l, h)) { out.push_back(r.rope); }
    return out;
  }

  /// Largest difference between a live key, rotated back by its rope position, and the raw key of its tag.
  double raw_key_error(SequenceId s, std::int32_t l = 0, std::int32_t h = 0) {
    double worst = 0;
    for (const Row& r : rows(s, l, h)) {
      std::vector<double> key = to_double(r.key);
      if (rotation) { key = rotation->turn(key, -r.rope, l); }
      worst = std::max(worst, distance(key, raw_key(r.tag, l, h)));
    }
    return worst;
  }

  /// Pages of a sequence's table, up to the first -1.
  Rows pages(SequenceId s, std::int32_t l = 0, std::int32_t h = 0) {
    Rows out;
    for (const std::int32_t id : cache.page_table(s, LayerId{l}, HeadId{h})) {
      if (id < 0) { break; }
      out.push_back(id);
    }
    return out;
  }
};

/// Score of the row at `position` of (sequence of the view, layer, KV head).
using ScoreOf = std::function<float(
    std::int32_t sequence, std::int32_t position, std::int32_t layer, std::int32_t head)>;

/// Scores listed by position, the same for all heads; 0 beyond the list.
inline ScoreOf scores_of(std::vector<float> list) {
  return [list = std::move(list)](std::int32_t, std::int32_t position, std::int32_t, std::int32_t) {
    return index(position) < list.size() ? list[index(position)] : 0.0F;
  };
}

/// What an eviction is given besides the cache and the policy.
struct Input {
  ScoreOf score;       ///< none: the policy's own scorer
  Rows budgets;        ///< at run time, by `budget_rows`; empty: the policy's
  RowMap budget_rows;  ///< by sequence unless said otherwise
  QueryBlock queries;
  PlanOptions options;
};

/// Plan, apply and commit, with what the plan listed.
struct Outcome {
  Report report;
  Status plan_status = Status::ok;
  std::int64_t nan_count = 0;
  std::vector<Rows> evicted;   ///< [sequences, layers, kv_heads] positions as listed
  std::vector<Rows> released;  ///< [sequences, tables] pages as listed
};

/// An input whose scores are in memory: what `plan` takes.
class Prepared {
 public:
  Prepared(const CacheView& view, const Input& in) : budgets_(in.budgets) {
    obs_.queries = in.queries;
    if (!budgets_.empty()) {
      obs_.budgets = budgets_.data();
      obs_.budget_rows = in.budget_rows;
    }
    if (!in.score) { return; }
    const std::int32_t most = std::max(1, plan_shape(view).max_rows);
    scores_.assign(index(view.sequences) * index(view.layers) * index(view.kv_heads) * index(most),
                   std::numeric_limits<float>::quiet_NaN());
    obs_.scores = SequencePlane::dense(scores_.data(), view.layers, view.kv_heads, most);
    for (std::int32_t s = 0; s < view.sequences; ++s) {
      for (std::int32_t l = 0; l < view.layers; ++l) {
        for (std::int32_t h = 0; h < view.kv_heads; ++h) {
          for_each_run({view, SequenceId{s}, LayerId{l}, HeadId{h}}, [&](const Run& run) {
            for (std::int32_t r = run.row; r < run.row + run.count; ++r) {
              const Position p = view.position(SequenceId{s}, LayerId{l}, HeadId{h}, r);
              obs_.scores.at<float>(SequenceId{s}, LayerId{l}, HeadId{h}, r) =
                  in.score(s, raw(p), l, h);
            }
          });
        }
      }
    }
  }
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;
  ~Prepared() = default;

  [[nodiscard]] const Observation& observation() const { return obs_; }

  template <Policy P, Executor E = Serial>
  PlanRef plan(const P& policy,
               const CacheView& view,
               const PlanOptions& options = {},
               const E& executor = {}) {
    workspace_.resize(plan_workspace_bytes(policy, plan_shape(view, obs_, executor.workers())));
    return kvtrim::plan(policy, view, obs_, workspace_, options, executor);
  }

 private:
  Observation obs_;
  Rows budgets_;
  std::vector<float> scores_;
  std::vector<std::byte> workspace_;
};

/// Plans, applies and commits over `view` into `sink`.
template <Policy P, class S, Executor E = Serial>
Outcome evict_into(
    const P& policy, const CacheView& view, S& sink, const Input& in = {}, const E& executor = {}) {
  Prepared prepared(view, in);
  const PlanRef made = prepared.plan(policy, view, in.options, executor);
  Outcome out;
  out.plan_status = made.status();
  out.nan_count = made.nan_count();
  const Rerotator keep;
  out.report.status =
      apply(made, view, in.options.rerotator == nullptr ? keep : *in.options.rerotator, executor);
  if (out.report.status != Status::ok) { return out; }
  for (std::int32_t s = 0; s < made.sequences(); ++s) {
    for (std::int32_t l = 0; l < made.layers(); ++l) {
      for (std::int32_t h = 0; h < made.kv_heads(); ++h) {
        Rows& list = out.evicted.emplace_back();
        for (const Position p : made.evicted(SequenceId{s}, LayerId{l}, HeadId{h})) {
          list.push_back(raw(p));
        }
      }
    }
    for (std::int32_t t = 0; t < made.tables(); ++t) {
      Rows& list = out.released.emplace_back();
      for (const PageId p : made.released(SequenceId{s}, t)) { list.push_back(raw(p)); }
    }
  }
  out.report = commit(made, view, sink);
  return out;
}

template <Policy P, Executor E = Serial>
Outcome evict(
    const P& policy, TestCache& t, SequenceId s, const Input& in = {}, const E& executor = {}) {
  const CacheView view = t.cache.view(s);
  auto sink = t.cache.sink_for(view);
  return evict_into(policy, view, sink, in, executor);
}

/// All sequences in one plan.
template <Policy P, Executor E = Serial>
Outcome evict_all(const P& policy, TestCache& t, const Input& in = {}, const E& executor = {}) {
  const CacheView view = t.cache.view();
  auto sink = t.cache.sink_for(view);
  return evict_into(policy, view, sink, in, executor);
}

/// What an exception says, or "nothing thrown".
template <class F>
std::string thrown_by(F&& f) {
  try {
    f();
  } catch (const std::exception& e) { return e.what(); }
  return "nothing thrown";
}

/// Queries [rows, heads, dim] of tokens `first`..`first + rows - 1`, and their positions.
struct Queries {
  std::vector<float> data;
  std::vector<Position> positions;
};
inline Queries make_queries(std::int32_t first,
                            std::int32_t rows,
                            std::int32_t heads,
                            std::int32_t dim,
                            std::int32_t salt = 77) {
  Queries q;
  for (std::int32_t i = 0; i < rows; ++i) {
    q.positions.push_back(Position{first + i});
    for (std::int32_t h = 0; h < heads; ++h) {
      for (std::int32_t d = 0; d < dim; ++d) {
        q.data.push_back(2.0F * noise(first + i, h, d, salt));
      }
    }
  }
  return q;
}

/// An engine's own pages: dense tables, K and V in `[pages, page_size, kv_heads, dim]`, left padding per sequence.
struct EnginePages {
  EnginePages(std::int32_t pages,
              std::int32_t page_size,
              std::int32_t kv_heads,
              std::int32_t dim,
              std::vector<Rows> tables)
      : k(index(pages) * index(page_size) * index(kv_heads) * index(dim),
          std::numeric_limits<float>::quiet_NaN()),
        v(k.size(), std::numeric_limits<float>::quiet_NaN()) {
    std::size_t most = 0;
    for (const Rows& t : tables) { most = std::max(most, t.size()); }
    for (Rows& t : tables) {
      t.resize(most, -1);
      ids.insert(ids.end(), t.begin(), t.end());
    }
    lengths.assign(tables.size(), 0);
    padding.assign(tables.size(), 0);
    view_.k = Plane::nhd(k.data(), {page_size, kv_heads, dim, DType::f32});
    view_.v = Plane::nhd(v.data(), {page_size, kv_heads, dim, DType::f32});
    view_.page_size = page_size;
    view_.pages = pages;
    view_.kv_heads = kv_heads;
    view_.sequences = static_cast<std::int32_t>(tables.size());
    view_.table.max_pages = static_cast<std::int32_t>(most);
    view_.table.row_stride = static_cast<std::int64_t>(most);
  }
  EnginePages(const EnginePages&) = delete;
  EnginePages& operator=(const EnginePages&) = delete;
  ~EnginePages() = default;

  std::vector<float> k, v;
  Rows ids, lengths, padding;

  CacheView view() {
    CacheView out = view_;
    out.table.ids = ids.data();
    out.lengths = lengths.data();
    out.first_rows = padding.data();
    return out;
  }

  /// Rows 0..n-1 of sequence `s` get value {tag = row, head, ...} and a key made of noise.
  void fill(std::int32_t s, std::int32_t n) {
    lengths[index(s)] = n;
    const CacheView out = view();
    for (std::int32_t r = 0; r < n; ++r) {
      for (std::int32_t h = 0; h < out.kv_heads; ++h) {
        std::vector<float> key, value(index(out.v.head_dim), static_cast<float>(h));
        for (std::int32_t d = 0; d < out.k.head_dim; ++d) { key.push_back(noise(s, r, h, d)); }
        value[0] = static_cast<float>(r);
        store_row(out.k, out.key(SequenceId{s}, {}, HeadId{h}, r), key.data());
        store_row(out.v, out.value(SequenceId{s}, {}, HeadId{h}, r), value.data());
      }
    }
  }

  /// Tags of the live rows, in slot order.
  Rows tags(std::int32_t s, std::int32_t h = 0) {
    Rows out;
    const CacheView v1 = view();
    for_each_run({v1, SequenceId{s}, {}, HeadId{h}}, [&](const Run& run) {
      for (std::int32_t i = 0; i < run.count; ++i) {
        std::vector<float> value(index(v1.v.head_dim));
        load_row(v1.v, v1.v.row({}, run.v_page, HeadId{h}, Slot{raw(run.slot) + i}), value.data());
        out.push_back(value.back() == static_cast<float>(h) || value.size() < 2
                          ? static_cast<std::int32_t>(value[0])
                          : -1);
      }
    });
    return out;
  }

 private:
  CacheView view_;
};

}  // namespace kvtrim::fault
