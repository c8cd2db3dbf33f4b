// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CPU side of parity tests: Eigen stays behind these functions.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/policy/accumulate_params.hpp>
#include <kvtrim/policy/window_params.hpp>

#include <cstdint>
#include <vector>

namespace kvtrim::test {

/// `WindowScorer` on one KV head.
std::vector<float> cpu_window_scores(const WindowParams& params,
                                     const CacheView& view,
                                     const QueryBlock& queries,
                                     SequenceId s,
                                     LayerId l,
                                     HeadId h);

/// `accumulate_column_sums` on one KV head.
void cpu_column_sums(const AccumulateParams& params,
                     const CacheView& view,
                     const QueryBlock& queries,
                     SequenceId s,
                     LayerId l,
                     HeadId h);

/// `accumulate_probabilities` on one KV head: probabilities [group, row_stride].
void cpu_probabilities(const AccumulateParams& params,
                       const CacheView& view,
                       SequenceId s,
                       LayerId l,
                       HeadId h,
                       const float* probabilities,
                       std::int32_t group,
                       std::int64_t row_stride);

/// `AccumulatedScorer` on one KV head.
std::vector<float> cpu_accumulated_scores(
    const AccumulateParams& params, const CacheView& view, SequenceId s, LayerId l, HeadId h);

}  // namespace kvtrim::test
