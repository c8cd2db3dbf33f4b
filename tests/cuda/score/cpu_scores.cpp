// SPDX-License-Identifier: Apache-2.0
#include "cpu_scores.hpp"

#include <kvtrim/score/column_sums.hpp>
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
  scorer.score(view, s, l, h, obs, scratch, out);
  return out;
}

void cpu_column_sums(const AccumulateParams& params,
                     const CacheView& view,
                     const QueryBlock& queries,
                     SequenceId s,
                     LayerId l,
                     HeadId h) {
  std::vector<std::byte> scratch(column_sums_scratch_bytes(view.k.head_dim));
  accumulate_column_sums(params, view, s, l, h, queries, l, scratch);
}

}  // namespace kvtrim::test
