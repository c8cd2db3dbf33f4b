// SPDX-License-Identifier: Apache-2.0
#pragma once

// One policy of each kind that has a path on the device, with budgets that cut a table of about 30 rows. A new policy adds one
// line; one without a path is refused at compile time (tests/emulator/compile_fail).

#include <kvtrim/policy/chunk_kv.hpp>
#include <kvtrim/policy/cur_kv.hpp>
#include <kvtrim/policy/decorators.hpp>
#include <kvtrim/policy/expected_attention.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/full.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/lag_kv.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/pyramid_kv.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/policy/rkv.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/policy/tova.hpp>

#include <tuple>

namespace kvtrim::test {

/// `TopRows<Scores>` of 11 rows.
template <class P>
P best_rows() {
  typename P::Params p;
  p.budget = 11;
  p.sinks = 1;
  p.recent = 3;
  if constexpr (requires { p.scores.window; }) { p.scores.window = 3; }
  if constexpr (requires { p.scores.rope; }) {
    [[maybe_unused]] static constexpr double frequencies[] = {1, 0.25, 0.0625, 0.015625};
    p.scores.rope = {.inverse_frequencies = frequencies, .dim = 8, .same_for_all_layers = true};
  }
  return P(p);
}

/// Pages of 14 rows at most.
template <class Scores>
PageSelector<Scores> best_pages(PageScoreParams pages = {.heads = Reduction::max},
                                PageUnit unit = PageUnit::per_table) {
  typename PageSelector<Scores>::Params p;
  p.pages = pages;
  p.unit = unit;
  p.budget = 14;
  p.sinks = 2;
  p.window = 5;
  if constexpr (requires { p.scores.window; }) { p.scores.window = 4; }
  return PageSelector<Scores>(p);
}

inline auto every_policy() {
  ChunkKV<KeyDiffParams>::Params chunks;
  chunks.budget = 11;
  chunks.chunk = 3;
  chunks.sinks = chunks.recent = 2;
  return std::make_tuple(
      Full{},
      StreamingSink({.sinks = 2, .recent = 9}),
      StreamingSink<SinkForm::exact>({.sinks = 2, .recent = 9}),
      HeavyHitter({.heavy = 7, .recent = 3, .sinks = 1}),
      HeavyHitter<AccumulateParams, HeavyMode::greedy>({.heavy = 9}),
      HeavyHitter<AccumulateParams, HeavyMode::promote>({.heavy = 9, .recent = 4}),
      HeavyHitter<KeyDiffParams, HeavyMode::promote>({.heavy = 9, .recent = 4}),
      SnapKVSelector({.window = 4, .budget = 11, .kernel = 3}),
      PyramidKV({.snapkv = {.window = 4, .budget = 11, .kernel = 1}}),
      ChunkKV<KeyDiffParams>(chunks),
      LagKV({.budget = 11, .sinks = 2, .lag = 4}),
      RecursiveLagKV({.sinks = 2, .lag = 6, .keep = 2}),
      best_rows<External>(),
      best_rows<KeyDiff>(),
      best_rows<KeyNorm>(),
      best_rows<QFilter>(),
      best_rows<Random>(),
      best_rows<Tova>(),
      best_rows<RKV>(),
      best_rows<CurKV>(),
      best_rows<ExpectedAttention>(),
      best_rows<TopRows<PerLayer<KeyDiffParams>>>(),
      best_rows<TopRows<ValueNorm<KeyDiffParams>>>(),
      best_rows<TopRows<OutputNorm<RandomParams>>>(),
      best_pages<WindowParams>(),
      best_pages<AccumulateParams>(),
      best_pages<ExternalParams>());
}

}  // namespace kvtrim::test
