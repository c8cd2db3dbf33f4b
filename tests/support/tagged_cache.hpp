// SPDX-License-Identifier: Apache-2.0
#pragma once

// A PagedCache whose keys, values and one more sequence plane all say which token, layer and head they belong to, so
// that a row that was lost, duplicated or torn apart is noticed.

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/evict/evict.hpp>

#include "catch.hpp"
#include "support/fill.hpp"
#include "support/instances.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

namespace kvtrim::test {

class TaggedCache {
 public:
  struct Setup {
    std::int32_t page_size = 4;
    std::int32_t pages = 64;
    std::int32_t layers = 1;
    std::int32_t kv_heads = 1;
    TableScope scope = TableScope::group;
    std::int32_t sequences = 1;
    std::int32_t max_rows = 0;
    bool scores = false;
  };

  explicit TaggedCache(const Setup& setup)
      : cache({.pages = setup.pages,
               .page_size = setup.page_size,
               .layers = setup.layers,
               .kv_heads = setup.kv_heads,
               .key_dim = 2,
               .value_dim = 1,
               .scope = setup.scope,
               .max_sequences = setup.sequences,
               .max_rows = setup.max_rows,
               .scores = setup.scores}) {
    fill_unwritten(cache);
    const auto& p = cache.params();
    tags_.resize(static_cast<std::size_t>(p.max_sequences * p.layers * p.kv_heads * p.max_rows));
    tag_plane_ = SequencePlane::dense(tags_.data(), p.layers, p.kv_heads, p.max_rows);
    one_tag_plane_ = tag_plane_;
    for (std::int32_t s = 0; s < setup.sequences; ++s) { static_cast<void>(cache.try_create()); }
  }

  static std::int32_t tag(std::int32_t position, std::int32_t l, std::int32_t h) {
    return position * 64 + l * 8 + h;
  }

  /// Appends `n` tokens to sequence `s`.
  Status append(std::int32_t s, std::int32_t n) {
    const SequenceId id{s};
    const std::int32_t first = raw(cache.next_position(id));
    if (const Status status = cache.try_extend(id, n); status != Status::ok || n == 0) {
      return status;
    }
    const auto& p = cache.params();
    for (std::int32_t l = 0; l < p.layers; ++l) {
      std::vector<float> keys, values;
      for (std::int32_t i = 0; i < n; ++i) {
        for (std::int32_t h = 0; h < p.kv_heads; ++h) {
          keys.push_back(static_cast<float>(first + i));
          keys.push_back(static_cast<float>(l * 8 + h));
          values.push_back(static_cast<float>(tag(first + i, l, h)));
        }
      }
      REQUIRE(cache.write(id, LayerId{l}, {keys.data()}, {values.data()}) == kvtrim::Status::ok);
      for (std::int32_t h = 0; h < p.kv_heads; ++h) {
        for_each_row(s, l, h, [&](std::int32_t r, std::int32_t position) {
          if (position >= first) {
            tag_plane_.at<std::int32_t>(id, LayerId{l}, HeadId{h}, r) = tag(position, l, h);
          }
        });
      }
    }
    return Status::ok;
  }

  /// The whole cache, or sequence `s` alone, with the tag plane registered.
  CacheView view() {
    CacheView v = cache.view();
    v.more_planes = &tag_plane_;
    v.more_plane_count = 1;
    return v;
  }
  CacheView view(std::int32_t s) {
    CacheView v = cache.view(SequenceId{s});
    one_tag_plane_ = tag_plane_;
    one_tag_plane_.base += s * tag_plane_.sequence_stride;
    v.more_planes = &one_tag_plane_;
    v.more_plane_count = 1;
    return v;
  }

  /// Plans, applies and commits.
  template <class P>
  Report evict(const P& policy, const Observation& obs = {}, const PlanOptions& options = {}) {
    return evict(policy, view(), obs, options);
  }
  template <class P>
  Report evict(const P& policy,
               const CacheView& v,
               const Observation& obs = {},
               const PlanOptions& options = {}) {
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(v, obs)));
    return kvtrim::evict(policy, cache, v, obs, workspace, options);
  }

  /// Positions of the live rows, ascending, as the values say.
  std::vector<std::int32_t> kept(std::int32_t s, std::int32_t l = 0, std::int32_t h = 0) {
    std::vector<std::int32_t> positions;
    for_each_row(s, l, h, [&](std::int32_t r, std::int32_t) {
      positions.push_back(static_cast<std::int32_t>(number(cache.view().v, s, l, h, r, 0)) / 64);
    });
    std::sort(positions.begin(), positions.end());
    return positions;
  }

  /// Where tags disagree, or tables or counts are wrong; empty: nowhere. `held`: pages taken from the pool directly.
  std::string fault(std::int32_t held = 0) {
    const auto& p = cache.params();
    std::set<std::int32_t> pages;
    for (std::int32_t s = 0; s < p.max_sequences; ++s) {
      if (!cache.alive(SequenceId{s})) { continue; }
      for (std::int32_t l = 0; l < p.layers; ++l) {
        for (std::int32_t h = 0; h < p.kv_heads; ++h) {
          const auto where = " @ sequence " + std::to_string(s) + " layer " + std::to_string(l) +
                             " head " + std::to_string(h);
          const auto table = cache.page_table(SequenceId{s}, LayerId{l}, HeadId{h});
          const std::int32_t used = pages_used(s, l, h);
          for (std::int32_t e = 0; e < static_cast<std::int32_t>(table.size()); ++e) {
            const std::int32_t page = table[static_cast<std::size_t>(e)];
            if ((e < used) != (page >= 0)) { return "table: live ids first, then -1" + where; }
            if (page >= 0) { pages.insert(page); }
          }
          std::string text;
          std::set<std::int32_t> seen;
          for_each_row(s, l, h, [&](std::int32_t r, std::int32_t position) {
            const CacheView v = cache.view();
            if (!seen.insert(position).second) { text = "a position twice"; }
            if (number(v.k, s, l, h, r, 0) != static_cast<float>(position) ||
                number(v.k, s, l, h, r, 1) != static_cast<float>(l * 8 + h)) {
              text = "key";
            }
            if (number(v.v, s, l, h, r, 0) != static_cast<float>(tag(position, l, h))) {
              text = "value";
            }
            if (tags_checked &&
                tag_plane_.at<std::int32_t>(SequenceId{s}, LayerId{l}, HeadId{h}, r) !=
                    tag(position, l, h)) {
              text = "tag plane";
            }
            if (!text.empty()) { text += " of row " + std::to_string(r); }
          });
          if (!text.empty()) { return text + where; }
        }
      }
    }
    return static_cast<std::int32_t>(pages.size()) + held == cache.pool().in_use()
               ? ""
               : std::to_string(cache.pool().in_use()) + " pages in use, " +
                     std::to_string(pages.size()) + " in tables";
  }

  /// Every byte that an eviction could change.
  std::vector<std::byte> bytes() {
    std::vector<std::byte> all;
    const auto add = [&](const void* data, std::int64_t n) {
      const auto* const from = static_cast<const std::byte*>(data);
      all.insert(all.end(), from, from + n);
    };
    const auto& p = cache.params();
    const CacheView v = cache.view();
    for (std::int32_t s = 0; s < p.max_sequences; ++s) {
      for (std::int32_t l = 0; l < p.layers; ++l) {
        for (std::int32_t h = 0; h < p.kv_heads; ++h) {
          const auto table = cache.page_table(SequenceId{s}, LayerId{l}, HeadId{h});
          add(table.data(), static_cast<std::int64_t>(table.size_bytes()));
          const SequenceState& state = cache.state(SequenceId{s}, LayerId{l}, HeadId{h});
          for (const std::int64_t x : {std::int64_t{state.live_rows},
                                       std::int64_t{state.next_position},
                                       std::int64_t{state.next_rope_position},
                                       std::int64_t{state.append_row},
                                       std::int64_t{state.steps},
                                       static_cast<std::int64_t>(state.generation)}) {
            add(&x, 8);
          }
          for_each_row(s, l, h, [&](std::int32_t r, std::int32_t position) {
            add(&position, 4);
            for (const Plane& plane : {v.k, v.v}) {
              add(row(plane, s, l, h, r), plane.row_bytes());
            }
            add(v.rope_positions.row(SequenceId{s}, LayerId{l}, HeadId{h}, r), 4);
            add(tag_plane_.row(SequenceId{s}, LayerId{l}, HeadId{h}, r), 4);
          });
        }
      }
    }
    for (std::int32_t page = 0; page < p.pages; ++page) {
      add(cache.pool().ref_counts() + page, 4);
    }
    return all;
  }

  /// Calls f(row, position) for each live row in slot order.
  template <class F>
  void for_each_row(std::int32_t s, std::int32_t l, std::int32_t h, F&& f) {
    const SequenceState& state = cache.state(SequenceId{s}, LayerId{l}, HeadId{h});
    for (std::int32_t r = 0; r < state.extent(); ++r) {
      if (r == state.append_row) { continue; }
      f(r, raw(cache.view().positions.at<Position>(SequenceId{s}, LayerId{l}, HeadId{h}, r)));
    }
  }

  std::int32_t pages_used(std::int32_t s, std::int32_t l = 0, std::int32_t h = 0) {
    const std::int32_t extent = cache.state(SequenceId{s}, LayerId{l}, HeadId{h}).extent();
    return (extent + cache.params().page_size - 1) / cache.params().page_size;
  }

  PagedCache cache;
  bool tags_checked = true;  // a fork does not copy the tag plane: tests that fork switch this off

 private:
  std::byte* row(
      const Plane& plane, std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t r) {
    const std::int32_t size = cache.params().page_size;
    const auto table = cache.page_table(SequenceId{s}, LayerId{l}, HeadId{h});
    return plane.row(
        LayerId{l}, PageId{table[static_cast<std::size_t>(r / size)]}, HeadId{h}, Slot{r % size});
  }
  float number(const Plane& plane,
               std::int32_t s,
               std::int32_t l,
               std::int32_t h,
               std::int32_t r,
               std::int32_t d) {
    float x = 0;
    std::memcpy(&x, row(plane, s, l, h, r) + 4 * d, 4);
    return x;
  }

  std::vector<std::int32_t> tags_;
  SequencePlane tag_plane_;
  SequencePlane one_tag_plane_;
};

}  // namespace kvtrim::test
