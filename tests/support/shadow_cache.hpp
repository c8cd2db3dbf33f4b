// SPDX-License-Identifier: Apache-2.0
#pragma once

// A PagedCache and a dense copy of every live token, head by head, kept with the standard library alone. The copy
// knows what must be live, at which rope position and with which score; `fault()` says in words where the cache differs.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/core/dtype.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/evict/rerotate.hpp>
#include <kvtrim/observe/observation.hpp>
#include "catch.hpp"
#include "support/random.hpp"
#include "support/rope_model.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kvtrim::test {

/// softmax(q K / sqrt(d)) V, in double.
inline std::vector<double> dense_attention(const std::vector<double>& query,
                                           const std::vector<std::vector<double>>& keys,
                                           const std::vector<std::vector<double>>& values) {
  std::vector<double> weights;
  double most = -1e300;
  for (const auto& key : keys) {
    double dot = 0;
    for (std::size_t d = 0; d < query.size(); ++d) { dot += query[d] * key[d]; }
    weights.push_back(dot / std::sqrt(static_cast<double>(query.size())));
    most = std::max(most, weights.back());
  }
  double total = 0;
  for (double& w : weights) { total += w = std::exp(w - most); }
  std::vector<double> out(values.front().size(), 0.0);
  for (std::size_t r = 0; r < keys.size(); ++r) {
    for (std::size_t d = 0; d < out.size(); ++d) { out[d] += weights[r] / total * values[r][d]; }
  }
  return out;
}

/// One live token of one KV head, as it must be.
struct ShadowRow {
  std::int32_t position = 0;
  std::int32_t rope = 0;
  std::vector<double> key;      // before RoPE
  std::vector<double> written;  // as the cache stored it
  std::vector<double> value;    // as the cache stored it
  std::int64_t score = 0;       // accumulated, in units of 2^-12
  float external = 0;           // score given from outside
};

/// What a policy must keep: `budget` rows, the first `sinks` and the last `recent` for sure, the others by score.
struct KeepRule {
  std::int32_t budget = 0;
  std::int32_t sinks = 0;
  std::int32_t recent = 0;
  std::int32_t interval = 1;
  bool promote = false;   // rows that left the window since the last cut do not compete
  bool external = false;  // by `ShadowRow::external`, otherwise by `score`
};

class ShadowCache {
 public:
  struct Setup {
    PagedCache::Params cache;
    std::int32_t sequences = 1;
    std::int32_t group = 1;
    RopeModel rope;
    PositionMode mode = PositionMode::keep;
    bool unrotated_cache = false;  // the engine rotates on read
    std::int32_t following_sinks = 0;
    std::uint64_t seed = 1;
  };
  struct Head {
    std::vector<ShadowRow> rows;  // ascending by position
    std::int32_t next_rope = 0;
    std::int32_t rows_at_eviction = 0;
  };

  explicit ShadowCache(const Setup& setup)
      : setup_(setup),
        random_(setup.seed),
        cache_(setup.cache),
        heads_(at(setup.sequences) * at(setup.cache.layers) * at(setup.cache.kv_heads)),
        seen_(at(setup.sequences), 0),
        pristine_(heads_.size() * at(setup.following_sinks) * at(setup.cache.key_dim), 0.0F) {
    for (std::int32_t s = 0; s < setup.sequences; ++s) { ids_.push_back(*cache_.try_create()); }
  }

  PagedCache& cache() { return cache_; }
  Random& random() { return random_; }
  const Setup& setup() const { return setup_; }
  std::int32_t layers() const { return setup_.cache.layers; }
  std::int32_t kv_heads() const { return setup_.cache.kv_heads; }
  Head& head(std::int32_t s, std::int32_t l, std::int32_t h) {
    return heads_[at((static_cast<std::int64_t>(s) * layers() + l) * kv_heads() + h)];
  }
  PristineSinks pristine() const {
    return {.keys = pristine_.data(), .sinks = setup_.following_sinks};
  }

  /// Appends `n` random tokens to sequence `s`.
  Status append(std::int32_t s, std::int32_t n) {
    const SequenceId id = ids_[at(s)];
    if (const Status status = cache_.try_extend(id, n); status != Status::ok) { return status; }
    const auto& p = cache_.params();
    for (std::int32_t l = 0; l < layers(); ++l) {
      std::vector<float> keys, values, unrotated;
      for (std::int32_t i = 0; i < n; ++i) {
        for (std::int32_t h = 0; h < kv_heads(); ++h) {
          Head& to = head(s, l, h);
          ShadowRow row;
          row.position = seen_[at(s)] + i;
          row.rope = to.next_rope + i;
          for (std::int32_t d = 0; d < p.key_dim; ++d) { row.key.push_back(rounded()); }
          for (std::int32_t d = 0; d < p.value_dim; ++d) { row.value.push_back(rounded()); }
          const auto rotated =
              setup_.unrotated_cache ? row.key : setup_.rope.rotated(l, row.key, row.rope);
          for (const double x : rotated) { keys.push_back(static_cast<float>(x)); }
          for (const double x : row.value) { values.push_back(static_cast<float>(x)); }
          for (const double x : row.key) { unrotated.push_back(static_cast<float>(x)); }
          if (row.position < setup_.following_sinks) {
            std::copy(
                row.key.begin(),
                row.key.end(),
                pristine_.begin() +
                    ((&to - heads_.data()) * setup_.following_sinks + row.position) * p.key_dim);
          }
          to.rows.push_back(row);
        }
      }
      RowSource source;
      if (p.unrotated_keys) { source.data = unrotated.data(); }
      REQUIRE(cache_.write(id, LayerId{l}, {keys.data()}, {values.data()}, source) ==
              kvtrim::Status::ok);
      for (std::int32_t h = 0; h < kv_heads(); ++h) { head(s, l, h).next_rope += n; }
    }
    seen_[at(s)] += n;
    // What the cache made of them: from now on these bytes must not change without a reason.
    for (std::int32_t l = 0; l < layers(); ++l) {
      for (std::int32_t h = 0; h < kv_heads(); ++h) {
        for (const auto& [position, r] : rows_by_position(s, l, h)) {
          if (position >= seen_[at(s)] - n) {
            row_at(s, l, h, position).written = read_key(s, l, h, r);
          }
        }
      }
    }
    return Status::ok;
  }

  /// Adds a random multiple of 2^-12 to the score of every live row, in the planes and here; all sums are exact.
  void accumulate() {
    const CacheView view = cache_.view();
    for_each([&](std::int32_t s, std::int32_t l, std::int32_t h) {
      for (const auto& [position, r] : rows_by_position(s, l, h)) {
        const std::int32_t x = random_.below(64);
        row_at(s, l, h, position).score += x;
        view.score_sums.at<float>(ids_[at(s)], LayerId{l}, HeadId{h}, r) +=
            static_cast<float>(x) / 4096.0F;
      }
    });
  }

  /// Gives every live row a random score, a few of them equal; by table row, as `Observation::scores` wants them.
  SequencePlane external_scores() {
    const auto& p = cache_.params();
    scores_.assign(at(p.max_sequences) * at(p.layers) * at(p.kv_heads) * at(p.max_rows), -7.0F);
    const auto plane = SequencePlane::dense(scores_.data(), p.layers, p.kv_heads, p.max_rows);
    for_each([&](std::int32_t s, std::int32_t l, std::int32_t h) {
      for (const auto& [position, r] : rows_by_position(s, l, h)) {
        const auto score = static_cast<float>(random_.below(40));
        row_at(s, l, h, position).external = score;
        plane.at<float>(ids_[at(s)], LayerId{l}, HeadId{h}, r) = score;
      }
    });
    return plane;
  }

  /// What `rule` keeps of (s, l, h), by rank; all where it cuts nothing.
  std::vector<bool> kept_by(const KeepRule& rule, std::int32_t s, std::int32_t l, std::int32_t h) {
    const Head& from = head(s, l, h);
    const auto n = static_cast<std::int32_t>(from.rows.size());
    if (n - rule.budget < rule.interval) { return std::vector<bool>(at(n), true); }
    std::int32_t recent = rule.recent;
    if (rule.promote && from.rows_at_eviction > 0) {
      recent = std::max(
          recent, std::min(rule.recent + n - from.rows_at_eviction, rule.budget - rule.sinks));
    }
    std::vector<bool> kept(at(n), false);
    std::vector<std::pair<double, std::int32_t>> others;  // lowest score first, newest first
    for (std::int32_t i = 0; i < n; ++i) {
      if (i < rule.sinks || i >= n - recent) {
        kept[at(i)] = true;
      } else {
        const ShadowRow& row = from.rows[at(i)];
        others.emplace_back(rule.external ? row.external : static_cast<double>(row.score), -i);
      }
    }
    std::sort(others.begin(), others.end());
    const auto stay =
        std::max<std::int64_t>(0, rule.budget - (n - static_cast<std::int64_t>(others.size())));
    for (auto it = others.end() - stay; it != others.end(); ++it) { kept[at(-it->second)] = true; }
    return kept;
  }

  /// Widens what the heads of a table keep to whole pages. Rows must be in position order, so that rank = row.
  void widen_to_pages(std::vector<std::vector<bool>>& kept_of_heads) {
    const auto& p = cache_.params();
    std::map<std::int32_t, std::vector<std::size_t>> tables;
    std::size_t i = 0;
    for (std::int32_t l = 0; l < layers(); ++l) {
      for (std::int32_t h = 0; h < kv_heads(); ++h) { tables[table_of(l, h)].push_back(i++); }
    }
    for (const auto& [table, members] : tables) {
      std::set<std::size_t> pages;
      for (const std::size_t m : members) {
        for (std::size_t r = 0; r < kept_of_heads[m].size(); ++r) {
          if (kept_of_heads[m][r]) { pages.insert(r / at(p.page_size)); }
        }
      }
      for (const std::size_t m : members) {
        for (std::size_t r = 0; r < kept_of_heads[m].size(); ++r) {
          kept_of_heads[m][r] = pages.contains(r / at(p.page_size));
        }
      }
    }
  }

  /// Drops the rows of (s, l, h) that `kept` does not name, and renumbers as the position mode says.
  void evict(std::int32_t s, std::int32_t l, std::int32_t h, const std::vector<bool>& kept) {
    Head& of = head(s, l, h);
    std::vector<ShadowRow> left;
    for (std::size_t i = 0; i < kept.size(); ++i) {
      if (kept[i]) { left.push_back(of.rows[i]); }
    }
    of.rows = left;
    const auto n = static_cast<std::int32_t>(left.size());
    of.rows_at_eviction = n;
    if (setup_.mode == PositionMode::in_cache) {
      for (std::int32_t i = 0; i < n; ++i) { of.rows[at(i)].rope = i; }
      of.next_rope = n;
    } else if (setup_.mode == PositionMode::sinks_follow && n > setup_.following_sinks) {
      const std::int32_t window = of.rows[at(setup_.following_sinks)].rope;
      for (std::int32_t i = 0; i < setup_.following_sinks; ++i) {
        of.rows[at(i)].rope = window - setup_.following_sinks + i;
      }
    }
  }

  /// Where the cache is not what it must be; empty: nowhere.
  std::string fault() {
    std::string text = table_fault();
    for_each([&](std::int32_t s, std::int32_t l, std::int32_t h) {
      if (text.empty()) { text = head_fault(s, l, h); }
      if (!text.empty() && text.find(" @") == std::string::npos) {
        text += " @ sequence " + std::to_string(s) + " layer " + std::to_string(l) + " head " +
                std::to_string(h);
      }
    });
    return text;
  }

  /// Rows of (s, l, h) by position, as the cache has them: its own slots, without the hole.
  std::map<std::int32_t, std::int32_t> rows_by_position(std::int32_t s,
                                                        std::int32_t l,
                                                        std::int32_t h) {
    const SequenceState& state = cache_.state(ids_[at(s)], LayerId{l}, HeadId{h});
    const CacheView view = cache_.view();
    std::map<std::int32_t, std::int32_t> rows;
    for (std::int32_t r = 0; r < state.extent(); ++r) {
      if (r == state.append_row) { continue; }
      rows[raw(view.positions.at<Position>(ids_[at(s)], LayerId{l}, HeadId{h}, r))] = r;
    }
    return rows;
  }

  /// Page and slot of every live row of (s, l, h), by position.
  std::map<std::int32_t, std::pair<std::int32_t, std::int32_t>> places(std::int32_t s,
                                                                       std::int32_t l,
                                                                       std::int32_t h) {
    std::map<std::int32_t, std::pair<std::int32_t, std::int32_t>> result;
    const std::int32_t size = setup_.cache.page_size;
    for (const auto& [position, r] : rows_by_position(s, l, h)) {
      result[position] = {cache_.page_table(ids_[at(s)], LayerId{l}, HeadId{h})[at(r / size)],
                          r % size};
    }
    return result;
  }

  template <class F>
  void for_each(F&& f) {
    for (std::int32_t s = 0; s < setup_.sequences; ++s) {
      for (std::int32_t l = 0; l < layers(); ++l) {
        for (std::int32_t h = 0; h < kv_heads(); ++h) { f(s, l, h); }
      }
    }
  }

  std::int32_t table_of(std::int32_t l, std::int32_t h) const {
    return setup_.cache.scope == TableScope::group   ? 0
           : setup_.cache.scope == TableScope::layer ? l
                                                     : l * kv_heads() + h;
  }

 private:
  // A number that the cache's dtype holds exactly.
  double rounded() {
    std::byte memory[4];
    store_element(memory, setup_.cache.dtype, random_.uniform());
    return static_cast<double>(load_element(memory, setup_.cache.dtype));
  }

  ShadowRow& row_at(std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t position) {
    auto& rows = head(s, l, h).rows;
    return *std::find_if(
        rows.begin(), rows.end(), [&](const ShadowRow& r) { return r.position == position; });
  }

  static std::vector<double> read(const Plane& plane, const std::byte* from) {
    std::vector<double> out;
    for (std::int32_t d = 0; d < plane.head_dim; ++d) {
      out.push_back(load_element(from + d * element_bytes(plane.dtype), plane.dtype));
    }
    return out;
  }
  std::vector<double> read_row(
      const Plane& plane, std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t r) {
    const std::int32_t size = setup_.cache.page_size;
    const PageId page{cache_.page_table(ids_[at(s)], LayerId{l}, HeadId{h})[at(r / size)]};
    return read(plane, plane.row(LayerId{l}, page, HeadId{h}, Slot{r % size}));
  }
  std::vector<double> read_key(std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t r) {
    return read_row(cache_.view().k, s, l, h, r);
  }

  std::string table_fault() {
    std::set<std::int32_t> pages;
    const std::int32_t size = setup_.cache.page_size;
    for (std::int32_t s = 0; s < setup_.sequences; ++s) {
      for (std::int32_t l = 0; l < layers(); ++l) {
        for (std::int32_t h = 0; h < kv_heads(); ++h) {
          const SequenceState& state = cache_.state(ids_[at(s)], LayerId{l}, HeadId{h});
          const auto table = cache_.page_table(ids_[at(s)], LayerId{l}, HeadId{h});
          const auto used = at((state.extent() + size - 1) / size);
          for (std::size_t e = 0; e < table.size(); ++e) {
            if ((e < used) != (table[e] >= 0)) { return "table: live ids first, then -1"; }
            if (e < used && cache_.pool().ref_count(PageId{table[e]}) != 1) {
              return "table names a page that is not held once";
            }
            if (e < used) { pages.insert(table[e]); }
          }
        }
      }
    }
    return static_cast<std::int32_t>(pages.size()) == cache_.pool().in_use()
               ? ""
               : "pool: " + std::to_string(cache_.pool().in_use()) + " pages in use, " +
                     std::to_string(pages.size()) + " in tables";
  }

  // An ulp of the cache's dtype at `x`, and of fp32 arithmetic on a few rotations.
  double key_tolerance(double x) const {
    return setup_.cache.dtype == DType::f32   ? 2e-6
           : setup_.cache.dtype == DType::f16 ? std::abs(x) / 1024 + 1e-6
                                              : std::abs(x) / 128 + 1e-6;
  }

  std::string head_fault(std::int32_t s, std::int32_t l, std::int32_t h) {
    const SequenceId id = ids_[at(s)];
    const LayerId layer{l};
    const HeadId kv_head{h};
    Head& of = head(s, l, h);
    const SequenceState& state = cache_.state(id, layer, kv_head);
    const CacheView view = cache_.view();
    const auto rows = rows_by_position(s, l, h);
    if (state.live_rows != static_cast<std::int32_t>(of.rows.size())) {
      return std::to_string(state.live_rows) + " live rows, not " + std::to_string(of.rows.size());
    }
    if (rows.size() != of.rows.size()) { return "a position is there twice"; }
    if (state.next_position != seen_[at(s)]) { return "next position"; }
    if (state.next_rope_position != of.next_rope) {
      return "next rope position " + std::to_string(state.next_rope_position) + ", not " +
             std::to_string(of.next_rope);
    }
    std::int32_t previous = -1;
    for (const auto& [position, r] : rows) {
      if (state.ordered && r < previous) { return "ordered, but slot order is not position order"; }
      previous = r;
    }
    if (of.rows.empty()) { return {}; }
    std::vector<std::vector<double>> keys, values;
    for (ShadowRow& row : of.rows) {
      if (!rows.contains(row.position)) {
        return "position " + std::to_string(row.position) + " is gone";
      }
      const std::int32_t r = rows.at(row.position);
      const auto where = " of position " + std::to_string(row.position);
      const std::int32_t rope = view.rope_positions.at<std::int32_t>(id, layer, kv_head, r);
      if (rope != row.rope) {
        return "rope position " + std::to_string(rope) + where + ", not " +
               std::to_string(row.rope);
      }
      if (view.score_sums) {
        const float sum = view.score_sums.at<float>(id, layer, kv_head, r);
        if (sum != static_cast<float>(row.score) / 4096.0F ||
            view.score_compensations.at<float>(id, layer, kv_head, r) != 0) {
          return "score" + where;
        }
      }
      if (read_row(view.v, s, l, h, r) != row.value) { return "value" + where; }
      if (view.unrotated_keys.base != nullptr &&
          read_row(view.unrotated_keys, s, l, h, r) != row.key) {
        return "un-rotated key" + where;
      }
      const auto key = read_key(s, l, h, r);
      const bool bits = setup_.mode == PositionMode::keep || setup_.unrotated_cache;
      if (bits && key != row.written) { return "key bytes changed" + where; }
      auto wanted = setup_.unrotated_cache ? row.key : setup_.rope.rotated(l, row.key, row.rope);
      for (std::size_t d = 0; d < key.size(); ++d) {
        if (std::abs(key[d] - wanted[d]) > key_tolerance(wanted[d])) {
          return "key" + where + " feature " + std::to_string(d);
        }
      }
      if (setup_.cache.dtype != DType::f32) { wanted = key; }  // the stored, rounded one
      keys.push_back(setup_.unrotated_cache ? setup_.rope.rotated(l, row.key, row.rope) : wanted);
      values.push_back(row.value);
    }
    if (setup_.mode != PositionMode::sinks_follow) {
      const std::int32_t newest = of.rows.back().rope;
      const bool seen_last = of.rows.back().position == seen_[at(s)] - 1;
      if ((seen_last || setup_.mode == PositionMode::in_cache) && of.next_rope - newest != 1) {
        return "the next rope position does not follow the newest row's";
      }
    }
    for (std::int32_t g = 0; g < setup_.group; ++g) {
      std::vector<double> query;
      for (std::int32_t d = 0; d < setup_.cache.key_dim; ++d) {
        query.push_back(3.0 * static_cast<double>(random_.uniform()));
      }
      query = setup_.rope.rotated(l, query, of.next_rope - 1);
      const auto expected = dense_attention(query, keys, values);
      const auto actual = paged_attention(view, s, l, h, query);
      for (std::size_t d = 0; d < expected.size(); ++d) {
        if (std::abs(expected[d] - actual[d]) > 1e-5) {
          return "attention of query head " + std::to_string(g) + ": " + std::to_string(actual[d]) +
                 ", not " + std::to_string(expected[d]);
        }
      }
    }
    return {};
  }

  // What an engine's attention kernel computes: rows in slot order, wherever the view says they are.
  std::vector<double> paged_attention(const CacheView& view,
                                      std::int32_t s,
                                      std::int32_t l,
                                      std::int32_t h,
                                      const std::vector<double>& query) {
    std::vector<std::vector<double>> keys, values;
    for_each_run({view, ids_[at(s)], LayerId{l}, HeadId{h}}, [&](Run run) {
      for (std::int32_t i = 0; i < run.count; ++i) {
        const Slot slot{raw(run.slot) + i};
        auto key = read(view.k, view.k.row(LayerId{l}, run.k_page, HeadId{h}, slot));
        if (setup_.unrotated_cache) {
          key = setup_.rope.rotated(l,
                                    key,
                                    view.rope_positions.at<std::int32_t>(
                                        ids_[at(s)], LayerId{l}, HeadId{h}, run.row + i));
        }
        keys.push_back(key);
        values.push_back(read(view.v, view.v.row(LayerId{l}, run.v_page, HeadId{h}, slot)));
      }
    });
    return dense_attention(query, keys, values);
  }

  Setup setup_;
  Random random_;
  PagedCache cache_;
  std::vector<SequenceId> ids_;
  std::vector<Head> heads_;  // [sequences, layers, kv_heads]
  std::vector<std::int32_t> seen_;
  std::vector<float> pristine_;
  std::vector<float> scores_;
};

}  // namespace kvtrim::test
