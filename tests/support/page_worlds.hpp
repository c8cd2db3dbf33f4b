// SPDX-License-Identifier: Apache-2.0
#pragma once

// Two caches that page policies must treat alike: a PagedCache, and the memory of an engine that has its own tables,
// lengths and ref counts. Both are filled with the same tokens; a value says which token, layer and head it belongs to.

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/commit.hpp>
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
#include <numeric>
#include <optional>
#include <stdexcept>
#include <vector>

namespace kvtrim::test {

using Ints = std::vector<std::int32_t>;

/// What a world is filled with.
struct WorldSetup {
  TableScope scope = TableScope::group;
  std::int32_t page_size = 4;
  std::int32_t layers = 2;
  std::int32_t kv_heads = 2;
  std::int32_t dim = 8;
  Ints lengths{40};  ///< tokens of each sequence
  std::int32_t prefix =
      0;  ///< whole pages that sequences 1, 2, ... share with sequence 0, in tokens
  std::uint64_t seed = 1;
  std::int32_t first_name = 0;  ///< sequence s has the contents of sequence first_name + s
};

/// Key of (sequence, layer, head, token): a fixed function. Tokens of the prefix are common to all sequences.
inline std::vector<float> world_key(
    const WorldSetup& w, std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t token) {
  const std::int32_t name = token < w.prefix ? 0 : s + w.first_name;
  Random random(w.seed * 1'000'003 + static_cast<std::uint64_t>(((name * 16 + l) * 16 + h)) * 4099 +
                static_cast<std::uint64_t>(token));
  std::vector<float> key(static_cast<std::size_t>(w.dim));
  for (float& x : key) { x = 2 * random.uniform(); }
  return key;
}

/// Values and tables of a view, read back.
class WorldReader {
 public:
  /// Tokens of the live rows in slot order; -1: the value is not of this layer and head, or not at its position.
  static Ints tokens(const CacheView& v, std::int32_t s, std::int32_t l, std::int32_t h) {
    Ints out;
    for (std::int32_t r = 0; r < v.live_rows(SequenceId{s}, LayerId{l}, HeadId{h}); ++r) {
      float value[2];
      std::memcpy(value, v.value(SequenceId{s}, LayerId{l}, HeadId{h}, r), sizeof value);
      const auto token = static_cast<std::int32_t>(value[0]);
      const bool right = value[1] == static_cast<float>(l * 8 + h) &&
                         raw(v.position(SequenceId{s}, LayerId{l}, HeadId{h}, r)) == token;
      out.push_back(right ? token : -1);
    }
    return out;
  }
  /// Page ids of table `t` of sequence `s` that live rows use.
  static Ints pages(const CacheView& v, std::int32_t s, std::int32_t t) {
    const LayerId l = v.first_layer(t);
    const HeadId h = v.first_head(t);
    const std::int32_t live = v.live_rows(SequenceId{s}, l, h);
    Ints out;
    for (std::int32_t e = 0;
         live > 0 && e < pages_for(live + v.first_row(SequenceId{s}), v.page_size);
         ++e) {
      out.push_back(raw(v.k_page(SequenceId{s}, l, h, e)));
    }
    return out;
  }
};

/// A PagedCache.
class PagedWorld {
 public:
  static constexpr bool foreign = false;
  static bool supports(TableScope) { return true; }

  explicit PagedWorld(const WorldSetup& w) : setup(w), cache(params_of(w)) {
    for (std::size_t s = 0; s < w.lengths.size(); ++s) {
      if (s == 0 || w.prefix == 0) {
        if (!cache.try_create()) { throw std::runtime_error("no sequence"); }
        append(static_cast<std::int32_t>(s), w.prefix > 0 ? w.prefix : w.lengths[s]);
      } else if (!cache.try_fork(SequenceId{0})) {
        throw std::runtime_error("no fork");
      }
    }
    for (std::size_t s = 0; w.prefix > 0 && s < w.lengths.size(); ++s) {
      append(static_cast<std::int32_t>(s), w.lengths[s] - w.prefix);
    }
  }

  void append(std::int32_t s, std::int32_t n) {
    const SequenceId id{s};
    const std::int32_t first = raw(cache.next_position(id));
    if (cache.try_extend(id, n) != Status::ok) { throw std::runtime_error("no pages"); }
    for (std::int32_t l = 0; l < setup.layers; ++l) {
      std::vector<float> keys, values;
      for (std::int32_t i = 0; i < n; ++i) {
        for (std::int32_t h = 0; h < setup.kv_heads; ++h) {
          const auto key = world_key(setup, s, l, h, first + i);
          keys.insert(keys.end(), key.begin(), key.end());
          values.push_back(static_cast<float>(first + i));
          values.push_back(static_cast<float>(l * 8 + h));
        }
      }
      REQUIRE((n == 0 ||
               cache.write(id, LayerId{l}, {keys.data()}, {values.data()}) == kvtrim::Status::ok));
    }
  }

  CacheView view() { return cache.view(); }
  template <Policy P>
  Report evict(const P& policy, const Observation& obs = {}, const PlanOptions& options = {}) {
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view(), obs)));
    return kvtrim::evict(policy, cache, view(), obs, workspace, options);
  }
  std::int32_t ref_count(std::int32_t page) { return cache.pool().ref_count(PageId{page}); }
  std::int32_t in_use() { return cache.pool().in_use(); }
  /// Every byte of keys and values that any table names.
  std::vector<std::byte> memory() {
    std::vector<std::byte> out;
    const CacheView v = view();
    for (std::int32_t s = 0; s < v.sequences; ++s) {
      for (std::int32_t t = 0; t < v.tables_per_sequence(); ++t) {
        for (const std::int32_t p : WorldReader::pages(v, s, t)) {
          for (const Plane& plane : {v.k, v.v}) {
            for (std::int32_t l = 0; l < v.layers_per_table(); ++l) {
              const std::byte* from =
                  plane.row(LayerId{raw(v.first_layer(t)) + l}, PageId{p}, HeadId{0}, Slot{0});
              written_.push_back({from, plane.page_stride});
            }
          }
        }
      }
    }
    for (const auto& [from, bytes] : written_) { out.insert(out.end(), from, from + bytes); }
    return out;
  }
  /// The same bytes as the last `memory()`, whatever owns the pages now.
  std::vector<std::byte> memory_again() {
    std::vector<std::byte> out;
    for (const auto& [from, bytes] : written_) { out.insert(out.end(), from, from + bytes); }
    return out;
  }

  WorldSetup setup;
  PagedCache cache;

 private:
  struct Piece {
    const std::byte* from;
    std::int64_t bytes;
  };
  static PagedCache::Params params_of(const WorldSetup& w) {
    const std::int32_t most = *std::max_element(w.lengths.begin(), w.lengths.end()) + 8;
    const std::int32_t tables = w.scope == TableScope::group   ? 1
                                : w.scope == TableScope::layer ? w.layers
                                                               : w.layers * w.kv_heads;
    return {.pages = static_cast<std::int32_t>(w.lengths.size()) * tables *
                     (pages_for(most, w.page_size) + 1),
            .page_size = w.page_size,
            .layers = w.layers,
            .kv_heads = w.kv_heads,
            .key_dim = w.dim,
            .value_dim = 2,
            .scope = w.scope,
            .max_sequences = static_cast<std::int32_t>(w.lengths.size()),
            .max_rows = most};
  }
  std::vector<Piece> written_;
};

/// An engine's own memory, as vLLM lays it out: K and V `[layers, pages, page_size, kv_heads, dim]`, dense int32 tables,
/// lengths, ref counts, positions. Pages are handed out in no order.
class ForeignWorld {
 public:
  static constexpr bool foreign = true;
  static bool supports(TableScope scope) { return scope != TableScope::head; }

  explicit ForeignWorld(const WorldSetup& w, const Ints& padding = {}) : setup(w) {
    const auto n = static_cast<std::int32_t>(w.lengths.size());
    tables_ = w.scope == TableScope::layer ? w.layers : 1;
    most_ = *std::max_element(w.lengths.begin(), w.lengths.end()) + 8;
    if (!padding.empty()) { most_ += *std::max_element(padding.begin(), padding.end()); }
    max_pages_ = pages_for(most_, w.page_size);
    pages_ = n * tables_ * max_pages_ + 3;
    k_.assign(size(w.layers) * size(pages_) * size(w.page_size) * size(w.kv_heads) * size(w.dim),
              std::numeric_limits<float>::quiet_NaN());
    v_.assign(k_.size() / size(w.dim) * 2, std::numeric_limits<float>::quiet_NaN());
    ids.assign(size(n) * size(tables_) * size(max_pages_), -1);
    lengths.assign(size(n) * size(tables_), 0);
    refs.assign(size(pages_), 0);
    padding_ = padding;
    positions_.assign(size(n) * size(w.layers) * size(w.kv_heads) * size(most_), Position{-5});
    free_.resize(size(pages_));
    std::iota(free_.begin(), free_.end(), 0);
    Random random(w.seed + 77);
    for (std::size_t i = free_.size(); i > 1; --i) {
      std::swap(free_[i - 1], free_[size(random.below(static_cast<std::int32_t>(i)))]);
    }
    freed.assign(size(pages_), null_page);
    for (std::int32_t s = 0; s < n; ++s) {
      const std::int32_t first = padding.empty() ? 0 : padding[size(s)];
      for (std::int32_t t = 0; t < tables_; ++t) {
        lengths[size(s * tables_ + t)] = w.lengths[size(s)];
        for (std::int32_t e = first / w.page_size;
             e < pages_for(w.lengths[size(s)] + first, w.page_size);
             ++e) {
          std::int32_t& id = ids[size((s * tables_ + t) * max_pages_ + e)];
          if (s > 0 && (e + 1) * w.page_size <= w.prefix) {
            id = ids[size(t * max_pages_ + e)];
          } else {
            id = free_.back();
            free_.pop_back();
          }
          ++refs[size(id)];
        }
      }
    }
    const CacheView out = view();
    for (std::int32_t s = 0; s < n; ++s) {
      for (std::int32_t l = 0; l < w.layers; ++l) {
        for (std::int32_t h = 0; h < w.kv_heads; ++h) {
          for (std::int32_t r = 0; r < w.lengths[size(s)]; ++r) {
            const auto key = world_key(w, s, l, h, r);
            const float value[2] = {static_cast<float>(r), static_cast<float>(l * 8 + h)};
            std::memcpy(out.key(SequenceId{s}, LayerId{l}, HeadId{h}, r),
                        key.data(),
                        key.size() * sizeof(float));
            std::memcpy(out.value(SequenceId{s}, LayerId{l}, HeadId{h}, r), value, sizeof value);
            out.positions.at<Position>(SequenceId{s}, LayerId{l}, HeadId{h}, r) = Position{r};
          }
        }
      }
    }
  }
  ForeignWorld(const ForeignWorld&) = delete;
  ForeignWorld& operator=(const ForeignWorld&) = delete;
  ForeignWorld(ForeignWorld&&) = default;
  ForeignWorld& operator=(ForeignWorld&&) = delete;
  ~ForeignWorld() = default;

  CacheView view() {
    CacheView out;
    const PlaneShape shape{setup.page_size, setup.kv_heads, setup.dim, DType::f32};
    out.k = Plane::nhd(k_.data(), shape);
    out.v = Plane::nhd(v_.data(), {setup.page_size, setup.kv_heads, 2, DType::f32});
    out.k.layer_stride = pages_ * out.k.page_stride;
    out.v.layer_stride = pages_ * out.v.page_stride;
    out.page_size = setup.page_size;
    out.pages = pages_;
    out.kv_heads = setup.kv_heads;
    out.layers = setup.layers;
    out.sequences = static_cast<std::int32_t>(setup.lengths.size());
    out.scope = setup.scope;
    out.table.ids = ids.data();
    out.table.rows = {tables_, tables_ > 1 ? 1 : 0, 0};
    out.table.row_stride = max_pages_;
    out.table.max_pages = max_pages_;
    out.lengths = lengths.data();
    out.length_rows = out.table.rows;
    out.writable.ref_counts = refs.data();
    out.first_rows = padding_.empty() ? nullptr : padding_.data();
    out.positions = SequencePlane::dense(positions_.data(), setup.layers, setup.kv_heads, most_);
    return out;
  }
  template <Policy P>
  Report evict(const P& policy, const Observation& obs = {}, const PlanOptions& options = {}) {
    const CacheView v = view();
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(v, obs)));
    const PlanRef made = plan(policy, v, obs, workspace, options);
    Report report;
    report.status = apply(made, v, options.rerotator != nullptr ? *options.rerotator : Rerotator{});
    if (report.status != Status::ok) { return report; }
    DenseTables sink(v, ids.data(), lengths.data(), refs.data(), freed);
    report = commit(made, v, sink);
    freed_count = static_cast<std::int32_t>(sink.freed().size());
    return report;
  }
  std::int32_t ref_count(std::int32_t page) { return refs[size(page)]; }
  std::int32_t in_use() {
    return static_cast<std::int32_t>(
        std::count_if(refs.begin(), refs.end(), [](std::int32_t n) { return n > 0; }));
  }
  std::vector<std::byte> memory() { return memory_again(); }
  std::vector<std::byte> memory_again() {
    const auto* const k = reinterpret_cast<const std::byte*>(k_.data());
    const auto* const v = reinterpret_cast<const std::byte*>(v_.data());
    std::vector<std::byte> out(k, k + k_.size() * sizeof(float));
    out.insert(out.end(), v, v + v_.size() * sizeof(float));
    return out;
  }

  WorldSetup setup;
  Ints ids, lengths, refs;
  std::vector<PageId> freed;
  std::int32_t freed_count = 0;

 private:
  static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

  std::int32_t tables_ = 1;
  std::int32_t most_ = 0;
  std::int32_t max_pages_ = 0;
  std::int32_t pages_ = 0;
  std::vector<float> k_, v_;
  Ints padding_, free_;
  std::vector<Position> positions_;
};

}  // namespace kvtrim::test
