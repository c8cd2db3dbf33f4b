// SPDX-License-Identifier: Apache-2.0
// Keys of a kept set renumbered 0..k-1, against kvpress 0.5.5.
#include "golden_file.hpp"

#include <kvtrim/evict/evict.hpp>
#include <kvtrim/evict/rerotate.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/score/accumulated.hpp>

#include "catch.hpp"
#include "support/instances.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

using namespace kvtrim;
using golden::Layer;

namespace {

constexpr SequenceId seq{0};
constexpr LayerId layer{0};

Rope rope_of(const Layer& l) {
  Rope rope;
  rope.inverse_frequencies = l.file["inv_freq"].values;
  rope.dim = l.dim;
  rope.same_for_all_layers = true;
  return rope;
}

// Largest difference of a row of keys from its golden one, relative to the largest golden feature.
double worst_of(const float* got, const double* expected, std::int32_t dim) {
  double worst = 0;
  double largest = 0;
  for (std::int32_t d = 0; d < dim; ++d) {
    worst = std::max(worst, std::fabs(static_cast<double>(got[d]) - expected[d]));
    largest = std::max(largest, std::fabs(expected[d]));
  }
  return worst / largest;
}

}  // namespace

TEST_CASE("golden: rotate_key by new minus old position gives kvpress's keys",
          "[golden][rerotate][parity]") {
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    const auto& keep = l.file["rerotate_keep"].values;
    const auto& expected = l.file["rerotate_keys"];
    const Rope rope = rope_of(l);
    double worst = 0;
    std::size_t at = 0;
    for (std::int32_t h = 0; h < l.kv_heads; ++h) {
      for (std::size_t i = 0; i < keep.size(); ++i) {
        const auto old = static_cast<std::int32_t>(keep[i]);
        std::vector<float> key(static_cast<std::size_t>(l.dim));
        std::copy_n(l.keys.data() + (static_cast<std::ptrdiff_t>(h) * l.tokens + old) * l.dim,
                    l.dim,
                    key.begin());
        rotate_key(rope, rope.inverse_frequencies, static_cast<std::int32_t>(i) - old, key.data());
        worst = std::max(worst, worst_of(key.data(), expected.values.data() + at, l.dim));
        at += static_cast<std::size_t>(l.dim);
      }
    }
    INFO(shape);
    CHECK(at == expected.values.size());
    CHECK(worst < 1e-6);
  }
}

TEST_CASE("golden: an eviction with in-cache positions leaves kvpress's keys in the pages",
          "[golden][rerotate][parity]") {
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    const auto& keep = l.file["rerotate_keep"].values;
    const auto& expected = l.file["rerotate_keys"];
    for (const std::int32_t page_size : {1, 4, 16}) {
      PagedCache cache = l.make_cache(page_size, true);
      l.extend(cache, 0, l.tokens);
      std::vector<float> scores(static_cast<std::size_t>(l.kv_heads * l.tokens), 0.0F);
      for (std::int32_t h = 0; h < l.kv_heads; ++h) {
        for (const double r : keep) { scores[static_cast<std::size_t>(h * l.tokens + r)] = 1; }
      }
      Observation obs;
      obs.scores = SequencePlane::dense(scores.data(), 1, l.kv_heads, l.tokens);
      const HeavyHitter<AccumulateParams, HeavyMode::greedy> policy(
          {.heavy = static_cast<std::int64_t>(keep.size()),
           .recent = 0,
           .removal = Removal::stable_pack});
      const CacheView view = cache.view();
      const Rerotator rerotator(view, rope_of(l), PositionMode::in_cache);
      PlanOptions options;
      options.rerotator = &rerotator;
      std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
      const Report report = evict(policy, cache, view, obs, workspace, options);
      INFO(shape << ", page size " << page_size);
      REQUIRE(report.status == Status::ok);
      const auto kept = static_cast<std::int32_t>(keep.size());
      REQUIRE(cache.live_rows(seq) == kept);
      CHECK(cache.next_rope_position(seq) == kept);
      double worst = 0;
      std::size_t at = 0;
      for (std::int32_t h = 0; h < l.kv_heads; ++h) {
        for (std::int32_t r = 0; r < kept; ++r) {
          std::vector<float> key(static_cast<std::size_t>(l.dim));
          const CacheView after = cache.view();
          load_row(after.k, after.key(seq, layer, HeadId{h}, r), key.data());
          worst = std::max(worst, worst_of(key.data(), expected.values.data() + at, l.dim));
          at += key.size();
          REQUIRE(raw(after.position(seq, layer, HeadId{h}, r)) ==
                  static_cast<std::int32_t>(keep[static_cast<std::size_t>(r)]));
          REQUIRE(after.rope_position(seq, layer, HeadId{h}, r) == r);
        }
      }
      CHECK(worst < 1e-6);
    }
  }
}
