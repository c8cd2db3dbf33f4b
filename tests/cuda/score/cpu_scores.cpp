// SPDX-License-Identifier: Apache-2.0
#include "cpu_scores.hpp"

#include <kvtrim/observe/accumulate.hpp>
#include <kvtrim/observe/column_sums.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/window.hpp>

#include <cstddef>

namespace kvtrim::test {

std::vector<float> cpu_window_scores(const WindowParams& params,
                                     const CacheView& view,
                                     const QueryBlock& queries,
                                     SequenceId s,
                                     LayerId l,
                                     HeadId h) {
  Observation obs;
  obs.queries = queries;
  PlanShape shape;
  shape.kv_heads = view.kv_heads;
  shape.query_heads = queries.query_heads;
  shape.query_rows = params.window;
  shape.head_dim = view.k.head_dim;
  shape.max_rows = view.live_rows(s, l, h) + 1;
  const WindowScorer scorer(params);
  std::vector<std::byte> scratch(scorer.scratch_bytes(shape));
  std::vector<float> out(static_cast<std::size_t>(view.state(s, l, h).extent()));
  scorer.score({view, s, l, h}, obs, scratch, out);
  return out;
}

void cpu_column_sums(const AccumulateParams& params,
                     const CacheView& view,
                     const QueryBlock& queries,
                     SequenceId s,
                     LayerId l,
                     HeadId h) {
  std::vector<std::byte> scratch(column_sums_scratch_bytes(view.k.head_dim));
  accumulate_column_sums(params, {view, s, l, h}, queries, l, scratch);
}

void cpu_probabilities(const AccumulateParams& params,
                       const CacheView& view,
                       SequenceId s,
                       LayerId l,
                       HeadId h,
                       const float* probabilities,
                       std::int32_t group,
                       std::int64_t row_stride) {
  accumulate_probabilities(params, {view, s, l, h}, {probabilities, group, row_stride});
}

std::vector<float> cpu_accumulated_scores(
    const AccumulateParams& params, const CacheView& view, SequenceId s, LayerId l, HeadId h) {
  std::vector<float> out(static_cast<std::size_t>(view.live_rows(s, l, h)));
  AccumulatedScorer(params).score({view, s, l, h}, {}, {}, out);
  return out;
}

}  // namespace kvtrim::test
